//! Spreads what several source ranks hold over all of them.
//!
//! A plan is compiled for one destination rank, which knows nothing of the others in its engine but
//! that they are like itself. So it does not look at what it reads alone: of every state it takes its
//! own bytes as spread evenly over the whole state, which is what all ranks of its engine together
//! read, and works out by that which share of every replicated part each source should give, beside
//! what only that source has. Ranks that take these shares of their own parts load the sources evenly
//! together, without a word between them. Each gives out whole layers, in the order of addresses, so
//! that copies stay long; where it starts depends on its number, so that what does not divide evenly
//! falls on other sources for other ranks.
//!
//! States that grow with the tokens, windows and snapshots are spread separately: then the loads are
//! even whatever the length of a request.

use std::collections::{BTreeMap, HashMap};

use kvferry_layout::{Law, Manifest, Phase, Piece, StateBox, Window};

use crate::compile::cover::{Budget, Part, Wanted, common, in_cycle};
use crate::compile::readers::{Readers, choose};
use crate::incompatible::Incompatible;

/// The fewest bytes, of a request of [`USUAL_TOKENS`], for which a further source rank is read. A rank
/// costs an operation and its answer, tens of microseconds; on the links between ranks this many bytes
/// take as long.
const WORTHWHILE: u64 = 1 << 20;

/// The tokens of the request for which bytes are held against [`WORTHWHILE`]: a prompt of usual length.
/// Nothing else depends on it.
const USUAL_TOKENS: u64 = 8192;

/// How what several source ranks hold is shared among them. Whatever it says, a plan is right: this decides only
/// who is read for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spread {
    /// As many ranks are read as have so many bytes each to give, of a request of 8,192 tokens. With `u64::MAX` as
    /// few ranks as possible, with 1 as many.
    pub worthwhile: u64,
    /// How many ranks the destination's engine has, where that is known. Those that read the same can then share
    /// the sources among them instead of reading all of them each.
    pub ranks: Option<u32>,
}

impl Spread {
    /// For one of so many ranks.
    pub fn among(ranks: u32) -> Self {
        Self { ranks: Some(ranks), ..Self::default() }
    }
}

impl Default for Spread {
    fn default() -> Self {
        Self { worthwhile: WORTHWHILE, ranks: None }
    }
}

/// How far what a source gives may be from its share before a layer is split, as a part of the mean.
const TOLERANCE: f64 = 0.05;

/// A layer is split into this many turns, each of whole blocks where blocks are not too large.
const TURNS: u64 = 16;

/// The longest repetition of the turns that a layer is split into: shorter requests do not have them
/// all, and are spread less evenly.
const MAX_SPLIT: u64 = USUAL_TOKENS;

/// Rounds in which the shares of all sets of replicas settle. Where sets do not overlap, one is enough.
const ROUNDS: usize = 16;

/// Changes `parts`, in which every part of the destination is given once, so that the sources are
/// loaded as evenly as their block layouts allow, as far as that moves enough bytes to each.
pub(crate) fn spread(
    destination: &Manifest,
    sources: &[&Manifest],
    wanted: &[Wanted<'_>],
    how: Spread,
    parts: &mut Vec<Part>,
    budget: &mut Budget,
) -> Result<(), Incompatible> {
    let mut holders = Holders::new(sources);
    let mut loads: BTreeMap<Growth, BTreeMap<usize, f64>> = BTreeMap::new();
    let mut patterns = Vec::with_capacity(wanted.len());
    for want in wanted {
        let pattern = holders.pattern(want, budget)?;
        patterns.push(pattern);
        let cells = &holders.patterns[pattern].cells;
        let all: f64 = cells.iter().map(|cell| cell.volume).sum();
        let Piece { bounds, phase, .. } = &destination.groups()[want.group].pieces[want.piece];
        let turns = phase.held.len() as f64 / phase.modulus as f64;
        let own = bytes(destination, want, bounds) * turns;
        let loads = loads.entry(Growth::of(destination, want)).or_default();
        for cell in cells {
            *loads.entry(cell.set).or_default() += own * cell.volume / all;
        }
    }
    if holders.sets.iter().all(|set| set.len() == 1) {
        return Ok(());
    }

    // The parts by growth and by the sources that could give them.
    let by_place: HashMap<(usize, usize), usize> =
        wanted.iter().enumerate().map(|(at, want)| ((want.group, want.piece), at)).collect();
    let mut shared: BTreeMap<(Growth, usize), Vec<Cut>> = BTreeMap::new();
    for (number, part) in parts.iter().enumerate() {
        let at = by_place[&part.to];
        let want = &wanted[at];
        let cells = &holders.patterns[patterns[at]].cells;
        for one in in_cycle(&part.bounds, part.phase, want.cycle) {
            budget.spend(cells.len(), want.state)?;
            for cell in cells {
                let Some(bounds) = cell.bounds.intersect(&one) else { continue };
                let turns = bounds.0[0].len() as f64 / want.cycle as f64;
                let inner = StateBox(bounds.0[1..].to_vec());
                let bytes = bytes(destination, want, &inner) * turns;
                let cut = Cut { part: number, want: at, bounds, bytes };
                shared.entry((Growth::of(destination, want), cell.set)).or_default().push(cut);
            }
        }
    }
    let readers = Readers::of(destination, sources, wanted, how.ranks);
    let mut shares: BTreeMap<Growth, HashMap<usize, Vec<f64>>> = BTreeMap::new();
    let mut chosen = Vec::with_capacity(shared.len());
    let mut changed = vec![false; parts.len()];
    for (&(growth, number), cuts) in &shared {
        let set = &holders.sets[number];
        let bytes: f64 = cuts.iter().map(|cut| cut.bytes).sum();
        let count = ((bytes / how.worthwhile.max(1) as f64) as usize).clamp(1, set.len());
        let mut seats = None;
        if count > 1 {
            let shares = shares
                .entry(growth)
                .or_insert_with(|| settle(&loads[&growth], &holders.sets, sources.len()));
            let shares = &shares[&number];
            let even = 1.0 / set.len() as f64;
            let all_even = shares.iter().all(|share| (share - even).abs() < even / 100.0);
            let states = cuts.iter().map(|cut| wanted[cut.want].state);
            let readers = if all_even { readers.count(states) } else { None };
            seats = choose(destination, shares, count, readers.unwrap_or(1));
        }
        if seats.is_some() {
            cuts.iter().for_each(|cut| changed[cut.part] = true);
        }
        chosen.push(seats);
    }
    let mut spread = vec![];
    for (((_, number), mut cuts), chosen) in shared.into_iter().zip(chosen) {
        cuts.retain(|cut| changed[cut.part]);
        let set = &holders.sets[number];
        let Some(chosen) = chosen else {
            // As it was; but what it was a part of may have gone elsewhere.
            spread
                .extend(cuts.iter().filter_map(|cut| {
                    give(&wanted[cut.want], &cut.bounds, parts[cut.part].source)
                }));
            continue;
        };
        let chosen = chosen.into_iter().map(|(at, share)| (set[at], share));
        let units = units(destination, wanted, cuts);
        for (unit, turns, seat) in allot(&units, chosen.collect()) {
            for cut in &unit.cuts {
                let want = &wanted[cut.want];
                let source = holders.sources[seat];
                let Some(mut part) = give(want, &cut.bounds, source) else { continue };
                if let Some(turns) = turns {
                    part.phase = turns;
                }
                spread.push(part);
            }
        }
    }
    let mut number = 0;
    parts.retain(|_| {
        number += 1;
        !changed[number - 1]
    });
    parts.append(&mut spread);
    Ok(())
}

/// How the bytes of a state grow with the tokens: those that grow alike are spread together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Growth {
    grows: bool,
    window: (Option<u64>, u64, u64),
}

impl Growth {
    fn of(destination: &Manifest, want: &Wanted<'_>) -> Self {
        let Window { tokens, chunk, extra } = want.window;
        match law(destination, want).entries {
            0 => Self { grows: false, window: (None, 1, 0) },
            _ => Self { grows: true, window: (tokens, chunk, extra) },
        }
    }
}

/// A box of one part that all sources of one set hold. The box's first axis is the entry's index in the
/// cycle.
struct Cut {
    part: usize,
    want: usize,
    bounds: StateBox,
    /// For a request of [`USUAL_TOKENS`].
    bytes: f64,
}

/// A box of a state that the same sources hold.
struct Cell {
    bounds: StateBox,
    volume: f64,
    /// Index of the set of sources.
    set: usize,
}

/// One way in which a state lies on the sources, and its cells.
struct Pattern<'a> {
    held: Vec<(usize, &'a StateBox, Phase)>,
    cycle: u64,
    cells: Vec<Cell>,
}

/// Which sources hold the same. They are named by their seats: their places in the order of their own
/// numbers, whatever the order in which their manifests came.
struct Holders<'a> {
    /// The source in each seat.
    sources: Vec<usize>,
    /// The seat of each source.
    seats: Vec<usize>,
    /// Sets of seats, each in order.
    sets: Vec<Vec<usize>>,
    patterns: Vec<Pattern<'a>>,
}

impl<'a> Holders<'a> {
    fn new(sources: &[&Manifest]) -> Self {
        let mut order: Vec<usize> = (0..sources.len()).collect();
        order.sort_by_key(|&source| sources[source].rank());
        let mut seats = vec![0; order.len()];
        order.iter().enumerate().for_each(|(seat, &source)| seats[source] = seat);
        Self { sources: order, seats, sets: vec![], patterns: vec![] }
    }

    /// The pattern of a wanted piece's state; layers that are alike share one.
    fn pattern(&mut self, want: &Wanted<'a>, budget: &mut Budget) -> Result<usize, Incompatible> {
        budget.spend(want.held.len() + self.patterns.len(), want.state)?;
        let alike = |known: &Pattern<'_>| (known.cycle, &known.held) == (want.cycle, &want.held);
        let known = self.patterns.iter().position(alike);
        if let Some(known) = known {
            return Ok(known);
        }
        let mut held: Vec<(usize, StateBox)> = vec![];
        for &(source, bounds, phase) in &want.held {
            let seat = self.seats[source];
            held.extend(in_cycle(bounds, phase, want.cycle).into_iter().map(|one| (seat, one)));
        }
        held.sort_by_key(|(seat, _)| *seat);
        let mut cells: Vec<(StateBox, Vec<usize>)> = vec![];
        for (seat, one) in held {
            budget.spend(cells.len(), want.state)?;
            let mut fresh = vec![one.clone()];
            let mut after = Vec::with_capacity(cells.len() + 1);
            for (cell, mut set) in cells {
                let Some(both) = cell.intersect(&one) else {
                    after.push((cell, set));
                    continue;
                };
                let mut rest = vec![];
                cell.subtract(&one, &mut rest);
                after.extend(rest.into_iter().map(|rest| (rest, set.clone())));
                let mut left = vec![];
                fresh.iter().for_each(|fresh| fresh.subtract(&cell, &mut left));
                fresh = left;
                if set.last() != Some(&seat) {
                    set.push(seat);
                }
                after.push((both, set));
            }
            after.extend(fresh.into_iter().map(|fresh| (fresh, vec![seat])));
            cells = after;
        }
        budget.spend(cells.len() * (self.sets.len() + cells.len()), want.state)?;
        let cells = cells.into_iter().map(|(bounds, set)| {
            let known = self.sets.iter().position(|other| *other == set);
            let set = known.unwrap_or_else(|| {
                self.sets.push(set);
                self.sets.len() - 1
            });
            Cell { volume: common(&bounds, &bounds) as f64, bounds, set }
        });
        let cells = cells.collect();
        self.patterns.push(Pattern { held: want.held.clone(), cycle: want.cycle, cells });
        Ok(self.patterns.len() - 1)
    }
}

/// The shares of the seats of every set, so that all seats are loaded as evenly as can be when each set
/// has the load that `loads` says.
///
/// Each set in turn fills up the least loaded of its seats, with the loads of the other sets given. That
/// lowers the sum of the squares of the loads, and where that sum is least, so is the highest load.
fn settle(
    loads: &BTreeMap<usize, f64>,
    sets: &[Vec<usize>],
    seats: usize,
) -> HashMap<usize, Vec<f64>> {
    let mut shares: HashMap<usize, Vec<f64>> = HashMap::new();
    let mut level = vec![0.0; seats];
    for (&set, &load) in loads {
        let share = 1.0 / sets[set].len() as f64;
        shares.insert(set, vec![share; sets[set].len()]);
        sets[set].iter().for_each(|&seat| level[seat] += share * load);
    }
    let mut shifted = f64::INFINITY;
    for _ in 0..ROUNDS {
        if shifted < 0.001 {
            break;
        }
        shifted = 0.0;
        for (&set, &load) in
            loads.iter().filter(|(set, load)| sets[**set].len() > 1 && **load > 0.0)
        {
            let shares = shares.entry(set).or_default();
            for (share, &seat) in shares.iter_mut().zip(&sets[set]) {
                level[seat] -= *share * load;
            }
            let given: Vec<f64> = sets[set].iter().map(|&seat| level[seat]).collect();
            let full = fill(&given, load);
            for (share, &seat) in shares.iter_mut().zip(&sets[set]) {
                let settled = (full - level[seat]).max(0.0) / load;
                shifted += (settled - *share).abs();
                *share = settled;
                level[seat] += settled * load;
            }
        }
    }
    shares
}

/// The level up to which `load` fills what is filled to `given` already.
fn fill(given: &[f64], load: f64) -> f64 {
    let mut given = given.to_vec();
    given.sort_by(f64::total_cmp);
    let mut below = 0.0;
    for (count, lowest) in given.iter().enumerate() {
        if count > 0 && (below + load) / count as f64 <= *lowest {
            return (below + load) / count as f64;
        }
        below += lowest;
    }
    (below + load) / given.len() as f64
}

/// What is given out together: what lies in the same blocks of the destination, so that it is copied
/// together.
struct Unit {
    cuts: Vec<Cut>,
    bytes: f64,
    /// Entries in each of [`TURNS`] turns, where the unit can be split into turns.
    turn: Option<u64>,
}

/// Groups cuts into units, in the order of addresses.
fn units(destination: &Manifest, wanted: &[Wanted<'_>], mut cuts: Vec<Cut>) -> Vec<Unit> {
    let view = |cut: &Cut| {
        let want = &wanted[cut.want];
        &destination.groups()[want.group].pieces[want.piece].view
    };
    cuts.sort_by_key(|cut| (wanted[cut.want].group, view(cut).region, view(cut).offset));
    let mut units: Vec<Unit> = vec![];
    for cut in cuts {
        let want = &wanted[cut.want];
        let snapshot = law(destination, want).entries == 0;
        let turn = turn_of(destination, want).filter(|_| !snapshot);
        if let Some(unit) = units.last_mut() {
            let (first, next) = (&unit.cuts[0], view(&cut));
            let before = view(first);
            let together = wanted[first.want].group == want.group
                && (before.region, before.block) == (next.region, next.block)
                && next.offset - before.offset < next.block;
            if together && !snapshot && unit.turn == turn {
                unit.bytes += cut.bytes;
                unit.cuts.push(cut);
                continue;
            }
        }
        units.push(Unit { bytes: cut.bytes, cuts: vec![cut], turn });
    }
    units
}

/// The entries in each turn when a piece is split into turns: as many as a block has, or an even part
/// of a large one. `None` where it cannot be split.
fn turn_of(destination: &Manifest, want: &Wanted<'_>) -> Option<u64> {
    let mut turn = destination.entries_per_block(want.group, want.piece);
    while turn.saturating_mul(TURNS) > MAX_SPLIT && turn.is_multiple_of(2) {
        turn /= 2;
    }
    (want.cycle == 1 && turn.saturating_mul(TURNS) <= MAX_SPLIT).then_some(turn)
}

/// Gives units to seats in runs, so that each seat gets its share: whole units if that comes close
/// enough, and else those that lie on the border between two seats in turns.
fn allot(units: &[Unit], seats: Vec<(usize, f64)>) -> Vec<(&Unit, Option<Phase>, usize)> {
    let all: f64 = units.iter().map(|unit| unit.bytes).sum();
    let mut weight: f64 = seats.iter().map(|(_, share)| share).sum();
    let even = weight <= 0.0;
    if even {
        weight = seats.len() as f64;
    }
    let mut border = 0.0;
    let borders: Vec<f64> = seats
        .iter()
        .map(|(_, share)| {
            border += all * if even { 1.0 } else { *share } / weight;
            border
        })
        .collect();
    let seat_at = |place: f64| {
        let seat = borders.iter().position(|border| place < *border);
        seat.unwrap_or(seats.len() - 1)
    };
    let mut whole = Vec::with_capacity(units.len());
    let mut given = vec![0.0; seats.len()];
    let mut start = 0.0;
    for unit in units {
        let seat = seat_at(start + unit.bytes / 2.0);
        given[seat] += unit.bytes;
        whole.push((unit, None, seats[seat].0));
        start += unit.bytes;
    }
    let before = |seat: usize| if seat == 0 { 0.0 } else { borders[seat - 1] };
    let too_much = TOLERANCE * all / seats.len() as f64;
    if (0..seats.len()).all(|seat| given[seat] - (borders[seat] - before(seat)) <= too_much) {
        return whole;
    }
    let mut split = vec![];
    let mut start = 0.0;
    for (number, unit) in units.iter().enumerate() {
        let piece = unit.bytes / TURNS as f64;
        match unit.turn {
            None => split.push(whole[number]),
            Some(turn) => {
                let seat_of = |at: u64| seat_at(start + (at as f64 + 0.5) * piece);
                let mut first = 0;
                while first < TURNS {
                    let seat = seat_of(first);
                    let end = (first..TURNS).find(|&at| seat_of(at) != seat).unwrap_or(TURNS);
                    let held = (first * turn..end * turn).into();
                    let all = end - first == TURNS;
                    let phase = (!all).then_some(Phase { modulus: TURNS * turn, held });
                    split.push((unit, phase, seats[seat].0));
                    first = end;
                }
            }
        }
        start += unit.bytes;
    }
    split
}

/// A box of a wanted piece, from a source that holds all of it. `None` never happens: the proof would
/// refuse the hole.
fn give(want: &Wanted<'_>, bounds: &StateBox, source: usize) -> Option<Part> {
    let volume = common(bounds, bounds);
    let mut offers = want.offers.iter().filter(|offer| offer.source == source);
    let offer =
        offers.find(|offer| offer.boxes.iter().any(|held| common(held, bounds) == volume))?;
    Some(want.part(offer, bounds))
}

/// Bytes of a box of a wanted piece in a request of [`USUAL_TOKENS`].
fn bytes(destination: &Manifest, want: &Wanted<'_>, bounds: &StateBox) -> f64 {
    let piece = &destination.groups()[want.group].pieces[want.piece];
    let kind = destination.kind(piece);
    let live = USUAL_TOKENS - want.window.first_live(USUAL_TOKENS).min(USUAL_TOKENS);
    let entries = match kind.law.entries {
        0 => 1,
        _ => kind.law.entries(live).max(1),
    };
    common(bounds, bounds) as f64 * f64::from(kind.format.bytes) * entries as f64
}

fn law(destination: &Manifest, want: &Wanted<'_>) -> Law {
    destination.kind(&destination.groups()[want.group].pieces[want.piece]).law
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Seat 2 alone has as much as seats 0 and 1 share: what all three hold is left to those.
    #[test]
    fn what_only_one_seat_has_counts() {
        let sets = [vec![2], vec![0, 1], vec![0, 1, 2]];
        let shares = settle(&BTreeMap::from([(0, 1.0), (1, 1.0), (2, 1.0)]), &sets, 3);
        let close = |a: &[f64], b: &[f64]| a.iter().zip(b).all(|(a, b)| (a - b).abs() < 0.01);
        assert!(close(&shares[&2], &[0.5, 0.5, 0.0]), "{shares:?}");
        assert!(close(&shares[&1], &[0.5, 0.5]), "{shares:?}");
    }
}
