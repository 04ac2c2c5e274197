//! The process that is read.

use std::net::{SocketAddr, TcpStream};

use kvferry_cuda::driver::Card;
use kvferry_cuda::{Cuda, CudaOptions, PinnedCards};
use kvferry_layout::{Place, Region};
use kvferry_nixl::{CardPacking, Nixl, NixlOptions};
use kvferry_transport::Transport;
use kvferry_transport::tcp::{CardSlots, Encrypt, Tcp, TcpOptions};
use serde::{Deserialize, Serialize};

use super::memory::{Checker, Memory};
use super::plain;
use crate::Failure;
use crate::helper::{Helper, answer};

#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Hold(Hold),
    /// Plain sockets, each of which sends as many bytes as it is asked for; answers where they listen.
    Sockets(usize),
    /// Answers how many seconds of CPUs this process has taken.
    Cpu,
}

#[derive(Debug, Serialize, Deserialize)]
struct Hold {
    regions: Vec<u64>,
    mapped: bool,
    packing: Option<Packing>,
    slots: Option<Slots>,
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

/// Through which slots `tcp` moves a card's memory, on both sides.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Slots {
    /// KiB of one, and MiB in all.
    pub(super) slot: u64,
    pub(super) all: u64,
    pub(super) connections: usize,
    /// Multiprocessors; without, as many as are taken unless something else is asked for.
    pub(super) sms: Option<u32>,
    /// Whether what goes over the connections is encrypted.
    pub(super) encrypted: bool,
}

impl Default for Slots {
    /// As it is used unless something else is asked for.
    fn default() -> Self {
        let CardSlots { bytes, slot, connections } = TcpOptions::default().card;
        Self { slot: slot >> 10, all: bytes >> 20, connections, sms: None, encrypted: false }
    }
}

impl Slots {
    pub(super) fn transport(self) -> Result<Tcp, kvferry_transport::Error> {
        let Self { slot, all, connections, sms, encrypted } = self;
        Tcp::new(TcpOptions {
            cards: Some(PinnedCards::new(CudaOptions { sms, ..CudaOptions::default() })),
            card: CardSlots { bytes: all << 20, slot: slot << 10, connections },
            encrypt: if encrypted { Encrypt::Always } else { Encrypt::Never },
            ..TcpOptions::default()
        })
    }
}

/// What the source holds: addresses, and how it is described to `cuda`, to `nixl` and to `tcp`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Held {
    pub(super) bases: Vec<u64>,
    pub(super) description: Vec<u8>,
    pub(super) nixl: Option<Vec<u8>>,
    pub(super) tcp: Option<Vec<u8>>,
}

/// A transport for each that is asked for, and the memory, which they must not outlive.
struct Holding {
    _cuda: Cuda,
    _nixl: Option<Nixl>,
    _tcp: Option<Tcp>,
    _memory: Vec<Memory>,
}

/// Holds the memory that it is told to hold, until it is told otherwise.
pub(super) fn serve() -> Result<(), Failure> {
    let card = Card::open(0)?;
    let checker = Checker::new(&card)?;
    let mut held: Option<Holding> = None;
    answer(|order: Order| {
        let order = match order {
            Order::Hold(hold) => hold,
            Order::Sockets(count) => return Ok(serde_json::to_value(plain::serve(count)?)?),
            Order::Cpu => return Ok(serde_json::to_value(plain::cpu_seconds())?),
        };
        drop(held.take());
        let transport = Cuda::new(&CudaOptions::default())?;
        let nixl = match order.packing {
            Some(packing) => Some(Nixl::new(&packing.options())?),
            None => None,
        };
        let tcp = order.slots.map(Slots::transport).transpose()?;
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
            if let Some(tcp) = &tcp {
                // SAFETY: as above.
                unsafe { tcp.register(region)? };
            }
            memory.push(span);
        }
        let bases = memory.iter().map(|span| span.base).collect();
        let answer = Held {
            bases,
            description: transport.describe()?,
            nixl: nixl.as_ref().map(Transport::describe).transpose()?,
            tcp: tcp.as_ref().map(Transport::describe).transpose()?,
        };
        held = Some(Holding { _cuda: transport, _nixl: nixl, _tcp: tcp, _memory: memory });
        Ok(serde_json::to_value(answer)?)
    })
}

/// That process, from here.
pub(super) struct Source(Helper);

impl Source {
    pub(super) fn start(arguments: &[&str]) -> Result<Self, Failure> {
        Helper::start(arguments).map(Self)
    }

    /// Has it hold regions of these sizes, pack them over NIXL where it is told how, and send them where it is told
    /// through which slots.
    pub(super) fn hold(
        &mut self,
        regions: &[u64],
        mapped: bool,
        packing: Option<Packing>,
        slots: Option<Slots>,
    ) -> Result<Held, Failure> {
        self.0.ask(&Order::Hold(Hold { regions: regions.to_vec(), mapped, packing, slots }))
    }

    /// Plain sockets to it.
    pub(super) fn sockets(&mut self, count: usize) -> Result<Vec<TcpStream>, Failure> {
        let at: SocketAddr = self.0.ask(&Order::Sockets(count))?;
        (0..count).map(|_| Ok(TcpStream::connect(at)?)).collect()
    }

    /// Seconds of CPUs that it has taken.
    pub(super) fn cpu_seconds(&mut self) -> Result<f64, Failure> {
        self.0.ask(&Order::Cpu)
    }
}
