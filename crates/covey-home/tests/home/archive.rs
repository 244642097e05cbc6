//! Archives: there and back without a loss, as other programs read and write them, and hostile ones.

use std::fs;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;

use covey_home::archive::{ArchiveError, Imported, export, import};
use covey_home::{BlockStore, MemoryStore, NoProgress};
use covey_types::RootHash;
use proptest::prelude::*;

use crate::property::{build, tree};
use crate::support::{self, dump, materialize_dir, secure_dir};

fn exported(store: &dyn BlockStore, root: &RootHash) -> Vec<u8> {
    let mut out = Vec::new();
    export(store, root, &mut out, &NoProgress).unwrap();
    out
}

fn imported(store: &dyn BlockStore, archive: &[u8]) -> Result<Imported, ArchiveError> {
    import(store, &mut &archive[..], &AtomicBool::new(false), &NoProgress)
}

fn refusal(archive: &[u8]) -> String {
    imported(&MemoryStore::new(), archive).unwrap_err().to_string()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, max_shrink_iters: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_state_is_the_same_state_after_an_archive(tree in tree()) {
        let scratch = support::scratch();
        let home = scratch.path().join("home");
        build(&tree, &home);
        let store = MemoryStore::new();
        let secured = secure_dir(&home, &store, None).unwrap();
        let archive = exported(&store, &secured.root);
        let other = MemoryStore::new();
        let back = imported(&other, &archive).unwrap();
        prop_assert_eq!(back.root, secured.root);
        prop_assert_eq!((back.report.files, back.report.bytes), (secured.files, secured.bytes));
        prop_assert_eq!(covey_home::verify(&other, &back.root).unwrap().problems, Vec::<String>::new());
        support::make_removable(&home);
    }

    #[test]
    fn damaged_archives_are_refused_and_never_a_panic(at in 0_usize..4096, byte in any::<u8>(), cut in 0_usize..8192) {
        let archive = sample();
        let mut damaged = archive.clone();
        let at = at % damaged.len();
        damaged[at] = byte;
        drop(imported(&MemoryStore::new(), &damaged));
        let cut = cut % archive.len();
        // Only the second block of the end mark may be missing.
        if cut < archive.len() - 512 {
            prop_assert!(imported(&MemoryStore::new(), &archive[..cut]).is_err());
        }
    }
}

fn sample() -> Vec<u8> {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir_all(home.join("dir")).unwrap();
    fs::write(home.join("dir/file"), b"some bytes").unwrap();
    fs::hard_link(home.join("dir/file"), home.join("link")).unwrap();
    std::os::unix::fs::symlink("dir/file", home.join("symlink")).unwrap();
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, None).unwrap().root;
    exported(&store, &root)
}

fn tar(args: &[&str], dir: &Path, input: &[u8]) -> Vec<u8> {
    let mut child = Command::new("tar")
        .args(args)
        .current_dir(dir)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("GNU tar, which every Linux machine that builds this has");
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let mut out = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut out).unwrap();
    assert!(child.wait().unwrap().success());
    writer.join().unwrap().unwrap();
    out
}

/// A home of everything that GNU tar keeps as well.
fn rich(home: &Path) {
    use std::os::unix::fs::PermissionsExt as _;
    let long = "d".repeat(120);
    fs::create_dir_all(home.join(&long).join("é")).unwrap();
    fs::write(home.join(&long).join("é/file"), vec![b'x'; 20_000]).unwrap();
    fs::hard_link(home.join(&long).join("é/file"), home.join("another-name")).unwrap();
    std::os::unix::fs::symlink("t".repeat(150), home.join("symlink")).unwrap();
    let sparse = fs::File::create(home.join("sparse")).unwrap();
    sparse.set_len(3 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, &vec![b'd'; 65_536], 1 << 20).unwrap();
    fs::set_permissions(home.join("another-name"), fs::Permissions::from_mode(0o4751)).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, home.join("fifo"), rustix::fs::FileType::Fifo, 0o640.into(), 0)
        .unwrap();
    // A line's end in a value is what line-wise readers of records stumble over.
    let value = b"one\ntwo=3%\0";
    match rustix::fs::setxattr(home.join("sparse"), "user.note=%", value, rustix::fs::XattrFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP) => {}
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn gnu_tar_unpacks_what_is_exported() {
    let scratch = support::scratch();
    let (home, target) = (scratch.path().join("home"), scratch.path().join("target"));
    fs::create_dir(&home).unwrap();
    fs::create_dir(&target).unwrap();
    rich(&home);
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, None).unwrap().root;
    tar(&["-xp", "--xattrs", "--xattrs-include=*", "--no-same-owner"], &target, &exported(&store, &root));
    assert_eq!(support::differences(&dump(&target), &dump(&home)), Vec::<String>::new());
}

#[test]
fn what_gnu_tar_packs_is_the_same_state() {
    let scratch = support::scratch();
    let home = scratch.path().join("home");
    fs::create_dir(&home).unwrap();
    rich(&home);
    let store = MemoryStore::new();
    let root = secure_dir(&home, &store, None).unwrap().root;
    let archive = tar(&["-c", "-S", "--format=posix", "--sparse-version=1.0", "--xattrs", "."], &home, b"");
    assert_eq!(imported(&store, &archive).unwrap().root, root);

    // GNU's own format has neither nanoseconds nor attributes, but names, links, holes and contents.
    let archive = tar(&["-c", "-S", "--format=gnu", "."], &home, b"");
    let target = scratch.path().join("target");
    materialize_dir(imported(&store, &archive).unwrap().root, &target, &store, None).unwrap();
    let plain = |dir: &Path| {
        let mut found = dump(dir);
        for dumped in found.values_mut() {
            dumped.mtime.1 = 0;
            dumped.xattrs.clear();
        }
        found
    };
    assert_eq!(support::differences(&plain(&target), &plain(&home)), Vec::<String>::new());
}

fn member(kind: u8, name: &[u8], link: &[u8], data: &[u8]) -> Vec<u8> {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::new(kind));
    header.as_old_mut().name[..name.len()].copy_from_slice(name);
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
    // A directory that its owner cannot enter could not be read back by an ordinary user.
    header.set_mode(if kind == b'5' { 0o755 } else { 0o644 });
    header.set_mtime(0);
    header.set_size(data.len() as u64);
    header.set_cksum();
    let mut out = header.as_bytes().to_vec();
    out.extend_from_slice(data);
    out.resize(out.len().next_multiple_of(512), 0);
    out
}

fn archive(members: &[Vec<u8>]) -> Vec<u8> {
    let mut out = members.concat();
    out.extend_from_slice(&[0; 1024]);
    out
}

#[test]
fn names_that_leave_the_home_are_refused() {
    for name in [&b"../evil"[..], b"a/../../evil", b"/etc/passwd", b"./../evil", b"a//b", b"a/./b"] {
        let text = refusal(&archive(&[member(b'0', name, b"", b"x")]));
        assert!(text.contains(&*String::from_utf8_lossy(name)), "{text}");
    }
    assert!(refusal(&archive(&[member(b'1', b"a", b"../b", b"")])).contains('a'));
}

#[test]
fn a_name_below_a_link_is_refused() {
    let text =
        refusal(&archive(&[member(b'2', b"dir", b"/etc", b""), member(b'0', b"dir/passwd", b"", b"x")]));
    assert!(text.contains("`dir/passwd`"), "{text}");
    let text = refusal(&archive(&[member(b'0', b"file", b"", b"x"), member(b'5', b"file/", b"", b"")]));
    assert!(text.contains("`file/`"), "{text}");
    let text = refusal(&archive(&[member(b'5', b"dir/", b"", b""), member(b'0', b"dir", b"", b"x")]));
    assert!(text.contains("`dir`"), "{text}");
    assert!(refusal(&archive(&[member(b'1', b"a", b"missing", b"")])).contains("missing"));
    assert!(
        refusal(&archive(&[member(b'5', b"d/", b"", b""), member(b'1', b"a", b"d", b"")]))
            .contains("directory")
    );
}

#[test]
fn what_says_to_be_too_large_is_refused_before_it_is_read() {
    for kind in [b'L', b'K', b'x', b'g'] {
        let mut header = member(kind, b"long", b"", b"");
        let mut parsed = tar::Header::new_old();
        parsed.as_mut_bytes().copy_from_slice(&header[..512]);
        parsed.set_size(1 << 40);
        parsed.set_cksum();
        header[..512].copy_from_slice(parsed.as_bytes());
        let mut endless = header.chain(io::repeat(b'x'));
        let error = import(&MemoryStore::new(), &mut endless, &AtomicBool::new(false), &NoProgress);
        assert!(error.unwrap_err().to_string().contains("limit"));
    }
}

trait Chain {
    fn chain(self, rest: impl Read) -> impl Read;
}

impl Chain for Vec<u8> {
    fn chain(self, rest: impl Read) -> impl Read {
        Read::chain(io::Cursor::new(self), rest)
    }
}

#[test]
fn later_members_replace_earlier_ones_and_a_device_node_without_a_number_reaches_nothing() {
    let archive = archive(&[
        member(b'0', b"./a/b", b"", b"old"),
        member(b'0', b"a/b", b"", b"new"),
        member(b'3', b"a/device", b"", b""),
        member(b'5', b"a/", b"", b""),
    ]);
    let store = MemoryStore::new();
    let back = imported(&store, &archive).unwrap();
    assert_eq!((back.report.files, back.report.bytes, back.report.skipped), (1, 3, 0));
    let scratch = support::scratch();
    materialize_dir(back.root, &scratch.path().join("t"), &store, None).unwrap();
    assert_eq!(fs::read(scratch.path().join("t/a/b")).unwrap(), b"new");
    let device = fs::symlink_metadata(scratch.path().join("t/a/device")).unwrap();
    assert_eq!(std::os::unix::fs::MetadataExt::rdev(&device), 0);
}
