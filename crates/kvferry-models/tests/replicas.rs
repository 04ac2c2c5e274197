//! Where several ranks of the prefill engine hold the same, all of them are read, and all ranks of the
//! decode engine together load them evenly. Run with `--nocapture` to see the loads.

use std::collections::BTreeMap;

use kvferry_layout::{Manifest, Span, StateBox};
use kvferry_models::rules::vllm;
use kvferry_models::{Topology, presets};
use kvferry_plan::{Plan, Request, Spread, Table};

const MODELS: [&str; 9] = [
    "llama-3.1-70b",
    "kimi-k3",
    "kimi-linear",
    "deepseek-v3",
    "falcon-h1-7b",
    "qwen3-next",
    "nemotron-3-nano",
    "gpt-oss-120b",
    "granite-4.0-h-small",
];

const TOPOLOGIES: [(&str, &str); 16] = [
    ("tp=8", "tp=2"),
    ("tp=4", "tp=2"),
    ("tp=2", "tp=8"),
    ("tp=8", "tp=4"),
    ("tp=4", "tp=4"),
    ("tp=8", "tp=1"),
    ("tp=8", "tp=8"),
    ("tp=4", "tp=8"),
    ("tp=16", "tp=8"),
    ("tp=8", "tp=16"),
    ("tp=4,pp=2", "tp=2"),
    ("tp=8", "tp=2,pp=2"),
    ("tp=4,pp=2", "tp=2,pp=2"),
    ("tp=8", "tp=2,block=64"),
    ("tp=8,layout=BLNHC", "tp=2,layout=BLNHC"),
    ("tp=8,block=64", "tp=4"),
];

/// The decode engine's name, which decides where it starts and must not decide the loads; the tokens;
/// and whether its blocks lie scattered.
const CASES: [(&str, u64, bool); 4] = [
    ("decode", 8_000, true),
    ("d1", 8_000, true),
    ("decode", 131_000, true),
    ("decode", 131_000, false),
];

fn engine(model: &str, topology: &str, name: &str) -> Option<Vec<Manifest>> {
    let model = presets::find(model).unwrap().model().unwrap();
    let topology: Topology = format!("{topology},blocks=40000").parse().unwrap();
    vllm::manifests(&model, &topology, name).ok()
}

/// What a request moves.
struct Moved {
    /// From every source rank.
    from: Vec<u64>,
    copies: u64,
    /// Source ranks that are read, of all destination ranks together.
    reads: usize,
}

/// What all ranks of the destination together read for a request of `tokens`, with blocks that follow
/// each other or do not.
fn moved(
    sources: &[Manifest],
    destination: &[Manifest],
    how: Spread,
    tokens: u64,
    scattered: bool,
) -> Moved {
    let refs: Vec<&Manifest> = sources.iter().collect();
    let (from, to) =
        (tables(&sources[0], tokens, false), tables(&destination[0], tokens, scattered));
    let from: Vec<Table<'_>> = from.iter().map(|table| Table::new(table)).collect();
    let to: Vec<Table<'_>> = to.iter().map(|table| Table::new(table)).collect();
    let cached = vec![0; to.len()];
    let request = Request { tokens, cached: &cached, source: &from, destination: &to };
    let mut moved = Moved { from: vec![0; sources.len()], copies: 0, reads: 0 };
    for rank in destination {
        let plan = Plan::compile_spread(rank, &refs, how).unwrap();
        let transfer = plan.transfer(&request).unwrap();
        for source in 0..sources.len() {
            let summary = transfer.summary(source).unwrap();
            moved.from[source] += summary.bytes;
            moved.copies += summary.copies;
            moved.reads += usize::from(summary.copies > 0);
        }
    }
    moved
}

fn tables(rank: &Manifest, tokens: u64, backwards: bool) -> Vec<Vec<u32>> {
    let mut next = 1u32;
    let tables = rank.groups().iter().map(|group| {
        let count = group.tokens_per_block.map_or(1, |size| tokens.div_ceil(size)) as u32;
        let mut table: Vec<u32> = (next..next + count).collect();
        next += count;
        if backwards {
            table.reverse();
        }
        table
    });
    tables.collect()
}

/// The bytes that must come from each set of source ranks, as bits: each from any rank of its set.
fn demands(sources: &[Manifest], destination: &[Manifest], tokens: u64) -> BTreeMap<u32, u64> {
    let mut held: BTreeMap<&str, Vec<(usize, &StateBox)>> = BTreeMap::new();
    for (rank, source) in sources.iter().enumerate() {
        for piece in source.groups().iter().flat_map(|group| &group.pieces) {
            held.entry(&piece.state).or_default().push((rank, &piece.bounds));
        }
    }
    let mut demands = BTreeMap::new();
    for rank in destination {
        for group in rank.groups() {
            for piece in &group.pieces {
                let kind = rank.kind(piece);
                let first = match kind.law.entries {
                    0 => 0,
                    _ => kind.law.closed(group.window.first_live(tokens)),
                };
                let entries = kind.law.entries(tokens) - first;
                let held = &held[piece.state.as_str()];
                for cell in grid(&piece.bounds, held) {
                    let inside =
                        held.iter().filter(|(_, bounds)| bounds.intersect(&cell).is_some());
                    let set = inside.fold(0, |set, (rank, _)| set | 1 << rank);
                    let bytes = cell.volume() * u64::from(kind.format.bytes) * entries;
                    *demands.entry(set).or_default() += bytes;
                }
            }
        }
    }
    demands
}

/// A box cut wherever a source's box starts or ends.
fn grid(bounds: &StateBox, held: &[(usize, &StateBox)]) -> Vec<StateBox> {
    let mut cells = vec![vec![]];
    for (axis, span) in bounds.0.iter().enumerate() {
        let mut cuts: Vec<u64> = held
            .iter()
            .flat_map(|(_, other)| [other.0[axis].start, other.0[axis].end])
            .filter(|&cut| span.start < cut && cut < span.end)
            .chain([span.start, span.end])
            .collect();
        cuts.sort_unstable();
        cuts.dedup();
        let spans: Vec<Span> = cuts.windows(2).map(|ends| (ends[0]..ends[1]).into()).collect();
        let longer = |cell: Vec<Span>| {
            spans.iter().map(move |span| cell.iter().copied().chain([*span]).collect()).collect()
        };
        cells = cells.into_iter().flat_map::<Vec<Vec<Span>>, _>(longer).collect();
    }
    cells.into_iter().map(StateBox).collect()
}

/// The least that the busiest source must carry, however reads are spread: what only the ranks of some
/// set hold is carried by them. (By max-flow and min-cut, that much is also enough.)
fn least(demands: &BTreeMap<u32, u64>, ranks: usize) -> f64 {
    let sets = 1u32..1 << ranks;
    let carried = |set: u32| {
        let within = demands.iter().filter(|(holders, _)| *holders & !set == 0);
        within.map(|(_, bytes)| *bytes as f64).sum::<f64>() / f64::from(set.count_ones())
    };
    sets.map(carried).fold(0.0, f64::max)
}

#[test]
fn replicas_carry_equal_loads() {
    let (mut pairs, mut replicated, mut problems) = (0, 0, vec![]);
    let (mut few_copies, mut all_copies) = (0, 0);
    // More copies than this must be long.
    let many = |few: u64| few + few / 33;
    println!(
        "busiest source by the mean, copies, pairs of ranks: read from few | spread | the least busiest"
    );
    for model in MODELS {
        for (prefill, decode) in TOPOLOGIES {
            let Some(sources) = engine(model, prefill, "prefill") else { continue };
            for (name, tokens, scattered) in CASES {
                let Some(destination) = engine(model, decode, name) else { continue };
                let how = Spread::among(destination.len() as u32);
                let all = moved(&sources, &destination, how, tokens, scattered);
                let few = Spread { worthwhile: u64::MAX, ..how };
                let few = moved(&sources, &destination, few, tokens, scattered);
                let demands = demands(&sources, &destination, tokens);
                let total: u64 = all.from.iter().sum();
                let pair = format!("{model:20} {prefill:>17} -> {decode:17} {name:6} {tokens:6}");
                assert_eq!(total, few.from.iter().sum::<u64>(), "{pair}");
                assert_eq!(total, demands.values().sum::<u64>(), "{pair}");
                pairs += 1;
                if demands.keys().all(|set| set.is_power_of_two()) {
                    // No choice, nothing to spread.
                    assert_eq!((&all.from, all.copies), (&few.from, few.copies), "{pair}");
                    break;
                }
                replicated += 1;
                let mean = total as f64 / sources.len() as f64;
                let least = least(&demands, sources.len());
                let busiest = |moved: &Moved| *moved.from.iter().max().unwrap() as f64;
                let say = |moved: &Moved| {
                    let Moved { copies, reads, .. } = moved;
                    format!("{:5.2} {copies:7} {reads:3}", busiest(moved) / mean)
                };
                let order = if scattered { "scattered" } else { "in order" };
                let line = format!(
                    "{pair} {order:9}: {} | {} | {:5.2}",
                    say(&few),
                    say(&all),
                    least / mean
                );
                println!("{line}");
                few_copies += few.copies;
                all_copies += all.copies;
                let long = total / all.copies >= 64 << 10;
                if busiest(&all) > 1.1 * least || !(long || all.copies <= many(few.copies)) {
                    problems.push(line);
                }
            }
        }
    }
    println!(
        "{pairs} pairs, {replicated} with replicas; {few_copies} copies from few ranks, {all_copies} spread"
    );
    assert!(problems.is_empty(), "{}", problems.join("\n"));
    assert!(pairs > 350 && replicated > 300, "{pairs} {replicated}");
}
