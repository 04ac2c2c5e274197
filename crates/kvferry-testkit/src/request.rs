//! Requests, and what they need, from first principles.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kvferry_layout::Law;

use crate::engine::{Engine, GroupRecipe, Holding};
use crate::model::Sight;
use crate::random::Dice;

/// A block table of one group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnedTable {
    /// Position of the first block.
    pub first: u64,
    /// Block ids by position.
    pub blocks: Vec<u32>,
}

/// A request between two engines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedRequest {
    /// Tokens of the sequence.
    pub tokens: u64,
    /// Tokens that each destination group already holds.
    pub cached: Vec<u64>,
    /// Tables of the source's groups.
    pub source: Vec<OwnedTable>,
    /// Tables of the destination's groups.
    pub destination: Vec<OwnedTable>,
}

/// Entries that `n` tokens have closed: an entry is closed when its last token is there.
pub fn closed(law: Law, n: u64) -> u64 {
    n * u64::from(law.entries) / u64::from(law.tokens)
}

/// All entries after `n` tokens.
pub fn entries(law: Law, n: u64) -> u64 {
    if n == 0 { 0 } else { closed(law, n) + u64::from(law.open) }
}

/// Entries from the front that are already there.
pub fn held(law: Law, cached: u64, n: u64) -> u64 {
    if cached == n { entries(law, n) } else { closed(law, cached) }
}

/// How far back something reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// What is looked back at.
    pub sight: Sight,
    /// Tokens beyond that.
    pub extra: u64,
}

impl Reach {
    /// Whether it reaches as far as another, after every length.
    pub fn covers(&self, other: &Self) -> bool {
        let first = |reach: &Self, n| reach.sight.first(n, reach.extra);
        self == other || (0..300).all(|n| first(self, n) <= first(other, n))
    }

    /// The entries of a state within it after `n` tokens.
    pub fn live(&self, law: Law, n: u64) -> Range<u64> {
        closed(law, self.sight.first(n, self.extra))..entries(law, n)
    }

    /// The entries that must be moved when `cached` tokens are there.
    pub fn needed(&self, law: Law, cached: u64, n: u64) -> Range<u64> {
        let live = self.live(law, n);
        let start = live.start.max(held(law, cached, n));
        start..live.end.max(start)
    }
}

impl GroupRecipe {
    /// What its blocks keep.
    pub fn reach(&self) -> Reach {
        Reach { sight: self.sight, extra: self.extra }
    }

    /// What one of its holdings cannot do without.
    pub fn need(&self, holding: &Holding) -> Reach {
        holding.need.map_or(self.reach(), |sight| Reach { sight, extra: 0 })
    }

    /// What is copied to one of its holdings: all that the group keeps where `source` keeps as much of
    /// the state; else what the holding cannot do without.
    pub fn copied(&self, holding: &Holding, source: &Engine) -> Reach {
        let has = |index: usize| {
            let mut held = source.ranks.iter().flat_map(|rank| &rank.holdings[index]);
            held.any(|other| other.state == holding.state)
        };
        let mut groups = source.recipe.groups.iter().enumerate().filter(|(index, _)| has(*index));
        let whole =
            holding.need.is_none() || groups.all(|(_, kept)| kept.reach().covers(&self.reach()));
        if whole { self.reach() } else { self.need(holding) }
    }
}

impl OwnedTable {
    /// The block at a position, if the table has a live one.
    pub fn at(&self, position: u64, null_block: Option<u32>) -> Option<u32> {
        let index = position.checked_sub(self.first)?;
        let block = *self.blocks.get(index as usize)?;
        (Some(block) != null_block).then_some(block)
    }
}

impl OwnedRequest {
    /// Whether one destination rank can be served: what is wrong with the request, if not. Looks at
    /// every entry that the rank needs.
    pub fn check(
        &self,
        source: &Engine,
        sources: &[usize],
        destination: &Engine,
        rank: usize,
    ) -> Result<(), String> {
        let (from, to) = (&source.recipe.groups, &destination.recipe.groups);
        if self.source.len() != from.len() || self.destination.len() != to.len() {
            return Err("a table for every group".to_owned());
        }
        if self.cached.len() != to.len() || self.cached.iter().any(|&held| held > self.tokens) {
            return Err("a cached length for every group, and none too long".to_owned());
        }
        if self.tokens == 0 {
            return Ok(());
        }
        let rank = &destination.ranks[rank];
        // Tables of groups of which the rank holds nothing say nothing to it.
        let states: BTreeSet<&str> =
            rank.holdings.iter().flatten().map(|held| &*held.state).collect();
        let of_rank = |index: usize| !rank.holdings[index].is_empty();
        let is_read = |index: usize| {
            let ranks = sources.iter().map(|&from| &source.ranks[from]);
            let mut held = ranks.flat_map(|rank| &rank.holdings[index]);
            held.any(|holding| states.contains(&*holding.state))
        };
        for (index, group) in from.iter().enumerate().filter(|(index, _)| is_read(*index)) {
            if self.source[index].blocks.iter().any(|&id| id >= group.blocks) {
                return Err(format!("source {}: a block that does not exist", group.name));
            }
        }
        for (index, group) in to.iter().enumerate().filter(|(index, _)| of_rank(*index)) {
            if self.destination[index].blocks.iter().any(|&id| id >= group.blocks) {
                return Err(format!("destination {}: a block that does not exist", group.name));
            }
        }
        let mut used = BTreeSet::new();
        for (index, group) in to.iter().enumerate().filter(|(index, _)| of_rank(*index)) {
            let live = |id: &&u32| Some(**id) != group.null_block;
            for &id in self.destination[index].blocks.iter().filter(live) {
                if !used.insert((rank.manifest.pool(index), id)) {
                    return Err(format!("block {id} twice"));
                }
            }
        }
        for (index, group) in to.iter().enumerate() {
            for holding in &rank.holdings[index] {
                let copied = group.copied(holding, source);
                let needed = copied.needed(holding.law, self.cached[index], self.tokens);
                let needed = places(holding, &needed);
                let table = &self.destination[index];
                let lone = group.tokens_per_block.is_some() || table.blocks.len() == 1;
                for &(entry, position, _) in &needed {
                    if !lone || table.at(position, group.null_block).is_none() {
                        return Err(format!("{}: no place for {entry}", holding.state));
                    }
                    let found = from.iter().enumerate().any(|(number, group)| {
                        let table = &self.source[number];
                        let lone = group.tokens_per_block.is_some() || table.blocks.len() == 1;
                        let ranks = sources.iter().map(|&from| &source.ranks[from]);
                        let mut held = ranks.flat_map(|rank| &rank.holdings[number]);
                        held.any(|other| {
                            other.state == holding.state
                                && lone
                                && places(other, &(entry..entry + 1))
                                    .iter()
                                    .any(|place| table.at(place.1, group.null_block).is_some())
                        })
                    });
                    if !found {
                        return Err(format!("{}: entry {entry} is nowhere", holding.state));
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether every block that the source names exists and is named once.
    pub fn source_is_honest(&self, source: &Engine) -> bool {
        let mut used = BTreeSet::new();
        source.recipe.groups.iter().zip(&self.source).all(|(group, table)| {
            let live = |id: &&u32| Some(**id) != group.null_block;
            table
                .blocks
                .iter()
                .filter(live)
                .all(|&id| id < group.blocks && used.insert((group.pool, id)))
        })
    }
}

/// The places of entries on a rank: (entry, position in the table, slot), for those of `range` that
/// the rank holds.
pub fn places(holding: &Holding, range: &Range<u64>) -> Vec<(u64, u64, u64)> {
    let mut local = 0;
    let mut places = vec![];
    for entry in 0..range.end {
        if !holding.share.holds(entry) {
            continue;
        }
        if range.start <= entry {
            places.push((entry, local / holding.slots, local % holding.slots));
        }
        local += 1;
    }
    places
}

/// What a random request looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Block ids in any order.
    Scattered,
    /// Neighbouring blocks have neighbouring ids.
    Ascending,
}

/// A random request of at most `most` tokens that both engines have room for.
pub fn draw(
    source: &Engine,
    destination: &Engine,
    most: u64,
    shape: Shape,
    dice: &mut Dice,
) -> OwnedRequest {
    let mut tokens = match dice.within(0, 9) {
        0 => dice.within(0, 1),
        1 | 2 => most,
        _ => dice.within(1, most.max(1)),
    };
    loop {
        let cached = draw_cached(destination, tokens, dice);
        if let Some(request) = with_room(source, destination, tokens, cached, shape, dice) {
            return request;
        }
        tokens = tokens * 3 / 4;
    }
}

fn draw_cached(destination: &Engine, tokens: u64, dice: &mut Dice) -> Vec<u64> {
    let style = dice.within(0, 3);
    let common = dice.within(0, tokens);
    let groups = &destination.recipe.groups;
    let draw = |group: &GroupRecipe| match (style, group.tokens_per_block) {
        (0, _) => 0,
        // A prefix of whole blocks; states are never held in part.
        (1, Some(block)) => common / block * block,
        (1, None) => 0,
        _ => match dice.within(0, 3) {
            0 => 0,
            1 => tokens,
            _ => dice.within(0, tokens),
        },
    };
    groups.iter().map(draw).collect()
}

/// The request with tables of random blocks; `None` where a pool has too few.
pub fn with_room(
    source: &Engine,
    destination: &Engine,
    tokens: u64,
    cached: Vec<u64>,
    shape: Shape,
    dice: &mut Dice,
) -> Option<OwnedRequest> {
    // Which entries of each state any destination rank needs.
    let mut wanted: BTreeMap<&str, Range<u64>> = BTreeMap::new();
    let mut filled: Vec<BTreeSet<u64>> = vec![];
    for (index, group) in destination.recipe.groups.iter().enumerate() {
        let mut positions = BTreeSet::new();
        for holding in destination.ranks.iter().flat_map(|rank| &rank.holdings[index]) {
            let needed = group.copied(holding, source).needed(holding.law, cached[index], tokens);
            positions.extend(places(holding, &needed).iter().map(|&(_, position, _)| position));
            wanted.insert(&holding.state, needed);
        }
        filled.push(positions);
    }
    let mut read: Vec<BTreeSet<u64>> = vec![];
    for index in 0..source.recipe.groups.len() {
        let mut positions = BTreeSet::new();
        for holding in source.ranks.iter().flat_map(|rank| &rank.holdings[index]) {
            if let Some(needed) = wanted.get(holding.state.as_str()) {
                positions.extend(places(holding, needed).iter().map(|&(_, position, _)| position));
            }
        }
        read.push(positions);
    }
    Some(OwnedRequest {
        tokens,
        source: draw_tables(source, &read, tokens, shape, dice)?,
        destination: draw_tables(destination, &filled, tokens, shape, dice)?,
        cached,
    })
}

fn draw_tables(
    engine: &Engine,
    needed: &[BTreeSet<u64>],
    tokens: u64,
    shape: Shape,
    dice: &mut Dice,
) -> Option<Vec<OwnedTable>> {
    let groups = &engine.recipe.groups;
    // Free blocks of each pool, in the order in which they are handed out.
    let mut free: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    for group in groups {
        let ids = free.entry(group.pool).or_default();
        for id in 0..group.blocks {
            if Some(id) != group.null_block && !ids.contains(&id) {
                ids.push(id);
            }
        }
    }
    for ids in free.values_mut() {
        match shape {
            Shape::Scattered => dice.shuffle(ids),
            Shape::Ascending => ids.sort_unstable(),
        }
    }
    let mut tables = vec![OwnedTable::default(); groups.len()];
    let mut order: Vec<usize> = (0..groups.len()).collect();
    if shape == Shape::Scattered {
        dice.shuffle(&mut order);
    }
    for index in order {
        let group = &groups[index];
        let ids = free.get_mut(&group.pool).expect("every pool has its blocks");
        let mut take = || {
            let at = ids.iter().position(|&id| id < group.blocks)?;
            Some(ids.remove(at))
        };
        let positions = &needed[index];
        let table = &mut tables[index];
        let Some(block) = group.tokens_per_block else {
            // A running slot, which an engine may name even where nothing is needed.
            if !positions.is_empty() || dice.chance(60) {
                match take() {
                    Some(id) => table.blocks.push(id),
                    None if positions.is_empty() => {}
                    None => return None,
                }
            }
            continue;
        };
        let end = positions.last().map_or(0, |&last| last + 1);
        let whole = tokens.div_ceil(block).max(end);
        let end = if dice.chance(50) { end } else { whole + dice.pick(&[0, 0, 1]) };
        let first = positions.first().copied().unwrap_or(end);
        table.first = if dice.chance(50) { 0 } else { dice.within(0, first) };
        for position in table.first..end {
            let must = positions.contains(&position);
            let dead = !must && group.null_block.is_some() && dice.chance(60);
            match (if dead { None } else { take() }, group.null_block) {
                (Some(id), _) => table.blocks.push(id),
                (None, Some(null)) if !must => table.blocks.push(null),
                _ if must => return None,
                // No room and no id for dead entries: begin later, or end here.
                _ if position < first => {
                    table.blocks.clear();
                    table.first = position + 1;
                }
                _ if positions.last().is_some_and(|&last| position < last) => return None,
                _ => break,
            }
        }
    }
    Some(tables)
}
