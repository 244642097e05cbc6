//! A server that is killed in the middle of a collection: after its next start the store is whole, and the next
//! collection finishes what the last one began.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::covey::Place;
use super::store_gc::noise;

/// Longer than anything here takes; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(60);

/// When the server is killed: as soon as this is seen in the store.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// What is needed of a pack that goes was copied.
    Copied,
    /// The packs that go are condemned.
    Condemned,
    /// Earlier uploads are refused.
    FloorRaised,
    /// The first pack is gone.
    Deleting,
}

struct World {
    place: Place,
    org: String,
}

impl World {
    fn data(&self) -> PathBuf {
        self.place.path().join(".local/share/covey")
    }

    fn org_dir(&self) -> PathBuf {
        self.data().join("store/orgs").join(&self.org)
    }

    fn packs(&self) -> BTreeSet<String> {
        let names = fs::read_dir(self.org_dir().join("packs")).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn file(&self, name: &str) -> Option<Vec<u8>> {
        fs::read(self.org_dir().join("gc").join(name)).ok()
    }

    /// Returns when the server says where it listens.
    fn server(&self) -> Child {
        let mut command = self.place.command(&["server", "--listen", "127.0.0.1:0", "--json"]);
        command.env("COVEY_GC_INTERVAL", "0").stdout(Stdio::piped()).stderr(Stdio::null());
        let mut server = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(server.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("url"), "the server does not start: {line}");
        server
    }

    fn import(&self, agent: &str, files: &[(&str, Vec<u8>)]) {
        let dir = self.place.path().join("dir");
        fs::create_dir_all(&dir).unwrap();
        files.iter().for_each(|(name, bytes)| fs::write(dir.join(name), bytes).unwrap());
        self.place.json(&["home", "import", agent, "dir", "--json"]);
        fs::remove_dir_all(&dir).unwrap();
    }

    /// A pack of which a third is needed, and packs of which nothing is. Gives what the kept agent has.
    fn litter(&self, round: u64) -> Vec<u8> {
        let kept = noise(round * 10 + 1, 700_000);
        self.import("kept", &[("a", kept.clone()), ("b", noise(round * 10 + 2, 1_400_000))]);
        self.import("kept", &[("a", kept.clone())]);
        for seed in 3..6 {
            self.place.json(&["agent", "create", "--name", "junk", "--model", "m", "--json"]);
            self.import("junk", &[("c", noise(round * 10 + seed, 300_000))]);
            self.place.json(&["agent", "delete", "junk", "--yes", "--json"]);
        }
        kept
    }

    fn is_whole(&self, kept: &[u8]) {
        let verified = self.place.json(&["store", "verify", "--json"]);
        assert_eq!(verified["ok"], true, "{verified}");
        let read = self.place.command(&["home", "cat", "kept", "a"]).output().unwrap();
        assert!(read.status.success() && read.stdout == kept, "{}", String::from_utf8_lossy(&read.stderr));
    }

    fn collect(&self) -> Value {
        self.place.json(&["store", "gc", "--rate", "none", "--json"])
    }
}

fn kill(server: &mut Child) {
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn a_killed_collection_harms_nothing_and_the_next_one_finishes() {
    let mut world = World { place: Place::alone(), org: String::new() };
    fs::create_dir_all(world.data()).unwrap();
    let mut server = world.server();
    let client: Value = serde_json::from_slice(&fs::read(world.data().join("client.json")).unwrap()).unwrap();
    client["org"].as_str().unwrap().clone_into(&mut world.org);
    world.place.json(&["agent", "create", "--name", "kept", "--model", "m", "--json"]);
    let mut interrupted = 0;
    for (round, moment) in [
        Moment::Copied,
        Moment::Condemned,
        Moment::FloorRaised,
        Moment::Deleting,
        Moment::Condemned,
        Moment::Deleting,
    ]
    .into_iter()
    .enumerate()
    {
        let kept = world.litter(round as u64);
        let (packs, condemned, floor) = (world.packs(), world.file("condemned"), world.file("floor"));
        let mut gc = world.place.command(&["store", "gc", "--rate", "none", "--json"]);
        let gc = gc.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let begun = Instant::now();
        let is_there = || match moment {
            Moment::Copied => world.packs().difference(&packs).next().is_some(),
            Moment::Condemned => world.file("condemned") != condemned,
            Moment::FloorRaised => world.file("floor") != floor,
            Moment::Deleting => packs.difference(&world.packs()).next().is_some(),
        };
        while !is_there() {
            assert!(begun.elapsed() < PATIENCE, "{moment:?} never comes");
            std::thread::yield_now();
        }
        kill(&mut server);
        let ended = gc.wait_with_output().unwrap();
        interrupted += u32::from(!ended.status.success());
        server = world.server();
        world.is_whole(&kept);
        if round % 2 == 1 {
            let done = world.collect();
            assert_eq!(done["packs_left"], 0, "{moment:?}: {done}");
            world.is_whole(&kept);
        }
    }
    eprintln!("{interrupted} of 6 collections were killed before they could answer");
    assert!(interrupted > 0);
    let kept = world.litter(100);
    world.collect();
    assert_eq!(world.collect()["freed_bytes"], 0, "nothing is left to do");
    world.is_whole(&kept);
    let stored: u64 = world
        .packs()
        .iter()
        .map(|pack| fs::metadata(world.org_dir().join("packs").join(pack)).unwrap().len())
        .sum();
    assert!(stored < 800_000, "what was left by the dead is gone: {stored} bytes for 700,000");
    kill(&mut server);
}
