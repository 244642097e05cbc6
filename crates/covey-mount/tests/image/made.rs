//! One tree has one image, byte for byte.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use covey_home::manifest::{
    Blob, Content, Entry, EntryBody, LinkTable, ListingBuilder, Meta, Root, Time, Xattr, Xattrs,
};
use covey_home::{Block, BlockStore, Excludes, MemoryStore, NoProgress, Upload};
use covey_mount::{Image, ImageError, ImageRequest};
use covey_types::{BlockHash, RootHash};

pub(crate) fn meta(mode: u16, seconds: i64) -> Meta {
    Meta { mode, mtime: Time { seconds, nanoseconds: 123_456_789 }, xattrs: Blob::empty() }
}

pub(crate) fn file(bytes: &[u8]) -> Entry {
    let content = Content::Whole { size: bytes.len() as u64, block: BlockHash::of(bytes) };
    Entry { meta: meta(0o644, 1_600_000_000), body: EntryBody::File(content) }
}

fn put(upload: &dyn Upload, bytes: &[u8]) -> BlockHash {
    let block = Block::of(bytes).unwrap();
    upload.put(&block).unwrap();
    block.hash()
}

pub(crate) fn dir(upload: &dyn Upload, entries: &[(&[u8], Entry)]) -> Entry {
    let mut builder = ListingBuilder::default();
    for (name, entry) in entries {
        builder.push(name, &entry.encode());
    }
    let listing = builder.finish(|object| Ok::<_, ()>(put(upload, object))).unwrap();
    Entry { meta: meta(0o755, -5), body: EntryBody::Directory { listing } }
}

/// Puts a home with these entries into a new store.
pub(crate) fn home(
    entries: impl FnOnce(&dyn Upload) -> Vec<(&'static [u8], Entry)>,
    links: &LinkTable,
) -> (MemoryStore, RootHash) {
    let store = MemoryStore::new();
    let upload = store.upload().unwrap();
    let entries = entries(&*upload);
    let top = dir(&*upload, &entries);
    let EntryBody::Directory { listing } = top.body else { unreachable!("a directory") };
    let links = Blob::Inline(links.encode());
    let root = Root { meta: meta(0o700, 1_234_567_890), listing, files: 0, bytes: 0, links };
    let root = put(&*upload, &root.encode());
    upload.finish().unwrap();
    (store, RootHash::from_bytes(*root.as_bytes()))
}

pub(crate) fn image(
    store: &MemoryStore,
    root: RootHash,
    excludes: &Excludes,
    dir: &Path,
) -> Result<Image, ImageError> {
    let request = ImageRequest {
        root,
        store,
        owner: (1000, 1001),
        excludes,
        cancel: &AtomicBool::new(false),
        progress: &NoProgress,
    };
    Image::prepare(&request, dir)
}

fn sample() -> (MemoryStore, RootHash) {
    let links = LinkTable::new([vec![b"dir/linked".to_vec(), b"zz".to_vec()]]);
    let mut attributed = file(b"with attributes");
    let xattrs = Xattrs(vec![Xattr { name: b"user.note".to_vec(), value: b"n".to_vec() }]);
    attributed.meta.xattrs = Blob::Inline(xattrs.encode());
    let link =
        |target: &[u8]| Entry { meta: meta(0o777, 7), body: EntryBody::Symlink { target: target.to_vec() } };
    let hole = Entry { meta: meta(0o600, 8), body: EntryBody::File(Content::Nothing { size: 1 << 40 }) };
    home(
        |upload| {
            let inner = dir(upload, &[(b"+", file(b"plus")), (b"linked", file(b"shared"))]);
            let long: &'static [u8] = &[b'n'; 255];
            vec![
                (b"attributed", attributed),
                (b"dir", inner),
                (b"empty", dir(upload, &[])),
                (b"fifo", Entry { meta: meta(0o640, 9), body: EntryBody::Fifo }),
                (b"hole", hole),
                (b"link", link(b"target")),
                (b"long-link", link(&[b't'; 4000])),
                (long, file(b"long name")),
                (b"zz", file(b"shared")),
            ]
        },
        &links,
    )
}

#[test]
fn the_bytes_of_an_image_are_those_of_version_1() {
    let scratch = tempfile::tempdir().unwrap();
    let (store, root) = sample();
    let image = image(&store, root, &Excludes::none(), scratch.path()).unwrap();
    let facts = image.facts();
    assert_eq!((facts.entries, facts.files, facts.excluded), (11, 6, 0));
    let hash = |kind: &str| {
        let path = scratch.path().join(format!("{}.{kind}", image.id()));
        BlockHash::of(&fs::read(path).unwrap()).to_string()
    };
    let golden = include_str!("../golden/image-v1.txt");
    let found = format!(
        "id {}\nerofs {}\nneeds {}\nobjects {}\n",
        image.id(),
        hash("erofs"),
        hash("needs"),
        hash("objects")
    );
    assert_eq!(found, golden, "a change of these bytes needs another version in the image's name");
}

#[test]
fn an_image_is_written_once_and_removed_as_a_whole() {
    let scratch = tempfile::tempdir().unwrap();
    let (store, root) = sample();
    let first = image(&store, root, &Excludes::none(), scratch.path()).unwrap();
    let written = fs::metadata(first.path()).unwrap().modified().unwrap();
    store.set_unavailable(true);
    let again = image(&store, root, &Excludes::none(), scratch.path()).unwrap();
    assert_eq!(fs::metadata(again.path()).unwrap().modified().unwrap(), written);
    let other = image(&store, root, &Excludes::parse("zz"), scratch.path());
    assert!(other.is_err(), "other excludes are another image");
    store.set_unavailable(false);
    let other = image(&store, root, &Excludes::parse("zz"), scratch.path()).unwrap();
    assert_ne!(other.id(), first.id());
    assert_eq!((other.facts().entries, other.facts().excluded), (10, 1));
    first.remove().unwrap();
    other.remove().unwrap();
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0, "no draft is left either");
}

#[test]
fn contents_are_listed_in_the_order_of_the_tree() {
    let scratch = tempfile::tempdir().unwrap();
    let (store, root) = sample();
    let image = image(&store, root, &Excludes::none(), scratch.path()).unwrap();
    let sizes: Vec<u64> = image.needs().unwrap().map(|content| content.unwrap().size()).collect();
    // The home's own files first, then those of its directories; the shared inode once.
    assert_eq!(sizes, [15, 9, 6, 4]);
    // The image knows its part of the manifest without the store.
    let empty = MemoryStore::new();
    let objects = image.objects_first(&empty);
    let read = covey_home::object::read_root(&objects, &root).unwrap();
    assert_eq!(covey_home::object::read_listing(&objects, &read.listing).unwrap().entries.len(), 9);
}
