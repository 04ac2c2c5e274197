//! The rules, in one list that is read from top to bottom: the first that applies to a pair is what becomes of it.

use std::fmt;

use super::pair::{EngineSide, Pair};
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

/// What becomes of a pair about which something is so, and the reason to give for it.
pub(super) struct Rule {
    pub(super) outcome: Outcome,
    pub(super) applies: fn(&Pair<'_>) -> bool,
    pub(super) reason: fn(&Pair<'_>) -> String,
}

/// In the order in which the engine would meet them: at the start, at the handshake, and never.
pub(super) const RULES: &[Rule] = &[
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

/// Families that earlier versions carried and this one does not.
const GONE: [&str; 3] = ["bamba", "minimax", "minimax_text_01"];
