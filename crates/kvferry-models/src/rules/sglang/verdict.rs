//! What the transfer back ends of SGLang 0.5.23 itself (mooncake, nixl and what shares their code) do with a pair.
//!
//! From reading that version; `tests/sglang/test_verdicts.py` asks its own functions about the same pairs.

use crate::model::{Model, Sort};
use crate::rules::topology::Topology;
use crate::rules::vllm::verdict::{Outcome, Verdict};

/// The recurrent kinds whose convolution has sections that it does not know of.
const WITHOUT_SECTIONS: [&str; 1] = ["mamba2"];

/// What the engine's own back ends do with a pair.
pub fn judge(model: &Model, prefill: &Topology, decode: &Topology) -> Verdict {
    let page = |side: &Topology| side.block.unwrap_or(1);
    let heads = model.caches.iter().find_map(|cache| match cache.sort {
        Sort::Attention { .. } => cache.states().next()?.split.map(|split| split.units),
        _ => None,
    });
    let sections = model.caches.iter().any(|cache| {
        matches!(&cache.sort, Sort::Recurrent(kind) if WITHOUT_SECTIONS.contains(&kind.word()))
    });
    let recurrent = model.caches.iter().any(|cache| cache.sort.is_recurrent());
    let (p, d) = (prefill.tp, decode.tp);
    let found = if page(prefill) != page(decode) {
        let (p, d) = (page(prefill), page(decode));
        Some((Outcome::Refuses, format!("the page sizes of the two sides differ ({p} and {d})")))
    } else if decode.pp != 1 && decode.pp != prefill.pp {
        let (p, d) = (prefill.pp, decode.pp);
        let reason = format!("the decode side has {d} pipeline stages, and must have {p} or one");
        Some((Outcome::Refuses, reason))
    } else if d > p && d % p != 0 {
        let reason = format!(
            "it divides {d} decode ranks by {p} prefill ranks and rounds down, so that the last of them ask a rank that is \
             not there"
        );
        Some((Outcome::Refuses, reason))
    } else if sections && p != d {
        let reason = "each rank's convolution state holds its part of x, then of B, then of C (mamba2), but its back ends move \
                      one run of channels, and say only that performance is not guaranteed"
            .to_owned();
        Some((Outcome::SilentlyWrong, reason))
    } else if p > d && p % d != 0 && (heads.is_some_and(|heads| heads > 1) || recurrent) {
        let reason = format!(
            "it divides {p} prefill ranks by {d} decode ranks and rounds down: some are never read, and their heads keep what \
             was there before"
        );
        Some((Outcome::SilentlyWrong, reason))
    } else {
        None
    };
    match found {
        Some((outcome, reason)) => Verdict { outcome, reason },
        None => Verdict {
            outcome: Outcome::Works,
            reason: "nothing about this pair is known to be refused or wrong".to_owned(),
        },
    }
}
