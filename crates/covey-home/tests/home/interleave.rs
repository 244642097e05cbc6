//! Secures, publishes, forks, collections and crashes in every order that a seed can make: no published snapshot ever
//! lacks a block.
//!
//! Each actor runs the real code in its own thread on its own store handle, over one memory backend. Every call of the
//! backend waits for its turn, and a scheduler with a seed gives turns to one actor at a time, so a schedule is the
//! same each time it is run, and any two calls can come in either order.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use covey_home::backend::{
    Backend, BackendError, Expected, Key, MemoryBackend, NewFile, PutOutcome, Tail, Versioned,
};
use covey_home::{PackStore, PointerError, Pointers, verify};
use covey_types::{FencingToken, Generation};

use crate::collect::{home, run, stored};

/// SplitMix64.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % end as u64) as usize
    }
}

#[derive(Default)]
struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: BTreeSet<usize>,
    /// Actors that have not ended.
    alive: BTreeSet<usize>,
    /// Whose turn it is.
    turn: Option<usize>,
    /// Actors whose process is dead: their calls fail.
    dead: BTreeSet<usize>,
}

impl std::fmt::Debug for Turns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Turns")
    }
}

impl Turns {
    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Waits until the scheduler lets the actor go on; an error when it has died meanwhile.
    fn wait(&self, actor: usize) -> Result<(), BackendError> {
        let mut state = self.locked();
        if state.turn == Some(actor) {
            state.turn = None;
        }
        state.waiting.insert(actor);
        self.changed.notify_all();
        while state.turn != Some(actor) {
            state = self.changed.wait(state).unwrap();
        }
        state.waiting.remove(&actor);
        if state.dead.contains(&actor) {
            let error = io::Error::from(io::ErrorKind::ConnectionAborted);
            return Err(BackendError::unavailable("this process is dead", error));
        }
        Ok(())
    }

    fn end(&self, actor: usize) {
        let mut state = self.locked();
        state.alive.remove(&actor);
        if state.turn == Some(actor) {
            state.turn = None;
        }
        self.changed.notify_all();
    }

    /// Gives turns until every actor has ended; one in `crash_one_in` kills the actor that gets it.
    fn schedule(&self, dice: &mut Dice, crash_one_in: usize) {
        loop {
            let mut state = self.locked();
            while state.turn.is_some() || state.waiting.len() < state.alive.len() {
                state = self.changed.wait(state).unwrap();
            }
            if state.alive.is_empty() {
                return;
            }
            let waiting: Vec<usize> = state.waiting.iter().copied().collect();
            let next = waiting[dice.below(waiting.len())];
            if crash_one_in > 0 && dice.below(crash_one_in) == 0 {
                state.dead.insert(next);
            }
            state.turn = Some(next);
            self.changed.notify_all();
        }
    }
}

#[derive(Debug)]
struct Scheduled {
    inner: MemoryBackend,
    turns: Arc<Turns>,
    actor: usize,
}

#[derive(Debug)]
struct ScheduledFile {
    inner: Box<dyn NewFile>,
    turns: Arc<Turns>,
    actor: usize,
}

impl NewFile for ScheduledFile {
    // Nobody sees what is appended: no other order of this call is another history.
    fn append(&mut self, bytes: &[u8]) -> Result<(), BackendError> {
        self.inner.append(bytes)
    }

    fn publish(self: Box<Self>, key: &Key) -> Result<(), BackendError> {
        self.turns.wait(self.actor)?;
        self.inner.publish(key)
    }
}

impl Backend for Scheduled {
    fn place(&self) -> String {
        self.inner.place()
    }
    fn is_remote(&self) -> bool {
        false
    }
    fn cache_dir(&self) -> Option<PathBuf> {
        None
    }
    fn list(&self, dir: &Key) -> Result<Vec<String>, BackendError> {
        self.turns.wait(self.actor)?;
        self.inner.list(dir)
    }
    fn list_dirs(&self, dir: &Key) -> Result<Vec<String>, BackendError> {
        self.turns.wait(self.actor)?;
        self.inner.list_dirs(dir)
    }
    fn file_len(&self, key: &Key) -> Result<u64, BackendError> {
        self.turns.wait(self.actor)?;
        self.inner.file_len(key)
    }
    fn read(&self, key: &Key, offset: u64, len: usize) -> Result<Vec<u8>, BackendError> {
        self.turns.wait(self.actor)?;
        self.inner.read(key, offset, len)
    }
    fn read_tail(&self, key: &Key, len: usize) -> Result<Tail, BackendError> {
        self.turns.wait(self.actor)?;
        self.inner.read_tail(key, len)
    }
    fn create(&self) -> Result<Box<dyn NewFile>, BackendError> {
        let inner = self.inner.create()?;
        Ok(Box::new(ScheduledFile { inner, turns: Arc::clone(&self.turns), actor: self.actor }))
    }
    fn flush(&self, dir: &Key) -> Result<(), BackendError> {
        self.inner.flush(dir)
    }
    fn remove(&self, key: &Key) -> Result<bool, BackendError> {
        self.turns.wait(self.actor)?;
        self.inner.remove(key)
    }
    fn get(&self, key: &Key) -> Result<Option<Versioned>, BackendError> {
        self.turns.wait(self.actor)?;
        self.inner.get(key)
    }
    fn put_if(&self, key: &Key, bytes: &[u8], expected: &Expected) -> Result<PutOutcome, BackendError> {
        self.turns.wait(self.actor)?;
        self.inner.put_if(key, bytes, expected)
    }
}

/// What an actor does with its life.
#[derive(Clone, Copy)]
enum Role {
    /// Secures and publishes its own home again and again.
    Secures { home: &'static str },
    /// Forgets kept snapshots, then collects.
    Collects,
    /// Materializes: reads everything of what is current; that must work while it is kept.
    Reads { home: &'static str },
}

const FILES: [(&str, u64, usize); 6] =
    [("a", 1, 900), ("b", 2, 900), ("c", 3, 900), ("d", 4, 900), ("e", 5, 900), ("f", 6, 900)];

/// A home of some of six files: the states of all homes share most blocks.
fn state(dice: &mut Dice) -> Vec<u8> {
    let mask = dice.below(63) + 1;
    let files: Vec<_> = (0..6).filter(|n| mask >> n & 1 == 1).map(|n| FILES[n]).collect();
    home(&files)
}

fn act(role: Role, store: &PackStore, pointers: &Pointers, dice: &mut Dice) -> Result<(), String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    match role {
        Role::Secures { home } => {
            for _ in 0..3 {
                let archive = state(dice);
                loop {
                    let current = pointers.current(home).map_err(|e| text(&e))?;
                    let base = current.map_or(Generation(0), |current| current.generation);
                    let imported = stored(store, &archive).map_err(|e| text(&e))?;
                    match pointers.publish(home, imported.root, base, FencingToken(1), imported.epoch) {
                        Ok(_) => break,
                        Err(PointerError::Collected { .. } | PointerError::NotCurrent { .. }) => {}
                        Err(error) => return Err(text(&error)),
                    }
                }
            }
        }
        Role::Collects => {
            for _ in 0..2 {
                for home in pointers.homes().map_err(|e| text(&e))? {
                    pointers.retain(&home, &|_| false).map_err(|e| text(&e))?;
                }
                match run(store, pointers, false) {
                    Ok(_) | Err(covey_home::CollectError::Overtaken) => {}
                    // A snapshot that was forgotten while its state was marked.
                    Err(covey_home::CollectError::Mark(_)) => {}
                    Err(error) => return Err(text(&error)),
                }
            }
        }
        Role::Reads { home } => {
            for _ in 0..2 {
                let Some(pointer) = pointers.current(home).map_err(|e| text(&e))? else { continue };
                let report = verify(store, &pointer.root).map_err(|e| text(&e))?;
                let still = pointers.current(home).map_err(|e| text(&e))?;
                if still == Some(pointer) && report.problem_count > 0 {
                    return Err(format!("a current snapshot has holes: {:?}", report.problems));
                }
            }
        }
    }
    Ok(())
}

/// Runs one schedule; gives what was wrong.
fn play(seed: u64, roles: &[Role], crash_one_in: usize) -> Result<(), String> {
    let backend = MemoryBackend::new();
    let turns = Arc::new(Turns::default());
    turns.locked().alive = (0..roles.len()).collect();
    let actors: Vec<_> = roles
        .iter()
        .enumerate()
        .map(|(actor, role)| {
            let (inner, turns, role) = (backend.clone(), Arc::clone(&turns), *role);
            std::thread::spawn(move || {
                let scheduled = Arc::new(Scheduled { inner, turns: Arc::clone(&turns), actor });
                let mut dice = Dice(seed ^ ((actor as u64 + 1) << 48));
                let done = PackStore::open(scheduled.clone())
                    .map_err(|error| error.to_string())
                    .and_then(|store| act(role, &store, &Pointers::on(scheduled), &mut dice));
                let is_dead = turns.locked().dead.contains(&actor);
                turns.end(actor);
                if is_dead { Ok(()) } else { done }
            })
        })
        .collect();
    turns.schedule(&mut Dice(seed), crash_one_in);
    for actor in actors {
        actor.join().unwrap()?;
    }
    let shared: Arc<dyn Backend> = Arc::new(backend);
    let store = PackStore::open(Arc::clone(&shared)).map_err(|error| error.to_string())?;
    let pointers = Pointers::on(shared);
    let whole = |store: &PackStore| -> Result<(), String> {
        for home in pointers.homes().map_err(|error| error.to_string())? {
            for pointer in pointers.snapshots(&home).map_err(|error| error.to_string())? {
                let report = verify(store, &pointer.root).map_err(|error| error.to_string())?;
                if report.problem_count > 0 {
                    return Err(format!("{home} {}: {:?}", pointer.generation, report.problems));
                }
            }
        }
        Ok(())
    };
    whole(&store)?;
    // Whatever the crashes left: the next collection takes it, and nothing that is needed.
    run(&store, &pointers, false).map_err(|error| error.to_string())?;
    whole(&store)
}

fn explore(schedules: std::ops::Range<u64>, roles: &[Role], crash_one_in: usize) {
    for seed in schedules {
        if let Err(error) = play(seed, roles, crash_one_in) {
            panic!("seed {seed}: {error}");
        }
    }
}

const SECURES_1: Role = Role::Secures { home: "one" };
const SECURES_2: Role = Role::Secures { home: "two" };

#[test]
fn two_homes_and_a_collection() {
    explore(0..3000, &[SECURES_1, SECURES_2, Role::Collects], 0);
}

#[test]
fn one_home_two_writers_and_a_collection_with_crashes() {
    explore(10_000..13_000, &[SECURES_1, SECURES_1, Role::Collects], 150);
}

#[test]
fn two_collections_a_writer_and_a_reader() {
    explore(20_000..22_000, &[SECURES_1, Role::Collects, Role::Collects, Role::Reads { home: "one" }], 0);
}

#[test]
fn two_collections_and_two_writers_with_crashes() {
    explore(30_000..32_000, &[SECURES_1, SECURES_2, Role::Collects, Role::Collects], 100);
}
