//! What a transfer must do to every byte of a destination, and whether it did.

use std::collections::BTreeMap;

use crate::engine::{Engine, Holding, Rank};
use crate::recipe::GroupRecipe;
use crate::request::{OwnedRequest, held, places};

/// A copy: absolute addresses on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Where it reads.
    pub source: u64,
    /// Where it writes.
    pub destination: u64,
    /// How much.
    pub bytes: u64,
}

/// A stretch of the destination that is left over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// Its first byte.
    pub address: u64,
    /// Its length.
    pub bytes: u64,
}

/// What a plan said about one request on one destination rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// The copies from every source, in the order of the sources.
    pub copies: Vec<Vec<Move>>,
    /// The rest.
    pub rest: Vec<Leftover>,
}

/// Numbers about a transfer that was right.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Bytes moved.
    pub bytes: u64,
    /// Copies, those that follow each other as one.
    pub copies: u64,
    /// Copies that an order by destination address would have needed for the same bytes.
    pub fewest: u64,
    /// Sources that were read.
    pub sources: u64,
}

/// A memory in which every byte is a cell of 64 bits, so that no two bytes are alike.
#[derive(Clone, Debug)]
struct Memory {
    regions: Vec<(u64, Vec<u64>)>,
}

const SOURCE_POISON: u64 = 1 << 62;
const DESTINATION_POISON: u64 = 1 << 63;

impl Memory {
    /// The memory of a rank, every cell with a value of its own.
    fn poisoned(rank: &Rank, poison: u64) -> Self {
        let regions = rank.manifest.regions().iter().map(|region| {
            let cells = region.base..region.base + region.bytes;
            (region.base, cells.map(|address| poison | address).collect())
        });
        Self { regions: regions.collect() }
    }

    /// The region and the index in it of `bytes` bytes, which must lie in one region.
    fn locate(&self, address: u64, bytes: u64) -> Option<(usize, usize)> {
        self.regions.iter().enumerate().find_map(|(region, (base, cells))| {
            let start = address.checked_sub(*base)?;
            let end = start.checked_add(bytes)?;
            (end <= cells.len() as u64).then_some((region, start as usize))
        })
    }

    fn cells(&mut self, address: u64, bytes: u64) -> Option<&mut [u64]> {
        let (region, start) = self.locate(address, bytes)?;
        Some(&mut self.regions[region].1[start..start + bytes as usize])
    }
}

/// Source memories of a request, filled with what they hold of it.
#[derive(Clone, Debug)]
pub struct Sources<'a> {
    engine: &'a Engine,
    request: &'a OwnedRequest,
    numbers: BTreeMap<&'a str, u64>,
    memories: Vec<Memory>,
}

impl<'a> Sources<'a> {
    /// Fills the memories of all ranks: every byte of a live element carries the number of its state,
    /// its entry, its element in the whole state, and its place in the element.
    pub fn fill(engine: &'a Engine, request: &'a OwnedRequest) -> Self {
        let states = engine.recipe.model.states();
        let numbers: BTreeMap<&str, u64> =
            states.zip(0..).map(|((_, state), number)| (state.name.as_str(), number)).collect();
        let mut memories = vec![];
        for (number, rank) in (0..).zip(&engine.ranks) {
            let mut memory = Memory::poisoned(rank, SOURCE_POISON | (number << 40));
            for (index, group) in engine.recipe.groups.iter().enumerate() {
                for holding in &rank.holdings[index] {
                    let live = group.reach().live(holding.law, request.tokens);
                    for (entry, position, slot) in places(holding, &live) {
                        let table = &request.source[index];
                        let Some(block) = table.at(position, group.null_block) else { continue };
                        for element in 0..holding.volume() {
                            let address = holding.address(block, slot, element);
                            let value = value(&numbers, holding, entry, element);
                            let cells = memory.cells(address, holding.element);
                            for (cell, byte) in cells.expect("inside").iter_mut().zip(0..) {
                                *cell = value | byte;
                            }
                        }
                    }
                }
            }
            memories.push(memory);
        }
        Self { engine, request, numbers, memories }
    }

    /// Carries out what a plan said for `rank` of `destination`, which read from the ranks `sources`
    /// in this order, and checks every byte. The error says what is wrong.
    pub fn judge(
        &self,
        sources: &[usize],
        destination: &Engine,
        rank: usize,
        said: &Said,
    ) -> Result<Tally, String> {
        let facts = &destination.ranks[rank];
        let mut memory = Memory::poisoned(facts, DESTINATION_POISON);
        let mut expected = memory.clone();
        let rest = self.expect(destination, facts, &mut expected);
        let mut tally = Tally::default();
        let mut written = memory.clone();
        for (_, cells) in &mut written.regions {
            cells.fill(0);
        }
        if said.copies.len() != sources.len() {
            return Err(format!("{} lists for {} sources", said.copies.len(), sources.len()));
        }
        for (list, &source) in said.copies.iter().zip(sources) {
            let from = &self.memories[source];
            self.carry_out(list, from, &mut memory, &mut written)
                .map_err(|problem| format!("source rank {source}: {problem}"))?;
            tally.bytes += list.iter().map(|copy| copy.bytes).sum::<u64>();
            // Who makes a list of them joins those that follow each other.
            let joined = list.windows(2).filter(|pair| touch(pair[0], pair[1], from, &memory));
            tally.copies += (list.len() - joined.count()) as u64;
            tally.fewest += fewest(list, from, &memory);
            tally.sources += u64::from(!list.is_empty());
        }
        for leftover in &said.rest {
            let cells = written
                .cells(leftover.address, leftover.bytes)
                .filter(|cells| !cells.is_empty())
                .ok_or_else(|| format!("{leftover:?} is empty or in no region"))?;
            for cell in cells {
                if *cell != 0 {
                    return Err(format!("{leftover:?} is written or left over twice"));
                }
                *cell = 1;
            }
            memory.cells(leftover.address, leftover.bytes).expect("located above").fill(0);
        }
        for leftover in rest {
            expected.cells(leftover, 1).expect("inside")[0] = 0;
        }
        for ((base, found), (_, wanted)) in memory.regions.iter().zip(&expected.regions) {
            let differs = found.iter().zip(wanted).position(|(found, wanted)| found != wanted);
            if let Some(at) = differs {
                return Err(format!(
                    "byte {:#x} holds {} and should hold {}",
                    base + at as u64,
                    self.describe(found[at]),
                    self.describe(wanted[at])
                ));
            }
        }
        Ok(tally)
    }

    fn carry_out(
        &self,
        list: &[Move],
        from: &Memory,
        memory: &mut Memory,
        written: &mut Memory,
    ) -> Result<(), String> {
        for copy in list {
            if copy.bytes == 0 {
                return Err(format!("{copy:?} moves nothing"));
            }
            let (region, start) = from
                .locate(copy.source, copy.bytes)
                .ok_or_else(|| format!("{copy:?} reads outside of every region"))?;
            let cells = &from.regions[region].1[start..start + copy.bytes as usize];
            if let Some(at) = cells.iter().position(|cell| cell & SOURCE_POISON != 0) {
                return Err(format!(
                    "{copy:?} reads byte {at}, which holds nothing of the request"
                ));
            }
            let marks = written
                .cells(copy.destination, copy.bytes)
                .ok_or_else(|| format!("{copy:?} writes outside of every region"))?;
            if let Some(at) = marks.iter().position(|mark| *mark != 0) {
                return Err(format!("{copy:?} writes byte {at} for the second time"));
            }
            marks.fill(1);
            let target = memory.cells(copy.destination, copy.bytes).expect("located above");
            target.copy_from_slice(cells);
        }
        Ok(())
    }

    /// Sets what must arrive, and returns the addresses of the rest.
    fn expect(&self, destination: &Engine, rank: &Rank, expected: &mut Memory) -> Vec<u64> {
        let (tokens, mut rest) = (self.request.tokens, vec![]);
        for (index, group) in destination.recipe.groups.iter().enumerate() {
            let (table, cached) = (&self.request.destination[index], self.request.cached[index]);
            for holding in &rank.holdings[index] {
                let needed = group.copied(holding, self.engine).needed(holding.law, cached, tokens);
                for (entry, position, slot) in places(holding, &needed) {
                    let block = table.at(position, group.null_block);
                    let block = block.expect("the table has all that is needed");
                    for element in 0..holding.volume() {
                        let address = holding.address(block, slot, element);
                        let value = value(&self.numbers, holding, entry, element);
                        let cells = expected.cells(address, holding.element).expect("inside");
                        for (cell, byte) in cells.iter_mut().zip(0..) {
                            *cell = value | byte;
                        }
                    }
                }
            }
            for (position, &block) in (table.first..).zip(&table.blocks) {
                if Some(block) == group.null_block || tokens == 0 {
                    continue;
                }
                // The entries in the slots of this block, and whether one of them is not held.
                let slots: Vec<(&Holding, Vec<u64>)> = rank.holdings[index]
                    .iter()
                    .map(|holding| {
                        let mut slots = holding.share.first((position + 1) * holding.slots);
                        (holding, slots.split_off((position * holding.slots) as usize))
                    })
                    .collect();
                let missing = slots.iter().any(|(holding, slots)| {
                    let held = held(holding.law, cached, tokens);
                    slots.iter().any(|&entry| entry >= held)
                });
                if !missing {
                    continue;
                }
                for (holding, slots) in slots {
                    let needed =
                        group.copied(holding, self.engine).needed(holding.law, cached, tokens);
                    let held = held(holding.law, cached, tokens);
                    for (slot, entry) in (0..).zip(slots) {
                        if entry < held || needed.contains(&entry) {
                            continue;
                        }
                        for element in 0..holding.volume() {
                            let address = holding.address(block, slot, element);
                            rest.extend(address..address + holding.element);
                        }
                    }
                }
                rest.extend(&rank.scratch[index][block as usize]);
            }
        }
        rest
    }

    fn describe(&self, cell: u64) -> String {
        if cell == 0 {
            return "zero".to_owned();
        }
        if cell & (SOURCE_POISON | DESTINATION_POISON) != 0 {
            return "what it held before".to_owned();
        }
        let state = self.numbers.iter().find(|(_, number)| **number == cell >> 48);
        format!(
            "byte {} of element {} of entry {} of {}",
            cell & 0xff,
            cell >> 8 & 0xf_ffff,
            (cell >> 28 & 0xf_ffff) - 1,
            state.map_or("an unknown state", |(name, _)| name),
        )
    }

    /// The engine that is read.
    pub fn engine(&self) -> &Engine {
        self.engine
    }
}

/// The value of an element's first byte.
fn value(numbers: &BTreeMap<&str, u64>, holding: &Holding, entry: u64, element: u64) -> u64 {
    let (whole, entry) = (holding.whole(element), entry + 1);
    let state = numbers.get(holding.state.as_str());
    let state = state.unwrap_or_else(|| panic!("the source has no {}", holding.state));
    assert!(whole < 1 << 20 && entry < 1 << 20 && *state < 1 << 14 && holding.element <= 256);
    (state << 48) | (entry << 28) | (whole << 8)
}

/// Whether the second copy continues the first on both sides, in the same regions.
fn touch(first: Move, second: Move, from: &Memory, to: &Memory) -> bool {
    let region = |memory: &Memory, address| memory.locate(address, 1).map(|(region, _)| region);
    first.source + first.bytes == second.source
        && first.destination + first.bytes == second.destination
        && region(from, first.source) == region(from, second.source)
        && region(to, first.destination) == region(to, second.destination)
}

/// Maximal runs of the bytes of a list, in the order of the destination's addresses.
fn fewest(list: &[Move], from: &Memory, to: &Memory) -> u64 {
    let mut sorted = list.to_vec();
    sorted.sort_unstable_by_key(|copy| copy.destination);
    let joined = sorted.windows(2).filter(|pair| touch(pair[0], pair[1], from, to)).count();
    (sorted.len() - joined) as u64
}

/// Whether `rank` of `destination` can be filled from the ranks `sources` of `source`: the reason, if
/// not. Decided by looking for a holder of every element, and for lost tokens after every length.
pub fn compatible(
    source: &Engine,
    sources: &[usize],
    destination: &Engine,
    rank: usize,
) -> Result<(), String> {
    if source.recipe.model.identity != destination.recipe.model.identity {
        return Err("identity".to_owned());
    }
    let kinds = |engine: &Engine| -> BTreeMap<String, _> {
        let states = engine.recipe.model.states();
        states.map(|(tensor, state)| (state.name.clone(), state.kind(tensor.law))).collect()
    };
    let (own, other) = (kinds(destination), kinds(source));
    for (index, group) in destination.recipe.groups.iter().enumerate() {
        for holding in &destination.ranks[rank].holdings[index] {
            let name = &holding.state;
            let mut holders = vec![];
            for &number in sources {
                let groups = source.recipe.groups.iter().zip(&source.ranks[number].holdings);
                for (kept, holdings) in groups {
                    let same = holdings.iter().filter(|other| other.state == *name);
                    holders.extend(same.map(|holding| (kept, holding)));
                }
            }
            if !holders.is_empty() && own.get(name) != other.get(name) {
                return Err(format!("{name} is of another kind"));
            }
            let keeps = |kept: &GroupRecipe| kept.reach().covers(&group.need(holding));
            if holding.law.entries > 0 && holders.iter().any(|(kept, _)| !keeps(kept)) {
                return Err(format!("{name}: the window is too small"));
            }
            let shares = holders.iter().map(|(_, holder)| &holder.share).chain([&holding.share]);
            let turns = shares.map(|share| share.modulus).fold(1, common);
            // Every entry in a common period of all turns, which repeats for ever.
            for entry in (0..turns).filter(|&entry| holding.share.holds(entry)) {
                let with_entry: Vec<_> =
                    holders.iter().filter(|(_, holder)| holder.share.holds(entry)).collect();
                for element in 0..holding.volume() {
                    let whole = holding.whole(element);
                    let found = with_entry.iter().any(|(_, holder)| holder.contains(whole));
                    if !found {
                        return Err(format!("nobody holds element {whole} of {name}"));
                    }
                }
            }
        }
    }
    Ok(())
}

/// The smallest common multiple.
fn common(a: u64, b: u64) -> u64 {
    (1..=b).map(|times| times * a).find(|multiple| multiple % b == 0).expect("a * b at the latest")
}

impl Holding {
    /// Whether an element, by its number in the whole state, is held.
    pub fn contains(&self, mut whole: u64) -> bool {
        self.bounds.iter().zip(&self.lengths).rev().all(|(range, length)| {
            let index = whole % length;
            whole /= length;
            range.contains(&index)
        })
    }
}
