//! Manifests and targets made by somebody who means harm.

use std::fs;
use std::os::unix::fs::symlink;

use covey_home::manifest::{
    Blob, Content, ContentMap, DeviceNumber, Entry, EntryBody, Extent, LinkTable, ListingBuilder,
    ListingPart, Meta, Root, Time, Xattr, Xattrs, decode_listing_object,
};
use covey_home::{Block, BlockStore, MaterializeError, MemoryStore};
use covey_types::{BlockHash, RootHash};
use proptest::prelude::*;

use crate::support::{self, materialize_dir, noise, secure_dir};

fn meta(mode: u16) -> Meta {
    Meta { mode, mtime: Time { seconds: 1, nanoseconds: 2 }, xattrs: Blob::empty() }
}

fn file(bytes: &[u8]) -> Entry {
    let content = Content::Whole { size: bytes.len() as u64, block: BlockHash::of(bytes) };
    Entry { meta: meta(0o644), body: EntryBody::File(content) }
}

fn put(store: &MemoryStore, blocks: &[&[u8]]) {
    let upload = store.upload().unwrap();
    for bytes in blocks {
        upload.put(&Block::of(bytes).unwrap()).unwrap();
    }
    upload.finish().unwrap();
}

/// Stores a home with these entries and this link table.
fn home_of(store: &MemoryStore, entries: &[(&[u8], Entry)], links: &[u8]) -> RootHash {
    let mut builder = ListingBuilder::default();
    for (name, entry) in entries {
        builder.push(name, &entry.encode());
    }
    let mut objects = Vec::new();
    let listing = builder
        .finish(|object| {
            objects.push(object.to_vec());
            Ok::<_, std::convert::Infallible>(BlockHash::of(object))
        })
        .unwrap();
    let links = Blob::Inline(links.to_vec());
    let root = Root { meta: meta(0o755), listing, files: 1, bytes: 1, links }.encode();
    objects.push(root.clone());
    put(store, &objects.iter().map(Vec::as_slice).collect::<Vec<_>>());
    RootHash::of(&root)
}

#[test]
fn names_that_lead_out_are_refused() {
    for name in [&b".."[..], b".", b"a/b", b"a\0b", b"/etc"] {
        let store = MemoryStore::new();
        put(&store, &[b"x"]);
        let root = home_of(&store, &[(name, file(b"x"))], b"");
        let scratch = support::scratch();
        let target = scratch.path().join("deep/target");
        fs::create_dir_all(&target).unwrap();
        let error = materialize_dir(root, &target, &store, None).unwrap_err();
        let MaterializeError::Incomplete { report } = error else { panic!("{error}") };
        assert_eq!(report.gaps[0].fault, covey_types::Fault::Invalid);
        assert_eq!(fs::read_dir(&target).unwrap().count(), 0);
        assert_eq!(fs::read_dir(scratch.path().join("deep")).unwrap().count(), 1);
    }
}

#[test]
fn names_that_are_repeated_or_not_sorted_are_refused() {
    for names in [[&b"a"[..], b"a"], [b"b", b"a"]] {
        let store = MemoryStore::new();
        put(&store, &[b"x"]);
        let root = home_of(&store, &[(names[0], file(b"x")), (names[1], file(b"x"))], b"");
        let scratch = support::scratch();
        let error = materialize_dir(root, &scratch.path().join("target"), &store, None).unwrap_err();
        assert!(matches!(error, MaterializeError::Incomplete { .. }), "{error}");
    }
}

#[test]
fn a_link_in_the_target_is_replaced_and_never_followed() {
    let scratch = support::scratch();
    let outside = scratch.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), b"precious").unwrap();
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("dir")).unwrap();
    fs::write(home.join("dir/file"), b"new").unwrap();
    fs::write(home.join("file"), b"new").unwrap();
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, None).unwrap().root;
    let target = scratch.path().join("target");
    fs::create_dir(&target).unwrap();
    symlink(&outside, target.join("dir")).unwrap();
    symlink(outside.join("file"), target.join("file")).unwrap();
    symlink(&outside, target.join("extra")).unwrap();
    materialize_dir(root, &target, &store, None).unwrap();
    assert_eq!(fs::read(outside.join("file")).unwrap(), b"precious");
    assert!(fs::symlink_metadata(target.join("dir")).unwrap().is_dir());
    assert!(fs::symlink_metadata(target.join("file")).unwrap().is_file());
    assert!(!target.join("extra").exists());
    assert_eq!(fs::read_dir(&outside).unwrap().count(), 1);
}

#[test]
fn an_existing_file_is_not_written_through() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    fs::write(home.join("file"), b"new").unwrap();
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, None).unwrap().root;
    let target = scratch.path().join("target");
    fs::create_dir(&target).unwrap();
    fs::write(scratch.path().join("elsewhere"), b"precious").unwrap();
    fs::hard_link(scratch.path().join("elsewhere"), target.join("file")).unwrap();
    materialize_dir(root, &target, &store, None).unwrap();
    assert_eq!(fs::read(scratch.path().join("elsewhere")).unwrap(), b"precious");
    assert_eq!(fs::read(target.join("file")).unwrap(), b"new");
}

#[test]
fn a_link_table_that_lies_is_named() {
    let table = |groups: Vec<Vec<Vec<u8>>>| LinkTable { groups }.encode();
    let lies = [
        table(vec![vec![b"a".to_vec(), b"nowhere".to_vec()]]),
        table(vec![vec![b"a".to_vec(), b"b".to_vec()]]),
        table(vec![vec![b"a".to_vec(), b"../x".to_vec()]]),
        table(vec![vec![b"a".to_vec()]]),
        vec![0xff; 9],
    ];
    for links in lies {
        let store = MemoryStore::new();
        put(&store, &[b"x", b"y"]);
        let root = home_of(&store, &[(b"a", file(b"x")), (b"b", file(b"y"))], &links);
        let scratch = support::scratch();
        let error = materialize_dir(root, &scratch.path().join("target"), &store, None).unwrap_err();
        assert_eq!(error.fault(), covey_types::Fault::Invalid, "{error}");
        assert!(!scratch.path().join("x").exists());
    }
}

#[test]
fn a_file_that_claims_another_length_is_a_gap_and_the_rest_comes_up() {
    let store = MemoryStore::new();
    put(&store, &[b"short", b"right"]);
    let content = Content::Whole { size: 8 << 20, block: BlockHash::of(b"short") };
    let liar = Entry { meta: meta(0o644), body: EntryBody::File(content) };
    let root = home_of(&store, &[(b"liar", liar), (b"right", file(b"right"))], b"");
    let scratch = support::scratch();
    let target = scratch.path().join("target");
    let error = materialize_dir(root, &target, &store, None).unwrap_err();
    let MaterializeError::Incomplete { report } = error else { panic!("{error}") };
    assert_eq!(report.gaps.len(), 1);
    assert_eq!(report.gaps[0].path, "liar");
    assert_eq!(fs::read(target.join("right")).unwrap(), b"right");
    assert!(!target.join("liar").exists());
}

#[test]
fn an_object_of_another_kind_is_no_root_and_no_listing() {
    let scratch = support::scratch();
    let store = MemoryStore::new();
    put(&store, &[b"not an object", b""]);
    for bytes in [&b"not an object"[..], b"", b"absent"] {
        let target = scratch.path().join("target");
        let error = materialize_dir(RootHash::of(bytes), &target, &store, None).unwrap_err();
        assert!(matches!(error, MaterializeError::Root { .. }), "{error}");
        assert!(!target.exists(), "nothing is touched before the root is known");
    }
}

fn samples() -> Vec<Vec<u8>> {
    let xattrs = Xattrs(vec![Xattr { name: b"user.a".to_vec(), value: vec![1, 2] }]);
    let map = ContentMap {
        extents: vec![Extent { start: 5, len: 10 }, Extent { start: 100, len: 1 }],
        blocks: vec![BlockHash::of(b"x")],
    };
    let sparse = Content::Mapped { size: 1000, map: Blob::Inline(map.encode()) };
    let with_xattrs = Meta { xattrs: Blob::Inline(xattrs.encode()), ..meta(0o4755) };
    let mut builder = ListingBuilder::default();
    builder.push(
        b"dir",
        &Entry { meta: with_xattrs.clone(), body: EntryBody::Directory { listing: BlockHash::of(b"d") } }
            .encode(),
    );
    builder.push(b"fifo", &Entry { meta: meta(0), body: EntryBody::Fifo }.encode());
    builder.push(b"file", &file(b"content").encode());
    let number = DeviceNumber { major: 1, minor: 300 };
    builder.push(b"g-device", &Entry { meta: meta(0), body: EntryBody::CharacterDevice(number) }.encode());
    builder.push(b"h-socket", &Entry { meta: meta(0), body: EntryBody::Socket }.encode());
    builder.push(
        b"link",
        &Entry { meta: meta(0o777), body: EntryBody::Symlink { target: vec![0xff] } }.encode(),
    );
    builder.push(b"sparse", &Entry { meta: meta(0o600), body: EntryBody::File(sparse) }.encode());
    let mut listing = Vec::new();
    builder
        .finish(|object| {
            listing = object.to_vec();
            Ok::<_, std::convert::Infallible>(BlockHash::of(object))
        })
        .unwrap();
    let links = LinkTable::new([vec![b"a".to_vec(), b"b/c".to_vec()]]);
    let root = Root {
        meta: with_xattrs,
        listing: BlockHash::of(b"l"),
        files: 2,
        bytes: 3,
        links: Blob::Inline(links.encode()),
    };
    vec![listing, root.encode(), links.encode(), xattrs.encode(), map.encode()]
}

/// Decodes with every decoder; what is accepted must be the encoding of what it was decoded to.
fn decode_with_all(bytes: &[u8]) {
    if let Ok(root) = Root::decode(bytes) {
        assert_eq!(root.encode(), bytes);
    }
    if let Ok(table) = LinkTable::decode(bytes) {
        assert_eq!(table.encode(), bytes);
    }
    if let Ok(xattrs) = Xattrs::decode(bytes) {
        assert_eq!(xattrs.encode(), bytes);
    }
    if let Ok(map) = ContentMap::decode(bytes, 1000) {
        assert_eq!(map.encode(), bytes);
    }
    if let Ok(ListingPart::Entries(entries)) = decode_listing_object(bytes) {
        let mut builder = ListingBuilder::default();
        entries.iter().for_each(|(name, entry)| builder.push(name, &entry.encode()));
        let again = builder.finish(|object| {
            assert_eq!(object, bytes);
            Ok::<_, std::convert::Infallible>(BlockHash::of(object))
        });
        assert!(again.is_ok());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn decoders_take_any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..300), kind in 0_u8..5) {
        decode_with_all(&bytes);
        let mut object = b"CVYO\x01".to_vec();
        object.push(kind);
        object.extend_from_slice(&bytes);
        decode_with_all(&object);
    }

    #[test]
    fn decoders_take_damaged_objects(seed in any::<u64>(), cut in any::<u16>()) {
        for mut sample in samples() {
            decode_with_all(&sample);
            let random = noise(seed, 8);
            for pair in random.chunks_exact(2) {
                let at = usize::from(pair[0]) * sample.len() / 256;
                sample[at] = pair[1];
                decode_with_all(&sample);
            }
            sample.truncate(usize::from(cut) % (sample.len() + 1));
            decode_with_all(&sample);
        }
    }
}
