//! `kvferry explain`: a page that shows where the bytes of one block lie and where they go.

use std::collections::HashMap;
use std::path::PathBuf;

use kvferry_layout::{Manifest, Piece};
use kvferry_models::Model;
use kvferry_models::rules::vllm;
use kvferry_plan::{ByteCopy, Plan, Request};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::output;
use crate::plan::{self, Answer, Engine, Pair, PairArgs};
use crate::report;
use crate::request::{Spread, Tables};

/// The page. The data takes the place of [`SLOT`].
const PAGE: &str = include_str!("explain.html");
const SLOT: &str = "/*DATA*/";

/// Write a page that shows a block of the pool, what every rank holds, and every copy of one block.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pair: PairArgs,
    /// Where to write the page.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Print what was written as JSON.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let pair = args.pair.resolve()?;
    let answer = Answer::of(&pair.prefill.ranks, &pair.decode.ranks, &pair.asked)?;
    if answer.0.is_err() {
        return answer.end();
    }
    let data = data(&pair, &answer)?.to_string();
    // The data stands inside a script element: no `<` may appear in it.
    let page = PAGE.replace(SLOT, &data.replace('<', "\\u003c"));
    std::fs::write(&args.out, &page)
        .map_err(|error| Failure::input(format!("{}: {error}", args.out.display())))?;
    output::print(&match args.json {
        true => format!("{:#}\n", json!({ "page": args.out, "bytes": page.len() })),
        false => format!("wrote {}\n", args.out.display()),
    });
    Ok(())
}

/// Everything that the page shows.
fn data(pair: &Pair, answer: &Answer) -> Result<Value, Failure> {
    let frames = |engine: &Engine| -> Vec<Frame> {
        (0..engine.topology.pp).map(|stage| Frame::new(&pair.model, engine, stage)).collect()
    };
    let (from, to) = (frames(&pair.prefill), frames(&pair.decode));
    let side = |engine: &Engine, frames: &[Frame]| {
        let ranks = engine.ranks.iter().enumerate().map(|(number, rank)| {
            let stage = number / engine.topology.tp as usize;
            json!({ "label": rank.label(), "stage": stage, "held": held(rank) })
        });
        json!({
            "text": plan::describe(engine),
            "layout": engine.pools.layout.name(),
            "blocks": engine.pools.blocks,
            "ranks": ranks.collect::<Vec<_>>(),
            "stages": frames.iter().map(Frame::as_json).collect::<Vec<_>>(),
        })
    };
    let plans = report::compile(&pair.prefill.ranks, &pair.decode.ranks);
    let plans = plans.map_err(|_| Failure::input("the pair does not fit"))?;
    let mut moves = vec![];
    for (number, (rank, plan)) in pair.decode.ranks.iter().zip(&plans).enumerate() {
        let stage = number / pair.decode.topology.tp as usize;
        let groups = (0..rank.groups().len())
            .map(|group| one_block(pair, plan, number, group, &from, &to[stage]))
            .collect::<Result<Vec<_>, _>>()?;
        moves.push(groups);
    }
    let groups = |engine: &Engine| -> Vec<Value> {
        let groups = engine.pools.groups.iter();
        groups
            .map(
                |group| json!({ "name": group.name, "block": group.block, "kernel": group.kernel }),
            )
            .collect()
    };
    let mut data = plan::as_json(pair, answer);
    data["prefill"] = side(&pair.prefill, &from);
    data["decode"] = side(&pair.decode, &to);
    data["prefill"]["groups"] = groups(&pair.prefill).into();
    data["decode"]["groups"] = groups(&pair.decode).into();
    data["engine"]["name"] = vllm::ENGINE.into();
    data["moves"] = moves.into();
    Ok(data)
}

/// Which part of every state a rank holds, by group and by the state's name in its layer.
fn held(rank: &Manifest) -> Vec<Value> {
    let group = |group: &kvferry_layout::Group| {
        let mut states = serde_json::Map::new();
        for piece in &group.pieces {
            let axes = rank.kind(piece).axes.iter().zip(&piece.bounds.0);
            let axes =
                axes.map(|(axis, span)| json!([axis.name, span.start, span.end, axis.length]));
            states.entry(short(&piece.state)).or_insert_with(|| axes.collect::<Vec<_>>().into());
        }
        Value::Object(states)
    };
    rank.groups().iter().map(group).collect()
}

/// The state's name in its layer.
fn short(state: &str) -> String {
    state.rsplit_once('/').map_or(state, |(_, name)| name).to_owned()
}

/// The copies of one block of one group of a decode rank, from all prefill ranks.
fn one_block(
    pair: &Pair,
    plan: &Plan,
    rank: usize,
    group: usize,
    from: &[Frame],
    to: &Frame,
) -> Result<Value, Failure> {
    let (prefill, decode) = (&pair.prefill.ranks, &pair.decode.ranks);
    let destination = &decode[rank];
    // As many tokens as fill a block; all other groups hold theirs already.
    let tokens = destination.groups()[group].tokens_per_block.unwrap_or(1);
    let mut cached = vec![tokens; destination.groups().len()];
    cached[group] = 0;
    let tables = |rank: &Manifest| {
        Tables::new(rank, tokens, Spread::Scattered)
            .map_err(|needed| Failure::input(format!("a block needs a pool of {needed} blocks")))
    };
    let (source, target) = (tables(&prefill[0])?, tables(destination)?);
    let request = Request {
        tokens,
        cached: &cached,
        source: &source.tables(),
        destination: &target.tables(),
    };
    let transfer = plan.transfer(&request).map_err(Failure::input)?;
    let tp = pair.prefill.topology.tp as usize;
    let (mut sets, mut summaries) = (vec![], vec![]);
    for (number, other) in prefill.iter().enumerate() {
        let summary = transfer.summary(number);
        if summary.copies == 0 {
            continue;
        }
        summaries.push(json!([number, summary.bytes, summary.copies]));
        let frame = &from[number / tp];
        for (copy_number, copy) in transfer.copies(number).enumerate() {
            for part in split(copy, other, frame, &source, destination, to, (group, copy_number)) {
                merge(&mut sets, number, part);
            }
        }
        fold(&mut sets);
    }
    let sets: Vec<Value> = sets.iter().map(|(source, set)| set.as_json(*source)).collect();
    Ok(json!({ "tokens": tokens, "from": summaries, "sets": sets }))
}

/// A copy as far as it lies in one page on both sides, or several such at equal distances.
#[derive(Clone, Debug)]
struct Set {
    /// Group, page and byte in it, counted through all of the request's blocks.
    source: (usize, usize, u64),
    /// Page and byte in it.
    target: (usize, u64),
    bytes: u64,
    count: u64,
    source_step: u64,
    target_step: u64,
    /// How often all of that is repeated, and at which distances.
    rounds: u64,
    source_round: u64,
    target_round: u64,
    /// Copies of the plan that begin here: none where a copy goes on from another page.
    copies: u64,
    /// First and last state of the target page that it reaches into.
    states: (usize, usize),
}

impl Set {
    fn as_json(&self, source: usize) -> Value {
        let (group, page, at) = self.source;
        json!([
            source,
            group,
            page,
            at,
            self.target.0,
            self.target.1,
            self.bytes,
            self.count,
            self.source_step,
            self.target_step,
            self.rounds,
            self.source_round,
            self.target_round,
            self.copies,
            self.states.0,
            self.states.1,
        ])
    }
}

/// Cuts a copy where a page ends on either side.
fn split(
    copy: ByteCopy,
    source: &Manifest,
    from: &Frame,
    source_tables: &Tables,
    target: &Manifest,
    to: &Frame,
    (group, number): (usize, usize),
) -> Vec<Set> {
    let mut parts = vec![];
    let mut done = 0;
    while done < copy.bytes {
        let (source_group, page, block, at, source_left) =
            from.find(source, copy.source + done, |group, block| {
                source_tables.position(group, block)
            });
        let (_, target_page, _, target_at, target_left) =
            to.find(target, copy.destination + done, |other, _| (other == group).then_some(0));
        let bytes = (copy.bytes - done).min(source_left).min(target_left);
        let first = to.groups[group][target_page].state_at(target_at);
        let last = to.groups[group][target_page].state_at(target_at + bytes - 1);
        parts.push(Set {
            source: (source_group, page, block * from.groups[source_group][page].bytes + at),
            target: (target_page, target_at),
            bytes,
            count: 1,
            source_step: 0,
            target_step: 0,
            rounds: 1,
            source_round: 0,
            target_round: 0,
            copies: u64::from(done == 0),
            states: (first, last.max(first)),
        });
        done += bytes;
    }
    // A plan's copies are never empty.
    debug_assert!(!parts.is_empty(), "copy {number}");
    parts
}

/// Adds a part to the last set where it goes on at the same distance.
fn merge(sets: &mut Vec<(usize, Set)>, number: usize, part: Set) {
    if let Some((source, last)) = sets.last_mut()
        && *source == number
        && (last.source.0, last.source.1, last.target.0)
            == (part.source.0, part.source.1, part.target.0)
        && (last.bytes, last.states, last.rounds) == (part.bytes, part.states, 1)
        && part.source.2 > last.source.2
        && part.target.1 > last.target.1
    {
        let source_step = part.source.2 - last.source.2;
        let target_step = part.target.1 - last.target.1;
        if last.count == 1
            || (source_step == last.source_step * last.count
                && target_step == last.target_step * last.count)
        {
            if last.count == 1 {
                (last.source_step, last.target_step) = (source_step, target_step);
            }
            last.count += 1;
            last.copies += part.copies;
            return;
        }
    }
    fold(sets);
    sets.push((number, part));
}

/// Makes the last two sets one where the last is the next round of the one before it.
fn fold(sets: &mut Vec<(usize, Set)>) {
    let [.., (one, first), (other, last)] = &mut sets[..] else { return };
    let shape =
        |set: &Set| (set.source.0, set.source.1, set.target.0, set.bytes, set.count, set.states);
    let steps = |set: &Set| (set.source_step, set.target_step);
    let apart = (
        last.source.2.saturating_sub(first.source.2),
        last.target.1.saturating_sub(first.target.1),
    );
    if one != other
        || last.rounds > 1
        || shape(first) != shape(last)
        || steps(first) != steps(last)
        || first.copies != last.copies * first.rounds
        || apart.0 == 0
        || apart.1 == 0
    {
        return;
    }
    if first.rounds == 1 {
        (first.source_round, first.target_round) = apart;
    } else if apart != (first.source_round * first.rounds, first.target_round * first.rounds) {
        return;
    }
    first.rounds += 1;
    first.copies += last.copies;
    sets.pop();
}

/// Where the pages of one pipeline stage lie in a block.
struct Frame {
    outermost: bool,
    /// Blocks in the pool.
    blocks: u64,
    /// Bytes of a block of the pool.
    row: u64,
    groups: Vec<Vec<Page>>,
}

/// The bytes of a block that belong to one layer.
struct Page {
    name: String,
    /// First byte of block 0, from the region's start.
    base: u64,
    /// First byte in the row of a block.
    position: u64,
    bytes: u64,
    /// Bytes from one block to the next.
    stride: u64,
    kernel: Option<(u64, u64)>,
    states: Vec<Shape>,
    scratch: Vec<Shape>,
}

/// Bytes in a page: runs, repeated.
struct Shape {
    name: String,
    offset: u64,
    run: u64,
    /// Repetitions (count, distance), the widest first.
    dims: Vec<(u64, u64)>,
}

impl Frame {
    fn new(model: &Model, engine: &Engine, stage: u32) -> Self {
        let rank = &engine.ranks[(stage * engine.topology.tp) as usize];
        let pools = &engine.pools;
        let (outermost, blocks) = (pools.layout.is_block_outermost(), u64::from(pools.blocks));
        let row = rank.regions()[0].bytes / blocks;
        let mut groups = vec![];
        for (group, made) in pools.groups.iter().zip(rank.groups()) {
            let pieces: HashMap<&str, &Piece> =
                made.pieces.iter().map(|piece| (piece.state.as_str(), piece)).collect();
            let mut pages = vec![];
            for (&cache, &bytes) in group.caches.iter().zip(&group.pages) {
                let kept = &model.caches[cache];
                let states: Vec<&Piece> = kept
                    .states()
                    .filter_map(|state| pieces.get(state.name.as_str()).copied())
                    .collect();
                let Some(base) = states.iter().map(|piece| piece.view.offset).min() else {
                    continue;
                };
                let view = &states[0].view;
                // A distance that leads out of the block, over all other blocks, is one page less.
                let apart = view.block * blocks;
                let inside = |distance| {
                    if !outermost && distance >= apart { distance / blocks } else { distance }
                };
                let entries = |piece: &Piece| {
                    made.entries_per_block(rank.kind(piece), &piece.phase).unwrap_or(1)
                };
                let shape = |piece: &&Piece| {
                    let view = &piece.view;
                    let mut dims = match view.kernel {
                        Some(kernel) => vec![
                            (entries(piece) / kernel.entries, kernel.stride),
                            (kernel.entries, view.entry),
                        ],
                        None => vec![(entries(piece), view.entry)],
                    };
                    let axes = piece.bounds.0.iter().zip(&view.axes);
                    dims.extend(axes.map(|(span, &stride)| (span.len(), inside(stride))));
                    let run = u64::from(rank.kind(piece).format.bytes);
                    Shape::new(short(&piece.state), view.offset - base, run, dims)
                };
                let scratch = made.scratch.iter().filter(|scratch| {
                    (base..base + bytes.min(view.block)).contains(&scratch.offset)
                });
                let spare = |scratch: &kvferry_layout::Scratch| {
                    let dims = scratch.dims.clone();
                    Shape::new("spare columns".to_owned(), scratch.offset - base, scratch.run, dims)
                };
                let layer = states[0].state.rsplit_once('/').map_or("", |(layer, _)| layer);
                pages.push(Page {
                    name: format!("{layer} {}", kept.sort.word()),
                    base,
                    position: if outermost { base } else { base / blocks },
                    bytes,
                    stride: view.block,
                    kernel: view
                        .kernel
                        .map(|kernel| (entries(states[0]) / kernel.entries, kernel.stride)),
                    states: states.iter().map(shape).collect(),
                    scratch: scratch.map(spare).collect(),
                });
            }
            groups.push(pages);
        }
        let mut frame = Self { outermost, blocks, row, groups };
        if outermost && !pools.layout.is_block_compact() {
            frame.join_pages();
        }
        frame
    }

    /// Where a block's layers are interleaved, the whole block is one page.
    fn join_pages(&mut self) {
        for pages in &mut self.groups {
            let mut all = Page {
                name: "all layers".to_owned(),
                base: 0,
                position: 0,
                bytes: self.row,
                stride: self.row,
                kernel: None,
                states: vec![],
                scratch: vec![],
            };
            for page in pages.drain(..) {
                let layer = page.name.split(' ').next().unwrap_or_default();
                all.states.extend(page.states.into_iter().map(|state| Shape {
                    name: format!("{layer}/{}", state.name),
                    offset: state.offset + page.base,
                    ..state
                }));
            }
            if !all.states.is_empty() {
                pages.push(all);
            }
        }
    }

    /// The group, page, block position, byte in the page, and bytes up to the page's end of an
    /// address. `position` tells a group's position of a block id, and `None` for a block that is not
    /// the group's: pools are shared, so that only the block id says whose byte it is.
    fn find(
        &self,
        rank: &Manifest,
        address: u64,
        position: impl Fn(usize, u32) -> Option<u64>,
    ) -> (usize, usize, u64, u64, u64) {
        let offset = address - rank.regions()[0].base;
        for (group, pages) in self.groups.iter().enumerate() {
            for (number, page) in pages.iter().enumerate() {
                let Some(from) = offset.checked_sub(page.base) else { continue };
                let (block, at, left) = if self.outermost {
                    (from / page.stride, from % page.stride, page.bytes)
                } else {
                    // Where heads lie outside of blocks, a page is made of one strip for each head.
                    let apart = page.stride * self.blocks;
                    let strip = from / apart;
                    if (strip + 1) * page.stride > page.bytes {
                        continue;
                    }
                    let inside = from % apart;
                    let at = strip * page.stride + inside % page.stride;
                    (inside / page.stride, at, (strip + 1) * page.stride)
                };
                if at >= page.bytes {
                    continue;
                }
                let id = u32::try_from(block).expect("block ids have 32 bits");
                if let Some(position) = position(group, id) {
                    return (group, number, position, at, left - at);
                }
            }
        }
        unreachable!("every copy lies in a page of both sides: that is what a plan proves")
    }

    fn as_json(&self) -> Value {
        let page = |page: &Page| {
            let shape = |shape: &Shape| json!([shape.name, shape.offset, shape.run, shape.dims]);
            json!({
                "name": page.name,
                "at": page.position,
                "bytes": page.bytes,
                "kernel": page.kernel,
                "states": page.states.iter().map(shape).collect::<Vec<_>>(),
                "scratch": page.scratch.iter().map(shape).collect::<Vec<_>>(),
            })
        };
        let groups = self.groups.iter();
        let groups = groups.map(|pages| pages.iter().map(page).collect::<Vec<_>>());
        json!({ "row": self.row, "groups": groups.collect::<Vec<_>>() })
    }
}

impl Page {
    /// The state that a byte belongs to.
    fn state_at(&self, at: u64) -> usize {
        self.states.iter().position(|state| state.contains(at)).unwrap_or(0)
    }
}

impl Shape {
    /// Joins runs that touch.
    fn new(name: String, offset: u64, run: u64, mut dims: Vec<(u64, u64)>) -> Self {
        dims.retain(|&(count, _)| count > 1);
        dims.sort_by_key(|&(_, distance)| std::cmp::Reverse(distance));
        let mut shape = Self { name, offset, run, dims: vec![] };
        while let Some((count, distance)) = dims.pop() {
            match shape.dims.first_mut() {
                None if distance == shape.run => shape.run *= count,
                Some(inner) if distance == inner.0 * inner.1 => inner.0 *= count,
                _ => shape.dims.insert(0, (count, distance)),
            }
        }
        shape
    }

    fn contains(&self, at: u64) -> bool {
        let Some(mut rest) = at.checked_sub(self.offset) else { return false };
        for &(count, distance) in &self.dims {
            rest -= (rest / distance).min(count - 1) * distance;
        }
        rest < self.run
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_that_touch_are_joined() {
        let shape = Shape::new("k".to_owned(), 0, 2, vec![(16, 512), (4, 8192), (128, 2)]);
        assert_eq!((shape.run, shape.dims), (256, vec![(64, 512)]));
        let dense = Shape::new("ssm".to_owned(), 8, 4, vec![(3, 32), (8, 4), (1, 7)]);
        assert_eq!((dense.run, dense.dims.len()), (96, 0));
        assert!(
            dense.contains(8) && dense.contains(103) && !dense.contains(104) && !dense.contains(7)
        );
    }
}
