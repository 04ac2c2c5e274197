//! All the facts of one rank.

use std::collections::{BTreeMap, HashMap};

use serde::{Deserialize, Serialize};

use crate::error::{ManifestError, Spot};
use crate::sound;
use crate::state::{Kind, Phase, StateBox};
use crate::strided::{Dim, NotStrided, Strided};
use crate::view::{MAX_AXES, Region, View};
use crate::window::Window;

/// The facts of one rank as an adapter states them, not yet checked. [`Manifest::new`] checks them.
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
    /// Which tokens stay live.
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

/// The checked facts of one rank. Whatever one holds is sound: every view lies in its region, every
/// box in its state, no two pieces of a group share a byte, and where groups overlay each other every
/// byte has the same block id in each of them.
#[derive(Clone, Debug)]
pub struct Manifest {
    draft: Draft,
    /// `entries[group][piece]`: entries of the piece in one block.
    entries: Vec<Vec<u64>>,
    /// The pool of every group: groups whose blocks share bytes have the same.
    pools: Vec<usize>,
}

impl PartialEq for Manifest {
    fn eq(&self, other: &Self) -> bool {
        self.draft == other.draft
    }
}

impl Eq for Manifest {}

impl Manifest {
    /// Checks a draft.
    pub fn new(draft: Draft) -> Result<Self, ManifestError> {
        check_regions(&draft.regions)?;
        for (index, kind) in draft.kinds.iter().enumerate() {
            check_kind(kind).map_err(|problem| ManifestError::Kind { kind: index, problem })?;
        }
        let mut kinds = HashMap::new();
        let mut entries = Vec::with_capacity(draft.groups.len());
        let mut sets = vec![];
        for (index, group) in draft.groups.iter().enumerate() {
            check_group(group).map_err(|problem| ManifestError::Group {
                group: index,
                name: group.name.clone(),
                problem,
            })?;
            let mut in_block = Vec::with_capacity(group.pieces.len());
            for (number, piece) in group.pieces.iter().enumerate() {
                let spot = || draft.piece_spot(index, number);
                let (count, set) = check_piece(&draft, group, piece, &spot)?;
                let other = *kinds.entry(piece.state.as_str()).or_insert(piece.kind);
                if other != piece.kind {
                    return Err(ManifestError::StateOfTwoKinds {
                        spot: spot(),
                        found: piece.kind,
                        other,
                    });
                }
                in_block.push(count);
                sets.push(sound::Placed {
                    region: piece.view.region,
                    group: index,
                    item: sound::Item::Piece(number),
                    set,
                });
            }
            for (number, scratch) in group.scratch.iter().enumerate() {
                let spot = || draft.scratch_spot(index, number);
                sets.push(sound::Placed {
                    region: scratch.region,
                    group: index,
                    item: sound::Item::Scratch(number),
                    set: check_scratch(&draft, group, scratch, &spot)?,
                });
            }
            entries.push(in_block);
        }
        let pools = sound::check(&draft, sets)?;
        Ok(Self { draft, entries, pools })
    }

    /// What makes equal shapes mean equal things.
    pub fn identity(&self) -> &BTreeMap<String, String> {
        &self.draft.identity
    }

    /// The engine's name.
    pub fn engine(&self) -> &str {
        &self.draft.engine
    }

    /// The rank's number in its engine.
    pub fn rank(&self) -> u32 {
        self.draft.rank
    }

    /// The rank's place in its engine.
    pub fn label(&self) -> &str {
        &self.draft.label
    }

    /// The regions.
    pub fn regions(&self) -> &[Region] {
        &self.draft.regions
    }

    /// The kinds of states.
    pub fn kinds(&self) -> &[Kind] {
        &self.draft.kinds
    }

    /// The groups.
    pub fn groups(&self) -> &[Group] {
        &self.draft.groups
    }

    /// The kind of a piece's state.
    pub fn kind(&self, piece: &Piece) -> &Kind {
        &self.draft.kinds[piece.kind as usize]
    }

    /// Entries of a piece in one block, by the indices of its group and of itself.
    pub fn entries_per_block(&self, group: usize, piece: usize) -> u64 {
        self.entries[group][piece]
    }

    /// The pool that a group's blocks lie in: two groups have the same pool when a block of one can
    /// share bytes with a block of the other, so that one block id must not serve both.
    pub fn pool(&self, group: usize) -> usize {
        self.pools[group]
    }

    /// The facts, to be changed and checked again.
    pub fn into_draft(self) -> Draft {
        self.draft
    }

    pub(crate) fn draft(&self) -> &Draft {
        &self.draft
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

fn check_regions(regions: &[Region]) -> Result<(), ManifestError> {
    let mut order: Vec<usize> = (0..regions.len()).collect();
    for (index, region) in regions.iter().enumerate() {
        if region.bytes == 0 || region.end().is_none() {
            return Err(ManifestError::RegionBounds {
                region: index,
                base: region.base,
                bytes: region.bytes,
            });
        }
    }
    order.sort_unstable_by_key(|&index| regions[index].base);
    for pair in order.windows(2) {
        let (low, high) = (regions[pair[0]], regions[pair[1]]);
        if low.base + low.bytes > high.base {
            return Err(ManifestError::RegionsOverlap {
                first: pair[0].min(pair[1]),
                second: pair[0].max(pair[1]),
            });
        }
    }
    Ok(())
}

fn check_kind(kind: &Kind) -> Result<(), String> {
    if kind.format.bytes == 0 || kind.format.name.is_empty() {
        return Err(format!(
            "its format '{}' needs a name and at least one byte, not {}",
            kind.format.name, kind.format.bytes
        ));
    }
    if kind.axes.len() > MAX_AXES {
        return Err(format!("it has {} axes, at most {MAX_AXES} are allowed", kind.axes.len()));
    }
    let mut bytes = u64::from(kind.format.bytes);
    for (index, axis) in kind.axes.iter().enumerate() {
        if axis.length == 0 {
            return Err(format!("its axis '{}' has length zero", axis.name));
        }
        if kind.axes[..index].iter().any(|other| other.name == axis.name) {
            return Err(format!("it has two axes named '{}'", axis.name));
        }
        bytes =
            bytes.checked_mul(axis.length).ok_or("the bytes of one entry do not fit in 64 bits")?;
    }
    if kind.law.tokens == 0 || (kind.law.entries == 0 && kind.law.open == 0) {
        return Err(format!("its law never yields an entry: {:?}", kind.law));
    }
    Ok(())
}

fn check_group(group: &Group) -> Result<(), String> {
    if group.blocks == 0 && !(group.pieces.is_empty() && group.scratch.is_empty()) {
        return Err("it has pieces but no blocks".to_owned());
    }
    if group.tokens_per_block == Some(0) {
        return Err("a block holds no tokens".to_owned());
    }
    if group.window.is_empty() {
        return Err(format!("its window is empty: {:?}", group.window));
    }
    match group.null_block {
        Some(id) if id >= group.blocks && group.blocks > 0 => {
            Err(format!("its null block is {id}, but it has only {} blocks", group.blocks))
        }
        _ => Ok(()),
    }
}

fn check_piece(
    draft: &Draft,
    group: &Group,
    piece: &Piece,
    spot: &dyn Fn() -> Box<Spot>,
) -> Result<(u64, Strided), ManifestError> {
    let kind = draft.kinds.get(piece.kind as usize).ok_or_else(|| ManifestError::NoSuch {
        spot: spot(),
        what: "kind",
        index: piece.kind,
        count: draft.kinds.len(),
    })?;
    let (bounds, view) = (&piece.bounds.0, &piece.view);
    for (what, found) in [("box", bounds.len()), ("view", view.axes.len())] {
        if found != kind.axes.len() {
            return Err(ManifestError::AxisCount {
                spot: spot(),
                what,
                found,
                expected: kind.axes.len(),
            });
        }
    }
    for (span, axis) in bounds.iter().zip(&kind.axes) {
        if span.is_empty() || span.end > axis.length {
            return Err(ManifestError::BoxOutsideState {
                spot: spot(),
                axis: axis.name.clone(),
                held: span.to_string(),
                length: axis.length,
            });
        }
    }
    let phase = piece.phase;
    if phase.modulus == 0 || phase.held.is_empty() || phase.held.end > phase.modulus {
        return Err(ManifestError::Phase { spot: spot(), phase: phase.to_string() });
    }
    if let Some(needed) = piece.need {
        if needed.is_empty() || !group.window.keeps(&needed) {
            let kept = group.window;
            return Err(ManifestError::Need { spot: spot(), needed, kept });
        }
    }
    let entries =
        group.entries_per_block(kind, &phase).ok_or_else(|| ManifestError::EntriesPerBlock {
            spot: spot(),
            problem: match group.tokens_per_block {
                Some(tokens) => format!(
                    "a block of {tokens} tokens does not hold a whole number of entries \
                     ({}, phase modulo {})",
                    kind.law, phase.modulus
                ),
                None => format!(
                    "a block that holds a whole sequence cannot hold {} (phase modulo {})",
                    kind.law, phase.modulus
                ),
            },
        })?;
    let kernel = view.kernel.map_or(entries, |kernel| kernel.entries);
    if kernel == 0 || entries % kernel != 0 {
        return Err(ManifestError::EntriesPerBlock {
            spot: spot(),
            problem: format!(
                "kernel blocks of {kernel} entries do not divide a block of {entries}"
            ),
        });
    }
    let fixed = [
        (group.blocks.into(), view.block, true),
        (entries / kernel, view.kernel.map_or(0, |kernel| kernel.stride), false),
        (kernel, view.entry, false),
    ];
    let axes = bounds.iter().zip(&view.axes).map(|(span, &stride)| (span.len(), stride, false));
    let dims = fixed.into_iter().chain(axes);
    let run = u64::from(kind.format.bytes);
    let set = place(draft, view.region, view.offset, run, dims, spot)?;
    Ok((entries, set))
}

fn check_scratch(
    draft: &Draft,
    group: &Group,
    scratch: &Scratch,
    spot: &dyn Fn() -> Box<Spot>,
) -> Result<Strided, ManifestError> {
    if scratch.run == 0
        || scratch.dims.len() > MAX_AXES
        || scratch.dims.iter().any(|&(count, _)| count == 0)
    {
        return Err(ManifestError::EntriesPerBlock {
            spot: spot(),
            problem: format!(
                "scratch needs runs of at least one byte and at most {MAX_AXES} dimensions, none empty"
            ),
        });
    }
    let block = [(group.blocks.into(), scratch.block, true)];
    let dims = scratch.dims.iter().map(|&(count, stride)| (count, stride, false));
    let dims = block.into_iter().chain(dims);
    place(draft, scratch.region, scratch.offset, scratch.run, dims, spot)
}

/// The bytes of a view, by absolute address, inside its region.
fn place(
    draft: &Draft,
    region: u32,
    offset: u64,
    run: u64,
    dims: impl Iterator<Item = (u64, u64, bool)>,
    spot: &dyn Fn() -> Box<Spot>,
) -> Result<Strided, ManifestError> {
    let bytes = draft
        .regions
        .get(region as usize)
        .ok_or_else(|| ManifestError::NoSuch {
            spot: spot(),
            what: "region",
            index: region,
            count: draft.regions.len(),
        })?
        .bytes;
    let dims = dims.map(|(count, stride, block)| Dim { stride, count, block });
    let set = Strided::new(offset, run, dims).map_err(|problem| match problem {
        NotStrided::Overlapping { stride, extent } => {
            ManifestError::StridesOverlap { spot: spot(), stride, extent }
        }
        NotStrided::Overflow => ManifestError::Overflow { spot: spot() },
    })?;
    if set.end() > bytes {
        return Err(ManifestError::ViewOutsideRegion {
            spot: spot(),
            region,
            end: set.end(),
            bytes,
        });
    }
    Ok(set)
}
