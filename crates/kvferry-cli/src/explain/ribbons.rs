//! The copies of one block, cut where pages end, and packed: a page draws them as ribbons.

use kvferry_layout::{ByteCopy, Manifest};
use kvferry_plan::{BlockTable, Plan, Request};
use serde::Serialize;

use super::frame::Frame;
use crate::tables::{self, Spread, TooFew};

/// What one decode rank reads for one block of one of its groups.
#[derive(Debug, Serialize)]
pub(super) struct BlockCopies {
    /// Tokens of a request that fill the block.
    pub(super) tokens: u64,
    pub(super) ribbons: Vec<Ribbon>,
}

/// A copy as far as it lies in one page on both sides, or many such at equal distances: `count` of
/// them `step` apart, and all of that `rounds` times, `round` apart. Bytes in source pages are counted
/// through all of the request's blocks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Ribbon {
    /// The prefill rank.
    source: usize,
    source_group: usize,
    source_page: usize,
    source_at: u64,
    source_step: u64,
    source_round: u64,
    target_page: usize,
    target_at: u64,
    target_step: u64,
    target_round: u64,
    /// Bytes of one.
    bytes: u64,
    count: u64,
    rounds: u64,
    /// Copies of the plan that begin here: none where a copy goes on from another page.
    copies: u64,
    /// First and last state of the target page that it reaches into.
    first_state: usize,
    last_state: usize,
}

/// One side of a copy.
pub(super) struct Side<'a> {
    pub(super) rank: &'a Manifest,
    pub(super) frame: &'a Frame,
}

/// The copies of one block of a group of a decode rank, from all prefill ranks.
pub(super) fn one_block(
    plan: &Plan,
    sources: &[Side<'_>],
    target: &Side<'_>,
    group: usize,
) -> Result<BlockCopies, String> {
    let groups = target.rank.groups();
    // As many tokens as fill a block; all other groups hold theirs already.
    let tokens = groups[group].tokens_per_block.unwrap_or(1);
    let mut cached = vec![tokens; groups.len()];
    cached[group] = 0;
    let tables = |rank: &Manifest| {
        tables::for_request(rank, tokens, Spread::Scattered).map_err(|TooFew { needed, blocks }| {
            let engine = rank.engine();
            format!("a picture takes {needed} blocks, but engine '{engine}' has {blocks}")
        })
    };
    let (from, to) = (tables(sources[0].rank)?, tables(target.rank)?);
    let request = Request {
        tokens,
        cached: &cached,
        source: &tables::borrowed(&from),
        destination: &tables::borrowed(&to),
    };
    let transfer = plan.transfer(&request).map_err(|error| error.to_string())?;
    let mut ribbons = vec![];
    for (number, source) in sources.iter().enumerate() {
        let first = ribbons.len();
        let loops = transfer.loops(number).map_err(|error| error.to_string())?;
        for copy in loops.copies() {
            for part in cut(copy, (number, source, &from), (target, &to), group)? {
                append(&mut ribbons, first, part);
            }
        }
        fold(&mut ribbons, first);
    }
    Ok(BlockCopies { tokens, ribbons })
}

/// Cuts a copy where a page ends on either side.
fn cut(
    copy: ByteCopy,
    (number, source, from): (usize, &Side<'_>, &[BlockTable]),
    (target, to): (&Side<'_>, &[BlockTable]),
    group: usize,
) -> Result<Vec<Ribbon>, String> {
    let position = |tables: &[BlockTable], group: usize, id: u32| {
        let found = tables[group].blocks.iter().position(|&known| known == id);
        found.map(|index| index as u64)
    };
    let mut parts = vec![];
    let mut done = 0;
    while done < copy.bytes {
        let read =
            source.frame.find(source.rank, copy.source + done, |g, id| position(from, g, id));
        let written = target.frame.find(target.rank, copy.destination + done, |g, id| {
            position(to, g, id).filter(|_| g == group)
        });
        let (Some(read), Some(written)) = (read, written) else {
            return Err("a copy lies in no page of a layer".to_owned());
        };
        let bytes = (copy.bytes - done).min(read.left).min(written.left);
        let page = &target.frame.groups[group][written.page];
        let first_state = page.state_at(written.at);
        let page_bytes = source.frame.groups[read.group][read.page].bytes;
        parts.push(Ribbon {
            source: number,
            source_group: read.group,
            source_page: read.page,
            source_at: read.block * page_bytes + read.at,
            source_step: 0,
            source_round: 0,
            target_page: written.page,
            target_at: written.at,
            target_step: 0,
            target_round: 0,
            bytes,
            count: 1,
            rounds: 1,
            copies: u64::from(done == 0),
            first_state,
            last_state: page.state_at(written.at + bytes - 1).max(first_state),
        });
        done += bytes;
    }
    Ok(parts)
}

impl Ribbon {
    /// What ribbons must have in common to be repetitions of each other.
    fn kind(&self) -> impl PartialEq {
        (
            (self.source, self.source_group, self.source_page, self.target_page),
            (self.bytes, self.first_state, self.last_state),
        )
    }

    /// How far another one that comes later lies from this one, on both sides.
    fn distance_to(&self, other: &Self) -> Option<(u64, u64)> {
        let source = other.source_at.checked_sub(self.source_at)?;
        let target = other.target_at.checked_sub(self.target_at)?;
        (source > 0 && target > 0).then_some((source, target))
    }
}

/// Adds a part to the last ribbon from `first` on where it goes on at the same distance.
fn append(ribbons: &mut Vec<Ribbon>, first: usize, part: Ribbon) {
    if let Some(last) = ribbons[first..].last_mut()
        && last.rounds == 1
        && last.kind() == part.kind()
        && let Some(distance) = last.distance_to(&part)
    {
        let steps = (last.source_step * last.count, last.target_step * last.count);
        if last.count == 1 || distance == steps {
            if last.count == 1 {
                (last.source_step, last.target_step) = distance;
            }
            last.count += 1;
            last.copies += part.copies;
            return;
        }
    }
    fold(ribbons, first);
    ribbons.push(part);
}

/// Makes the last two ribbons one where the last is the next round of the one before it.
fn fold(ribbons: &mut Vec<Ribbon>, first: usize) {
    let [.., one, last] = &mut ribbons[first..] else { return };
    let steps = |ribbon: &Ribbon| (ribbon.count, ribbon.source_step, ribbon.target_step);
    if last.rounds > 1
        || one.kind() != last.kind()
        || steps(one) != steps(last)
        || one.copies != last.copies * one.rounds
    {
        return;
    }
    let Some(distance) = one.distance_to(last) else { return };
    if one.rounds == 1 {
        (one.source_round, one.target_round) = distance;
    } else if distance != (one.source_round * one.rounds, one.target_round * one.rounds) {
        return;
    }
    one.rounds += 1;
    one.copies += last.copies;
    ribbons.pop();
}
