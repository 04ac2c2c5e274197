//! Which of several ranks that hold the same are read: those that bring it soonest, by what their
//! transports measured when they were connected to.
//!
//! A plan spreads what several ranks hold evenly over them, as if all were equally near. Where one of them is
//! far (on another host, behind a slower link), everybody would wait for its share.

use kvferry_layout::Manifest;
use kvferry_plan::{Plan, Request, Spread, Summary, Table};
use kvferry_transport::Rates;
use tracing::info;

use super::departures::Arrival;

/// A rank that takes so many times as long as another for the same may be far; less may be chance, since
/// rates are measured within milliseconds.
const FAR: f64 = 4.0;
/// Leaving ranks out must make a request take at most so much of the time.
const GAIN: f64 = 0.9;
/// What is compared is a request of so many tokens, or of as many of these as both sides have blocks for.
const TOKENS: [u64; 4] = [8192, 512, 16, 1];

/// What is read of an engine, and from whom: all but the plan by source.
pub(super) struct Readable {
    pub(super) plan: Plan,
    pub(super) manifests: Vec<Manifest>,
    pub(super) ranks: Vec<u32>,
    pub(super) sources: Vec<Option<Arrival>>,
}

impl Readable {
    /// Without ranks that are far, where nearer ones hold the same.
    pub(super) fn without_far_ones(self, own: &Manifest, how: Spread) -> Self {
        let Self { plan, manifests, ranks, sources } = self;
        let rates = sources.iter().map(|one| Some(one.as_ref()?.source()?.rates()));
        let rates: Vec<Option<Rates>> = rates.collect();
        let Some((plan, kept)) = without_far_ones(&plan, own, how, &manifests, &rates) else {
            return Self { plan, manifests, ranks, sources };
        };
        let far: Vec<u32> =
            (0..ranks.len()).filter(|at| !kept.contains(at)).map(|at| ranks[at]).collect();
        info!(?far, "what several ranks hold is read from those that are nearer");
        Self {
            plan,
            manifests: of(&kept, manifests),
            ranks: of(&kept, ranks),
            sources: of(&kept, sources),
        }
    }
}

fn of<T>(kept: &[usize], all: Vec<T>) -> Vec<T> {
    let all = all.into_iter().enumerate();
    all.filter(|(at, _)| kept.contains(at)).map(|(_, one)| one).collect()
}

/// The plan that leaves far ranks out, and those that it keeps, where others hold what they hold and bring
/// it sooner. `None`: the plan is as good as any.
fn without_far_ones(
    plan: &Plan,
    own: &Manifest,
    how: Spread,
    theirs: &[Manifest],
    rates: &[Option<Rates>],
) -> Option<(Plan, Vec<usize>)> {
    let mut read: Vec<(usize, Rates)> =
        rates.iter().enumerate().filter_map(|(at, rates)| Some((at, (*rates)?))).collect();
    let dear = |rates: &Rates| takes(rates, 1, 1 << 20);
    read.sort_by(|(_, a), (_, b)| dear(a).total_cmp(&dear(b)));
    let far = FAR * dear(&read.first()?.1);
    if dear(&read.last()?.1) < far {
        return None;
    }
    let compile = |kept: &[usize]| {
        let kept: Vec<&Manifest> = kept.iter().map(|at| &theirs[*at]).collect();
        Plan::compile_spread(own, &kept, how)
    };
    let all: Vec<usize> = read.iter().map(|(at, _)| *at).collect();
    // Nobody else holds what these hold.
    let needed = |at: usize| {
        let others: Vec<usize> = all.iter().copied().filter(|other| *other != at).collect();
        compile(&others).is_err()
    };
    let needed: Vec<bool> =
        read.iter().map(|(at, rates)| dear(rates) < far || needed(*at)).collect();

    let time = |plan: &Plan, kept: &[usize]| {
        let rates = kept.iter().map(|at| read.iter().find(|(read, _)| read == at).map(|(_, r)| r));
        let work = work(plan, own, theirs.first()?)?;
        let read = work.iter().zip(rates).filter(|(it, _)| it.copies > 0);
        let times = read.map(|(it, rates)| Some(takes(rates?, it.copies, it.bytes)));
        times.collect::<Option<Vec<f64>>>()?.into_iter().reduce(f64::max)
    };
    let now = time(plan, &(0..theirs.len()).collect::<Vec<_>>())?;
    let mut best: Option<(f64, Plan, Vec<usize>)> = None;
    for count in 1..read.len() {
        let kept = read.iter().zip(&needed).enumerate();
        let kept = kept.filter(|(at, (_, needed))| *at < count || **needed);
        let mut kept: Vec<usize> = kept.map(|(_, ((at, _), _))| *at).collect();
        kept.sort_unstable();
        let Ok(plan) = compile(&kept) else { continue };
        let Some(time) = time(&plan, &kept) else { continue };
        if best.as_ref().is_none_or(|(least, ..)| time < *least) {
            best = Some((time, plan, kept));
        }
    }
    best.filter(|(time, ..)| *time <= GAIN * now).map(|(_, plan, kept)| (plan, kept))
}

/// Nanoseconds, in the cheapest way.
fn takes(Rates { direct, packed }: &Rates, copies: u64, bytes: u64) -> f64 {
    let direct = direct.of(copies, bytes);
    packed.map_or(direct, |packed| packed.of(copies, bytes).min(direct))
}

/// What a request of the usual length reads from each source.
fn work(plan: &Plan, own: &Manifest, theirs: &Manifest) -> Option<Vec<Summary>> {
    TOKENS.iter().find_map(|tokens| {
        let (from, to) = (tables(theirs, *tokens), tables(own, *tokens));
        let from: Vec<Table<'_>> = from.iter().map(|table| Table::new(table)).collect();
        let to: Vec<Table<'_>> = to.iter().map(|table| Table::new(table)).collect();
        let cached = vec![0; to.len()];
        let request = Request { tokens: *tokens, cached: &cached, source: &from, destination: &to };
        let transfer = plan.transfer(&request).ok()?;
        Some((0..plan.source_count()).map(|source| transfer.summary(source)).collect())
    })
}

/// Some blocks of every group; never the first, which may stand for none.
fn tables(side: &Manifest, tokens: u64) -> Vec<Vec<u32>> {
    let mut next = 1;
    let tables = side.groups().iter().map(|group| {
        let count = group.tokens_per_block.map_or(1, |size| tokens.div_ceil(size)) as u32;
        let table = (next..next + count).collect();
        next += count;
        table
    });
    tables.collect()
}

#[cfg(test)]
mod tests {
    use kvferry_layout::{
        Axis, Draft, Format, Group, Kind, Law, Phase, Piece, Region, StateBox, View, Window,
    };
    use kvferry_transport::Price;

    use super::*;

    const HEADS: u64 = 8;
    const DIM: u64 = 128;

    /// A rank that holds these heads.
    fn rank(number: u32, heads: std::ops::Range<u64>) -> Manifest {
        let (size, blocks) = (16, 640);
        let entry = (heads.end - heads.start) * DIM;
        let piece = Piece {
            state: "layers.0/kv".to_owned(),
            kind: 0,
            bounds: StateBox::new([heads, 0..DIM]),
            phase: Phase::ALL,
            need: None,
            view: View {
                region: 0,
                offset: 0,
                block: size * entry,
                kernel: None,
                entry,
                axes: vec![DIM, 1],
            },
        };
        let group = Group {
            name: "attention".to_owned(),
            blocks,
            null_block: None,
            tokens_per_block: Some(size),
            window: Window::FULL,
            pieces: vec![piece],
            scratch: vec![],
        };
        let kind = Kind {
            format: Format::new("u8", 1),
            axes: vec![Axis::new("head", HEADS), Axis::new("dim", DIM)],
            law: Law::PER_TOKEN,
        };
        let draft = Draft {
            identity: [("model".to_owned(), "tiny".to_owned())].into(),
            engine: "e".to_owned(),
            rank: number,
            label: format!("tp{number}"),
            regions: vec![Region::host(1 << 30, u64::from(blocks) * size * entry)],
            kinds: vec![kind],
            groups: vec![group],
        };
        Manifest::new(draft).unwrap()
    }

    fn chosen(theirs: &[Manifest], prices: &[f64]) -> Option<Vec<usize>> {
        let direct = |byte: &f64| Price { launch: 0.0, copy: 0.0, byte: *byte };
        let rates = prices.iter().map(|byte| Some(Rates { direct: direct(byte), packed: None }));
        let rates: Vec<_> = rates.collect();
        let (own, how) = (rank(0, 0..HEADS), Spread::default());
        let plan = Plan::compile(&own, &theirs.iter().collect::<Vec<_>>()).unwrap();
        let (plan, kept) = without_far_ones(&plan, &own, how, theirs, &rates)?;
        assert_eq!(plan.source_count(), kept.len());
        Some(kept)
    }

    /// How long a request takes from these alone; `None` where they do not hold all of it.
    fn time(theirs: &[Manifest], prices: &[f64], kept: &[usize]) -> Option<f64> {
        let own = rank(0, 0..HEADS);
        let manifests: Vec<&Manifest> = kept.iter().map(|at| &theirs[*at]).collect();
        let plan = Plan::compile(&own, &manifests).ok()?;
        let work = work(&plan, &own, manifests[0]).unwrap();
        let times = work.iter().zip(kept).map(|(work, at)| work.bytes as f64 * prices[*at]);
        times.reduce(f64::max)
    }

    /// Every choice that leaves far ones out, by brute force: none is faster, and none that is is passed over.
    #[test]
    fn the_fastest_of_equal_ones_are_read() {
        let theirs: Vec<Manifest> = (0..4).map(|number| rank(number, 0..HEADS)).collect();
        let all: Vec<usize> = (0..4).collect();
        let mut left_out = 0;
        for code in 0..4u32.pow(4) {
            let prices: Vec<f64> =
                (0..4).map(|at| [1.0, 1.5, 5.0, 40.0][(code >> (2 * at)) as usize & 3]).collect();
            let far = FAR * prices.iter().copied().fold(f64::INFINITY, f64::min);
            let subsets = (1..16usize).map(|bits| {
                let kept =
                    all.iter().copied().filter(|at| bits >> at & 1 == 1 || prices[*at] < far);
                kept.collect::<Vec<_>>()
            });
            let best = subsets.filter_map(|kept| time(&theirs, &prices, &kept));
            let best = best.reduce(f64::min).unwrap();
            let now = time(&theirs, &prices, &all).unwrap();
            match chosen(&theirs, &prices) {
                Some(kept) => {
                    left_out += 1;
                    assert!(time(&theirs, &prices, &kept).unwrap() <= best * 1.001, "{prices:?}");
                    assert!(best <= GAIN * now);
                }
                None => {
                    let near = prices.iter().all(|price| *price < far);
                    assert!(near || best > GAIN * now, "{prices:?}: {best} of {now}");
                }
            }
        }
        assert!(left_out > 100, "{left_out}");
    }

    #[test]
    fn what_only_a_far_one_holds_is_read_from_it() {
        let theirs = [rank(0, 0..4), rank(1, 4..8), rank(2, 0..4)];
        assert_eq!(chosen(&theirs, &[1.0, 50.0, 1.0]), None);
        // Everybody waits for the one that is needed: whether another one is far does not matter.
        assert_eq!(chosen(&theirs, &[1.0, 50.0, 50.0]), None);
        assert_eq!(chosen(&theirs, &[1.0, 1.0, 50.0]), Some(vec![0, 1]));
        let theirs = [rank(0, 0..4), rank(1, 0..4), rank(2, 4..8), rank(3, 4..8)];
        assert_eq!(chosen(&theirs, &[1.0, 50.0, 60.0, 1.0]), Some(vec![0, 3]));
    }

    #[test]
    fn what_may_be_chance_changes_nothing() {
        let theirs: Vec<Manifest> = (0..3).map(|number| rank(number, 0..HEADS)).collect();
        assert_eq!(chosen(&theirs, &[1.0, 3.0, 2.0]), None);
        // Nothing is read from them, so that nobody knows.
        let none = [None, None, None];
        let plan = Plan::compile(&theirs[0], &theirs.iter().collect::<Vec<_>>()).unwrap();
        let how = Spread::default();
        assert!(without_far_ones(&plan, &theirs[0], how, &theirs, &none).is_none());
    }
}
