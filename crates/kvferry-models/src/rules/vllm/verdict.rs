//! What vLLM 0.32's own connector (NIXL, pull) does with a pair of engines: works, refuses, or moves
//! wrong bytes without saying so.
//!
//! Each rule is a fact about the pair and the reason that goes with it, from reading and running that
//! version. Where a topology leaves the layout of keys or of convolution states open, the one that the
//! connector needs is assumed. The file is long because it is one list of rules, read from top to bottom.

use std::fmt;

use super::pools::Pools;
use super::quantised::resolved;
use crate::model::{Model, Packing, Sort};
use crate::rules::topology::{Conv, Topology};

/// What becomes of a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The right bytes arrive.
    Works,
    /// It stops with an error.
    Refuses,
    /// Bytes arrive, but not the right ones.
    SilentlyWrong,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Works => "works",
            Self::Refuses => "refuses",
            Self::SilentlyWrong => "is silently wrong",
        })
    }
}

/// An outcome and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// What happens.
    pub outcome: Outcome,
    /// Why.
    pub reason: String,
}

/// One side of a pair.
#[derive(Clone, Copy, Debug)]
pub struct EngineSide<'a> {
    /// How it is run.
    pub topology: &'a Topology,
    /// What it decides.
    pub pools: &'a Pools,
}

/// A pair of engines.
struct Pair<'a> {
    model: &'a Model,
    prefill: EngineSide<'a>,
    decode: EngineSide<'a>,
    cached: u64,
}

struct Rule {
    outcome: Outcome,
    applies: fn(&Pair<'_>) -> bool,
    reason: fn(&Pair<'_>) -> String,
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

/// In the order in which the engine would meet them: at the start, at the handshake, and never.
const RULES: &[Rule] = &[
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| GONE.contains(&pair.model.family.as_str()),
        reason: |pair| format!("it no longer carries models of type '{}'", pair.model.family),
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| pair.without_split().is_some(),
        reason: |pair| {
            format!(
                "its connector has no split for states of the kind '{}' (NotImplementedError at the \
                 start)",
                pair.without_split().unwrap_or_default()
            )
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| {
            pair.has_convolution() && pair.sides().any(|side| side.topology.conv == Some(Conv::Sd))
        },
        reason: |_| {
            "its connector asserts that convolution states are stored channels first (conv=ds)"
                .to_owned()
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| pair.decode.topology.pcp > 1,
        reason: |_| {
            "its connector does not let the decode side share the work of a prefill".to_owned()
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| {
            let alone = |it: &Topology| it.tp == 1 && it.dcp == it.pcp;
            pair.sides().any(|side| {
                let it = side.topology;
                it.dcp > 1 && if it.pcp > 1 { !alone(it) } else { it.dcp != it.tp }
            })
        },
        reason: |_| {
            "its connector needs all ranks of a side to take turns at tokens, or none".to_owned()
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| pair.sides().any(|side| side.topology.dcp > 1) && !pair.is_latent(),
        reason: |_| "its connector lets ranks take turns at the tokens of latents alone".to_owned(),
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| {
            let shares = |it: &Topology| it.pcp > 1 && it.dcp == 1;
            let (prefill, decode) = (pair.prefill.topology, pair.decode.topology);
            (shares(prefill) && decode.dcp > 1) || (shares(decode) && prefill.dcp > 1)
        },
        reason: |_| {
            "its connector does not pair replicas of a prefill with ranks that take turns at tokens"
                .to_owned()
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| {
            let (prefill, decode) = (pair.prefill.topology.dcp, pair.decode.topology.dcp);
            prefill % decode != 0 && decode % prefill != 0
        },
        reason: |pair| {
            let (prefill, decode) = (pair.prefill.topology.dcp, pair.decode.topology.dcp);
            format!(
                "neither number of ranks that take turns ({prefill} and {decode}) divides the other"
            )
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| {
            pair.is_recurrent() && pair.prefill.topology.dcp != pair.decode.topology.dcp
        },
        reason: |pair| {
            format!(
                "some layers are recurrent, and {} ranks take turns at tokens on the prefill side but \
                 {} on the decode side",
                pair.prefill.topology.dcp, pair.decode.topology.dcp
            )
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| pair.cache_type(pair.prefill) != pair.cache_type(pair.decode),
        reason: |pair| {
            let [prefill, decode] = [pair.prefill, pair.decode].map(|side| pair.cache_type(side));
            format!("the cache data types of the two sides differ ({prefill} and {decode})")
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| pair.decode.topology.pp > 1,
        reason: |_| "its connector does not let the decode side have pipeline stages".to_owned(),
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| pair.prefill.topology.pp > 1 && pair.is_recurrent(),
        reason: |_| {
            "its connector does not support pipeline stages with recurrent layers".to_owned()
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| pair.prefill.topology.pp > 1 && pair.prefill.pools.groups.len() > 1,
        reason: |_| {
            "its connector does not support pipeline stages with several groups of layers when it pulls"
                .to_owned()
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| {
            let (prefill, decode) = pair.tp();
            prefill % decode != 0 && decode % prefill != 0
        },
        reason: |pair| {
            let (prefill, decode) = pair.tp();
            format!(
                "neither degree of tensor parallelism ({prefill} and {decode}) divides the other"
            )
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| match (pair.prefill.kernel(), pair.decode.kernel()) {
            (Some(prefill), Some(decode)) => decode % prefill != 0,
            _ => false,
        },
        reason: |pair| {
            format!(
                "the decode side's kernel block ({}) is not a multiple of the prefill side's ({})",
                pair.decode.kernel().unwrap_or_default(),
                pair.prefill.kernel().unwrap_or_default()
            )
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| {
            let (prefill, decode) = pair.tp();
            let heads = pair.kv_heads().next().unwrap_or(u64::MAX);
            !pair.is_latent()
                && !pair.is_recurrent()
                && prefill > decode
                && u64::from(prefill) > heads
        },
        reason: |pair| {
            let heads = pair.kv_heads().next().unwrap_or_default();
            format!(
                "there are more prefill ranks ({}) than KV heads ({heads}), and fewer decode ranks than \
                 prefill ranks (a bare assertion)",
                pair.tp().0
            )
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| {
            let layout = |side: EngineSide<'_>| side.pools.layout;
            !pair.is_latent() && layout(pair.prefill) != layout(pair.decode)
        },
        reason: |pair| {
            let (prefill, decode) = (pair.prefill.pools.layout, pair.decode.pools.layout);
            format!("the layouts of the two sides differ ({prefill} and {decode})")
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| {
            let (prefill, decode) = pair.tp();
            prefill != decode
                && !pair.is_latent()
                && pair.kv_heads().next().is_some_and(|heads| u64::from(prefill) <= heads)
                && pair.sides().any(|side| !side.pools.layout.is_block_contiguous())
        },
        reason: |pair| {
            format!(
                "between different degrees of tensor parallelism, its connector needs a layout that keeps \
                 a block's heads apart (LBHNC), not {}",
                pair.prefill.pools.layout
            )
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| {
            // A decode rank's heads come from so many prefill ranks.
            let (prefill, decode) = pair.tp();
            let sources = |heads: u64| heads.min(prefill.into()) / u64::from(decode);
            let split = pair.kv_heads().any(|heads| sources(heads) > 1);
            prefill > decode && split && pair.prefill.kernel() != pair.decode.kernel()
        },
        reason: |pair| {
            format!(
                "there are more prefill than decode ranks, and their kernel blocks differ ({} and {})",
                pair.prefill.kernel().unwrap_or_default(),
                pair.decode.kernel().unwrap_or_default()
            )
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| {
            pair.cached > 0
                && pair.is_recurrent()
                && pair.prefill.kernels_per_block() != pair.decode.kernels_per_block()
        },
        reason: |pair| {
            format!(
                "part of the prompt is cached, some layers are recurrent, and a block has {} kernel \
                 blocks on the prefill side but {} on the decode side",
                pair.prefill.kernels_per_block(),
                pair.decode.kernels_per_block()
            )
        },
    },
    Rule {
        outcome: Outcome::Refuses,
        applies: |pair| {
            let shape = |side: EngineSide<'_>| -> Vec<usize> {
                side.pools.groups.iter().map(|group| group.caches.len()).collect()
            };
            shape(pair.prefill) != shape(pair.decode)
        },
        reason: |_| "the two sides group their layers differently".to_owned(),
    },
    Rule {
        outcome: Outcome::SilentlyWrong,
        applies: |pair| {
            let (prefill, decode) = pair.tp();
            prefill != decode && pair.has_one_mamba_group()
        },
        reason: |_| {
            "every rank has a copy of the one Mamba2 group (n_groups = 1), but its connector splits the \
             B and C parts of the convolution state as if each rank had a share"
                .to_owned()
        },
    },
    Rule {
        outcome: Outcome::SilentlyWrong,
        applies: |pair| pair.prefill.topology.scales != pair.decode.topology.scales,
        reason: |pair| {
            let [prefill, decode] = [pair.prefill, pair.decode]
                .map(|side| side.topology.scales.map(|it| it.to_string()));
            format!(
                "the scales of keys and values differ ({} and {}), which its handshake does not compare",
                prefill.join(", "),
                decode.join(", ")
            )
        },
    },
    Rule {
        outcome: Outcome::SilentlyWrong,
        applies: |pair| pair.grows() && pair.prefill.topology.spec != pair.decode.topology.spec,
        reason: |pair| {
            format!(
                "different numbers of speculative tokens ({} and {}) give convolution rows of \
                 different lengths, which its handshake does not compare",
                pair.prefill.topology.spec, pair.decode.topology.spec
            )
        },
    },
];

/// The recurrent kinds that its connector knows how to split, or moves whole.
const SPLIT: [&str; 5] = ["mamba1", "mamba2", "gdn", "kda", "ring"];

/// Kinds with groups of which its connector takes an equal share for each rank, even where there is
/// one group alone and every rank has a copy of it.
const SHARES_ONE_GROUP: [&str; 1] = ["mamba2"];

/// Families that earlier versions carried and this one does not.
const GONE: [&str; 3] = ["bamba", "minimax", "minimax_text_01"];

impl<'a> EngineSide<'a> {
    /// The kernel block that its connector works with: the one that all attention layers have, or the
    /// one that all of theirs divide.
    fn kernel(&self) -> Option<u64> {
        let mut kernels = self.pools.groups.iter().filter_map(|group| group.kernel);
        kernels.next().map(|first| kernels.fold(first, least_common_multiple))
    }

    fn kernels_per_block(&self) -> u64 {
        let blocks =
            self.pools.groups.iter().filter_map(|group| Some(group.block? / group.kernel?));
        blocks.max().unwrap_or(1)
    }
}

fn least_common_multiple(one: u64, other: u64) -> u64 {
    let (mut a, mut b) = (one, other);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    one / a * other
}

impl Pair<'_> {
    /// The name of a side's cache data type, which the two must share.
    fn cache_type(&self, side: EngineSide<'_>) -> &'static str {
        resolved(self.model, side.topology.kv).map_or("auto", |kv| kv.name())
    }

    fn sides(&self) -> impl Iterator<Item = EngineSide<'_>> {
        [self.prefill, self.decode].into_iter()
    }

    fn tp(&self) -> (u32, u32) {
        (self.prefill.topology.tp, self.decode.topology.tp)
    }

    /// A recurrent kind that its connector does not know.
    fn without_split(&self) -> Option<&str> {
        self.model.caches.iter().find_map(|cache| match &cache.sort {
            Sort::Recurrent(kind) if !SPLIT.contains(&kind.word()) => Some(kind.word()),
            _ => None,
        })
    }

    fn is_recurrent(&self) -> bool {
        self.model.caches.iter().any(|cache| cache.sort.is_recurrent())
    }

    /// Whether attention keeps latents and nothing else.
    fn is_latent(&self) -> bool {
        let mut attention = self.model.caches.iter().filter(|cache| !cache.sort.is_recurrent());
        attention.clone().count() > 0
            && attention.all(|cache| matches!(cache.sort, Sort::Latent { .. } | Sort::Indexer))
    }

    /// KV heads of all layers that have any.
    fn kv_heads(&self) -> impl Iterator<Item = u64> {
        let caches = self.model.caches.iter();
        caches
            .filter(|cache| matches!(cache.sort, Sort::Attention { .. }))
            .filter_map(|cache| cache.states().next()?.split.map(|split| split.units))
    }

    fn convolutions(&self) -> impl Iterator<Item = bool> {
        let tensors = self.model.caches.iter().flat_map(|cache| &cache.tensors);
        tensors.filter_map(|tensor| match tensor.packing {
            Packing::Convolution { grows } => Some(grows),
            Packing::Plain | Packing::Planes => None,
        })
    }

    fn has_convolution(&self) -> bool {
        self.convolutions().next().is_some()
    }

    /// Whether a convolution state has columns for speculative tokens.
    fn grows(&self) -> bool {
        self.convolutions().any(|grows| grows)
    }

    fn has_one_mamba_group(&self) -> bool {
        self.model.caches.iter().any(|cache| {
            matches!(&cache.sort, Sort::Recurrent(kind) if SHARES_ONE_GROUP.contains(&kind.word()))
                && cache.states().any(|state| state.split.is_some_and(|split| split.units == 1))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets;
    use crate::rules::vllm;

    fn outcome(model: &str, prefill: &str, decode: &str) -> Outcome {
        let model = presets::find(model).unwrap().model().unwrap();
        let (prefill, decode): (Topology, Topology) =
            (prefill.parse().unwrap(), decode.parse().unwrap());
        let pools = |topology| vllm::pools(&model, topology).unwrap();
        let (one, other) = (pools(&prefill), pools(&decode));
        let prefill = EngineSide { topology: &prefill, pools: &one };
        let decode = EngineSide { topology: &decode, pools: &other };
        judge(&model, prefill, decode, 0).outcome
    }

    #[test]
    fn known_pairs_are_judged_as_they_were_seen() {
        use Outcome::{Refuses, SilentlyWrong, Works};
        for (model, prefill, decode, expected) in [
            ("llama-3.1-8b", "tp=4", "tp=2", Works),
            ("llama-3.1-8b", "tp=2", "tp=4", Works),
            ("llama-3.1-8b", "tp=16", "tp=2", Refuses),
            ("llama-3.1-8b", "tp=2,layout=LBNHC", "tp=4,layout=LBNHC", Refuses),
            ("llama-3.1-8b", "tp=2,layout=LBNHC", "tp=2,layout=LBNHC", Works),
            ("llama-3.1-8b", "tp=1,block=32", "tp=1,block=16", Refuses),
            ("llama-3.1-8b", "tp=1,block=16", "tp=1,block=32", Works),
            ("llama-3.1-8b", "tp=1,pp=2", "tp=1", Works),
            ("llama-3.1-8b", "tp=16,dcp=2", "tp=8", Refuses),
            ("deepseek-v3", "tp=8,dcp=8", "tp=8", Works),
            ("deepseek-v3", "tp=8,dcp=4", "tp=8", Refuses),
            ("deepseek-v3", "pcp=4", "tp=8", Works),
            ("deepseek-v3", "pcp=4,dcp=4", "tp=8", Works),
            ("deepseek-v3", "pcp=4", "tp=8,dcp=8", Refuses),
            ("deepseek-v3", "tp=8", "pcp=2", Refuses),
            ("kimi-linear", "tp=4,dcp=4", "tp=4", Refuses),
            ("llama-3.1-8b", "tp=1", "tp=1,pp=2", Refuses),
            ("kimi-linear", "tp=4", "tp=2,pp=2", Refuses),
            ("kimi-linear", "tp=4", "tp=2", Works),
            ("kimi-k3", "tp=6", "tp=4", Refuses),
            ("falcon-h1-7b", "tp=4", "tp=2", SilentlyWrong),
            ("falcon-h1-7b", "tp=2", "tp=2", Works),
            ("llama-3.1-8b", "tp=4,block=16", "tp=2,block=32", Refuses),
            ("granite-4.0-h-tiny", "tp=2,kernel=16", "tp=1,kernel=16", SilentlyWrong),
            ("nemotron-h-8b", "tp=4,kernel=16", "tp=2,kernel=16", Works),
            ("nemotron-h-8b", "tp=4,conv=sd", "tp=4", Refuses),
            ("qwen3-next", "tp=2,spec=1", "tp=2", SilentlyWrong),
            ("lfm2-1.2b", "tp=2", "tp=2", Refuses),
            ("minimax", "tp=2", "tp=2", Refuses),
            ("gemma-3", "tp=2,pp=2", "tp=2", Refuses),
            ("llama-3.1-8b", "tp=2,kv=fp8", "tp=2", Refuses),
            ("llama-3.1-8b", "tp=2,kv=nvfp4", "tp=4,kv=nvfp4", Works),
            ("llama-3.1-8b", "tp=2,kv=fp8,kscale=2", "tp=2,kv=fp8", SilentlyWrong),
            ("deepseek-v4-flash", "tp=8", "tp=2", Works),
            ("deepseek-v4-flash", "pp=2", "tp=2", Refuses),
            ("deepseek-v4.1", "tp=2", "tp=8", Works),
        ] {
            assert_eq!(outcome(model, prefill, decode), expected, "{model} {prefill} {decode}");
        }
    }
}
