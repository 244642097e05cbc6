//! Snapshots that cannot become an image, or must not.

use std::fs;
use std::sync::atomic::AtomicBool;

use covey_home::manifest::{Blob, Content, Entry, EntryBody, LinkTable, Xattr, Xattrs};
use covey_home::{Block, Excludes, NoProgress, Upload};
use covey_mount::{Image, ImageError, ImageRequest};
use covey_types::Fault;

use crate::made::{dir, file, home, image, meta};

fn check_refused(
    entries: impl FnOnce(&dyn Upload) -> Vec<(&'static [u8], Entry)>,
    links: &LinkTable,
    matches: impl FnOnce(&ImageError) -> bool,
) {
    let scratch = tempfile::tempdir().unwrap();
    let (store, root) = home(entries, links);
    let error = image(&store, root, &Excludes::none(), scratch.path()).unwrap_err();
    assert!(matches(&error), "{error}");
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0, "nothing is left of it");
}

#[test]
fn an_attribute_that_is_too_long_for_the_format_is_refused_by_its_path() {
    let with_attribute = |upload: &dyn Upload| {
        let value = vec![1; 65_536];
        let xattrs = Xattrs(vec![Xattr { name: b"user.large".to_vec(), value }]).encode();
        let block = Block::of(&xattrs).unwrap();
        upload.put(&block).unwrap();
        let mut entry = file(b"x");
        entry.meta.xattrs = Blob::Blocks { len: xattrs.len() as u64, blocks: vec![block.hash()] };
        vec![(&b"dir"[..], dir(upload, &[(b"file", entry)]))]
    };
    check_refused(with_attribute, &LinkTable::default(), |error| {
        matches!(error, ImageError::Beyond { path, .. } if path == "dir/file")
            && error.fault() == Fault::Limit
    });
}

#[test]
fn a_size_that_no_image_can_say_is_refused_by_its_path() {
    let content = Content::Nothing { size: i64::MAX as u64 };
    let entry = Entry { meta: meta(0o644, 0), body: EntryBody::File(content) };
    check_refused(
        |_| vec![(b"huge", entry)],
        &LinkTable::default(),
        |error| matches!(error, ImageError::Beyond { path, .. } if path == "huge"),
    );
}

#[test]
fn names_of_one_inode_that_differ_are_refused() {
    let links = LinkTable::new([vec![b"a".to_vec(), b"b".to_vec()]]);
    check_refused(
        |_| vec![(b"a", file(b"1")), (b"b", file(b"2"))],
        &links,
        |error| {
            matches!(error, ImageError::Object { path, .. } if path == "b") && error.fault() == Fault::Invalid
        },
    );
}

#[test]
fn a_part_of_the_manifest_that_is_missing_is_named() {
    let scratch = tempfile::tempdir().unwrap();
    let (store, root) =
        home(|upload| vec![(b"dir", dir(upload, &[(b"f", file(b"1"))]))], &LinkTable::default());
    let top = covey_home::object::read_root(&store, &root).unwrap();
    let listing = covey_home::object::read_listing(&store, &top.listing).unwrap();
    let EntryBody::Directory { listing } = listing.entries[0].1.body else { panic!("a directory") };
    assert!(store.remove(&listing));
    let error = image(&store, root, &Excludes::none(), scratch.path()).unwrap_err();
    assert!(matches!(&error, ImageError::Object { path, .. } if path == "dir"), "{error}");
    assert_eq!(error.fault(), Fault::NotFound);
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}

#[test]
fn a_cancelled_image_leaves_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let (store, root) = home(|_| vec![(b"a", file(b"1"))], &LinkTable::default());
    let request = ImageRequest {
        root,
        store: &store,
        owner: (0, 0),
        excludes: &Excludes::none(),
        cancel: &AtomicBool::new(true),
        progress: &NoProgress,
    };
    assert!(matches!(Image::prepare(&request, scratch.path()), Err(ImageError::Cancelled)));
    assert_eq!(fs::read_dir(scratch.path()).unwrap().count(), 0);
}
