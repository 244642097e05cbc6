//! Any bytes as an object of a manifest: no panic, no memory beyond the limits, and what is read encodes to itself.

#![no_main]

use covey_home::manifest::{ContentMap, LinkTable, Root, Xattrs, decode_listing_object};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    drop(decode_listing_object(bytes));
    drop(ContentMap::decode(bytes, 1 << 40));
    if let Ok(root) = Root::decode(bytes) {
        assert_eq!(root.encode(), bytes);
    }
    if let Ok(links) = LinkTable::decode(bytes) {
        assert_eq!(links.encode(), bytes);
    }
    if let Ok(xattrs) = Xattrs::decode(bytes) {
        assert_eq!(xattrs.encode(), bytes);
    }
});
