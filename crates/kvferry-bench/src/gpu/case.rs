//! Pairs of engines and requests, and the ranks that take part in them.

use kvferry_layout::{Manifest, Place};
use kvferry_models::rules::vllm;
use kvferry_models::{Topology, presets};
use kvferry_plan::{Plan, Table};

use crate::Failure;

/// A pair of engines and a request.
pub(super) struct Case {
    pub(super) model: &'static str,
    pub(super) prefill: &'static str,
    pub(super) decode: &'static str,
    pub(super) tokens: u64,
    scattered: bool,
    /// The source's memory is from the virtual-memory interface.
    pub(super) mapped: bool,
}

const fn case(
    model: &'static str,
    prefill: &'static str,
    decode: &'static str,
    tokens: u64,
) -> Case {
    Case { model, prefill, decode, tokens, scattered: true, mapped: false }
}

const SHORT: u64 = 8 << 10;
const LONG: u64 = 128 << 10;

pub(super) fn cases() -> Vec<Case> {
    let llama = "llama-3.1-70b";
    vec![
        case("nemotron-3-nano-30b-a3b", "tp=2", "tp=1", SHORT),
        case("nemotron-3-nano-30b-a3b", "tp=2", "tp=1", LONG),
        case("kimi-linear-48b-a3b", "tp=4", "tp=2", SHORT),
        case("kimi-linear-48b-a3b", "tp=4", "tp=2", LONG),
        case("qwen3-next-80b-a3b", "tp=2", "tp=4", SHORT),
        case("qwen3-next-80b-a3b", "tp=2", "tp=4", LONG),
        case(llama, "tp=4", "tp=8", SHORT),
        case(llama, "tp=4", "tp=8", LONG),
        case(llama, "tp=8", "tp=4", SHORT),
        case(llama, "tp=8", "tp=4", LONG),
        case(llama, "tp=4", "tp=4", SHORT),
        case(llama, "tp=4", "tp=4", LONG),
        Case { scattered: false, ..case(llama, "tp=4", "tp=4", SHORT) },
        case("qwen3-32b", "tp=2,block=16", "tp=4,block=32", SHORT),
        case("gpt-oss-120b", "tp=2", "tp=4", LONG),
        case(llama, "tp=4,layout=LBNHC", "tp=8,layout=LBNHC", SHORT),
        case(llama, "tp=4,layout=LBNHC", "tp=8,layout=LBNHC", LONG),
        case("kimi-linear-48b-a3b", "tp=4,conv=sd", "tp=2,conv=ds", SHORT),
        Case { mapped: true, ..case(llama, "tp=4", "tp=8", SHORT) },
    ]
}

impl Case {
    /// With block tables in no order.
    pub(super) fn scattered(
        model: &'static str,
        prefill: &'static str,
        decode: &'static str,
        tokens: u64,
    ) -> Self {
        case(model, prefill, decode, tokens)
    }

    pub(super) fn name(&self) -> String {
        let how = match (self.scattered, self.mapped) {
            (_, true) => ", mapped memory",
            (true, _) => "",
            (false, _) => ", contiguous",
        };
        format!("{} {} -> {}, {}k{how}", self.model, self.prefill, self.decode, self.tokens >> 10)
    }
}

/// The ranks that take part in a request.
pub(super) struct Ranks {
    pub(super) destination: Manifest,
    /// Only those that are read.
    pub(super) sources: Vec<Manifest>,
}

impl Ranks {
    pub(super) fn new(case: &Case) -> Result<Self, Failure> {
        let destination = side(case, case.decode, "decode")?.swap_remove(0);
        let mut sources = side(case, case.prefill, "prefill")?;
        let plan = Plan::compile(&destination, &sources.iter().collect::<Vec<_>>())?;
        let mut numbers = 0..;
        sources.retain(|_| numbers.next().is_some_and(|number| plan.reads(number)));
        Ok(Self { destination, sources })
    }

    /// Bytes of memory that both sides take.
    pub(super) fn bytes(&self) -> u64 {
        let ranks = self.sources.iter().chain([&self.destination]);
        ranks.flat_map(Manifest::regions).map(|region| region.bytes).sum()
    }
}

/// Ranks of one side, with room for a request.
fn side(case: &Case, topology: &str, engine: &str) -> Result<Vec<Manifest>, Failure> {
    let model = presets::find(case.model)?.model()?;
    let ranks = |blocks: u64| -> Result<Vec<Manifest>, Failure> {
        let topology: Topology = format!("{topology},blocks={blocks}").parse()?;
        Ok(vllm::manifests(&model, &topology, engine)?)
    };
    let needed: u64 = positions(&ranks(64)?[0], case.tokens).iter().map(|span| span.1).sum();
    ranks(2 + needed + needed / 4)
}

/// For every group: the position of the first live block, and how many there are.
fn positions(rank: &Manifest, tokens: u64) -> Vec<(u64, u64)> {
    let span = |group: &kvferry_layout::Group| match group.tokens_per_block {
        None => (0, 1),
        Some(block) => {
            let first = group.window.first_live(tokens).min(tokens) / block;
            (first, tokens.div_ceil(block) - first)
        }
    };
    rank.groups().iter().map(span).collect()
}

/// Block tables: every block of the pool at most once, in order or shuffled.
pub(super) fn tables(rank: &Manifest, case: &Case, seed: u64) -> Vec<(u64, Vec<u32>)> {
    let blocks = rank.groups().iter().map(|group| group.blocks).min().unwrap_or(1);
    let mut ids: Vec<u32> = (1..blocks).collect();
    if case.scattered {
        let mut state = seed;
        for at in (1..ids.len()).rev() {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            ids.swap(at, (state >> 33) as usize % (at + 1));
        }
    }
    let mut ids = ids.into_iter();
    let table = |(first, count): (u64, u64)| (first, ids.by_ref().take(count as usize).collect());
    positions(rank, case.tokens).into_iter().map(table).collect()
}

pub(super) fn borrowed(tables: &[(u64, Vec<u32>)]) -> Vec<Table<'_>> {
    tables.iter().map(|(first, blocks)| Table { first: *first, blocks }).collect()
}

/// A manifest whose regions are at these addresses.
pub(super) fn placed(
    manifest: Manifest,
    bases: &mut impl Iterator<Item = u64>,
) -> Result<Manifest, Failure> {
    let mut draft = manifest.into_draft();
    for region in &mut draft.regions {
        region.base = bases.next().ok_or("a region without memory")?;
        region.place = Place::Gpu(0);
    }
    Ok(Manifest::new(draft)?)
}
