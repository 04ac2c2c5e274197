//! How many ranks of an engine read the same, as far as one of them can tell.

use std::collections::{HashMap, HashSet};

use kvferry_layout::{Manifest, StateBox};

use crate::compile::cover::{Wanted, turn};

/// How many ranks of the destination's engine read each state's elements.
pub(crate) struct Readers<'a> {
    /// Which part of a state this rank has.
    parts: HashMap<&'a str, f64>,
    /// Ranks in the engine that have the same layers, or a divisor of their number. `None` if what this rank has
    /// does not look like an even split by rank numbers.
    ranks: Option<f64>,
}

impl<'a> Readers<'a> {
    /// `ranks` is how many the engine has, where that is known. Where a state is split, each has as much of it as
    /// this one: that tells their number, too, or a divisor of it.
    pub(crate) fn of(
        destination: &Manifest,
        sources: &[&Manifest],
        wanted: &[Wanted<'a>],
        ranks: Option<u32>,
    ) -> Self {
        let mut parts: HashMap<&str, f64> = HashMap::new();
        for want in wanted {
            let piece = &destination.groups()[want.group].pieces[want.piece];
            let whole = StateBox::whole(&destination.kind(piece).axes).volume() as f64;
            *parts.entry(want.state).or_default() += piece.bounds.volume() as f64 / whole;
        }
        let known = ranks.filter(|ranks| *ranks > 0);
        let known = known.map(|ranks| in_stage(ranks.into(), parts.len(), states(sources)));
        let rank = u64::from(destination.rank());
        // Whether ranks have the next shares in turn, and whether those that have the same stand together.
        let (mut most, mut in_turn, mut together) = (1, true, known.is_some());
        for want in wanted {
            let piece = &destination.groups()[want.group].pieces[want.piece];
            for (axis, span) in destination.kind(piece).axes.iter().zip(&piece.bounds.0) {
                let shares = axis.length.div_ceil(span.len());
                if shares < most {
                    continue;
                }
                let is = |place: u64| {
                    let even = shares * span.len() == axis.length && piece.phase.is_all();
                    even && place * span.len() == span.start
                };
                let among = |ranks: u64| {
                    ranks.is_multiple_of(shares) && is(rank % ranks / (ranks / shares))
                };
                in_turn = is(rank % shares) && (in_turn || shares > most);
                together = known.is_some_and(among) && (together || shares > most);
                most = shares;
            }
        }
        let ranks = if together { known } else { in_turn.then_some(most) };
        Self { parts, ranks: ranks.map(|ranks| ranks as f64) }
    }

    /// How many ranks read what this one reads of these states. `None` if they cannot be counted.
    pub(crate) fn count(&self, states: impl Iterator<Item = &'a str>) -> Option<u64> {
        let mut readers = None;
        for state in states {
            let count = self.ranks? * self.parts[state];
            let whole = count.round();
            if (count - whole).abs() > 1e-6 || readers.is_some_and(|other| other != whole) {
                return None;
            }
            readers = Some(whole);
        }
        readers.map(|readers| (readers as u64).max(1))
    }
}

fn states(sources: &[&Manifest]) -> usize {
    let groups = sources.iter().flat_map(|source| source.groups());
    let states: HashSet<&str> =
        groups.flat_map(|group| &group.pieces).map(|piece| piece.state.as_str()).collect();
    states.len()
}

/// Of so many ranks, those that have the same layers as one that has `own` of `all` states: the engine's stages
/// are equally wide, and nearly equally long.
fn in_stage(ranks: u64, own: usize, all: usize) -> u64 {
    let off = |stages: u64| (stages as f64 * own.max(1) as f64 / all.max(1) as f64).ln().abs();
    let stages = (1..=ranks.min(all.max(1) as u64)).filter(|stages| ranks.is_multiple_of(*stages));
    let stages = stages.min_by(|a, b| off(*a).total_cmp(&off(*b)));
    ranks / stages.unwrap_or(1)
}

/// Which of the seats that hold the same this rank reads, by their places, and how much of each compared with the
/// others: at most `count`, as one of so many readers that read all of it, with these shares for all of them
/// together. `None`: one, which is chosen already.
pub(crate) fn choose(
    destination: &Manifest,
    shares: &[f64],
    count: usize,
    readers: u64,
) -> Option<Vec<(usize, f64)>> {
    let places = shares.len();
    if readers.is_multiple_of(places as u64) {
        return None;
    }
    // By its number: those that read the next parts of other states from the next seats read the next seats here.
    let own = stretch(places, readers, destination.rank().into());
    if readers > 1 && own.len() <= count {
        return Some(own);
    }
    let count = count.min(own.len());
    let start = (turn(destination) % places as u64) as usize;
    let start = if count < places { start * count } else { start };
    let next = (0..count).map(|at| (start + at) % places);
    (count > 1).then(|| next.map(|at| (at, shares[at])).collect())
}

/// The places that one of so many readers takes, and how much of each, when all of them together take all places
/// equally: they stand side by side along the places. That is `places + readers - gcd(places, readers)` pairs of
/// a reader and a place, and no other way has fewer.
fn stretch(places: usize, readers: u64, reader: u64) -> Vec<(usize, f64)> {
    // Counted in shares of which a place has one for each reader, and a reader one for each place.
    let places = places as u64;
    let begin = reader % readers * places;
    let end = begin + places;
    let taken = (begin / readers..end.div_ceil(readers)).map(|place| {
        let shares = end.min((place + 1) * readers) - begin.max(place * readers);
        (place as usize, shares as f64 / readers as f64)
    });
    taken.collect()
}

#[cfg(test)]
mod tests {
    use kvferry_layout::arithmetic::gcd;

    use super::*;

    #[test]
    fn all_places_are_taken_equally() {
        for (places, readers) in (1..20).flat_map(|places| (1..20).map(move |it| (places, it))) {
            let (mut taken, mut pairs) = (vec![0.0; places], 0);
            for reader in 0..readers {
                let own = stretch(places, readers, reader);
                let sum: f64 = own.iter().map(|(_, share)| share).sum();
                assert!((sum - places as f64 / readers as f64).abs() < 1e-9);
                pairs += own.len() as u64;
                own.into_iter().for_each(|(place, share)| taken[place] += share);
            }
            assert!(taken.iter().all(|sum| (sum - 1.0).abs() < 1e-9), "{places}, {readers}");
            assert_eq!(pairs, places as u64 + readers - gcd(places as u64, readers));
        }
    }

    /// By brute force: no fewer pairs let all places be taken equally by readers that take equally much. (They do if
    /// any readers together reach as many places as they must fill.)
    #[test]
    fn no_fewer_pairs_will_do() {
        for (places, readers) in [(1, 4), (4, 1), (2, 3), (3, 2), (3, 3), (2, 4), (3, 4), (4, 3)] {
            let possible = |pairs: u32| {
                (1..1u32 << readers).all(|some: u32| {
                    let of = |reader: u32| pairs >> (reader * places) & ((1 << places) - 1);
                    let some_of = (0..readers).filter(|reader| some >> reader & 1 == 1);
                    let reached = some_of.fold(0, |reached, reader| reached | of(reader));
                    some.count_ones() * places <= reached.count_ones() * readers
                })
            };
            let all = (1..1u32 << (places * readers)).filter(|pairs| possible(*pairs));
            let fewest = all.map(u32::count_ones).min().unwrap() as usize;
            let own = |reader| stretch(places as usize, readers.into(), reader).len();
            assert_eq!((0..readers.into()).map(own).sum::<usize>(), fewest, "{places}, {readers}");
        }
    }

    #[test]
    fn stages_are_counted() {
        // 61 layers in stages of 31 and 30, of 8 and 7.
        assert_eq!([in_stage(8, 61, 61), in_stage(16, 31, 61), in_stage(16, 30, 61)], [8, 8, 8]);
        assert_eq!([in_stage(64, 8, 61), in_stage(64, 7, 61)], [8, 8]);
        // A draft that this engine does not have, and nonsense.
        assert_eq!([in_stage(8, 61, 62), in_stage(1, 3, 61), in_stage(7, 0, 0)], [8, 1, 7]);
    }
}
