//! The same suite while every second or third request meets a fault: nothing is lost, nothing wrong is read, and
//! whatever cannot be repaired is reported.

use covey_home::backend::{Expected, Key, PutOutcome};

use super::contract::{broken, broken_above};
use super::proxy::{Fault, Proxy, Schedule};
use super::servers;

/// Every promise that is broken on any server under one fault.
fn broken_under(fault: Fault, every: u64) -> Vec<String> {
    let mut found = Vec::new();
    for server in servers::all() {
        let proxy = Proxy::before(&server);
        proxy.break_things(Schedule::Every(every, fault), |_| true);
        let fresh = || server.fresh(&proxy.url());
        let under = if fault == Fault::FlippedAnswer { broken_above(&fresh) } else { broken(fresh) };
        found.extend(under.into_iter().map(|line| format!("{}: {line}", server.name)));
        assert!(proxy.faults() > 10, "{}: only {} faults", server.name, proxy.faults());
    }
    found
}

fn holds_under(fault: Fault) {
    for every in [2, 3] {
        assert_eq!(broken_under(fault, every), Vec::<String>::new(), "each {every}. request: {fault:?}");
    }
}

#[test]
fn a_server_that_fails() {
    holds_under(Fault::Error500);
}

#[test]
fn a_server_that_asks_to_slow_down() {
    holds_under(Fault::SlowDown);
}

#[test]
fn a_server_that_fails_after_it_has_done_it() {
    holds_under(Fault::Error500AfterAll);
}

#[test]
fn a_server_that_never_answers() {
    // Each of them costs the whole time that an answer may take.
    assert_eq!(broken_under(Fault::Hang, 5), Vec::<String>::new());
}

#[test]
fn an_answer_that_breaks_off() {
    holds_under(Fault::TruncatedAnswer);
}

#[test]
fn a_flipped_bit_in_what_is_read() {
    holds_under(Fault::FlippedAnswer);
}

#[test]
fn a_flipped_bit_in_what_is_written() {
    holds_under(Fault::FlippedUpload);
}

#[test]
fn what_is_there_is_said_not_to_be() {
    holds_under(Fault::NotFound);
}

#[test]
fn a_connection_that_is_reset_in_the_middle() {
    holds_under(Fault::Reset);
}

#[test]
fn an_answer_that_is_lost() {
    holds_under(Fault::LostAnswer);
}

#[test]
fn any_fault_at_random() {
    for seed in 0..6 {
        for server in servers::all() {
            let proxy = Proxy::before(&server);
            proxy.break_things(Schedule::Random(seed), |_| true);
            let under = broken_above(&|| server.fresh(&proxy.url()));
            assert_eq!(under, Vec::<String>::new(), "{}, seed {seed}", server.name);
            assert!(proxy.faults() > 20, "{}, seed {seed}", server.name);
        }
    }
}

#[test]
fn a_pointer_that_came_a_moment_ago_is_not_absent_by_an_earlier_list() {
    for server in servers::all() {
        let (proxy, place) = (Proxy::before(&server), servers::fresh_place());
        let ours = server.open(&proxy.url(), &place).unwrap().backend("org").unwrap();
        let other = server.open(&server.url(), &place).unwrap().backend("org").unwrap();
        let current = Key::new(&["homes", "h", "current"]).unwrap();
        // Which makes a list of all that the org has.
        assert!(ours.get(&Key::new(&["gc", "condemned"]).unwrap()).unwrap().is_none());
        let put = other.put_if(&current, b"a pointer", &Expected::Absent).unwrap();
        assert!(matches!(put, PutOutcome::Written(_)));
        proxy.break_things(Schedule::Only(1, Fault::NotFound), |request| request.target.contains("current"));
        let found = ours.get(&current).unwrap();
        assert_eq!(found.map(|found| found.bytes), Some(b"a pointer".to_vec()), "{}", server.name);
        assert_eq!(proxy.faults(), 1, "{:?}", proxy.log());
    }
}
