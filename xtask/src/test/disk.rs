//! Room on the disk: a full one fails stages in many ways, and each looks like a fault of the product.

use std::path::Path;

use anyhow::Context as _;

/// What a run from nothing writes: debug and release builds, homes, stores, databases.
const WHOLE_RUN_GIB: u64 = 24;
/// SeaweedFS refuses to write, and databases stop, with a little left.
const FULL_BELOW_GIB: u64 = 3;

/// Says so when a whole run is likely to fill the disk.
pub(super) fn warn_before_a_whole_run(root: &Path) -> anyhow::Result<()> {
    for dir in [root, &std::env::temp_dir()] {
        let free = free_gib(dir)?;
        if free < WHOLE_RUN_GIB {
            let dir = dir.display();
            eprintln!(
                "warning: {free} GiB are free at {dir}; a run from nothing takes up to {WHOLE_RUN_GIB} GiB"
            );
        }
    }
    Ok(())
}

/// After a stage has failed: names a full disk as the likely cause.
pub(super) fn blame_if_full(root: &Path) {
    for dir in [root, &std::env::temp_dir()] {
        match free_gib(dir) {
            Ok(free) if free < FULL_BELOW_GIB => eprintln!(
                "only {free} GiB are free at {}: this may be why; free some and run it again",
                dir.display()
            ),
            Ok(_) => {}
            Err(error) => eprintln!("{error:#}"),
        }
    }
}

/// Whole GiB that an ordinary user may still write below `dir`.
fn free_gib(dir: &Path) -> anyhow::Result<u64> {
    let found = rustix::fs::statvfs(dir)
        .with_context(|| format!("the file system of {} cannot be asked", dir.display()))?;
    Ok((found.f_bavail * found.f_frsize) >> 30)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_is_not_there_is_named() {
        let error = free_gib(Path::new("/nowhere/at-all")).unwrap_err();
        assert!(format!("{error:#}").contains("/nowhere/at-all"), "{error:#}");
        free_gib(&std::env::temp_dir()).unwrap();
    }
}
