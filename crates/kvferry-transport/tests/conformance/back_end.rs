//! The back ends under test.

use kvferry_transport::local::{Local, LocalOptions};
use kvferry_transport::nixl::{Nixl, NixlOptions};
use kvferry_transport::tcp::{Tcp, TcpOptions};
use kvferry_transport::{Error, Transport};

pub(crate) trait BackEnd: 'static {
    type Transport: Transport;

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
    const PACKS: bool;

    fn new() -> Result<Self::Transport, Error>;
}

pub(crate) struct LocalEnd;

impl BackEnd for LocalEnd {
    type Transport = Local;

    const NAME: &'static str = "local";
    const ENVIRONMENT: &'static [(&'static str, &'static str)] = &[];
    const NEEDS_THE_PEER: bool = false;
    const SEES_DEREGISTRATION: bool = true;
    const SETTLES_ALONE: bool = true;
    const PACKS: bool = false;

    fn new() -> Result<Local, Error> {
        Local::new(LocalOptions::default())
    }
}

pub(crate) struct TcpEnd;

impl BackEnd for TcpEnd {
    type Transport = Tcp;

    const NAME: &'static str = "tcp";
    const ENVIRONMENT: &'static [(&'static str, &'static str)] = &[];
    const NEEDS_THE_PEER: bool = true;
    const SEES_DEREGISTRATION: bool = true;
    const SETTLES_ALONE: bool = true;
    const PACKS: bool = true;

    fn new() -> Result<Tcp, Error> {
        Tcp::new(TcpOptions {
            // More than one, so that the lanes meet.
            connections: 3,
            ..TcpOptions::default()
        })
    }
}

/// NIXL as UCX likes it: on one host it reads the other process's memory.
pub(crate) struct NixlEnd;

impl BackEnd for NixlEnd {
    type Transport = Nixl;

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
