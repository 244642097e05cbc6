//! Fencing tokens and home generations.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! counter {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl $name {
            /// The next value.
            #[must_use]
            pub const fn next(self) -> Self {
                Self(self.0 + 1)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

counter!(
    /// Grows each time a lease changes hands, is never reused, and makes a late actor harmless: whoever
    /// stores an effect compares it in the same transaction (I5), and the sandbox refuses a smaller one.
    FencingToken
);
counter!(
    /// Number of a home's published snapshot; 0 is the empty home before the first publish.
    Generation
);
