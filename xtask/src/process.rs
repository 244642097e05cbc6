//! Running other programs: with a limit, with their output shown, and with their name in every error.

use std::io::Read as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal};

/// How often a running program is looked at; only bounds how late its end is noticed.
const POLL: Duration = Duration::from_millis(20);

/// The cargo that runs us, in the repository.
pub(crate) fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}

/// `cargo build` and friends read these from the `cargo run` that started us; a nested cargo must not.
const INHERITED_FROM_CARGO: [&str; 3] = ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH", "CARGO_PKG_NAME"];

fn shown(command: &Command) -> String {
    let mut text = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    text
}

fn spawn(command: &mut Command) -> anyhow::Result<Child> {
    for name in INHERITED_FROM_CARGO {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command.spawn().with_context(|| format!("`{}` does not start", shown(command)))
}

/// Runs a program with our own stdout and stderr.
pub(crate) fn run(command: &mut Command, limit: Duration) -> anyhow::Result<()> {
    let mut child = spawn(command)?;
    let status = wait(&mut child, limit).with_context(|| format!("`{}`", shown(command)))?;
    if !status.success() {
        bail!("`{}`: {status}", shown(command));
    }
    Ok(())
}

/// Runs a program with our own stderr and returns what it wrote to stdout, whatever its exit status.
pub(crate) fn output(command: &mut Command, limit: Duration) -> anyhow::Result<(ExitStatus, String)> {
    command.stdout(Stdio::piped());
    let mut child = spawn(command)?;
    let mut pipe = child.stdout.take().context("stdout is not a pipe")?;
    // Read beside the wait: a program that fills the pipe would otherwise never end.
    let reader = thread::spawn(move || {
        let mut text = Vec::new();
        pipe.read_to_end(&mut text).map(|_| text)
    });
    let status = wait(&mut child, limit).with_context(|| format!("`{}`", shown(command)))?;
    let bytes = match reader.join() {
        Ok(read) => read.with_context(|| format!("reading the output of `{}`", shown(command)))?,
        Err(_) => bail!("reading the output of `{}` panicked", shown(command)),
    };
    Ok((status, String::from_utf8_lossy(&bytes).into_owned()))
}

/// As [`output`], but a failure of the program is an error.
pub(crate) fn output_of_success(command: &mut Command, limit: Duration) -> anyhow::Result<String> {
    let (status, text) = output(command, limit)?;
    if !status.success() {
        bail!("`{}`: {status}", shown(command));
    }
    Ok(text)
}

/// Builds an example of a crate in release mode; gives its program.
pub(crate) fn build_example(
    root: &Path,
    package: &str,
    example: &str,
    limit: Duration,
) -> anyhow::Result<std::path::PathBuf> {
    let mut command = cargo(root);
    command.args(["build", "--quiet", "--release", "--package", package, "--example", example]);
    command.arg("--message-format=json-render-diagnostics");
    let messages = output_of_success(&mut command, limit)?;
    let built = messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let program = built
        .filter(|message| message["target"]["name"] == example)
        .find_map(|message| message["executable"].as_str().map(std::path::PathBuf::from));
    program.context("cargo did not say where the example is")
}

/// Waits until the program ends; after `limit` it and everything that it started is killed.
pub(crate) fn wait(child: &mut Child, limit: Duration) -> anyhow::Result<ExitStatus> {
    let started = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if started.elapsed() >= limit {
            kill_tree(child.id());
            child.wait()?;
            bail!("did not end within {} s and was killed", limit.as_secs());
        }
        thread::sleep(POLL);
    }
}

/// Asks a program to end, and kills it and its children when it has not after `grace`.
pub(crate) fn stop(child: &mut Child, grace: Duration) -> anyhow::Result<ExitStatus> {
    stop_by(child, Signal::TERM, grace)
}

/// As [`stop`], for a program that ends by another signal.
pub(crate) fn stop_by(child: &mut Child, by: Signal, grace: Duration) -> anyhow::Result<ExitStatus> {
    signal(child.id(), by);
    wait(child, grace)
}

/// Children stay in our process group, so that Ctrl-C reaches them; therefore the tree is found by parent.
pub(crate) fn kill_tree(root: u32) {
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() {
        // Stopped first, so that it cannot start another child while its children are listed.
        signal(found[next], Signal::STOP);
        found.extend(children(found[next]));
        next += 1;
    }
    for pid in found {
        signal(pid, Signal::KILL);
    }
}

fn children(parent: u32) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| parent_of(*pid) == Some(parent))
        .collect()
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may contain anything, spaces and parentheses too.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(1)?.parse().ok()
}

fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        // Only a process that has already ended cannot be signalled, and that is what is wanted.
        rustix::process::kill_process(pid, signal).ok();
    }
}

/// Whether a program can be started at all.
pub(crate) fn exists(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path).any(|dir| {
            let file = dir.join(program);
            rustix::fs::access(&file, rustix::fs::Access::EXEC_OK).is_ok() && file.is_file()
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    #[test]
    fn a_program_that_outlives_its_limit_is_killed_with_its_children() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("fifo");
        let script = format!("mkfifo {0}; (exec 9<>{0}; cat {0}) & wait", fifo.display());
        let error = run(Command::new("sh").args(["-c", &script]), Duration::from_millis(300)).unwrap_err();
        assert!(format!("{error:#}").contains("was killed"), "{error:#}");
        let fifo_text = fifo.display().to_string();
        let is_left = || {
            std::fs::read_dir("/proc").unwrap().filter_map(Result::ok).any(|entry| {
                let line = std::fs::read_to_string(entry.path().join("cmdline"));
                line.is_ok_and(|line| line.contains(&fifo_text))
            })
        };
        // A killed process that is nobody's child of ours any more ends in its own time.
        let started = Instant::now();
        while is_left() {
            assert!(started.elapsed() < LIMIT, "a child lives on");
            std::thread::yield_now();
        }
    }

    #[test]
    fn output_larger_than_a_pipe_is_read_whole() {
        let text = output_of_success(Command::new("seq").arg("100000"), LIMIT).unwrap();
        assert_eq!(text.lines().count(), 100_000);
    }

    #[test]
    fn a_failing_program_is_named_in_the_error() {
        let error = run(Command::new("sh").args(["-c", "exit 3"]), LIMIT).unwrap_err().to_string();
        assert!(error.contains("sh -c exit 3") && error.contains('3'), "{error}");
    }
}
