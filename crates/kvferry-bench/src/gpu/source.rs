//! The process that is read.

use kvferry_cuda::driver::Card;
use kvferry_cuda::{Cuda, CudaOptions};
use kvferry_layout::{Place, Region};
use kvferry_nixl::{CardPacking, Nixl, NixlOptions};
use kvferry_transport::Transport;
use serde::{Deserialize, Serialize};

use super::memory::{Checker, Memory};
use crate::Failure;
use crate::helper::{Helper, answer};

#[derive(Debug, Serialize, Deserialize)]
struct Order {
    regions: Vec<u64>,
    mapped: bool,
    packing: Option<Packing>,
}

/// How both sides pack.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Packing {
    /// MiB at a time, and in all.
    pub(super) slot: u64,
    pub(super) staging: u64,
    pub(super) lanes: usize,
}

impl Default for Packing {
    /// As it is used unless something else is asked for.
    fn default() -> Self {
        let CardPacking { staging, slot, lanes, .. } = CardPacking::default();
        Self { slot: slot >> 20, staging: staging >> 20, lanes }
    }
}

impl Packing {
    pub(super) fn options(self) -> NixlOptions {
        let Self { slot, staging, lanes } = self;
        let (slot, staging) = (slot << 20, staging << 20);
        let card = CardPacking { slot, staging, lanes, ..CardPacking::default() };
        NixlOptions { card, ..NixlOptions::default() }
    }
}

/// What the source holds: addresses, and how it is described to `cuda` and to `nixl`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Held {
    pub(super) bases: Vec<u64>,
    pub(super) description: Vec<u8>,
    pub(super) nixl: Option<Vec<u8>>,
}

/// Holds the memory that it is told to hold, until it is told otherwise.
pub(super) fn serve() -> Result<(), Failure> {
    let card = Card::open(0)?;
    let checker = Checker::new(&card)?;
    // The transports go before the memory.
    let mut held: Option<(Cuda, Option<Nixl>, Vec<Memory>)> = None;
    answer(|order: Order| {
        if let Some((transport, nixl, memory)) = held.take() {
            drop((transport, nixl));
            drop(memory);
        }
        let transport = Cuda::new(&CudaOptions::default())?;
        let nixl = match order.packing {
            Some(packing) => Some(Nixl::new(&packing.options())?),
            None => None,
        };
        let mut memory = vec![];
        for (number, &bytes) in order.regions.iter().enumerate() {
            let span = Memory::new(&card, bytes, order.mapped)?;
            checker.fill(&span, number)?;
            let region = Region { base: span.base, bytes, place: Place::Gpu(0) };
            // SAFETY: the memory is freed after the transport is dropped.
            unsafe { transport.register(region)? };
            if let Some(nixl) = &nixl {
                // SAFETY: as above.
                unsafe { nixl.register(region)? };
            }
            memory.push(span);
        }
        let bases = memory.iter().map(|span| span.base).collect();
        let described = nixl.as_ref().map(Transport::describe).transpose()?;
        let answer = Held { bases, description: transport.describe()?, nixl: described };
        held = Some((transport, nixl, memory));
        Ok(answer)
    })
}

/// That process, from here.
pub(super) struct Source(Helper);

impl Source {
    pub(super) fn start(arguments: &[&str]) -> Result<Self, Failure> {
        Helper::start(arguments).map(Self)
    }

    /// Has it hold regions of these sizes, and pack them over NIXL where it is told how.
    pub(super) fn hold(
        &mut self,
        regions: &[u64],
        mapped: bool,
        packing: Option<Packing>,
    ) -> Result<Held, Failure> {
        self.0.ask(&Order { regions: regions.to_vec(), mapped, packing })
    }
}
