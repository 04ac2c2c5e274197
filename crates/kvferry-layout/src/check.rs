//! What makes a draft a manifest: every view lies in its region, every box in its state, and the pieces
//! of a rank can live together.

use std::collections::HashMap;

use crate::draft::{Draft, Group, Piece, Scratch};
use crate::error::{ManifestError, Spot};
use crate::state::Kind;
use crate::strided::{Dim, Meeting, NotStrided, Strided, TooComplex};
use crate::view::{MAX_AXES, Region};

/// What a check finds out on its way.
pub(crate) struct Checked {
    /// `entries[group][piece]`: entries of the piece in one block.
    pub(crate) entries: Vec<Vec<u64>>,
    /// The pool of every group: groups whose blocks share bytes have the same.
    pub(crate) pools: Vec<usize>,
}

/// Checks every fact of a draft.
pub(crate) fn check(draft: &Draft) -> Result<Checked, ManifestError> {
    check_regions(&draft.regions)?;
    for (index, kind) in draft.kinds.iter().enumerate() {
        check_kind(kind).map_err(|problem| ManifestError::Kind { kind: index, problem })?;
    }
    for (&kind, writer) in &draft.writers {
        let problem = if draft.kinds.get(kind as usize).is_none() {
            "it has a writer, and is not there"
        } else if writer.name.is_empty() || writer.code.is_empty() {
            "its writer needs a name, and a word on its code"
        } else {
            continue;
        };
        return Err(ManifestError::Kind { kind: kind as usize, problem: problem.to_owned() });
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
            let (count, set) = check_piece(draft, group, piece, &spot)?;
            let other = *kinds.entry(piece.state.as_str()).or_insert(piece.kind);
            if other != piece.kind {
                return Err(ManifestError::StateOfTwoKinds {
                    spot: spot(),
                    found: piece.kind,
                    other,
                });
            }
            in_block.push(count);
            sets.push(Placed {
                region: piece.view.region,
                group: index,
                item: Item::Piece(number),
                set,
            });
        }
        for (number, scratch) in group.scratch.iter().enumerate() {
            let spot = || draft.scratch_spot(index, number);
            sets.push(Placed {
                region: scratch.region,
                group: index,
                item: Item::Scratch(number),
                set: check_scratch(draft, group, scratch, &spot)?,
            });
        }
        entries.push(in_block);
    }
    let pools = check_places(draft, sets)?;
    Ok(Checked { entries, pools })
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
    if let Some(needed) = piece.need
        && (needed.is_empty() || !group.window.keeps(&needed))
    {
        return Err(ManifestError::Need { spot: spot(), needed, kept: group.window });
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
    let empty = scratch.dims.iter().position(|&(count, _)| count == 0);
    if scratch.run == 0 || empty.is_some() {
        return Err(ManifestError::ScratchEmpty { spot: spot(), dimension: empty });
    }
    let (found, limit) = (scratch.dims.len(), MAX_AXES);
    if found > limit {
        return Err(ManifestError::ScratchDimensions { spot: spot(), found, limit });
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

/// Steps spent on proving that pieces do not overlap. Real layouts take a few for each pair of
/// neighbours; a hostile one is refused when they are spent.
const MAX_STEPS: u64 = 10_000_000;

/// The bytes of a piece or scratch.
struct Placed {
    region: u32,
    group: usize,
    item: Item,
    set: Strided,
}

/// Which item of its group.
#[derive(Clone, Copy)]
enum Item {
    Piece(usize),
    Scratch(usize),
}

/// Checks that no two items of a group share a byte, and that no two groups share a byte under
/// different block ids. Returns the pool of every group: the smallest index of a group that it shares
/// bytes with, directly or through others.
fn check_places(draft: &Draft, mut placed: Vec<Placed>) -> Result<Vec<usize>, ManifestError> {
    let mut pools: Vec<usize> = (0..draft.groups.len()).collect();
    let mut steps = MAX_STEPS;
    placed.sort_by_key(|item| (item.region, item.set.start()));
    let spot = |placed: &Placed| match placed.item {
        Item::Piece(number) => draft.piece_spot(placed.group, number),
        Item::Scratch(number) => draft.scratch_spot(placed.group, number),
    };
    for (index, first) in placed.iter().enumerate() {
        let reach = first.set.end();
        let behind = placed[index + 1..]
            .iter()
            .take_while(|item| item.region == first.region && item.set.start() < reach);
        for second in behind {
            let mut meet = |meeting| {
                steps = steps.checked_sub(1).ok_or(TooComplex)?;
                first.set.meets(&second.set, meeting, &mut steps)
            };
            let too_complex =
                |TooComplex| ManifestError::TooComplex { spot: spot(first), steps: MAX_STEPS };
            if first.group == second.group {
                if meet(Meeting::AnyByte).map_err(too_complex)? {
                    return Err(ManifestError::PiecesOverlap {
                        first: spot(first),
                        second: spot(second),
                    });
                }
                continue;
            }
            if meet(Meeting::ByteOfDifferentBlocks).map_err(too_complex)? {
                return Err(ManifestError::UnsoundOverlay {
                    first: spot(first),
                    second: spot(second),
                });
            }
            let (pool, other) = (pools[first.group], pools[second.group]);
            if pool != other && meet(Meeting::AnyByte).map_err(too_complex)? {
                let (low, high) = (pool.min(other), pool.max(other));
                pools.iter_mut().filter(|pool| **pool == high).for_each(|pool| *pool = low);
            }
        }
    }
    Ok(pools)
}
