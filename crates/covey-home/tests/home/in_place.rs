//! Materializing over an older state: what is there is used, and only what is not there is fetched.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use covey_home::{MaterializeReport, MemoryStore};
use covey_types::RootHash;

use crate::support::{self, dump, materialize_dir, noise, secure_dir, settle};

const MIB: usize = 1024 * 1024;

/// A home that was secured, and a copy of it that was materialized with its own stat cache.
struct Both {
    _scratch: tempfile::TempDir,
    store: MemoryStore,
    home: PathBuf,
    copy: PathBuf,
    home_cache: PathBuf,
    copy_cache: PathBuf,
}

impl Both {
    fn new(build: impl FnOnce(&Path)) -> Self {
        let scratch = support::scratch();
        let at = |name: &str| scratch.path().join(name);
        let (home, copy) = (at("home"), at("copy"));
        fs::create_dir(&home).unwrap();
        build(&home);
        settle();
        let (home_cache, copy_cache) = (at("home-cache"), at("copy-cache"));
        let both = Self { store: MemoryStore::new(), home, copy, home_cache, copy_cache, _scratch: scratch };
        let root = both.secure();
        both.put_over(root);
        both
    }

    fn secure(&self) -> RootHash {
        secure_dir(&self.home, &self.store, Some(&self.home_cache)).unwrap().root
    }

    /// Puts the state over the copy and checks that it is right, and that its stat cache is.
    fn put_over(&self, root: RootHash) -> MaterializeReport {
        let report = materialize_dir(root, &self.copy, &self.store, Some(&self.copy_cache)).unwrap();
        let (found, wanted) = (dump(&self.copy), dump(&self.home));
        assert_eq!(support::differences(&found, &wanted), Vec::<String>::new());
        let secured = secure_dir(&self.copy, &self.store, Some(&self.copy_cache)).unwrap();
        assert_eq!((secured.root, secured.bytes_read, secured.blocks_new), (root, 0, 0));
        report
    }
}

fn two_packages(home: &Path) {
    for (number, name) in ["left/deep/a", "left/b", "right/c", "right/d"].iter().enumerate() {
        let path = home.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, noise(number as u64, 5000)).unwrap();
    }
}

#[test]
fn an_unchanged_home_is_left_alone_and_the_store_is_asked_for_nothing_but_the_root() {
    let both = Both::new(two_packages);
    let inode = |name: &str| fs::metadata(both.copy.join(name)).unwrap().ino();
    let before = inode("left/deep/a");
    let report = both.put_over(both.secure());
    assert_eq!((report.files_written, report.bytes_fetched, report.removed), (0, 0, 0));
    assert_eq!(inode("left/deep/a"), before);
}

#[test]
fn a_touched_file_and_a_changed_mode_cost_metadata_and_no_bytes() {
    let both = Both::new(two_packages);
    let inode = |name: &str| fs::metadata(both.copy.join(name)).unwrap().ino();
    let before = (inode("left/b"), inode("right/c"));
    fs::File::options()
        .write(true)
        .open(both.home.join("left/b"))
        .unwrap()
        .set_modified(std::time::SystemTime::UNIX_EPOCH)
        .unwrap();
    fs::set_permissions(both.home.join("right/c"), fs::Permissions::from_mode(0o4750)).unwrap();
    settle();
    let report = both.put_over(both.secure());
    assert_eq!((report.files_written, report.bytes_fetched, report.removed), (0, 0, 0));
    assert_eq!((inode("left/b"), inode("right/c")), before);
}

#[test]
fn a_renamed_directory_is_renamed_and_nothing_in_it_is_fetched() {
    let both = Both::new(two_packages);
    fs::rename(both.home.join("left"), both.home.join("renamed")).unwrap();
    settle();
    let report = both.put_over(both.secure());
    assert_eq!((report.files_written, report.bytes_fetched, report.removed), (0, 0, 0));
}

#[test]
fn a_directory_that_was_renamed_and_changed_is_what_the_snapshot_says() {
    let both = Both::new(two_packages);
    fs::rename(both.home.join("left"), both.home.join("renamed")).unwrap();
    fs::write(both.home.join("renamed/deep/a"), noise(9, 6000)).unwrap();
    fs::create_dir(both.home.join("left")).unwrap();
    settle();
    let report = both.put_over(both.secure());
    assert_eq!(report.bytes_fetched, 6000 + 5000, "the file beside it has no older name to be taken from");
}

#[test]
fn of_a_directory_that_was_renamed_and_changed_only_the_change_is_fetched() {
    let both = Both::new(|home| {
        for (dir, count) in [("first", 9), ("second", 7)] {
            fs::create_dir(home.join(dir)).unwrap();
            for number in 0..count {
                let name = format!("{dir}/{dir}-{number}");
                fs::write(home.join(name), noise(number * 100 + count, 3000)).unwrap();
            }
        }
    });
    fs::rename(both.home.join("first"), both.home.join("a")).unwrap();
    fs::rename(both.home.join("second"), both.home.join("b")).unwrap();
    fs::write(both.home.join("a/first-3"), noise(77, 4000)).unwrap();
    fs::remove_file(both.home.join("b/second-1")).unwrap();
    fs::write(both.home.join("b/new"), noise(78, 500)).unwrap();
    settle();
    let report = both.put_over(both.secure());
    assert_eq!((report.bytes_fetched, report.removed), (4000 + 500, 2));
}

#[test]
fn a_renamed_file_is_renamed_and_not_fetched() {
    let both = Both::new(|home| {
        for number in 0..3 {
            fs::write(home.join(format!("log.{number}")), noise(number, 20_000)).unwrap();
        }
        fs::hard_link(home.join("log.0"), home.join("linked")).unwrap();
        fs::write(home.join("twin-1"), noise(50, 1000)).unwrap();
        fs::write(home.join("twin-2"), noise(50, 1000)).unwrap();
    });
    let at = |name: &str| both.home.join(name);
    fs::rename(at("log.2"), at("old-log")).unwrap();
    fs::rename(at("log.1"), at("log.2")).unwrap();
    fs::set_permissions(at("old-log"), fs::Permissions::from_mode(0o400)).unwrap();
    fs::rename(at("twin-1"), at("one")).unwrap();
    fs::rename(at("twin-2"), at("two")).unwrap();
    settle();
    let report = both.put_over(both.secure());
    // `log.2` is another file under a name that was there: only what is too many is taken for renamed.
    assert_eq!(report.bytes_fetched, 20_000 + 20_000);
    assert_eq!(report.files_written, 2);
}

#[test]
fn a_file_in_the_way_of_a_renamed_directory_and_the_other_way_round_are_replaced() {
    let both = Both::new(two_packages);
    fs::rename(both.home.join("left"), both.home.join("moved")).unwrap();
    fs::write(both.home.join("left"), b"now a file").unwrap();
    fs::rename(both.home.join("right/c"), both.home.join("kept")).unwrap();
    fs::remove_dir_all(both.home.join("right")).unwrap();
    settle();
    both.put_over(both.secure());
    assert_eq!(fs::read(both.copy.join("left")).unwrap(), b"now a file");
}

#[test]
fn of_a_large_file_only_the_changed_windows_are_fetched() {
    let both = Both::new(|home| {
        fs::write(home.join("session.db"), noise(1, 20 * MIB)).unwrap();
        fs::write(home.join("build.log"), noise(2, 9 * MIB)).unwrap();
    });
    let file = fs::File::options().write(true).open(both.home.join("session.db")).unwrap();
    file.write_all_at(&noise(3, 4096), 9 * MIB as u64).unwrap();
    let log = fs::File::options().write(true).open(both.home.join("build.log")).unwrap();
    log.write_all_at(&noise(4, 1000), 9 * MIB as u64).unwrap();
    settle();
    let report = both.put_over(both.secure());
    assert_eq!(report.bytes_fetched, (4 * MIB + MIB + 1000) as u64);
}

#[test]
fn what_was_written_into_the_copy_behind_the_stat_cache_is_not_taken_for_what_it_was() {
    let both = Both::new(|home| {
        fs::write(home.join("small"), b"12345").unwrap();
        fs::write(home.join("large"), noise(1, 12 * MIB)).unwrap();
    });
    for name in ["small", "large"] {
        let path = both.copy.join(name);
        let mtime = fs::metadata(&path).unwrap().modified().unwrap();
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"x", 1).unwrap();
        file.set_modified(mtime).unwrap();
    }
    fs::set_permissions(both.home.join("small"), fs::Permissions::from_mode(0o600)).unwrap();
    settle();
    let report = both.put_over(both.secure());
    assert_eq!(report.files_written, 2);
}

#[test]
fn a_home_without_its_stat_cache_is_put_in_place_whole() {
    let both = Both::new(two_packages);
    fs::remove_file(&both.copy_cache).unwrap();
    let report = both.put_over(both.secure());
    assert_eq!((report.files_written, report.bytes_fetched), (4, 20_000));
}

#[test]
fn links_between_kept_and_changed_names_are_right_afterwards() {
    let both = Both::new(|home| {
        two_packages(home);
        fs::hard_link(home.join("left/b"), home.join("right/same")).unwrap();
        fs::hard_link(home.join("left/b"), home.join("other")).unwrap();
    });
    fs::remove_file(both.home.join("right/same")).unwrap();
    fs::hard_link(both.home.join("right/c"), both.home.join("right/same")).unwrap();
    fs::hard_link(both.home.join("right/c"), both.home.join("left/deep/c")).unwrap();
    settle();
    let report = both.put_over(both.secure());
    assert!(report.bytes_fetched <= 10_000, "{report:?}");
}
