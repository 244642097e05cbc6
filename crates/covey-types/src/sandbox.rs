//! The sandbox machine (design section 5): one function, every other place reads (I15).

use serde::{Deserialize, Serialize};

/// Where a sandbox is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    /// Entered by placement with a home lease; left when a runner accepts, or the term ends. Nothing runs.
    Requested,
    /// Entered when a runner accepted; left when the home is complete. Nobody may write the home.
    Materializing,
    /// Entered when the home is ready; left by the handshake of `sandboxd`.
    Starting,
    /// Entered by the handshake, a finished step, a thaw; left by step, park, stop. No step runs.
    Ready,
    /// Entered when a step begins; left by its result.
    Working,
    /// Entered when idle after the grace; left by thaw, warm limit, pressure. Frozen.
    Parked,
    /// Entered by the decision to end; left when the processes are gone. No new steps.
    Stopping,
    /// Entered when the processes are gone; left by publish, or given up with a reason. Lease held.
    Securing,
    /// Published; the local copy is a cache marked with its generation. Never left.
    Gone,
    /// Runner or sandbox vanished; left by recovery, here or elsewhere.
    Lost,
}

/// What can happen to a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SandboxEvent {
    /// A runner took the request.
    Accepted,
    /// The home is complete enough to start.
    HomeReady,
    /// `sandboxd` answered.
    Handshake,
    /// A tool call was handed over.
    StepBegan,
    /// The last running tool call has its result.
    StepEnded,
    /// Idle for longer than the grace.
    Parked,
    /// A call arrived while parked.
    Thawed,
    /// Somebody decided to end it.
    StopDecided,
    /// Every process is gone, on purpose.
    ProcessesGone,
    /// The final snapshot is published, or securing was given up with a reason.
    Secured,
    /// The sandbox or its runner vanished, or a deadline passed.
    Vanished,
    /// A lost sandbox's home was taken up again.
    Recovered,
}

/// An event that cannot happen in this state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("sandbox in state {state:?} cannot take {event:?}")]
pub struct IllegalTransition {
    /// The state it is in.
    pub state: SandboxState,
    /// What was tried.
    pub event: SandboxEvent,
}

impl SandboxState {
    /// Every state, for exhaustive tables.
    pub const ALL: [Self; 10] = [
        Self::Requested,
        Self::Materializing,
        Self::Starting,
        Self::Ready,
        Self::Working,
        Self::Parked,
        Self::Stopping,
        Self::Securing,
        Self::Gone,
        Self::Lost,
    ];

    /// Applies one event.
    ///
    /// # Errors
    /// When the event cannot happen in this state; the state is then unchanged.
    pub fn apply(self, event: SandboxEvent) -> Result<Self, IllegalTransition> {
        use SandboxEvent as E;
        use SandboxState as S;
        let next = match (self, event) {
            (S::Requested, E::Accepted) => S::Materializing,
            (S::Materializing, E::HomeReady) => S::Starting,
            (S::Starting, E::Handshake) => S::Ready,
            (S::Ready | S::Parked, E::StepBegan) => S::Working,
            // A second call in parallel does not leave the state.
            (S::Working, E::StepBegan) => S::Working,
            (S::Working, E::StepEnded) => S::Ready,
            (S::Ready, E::Parked) => S::Parked,
            (S::Parked, E::Thawed) => S::Ready,
            (S::Ready | S::Working | S::Parked | S::Starting, E::StopDecided) => S::Stopping,
            // Nothing has run yet, so there is nothing to stop and nothing to secure.
            (S::Requested | S::Materializing, E::StopDecided) => S::Gone,
            (S::Stopping, E::ProcessesGone) => S::Securing,
            (S::Securing, E::Secured) => S::Gone,
            (
                S::Requested
                | S::Materializing
                | S::Starting
                | S::Ready
                | S::Working
                | S::Parked
                | S::Stopping
                | S::Securing,
                E::Vanished,
            ) => S::Lost,
            (S::Lost, E::Recovered) => S::Gone,
            _ => return Err(IllegalTransition { state: self, event }),
        };
        Ok(next)
    }
}

impl SandboxEvent {
    /// Every event, for exhaustive tables.
    pub const ALL: [Self; 12] = [
        Self::Accepted,
        Self::HomeReady,
        Self::Handshake,
        Self::StepBegan,
        Self::StepEnded,
        Self::Parked,
        Self::Thawed,
        Self::StopDecided,
        Self::ProcessesGone,
        Self::Secured,
        Self::Vanished,
        Self::Recovered,
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One line per allowed transition; everything that is not listed is refused.
    const TABLE: &str = "\
Requested Accepted Materializing
Requested StopDecided Gone
Requested Vanished Lost
Materializing HomeReady Starting
Materializing StopDecided Gone
Materializing Vanished Lost
Starting Handshake Ready
Starting StopDecided Stopping
Starting Vanished Lost
Ready StepBegan Working
Ready Parked Parked
Ready StopDecided Stopping
Ready Vanished Lost
Working StepBegan Working
Working StepEnded Ready
Working StopDecided Stopping
Working Vanished Lost
Parked StepBegan Working
Parked Thawed Ready
Parked StopDecided Stopping
Parked Vanished Lost
Stopping ProcessesGone Securing
Stopping Vanished Lost
Securing Secured Gone
Securing Vanished Lost
Lost Recovered Gone
";

    #[test]
    fn the_whole_transition_table_is_as_written() {
        let mut lines = String::new();
        for state in SandboxState::ALL {
            for event in SandboxEvent::ALL {
                if let Ok(next) = state.apply(event) {
                    lines.push_str(&format!("{state:?} {event:?} {next:?}\n"));
                }
            }
        }
        assert_eq!(lines, TABLE);
    }

    #[test]
    fn every_state_but_gone_can_be_left() {
        for state in SandboxState::ALL {
            let can_leave = SandboxEvent::ALL.iter().any(|e| state.apply(*e).is_ok_and(|next| next != state));
            assert_eq!(can_leave, state != SandboxState::Gone, "{state:?}");
        }
    }
}
