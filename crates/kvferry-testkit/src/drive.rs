//! Runs plans and hands what they say to the judge.

use std::fmt;

use kvferry_layout::{CutLimits, Cutting, Loops, Manifest};
use kvferry_plan::{ByteCopy, Incompatible, Plan, Request, RequestError, Spread, Summary, Table};

use crate::draw::{Side, engine};
use crate::engine::Engine;
use crate::judge::{Leftover, Move, Said, Sources, Tally, compatible};
use crate::model::Model;
use crate::random::Dice;
use crate::request::{OwnedRequest, OwnedTable, Shape, draw, with_room};

/// More copies than any request that is judged needs.
const TOO_MANY: usize = 10_000_000;

/// Compiles the plan of a destination rank against some ranks of the source.
pub fn compile(
    source: &Engine,
    sources: &[usize],
    destination: &Engine,
    rank: usize,
) -> Result<Plan, Incompatible> {
    let manifests: Vec<&Manifest> =
        sources.iter().map(|&source_rank| &source.ranks[source_rank].manifest).collect();
    Plan::compile(&destination.ranks[rank].manifest, &manifests)
}

/// The same where what several ranks hold is spread over all of them, however little it is. (What is
/// drawn here is too small for a plan to spread it by itself.)
pub fn compile_spread(
    source: &Engine,
    sources: &[usize],
    destination: &Engine,
    rank: usize,
) -> Result<Plan, Incompatible> {
    let ranks = destination.ranks.len() as u32;
    compile_among(ranks, source, sources, destination, rank)
}

/// The same where every rank believes something else, and wrong, about how many they are.
pub fn compile_misled(
    source: &Engine,
    sources: &[usize],
    destination: &Engine,
    rank: usize,
) -> Result<Plan, Incompatible> {
    let ranks = 3 * destination.ranks.len() + rank;
    compile_among(ranks as u32, source, sources, destination, rank)
}

fn compile_among(
    ranks: u32,
    source: &Engine,
    sources: &[usize],
    destination: &Engine,
    rank: usize,
) -> Result<Plan, Incompatible> {
    let manifests: Vec<&Manifest> =
        sources.iter().map(|&source_rank| &source.ranks[source_rank].manifest).collect();
    let how = Spread { worthwhile: 1, ranks: Some(ranks) };
    Plan::compile_spread(&destination.ranks[rank].manifest, &manifests, how)
}

/// Everything that a plan says about a request. Panics where it contradicts itself: where the
/// summary says other numbers than the loops, or packing yields other bytes.
pub fn ask(plan: &Plan, sources: usize, request: &OwnedRequest) -> Result<Said, RequestError> {
    let (source_tables, destination_tables) =
        (tables(&request.source), tables(&request.destination));
    let request = Request {
        tokens: request.tokens,
        cached: &request.cached,
        source: &source_tables,
        destination: &destination_tables,
    };
    let transfer = plan.transfer(&request)?;
    let mut said = Said::default();
    for source in 0..sources {
        let loops = transfer.loops(source).unwrap();
        let copies: Vec<ByteCopy> = loops.copies().take(TOO_MANY).collect();
        assert!(copies.len() < TOO_MANY, "the copies have no end");
        let lengths = copies.iter().map(|copy| copy.bytes);
        let summary = Summary {
            bytes: lengths.clone().sum(),
            copies: copies.len() as u64,
            shortest: lengths.clone().min().unwrap_or(0),
            longest: lengths.max().unwrap_or(0),
        };
        assert_eq!(transfer.summary(source), Ok(summary), "the summary is not what is yielded");
        assert!(packed(&loops) == joined(copies.clone()), "packing moves other bytes");
        let moves = copies.iter().map(|&ByteCopy { source, destination, bytes }| Move {
            source,
            destination,
            bytes,
        });
        said.copies.push(moves.collect());
    }
    let nowhere = transfer.loops(sources).unwrap();
    assert!(nowhere.is_empty(), "something is read from a source that is not there");
    let rest = transfer.rest().unwrap().into_iter();
    said.rest = rest.map(|area| Leftover { address: area.address, bytes: area.bytes }).collect();
    Ok(said)
}

/// What packing moves: in small parts, gathered into a buffer and scattered from there.
fn packed(loops: &Loops) -> Vec<ByteCopy> {
    const BUFFER: u64 = 1 << 40;
    let limits = CutLimits { bytes: 200, nests: 5, pairs: 7 };
    let mut cutting = Cutting::default();
    let mut moved = vec![];
    while let Some(part) = cutting.next(loops, &limits) {
        let sound = "a part of what a plan reads has two sound halves";
        let (gather, scatter) =
            (part.gather(BUFFER).expect(sound), part.scatter(BUFFER).expect(sound));
        // Byte by byte: which byte of the source each one of the buffer is.
        let bytes = part.packed_bytes().expect("a small part");
        let mut buffer = vec![None; bytes as usize];
        for copy in gather.copies() {
            for at in 0..copy.bytes {
                let place = &mut buffer[(copy.destination - BUFFER + at) as usize];
                assert_eq!(place.replace(copy.source + at), None, "a byte is gathered twice");
            }
        }
        for copy in scatter.copies() {
            for at in 0..copy.bytes {
                let source = buffer[(copy.source - BUFFER + at) as usize];
                let source = source.expect("what is scattered was gathered");
                moved.push(ByteCopy { source, destination: copy.destination + at, bytes: 1 });
            }
        }
    }
    joined(moved)
}

/// The same bytes as as few copies as can be, in the order of the destination's addresses.
fn joined(mut copies: Vec<ByteCopy>) -> Vec<ByteCopy> {
    copies.sort_unstable_by_key(|copy| copy.destination);
    copies.dedup_by(|next, copy| {
        let end = (copy.source + copy.bytes, copy.destination + copy.bytes);
        let touches = end == (next.source, next.destination);
        copy.bytes += if touches { next.bytes } else { 0 };
        touches
    });
    copies
}

/// Tables as a plan takes them.
pub(crate) fn tables(owned: &[OwnedTable]) -> Vec<Table<'_>> {
    owned.iter().map(|table| Table { first: table.first, blocks: &table.blocks }).collect()
}

/// What came of a drawn pair.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    /// Destination ranks whose plan compiled.
    pub fitting: u64,
    /// Destination ranks that were refused, as they should be.
    pub refused: u64,
    /// Destination ranks that get less of a piece than its group keeps.
    pub windowed: u64,
    /// Transfers judged.
    pub transfers: u64,
    /// What they moved, in all.
    pub tally: Tally,
}

/// A pair of engines drawn from a seed.
#[derive(Clone, Debug)]
pub struct Drawn {
    /// The seed.
    pub seed: u64,
    /// The engine that is read.
    pub source: Engine,
    /// The ranks that are read, in the order of their manifests.
    pub sources: Vec<usize>,
    /// The engine that is filled.
    pub destination: Engine,
    dice: Dice,
}

impl Drawn {
    /// The pair of a seed.
    pub fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let model = Model::draw(&mut dice);
        // Sides that look almost alike have long runs; independent ones have many short ones.
        let mut alike = dice.chance(30).then(|| dice.clone());
        let source = engine(&model, Side::Source, &mut dice);
        let destination = engine(&model, Side::Destination, alike.as_mut().unwrap_or(&mut dice));
        let mut sources: Vec<usize> = (0..source.ranks.len()).collect();
        // Manifests come in any order, and not always all of them.
        if dice.chance(30) {
            dice.shuffle(&mut sources);
        }
        if dice.chance(10) {
            sources.truncate(1 + dice.index(sources.len()));
        }
        Self { seed, source, sources, destination, dice }
    }

    /// Judges it with `requests` random requests on every destination rank.
    pub fn judge(&self, requests: u64) -> Result<Outcome, String> {
        let dice = &mut self.dice.clone();
        // Every other pair is read from few ranks, every other from as many as hold anything.
        let compile = match self.seed % 4 {
            1 => compile_spread,
            3 => compile_misled,
            _ => compile,
        };
        judge_pair((&self.source, &self.sources), &self.destination, compile, requests, dice)
            .map_err(|problem| format!("seed {}: {problem}", self.seed))
    }
}

impl fmt::Display for Drawn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seed {}, reading from {:?}", self.seed, self.sources)?;
        write!(f, "{}{}", self.source, self.destination)
    }
}

/// [`compile`], [`compile_spread`] or [`compile_misled`].
pub type Compile = fn(&Engine, &[usize], &Engine, usize) -> Result<Plan, Incompatible>;

/// Judges a pair with `requests` random requests on every destination rank, reading from `sources`.
/// The error says what went wrong.
fn judge_pair(
    (source, sources): (&Engine, &[usize]),
    destination: &Engine,
    compile: Compile,
    requests: u64,
    dice: &mut Dice,
) -> Result<Outcome, String> {
    let mut outcome = Outcome::default();
    let mut plans = vec![];
    for rank in 0..destination.ranks.len() {
        let fits = compatible(source, sources, destination, rank);
        match (compile(source, sources, destination, rank), fits) {
            (Ok(plan), Ok(())) => plans.push((rank, plan)),
            (Err(_), Err(_)) => outcome.refused += 1,
            (Ok(_), Err(reason)) => {
                return Err(format!("rank {rank} should be refused: {reason}"));
            }
            (Err(refusal), Ok(())) => {
                return Err(format!("rank {rank} should not be refused: {refusal}"));
            }
        }
    }
    outcome.fitting = plans.len() as u64;
    outcome.windowed = plans.iter().filter(|(_, plan)| !plan.windowed().is_empty()).count() as u64;
    if plans.is_empty() {
        return Ok(outcome);
    }
    for _ in 0..requests {
        let shape = if dice.chance(40) { Shape::Ascending } else { Shape::Scattered };
        let request = draw(source, destination, 60, shape, dice);
        let filled = Sources::fill(source, &request);
        for (rank, plan) in &plans {
            let tally = judge_one(&filled, sources, destination, *rank, plan, &request)?;
            outcome.transfers += 1;
            outcome.tally.bytes += tally.bytes;
            outcome.tally.copies += tally.copies;
            outcome.tally.fewest += tally.fewest;
            outcome.tally.sources += tally.sources;
        }
    }
    Ok(outcome)
}

fn judge_one(
    filled: &Sources<'_>,
    sources: &[usize],
    destination: &Engine,
    rank: usize,
    plan: &Plan,
    request: &OwnedRequest,
) -> Result<Tally, String> {
    let context = |problem: String| format!("rank {rank}: {problem}\n{request:?}");
    let said = ask(plan, sources.len(), request)
        .map_err(|error| context(format!("a good request was refused: {error}")))?;
    for (list, copies) in said.copies.iter().enumerate() {
        if !plan.reads(list) && !copies.is_empty() {
            return Err(context(format!("source {list} is read, but the plan says it is not")));
        }
    }
    filled.judge(sources, destination, rank, &said).map_err(context)
}

/// Judges a pair that was written by hand: every destination rank must be served from all sources,
/// for each number of tokens, with blocks in order and scattered, with nothing, part of it and all of
/// it cached. Returns the tally of every rank for the first number of tokens with ascending blocks and
/// nothing cached. Panics at anything wrong.
pub fn prove(source: &Engine, destination: &Engine, lengths: &[u64]) -> Vec<Tally> {
    let prover = Prover::new(source, destination);
    let groups = destination.recipe.groups.len();
    let mut first = None;
    for &tokens in lengths {
        let tallies = prover.prove(tokens, &vec![0; groups], Shape::Ascending);
        first.get_or_insert(tallies);
        prover.prove(tokens, &vec![0; groups], Shape::Scattered);
        prover.prove(tokens, &vec![tokens / 2; groups], Shape::Scattered);
        let held = prover.prove(tokens, &vec![tokens; groups], Shape::Scattered);
        assert!(held.iter().all(|tally| *tally == Tally::default()), "what is held is moved");
    }
    first.expect("at least one length")
}

/// The same for one number of tokens and what each destination group holds of them, with ascending
/// blocks.
pub fn prove_cached(
    source: &Engine,
    destination: &Engine,
    tokens: u64,
    cached: &[u64],
) -> Vec<Tally> {
    Prover::new(source, destination).prove(tokens, cached, Shape::Ascending)
}

struct Prover<'a> {
    source: &'a Engine,
    destination: &'a Engine,
    sources: Vec<usize>,
    plans: Vec<Plan>,
}

impl<'a> Prover<'a> {
    fn new(source: &'a Engine, destination: &'a Engine) -> Self {
        let sources: Vec<usize> = (0..source.ranks.len()).collect();
        let plan = |rank| match compile(source, &sources, destination, rank) {
            Ok(plan) => plan,
            Err(refusal) => panic!("rank {rank} is refused: {refusal}"),
        };
        let plans = (0..destination.ranks.len()).map(plan).collect();
        Self { source, destination, sources, plans }
    }

    fn prove(&self, tokens: u64, cached: &[u64], shape: Shape) -> Vec<Tally> {
        let (source, destination) = (self.source, self.destination);
        let mut dice = Dice::new(tokens);
        let mut tables =
            || with_room(source, destination, tokens, cached.to_vec(), shape, &mut dice);
        let request = (0..50)
            .find_map(|_| tables())
            .unwrap_or_else(|| panic!("the pools have no room for {tokens} tokens"));
        let filled = Sources::fill(source, &request);
        let judge = |(rank, plan)| {
            judge_one(&filled, &self.sources, destination, rank, plan, &request)
                .unwrap_or_else(|problem| panic!("{problem}"))
        };
        self.plans.iter().enumerate().map(judge).collect()
    }
}
