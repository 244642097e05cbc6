//! The version numbers of the links. A handshake picks the lower of both sides' newest; a side that
//! cannot go that low says which of the two is old.

/// Newest version of the runner link that this build speaks. 2: publishes name their epoch, and may be answered with
/// `over_quota` and `collected`; a peer of version 1 gets `refused` in their place. 3: `forget_homes`, which an older
/// peer is not sent: its copies of deleted homes stay until it is upgraded. 4: `servers`, which an older runner is not
/// sent: it has a link to one server only.
pub const RUNNER_LINK: u32 = 4;
/// Oldest version of the runner link that this build speaks.
pub const RUNNER_LINK_MIN: u32 = 1;
/// Newest version of the store link that this build speaks. 2: `open` may be answered with `opened`, for a store that is
/// encrypted; a runner of version 1 is refused there.
pub const STORE_LINK: u32 = 2;
/// Oldest version of the store link that this build speaks.
pub const STORE_LINK_MIN: u32 = 1;
/// Newest version of the tool link that this build speaks. Running sandboxes have frozen daemons, so the
/// runner adapts to them and never the other way round.
pub const TOOL_LINK: u32 = 1;
/// Oldest version of the tool link that this build speaks.
pub const TOOL_LINK_MIN: u32 = 1;

/// Two builds whose version ranges do not meet.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "the {old_side} is too old: it speaks {link} up to version {old_newest}, this side needs at least {needed}; upgrade the {old_side}"
)]
pub struct Incompatible {
    /// Which link.
    pub link: &'static str,
    /// The side to upgrade.
    pub old_side: &'static str,
    /// The newest version of the old side.
    pub old_newest: u32,
    /// The oldest version of the new side.
    pub needed: u32,
}

/// Picks the version both sides speak.
///
/// # Errors
/// When the ranges do not meet; the error names the side to upgrade.
pub fn agree(
    link: &'static str,
    ours: (u32, u32),
    theirs: (u32, u32),
    our_side: &'static str,
    their_side: &'static str,
) -> Result<u32, Incompatible> {
    let newest = ours.1.min(theirs.1);
    if newest < ours.0 {
        return Err(Incompatible { link, old_side: their_side, old_newest: theirs.1, needed: ours.0 });
    }
    if newest < theirs.0 {
        return Err(Incompatible { link, old_side: our_side, old_newest: ours.1, needed: theirs.0 });
    }
    Ok(newest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_newest_version_is_picked_and_the_old_side_is_named() {
        assert_eq!(agree("tool link", (1, 3), (2, 5), "runner", "sandbox"), Ok(3));
        let error = agree("tool link", (3, 4), (1, 2), "runner", "sandbox").unwrap_err();
        assert_eq!((error.old_side, error.needed), ("sandbox", 3));
        let error = agree("tool link", (1, 2), (3, 4), "runner", "sandbox").unwrap_err();
        assert_eq!((error.old_side, error.needed), ("runner", 3));
    }
}
