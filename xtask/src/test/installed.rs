//! Tools that must be on the machine, and the sentence for when they are not.

use anyhow::bail;

use crate::process;

/// Fails with what to install when `program` is not on the machine.
pub(super) fn require(program: &str, debian_package: &str) -> anyhow::Result<()> {
    if !process::exists(program) {
        bail!("`{program}` is not installed; on Debian: `apt-get install {debian_package}`");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_tool_is_named_with_its_package() {
        let error = require("no-such-program-anywhere", "some-package").unwrap_err().to_string();
        assert!(error.contains("apt-get install some-package"), "{error}");
        assert!(require("sh", "dash").is_ok());
    }
}
