//! Transports by their names, with a rank's memory registered.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

use kvferry_agent::{Carrier, Error, carry_with};
use kvferry_layout::Region;
use kvferry_transport::Transport;
use kvferry_transport::local::{Local, LocalOptions};
use kvferry_transport::shared::rate::Medium;
use kvferry_transport::tcp::{Encrypt, Tcp, TcpOptions};

/// How a rank's memory is moved.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct TransportOptions {
    /// `local` (host memory on one host), `tcp` (host or GPU memory, over any network), `cuda` (GPU memory inside a node),
    /// `nixl` (either, over RDMA or NVLink), or `gpu`: peer by peer, `cuda` inside a node, `nixl` where both machines have
    /// RDMA, and `tcp` everywhere else.
    pub name: String,
    /// Where to listen, for peers that read over sockets or ask for what is to be packed. Port 0 means any free one.
    pub bind: SocketAddr,
    /// Of which ports that is one; `nixl` is told them, too.
    pub ports: Option<RangeInclusive<u16>>,
    /// The address to give to peers, where it is not the one to listen on.
    pub advertise: Option<IpAddr>,
    /// Whether what `tcp` moves to other hosts is encrypted. That is of use where a rank's description reaches its peers over
    /// a channel that is, as it does between agents that have a key or TLS.
    pub encrypt: bool,
    /// A card's multiprocessors that one transfer may take; `None` for what the transport chooses.
    pub sms: Option<u32>,
    /// Kernels for the card that were compiled beforehand; `None` to compile them here.
    pub kernel: Option<PathBuf>,
    /// The most bytes of a card's memory to pack into, and for `tcp` as many pinned ones of the host; `None` for what the
    /// transport chooses.
    pub staging: Option<u64>,
    /// Folders of Python packages of this process, which libraries are looked for in first.
    pub site_packages: Vec<PathBuf>,
}

impl TransportOptions {
    /// The least [`staging`](Self::staging) that something can be packed into.
    #[cfg(feature = "nixl")]
    pub const LEAST_STAGING: u64 = kvferry_nixl::CardPacking::LEAST_STAGING;

    /// A transport on the loopback address.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            bind: (Ipv4Addr::LOCALHOST, 0).into(),
            ports: None,
            advertise: None,
            encrypt: true,
            sms: None,
            kernel: None,
            staging: None,
            site_packages: vec![],
        }
    }

    /// Makes the transport, and registers a rank's memory with it. `memory` is what keeps that alive: it is dropped after the
    /// last use of the transport.
    ///
    /// # Safety
    /// The regions must stay what they are, readable and writable, until a clone of `memory` is dropped for the last time, and
    /// nothing may assume that their content does not change meanwhile.
    pub unsafe fn register<M>(
        &self,
        regions: &[Region],
        memory: M,
    ) -> Result<Arc<dyn Carrier>, Error>
    where
        M: Clone + Send + Sync + 'static,
    {
        match self.name.as_str() {
            "local" => registered(Local::new(LocalOptions::default())?, regions, memory),
            "tcp" => registered(Tcp::new(self.tcp())?, regions, memory),
            "cuda" => self.cuda(regions, memory),
            "nixl" => self.nixl(regions, memory),
            "gpu" => self.best(regions, memory),
            other => Err(Error::Options(format!(
                "there is no transport '{other}': it is local, tcp, cuda, nixl or gpu"
            ))),
        }
    }

    #[cfg(feature = "nixl")]
    fn nixl<M>(&self, regions: &[Region], memory: M) -> Result<Arc<dyn Carrier>, Error>
    where
        M: Send + Sync + 'static,
    {
        let mut options = kvferry_nixl::NixlOptions {
            site_packages: self.site_packages.clone(),
            // Who packs is asked at the address that data would go over by TCP.
            control: (self.bind, self.advertise),
            ports: self.ports.clone(),
            ..kvferry_nixl::NixlOptions::default()
        };
        options.card.sms = self.sms;
        options.card.kernel.clone_from(&self.kernel);
        if let Some(bytes) = self.staging {
            options.card.staging = bytes;
        }
        if self.encrypt && !self.bind.ip().is_loopback() {
            tracing::warn!("what nixl moves is not encrypted: it has no means to");
        }
        registered(kvferry_nixl::Nixl::new(&options)?, regions, memory)
    }

    #[cfg(feature = "cuda")]
    fn cuda<M>(&self, regions: &[Region], memory: M) -> Result<Arc<dyn Carrier>, Error>
    where
        M: Send + Sync + 'static,
    {
        let first = regions.first().map(|region| region.place);
        let Some(kvferry_layout::Place::Gpu(gpu)) = first else {
            return Err(Error::Options(
                "the transport cuda moves GPU memory, and this rank has its memory on the host: use \
                 local or tcp"
                    .to_owned(),
            ));
        };
        let (sms, kernel) = (self.sms, self.kernel.clone());
        let site_packages = self.site_packages.clone();
        let options = kvferry_cuda::CudaOptions { gpu, sms, kernel, site_packages };
        registered(kvferry_cuda::Cuda::new(&options)?, regions, memory)
    }

    /// All that work here, the best first, for a choice peer by peer. `nixl` takes part where there is RDMA, or where
    /// `tcp` does not work: UCX's own TCP carries a fifth of what `tcp` does.
    fn best<M>(&self, regions: &[Region], memory: M) -> Result<Arc<dyn Carrier>, Error>
    where
        M: Clone + Send + Sync + 'static,
    {
        let missing = |name: &'static str| {
            move |error: Error| {
                tracing::warn!("this rank does without {name}: {error}");
                format!("{name}: {error}")
            }
        };
        let cuda = self.cuda(regions, memory.clone()).map_err(missing("cuda"));
        let tcp = Tcp::new(self.tcp())
            .map_err(Error::from)
            .and_then(|tcp| registered(tcp, regions, memory.clone()))
            .map_err(missing("tcp"));
        let nixl = match Medium::fastest_rdma().is_some() || tcp.is_err() {
            true => self.nixl(regions, memory).map_err(missing("nixl")),
            false => {
                let why =
                    "nixl: this machine has no RDMA (to use UCX's TCP, set the transport to nixl)";
                Err(why.to_owned())
            }
        };
        match (cuda, nixl, tcp) {
            (Err(cuda), Err(nixl), Err(tcp)) => Err(Error::Options(format!(
                "no way to move GPU memory works here: {cuda}; {nixl}; {tcp}"
            ))),
            (cuda, nixl, tcp) => Ok(kvferry_agent::carry_several("gpu", vec![cuda, nixl, tcp])),
        }
    }

    fn tcp(&self) -> TcpOptions {
        #[cfg_attr(not(feature = "cuda"), expect(unused_mut, reason = "without cards"))]
        let mut options = TcpOptions {
            bind: self.bind,
            ports: self.ports.clone(),
            advertise: self.advertise,
            encrypt: if self.encrypt { Encrypt::BetweenHosts } else { Encrypt::Never },
            ..TcpOptions::default()
        };
        #[cfg(feature = "cuda")]
        {
            if let Some(staging) = self.staging {
                options.card = options.card.within(staging);
            }
            options.cards = Some(kvferry_cuda::PinnedCards::new(kvferry_cuda::CudaOptions {
                gpu: 0,
                sms: self.sms,
                kernel: self.kernel.clone(),
                site_packages: self.site_packages.clone(),
            }));
        }
        options
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda<M>(&self, _: &[Region], _: M) -> Result<Arc<dyn Carrier>, Error> {
        Err(left_out("cuda"))
    }

    #[cfg(not(feature = "nixl"))]
    fn nixl<M>(&self, _: &[Region], _: M) -> Result<Arc<dyn Carrier>, Error> {
        Err(left_out("nixl"))
    }
}

#[cfg(not(all(feature = "cuda", feature = "nixl")))]
fn left_out(feature: &str) -> Error {
    Error::Options(format!(
        "this program was built without the feature {feature} of the crate kvferry"
    ))
}

/// A transport with a manifest's regions registered, and what keeps those alive.
fn registered<T, M>(transport: T, regions: &[Region], memory: M) -> Result<Arc<dyn Carrier>, Error>
where
    T: Transport + fmt::Debug,
    M: Send + Sync + 'static,
{
    // Parameters are dropped from the last to the first, locals before them: whatever happens, the
    // transport goes before the memory.
    let transport = transport;
    for region in regions {
        // SAFETY: as `register` demands: `memory` keeps the regions alive until the transport has been dropped, here or by
        // the carrier.
        unsafe { transport.register(*region) }?;
    }
    Ok(carry_with(transport, memory))
}
