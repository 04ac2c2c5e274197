//! What every back end promises.

use std::fmt;
use std::net::SocketAddr;
use std::time::Instant;

use kvferry_digest::{Digest, Program};
use kvferry_layout::{Loops, Region};

use super::error::Error;
use super::status::{RegionId, StagingStatistics, Statistics, Status};

/// Carries out loops from registered memory of its peers into registered memory of this process.
///
/// A transport knows addresses and bytes, and nothing of what they mean. It reads; nobody writes into
/// a peer's memory. All back ends keep the same promises, and one conformance suite holds each of
/// them to them:
///
/// * **Exact.** When an operation is [`Status::Done`], every byte of every run is at its
///   destination, and no other byte of registered memory has changed.
/// * **Registered memory only.** A run that touches a byte outside the registered regions, on
///   either side, is refused: by the call, or by [`Status::Failed`] with
///   [`Error::OutsideRegion`]. Nothing a peer sends makes this process read or write elsewhere.
/// * **Deadlines hold.** Each operation has one. When it passes, the operation fails with
///   [`Error::DeadlinePassed`], whatever state the peer is in: dead, stopped or unreachable.
/// * **Quarantine.** A destination is safe to reuse when [`Status::is_safe`] says so, and not
///   before: until then bytes may still land there. An operation that has failed or was cancelled
///   but can still write is [`Status::Quarantined`]. It becomes [`Status::Failed`] by itself when
///   nothing can land any more. How long that takes is up to the back end and the peer: `local`
///   and `tcp` settle at once, `cuda` when the kernel under way has ended, `nixl` only when the peer answers or is known to be dead.
/// * **Posting is cheap.** [`read`](Self::read) checks and hands over; it does not wait for the
///   bytes to move.
/// * **Idle is idle.** A transport without operations uses no CPU time to speak of.
/// * **Nothing leaks.** Dropping the transport ends its threads, closes its descriptors and frees
///   its memory. It ends every operation first: after the drop nothing lands any more.
///
/// A peer that restarts is a new peer, with a new description: connect to it, and disconnect the old
/// one. A peer that was lost keeps its place, and a few threads, until it is disconnected.
pub trait Transport: Send + Sync + Sized + 'static {
    /// A connected peer. Cheap to clone.
    type Peer: Clone + fmt::Debug + Send + Sync + 'static;
    /// A read under way.
    type Operation: Operation;

    /// The back end's name: `local`, `tcp`, `cuda` or `nixl`.
    fn name(&self) -> &'static str;

    /// Registers memory: from now on connected peers may read it, and operations of this process
    /// may read into it. Few large regions are better than many small ones. Regions must not
    /// overlap.
    ///
    /// # Safety
    ///
    /// Until [`deregister`](Self::deregister) has returned `Ok` or the transport is dropped, the
    /// memory must stay mapped (for a GPU: allocated), and no reference may exist to it that
    /// assumes that its content does not change: operations write it at any time.
    unsafe fn register(&self, region: Region) -> Result<RegionId, Error>;

    /// Takes a region back. After `Ok` nothing touches it any more.
    ///
    /// Waits until `deadline` for the operations of this process that use it, and then answers
    /// [`Error::RegionBusy`]. Peers that are reading it are waited for as long, and then cut off. A
    /// one-sided transport (`local`, `cuda`, `nixl`) cannot see its peers' reads: there, as the design has
    /// it, the lease on the memory must have ended.
    fn deregister(&self, region: RegionId, deadline: Instant) -> Result<(), Error>;

    /// What a peer needs to reach the memory registered so far, as bytes to carry to it. It holds
    /// the secret that opens the door: give it only to peers that may read the regions.
    fn describe(&self) -> Result<Vec<u8>, Error>;

    /// Connects to the peer that gave this description. Take descriptions only from peers that have
    /// proven who they are: back ends that use a library hand parts of it on. Connecting again with
    /// a newer description of the same peer brings its regions up to date.
    fn connect(&self, description: &[u8], deadline: Instant) -> Result<Self::Peer, Error>;

    /// The addresses that [`connect`](Self::connect) would connect to with this description, as far as the back end
    /// connects itself: for owners who do not let a peer name just any. What a library makes of its part of the
    /// description is not known, and what cannot be read names none.
    fn endpoints(&self, description: &[u8]) -> Vec<SocketAddr> {
        let _ = description;
        vec![]
    }

    /// Ends the connection. Operations under way fail with [`Error::Disconnected`].
    fn disconnect(&self, peer: &Self::Peer);

    /// Whether what is read from the peer is encrypted on its way.
    fn is_encrypted(&self, peer: &Self::Peer) -> bool {
        let _ = peer;
        false
    }

    /// Starts to copy what loops describe from the peer's memory into this process's. All of it must have
    /// arrived by `deadline`.
    fn read(
        &self,
        peer: &Self::Peer,
        loops: &Loops,
        deadline: Instant,
    ) -> Result<Self::Operation, Error>;

    /// The digests of a program's parts, all of which must lie in memory registered here. Waits for
    /// them, `deadline` at most. A back end that has no means to look at its memory answers
    /// [`Error::Unsupported`].
    fn digest(&self, program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
        let _ = (program, deadline);
        Err(Error::Unsupported(format!("{} cannot look at its memory", self.name())))
    }

    /// Runs of fewer bytes than this arrive earlier [packed](Self::read_packed): a constant of the back end, for
    /// what carries the bytes and for the kind of memory that they are in. 0 where the peer does not pack.
    fn packs_below(&self, peer: &Self::Peer) -> u64 {
        let _ = peer;
        0
    }

    /// Like [`read`](Self::read), but packed: the peer gathers its runs into a buffer, that
    /// is moved in one piece, and this side scatters it. For loops of many short runs, which are slow
    /// one by one. Where the peer cannot ([`packs_below`](Self::packs_below) says so) or has no buffer left, the
    /// runs are read one by one after all.
    fn read_packed(
        &self,
        peer: &Self::Peer,
        loops: &Loops,
        deadline: Instant,
    ) -> Result<Self::Operation, Error> {
        self.read(peer, loops, deadline)
    }

    /// What the memory to pack into for peers is used for. Without any, all zeros.
    fn staging(&self) -> StagingStatistics {
        StagingStatistics::default()
    }

    /// What this transport has done so far.
    fn statistics(&self) -> Statistics;
}

/// A read under way.
///
/// Dropping it before it has ended cancels it. The regions it touches stay held until it is safe,
/// and [`Transport::deregister`] waits for that.
pub trait Operation: fmt::Debug + Send + 'static {
    /// Where the operation stands. Never blocks.
    fn poll(&self) -> Status;

    /// Like [`poll`](Self::poll), but waits until the destination is safe ([`Status::is_safe`]) or
    /// `until` has come, whichever is first.
    fn wait(&self, until: Instant) -> Status;

    /// Asks the operation to end. Never blocks: [`poll`](Self::poll) says when the destination is
    /// safe. An operation that has ended stays as it is.
    fn cancel(&self);
}
