//! The bytes of format version 1, kept beside the tests: what was written once is read for ever.
//!
//! `COVEY_BLESS=1` writes the files anew, which is right only together with a new format version.

use std::fs;
use std::path::PathBuf;

use covey_home::manifest::{
    Blob, Content, ContentMap, DeviceNumber, Entry, EntryBody, Extent, LinkTable, ListingBuilder, Meta, Root,
    Time, Xattr, Xattrs,
};
use covey_home::{Block, BlockStore, MasterKey, PackStore};
use covey_types::BlockHash;

use crate::support;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn check(name: &str, bytes: &[u8]) {
    if std::env::var_os("COVEY_BLESS").is_some() {
        fs::write(golden(name), bytes).unwrap();
    }
    assert_eq!(fs::read(golden(name)).unwrap(), bytes, "{name}");
}

fn meta(mode: u16, seconds: i64) -> Meta {
    Meta { mode, mtime: Time { seconds, nanoseconds: 999_999_999 }, xattrs: Blob::empty() }
}

fn listing() -> Vec<u8> {
    let hash = |text: &str| BlockHash::of(text.as_bytes());
    let xattrs = Xattrs(vec![Xattr { name: b"user.note".to_vec(), value: b"v".to_vec() }]).encode();
    let sparse = ContentMap {
        extents: vec![Extent { start: 4096, len: 8192 }, Extent { start: 1 << 40, len: 1 }],
        blocks: vec![hash("first window"), hash("last window")],
    };
    let large = ContentMap {
        extents: vec![Extent { start: 0, len: 9 << 20 }],
        blocks: vec![hash("0"), hash("1"), hash("2")],
    };
    let number = |major, minor| DeviceNumber { major, minor };
    let mapped =
        |size, map: &ContentMap| EntryBody::File(Content::Mapped { size, map: Blob::Inline(map.encode()) });
    let entries = [
        ("dir", Entry { meta: meta(0o1777, 0), body: EntryBody::Directory { listing: hash("listing") } }),
        ("empty", Entry { meta: meta(0, -1), body: EntryBody::File(Content::Nothing { size: 0 }) }),
        ("fifo", Entry { meta: meta(0o600, 1), body: EntryBody::Fifo }),
        ("hole", Entry { meta: meta(0o644, 2), body: EntryBody::File(Content::Nothing { size: 1 << 20 }) }),
        ("large", Entry { meta: meta(0o644, 3), body: mapped(9 << 20, &large) }),
        ("link", Entry { meta: meta(0o777, 4), body: EntryBody::Symlink { target: b"\xff/..".to_vec() } }),
        (
            "noted",
            Entry {
                meta: Meta { xattrs: Blob::Inline(xattrs), ..meta(0o4755, 5) },
                body: EntryBody::File(Content::Whole { size: 7, block: hash("content") }),
            },
        ),
        ("node-block", Entry { meta: meta(0o660, 7), body: EntryBody::BlockDevice(number(8, 1)) }),
        (
            "node-char",
            Entry { meta: meta(0o620, 8), body: EntryBody::CharacterDevice(number(4095, 1 << 19)) },
        ),
        ("socket", Entry { meta: meta(0o755, 9), body: EntryBody::Socket }),
        ("sparse", Entry { meta: meta(0o644, 6), body: mapped((1 << 40) + 2, &sparse) }),
    ];
    let mut builder = ListingBuilder::default();
    for (name, entry) in &entries {
        builder.push(name.as_bytes(), &entry.encode());
    }
    let mut bytes = Vec::new();
    builder
        .finish(|object| {
            bytes = object.to_vec();
            Ok::<_, std::convert::Infallible>(BlockHash::of(object))
        })
        .unwrap();
    bytes
}

#[test]
fn manifest_objects_have_the_bytes_of_version_1() {
    let listing = listing();
    check("listing-v1.bin", &listing);
    let links = LinkTable::new([vec![b"b".to_vec(), b"a/x".to_vec()], vec![b"c".to_vec(), b"d".to_vec()]]);
    check("links-v1.bin", &links.encode());
    let root = Root {
        meta: meta(0o755, 1_700_000_000),
        listing: BlockHash::of(&listing),
        files: 5,
        bytes: 12_345_678_901,
        links: Blob::Inline(links.encode()),
    };
    check("root-v1.bin", &root.encode());
    assert_eq!(Root::decode(&fs::read(golden("root-v1.bin")).unwrap()).unwrap(), root);
}

#[test]
fn a_pack_of_version_1_is_read() {
    let text = b"the same line\n".repeat(100);
    let blocks: [&[u8]; 3] = [b"raw", &text, b""];
    let scratch = support::scratch();
    let packs = scratch.path().join("orgs/org/packs");
    if std::env::var_os("COVEY_BLESS").is_some() {
        let store = PackStore::open_directory(scratch.path(), "org").unwrap();
        let upload = store.upload().unwrap();
        for bytes in blocks {
            upload.put(&Block::of(bytes).unwrap()).unwrap();
        }
        upload.finish().unwrap();
        let pack = fs::read_dir(&packs).unwrap().next().unwrap().unwrap().path();
        fs::rename(pack, golden("pack-v1.bin")).unwrap();
    }
    fs::create_dir_all(&packs).unwrap();
    fs::copy(golden("pack-v1.bin"), packs.join("000102030405060708090a0b0c0d0e0f.pack")).unwrap();
    let store = PackStore::open_directory(scratch.path(), "org").unwrap();
    assert_eq!(store.problems(), Vec::<String>::new());
    for bytes in blocks {
        assert_eq!(store.get(&BlockHash::of(bytes)).unwrap(), bytes);
    }
    assert_eq!(store.verify_packs().unwrap().blocks, 3);
}

/// The key that the golden files of an encrypted store were made with; it protects nothing.
const GOLDEN_MASTER: &str = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";

#[test]
fn an_encrypted_store_of_version_1_is_read() {
    let text = b"the same line\n".repeat(100);
    // More than one piece.
    let noise = support::noise(1, 200_000);
    let blocks: [&[u8]; 4] = [b"raw", &text, b"", &noise];
    let master = MasterKey::from_text(GOLDEN_MASTER).unwrap();
    let scratch = support::scratch();
    let org = scratch.path().join("orgs/org");
    let open = || PackStore::open_directory_with(scratch.path(), "org", Some(&master)).unwrap();
    if std::env::var_os("COVEY_BLESS").is_some() {
        let store = open();
        let upload = store.upload().unwrap();
        for bytes in blocks {
            upload.put(&upload.hasher().block(bytes).unwrap()).unwrap();
        }
        upload.finish().unwrap();
        let pack = fs::read_dir(org.join("packs")).unwrap().next().unwrap().unwrap().path();
        let stem = pack.file_stem().unwrap().to_str().unwrap().to_owned();
        fs::write(golden("pack-sealed-v1.name"), stem).unwrap();
        fs::rename(pack, golden("pack-sealed-v1.bin")).unwrap();
        fs::rename(org.join("keys/ring"), golden("keys-v1.txt")).unwrap();
    }
    // The name of a pack is part of its key.
    let name = fs::read_to_string(golden("pack-sealed-v1.name")).unwrap();
    fs::create_dir_all(org.join("packs")).unwrap();
    fs::create_dir_all(org.join("keys")).unwrap();
    fs::copy(golden("pack-sealed-v1.bin"), org.join(format!("packs/{}.pack", name.trim()))).unwrap();
    fs::copy(golden("keys-v1.txt"), org.join("keys/ring")).unwrap();
    let store = open();
    assert_eq!(store.problems(), Vec::<String>::new());
    for bytes in blocks {
        assert_eq!(store.get(&store.hasher().hash(bytes)).unwrap(), bytes);
    }
    assert_eq!(store.verify_packs().unwrap().blocks, 4);
}
