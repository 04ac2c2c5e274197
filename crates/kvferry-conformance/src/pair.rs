//! Two processes, and what the tests do with them.

use std::time::{Duration, Instant};

use kvferry_testkit::one_by_one;
use kvferry_testkit::random::Dice;
use kvferry_transport::{ByteCopy, Error, Operation, Status, Transport};

use crate::back_end::BackEnd;
use crate::data::pattern;
use crate::memory::Memory;
use crate::peer::Peer;

pub(crate) const MIB: usize = 1 << 20;
pub(crate) const PEER_SEED: u64 = 1;
pub(crate) const OUR_SEED: u64 = 2;

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

pub(crate) fn rounds(usual: usize) -> usize {
    if std::env::var_os(crate::LONG).is_some() { usual * 10 } else { usual }
}

/// Two processes: this one with a transport and memory of its own, and a connected peer.
///
/// Fields are dropped in this order: the transport before the memory.
pub(crate) struct Pair<B: BackEnd> {
    pub(crate) transport: B::Transport,
    pub(crate) peer: <B::Transport as Transport>::Peer,
    pub(crate) process: Peer,
    pub(crate) ours: B::Memory,
    pub(crate) bytes: usize,
}

impl<B: BackEnd> Pair<B> {
    pub(crate) fn new(bytes: usize) -> Self {
        let process = Peer::start::<B>(bytes, PEER_SEED);
        let ours = B::Memory::new(bytes);
        ours.write(0, &pattern(OUR_SEED, bytes));
        let transport = B::new().unwrap();
        // SAFETY: the memory outlives the transport, and is only touched through its address.
        unsafe { transport.register(ours.region()) }.unwrap();
        let peer = transport.connect(&process.description, soon()).unwrap();
        Self { transport, peer, process, ours, bytes }
    }

    /// A copy from the peer to us, by offsets.
    pub(crate) fn inward(&self, from: usize, to: usize, bytes: usize) -> ByteCopy {
        ByteCopy {
            source: self.process.base + from as u64,
            destination: self.ours.base() + to as u64,
            bytes: bytes as u64,
        }
    }

    pub(crate) fn read(&self, copies: &[ByteCopy]) -> <B::Transport as Transport>::Operation {
        self.transport.read(&self.peer, &one_by_one(copies), soon()).unwrap()
    }

    /// Reads all of the peer's memory.
    pub(crate) fn read_all(&self) -> <B::Transport as Transport>::Operation {
        self.read(&[self.inward(0, 0, self.bytes)])
    }
}

pub(crate) fn done(operation: &impl Operation) {
    let status = operation.wait(soon());
    assert!(matches!(status, Status::Done(_)), "{status:?}");
}

/// The error of an operation that must be refused, by the call or later.
pub(crate) fn refused<O: Operation>(result: Result<O, Error>) -> Error {
    match result {
        Err(error) => error,
        Ok(operation) => match operation.wait(soon()) {
            Status::Failed(error) => error,
            other => panic!("was not refused: {other:?}"),
        },
    }
}

/// How a list of copies is to be carried out, by offsets: from, to, bytes.
pub(crate) type Plan = Vec<(usize, usize, usize)>;

/// Random pieces whose destinations do not overlap.
pub(crate) fn scatter(dice: &mut Dice, bytes: usize, copies: usize) -> Plan {
    let cell = bytes / copies;
    let mut cells: Vec<usize> = (0..copies).collect();
    dice.shuffle(&mut cells);
    cells
        .into_iter()
        .map(|at| {
            // Often a short piece, sometimes a whole cell, so that neighbours touch.
            let length = match dice.index(4) {
                0 => cell,
                1 => 1 + dice.index(cell.min(16)),
                _ => 1 + dice.index(cell),
            };
            let to = at * cell + dice.index(cell - length + 1);
            let from = match dice.index(3) {
                0 => to,
                _ => dice.index(bytes - length + 1),
            };
            (from, to, length)
        })
        .collect()
}

pub(crate) fn carry_out(plan: &Plan, source: &[u8], destination: &mut [u8]) {
    for &(from, to, bytes) in plan {
        destination[to..to + bytes].copy_from_slice(&source[from..from + bytes]);
    }
}
