//! The back ends under test.

use kvferry_cuda::{Cuda, CudaOptions, PinnedCards};
use kvferry_nixl::{CardPacking, Nixl, NixlOptions};
use kvferry_transport::local::{Local, LocalOptions};
use kvferry_transport::memory::HostMemory;
use kvferry_transport::tcp::{CardSlots, Encrypt, Tcp, TcpOptions};
use kvferry_transport::{Error, Transport};

use crate::memory::{CardMemory, MappedMemory, Memory, card};

/// A back end under test, and what it is like.
pub trait BackEnd: 'static {
    /// What is tested.
    type Transport: Transport;
    /// What it moves.
    type Memory: Memory;

    /// How the tests and the peer's command line call it.
    const NAME: &'static str;
    /// Environment of both processes.
    const ENVIRONMENT: &'static [(&'static str, &'static str)];
    /// Whether a stopped peer stops the bytes: not where one process reads the other's memory.
    const NEEDS_THE_PEER: bool;
    /// Whether a peer's deregistration is noticed without a new description.
    const SEES_DEREGISTRATION: bool;
    /// Whether a read that is cancelled while its peer is stopped settles before the peer runs
    /// again.
    const SETTLES_ALONE: bool;
    /// Whether peers pack short runs.
    const PACKS: bool = false;
    /// Whether a stopped peer stops packed bytes.
    const PACKING_NEEDS_THE_PEER: bool = Self::NEEDS_THE_PEER;
    /// Whether memory that is open here stays when the process that it belongs to dies.
    const OUTLIVES_THE_PEER: bool = false;
    /// Whether all copies of an operation are carried out as one.
    const AS_ONE: bool = false;

    /// One of them, for one process.
    fn new() -> Result<Self::Transport, Error>;
}

pub(crate) struct LocalEnd;

impl BackEnd for LocalEnd {
    type Transport = Local;
    type Memory = HostMemory;

    const NAME: &'static str = "local";
    const ENVIRONMENT: &'static [(&'static str, &'static str)] = &[];
    const NEEDS_THE_PEER: bool = false;
    const SEES_DEREGISTRATION: bool = true;
    const SETTLES_ALONE: bool = true;
    const PACKS: bool = true;
    const PACKING_NEEDS_THE_PEER: bool = true;

    fn new() -> Result<Local, Error> {
        Local::new(LocalOptions::default())
    }
}

/// What the ends of `tcp` have in common.
macro_rules! tcp_end {
    ($(#[$meta:meta])* $end:ident, $name:literal, $memory:ty, $as_one:literal, $new:expr) => {
        $(#[$meta])*
        pub(crate) struct $end;

        impl BackEnd for $end {
            type Transport = Tcp;
            type Memory = $memory;

            const NAME: &'static str = $name;
            const ENVIRONMENT: &'static [(&'static str, &'static str)] = &[];
            const NEEDS_THE_PEER: bool = true;
            const SEES_DEREGISTRATION: bool = true;
            const SETTLES_ALONE: bool = true;
            const PACKS: bool = true;
            const AS_ONE: bool = $as_one;

            fn new() -> Result<Tcp, Error> {
                $new
            }
        }
    };
}

tcp_end!(TcpEnd, "tcp", HostMemory, false, tcp(Encrypt::Never));
tcp_end!(
    /// As between hosts.
    TcpSealedEnd,
    "tcp-encrypted",
    HostMemory,
    false,
    tcp(Encrypt::Always)
);
tcp_end!(TcpCardEnd, "tcp-gpu", CardMemory, true, tcp_of_a_card(CudaOptions::default()));
tcp_end!(
    /// The same without a card, on driver.c. There is nothing to compile.
    TcpTwinEnd,
    "tcp-twin",
    CardMemory,
    true,
    tcp_of_a_card(CudaOptions { kernel: Some("/dev/null".into()), ..CudaOptions::default() })
);

fn tcp(encrypt: Encrypt) -> Result<Tcp, Error> {
    // More than one connection, so that the lanes meet.
    Tcp::new(TcpOptions { connections: 3, encrypt, ..TcpOptions::default() })
}

/// The memory of a card, through pinned slots that are as small as those of host memory and so few that they run out.
fn tcp_of_a_card(options: CudaOptions) -> Result<Tcp, Error> {
    // Keeps the context, whichever goes first.
    card();
    Tcp::new(TcpOptions {
        cards: Some(PinnedCards::new(options)),
        card: CardSlots { bytes: 8 * (260 << 10), slot: 260 << 10, connections: 3 },
        ..TcpOptions::default()
    })
}

/// NIXL as UCX likes it: on one host it reads the other process's memory.
pub(crate) struct NixlEnd;

impl BackEnd for NixlEnd {
    type Transport = Nixl;
    type Memory = HostMemory;

    const NAME: &'static str = "nixl";
    const ENVIRONMENT: &'static [(&'static str, &'static str)] =
        &[("UCX_NET_DEVICES", "lo"), ("UCX_MEM_EVENTS", "n")];
    const NEEDS_THE_PEER: bool = false;
    const SEES_DEREGISTRATION: bool = false;
    const SETTLES_ALONE: bool = false;
    const PACKS: bool = true;

    fn new() -> Result<Nixl, Error> {
        Nixl::new(&NixlOptions::default())
    }
}

/// NIXL over UCX's tcp, where the peer takes part, as it does across hosts.
pub(crate) struct NixlTcpEnd;

impl BackEnd for NixlTcpEnd {
    type Transport = Nixl;
    type Memory = HostMemory;

    const NAME: &'static str = "nixl-tcp";
    const ENVIRONMENT: &'static [(&'static str, &'static str)] =
        &[("UCX_NET_DEVICES", "lo"), ("UCX_MEM_EVENTS", "n"), ("UCX_TLS", "tcp")];
    const NEEDS_THE_PEER: bool = true;
    const SEES_DEREGISTRATION: bool = false;
    const SETTLES_ALONE: bool = false;
    const PACKS: bool = true;

    fn new() -> Result<Nixl, Error> {
        NixlEnd::new()
    }
}

/// NIXL with the memory of a card.
pub(crate) struct NixlCardEnd;

impl BackEnd for NixlCardEnd {
    type Transport = Nixl;
    type Memory = CardMemory;

    const NAME: &'static str = "nixl-gpu";
    const ENVIRONMENT: &'static [(&'static str, &'static str)] = &[("UCX_NET_DEVICES", "lo")];
    const NEEDS_THE_PEER: bool = false;
    const SEES_DEREGISTRATION: bool = false;
    const SETTLES_ALONE: bool = false;
    const PACKS: bool = true;

    fn new() -> Result<Nixl, Error> {
        // Keeps the context, whichever goes first.
        card();
        Nixl::new(&NixlOptions { card: small_parts(), ..NixlOptions::default() })
    }
}

/// Packing in parts that are as small as those of host memory, so that there are many, and slots run out.
fn small_parts() -> CardPacking {
    CardPacking { staging: 8 * (260 << 10), slot: 260 << 10, ..CardPacking::default() }
}

/// The same without a card: driver.c stands in for CUDA's driver and says so, and NIXL is told that what it calls
/// a card's memory is the host's. Over UCX's tcp, where the peer takes part.
pub(crate) struct NixlTwinEnd;

impl BackEnd for NixlTwinEnd {
    type Transport = Nixl;
    type Memory = CardMemory;

    const NAME: &'static str = "nixl-twin";
    const ENVIRONMENT: &'static [(&'static str, &'static str)] = NixlTcpEnd::ENVIRONMENT;
    const NEEDS_THE_PEER: bool = true;
    const SEES_DEREGISTRATION: bool = false;
    const SETTLES_ALONE: bool = false;
    const PACKS: bool = true;

    fn new() -> Result<Nixl, Error> {
        let kernel = Some("/dev/null".into());
        let card = CardPacking { kernel, ..small_parts() };
        Nixl::new(&NixlOptions { card, ..NixlOptions::default() })
    }
}

/// The card's own memory, moved by a kernel.
pub(crate) struct CudaEnd;

impl BackEnd for CudaEnd {
    type Transport = Cuda;
    type Memory = CardMemory;

    const NAME: &'static str = "cuda";
    const ENVIRONMENT: &'static [(&'static str, &'static str)] = &[];
    const NEEDS_THE_PEER: bool = false;
    const SEES_DEREGISTRATION: bool = false;
    const SETTLES_ALONE: bool = true;
    const OUTLIVES_THE_PEER: bool = true;
    const AS_ONE: bool = true;

    fn new() -> Result<Cuda, Error> {
        // Keeps the context, whichever goes first.
        card();
        Cuda::new(&CudaOptions::default())
    }
}

/// The same without a card: driver.c stands in for CUDA's driver and carries the kernel's code out on the
/// CPU.
pub(crate) struct CudaTwinEnd;

impl BackEnd for CudaTwinEnd {
    type Transport = Cuda;
    type Memory = CardMemory;

    const NAME: &'static str = "cuda-twin";
    const ENVIRONMENT: &'static [(&'static str, &'static str)] = &[];
    const NEEDS_THE_PEER: bool = false;
    const SEES_DEREGISTRATION: bool = false;
    const SETTLES_ALONE: bool = true;
    const OUTLIVES_THE_PEER: bool = true;
    const AS_ONE: bool = true;

    fn new() -> Result<Cuda, Error> {
        // There is nothing to compile.
        Cuda::new(&CudaOptions { kernel: Some("/dev/null".into()), ..CudaOptions::default() })
    }
}

/// The same for memory from the virtual-memory interface.
pub(crate) struct MappedTwinEnd;

impl BackEnd for MappedTwinEnd {
    type Transport = Cuda;
    type Memory = MappedMemory;

    const NAME: &'static str = "cuda-mapped-twin";
    const ENVIRONMENT: &'static [(&'static str, &'static str)] = CudaTwinEnd::ENVIRONMENT;
    const NEEDS_THE_PEER: bool = CudaTwinEnd::NEEDS_THE_PEER;
    const SEES_DEREGISTRATION: bool = CudaTwinEnd::SEES_DEREGISTRATION;
    const SETTLES_ALONE: bool = CudaTwinEnd::SETTLES_ALONE;
    const OUTLIVES_THE_PEER: bool = CudaTwinEnd::OUTLIVES_THE_PEER;
    const AS_ONE: bool = CudaTwinEnd::AS_ONE;

    fn new() -> Result<Cuda, Error> {
        CudaTwinEnd::new()
    }
}
