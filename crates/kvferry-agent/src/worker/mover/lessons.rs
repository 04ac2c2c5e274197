//! What reads tell about the rates of their sources while others are under way.
//!
//! Who shares a link takes longer than alone, and never less. So a read that took less than was expected tells so, in
//! whatever company. One that took longer tells nothing by itself: others may have been in its way. But if all that
//! were under way together kept the links busy for longer than they should have taken one after the other, then some
//! of them are dearer than was thought. Nothing tells which: they are taken to be alike, so that those are raised
//! whose prices were raised least before, all to one level. For a read that is alone that is all there is to know; for
//! others it is what is certain: where prices are right, company never changes them.

use std::sync::Weak;
use std::time::{Duration, Instant};

use kvferry_plan::cost::Way;

use crate::carrier::Source;

/// Of so many reads that follow each other without a pause, none is held against the others any more.
const MOST: usize = 1024;

/// Who can be taught: in a worker one source, and one way to read it.
pub(super) trait Pupil: PartialEq {
    /// What so many copies and bytes should take by what it knows now, in nanoseconds.
    fn expects(&self, copies: u64, bytes: u64) -> Option<f64>;

    /// How many times as much that is as was measured before the first read.
    fn factor(&self) -> f64;

    /// That it expected so many nanoseconds, and they were others.
    fn learn(&self, expected: f64, took: f64);
}

/// A read under way.
#[derive(Debug)]
pub(super) struct Lesson<P> {
    pub(super) pupil: P,
    pub(super) copies: u64,
    pub(super) bytes: u64,
    pub(super) began: Instant,
}

/// The reads since nothing was under way.
#[derive(Debug)]
pub(super) struct Lessons<P> {
    begun: usize,
    ended: Vec<(Lesson<P>, Duration)>,
}

impl<P> Default for Lessons<P> {
    fn default() -> Self {
        Self { begun: 0, ended: vec![] }
    }
}

impl<P: Pupil> Lessons<P> {
    /// A read begins.
    pub(super) fn begin(&mut self) {
        self.begun += 1;
    }

    /// A read has ended well. One that has not teaches nothing.
    pub(super) fn end(&mut self, lesson: Lesson<P>, took: Duration) {
        // By what is known now: another may have told the same meanwhile.
        if let Some(expected) = lesson.pupil.expects(lesson.copies, lesson.bytes)
            && nanoseconds(took) < expected
        {
            lesson.pupil.learn(expected, nanoseconds(took));
        }
        if self.ended.len() == MOST {
            self.ended.clear();
        }
        self.ended.push((lesson, took));
    }

    /// Nothing is under way any more.
    pub(super) fn conclude(&mut self) {
        let Self { begun, ended } = std::mem::take(self);
        if begun != ended.len() {
            // Nobody knows what the others took of the links.
            return;
        }
        let measured = ended.iter().map(|(Lesson { pupil, copies, bytes, .. }, _)| {
            pupil
                .expects(*copies, *bytes)
                .map(|expected| (pupil.factor(), expected / pupil.factor()))
        });
        let Some(measured) = measured.collect::<Option<Vec<_>>>() else { return };
        let level = level(&measured, nanoseconds(busy(&ended)));
        // Each once, however many reads there were: all of them say the same.
        let mut taught: Vec<P> = vec![];
        for ((lesson, took), (factor, measured)) in ended.into_iter().zip(measured) {
            let took = nanoseconds(took).min(level * measured);
            if took > factor * measured && !taught.contains(&lesson.pupil) {
                lesson.pupil.learn(factor * measured, took);
                taught.push(lesson.pupil);
            }
        }
    }
}

/// The least factor to which all lower ones must be raised so that the sum of what was measured, each by its factor,
/// is no less than `busy`. Zero where it is no less as they are.
fn level(measured: &[(f64, f64)], busy: f64) -> f64 {
    let mut measured = measured.to_vec();
    measured.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let mut others: f64 = measured.iter().map(|(factor, one)| factor * one).sum();
    let (mut raised, mut level) = (0.0, 0.0);
    if others >= busy {
        return level;
    }
    // As few of the lowest as it takes, so that they stay below the others.
    for (at, (factor, one)) in measured.iter().enumerate() {
        raised += one;
        others -= factor * one;
        level = (busy - others) / raised;
        if measured.get(at + 1).is_none_or(|(next, _)| level <= *next) {
            break;
        }
    }
    level
}

/// How long at least one of them was under way.
fn busy<P>(ended: &[(Lesson<P>, Duration)]) -> Duration {
    let mut spans: Vec<(Instant, Instant)> =
        ended.iter().map(|(lesson, took)| (lesson.began, lesson.began + *took)).collect();
    spans.sort_unstable();
    let (mut busy, mut until) = (Duration::ZERO, None);
    for (began, ended) in spans {
        let began = until.map_or(began, |until| began.max(until));
        busy += ended.saturating_duration_since(began);
        until = Some(until.map_or(ended, |until| ended.max(until)));
    }
    busy
}

fn nanoseconds(time: Duration) -> f64 {
    time.as_nanos() as f64
}

/// One source of some, and one way to read it.
#[derive(Clone, Debug)]
pub(super) struct Taught {
    /// Nobody is kept for the sake of what is learnt about it.
    pub(super) sources: Weak<Vec<Option<Box<dyn Source>>>>,
    pub(super) source: usize,
    pub(super) way: Way,
}

impl PartialEq for Taught {
    fn eq(&self, other: &Self) -> bool {
        self.sources.ptr_eq(&other.sources) && (self.source, self.way) == (other.source, other.way)
    }
}

impl Taught {
    fn source<T>(&self, then: impl FnOnce(&dyn Source) -> T) -> Option<T> {
        let sources = self.sources.upgrade()?;
        sources.get(self.source)?.as_ref().map(|source| then(source.as_ref()))
    }
}

impl Pupil for Taught {
    fn expects(&self, copies: u64, bytes: u64) -> Option<f64> {
        let rates = self.source(|source| source.rates())?;
        let price = if self.way == Way::Packed { rates.packed? } else { rates.direct };
        Some(price.of(copies, bytes))
    }

    fn factor(&self) -> f64 {
        self.source(|source| source.learned(self.way)).unwrap_or(1.0)
    }

    fn learn(&self, expected: f64, took: f64) {
        self.source(|source| source.learn(self.way, expected, took));
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use kvferry_transport::{Price, Rates};
    use proptest::prelude::*;

    use super::*;
    use crate::learned::Learned;

    const RATES: Rates = Rates {
        direct: Price { launch: 20e3, copy: 600.0, byte: 0.5 },
        packed: Some(Price { launch: 30e3, copy: 20.0, byte: 1.0 }),
    };

    /// What is known of some sources.
    struct World {
        began: Instant,
        known: RefCell<Vec<Learned>>,
    }

    #[derive(Clone)]
    struct One<'w>(&'w World, usize, Way);

    impl PartialEq for One<'_> {
        fn eq(&self, other: &Self) -> bool {
            (self.1, self.2) == (other.1, other.2)
        }
    }

    fn of(rates: &Rates, way: Way) -> Price {
        if way == Way::Packed { rates.packed.unwrap() } else { rates.direct }
    }

    impl Pupil for One<'_> {
        fn expects(&self, copies: u64, bytes: u64) -> Option<f64> {
            Some(of(&self.0.known.borrow()[self.1].apply(RATES), self.2).of(copies, bytes))
        }

        fn factor(&self) -> f64 {
            self.0.known.borrow()[self.1].factor(self.2)
        }

        fn learn(&self, expected: f64, took: f64) {
            self.0.known.borrow_mut()[self.1].learn(self.2, expected, took);
        }
    }

    impl World {
        fn new(sources: usize) -> Self {
            Self { began: Instant::now(), known: RefCell::new(vec![Learned::default(); sources]) }
        }

        /// How many times as much as was measured a way is thought to take.
        fn factor(&self, source: usize, way: Way) -> f64 {
            let known = self.known.borrow()[source].apply(RATES);
            of(&known, way).byte / of(&RATES, way).byte
        }
    }

    /// Source, way, copies, bytes, and when it begins, in nanoseconds.
    type Read = (usize, Way, u64, u64, u64);

    /// How links are shared.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Links {
        /// All reads on one, one after the other.
        OneInTurn,
        /// All on one, each as fast as the others.
        OneAlike,
        /// Each has its own.
        Many,
    }

    /// When each read ends that needs so much of a link to itself, by brute force: in small steps.
    fn ends(links: Links, reads: &[(f64, f64)]) -> Vec<f64> {
        let mut left: Vec<f64> = reads.iter().map(|(_, needs)| *needs).collect();
        let mut ends = vec![0.0; reads.len()];
        let mut now = 0.0;
        while left.iter().any(|left| *left > 0.0) {
            let here: Vec<usize> =
                (0..reads.len()).filter(|&at| left[at] > 0.0 && reads[at].0 <= now).collect();
            let served: Vec<usize> = match links {
                Links::OneInTurn => here.iter().copied().take(1).collect(),
                _ => here,
            };
            let speed =
                if links == Links::OneAlike { 1.0 / served.len().max(1) as f64 } else { 1.0 };
            let next = reads.iter().map(|(began, _)| *began).filter(|began| *began > now);
            let next = next.chain(served.iter().map(|&at| now + left[at] / speed));
            let step = next.fold(f64::INFINITY, f64::min) - now;
            now += step;
            for at in served {
                left[at] -= step * speed;
                if left[at] < 1e-3 {
                    (left[at], ends[at]) = (0.0, now);
                }
            }
        }
        ends
    }

    /// Reads that are under way together, where everything takes `truth` times what was measured.
    fn carry_out(world: &World, links: Links, reads: &[Read], truth: f64) {
        let needs = |&(_, way, copies, bytes, began): &Read| {
            (began as f64, truth * of(&RATES, way).of(copies, bytes))
        };
        let ends = ends(links, &reads.iter().map(needs).collect::<Vec<_>>());
        let mut lessons = Lessons::default();
        let mut under_way = vec![];
        for (&(source, way, copies, bytes, began), end) in reads.iter().zip(ends) {
            let took = Duration::from_nanos((end - began as f64).round() as u64);
            let began = world.began + Duration::from_nanos(began);
            let lesson = Lesson { pupil: One(world, source, way), copies, bytes, began };
            lessons.begin();
            under_way.push((began + took, lesson, took));
        }
        under_way.sort_by_key(|(end, ..)| *end);
        under_way.into_iter().for_each(|(_, lesson, took)| lessons.end(lesson, took));
        lessons.conclude();
    }

    const SOURCES: usize = 3;

    fn reads() -> impl Strategy<Value = Vec<Read>> {
        let way = prop_oneof![Just(Way::Direct), Just(Way::Packed)];
        let read = (0..SOURCES, way, 1..2000u64, 1..5_000_000u64, 0..3_000_000u64);
        prop::collection::vec(read, 1..8)
    }

    fn links() -> impl Strategy<Value = Links> {
        prop_oneof![Just(Links::OneInTurn), Just(Links::OneAlike), Just(Links::Many)]
    }

    proptest! {
        /// However reads share links, and whatever is known of which: nothing is led away from the truth, nor
        /// beyond it.
        #[test]
        fn company_does_not_lead_away_from_the_truth(
            rounds in prop::collection::vec((links(), reads()), 1..12),
            truth in -2.0..2.0f64,
        ) {
            let truth = truth.exp2();
            let world = World::new(SOURCES);
            for (links, reads) in rounds {
                let before: Vec<f64> = factors(&world);
                carry_out(&world, links, &reads, truth);
                for (before, after) in before.into_iter().zip(factors(&world)) {
                    let (low, high) = (before.min(truth), before.max(truth));
                    let close = 1.0 - 1e-3..1.0 + 1e-3;
                    prop_assert!(
                        (low..=high).contains(&after) || close.contains(&(after / after.clamp(low, high))),
                        "{before} became {after}, the truth is {truth}"
                    );
                }
            }
        }

        /// Those that share one link are known in the end, without ever being alone.
        #[test]
        fn who_shares_a_link_is_known_in_the_end(
            truth in -2.0..2.0f64,
            way in prop_oneof![Just(Way::Direct), Just(Way::Packed)],
            sizes in prop::collection::vec((1..2000u64, 1..5_000_000u64), SOURCES),
        ) {
            let truth = truth.exp2();
            let world = World::new(SOURCES);
            for round in 0..200 {
                // Another is the first each time.
                let reads: Vec<Read> = (0..SOURCES)
                    .map(|at| (at + round) % SOURCES)
                    .map(|at| (at, way, sizes[at].0, sizes[at].1, 0))
                    .collect();
                carry_out(&world, Links::OneInTurn, &reads, truth);
            }
            for source in 0..SOURCES {
                let factor = world.factor(source, way);
                prop_assert!((factor / truth - 1.0).abs() < 0.02, "{factor}, not {truth}");
            }
        }
    }

    fn factors(world: &World) -> Vec<f64> {
        let sources = (0..SOURCES).flat_map(|at| [(at, Way::Direct), (at, Way::Packed)]);
        sources.map(|(source, way)| world.factor(source, way)).collect()
    }

    proptest! {
        /// By brute force: no lower level is enough, and this one is.
        #[test]
        fn a_level_is_enough_and_no_more(
            measured in prop::collection::vec((0.1..8.0f64, 1.0..1e6f64), 1..6),
            busy in 1.0..1e7f64,
        ) {
            let sum = |level: f64| {
                measured.iter().map(|(factor, one)| factor.max(level) * one).sum::<f64>()
            };
            let level = level(&measured, busy);
            if sum(0.0) >= busy {
                prop_assert_eq!(level, 0.0);
            } else {
                prop_assert!((sum(level) / busy - 1.0).abs() < 1e-9, "{level}");
                prop_assert!(sum(level * 0.999) < busy);
            }
        }
    }

    /// Two that are merely in each other's way are as dear as before, and one that is alone tells all.
    #[test]
    fn company_is_no_fault() {
        let world = World::new(SOURCES);
        let both = [(0, Way::Direct, 100, 1 << 20, 0), (1, Way::Packed, 100, 1 << 20, 0)];
        carry_out(&world, Links::OneAlike, &both, 1.0);
        assert!(
            factors(&world).iter().all(|factor| (factor - 1.0).abs() < 1e-3),
            "{:?}",
            factors(&world)
        );
        for _ in 0..40 {
            carry_out(&world, Links::Many, &both[..1], 3.0);
        }
        assert!((world.factor(0, Way::Direct) / 3.0 - 1.0).abs() < 0.01);
        assert_eq!(world.factor(1, Way::Packed), 1.0);
    }

    /// Many that tell the same at once are believed once.
    #[test]
    fn a_crowd_is_one_voice() {
        for (truth, sure) in [(4.0, 4.0f64.powf(0.25)), (0.25, 0.25)] {
            let world = World::new(SOURCES);
            let reads = [(0, Way::Direct, 100, 1 << 20, 0); 60];
            carry_out(&world, Links::OneInTurn, &reads, truth);
            let factor = world.factor(0, Way::Direct);
            let (low, high) = (f64::min(sure, 1.0), f64::max(sure, 1.0));
            assert!((low * 0.999..=high * 1.001).contains(&factor), "{factor}");
        }
    }

    #[test]
    fn what_never_pauses_is_forgotten_in_time() {
        let world = World::new(SOURCES);
        carry_out(&world, Links::OneInTurn, &[(0, Way::Direct, 1, 1, 0); MOST + 1], 4.0);
        assert_eq!(world.factor(0, Way::Direct), 1.0);
    }
}
