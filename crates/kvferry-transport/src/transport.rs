//! What every back end promises.

use std::fmt;
use std::time::{Duration, Instant};

use crate::error::Error;
use crate::region::RegionId;
use kvferry_layout::{ByteCopy, Loops, Price, Region};

/// Moves lists of copies between registered memory of this process and of its peers.
///
/// A transport knows addresses and bytes, and nothing of what they mean. All back ends keep the
/// same promises, and one conformance suite holds each of them to them:
///
/// * **Exact.** When an operation is [`Status::Done`], every byte of every copy is at its
///   destination, and no other byte of registered memory has changed.
/// * **Registered memory only.** A copy that touches a byte outside the registered regions, on
///   either side, is refused: by the call, or by [`Status::Failed`] with
///   [`Error::OutsideRegion`]. Nothing a peer sends makes this process read or write elsewhere.
/// * **Notification after data, once.** A notification attached to an operation reaches the peer
///   after all of the operation's bytes are at their destination, and exactly once. It is never
///   sent for an operation that does not end in [`Status::Done`] — with one exception that no
///   transport can avoid: when the peer or the deadline intervenes while the notification itself
///   is on its way, the peer may have it although the operation failed.
/// * **Deadlines hold.** Each operation has one. When it passes, the operation fails with
///   [`Error::DeadlinePassed`], whatever state the peer is in: dead, stopped or unreachable.
/// * **Quarantine.** A destination is safe to reuse when [`Status::is_safe`] says so, and not
///   before: until then bytes may still land there. An operation that has failed or was cancelled
///   but can still write is [`Status::Quarantined`]. It becomes [`Status::Failed`] by itself when
///   nothing can land any more. How long that takes is up to the back end and the peer: `local`
///   and `tcp` reads settle at once, `nixl` only when the peer answers or is known to be dead.
/// * **Posting is cheap.** [`read`](Self::read) and [`write`](Self::write) check and hand over;
///   they do not wait for the bytes to move.
/// * **Idle is idle.** A transport without operations uses no CPU time to speak of.
/// * **Nothing leaks.** Dropping the transport ends its threads, closes its descriptors and frees
///   its memory. It ends every operation first: after the drop nothing lands any more.
///
/// A peer that restarts is a new peer, with a new description: connect to it, and disconnect the old
/// one. A peer that was lost keeps its place, and a few threads, until it is disconnected.
pub trait Transport: Send + Sync + Sized + 'static {
    /// A connected peer. Cheap to clone.
    type Peer: Clone + fmt::Debug + Send + Sync + 'static;
    /// A read or write under way.
    type Operation: Operation;

    /// The back end's name: `local`, `tcp`, `cuda` or `nixl`.
    fn name(&self) -> &'static str;

    /// Registers memory: from now on connected peers may read and write it, and operations of this
    /// process may use it. Few large regions are better than many small ones. Regions must not
    /// overlap.
    ///
    /// # Safety
    ///
    /// Until [`deregister`](Self::deregister) has returned `Ok` or the transport is dropped, the
    /// memory must stay mapped (for a GPU: allocated), and no reference may exist to it that
    /// assumes that its content does not change: peers write it at any time.
    unsafe fn register(&self, region: Region) -> Result<RegionId, Error>;

    /// Takes a region back. After `Ok` nothing touches it any more.
    ///
    /// Waits until `deadline` for the operations of this process that use it, and then answers
    /// [`Error::RegionBusy`]. Peers that are reading or writing it are waited for as long, and then
    /// cut off. A one-sided transport (`local`, `nixl`) cannot see its peers' reads: there, as the
    /// design has it, the lease on the memory must have ended.
    fn deregister(&self, region: RegionId, deadline: Instant) -> Result<(), Error>;

    /// What a peer needs to reach the memory registered so far, as bytes to carry to it. It holds
    /// the secret that opens the door: give it only to peers that may read and write the regions.
    fn describe(&self) -> Result<Vec<u8>, Error>;

    /// Connects to the peer that gave this description. Take descriptions only from peers that have
    /// proven who they are: back ends that use a library hand parts of it on. Connecting again with a newer description
    /// of the same peer brings its regions up to date.
    fn connect(&self, description: &[u8], deadline: Instant) -> Result<Self::Peer, Error>;

    /// Ends the connection. Operations under way fail with [`Error::Disconnected`].
    fn disconnect(&self, peer: &Self::Peer);

    /// What this transport takes for reads from the peer, as far as it knows.
    fn price(&self, peer: &Self::Peer) -> Price;

    /// Starts to copy from the peer's memory into this process's. All of it must have arrived by
    /// `deadline`. The peer gets `notification`, if one is given, after the last byte.
    fn read(
        &self,
        peer: &Self::Peer,
        copies: &[ByteCopy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<Self::Operation, Error>;

    /// Like [`read`](Self::read), for copies that are described as loops over tables of blocks, and
    /// without a notification. Back ends that walk loops themselves never make a list of them.
    fn read_loops(
        &self,
        peer: &Self::Peer,
        loops: &Loops,
        deadline: Instant,
    ) -> Result<Self::Operation, Error> {
        let copies: Vec<ByteCopy> = loops.copies().collect();
        self.read(peer, &copies, None, deadline)
    }

    /// Starts to copy from this process's memory into the peer's; otherwise like
    /// [`read`](Self::read).
    fn write(
        &self,
        peer: &Self::Peer,
        copies: &[ByteCopy],
        notification: Option<&[u8]>,
        deadline: Instant,
    ) -> Result<Self::Operation, Error>;

    /// The notifications that have arrived, in the order of their arrival. Waits for the first
    /// until `until`; an instant that has passed means no wait.
    fn notifications(&self, until: Instant) -> Result<Vec<Notification>, Error>;

    /// What this transport has done so far.
    fn statistics(&self) -> Statistics;
}

/// A read or write under way.
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

/// Where an operation stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// Bytes are moving.
    InProgress,
    /// Every byte is at its destination, and nothing more will land there.
    Done(Report),
    /// The operation has failed, but bytes may still land in its destination: keep the destination
    /// out of use.
    Quarantined(Error),
    /// The operation has failed and nothing more will land. What the destination holds is
    /// undefined.
    Failed(Error),
}

impl Status {
    /// Whether the destination may be put to another use: nothing of this operation will land
    /// there any more.
    pub fn is_safe(&self) -> bool {
        match self {
            Self::Done(_) | Self::Failed(_) => true,
            Self::InProgress | Self::Quarantined(_) => false,
        }
    }

    /// Whether the outcome is known: done, or why not.
    pub fn outcome(&self) -> Option<Result<&Report, &Error>> {
        match self {
            Self::InProgress => None,
            Self::Done(report) => Some(Ok(report)),
            Self::Quarantined(error) | Self::Failed(error) => Some(Err(error)),
        }
    }
}

/// What an operation did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Bytes moved.
    pub bytes: u64,
    /// Copies asked for.
    pub copies: u64,
    /// Copies posted, after merging those that touch.
    pub copies_posted: u64,
    /// How long the call that started it took.
    pub time_to_post: Duration,
    /// From the end of that call to the last byte (and, where the back end waits for it, the
    /// receipt of the notification).
    pub time_on_wire: Duration,
}

impl Report {
    /// Bytes per second from the call to the end; `None` when that was too short to tell.
    pub fn rate(&self) -> Option<f64> {
        let seconds = (self.time_to_post + self.time_on_wire).as_secs_f64();
        (seconds > 0.0).then(|| self.bytes as f64 / seconds)
    }
}

/// Names one run of one transport. A restarted process has another.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Instance(pub [u8; 16]);

impl fmt::Display for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Instance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Instance({self})")
    }
}

/// A message that came with a peer's operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// Who sent it.
    pub from: Instance,
    /// What it says.
    pub message: Vec<u8>,
}

/// The longest notification.
pub const MAX_NOTIFICATION_BYTES: usize = 64 * 1024;

/// Sums over all operations of a transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Operations started.
    pub started: u64,
    /// Operations that ended well.
    pub done: u64,
    /// Operations that failed, by deadline, cancellation or otherwise.
    pub failed: u64,
    /// Failed operations whose destination is not safe yet.
    pub quarantined: u64,
    /// Bytes moved by operations that ended well.
    pub bytes: u64,
    /// Copies they were asked for.
    pub copies: u64,
    /// Copies they posted, after merging.
    pub copies_posted: u64,
    /// Time the calls that started them took, together.
    pub time_to_post: Duration,
    /// Their time on the wire, together.
    pub time_on_wire: Duration,
}
