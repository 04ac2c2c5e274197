//! Whether the pieces of a rank can live together.

use crate::error::ManifestError;
use crate::manifest::Draft;
use crate::strided::{Meeting, Strided, TooComplex};

/// Steps spent on proving that pieces do not overlap. Real layouts take a few for each pair of
/// neighbours; a hostile one is refused when they are spent.
const MAX_STEPS: u64 = 10_000_000;

/// The bytes of a piece or scratch.
pub(crate) struct Placed {
    pub(crate) region: u32,
    pub(crate) group: usize,
    pub(crate) item: Item,
    pub(crate) set: Strided,
}

/// Which item of its group.
#[derive(Clone, Copy)]
pub(crate) enum Item {
    Piece(usize),
    Scratch(usize),
}

/// Checks that no two items of a group share a byte, and that no two groups share a byte under
/// different block ids. Returns the pool of every group: the smallest index of a group that it shares
/// bytes with, directly or through others.
pub(crate) fn check(draft: &Draft, mut placed: Vec<Placed>) -> Result<Vec<usize>, ManifestError> {
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
