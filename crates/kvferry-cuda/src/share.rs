//! Memory of one process in the addresses of another.
//!
//! A region is told to peers as the allocations it lies in. A plain allocation (`cudaMalloc`, PyTorch's
//! segments) has an IPC handle. Memory from the virtual-memory interface (vLLM's sleep mode, PyTorch's
//! expandable segments) is made of mapped allocations, each of which has a file descriptor: the peer
//! takes a copy of it from this process, as debuggers do, which the kernel allows to the same user
//! where `ptrace` is allowed. A process has a number in its own PID namespace only, so both must be in the same.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};

use kvferry_layout::{Place, Region};
use parking_lot::Mutex;

use super::driver::{Card, IpcHandle, Mapped};
use kvferry_transport::shared::bytes::{Fields, put_block};
use kvferry_transport::{Error, RegionId};

/// A card's large pages. A plain allocation that is no multiple of them is mapped in small ones where a peer opens
/// it, and on an H200 to read 8k tokens in pages of 16 from a pool of 54 GB took six times as long.
const LARGE_PAGE: u64 = 2 << 20;
/// From so many bytes on, small pages are worth a warning.
const MANY_SMALL_PAGES: u64 = 1 << 30;

/// Mappings of peers' memory that this process holds.
static MAPPINGS: AtomicUsize = AtomicUsize::new(0);

/// How many mappings of peers' memory this process holds, for tests that look for leaks.
pub fn mappings() -> usize {
    MAPPINGS.load(Ordering::SeqCst)
}

/// A region of this process, and what lets peers open it.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) region: Region,
    /// Where the first allocation starts.
    base: u64,
    way: Way,
}

#[derive(Debug)]
enum Way {
    /// And the length of the allocation.
    Plain(IpcHandle, u64),
    /// Descriptors of allocations in a row, and their lengths.
    Mapped(Vec<(OwnedFd, u64)>),
}

impl Export {
    pub(crate) fn new(card: &Card, region: Region) -> Result<Self, Error> {
        let owner = card.owner(region.base).map_err(|error| {
            Error::Unsupported(format!(
                "{} bytes at {:#x} are not memory of a GPU ({error}): for the host's memory use local, tcp \
                 or nixl",
                region.bytes, region.base
            ))
        })?;
        if region.place != Place::Gpu(card.ordinal()) || owner != card.ordinal() {
            return Err(Error::Unsupported(format!(
                "{} bytes at {:#x} are said to lie on {} and lie on gpu {owner}, but this transport \
                 works for gpu {}",
                region.bytes,
                region.base,
                region.place,
                card.ordinal()
            )));
        }
        let end = region.base + region.bytes;
        if card.is_plain(region.base)? {
            let (base, bytes) = card.allocation(region.base)?;
            if end > base + bytes {
                return Err(Error::Unsupported(format!(
                    "{} bytes at {:#x} reach beyond their allocation of {bytes} bytes at {base:#x}",
                    region.bytes, region.base
                )));
            }
            return Ok(Self { region, base, way: Way::Plain(card.ipc_handle(base)?, bytes) });
        }
        let (base, _) = card.mapping(region.base)?;
        let (mut parts, mut at) = (vec![], base);
        while at < end {
            let (start, bytes) = card.mapping(at)?;
            if start != at || bytes == 0 {
                return Err(Error::Unsupported(format!("the mapped memory at {at:#x} has gaps")));
            }
            let descriptor = card.export_descriptor(at)?;
            // SAFETY: a new descriptor that nobody else owns.
            parts.push((unsafe { OwnedFd::from_raw_fd(descriptor) }, bytes));
            at += bytes;
        }
        Ok(Self { region, base, way: Way::Mapped(parts) })
    }

    pub(crate) fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.region.base.to_le_bytes());
        out.extend(self.region.bytes.to_le_bytes());
        out.extend(self.base.to_le_bytes());
        match &self.way {
            Way::Plain(handle, _) => {
                out.extend(0u32.to_le_bytes());
                out.extend(handle);
            }
            Way::Mapped(parts) => {
                out.extend((parts.len() as u32).to_le_bytes());
                for (descriptor, bytes) in parts {
                    out.extend((descriptor.as_raw_fd() as u32).to_le_bytes());
                    out.extend(bytes.to_le_bytes());
                }
            }
        }
    }
}

/// How many bytes of plain allocations (base, length) peers open in small pages. Several regions may lie in one.
fn in_small_pages(allocations: impl Iterator<Item = (u64, u64)>) -> u64 {
    let each: BTreeMap<u64, u64> = allocations.collect();
    each.values().filter(|bytes| !bytes.is_multiple_of(LARGE_PAGE)).sum()
}

/// What a transport has registered.
#[derive(Debug, Default)]
pub(crate) struct Exports(Mutex<BTreeMap<RegionId, Arc<Export>>>);

impl Exports {
    pub(crate) fn insert(&self, id: RegionId, export: Export) {
        let mut all = self.0.lock();
        all.insert(id, Arc::new(export));
        let plain = all.values().filter_map(|export| match export.way {
            Way::Plain(_, bytes) => Some((export.base, bytes)),
            Way::Mapped(_) => None,
        });
        let bytes = in_small_pages(plain);
        drop(all);
        if bytes >= MANY_SMALL_PAGES {
            static SAID: Once = Once::new();
            SAID.call_once(|| {
                tracing::warn!(
                    "peers on this host open {bytes} bytes of this card's memory in small pages, and may be several \
                     times slower to read it: the lengths of its allocations are not multiples of 2 MiB"
                );
            });
        }
    }

    pub(crate) fn remove(&self, id: RegionId) {
        self.0.lock().remove(&id);
    }

    pub(crate) fn all(&self) -> Vec<Arc<Export>> {
        self.0.lock().values().cloned().collect()
    }

    /// Refuses what does not lie in one of them.
    pub(crate) fn hold(&self, named: &Region) -> Result<(), Error> {
        let holds = |one: &Region| match (named.end(), one.end()) {
            (Some(end), Some(last)) => one.base <= named.base && end <= last,
            _ => false,
        };
        if self.0.lock().values().any(|export| holds(&export.region)) {
            return Ok(());
        }
        Err(Error::BadDescription(format!(
            "it names {} bytes at {:#x} of this process, which are not registered there (any more): \
             describe that side again",
            named.bytes, named.base
        )))
    }
}

/// What a peer says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Description {
    pub(crate) instance: [u8; 16],
    /// Which host, and which run of it.
    pub(crate) boot: Vec<u8>,
    pub(crate) pid: u32,
    /// The PID namespace that the number is of, where it is known.
    namespace: Option<u64>,
    pub(crate) regions: Vec<Foreign>,
}

/// A region of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Foreign {
    pub(crate) base: u64,
    pub(crate) bytes: u64,
    allocation: u64,
    way: ForeignWay,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ForeignWay {
    Plain(IpcHandle),
    Mapped(Vec<(u32, u64)>),
}

const MAGIC: &[u8; 8] = b"kvfy-cud";
/// What comes before the number of a PID namespace. The release before wrote the UUID of its card in the place of
/// the two and never read it, so that it does not miss it.
const NAMESPACE: &[u8; 8] = b"kvfy-pid";
/// More parts than any region has.
const MAX_PARTS: u32 = 1 << 20;

impl Description {
    pub(crate) fn write(instance: [u8; 16], exports: &[Arc<Export>]) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend(instance);
        put_block(&mut out, &boot());
        out.extend(std::process::id().to_le_bytes());
        out.extend(NAMESPACE);
        out.extend(namespace().unwrap_or(0).to_le_bytes());
        out.extend((exports.len() as u32).to_le_bytes());
        exports.iter().for_each(|export| export.write(&mut out));
        out
    }

    pub(crate) fn read(bytes: &[u8]) -> Result<Self, Error> {
        let mut fields = Fields(bytes);
        let mut read = || {
            if &fields.array::<8>()? != MAGIC {
                return None;
            }
            let (instance, boot) = (fields.array()?, fields.block()?.to_vec());
            let pid = fields.u32()?;
            let (said, number, count) = (fields.array::<8>()?, fields.u64()?, fields.u32()?);
            let namespace = (&said == NAMESPACE && number != 0).then_some(number);
            let mut regions = vec![];
            for _ in 0..count {
                let (base, bytes, allocation) = (fields.u64()?, fields.u64()?, fields.u64()?);
                let parts = fields.u32()?;
                let way = match parts {
                    0 => ForeignWay::Plain(fields.array()?),
                    1..=MAX_PARTS => {
                        let part = |_| Some((fields.u32()?, fields.u64()?));
                        ForeignWay::Mapped((0..parts).map(part).collect::<Option<_>>()?)
                    }
                    _ => return None,
                };
                // The region must lie inside of what is opened.
                let within = base.checked_sub(allocation)?.checked_add(bytes)?;
                if let ForeignWay::Mapped(parts) = &way {
                    let all = parts.iter().try_fold(0u64, |all, part| all.checked_add(part.1));
                    all.filter(|all| within <= *all)?;
                }
                regions.push(Foreign { base, bytes, allocation, way });
            }
            fields.0.is_empty().then_some(Self { instance, boot, pid, namespace, regions })
        };
        read()
            .ok_or_else(|| Error::BadDescription("it is not one of the cuda transport".to_owned()))
    }

    /// Whether the peer is on this host.
    pub(crate) fn is_here(&self) -> bool {
        self.boot == boot()
    }

    /// Refuses to look for the peer by the number of its process where that may be another's here.
    fn same_numbers(&self) -> Result<(), Error> {
        let ours = namespace();
        if self.namespace.is_some() && self.namespace == ours && !self.boot.is_empty() {
            return Ok(());
        }
        let said = |number: Option<u64>| number.map_or("unknown".to_owned(), |n| n.to_string());
        Err(Error::Unsupported(format!(
            "the peer's GPU memory is from CUDA's virtual-memory interface, which is taken from its process, and \
             process {} of its PID namespace ({}) may be another process of this one ({}): let both share the \
             host's PID namespace (hostPID: true, --pid=host), update kvferry on the older side if one is unknown, \
             or use nixl",
            self.pid,
            said(self.namespace),
            said(ours)
        )))
    }
}

/// Names the PID namespace of this process among those of this host.
fn namespace() -> Option<u64> {
    std::fs::metadata("/proc/self/ns/pid").ok().map(|link| link.ino())
}

/// Names this run of this host.
fn boot() -> Vec<u8> {
    let id = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    id.trim_ascii().to_vec()
}

/// A peer's memory, open in this process. It stays valid while it is open, even if the peer dies.
#[derive(Debug)]
pub(crate) struct Opened {
    card: Card,
    what: What,
}

#[derive(Debug)]
enum What {
    /// An allocation, by its first address here.
    Plain(IpcHandle, u64),
    #[expect(dead_code, reason = "held until it is dropped")]
    Mapped(Mapped),
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let What::Plain(_, base) = self.what {
            // SAFETY: opened for this value; operations that use it hold it.
            if let Err(error) = unsafe { self.card.ipc_close(base) } {
                tracing::warn!("a peer's memory stays mapped: {error}");
            }
        }
        MAPPINGS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Opens a peer's region; answers what to add to the peer's addresses. What holds it open goes to `opened`. An
/// allocation is opened once: it is looked for there, and in what was open before.
pub(crate) fn open(
    card: &Card,
    peer: &Description,
    foreign: &Foreign,
    before: &[Arc<Opened>],
    opened: &mut Vec<Arc<Opened>>,
) -> Result<u64, Error> {
    match &foreign.way {
        ForeignWay::Plain(handle) => {
            let known = |all: &[Arc<Opened>]| {
                let base = |one: &Arc<Opened>| match &one.what {
                    What::Plain(other, base) if other == handle => Some((one.clone(), *base)),
                    _ => None,
                };
                all.iter().find_map(base)
            };
            let base = match (known(opened), known(before)) {
                (Some((_, base)), _) => base,
                (None, Some((one, base))) => {
                    opened.push(one);
                    base
                }
                (None, None) => {
                    let base = card.ipc_open(handle)?;
                    let what = What::Plain(*handle, base);
                    MAPPINGS.fetch_add(1, Ordering::SeqCst);
                    opened.push(Arc::new(Opened { card: card.clone(), what }));
                    base
                }
            };
            let (_, bytes) = card.allocation(base)?;
            let within = foreign.base - foreign.allocation;
            if within.checked_add(foreign.bytes).is_none_or(|end| end > bytes) {
                return Err(Error::BadDescription(format!(
                    "{} bytes at {:#x} reach beyond their allocation of {bytes} bytes at {:#x}",
                    foreign.bytes, foreign.base, foreign.allocation
                )));
            }
            Ok(base.wrapping_sub(foreign.allocation))
        }
        // These are taken anew each time: the number of a descriptor may be another one's by now.
        ForeignWay::Mapped(parts) => {
            peer.same_numbers()?;
            let sizes: Vec<u64> = parts.iter().map(|&(_, bytes)| bytes).collect();
            let mapped = card.map(&sizes, |number| take_descriptor(peer.pid, parts[number].0))?;
            let shift = mapped.base().wrapping_sub(foreign.allocation);
            MAPPINGS.fetch_add(1, Ordering::SeqCst);
            opened.push(Arc::new(Opened { card: card.clone(), what: What::Mapped(mapped) }));
            Ok(shift)
        }
    }
}

/// A copy of another process's descriptor.
fn take_descriptor(pid: u32, descriptor: u32) -> Result<OwnedFd, Error> {
    let failed = |what: String| {
        let error = io::Error::last_os_error();
        Error::system(
            format!(
                "{what} (run both processes as the same user; in containers, share the PID namespace \
                 and allow ptrace: CAP_SYS_PTRACE)"
            ),
            &error,
        )
    };
    // SAFETY: the calls take integers and touch no memory of ours.
    unsafe {
        let process = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        if process < 0 {
            return Err(failed(format!("looking for process {pid}")));
        }
        // SAFETY: a new descriptor that nobody else owns.
        let process = OwnedFd::from_raw_fd(process as i32);
        let taken = libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), descriptor, 0);
        if taken < 0 {
            return Err(failed(format!("taking descriptor {descriptor} of process {pid}")));
        }
        // SAFETY: as above.
        Ok(OwnedFd::from_raw_fd(taken as i32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn description() -> Vec<u8> {
        let mut out = Description::write([7; 16], &[]);
        let count = out.len() - 4;
        out[count..].copy_from_slice(&2u32.to_le_bytes());
        for word in [1000u64, 50, 900] {
            out.extend(word.to_le_bytes());
        }
        out.extend(0u32.to_le_bytes());
        out.extend([3; 64]);
        for word in [2000u64, 50, 2000] {
            out.extend(word.to_le_bytes());
        }
        out.extend(1u32.to_le_bytes());
        out.extend(5u32.to_le_bytes());
        out.extend(50u64.to_le_bytes());
        out
    }

    #[test]
    fn what_is_written_is_read_back() {
        let read = Description::read(&description()).unwrap();
        assert!(read.is_here());
        assert_eq!((read.pid, read.namespace), (std::process::id(), namespace()));
        assert_eq!(read.same_numbers(), Ok(()));
        assert_eq!(read.regions[0].way, ForeignWay::Plain([3; 64]));
        assert_eq!(read.regions[1].way, ForeignWay::Mapped(vec![(5, 50)]));
    }

    /// The release before wrote its card's UUID where the PID namespace is said, and read nothing there.
    #[test]
    fn a_description_of_the_release_before_has_an_unknown_namespace() {
        let (now, mut then) = (description(), description());
        let at = now.windows(8).position(|part| part == NAMESPACE).unwrap();
        then[at..at + 16].fill(9);
        let (now, then) = (Description::read(&now).unwrap(), Description::read(&then).unwrap());
        assert_eq!(then, Description { namespace: None, ..now });
        assert!(matches!(then.same_numbers(), Err(Error::Unsupported(_))));
    }

    #[test]
    fn allocations_that_are_no_whole_pages_add_up() {
        let many = [(0, LARGE_PAGE), (10, 1000), (20, LARGE_PAGE + 1), (20, LARGE_PAGE + 1)];
        assert_eq!(in_small_pages(many.into_iter()), 1000 + LARGE_PAGE + 1);
    }

    #[test]
    fn a_number_of_another_or_an_unknown_namespace_is_refused() {
        let same = Description::read(&description()).unwrap();
        for namespace in [None, same.namespace.map(|number| number + 1)] {
            let other = Description { namespace, ..same.clone() };
            let error = other.same_numbers().unwrap_err().to_string();
            assert!(error.contains("hostPID: true, --pid=host"), "{error}");
        }
    }

    #[test]
    fn a_cut_or_false_description_is_refused() {
        let whole = description();
        for bytes in 0..whole.len() {
            assert!(Description::read(&whole[..bytes]).is_err(), "{bytes} bytes are enough");
        }
        let mut short = whole.clone();
        // The mapped allocation is shorter than its region.
        let last = short.len() - 8;
        short[last..].copy_from_slice(&49u64.to_le_bytes());
        assert!(Description::read(&short).is_err());
        assert!(Description::read(&[whole, vec![0]].concat()).is_err());
    }

    #[test]
    fn a_descriptor_of_another_process_that_is_not_there_is_an_error() {
        assert!(matches!(take_descriptor(u32::MAX - 1, 3), Err(Error::System { .. })));
    }
}
