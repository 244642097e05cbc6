//! `covey completions`.

use super::covey::Place;

#[test]
fn each_shell_gets_a_script_that_knows_the_commands() {
    let place = Place::alone();
    for shell in ["bash", "zsh", "fish"] {
        let ended = place.run(&["completions", shell]);
        assert_eq!(ended.code, 0, "{ended:?}");
        for word in ["session", "interrupt", "materialize", "--data-dir"] {
            assert!(ended.stdout.contains(word.trim_start_matches("--")), "{shell}: {word}");
        }
    }
    assert_eq!(place.run(&["completions", "no-such-shell"]).code, 2);
}

#[test]
fn the_bash_script_is_one_that_bash_accepts() {
    let place = Place::alone();
    std::fs::write(place.path().join("covey.bash"), place.run(&["completions", "bash"]).stdout).unwrap();
    let bash = std::process::Command::new("bash").arg("-n").arg(place.path().join("covey.bash")).status();
    assert!(bash.unwrap().success());
}
