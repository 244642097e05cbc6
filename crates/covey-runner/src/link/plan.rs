//! Which servers a runner has links to, and when it dials again: pure, so that it can be tried move by move.
//!
//! What stays true: while no link stands or is being made, any server is dialled; each server that a server has named has one
//! link, unless it was dialled in vain a moment ago. The name is its URL. A server that is not named any more keeps its
//! link until that ends by itself: who names it may be the one that is cut off.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::LinkId;

/// First pause between two dials of one target; doubles up to the second.
const REDIAL_PAUSE: Duration = Duration::from_millis(100);
const REDIAL_PAUSE_MAX: Duration = Duration::from_secs(10);

/// Whom to dial.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Target {
    /// Whoever answers where this runner was told to dial.
    Any,
    /// The server with this URL.
    At(String),
}

#[derive(Debug)]
struct Attempt {
    target: Target,
    /// The server that it leads to, once that is known.
    url: Option<String>,
    is_up: bool,
    began: Instant,
}

#[derive(Debug, Clone, Copy)]
struct Pause {
    until: Instant,
    length: Duration,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(super) struct Plan {
    links: BTreeMap<LinkId, Attempt>,
    /// The servers that were named last.
    named: BTreeSet<String>,
    pauses: BTreeMap<Target, Pause>,
}

impl Plan {
    /// Who is to be dialled now.
    pub(super) fn due(&self, now: Instant) -> Vec<Target> {
        let is_over = |target: &Target| self.pauses.get(target).is_none_or(|pause| now >= pause.until);
        self.wanted().into_iter().filter(is_over).collect()
    }

    /// When somebody is to be dialled, at the earliest.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.wanted().iter().filter_map(|target| self.pauses.get(target)).map(|pause| pause.until).min()
    }

    fn wanted(&self) -> Vec<Target> {
        let has = |url: &String| self.links.values().any(|link| link.url.as_ref() == Some(url));
        let named = self.named.iter().filter(|url| !has(url)).cloned().map(Target::At);
        let is_alone = !self.links.values().any(|link| link.is_up || link.target == Target::Any);
        is_alone.then_some(Target::Any).into_iter().chain(named).collect()
    }

    pub(super) fn dialling(&mut self, link: LinkId, target: Target) {
        let url = match &target {
            Target::Any => None,
            Target::At(url) => Some(url.clone()),
        };
        self.links.insert(link, Attempt { target, url, is_up: false, began: Instant::now() });
    }

    pub(super) fn up(&mut self, link: LinkId) {
        if let Some(attempt) = self.links.get_mut(&link) {
            attempt.is_up = true;
        }
    }

    /// A server says where it is, and who else there is.
    pub(super) fn told(&mut self, link: LinkId, own: String, all: Vec<String>) {
        if let Some(attempt) = self.links.get_mut(&link) {
            attempt.url = Some(own);
        }
        self.named = all.into_iter().collect();
        self.pauses.retain(|target, _| match target {
            Target::Any => true,
            Target::At(url) => self.named.contains(url),
        });
    }

    /// The link ended; how long its target is left alone.
    pub(super) fn down(&mut self, link: LinkId, now: Instant) -> Duration {
        let Some(attempt) = self.links.remove(&link) else { return Duration::ZERO };
        let was_good = attempt.is_up && now.duration_since(attempt.began) > REDIAL_PAUSE_MAX;
        let before = self.pauses.get(&attempt.target).filter(|_| !was_good);
        let length = before.map_or(REDIAL_PAUSE, |pause| (pause.length * 2).min(REDIAL_PAUSE_MAX));
        self.pauses.insert(attempt.target, Pause { until: now + length, length });
        length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(url: &str) -> Target {
        Target::At(url.to_owned())
    }

    fn names(urls: &[&str]) -> Vec<String> {
        urls.iter().map(|url| (*url).to_owned()).collect()
    }

    #[test]
    fn the_one_server_is_dialled_until_it_answers_and_again_when_it_goes() {
        let (mut plan, now) = (Plan::default(), Instant::now());
        assert_eq!(plan.due(now), [Target::Any]);
        plan.dialling(LinkId(1), Target::Any);
        assert_eq!(plan.due(now), []);
        let first = plan.down(LinkId(1), now);
        assert_eq!((plan.due(now), plan.next_due()), (vec![], Some(now + first)));
        assert_eq!(plan.due(now + first), [Target::Any]);
        plan.dialling(LinkId(2), Target::Any);
        assert_eq!(
            plan.down(LinkId(2), now),
            first * 2,
            "a server that is away is dialled less and less often"
        );
        plan.dialling(LinkId(3), Target::Any);
        plan.up(LinkId(3));
        assert_eq!((plan.due(now), plan.next_due()), (vec![], None));
    }

    #[test]
    fn every_server_that_is_named_gets_one_link() {
        let (mut plan, now) = (Plan::default(), Instant::now());
        plan.dialling(LinkId(1), Target::Any);
        plan.up(LinkId(1));
        plan.told(LinkId(1), "a".to_owned(), names(&["a", "b", "c"]));
        assert_eq!(plan.due(now), [at("b"), at("c")], "the one that says so has its link");
        plan.dialling(LinkId(2), at("b"));
        plan.dialling(LinkId(3), at("c"));
        plan.up(LinkId(2));
        plan.told(LinkId(2), "b".to_owned(), names(&["a", "b", "c"]));
        assert_eq!(plan.due(now), []);
        plan.down(LinkId(1), now);
        assert_eq!(
            plan.due(now + REDIAL_PAUSE_MAX),
            [at("a")],
            "dialled by its name, while others are there"
        );
        plan.told(LinkId(2), "b".to_owned(), names(&["b", "c"]));
        assert_eq!(plan.due(now + REDIAL_PAUSE_MAX), [], "it is not among them any more");
    }

    #[test]
    fn when_all_links_are_gone_any_server_is_as_good_as_those_that_were_named() {
        let (mut plan, now) = (Plan::default(), Instant::now());
        plan.dialling(LinkId(1), Target::Any);
        plan.up(LinkId(1));
        plan.told(LinkId(1), "a".to_owned(), names(&["a", "b"]));
        plan.dialling(LinkId(2), at("b"));
        plan.down(LinkId(1), now);
        plan.down(LinkId(2), now);
        assert_eq!(plan.due(now + REDIAL_PAUSE_MAX), [Target::Any, at("a"), at("b")]);
    }
}
