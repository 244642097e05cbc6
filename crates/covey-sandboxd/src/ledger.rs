//! What the daemon knows of each step: a step id is run once, ever (I4).
//!
//! What stays true: an id is recorded before it is accepted, and never forgotten; a result is kept until it is
//! acknowledged. When a limit is reached new ids are refused, old ones are never dropped.
//! What does not belong here: sockets, tools.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use covey_types::StepId;
use covey_wire::tool::{StepReport, ToolResult};

/// Step ids of one sandbox: about 64 MiB if all are used. A sandbox at this limit must be replaced.
pub(crate) const STEP_IDS_MAX: usize = 1 << 20;
/// Calls that run or whose result is kept at one time.
pub(crate) const OPEN_STEPS_MAX: usize = 1024;

#[derive(Debug)]
enum Step {
    Running(Arc<AtomicBool>),
    // Boxed, because nearly all of a million entries are the small last kind.
    Done(Box<ToolResult>),
    Acknowledged,
}

/// What becomes of a call that arrived.
#[derive(Debug)]
pub(crate) enum Begin {
    /// It is new and recorded: run it. The flag is set when it is to be interrupted.
    Run(Arc<AtomicBool>),
    /// Its id was seen before.
    Seen(StepReport),
    /// A limit is reached; nothing was recorded.
    Full,
}

/// All steps of this sandbox.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    steps: HashMap<StepId, Step>,
    open: usize,
}

impl Ledger {
    /// Records a call.
    pub(crate) fn begin(&mut self, step: StepId) -> Begin {
        let is_full = self.open >= OPEN_STEPS_MAX || self.steps.len() >= STEP_IDS_MAX;
        match self.steps.entry(step) {
            Entry::Occupied(_) => Begin::Seen(self.report(step)),
            Entry::Vacant(_) if is_full => Begin::Full,
            Entry::Vacant(slot) => {
                let interrupt = Arc::new(AtomicBool::new(false));
                slot.insert(Step::Running(Arc::clone(&interrupt)));
                self.open += 1;
                Begin::Run(interrupt)
            }
        }
    }

    /// Keeps a result.
    pub(crate) fn finish(&mut self, step: StepId, result: &ToolResult) {
        self.steps.insert(step, Step::Done(Box::new(result.clone())));
    }

    /// Drops a result that is durable elsewhere; a call that still runs is not touched.
    pub(crate) fn acknowledge(&mut self, step: StepId) {
        if let Some(entry @ Step::Done(_)) = self.steps.get_mut(&step) {
            *entry = Step::Acknowledged;
            self.open -= 1;
        }
    }

    /// Says what is known.
    pub(crate) fn report(&self, step: StepId) -> StepReport {
        match self.steps.get(&step) {
            None => StepReport::Unknown,
            Some(Step::Running(_)) => StepReport::Running,
            Some(Step::Done(result)) => StepReport::Done { result: (**result).clone() },
            Some(Step::Acknowledged) => StepReport::Acknowledged,
        }
    }

    /// The flag that interrupts a running call.
    pub(crate) fn interrupt_flag(&self, step: StepId) -> Option<Arc<AtomicBool>> {
        match self.steps.get(&step) {
            Some(Step::Running(flag)) => Some(Arc::clone(flag)),
            _ => None,
        }
    }

    /// Every kept result, for a new connection.
    pub(crate) fn kept(&self) -> Vec<(StepId, ToolResult)> {
        let kept = self.steps.iter().filter_map(|(step, entry)| match entry {
            Step::Done(result) => Some((*step, (**result).clone())),
            _ => None,
        });
        kept.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(n: u128) -> StepId {
        StepId::from_uuid(uuid::Uuid::from_u128(n))
    }

    #[test]
    fn a_step_is_run_once_even_after_it_was_acknowledged() {
        let mut ledger = Ledger::default();
        assert!(matches!(ledger.begin(step(1)), Begin::Run(_)));
        assert!(matches!(ledger.begin(step(1)), Begin::Seen(StepReport::Running)));
        let result = ToolResult::text("x", false);
        ledger.finish(step(1), &result);
        assert!(matches!(ledger.begin(step(1)), Begin::Seen(StepReport::Done { .. })));
        assert_eq!(ledger.kept(), [(step(1), result)]);
        ledger.acknowledge(step(1));
        ledger.acknowledge(step(1));
        assert!(matches!(ledger.begin(step(1)), Begin::Seen(StepReport::Acknowledged)));
        assert!(ledger.kept().is_empty());
        assert_eq!(ledger.open, 0);
    }

    #[test]
    fn a_running_step_cannot_be_acknowledged_away() {
        let mut ledger = Ledger::default();
        assert!(matches!(ledger.begin(step(1)), Begin::Run(_)));
        ledger.acknowledge(step(1));
        assert_eq!(ledger.report(step(1)), StepReport::Running);
    }

    #[test]
    fn at_the_limit_new_steps_are_refused_and_old_ones_stay_known() {
        let mut ledger = Ledger::default();
        for n in 0..OPEN_STEPS_MAX as u128 {
            assert!(matches!(ledger.begin(step(n)), Begin::Run(_)));
        }
        assert!(matches!(ledger.begin(step(u128::MAX)), Begin::Full));
        assert_eq!(ledger.report(step(u128::MAX)), StepReport::Unknown);
        assert_eq!(ledger.report(step(0)), StepReport::Running);
    }
}
