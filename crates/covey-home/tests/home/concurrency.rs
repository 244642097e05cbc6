//! Several writers of one directory store, and the pointer between them.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::thread;

use covey_home::{
    BlockStore, Excludes, NoProgress, PackStore, PointerError, Pointers, SecureRequest, secure_and_publish,
    verify,
};
use covey_types::{BlockHash, FencingToken, Generation, RootHash};

use crate::support::{self, noise};

fn publish(store: &PackStore, pointers: &Pointers, dir: &Path, home: &str, token: u64) -> Generation {
    let report = secure_and_publish(
        &SecureRequest {
            dir,
            store,
            stat_cache: None,
            excludes: &Excludes::none(),
            previous: None,
            cancel: &AtomicBool::new(false),
            progress: &NoProgress,
            threads: 2,
        },
        pointers,
        home,
        FencingToken(token),
    )
    .unwrap();
    report.generation.unwrap()
}

#[test]
fn two_writers_share_a_store_and_an_earlier_reader_sees_both() {
    let scratch = support::scratch();
    let store_path = scratch.path().join("store");
    let reader = PackStore::open_directory(&store_path, "org").unwrap();
    let homes: Vec<String> = (0..2).map(|number| format!("home-{number}")).collect();
    thread::scope(|scope| {
        for (number, home) in homes.iter().enumerate() {
            let (store_path, dir) = (&store_path, scratch.path().join(home));
            scope.spawn(move || {
                fs::create_dir(&dir).unwrap();
                let store = PackStore::open_directory(store_path, "org").unwrap();
                let pointers = Pointers::open(store_path, "org").unwrap();
                for round in 0..20_u64 {
                    // Half of it is the same in both homes.
                    fs::write(dir.join(format!("shared-{round}")), noise(round, 50_000)).unwrap();
                    fs::write(
                        dir.join(format!("own-{round}")),
                        noise(1000 * (number as u64 + 1) + round, 9000),
                    )
                    .unwrap();
                    assert_eq!(publish(&store, &pointers, &dir, home, 1), Generation(round + 1));
                }
            });
        }
    });
    let pointers = Pointers::open(&store_path, "org").unwrap();
    for home in &homes {
        let root = pointers.current(home).unwrap().unwrap().root;
        assert_eq!(verify(&reader, &root).unwrap().problems, Vec::<String>::new());
    }
    assert_eq!(reader.verify_packs().unwrap().problems, Vec::<String>::new());
    assert!(reader.missing(&[BlockHash::of(&noise(3, 50_000))]).unwrap().is_empty());
}

#[test]
fn a_late_writer_is_fenced_and_a_repeated_publish_is_one() {
    let scratch = support::scratch();
    let pointers = Pointers::open(scratch.path(), "org").unwrap();
    let root = |n: u8| RootHash::of(&[n]);
    assert_eq!(pointers.current("home").unwrap(), None);
    let first = pointers.publish("home", root(1), Generation(0), FencingToken(5), 0).unwrap();
    assert_eq!(first.generation, Generation(1));
    assert_eq!(pointers.publish("home", root(1), Generation(0), FencingToken(5), 0).unwrap(), first);
    assert!(matches!(
        pointers.publish("home", root(2), Generation(1), FencingToken(4), 0),
        Err(PointerError::Fenced { current: FencingToken(5), .. })
    ));
    assert!(matches!(
        pointers.publish("home", root(2), Generation(0), FencingToken(6), 0),
        Err(PointerError::NotCurrent { current: Generation(1), .. })
    ));
    let second = pointers.publish("home", root(2), Generation(1), FencingToken(6), 0).unwrap();
    assert_eq!(pointers.current("home").unwrap(), Some(second));
    assert_eq!(pointers.snapshots("home").unwrap(), [first, second]);
    assert!(pointers.publish("../x", root(1), Generation(0), FencingToken(9), 0).is_err());
}

#[test]
fn of_many_that_publish_at_once_on_one_base_one_wins() {
    let scratch = support::scratch();
    let wins = thread::scope(|scope| {
        let tries: Vec<_> = (0..8_u8)
            .map(|n| {
                let path = scratch.path();
                scope.spawn(move || {
                    let pointers = Pointers::open(path, "org").unwrap();
                    pointers.publish("home", RootHash::of(&[n]), Generation(0), FencingToken(1), 0).is_ok()
                })
            })
            .collect();
        tries.into_iter().map(|one| one.join().unwrap()).filter(|won| *won).count()
    });
    assert_eq!(wins, 1);
}

#[test]
fn a_damaged_pointer_is_damage_and_not_an_empty_home() {
    let scratch = support::scratch();
    let pointers = Pointers::open(scratch.path(), "org").unwrap();
    pointers.publish("home", RootHash::of(b"x"), Generation(0), FencingToken(1), 0).unwrap();
    let path = scratch.path().join("orgs/org/homes/home/current");
    let good = fs::read(&path).unwrap();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 1;
        fs::write(&path, &bad).unwrap();
        assert!(pointers.current("home").is_err(), "byte {at}");
        assert!(pointers.publish("home", RootHash::of(b"y"), Generation(0), FencingToken(9), 0).is_err());
        fs::write(&path, &good[..at]).unwrap();
        assert!(pointers.current("home").is_err(), "cut at {at}");
    }
}
