//! Pairs of engines and requests, and the memory for them.

use kvferry_cli::tables::{self, Spread};
use kvferry_layout::{Manifest, Place, Region};
use kvferry_models::rules::vllm;
use kvferry_models::{Topology, presets};
use kvferry_plan::{BlockTable, Plan};
use kvferry_transport::memory::HostMemory;

use super::source::Source;
use crate::Failure;
use crate::memory;

/// A pair of engines and a request.
#[derive(Clone, Copy)]
pub(super) struct Case {
    model: &'static str,
    prefill: &'static str,
    decode: &'static str,
    tokens: u64,
    spread: Spread,
}

/// Short runs, long ones, and states whose elements lie in another order. Requests do not end where
/// blocks do.
pub(super) fn cases() -> Vec<Case> {
    let case = |model, prefill, decode, tokens| Case {
        model,
        prefill,
        decode,
        tokens,
        spread: Spread::Scattered,
    };
    let llama = "llama-3.1-70b";
    let by_token = ("tp=4,layout=LBNHC", "tp=8,layout=LBNHC");
    vec![
        case(llama, by_token.0, by_token.1, 250),
        case(llama, by_token.0, by_token.1, 1500),
        case("gpt-oss-120b", by_token.0, by_token.1, 1500),
        case(llama, "tp=4", "tp=8", 250),
        case(llama, "tp=4", "tp=8", 1500),
        case(llama, "tp=4", "tp=4", 1500),
        Case { spread: Spread::Contiguous, ..case(llama, "tp=4", "tp=4", 1500) },
        case("kimi-linear-48b-a3b", "tp=4,conv=sd", "tp=2,conv=ds", 250),
        case("kimi-linear-48b-a3b", "tp=4,conv=sd", "tp=2,conv=sd", 1500),
        case("nemotron-3-nano-30b-a3b", "tp=2", "tp=1", 250),
        case("nemotron-3-nano-30b-a3b", "tp=1", "tp=2", 1500),
        case("qwen3-next-80b-a3b", "tp=2", "tp=4", 1500),
        case("gpt-oss-120b", "tp=2", "tp=4", 1500),
    ]
}

/// A case with memory on both sides.
pub(super) struct Ready {
    pub(super) plan: Plan,
    pub(super) description: Vec<u8>,
    /// The source's regions as it sees them, and where they are copied to here, to check by.
    pub(super) spans: Vec<Region>,
    pub(super) memory: Vec<HostMemory>,
    pub(super) from: Vec<BlockTable>,
    pub(super) to: Vec<BlockTable>,
    pub(super) tokens: u64,
}

impl Case {
    pub(super) fn name(&self) -> String {
        let Self { model, prefill, decode, tokens, spread } = self;
        let how = if *spread == Spread::Contiguous { ", in order" } else { "" };
        format!("{model} {prefill} -> {decode}, {tokens}{how}")
    }

    /// Ranks of one side, with room for the request.
    fn side(&self, topology: &str, engine: &str) -> Result<Vec<Manifest>, Failure> {
        let model = presets::find(self.model)?.model()?;
        let ranks = |blocks: u64| -> Result<Vec<Manifest>, Failure> {
            let topology: Topology = format!("{topology},blocks={blocks}").parse()?;
            Ok(vllm::manifests(&model, &topology, engine)?)
        };
        let needed = tables::blocks_needed(&ranks(64)?[0], self.tokens);
        ranks(2 + needed + needed / 4)
    }

    /// What the first decode rank reads, with memory for it here and there.
    pub(super) fn prepare(&self, source: &mut Source) -> Result<Ready, Failure> {
        let destination = self.side(self.decode, "decode")?.swap_remove(0);
        let sources = self.side(self.prefill, "prefill")?;
        // Only the ranks that are read take memory.
        let plan = Plan::compile(&destination, &sources.iter().collect::<Vec<_>>())?;
        let read = (0..sources.len()).map(|source| plan.reads(source)).collect::<Vec<_>>();
        let sources: Vec<Manifest> =
            sources.into_iter().zip(read).filter(|(_, read)| *read).map(|(rank, _)| rank).collect();
        let sizes: Vec<u64> =
            sources.iter().flat_map(Manifest::regions).map(|region| region.bytes).collect();
        let (bases, description) = source.hold(&sizes)?;
        let spans = bases.iter().zip(&sizes).map(|(&base, &bytes)| Region::host(base, bytes));
        let spans = spans.collect();
        let mut bases = bases.into_iter();
        let sources: Vec<Manifest> =
            sources.into_iter().map(|rank| placed(rank, &mut bases)).collect::<Result<_, _>>()?;
        let memory =
            destination.regions().iter().map(|region| memory::zeros(region.bytes as usize));
        let memory = memory.collect::<Result<Vec<_>, _>>()?;
        let destination = placed(destination, &mut memory.iter().map(HostMemory::base))?;
        let plan = Plan::compile(&destination, &sources.iter().collect::<Vec<_>>())?;
        let tables = |rank| {
            tables::for_request(rank, self.tokens, self.spread).map_err(|short| {
                format!("{} blocks are needed, {} there", short.needed, short.blocks)
            })
        };
        let (from, to) = (tables(&sources[0])?, tables(&destination)?);
        Ok(Ready { plan, description, spans, memory, from, to, tokens: self.tokens })
    }
}

/// A manifest whose regions are at these addresses.
fn placed(manifest: Manifest, bases: &mut impl Iterator<Item = u64>) -> Result<Manifest, Failure> {
    let mut draft = manifest.into_draft();
    for region in &mut draft.regions {
        region.base = bases.next().ok_or("a region without memory")?;
        region.place = Place::Host;
    }
    Ok(Manifest::new(draft)?)
}
