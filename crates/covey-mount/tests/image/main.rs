//! Images as bytes, without mounting them: their form is fixed, and what they cannot hold is refused by name.

#![expect(clippy::unwrap_used, reason = "a failed test ends there")]

mod made;
mod refused;
