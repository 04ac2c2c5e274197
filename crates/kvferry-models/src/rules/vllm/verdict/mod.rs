//! What vLLM 0.32's own connector (NIXL, pull) does with a pair of engines: works, refuses, or moves
//! wrong bytes without saying so.
//!
//! Each rule is a fact about the pair and the reason that goes with it, from reading and running that
//! version. Where a topology leaves the layout of keys or of convolution states open, the one that the
//! connector needs is assumed.

mod pair;
mod rules;
#[cfg(test)]
mod tests;

pub use self::pair::EngineSide;
use self::pair::Pair;
pub use self::rules::Outcome;
use self::rules::RULES;
use crate::model::Model;

/// An outcome and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// What happens.
    pub outcome: Outcome,
    /// Why.
    pub reason: String,
}

/// What the engine's connector does with a pair, for a request of which the decode side holds `cached`
/// tokens already.
pub fn judge(
    model: &Model,
    prefill: EngineSide<'_>,
    decode: EngineSide<'_>,
    cached: u64,
) -> Verdict {
    let pair = Pair { model, prefill, decode, cached };
    match RULES.iter().find(|rule| (rule.applies)(&pair)) {
        Some(rule) => Verdict { outcome: rule.outcome, reason: (rule.reason)(&pair) },
        None => Verdict {
            outcome: Outcome::Works,
            reason: "nothing about this pair is known to be refused or wrong".to_owned(),
        },
    }
}
