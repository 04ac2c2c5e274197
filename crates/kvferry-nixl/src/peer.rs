//! A peer, and what it says of itself.

use std::ffi::CString;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvferry_layout::{Place, Region};
use parking_lot::Mutex;

use super::options::Segments;
use super::packer::{Packer, PackerAddress};
use kvferry_transport::shared::bytes::{Fields, put_block};
use kvferry_transport::shared::rate::{Medium, RateWatch};
use kvferry_transport::shared::spans::Spans;
use kvferry_transport::{Error, Instance};

/// A peer of a [`Nixl`](super::Nixl) transport.
#[derive(Clone)]
pub struct NixlPeer(pub(super) Arc<Inner>);

pub(super) struct Inner {
    pub(super) instance: Instance,
    /// NIXL's name for it.
    pub(super) name: CString,
    pub(super) spans: Mutex<Arc<Spans>>,
    /// What NIXL was told of it; empty where that failed.
    pub(super) metadata: Mutex<Vec<u8>>,
    /// Held by whoever brings these up to date.
    pub(super) refreshed: Mutex<()>,
    pub(super) rate: Arc<RateWatch>,
    pub(super) closed: AtomicBool,
    /// Nothing new is posted while its metadata is being replaced.
    pub(super) paused: AtomicBool,
    /// Operations that the driver has taken and that have not ended.
    pub(super) under_way: Mutex<usize>,
    /// How it is asked to pack, for each kind of memory on both sides for which it does.
    packers: Mutex<Vec<Arc<Packer>>>,
    /// The kinds of memory (whether on a card: ours, its own) with which it was last asked whether it packs.
    pub(super) met: Mutex<Option<(bool, bool)>>,
}

impl NixlPeer {
    pub(super) fn new(
        instance: Instance,
        name: CString,
        (spans, metadata): (Spans, &[u8]),
        rate: RateWatch,
    ) -> Self {
        let peer = Self(Arc::new(Inner {
            instance,
            name,
            spans: Mutex::new(Arc::new(spans)),
            metadata: Mutex::new(metadata.to_vec()),
            refreshed: Mutex::default(),
            rate: Arc::new(rate),
            closed: AtomicBool::new(false),
            paused: AtomicBool::new(false),
            under_way: Mutex::new(0),
            packers: Mutex::default(),
            met: Mutex::default(),
        }));
        if peer.is_on_gpu() {
            peer.0.rate.gpu();
        }
        peer
    }

    /// Who it is.
    pub fn instance(&self) -> Instance {
        self.0.instance
    }

    pub(super) fn spans(&self) -> Arc<Spans> {
        self.0.spans.lock().clone()
    }

    /// Whether any of its memory is on a GPU.
    pub(super) fn is_on_gpu(&self) -> bool {
        self.spans().0.iter().any(|region| region.place != Place::Host)
    }

    pub(super) fn medium(&self) -> Medium {
        self.0.rate.medium()
    }

    /// How it is asked to pack, where it was met with the same kinds of memory as there are now: `gpu` says
    /// whether any of ours is on a card.
    pub(super) fn packer(&self, gpu: bool) -> Option<Arc<Packer>> {
        let on_cards = (gpu, self.is_on_gpu());
        self.0.packers.lock().iter().find(|packer| packer.on_cards == on_cards).cloned()
    }

    /// From now on it is asked to pack. If it was disconnected meanwhile, it is not, and the connections are
    /// closed that were opened for that.
    pub(super) fn adopt(&self, packer: Packer) {
        let mut packers = self.0.packers.lock();
        // Whoever disconnects says so first, and looks here then.
        if !self.0.closed.load(Ordering::SeqCst) {
            packers.push(Arc::new(packer));
        }
    }

    /// Ends all that it was asked to pack.
    pub(super) fn dismiss_packers(&self) {
        let packers = std::mem::take(&mut *self.0.packers.lock());
        for packer in packers {
            packer.client.close();
        }
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for NixlPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("NixlPeer").field(&self.0.instance).finish()
    }
}

const DESCRIPTION: &[u8; 8] = b"kvfy-nxl";
/// What was put together for a process that knows nothing of kvferry: NIXL has its own name for it.
const FOREIGN: &[u8; 8] = b"kvfy-nxf";

/// What a description holds.
pub(super) struct Description<'a> {
    pub(super) instance: Instance,
    /// Whether the process knows nothing of kvferry.
    pub(super) foreign: bool,
    /// Of its UCX's TCP; what a process has that knows nothing of kvferry is not known.
    pub(super) segments: Option<Segments>,
    pub(super) spans: Spans,
    /// NIXL's own part.
    pub(super) metadata: &'a [u8],
    /// How it is asked to pack: read by [`parse`](Self::parse), and written behind the metadata.
    pub(super) told: Option<PackerAddress>,
}

impl Description<'_> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = if self.foreign { FOREIGN.to_vec() } else { DESCRIPTION.to_vec() };
        out.extend(self.instance.0);
        out.extend((self.spans.0.len() as u32).to_le_bytes());
        for region in &self.spans.0 {
            out.extend(region.base.to_le_bytes());
            out.extend(region.bytes.to_le_bytes());
            let place = match region.place {
                Place::Host => u32::MAX,
                Place::Gpu(n) => n,
            };
            out.extend(place.to_le_bytes());
        }
        put_block(&mut out, self.metadata);
        if let Some(Segments { sent, received }) = self.segments {
            out.extend([sent, received].iter().flat_map(|bytes| bytes.to_le_bytes()));
        }
        out
    }

    pub(super) fn parse(description: &[u8]) -> Result<Description<'_>, Error> {
        let mut fields = Fields(description);
        let mut parse = || {
            let foreign = match &fields.array::<8>()? {
                DESCRIPTION => false,
                FOREIGN => true,
                _ => return None,
            };
            let instance = Instance(fields.array()?);
            let count = fields.u32()?;
            let mut regions = Vec::new();
            for _ in 0..count {
                regions.push(Region {
                    base: fields.u64()?,
                    bytes: fields.u64()?,
                    place: match fields.u32()? {
                        u32::MAX => Place::Host,
                        n => Place::Gpu(n),
                    },
                });
            }
            let metadata = fields.block()?;
            let segments = match foreign {
                true => None,
                false => Some(Segments { sent: fields.u64()?, received: fields.u64()? }),
            };
            fields.0.is_empty().then_some((instance, foreign, regions, metadata, segments))
        };
        let (instance, foreign, regions, metadata, segments) = parse().ok_or_else(|| {
            Error::BadDescription("it is not one of the nixl transport".to_owned())
        })?;
        let (metadata, told) =
            if foreign { (metadata, None) } else { PackerAddress::split(metadata, instance) };
        let spans = Spans::from_peer(regions)?;
        Ok(Description { instance, foreign, segments, spans, metadata, told })
    }
}
