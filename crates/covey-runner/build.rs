//! Builds `sandboxd` as a static binary and hands its path to the crate, which embeds it.
//!
//! A nested cargo with a target directory of its own: no lock is shared with the outer one. The C library is linked in, so
//! that the program runs in a root that has none. What does not belong here: anything at run time.

use std::env;
use std::path::PathBuf;
use std::process::{Command, exit};

/// Set by the outer cargo, clippy or the user for the outer build; they would change or break the nested one.
const LEFT_OUT: [&str; 12] = [
    "CARGO_BUILD_RUSTC_WRAPPER",
    "CARGO_BUILD_RUSTC_WORKSPACE_WRAPPER",
    "CARGO_BUILD_RUSTFLAGS",
    "CARGO_BUILD_TARGET",
    "CARGO_BUILD_TARGET_DIR",
    "CARGO_TARGET_DIR",
    "CLIPPY_ARGS",
    "CLIPPY_CONF_DIR",
    "RUSTC_WORKSPACE_WRAPPER",
    "RUSTC_WRAPPER",
    "RUSTDOCFLAGS",
    "RUSTFLAGS",
];

fn main() {
    if let Err(why) = build() {
        eprintln!("sandboxd was not built: {why}");
        exit(1);
    }
}

fn build() -> Result<(), String> {
    let variable = |name: &str| env::var(name).map_err(|_| format!("{name} is not set; build with cargo"));
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR")?).join("../..");
    for path in
        ["crates/covey-sandboxd", "crates/covey-wire", "crates/covey-types", "Cargo.toml", "Cargo.lock"]
    {
        println!("cargo::rerun-if-changed={}", root.join(path).display());
    }
    let target = variable("TARGET")?;
    let target_dir = PathBuf::from(variable("OUT_DIR")?).join("sandboxd");
    let mut cargo = Command::new(variable("CARGO")?);
    cargo
        .args(["build", "--quiet", "--locked", "--package", "covey-sandboxd", "--profile", "sandboxd"])
        .args(["--target", &target])
        .arg("--target-dir")
        .arg(&target_dir)
        .arg("--manifest-path")
        .arg(root.join("Cargo.toml"))
        .env("CARGO_ENCODED_RUSTFLAGS", "-Ctarget-feature=+crt-static");
    for name in LEFT_OUT {
        cargo.env_remove(name);
    }
    let status = cargo.status().map_err(|error| format!("cargo does not start: {error}"))?;
    if !status.success() {
        return Err(format!("the nested cargo ended with {status}; its messages stand above"));
    }
    let binary = target_dir.join(&target).join("sandboxd/covey-sandboxd");
    println!("cargo::rustc-env=COVEY_SANDBOXD={}", binary.display());
    Ok(())
}
