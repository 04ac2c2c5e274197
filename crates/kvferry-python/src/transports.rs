//! Transports by the names that Python gives them, with a rank's memory registered.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use kvferry_agent::{Carrier, Error, carry_several, carry_with};
use kvferry_cuda::{Cuda, CudaOptions};
use kvferry_layout::{self as layout, Place};
use kvferry_nixl::{CardPacking, Nixl, NixlOptions};
use kvferry_transport::Transport;
use kvferry_transport::local::{Local, LocalOptions};
use kvferry_transport::tcp::{Tcp, TcpOptions};
use pyo3::prelude::*;

/// What keeps a rank's memory alive.
pub(crate) type Memory = Arc<Py<PyAny>>;

/// What is taken of a card.
pub(crate) struct Cards {
    /// Multiprocessors that kernels may take; `None` for what the transport chooses.
    pub(crate) sms: Option<u32>,
    /// Kernels that were compiled beforehand; `None` to compile them here.
    pub(crate) kernel: Option<PathBuf>,
    /// MiB to pack into; `None` for what the transport chooses.
    pub(crate) staging: Option<u32>,
}

impl Cards {
    /// Refuses what is neither nothing nor enough.
    pub(crate) fn check(&self) -> Result<(), String> {
        let least = CardPacking::LEAST_STAGING.div_ceil(1 << 20);
        match self.staging.map(u64::from) {
            Some(mib) if mib != 0 && mib < least => Err(format!(
                "gpu_staging is {mib} (MiB), but must be 0, for nothing to be packed, or {least} or more: \
                 there is no room to pack into otherwise"
            )),
            _ => Ok(()),
        }
    }
}

pub(crate) fn by_name(
    name: &str,
    tcp: TcpOptions,
    cards: &Cards,
    site_packages: Vec<PathBuf>,
    regions: &[layout::Region],
    memory: Memory,
) -> Result<Arc<dyn Carrier>, Error> {
    match name {
        "local" => registered(Local::new(LocalOptions::default())?, regions, memory),
        "tcp" => registered(Tcp::new(tcp)?, regions, memory),
        "cuda" => cuda(cards, site_packages, regions, memory),
        "nixl" => nixl(&tcp, cards, site_packages, regions, memory),
        "gpu" => cuda_and_nixl(&tcp, cards, site_packages, regions, memory),
        other => Err(Error::Options(format!(
            "there is no transport '{other}': it is local, tcp, cuda, nixl or gpu"
        ))),
    }
}

/// Where this interpreter's packages are: the libraries that they bring are found there, whether or not
/// the environment is active. One that lies over another has packages in several folders.
pub(crate) fn site_packages(py: Python<'_>) -> PyResult<Vec<PathBuf>> {
    let sysconfig = py.import("sysconfig")?;
    let mut found: Vec<PathBuf> = vec![];
    for kind in ["purelib", "platlib"] {
        let folder: Option<PathBuf> = sysconfig.call_method1("get_path", (kind,))?.extract()?;
        found.extend(folder.filter(|folder| !found.contains(folder)));
    }
    let searched: Vec<PathBuf> = py.import("sys")?.getattr("path")?.extract()?;
    // Not those of Python itself.
    let own = ["stdlib", "platstdlib"].map(|kind| -> PyResult<Option<PathBuf>> {
        sysconfig.call_method1("get_path", (kind,))?.extract()
    });
    let own: Vec<Option<PathBuf>> = own.into_iter().collect::<PyResult<_>>()?;
    for folder in searched {
        let of_python = folder.ends_with("lib-dynload") || own.contains(&Some(folder.clone()));
        if folder.is_absolute() && folder.is_dir() && !of_python && !found.contains(&folder) {
            found.push(folder);
        }
    }
    Ok(found)
}

fn nixl(
    tcp: &TcpOptions,
    cards: &Cards,
    site_packages: Vec<PathBuf>,
    regions: &[layout::Region],
    memory: Memory,
) -> Result<Arc<dyn Carrier>, Error> {
    // Who packs is asked at the address that data would go over by TCP.
    let control = (tcp.bind, tcp.advertise);
    let mut options = NixlOptions { site_packages, control, ..NixlOptions::default() };
    options.card.sms = cards.sms;
    options.card.kernel.clone_from(&cards.kernel);
    if let Some(mib) = cards.staging {
        options.card.staging = u64::from(mib) << 20;
    }
    registered(Nixl::new(&options)?, regions, memory)
}

fn cuda(
    cards: &Cards,
    site_packages: Vec<PathBuf>,
    regions: &[layout::Region],
    memory: Memory,
) -> Result<Arc<dyn Carrier>, Error> {
    let Some(Place::Gpu(gpu)) = regions.first().map(|region| region.place) else {
        return Err(Error::Options(
            "the transport cuda moves GPU memory, and this rank has its memory on the host: use local \
             or tcp"
                .to_owned(),
        ));
    };
    let (sms, kernel) = (cards.sms, cards.kernel.clone());
    let options = CudaOptions { gpu, sms, kernel, site_packages };
    registered(Cuda::new(&options)?, regions, memory)
}

/// Both, for a choice peer by peer; one alone where the other cannot be had here.
fn cuda_and_nixl(
    tcp: &TcpOptions,
    cards: &Cards,
    site_packages: Vec<PathBuf>,
    regions: &[layout::Region],
    memory: Memory,
) -> Result<Arc<dyn Carrier>, Error> {
    let cuda = cuda(cards, site_packages.clone(), regions, memory.clone());
    let nixl = nixl(tcp, cards, site_packages, regions, memory);
    match (cuda, nixl) {
        (Err(cuda), Err(nixl)) => Err(Error::Options(format!(
            "GPU memory is moved by cuda inside a node and by nixl across, and neither works here: \
             cuda: {cuda}; nixl: {nixl}"
        ))),
        (cuda, nixl) => {
            let ways = [("cuda", cuda), ("nixl", nixl)].map(|(name, made)| {
                made.map_err(|error| {
                    tracing::warn!("this rank does without {name}: {error}");
                    format!("{name}: {error}")
                })
            });
            Ok(carry_several("gpu", ways.into()))
        }
    }
}

/// A transport with a manifest's regions registered, and what keeps those alive.
fn registered<T: Transport + fmt::Debug>(
    transport: T,
    regions: &[layout::Region],
    memory: Memory,
) -> Result<Arc<dyn Carrier>, Error> {
    // Parameters are dropped from the last to the first, locals before them: whatever happens, the
    // transport goes before the memory.
    let transport = transport;
    for region in regions {
        // SAFETY: `memory` keeps the regions alive until the transport has been dropped, here or by the
        // carrier. Rust has no reference to them; Python's views assume nothing about their content.
        unsafe { transport.register(*region) }?;
    }
    Ok(carry_with(transport, memory))
}
