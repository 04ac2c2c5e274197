//! The facts of one rank as plain data.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::Spot;
use crate::state::{Kind, Phase, StateBox, Writer};
use crate::view::{Region, View};
use crate::window::Window;

/// The facts of one rank as an adapter states them, not yet checked. [`Manifest::new`](crate::Manifest::new) checks them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Draft {
    /// What makes equal shapes mean equal things: model, revision, quantisation, position encoding.
    /// Two sides fit only when all of it is equal.
    pub identity: BTreeMap<String, String>,
    /// The engine that this rank belongs to, for messages.
    pub engine: String,
    /// The rank's number in its engine. Ranks that could be read alike are taken in turn by it.
    pub rank: u32,
    /// The rank's place in its engine (`pp0 tp1`), for messages.
    pub label: String,
    /// Memory.
    pub regions: Vec<Region>,
    /// The kinds of states, by index.
    pub kinds: Vec<Kind>,
    /// Groups, in the order of the engine's block tables. A group may be empty on this rank.
    pub groups: Vec<Group>,
    /// What writes the states of a kind, by the kind's index, where its name alone does not say what its bytes mean. The
    /// last field: the compact form of a manifest without any is that of the version before.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub writers: BTreeMap<u32, Writer>,
}

/// Pieces that share a block table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// For messages.
    pub name: String,
    /// Number of blocks; ids run from 0 to `blocks - 1`.
    pub blocks: u32,
    /// The id that marks a dead entry of a block table, if the engine has one.
    pub null_block: Option<u32>,
    /// Tokens between the starts of two neighbouring entries of the block table; `None` where one
    /// block holds all that there is of a sequence (recurrent states).
    pub tokens_per_block: Option<u64>,
    /// Which tokens its blocks keep.
    pub window: Window,
    /// What the group's blocks hold.
    pub pieces: Vec<Piece>,
    /// What else in its blocks is used by the engine but holds nothing that could be moved.
    pub scratch: Vec<Scratch>,
}

/// A box of a state, and where its bytes lie.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Piece {
    /// The state's name, the same on every rank and in every engine: `layers.3/k`.
    pub state: String,
    /// Index of the state's kind.
    pub kind: u32,
    /// Which part of every entry.
    pub bounds: StateBox,
    /// Which of the entries.
    pub phase: Phase,
    /// How far back the model looks at this piece, where that is less than what its group keeps (a
    /// sliding layer in a group that keeps every token). As a destination a piece needs no more than
    /// this; as a source it offers what its group keeps.
    #[serde(default)]
    pub need: Option<Window>,
    /// Where.
    pub view: View,
}

impl Piece {
    /// The layer that its state is named after; empty where it is named after none.
    pub fn layer(&self) -> &str {
        self.state.rsplit_once('/').map_or("", |(layer, _)| layer)
    }
}

/// Bytes of every block that hold nothing to move (the columns of a convolution that only speculative
/// tokens use), but that belong to the block: they are part of what is left when a request's copies
/// are done. Runs of `run` bytes, repeated along `dims` (count, stride).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scratch {
    /// Index of the region.
    pub region: u32,
    /// Bytes from the region's start to the first run of block 0.
    pub offset: u64,
    /// Bytes from one block to the next.
    pub block: u64,
    /// Bytes of a run.
    pub run: u64,
    /// Repetitions: (count, stride in bytes).
    pub dims: Vec<(u64, u64)>,
}

impl Group {
    /// Which tokens one of the group's pieces needs as a destination.
    pub fn need(&self, piece: &Piece) -> Window {
        piece.need.unwrap_or(self.window)
    }

    /// Entries of a state of this kind and phase in one block; `None` when a block does not hold a
    /// whole number of them.
    pub fn entries_per_block(&self, kind: &Kind, phase: &Phase) -> Option<u64> {
        let law = kind.law;
        let entries = match self.tokens_per_block {
            None if law.entries == 0 => u64::from(law.open),
            Some(tokens) if law.entries > 0 => {
                let product = u128::from(tokens) * u128::from(law.entries);
                if product % u128::from(law.tokens) != 0 {
                    return None;
                }
                u64::try_from(product / u128::from(law.tokens)).ok()?
            }
            _ => return None,
        };
        (entries > 0 && entries % phase.modulus == 0)
            .then(|| entries / phase.modulus * phase.held.len())
    }
}

impl Draft {
    pub(crate) fn piece_spot(&self, group: usize, piece: usize) -> Box<Spot> {
        Box::new(Spot {
            group,
            group_name: self.groups[group].name.clone(),
            item: format!("piece {piece}"),
            state: self.groups[group].pieces[piece].state.clone(),
        })
    }

    pub(crate) fn scratch_spot(&self, group: usize, scratch: usize) -> Box<Spot> {
        Box::new(Spot {
            group,
            group_name: self.groups[group].name.clone(),
            item: format!("scratch {scratch}"),
            state: String::new(),
        })
    }
}
