//! `covey version`, `covey --version` and `covey --help`.

use super::covey::Place;

#[test]
fn the_version_is_said_as_text_and_as_json() {
    let place = Place::alone();
    assert_eq!(place.run(&["version"]).stdout, format!("covey {}\n", env!("CARGO_PKG_VERSION")));
    assert_eq!(place.run(&["--version"]).stdout, format!("covey {}\n", env!("CARGO_PKG_VERSION")));
    assert_eq!(place.json(&["version", "--json"])["version"], env!("CARGO_PKG_VERSION"));
}

#[test]
fn help_names_the_exit_codes_and_an_unknown_command_has_one() {
    let place = Place::alone();
    let help = place.run(&["--help"]);
    assert!(help.stdout.contains("Exit codes:") && help.stdout.contains("conflict"), "{help:?}");
    assert_eq!(place.run(&["frobnicate"]).code, 2);
}

#[test]
fn the_token_of_the_environment_is_not_shown_by_help() {
    let place = Place::with_server("http://127.0.0.1:1");
    let help = place.run(&["--help"]).stdout;
    assert!(help.contains("COVEY_TOKEN") && !help.contains(super::fake_server::TOKEN), "{help}");
}
