//! Where the bytes of one block lie, as a rank's manifest tells.
//!
//! A block's bytes need not lie together: where layers or heads are outside of blocks, a block has a
//! stretch of bytes in each of them. A *strip* is one such stretch, repeated for every block at one
//! distance. All strips one after the other are a block's *row*, and a *page* is the part of the row
//! that belongs to one layer.

use std::collections::BTreeMap;

use kvferry_layout::{Group, Manifest};
use serde::Serialize;

use crate::sides::name_parts;

#[cfg(test)]
mod tests;

/// How a block of a rank lies in memory, and what every group keeps there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Frame {
    /// Bytes of a row.
    pub(super) row: u64,
    /// The pages of every group, in the order of the row.
    pub(super) groups: Vec<Vec<Page>>,
    #[serde(skip)]
    strips: Vec<Strip>,
}

/// The bytes of a block that belong to one layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Page {
    /// The layer, or several whose bytes are interleaved.
    pub(super) name: String,
    /// First byte in the row.
    pub(super) at: u64,
    pub(super) bytes: u64,
    /// How its block is split into kernel blocks.
    pub(super) kernel: Option<Repeat>,
    pub(super) states: Vec<Shape>,
    /// What belongs to the block but is never moved.
    pub(super) scratch: Vec<Shape>,
}

/// Bytes of a page: runs of equal length, repeated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Shape {
    pub(super) name: String,
    /// First byte in the page.
    pub(super) offset: u64,
    pub(super) run: u64,
    /// The widest first.
    pub(super) repeats: Vec<Repeat>,
}

/// Repetitions at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Repeat {
    pub(super) count: u64,
    pub(super) distance: u64,
}

/// A byte of a block, and whose it is.
pub(super) struct Found {
    pub(super) group: usize,
    pub(super) page: usize,
    /// Which of the group's blocks, in the order of its table.
    pub(super) block: u64,
    /// The byte in the page.
    pub(super) at: u64,
    /// Bytes from there that lie side by side in memory and in the page.
    pub(super) left: u64,
}

/// One stretch of every block: block `b` has the bytes from `start + b × stride` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Strip {
    region: u32,
    start: u64,
    stride: u64,
    blocks: u64,
    /// First byte in the row, once it is known.
    at: Option<u64>,
}

impl Strip {
    fn in_row(&self) -> u64 {
        self.at.unwrap_or_default()
    }
}

/// More strips than any real layout has; a picture of them would show nothing.
const MAX_STRIPS: usize = 1 << 16;

impl Frame {
    /// The frame of a rank; a reason where there is no picture of it.
    pub(super) fn new(rank: &Manifest) -> Result<Self, String> {
        let placed: Vec<Vec<Placed>> = (0..rank.groups().len())
            .map(|number| placed(rank, number))
            .collect::<Result<_, _>>()?;
        let (strips, row) = strips(placed.iter().flatten())?;
        let layers: Vec<Vec<Layer>> =
            placed.iter().map(|items| Layer::all(items, &strips)).collect();
        // A page ends where another page of any group begins, or with its strip.
        let starts = layers.iter().flatten().map(|layer| layer.span.0);
        let ends = strips.iter().map(|strip| strip.in_row() + strip.stride);
        let mut edges: Vec<u64> = starts.chain(ends).collect();
        edges.sort_unstable();
        let page = |layer: Layer| {
            let (at, reach) = layer.span;
            let end = edges[edges.partition_point(|&edge| edge < reach).min(edges.len() - 1)];
            layer.into_page(at, end.max(reach) - at)
        };
        let groups =
            layers.into_iter().map(|layers| layers.into_iter().map(page).collect()).collect();
        Ok(Self { row, groups, strips })
    }

    /// Whose byte an address is. `position` tells where a block id stands in a group's table: groups
    /// share bytes, so that only the id of the block says whose they are.
    pub(super) fn find(
        &self,
        rank: &Manifest,
        address: u64,
        position: impl Fn(usize, u32) -> Option<u64>,
    ) -> Option<Found> {
        for strip in &self.strips {
            let region = rank.regions()[strip.region as usize];
            let Some(offset) = address.checked_sub(region.base + strip.start) else { continue };
            if offset >= strip.stride.saturating_mul(strip.blocks) {
                continue;
            }
            let (id, inside) = (offset / strip.stride, offset % strip.stride);
            let byte = strip.in_row() + inside;
            let id = u32::try_from(id).ok()?;
            for (group, pages) in self.groups.iter().enumerate() {
                let Some(block) = position(group, id) else { continue };
                let mut pages = pages.iter().enumerate();
                let page = pages.find(|(_, page)| (page.at..page.at + page.bytes).contains(&byte));
                if let Some((number, page)) = page {
                    let left = (page.at + page.bytes - byte).min(strip.stride - inside);
                    return Some(Found { group, page: number, block, at: byte - page.at, left });
                }
            }
        }
        None
    }
}

/// A piece or a scratch area of a group, with what is inside one strip apart from what leads from strip
/// to strip.
struct Placed {
    layer: String,
    name: String,
    is_scratch: bool,
    region: u32,
    /// First byte in every strip that it reaches into, from the region's start.
    starts: Vec<u64>,
    stride: u64,
    blocks: u64,
    /// What lies in each strip.
    inside: Shape,
    kernel: Option<Repeat>,
}

fn placed(rank: &Manifest, number: usize) -> Result<Vec<Placed>, String> {
    let group = &rank.groups()[number];
    let mut items = vec![];
    for (index, piece) in group.pieces.iter().enumerate() {
        let view = &piece.view;
        let entries = rank.entries_per_block(number, index);
        if entries == 0 || piece.bounds.volume() == 0 {
            continue;
        }
        let (mut repeats, mut kernel) = (vec![], None);
        match view.kernel {
            None => repeats.push(Repeat { count: entries, distance: view.entry }),
            Some(split) => {
                let blocks = Repeat { count: entries / split.entries, distance: split.stride };
                kernel = Some(blocks);
                repeats.extend([blocks, Repeat { count: split.entries, distance: view.entry }]);
            }
        }
        let axes = piece.bounds.0.iter().zip(&view.axes);
        repeats.extend(axes.map(|(span, &distance)| Repeat { count: span.len(), distance }));
        let (layer, name) = name_parts(&piece.state);
        let run = u64::from(rank.kind(piece).format.bytes);
        let at = (view.region, view.offset, view.block);
        let mut item = Placed::new(group, (layer, name), at, run, repeats)?;
        item.kernel = kernel.filter(|split| split.distance < view.block);
        items.push(item);
    }
    for scratch in &group.scratch {
        let repeats = scratch.dims.iter().map(|&(count, distance)| Repeat { count, distance });
        let at = (scratch.region, scratch.offset, scratch.block);
        let names = ("", "spare columns");
        let mut item = Placed::new(group, names, at, scratch.run, repeats.collect())?;
        item.is_scratch = true;
        items.push(item);
    }
    Ok(items)
}

impl Placed {
    fn new(
        group: &Group,
        (layer, name): (&str, &str),
        (region, offset, stride): (u32, u64, u64),
        run: u64,
        repeats: Vec<Repeat>,
    ) -> Result<Self, String> {
        let repeats = repeats.into_iter().filter(|repeat| repeat.count != 1);
        // A distance as long as a block's, or longer, leads over other blocks.
        let (outside, inside): (Vec<Repeat>, Vec<Repeat>) =
            repeats.partition(|repeat| group.blocks > 1 && repeat.distance >= stride);
        let strips = outside.iter().try_fold(1_u64, |all, repeat| all.checked_mul(repeat.count));
        if strips.is_none_or(|strips| strips > MAX_STRIPS as u64) {
            return Err(format!("{layer}/{name} is spread too finely to be drawn"));
        }
        let mut starts = vec![offset];
        for repeat in &outside {
            let steps = (0..repeat.count).map(|step| step * repeat.distance);
            starts = steps.flat_map(|step| starts.iter().map(move |at| at + step)).collect();
        }
        starts.sort_unstable();
        let inside = Shape::new(name.to_owned(), 0, run, inside);
        Ok(Self {
            layer: layer.to_owned(),
            name: name.to_owned(),
            is_scratch: false,
            region,
            starts,
            // The distance to a second block means nothing where there is none.
            stride: stride.max(inside.extent()),
            blocks: group.blocks.into(),
            inside,
            kernel: None,
        })
    }
}

/// The strips of a block, by region, stride and start, and the bytes of a row. In the row they stand in
/// the order in which the manifest comes to them, so that what belongs to a layer stands together.
fn strips<'a>(
    items: impl Iterator<Item = &'a Placed> + Clone,
) -> Result<(Vec<Strip>, u64), String> {
    /// Where something starts in block 0, how far it reaches, and how many blocks there are.
    type Reach = (u64, u64, u64);
    // By region and stride.
    let mut spans: BTreeMap<(u32, u64), Vec<Reach>> = BTreeMap::new();
    for item in items.clone() {
        let known = spans.entry((item.region, item.stride)).or_default();
        known.extend(item.starts.iter().map(|&at| (at, at + item.inside.extent(), item.blocks)));
    }
    let mut strips: Vec<Strip> = vec![];
    for ((region, stride), mut spans) in spans {
        spans.sort_unstable();
        let mut current: Option<Strip> = None;
        for (start, end, blocks) in spans {
            match &mut current {
                // What still fits between two blocks is the same strip.
                Some(strip) if end - strip.start <= stride => {
                    strip.blocks = strip.blocks.max(blocks);
                }
                _ => strips.extend(current.replace(Strip {
                    region,
                    start,
                    stride,
                    blocks,
                    at: None,
                })),
            }
        }
        strips.extend(current);
    }
    if strips.len() > MAX_STRIPS {
        return Err(format!("a block lies in {} places: too many to be drawn", strips.len()));
    }
    let mut row = 0_u64;
    for item in items {
        for &start in &item.starts {
            let strip = strip_of(&strips, item, start);
            if strips[strip].at.is_none() {
                strips[strip].at = Some(row);
                row = row.checked_add(item.stride).ok_or("a block is too large to be drawn")?;
            }
        }
    }
    Ok((strips, row))
}

/// The strip that a part of an item lies in.
fn strip_of(strips: &[Strip], item: &Placed, start: u64) -> usize {
    let key = |strip: &Strip| (strip.region, strip.stride, strip.start);
    let wanted = (item.region, item.stride, start);
    strips.partition_point(|strip| key(strip) <= wanted) - 1
}

/// What a group keeps of one layer, in bytes of the row.
struct Layer {
    /// The layers: several where their bytes are interleaved.
    names: Vec<String>,
    is_all: bool,
    span: (u64, u64),
    kernel: Option<Repeat>,
    states: Vec<(String, Shape)>,
    scratch: Vec<Shape>,
}

impl Layer {
    /// The layers of a group, in the order of the row.
    fn all(items: &[Placed], strips: &[Strip]) -> Vec<Self> {
        let mut layers: Vec<Self> = vec![];
        for item in items.iter().filter(|item| !item.is_scratch) {
            let shapes = item.in_row(strips);
            let start = shapes.iter().map(|shape| shape.offset).min().unwrap_or(0);
            let end = shapes.iter().map(|shape| shape.offset + shape.extent()).max().unwrap_or(0);
            let states = shapes.into_iter().map(|shape| (item.layer.clone(), shape));
            match layers.iter_mut().find(|layer| layer.names[0] == item.layer) {
                Some(layer) => {
                    layer.span = (layer.span.0.min(start), layer.span.1.max(end));
                    layer.states.extend(states);
                }
                None => layers.push(Self {
                    names: vec![item.layer.clone()],
                    is_all: false,
                    span: (start, end),
                    kernel: item.kernel,
                    states: states.collect(),
                    scratch: vec![],
                }),
            }
        }
        let count = layers.len();
        layers.sort_by_key(|layer| layer.span);
        let mut joined: Vec<Self> = vec![];
        for layer in layers {
            match joined.last_mut() {
                Some(last) if layer.span.0 < last.span.1 => {
                    last.names.extend(layer.names);
                    last.span.1 = last.span.1.max(layer.span.1);
                    last.states.extend(layer.states);
                    last.kernel = None;
                }
                _ => joined.push(layer),
            }
        }
        joined.iter_mut().for_each(|layer| layer.is_all = layer.names.len() == count);
        for shape in
            items.iter().filter(|item| item.is_scratch).flat_map(|item| item.in_row(strips))
        {
            let before = joined.partition_point(|layer| layer.span.0 <= shape.offset);
            if let Some(layer) = joined.get_mut(before.saturating_sub(1)) {
                layer.span.0 = layer.span.0.min(shape.offset);
                layer.span.1 = layer.span.1.max(shape.offset + shape.extent());
                layer.scratch.push(shape);
            }
        }
        joined
    }

    fn into_page(self, at: u64, bytes: u64) -> Page {
        let is_joined = self.names.len() > 1;
        let name = match (is_joined, self.is_all) {
            (true, true) => "all layers".to_owned(),
            (true, false) => format!("{} to {}", self.names[0], self.names[self.names.len() - 1]),
            (false, _) => self.names[0].clone(),
        };
        let in_page = |shape: Shape| Shape { offset: shape.offset - at, ..shape };
        let state = |(layer, shape): (String, Shape)| {
            let name =
                if is_joined { format!("{layer}/{}", shape.name) } else { shape.name.clone() };
            Shape { name, ..in_page(shape) }
        };
        Page {
            name,
            at,
            bytes,
            kernel: self.kernel,
            states: self.states.into_iter().map(state).collect(),
            scratch: self.scratch.into_iter().map(in_page).collect(),
        }
    }
}

impl Placed {
    /// Its bytes in the row: one shape where its strips are at equal distances, one for each otherwise.
    fn in_row(&self, strips: &[Strip]) -> Vec<Shape> {
        let mut at: Vec<u64> = vec![];
        for &start in &self.starts {
            let strip = strips[strip_of(strips, self, start)];
            at.push(strip.in_row() + start - strip.start);
        }
        at.sort_unstable();
        let distance = at.get(1).map_or(0, |second| second - at[0]);
        if at.windows(2).all(|pair| pair[1] - pair[0] == distance) {
            let mut repeats = self.inside.repeats.clone();
            repeats.push(Repeat { count: at.len() as u64, distance });
            return vec![Shape::new(self.name.clone(), at[0], self.inside.run, repeats)];
        }
        at.into_iter().map(|offset| Shape { offset, ..self.inside.clone() }).collect()
    }
}

impl Page {
    /// The state that a byte belongs to.
    pub(super) fn state_at(&self, at: u64) -> usize {
        self.states.iter().position(|state| state.contains(at)).unwrap_or(0)
    }
}

impl Shape {
    /// Joins runs that touch.
    fn new(name: String, offset: u64, run: u64, mut repeats: Vec<Repeat>) -> Self {
        repeats.retain(|repeat| repeat.count > 1);
        repeats.sort_by_key(|repeat| std::cmp::Reverse(repeat.distance));
        let mut shape = Self { name, offset, run, repeats: vec![] };
        while let Some(repeat) = repeats.pop() {
            match shape.repeats.first_mut() {
                None if repeat.distance == shape.run => shape.run *= repeat.count,
                Some(inner) if repeat.distance == inner.count * inner.distance => {
                    inner.count *= repeat.count;
                }
                _ => shape.repeats.insert(0, repeat),
            }
        }
        shape
    }

    /// Bytes from its first to its last.
    fn extent(&self) -> u64 {
        let steps = self.repeats.iter().map(|repeat| (repeat.count - 1) * repeat.distance);
        self.run + steps.sum::<u64>()
    }

    fn contains(&self, at: u64) -> bool {
        let Some(mut rest) = at.checked_sub(self.offset) else { return false };
        for repeat in &self.repeats {
            rest -= (rest / repeat.distance).min(repeat.count - 1) * repeat.distance;
        }
        rest < self.run
    }
}
