//! A server knows its bucket.

use super::machine::{Machine, Process, fresh_place, home_of_new_agent, servers};

#[test]
fn a_server_does_not_start_on_another_bucket_and_writes_nothing_into_it() {
    for server in servers() {
        let mut machine = Machine::with_key_of(&server);
        let (place, other) = (fresh_place(), fresh_place());
        machine.set("COVEY_BLOB_STORE", &place);
        machine.write("dir/a", "as it was");
        let up = Process::server(&machine, "data", &[]);
        let home = home_of_new_agent(&machine, "data");
        machine.json(&["home", "import", &home, "dir", "--data-dir", "data"]);
        drop(up);
        // The same bucket is taken again.
        drop(Process::server(&machine, "data", &[]));
        machine.set("COVEY_BLOB_STORE", &other);
        let start = ["server", "--data-dir", "data", "--listen", "127.0.0.1:0"];
        let refused = machine.run(&start);
        assert_eq!(refused.code, 4, "{}: {refused:?}", server.name);
        assert!(refused.stderr.contains("--accept-store") && refused.stderr.contains(&other), "{refused:?}");
        assert!(refused.stderr.contains("it is empty"), "nothing was written: {refused:?}");
        assert_eq!(machine.run(&["store", "verify", "--store", &other]).code, 3);
        drop(Process::server(&machine, "data", &["--accept-store"]));
        machine.set("COVEY_BLOB_STORE", &place);
        let refused = machine.run(&start);
        assert_eq!(refused.code, 4, "the first one is the other one now: {refused:?}");
        assert!(refused.stderr.contains("and not store"), "{refused:?}");
    }
}
