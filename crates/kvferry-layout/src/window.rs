//! Which tokens a group still needs after `n` of them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::arithmetic::gcd;

/// The live part of a group's sequence. After `n` tokens the first live one is `n + 1 - tokens` (the
/// next token sees itself and the `tokens - 1` before it), rounded down to a multiple of `chunk`, less
/// `extra`, and never below zero. One formula covers full attention, sliding windows and chunked local
/// attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// The window's length; `None` when every token stays live.
    pub tokens: Option<u64>,
    /// Length of a chunk; 1 where the window slides.
    pub chunk: u64,
    /// Tokens kept beyond that.
    pub extra: u64,
}

impl Window {
    /// Everything stays live.
    pub const FULL: Self = Self { tokens: None, chunk: 1, extra: 0 };

    /// The last `tokens` tokens, the next one included.
    pub const fn sliding(tokens: u64) -> Self {
        Self { tokens: Some(tokens), chunk: 1, extra: 0 }
    }

    /// The tokens since the last multiple of `chunk`.
    pub const fn chunked(chunk: u64) -> Self {
        Self { tokens: Some(1), chunk, extra: 0 }
    }

    /// Whether nothing ever stays live: no length, or no chunk.
    pub fn is_empty(&self) -> bool {
        self.chunk == 0 || self.tokens == Some(0)
    }

    /// The first live token after `n` tokens.
    pub fn first_live(&self, n: u64) -> u64 {
        let Some(tokens) = self.tokens else { return 0 };
        let first = (u128::from(n) + 1).saturating_sub(u128::from(tokens));
        let first = first - first % u128::from(self.chunk.max(1));
        u64::try_from(first.saturating_sub(u128::from(self.extra))).unwrap_or(u64::MAX)
    }

    /// Whether a side that keeps this window has, after any number of tokens, all that a side with
    /// the window `needed` needs.
    pub fn keeps(&self, needed: &Self) -> bool {
        let (Some(kept), Some(wanted)) = (self.tokens, needed.tokens) else {
            return self.tokens.is_none();
        };
        // Far from zero both sides are chunk * floor((n + 1 - tokens) / chunk) - extra. With u and v
        // for the two remainders, the kept side's first token exceeds the needed one's by
        // (wanted + needed.extra) - (kept + self.extra) + v - u. Over all n, v - u takes every value
        // that is congruent to kept - wanted modulo the gcd of the chunks and at most
        // needed.chunk - 1: the largest of them decides.
        let other = i128::from(needed.chunk.max(1));
        let (kept, wanted) = (i128::from(kept), i128::from(wanted));
        let step = i128::from(gcd(self.chunk.max(1), needed.chunk.max(1)));
        let largest = (other - 1) - (other - 1 - (kept - wanted)).rem_euclid(step);
        wanted + i128::from(needed.extra) - kept - i128::from(self.extra) + largest <= 0
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.tokens {
            None => f.write_str("every token")?,
            Some(tokens) => write!(f, "the last {tokens} tokens")?,
        }
        if self.chunk > 1 {
            write!(f, " in chunks of {}", self.chunk)?;
        }
        if self.extra > 0 {
            write!(f, " and {} more", self.extra)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_usual_windows() {
        assert_eq!(Window::FULL.first_live(1000), 0);
        assert_eq!(Window::sliding(10).first_live(9), 0);
        assert_eq!(Window::sliding(10).first_live(25), 16);
        assert_eq!(Window::chunked(8).first_live(25), 24);
        assert_eq!(Window::chunked(8).first_live(24), 24);
        assert!(Window::FULL.keeps(&Window::sliding(10)));
        assert!(!Window::sliding(10).keeps(&Window::FULL));
        assert!(!Window::sliding(10).keeps(&Window::sliding(11)));
    }

    fn windows() -> impl Strategy<Value = Window> {
        (prop::option::weighted(0.9, 1u64..20), 1u64..9, 0u64..5)
            .prop_map(|(tokens, chunk, extra)| Window { tokens, chunk, extra })
    }

    proptest! {
        #[test]
        fn keeping_is_decided_as_by_trying_every_length(a in windows(), b in windows()) {
            let tried = (0..400).all(|n| a.first_live(n) <= b.first_live(n));
            prop_assert_eq!(a.keeps(&b), tried);
        }
    }
}
