//! The doctor's findings, on a host that can run these tests at all.

use covey_runner::sandbox::probe::probe;

use crate::room::Room;

#[test]
fn the_doctor_finds_everything_that_is_required_and_leaves_nothing() {
    let room = Room::new();
    let spec = room.spec();
    let dir = room.root.path().join("doctor");
    let findings = probe(&dir, spec.host_uid, spec.host_gid);
    for finding in &findings {
        assert!(finding.ok || !finding.required, "{finding:?}");
        assert_eq!(finding.ok, finding.remedy.is_none(), "{finding:?}");
    }
    for name in ["disk", "isolation", "confinement", "network", "landlock", "freeze", "cgroups"] {
        assert!(findings.iter().any(|finding| finding.name == name), "{name} is missing: {findings:?}");
    }
    assert!(std::fs::read_dir(&dir).unwrap().next().is_none());
}

#[test]
fn the_doctor_says_what_to_do_when_the_data_directory_cannot_be_used() {
    let room = Room::new();
    let spec = room.spec();
    std::fs::write(room.root.path().join("file"), "").unwrap();
    let findings = probe(&room.root.path().join("file"), spec.host_uid, spec.host_gid);
    let refused = findings.iter().find(|finding| finding.required && !finding.ok).unwrap();
    assert!(refused.remedy.is_some());
}
