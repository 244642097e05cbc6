//! Rules: which snapshots of a home are kept, and how large homes may be. What a home leaves open is the org's, what
//! the org leaves open has no limit. What does not belong here: what follows from a rule ([`crate::snapshots`],
//! [`crate::retention`]).

use std::fmt;

use async_trait::async_trait;
use covey_types::{ByteCount, HomeId, OrgId};
use covey_wire::api::history::{HomeRules, OrgRules};

use crate::{DbError, Result};

/// A home or org that has used up so much of what it may is warned.
pub const WARN_PERCENT: u64 = 90;

/// A limit and what of it is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    /// `bytes`, `files` or `org_bytes`.
    pub limit: &'static str,
    /// Now, with the current snapshot.
    pub before: u64,
    /// With the offered one.
    pub after: u64,
    /// At most.
    pub max: u64,
}

impl Load {
    /// Whether the offered snapshot may not become current. One that is no larger than the current one always may:
    /// a limit that was lowered must not keep a home from becoming smaller.
    pub const fn is_refused(&self) -> bool {
        self.after > self.max && self.after > self.before
    }

    /// Whether this publish comes near the limit and the one before did not.
    pub const fn warns(&self) -> bool {
        self.is_near(self.after) && !self.is_near(self.before)
    }

    const fn is_near(&self, used: u64) -> bool {
        used as u128 * 100 >= self.max as u128 * WARN_PERCENT as u128
    }

    /// Why it is refused, and what to do.
    pub fn reason(&self, home: HomeId) -> String {
        let (what, command) = match self.limit {
            "files" => (
                format!("{home} would have {} files of at most {}", self.after, self.max),
                format!("covey home rules {home} --files-max"),
            ),
            "org_bytes" => (
                format!(
                    "with {home} the homes of this org would have {} of at most {}",
                    ByteCount(self.after),
                    ByteCount(self.max)
                ),
                "covey home rules --org --org-bytes-max".to_owned(),
            ),
            _ => (
                format!("{home} would have {} of at most {}", ByteCount(self.after), ByteCount(self.max)),
                format!("covey home rules {home} --bytes-max"),
            ),
        };
        format!("{what}; delete what is not needed, or raise the limit with `{command}`")
    }
}

/// What the rules of a home shall be, given what they are. It may be called again: it must depend on nothing else.
pub struct HomeRulesEdit(pub Box<dyn Fn(HomeRules) -> HomeRules + Send + Sync>);

/// What the rules of an org shall be, and how many bytes all its homes may have, given what they are.
pub struct OrgRulesEdit(pub Box<dyn Fn(OrgRules) -> (HomeRules, Option<u64>) + Send + Sync>);

impl fmt::Debug for HomeRulesEdit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HomeRulesEdit")
    }
}

impl fmt::Debug for OrgRulesEdit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OrgRulesEdit")
    }
}

/// What is stored of rules.
#[async_trait]
pub trait Rules: Send + Sync {
    /// A home's own rules, and those that hold for it.
    ///
    /// # Errors
    /// [`DbError::NotFound`].
    async fn home_rules(&self, org: OrgId, home: HomeId) -> Result<(HomeRules, HomeRules)>;

    /// The org's rules and the size of its homes.
    ///
    /// # Errors
    /// [`DbError::NotFound`].
    async fn org_rules(&self, org: OrgId) -> Result<OrgRules>;

    /// Changes a home's own rules; what is none is left to the org. Returns them as [`Self::home_rules`] does.
    ///
    /// # Errors
    /// [`DbError::NotFound`]; [`DbError::Invalid`] for a number that is too large.
    async fn edit_home_rules(
        &self,
        org: OrgId,
        home: HomeId,
        edit: HomeRulesEdit,
    ) -> Result<(HomeRules, HomeRules)>;

    /// Changes the org's rules.
    ///
    /// # Errors
    /// As [`Self::edit_home_rules`].
    async fn edit_org_rules(&self, org: OrgId, edit: OrgRulesEdit) -> Result<OrgRules>;
}

/// A number that both databases can hold.
pub(crate) fn stored(name: &str, number: Option<u64>) -> Result<Option<i64>> {
    let too_large = |_| DbError::Invalid(format!("`{name}` is larger than {}", i64::MAX));
    number.map(|number| i64::try_from(number).map_err(too_large)).transpose()
}

/// What holds for a home.
pub(crate) fn effective(own: &HomeRules, of_org: &HomeRules) -> HomeRules {
    HomeRules {
        keep_newest: own.keep_newest.or(of_org.keep_newest),
        keep_for_s: own.keep_for_s.or(of_org.keep_for_s),
        bytes_max: own.bytes_max.or(of_org.bytes_max),
        files_max: own.files_max.or(of_org.files_max),
    }
}

/// Files and bytes of a snapshot.
#[derive(Clone, Copy)]
pub(crate) struct Size {
    pub(crate) files: u64,
    pub(crate) bytes: u64,
}

/// What each limit that holds for a home is used. `org`: bytes of all homes of the org now, and at most.
pub(crate) fn loads_of(rules: &HomeRules, now: Size, offered: Size, org: Option<(u64, u64)>) -> Vec<Load> {
    let mut loads = Vec::new();
    let mut add = |limit, before, after, max: Option<u64>| {
        loads.extend(max.map(|max| Load { limit, before, after, max }));
    };
    add("bytes", now.bytes, offered.bytes, rules.bytes_max);
    add("files", now.files, offered.files, rules.files_max);
    if let Some((all, max)) = org {
        add("org_bytes", all, all.saturating_sub(now.bytes).saturating_add(offered.bytes), Some(max));
    }
    loads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_refuses_growth_beyond_it_and_warns_once_before() {
        let load = |before, after| Load { limit: "bytes", before, after, max: 100 };
        let table = [
            (0, 89, false, false),
            (0, 90, false, true),
            (90, 95, false, false),
            (95, 100, false, false),
            (95, 101, true, false),
            (300, 300, false, false),
            (300, 200, false, false),
            (300, 301, true, false),
            (0, 101, true, true),
        ];
        for (before, after, refused, warns) in table {
            let load = load(before, after);
            assert_eq!((load.is_refused(), load.warns()), (refused, warns), "{load:?}");
        }
        let none = Load { limit: "bytes", before: 0, after: 1, max: 0 };
        assert!(none.is_refused(), "0 is a limit, not the want of one");
    }
}
