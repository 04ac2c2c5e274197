//! Which requests are audited, and what follows for the pair of engines.
//!
//! An audit compares the digest of what the source's ranks hold with that of what has landed. A
//! [`Trial`] is a plain value: what one rank knows of one life of an engine that it reads from.

use std::fmt;

/// So many requests of every new pair of engines are audited, whatever the fraction.
pub(crate) const FIRST: u32 = 3;

/// After so many mismatches a pair is refused: wrong hardware must not serve.
pub(crate) const PATIENCE: u32 = 3;

/// How many of the requests are audited.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Audit(f64);

impl Audit {
    /// None, not even the first ones.
    pub const OFF: Self = Self(0.0);
    /// All of them.
    pub const ALL: Self = Self(1.0);
    /// One in a hundred, and the first ones of every pair.
    pub const SAMPLED: Self = Self(0.01);

    /// This fraction of them, and the first ones of every pair; 0 is none at all.
    pub fn fraction(fraction: f64) -> Result<Self, NotAFraction> {
        match (0.0..=1.0).contains(&fraction) {
            true => Ok(Self(fraction)),
            false => Err(NotAFraction(fraction)),
        }
    }
}

/// The value is not between 0 and 1.
///
/// What to do: say how many of the requests are to be audited, from 0 for none to 1 for all.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("audit is {0}, but must be a fraction from 0 (none) to 1 (all requests)")]
pub struct NotAFraction(pub f64);

impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::OFF => f.write_str("off"),
            Self::ALL => f.write_str("all"),
            Self(fraction) => write!(f, "{fraction}"),
        }
    }
}

/// What is known of a pair.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Trial {
    matched: u32,
    mismatched: u32,
    /// Why it is refused.
    refused: Option<String>,
    /// It was said that audits are not possible.
    unable: bool,
}

impl Trial {
    /// Whether the next request is audited; `dice` is any number.
    pub(crate) fn due(&self, audit: Audit, dice: u64) -> bool {
        // 53 bits make an exact fraction below 1.
        let thrown = (dice >> 11) as f64 / (1_u64 << 53) as f64;
        audit != Audit::OFF && (self.matched < FIRST || thrown < audit.0)
    }

    /// Why nothing is read from this engine any more.
    pub(crate) fn refused(&self) -> Option<&str> {
        self.refused.as_deref()
    }

    /// An audit found no difference. Answers whether it was the first.
    pub(crate) fn matched(&mut self) -> bool {
        self.matched = self.matched.saturating_add(1);
        self.matched == 1
    }

    /// An audit found a difference. Answers whether that was one too many.
    pub(crate) fn mismatched(&mut self, what: &str) -> bool {
        self.mismatched += 1;
        let enough = self.mismatched >= PATIENCE && self.refused.is_none();
        if enough {
            self.refused = Some(format!(
                "{PATIENCE} audits found other bytes here than at the source, the last one in {what}: \
                 something between the two, or on one of them, corrupts. Find out what, then restart \
                 either engine"
            ));
        }
        enough
    }

    /// An audit is not possible. Answers whether that is news.
    pub(crate) fn unable(&mut self) -> bool {
        !std::mem::replace(&mut self.unable, true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_requests_of_a_pair_are_always_audited() {
        let mut trial = Trial::default();
        for n in 0..FIRST {
            assert!(trial.due(Audit::SAMPLED, u64::MAX), "{n}");
            assert!(!trial.due(Audit::OFF, 0), "off is off");
            assert_eq!(trial.matched(), n == 0);
        }
        assert!(!trial.due(Audit::SAMPLED, u64::MAX));
        assert!(trial.due(Audit::SAMPLED, 0));
        assert!(trial.due(Audit::ALL, u64::MAX));
    }

    #[test]
    fn a_fraction_is_a_fraction() {
        let mut trial = Trial::default();
        (0..FIRST).for_each(|_| _ = trial.matched());
        let quarter = Audit::fraction(0.25).unwrap();
        let due = (0..1000_u64).filter(|n| trial.due(quarter, n << 54)).count();
        assert_eq!(due, 256, "of 1000 numbers that go round 0..1 almost once");
        for wrong in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            let refused = Audit::fraction(wrong).unwrap_err().to_string();
            assert!(refused.contains("from 0 (none) to 1 (all requests)"), "{refused}");
        }
        let shown = [Audit::OFF, Audit::ALL, Audit::SAMPLED].map(|audit| audit.to_string());
        assert_eq!(shown, ["off", "all", "0.01"]);
    }

    #[test]
    fn a_pair_is_refused_after_a_few_mismatches_and_stays_so() {
        let mut trial = Trial::default();
        for n in 1..PATIENCE {
            assert!(!trial.mismatched("layers.0/k"), "{n}");
            trial.matched();
            assert_eq!(trial.refused(), None);
        }
        assert!(trial.mismatched("layers.0/k"));
        assert!(!trial.mismatched("layers.1/k"), "said once");
        let reason = trial.refused().unwrap();
        assert!(reason.contains("layers.0/k") && reason.contains("restart"), "{reason}");
        trial.matched();
        assert!(trial.refused().is_some());
    }

    #[test]
    fn that_audits_are_not_possible_is_said_once() {
        let mut trial = Trial::default();
        assert!(trial.unable());
        assert!(!trial.unable());
    }
}
