//! A transport, whichever it is.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvferry_digest::{Digest, Program};
use kvferry_transport::{Error, Loops, Operation, StagingStatistics, Transport};

/// A transport whose memory is registered, behind one type for all back ends.
pub trait Carrier: fmt::Debug + Send + Sync {
    /// The back end's name.
    fn name(&self) -> &'static str;
    /// What a peer needs to reach the registered memory.
    fn describe(&self) -> Result<Vec<u8>, Error>;
    /// Connects to the rank that gave this description.
    fn connect(&self, description: &[u8], deadline: Instant) -> Result<Box<dyn Source>, Error>;
    /// The addresses that it would connect to for that, as far as they are known before.
    fn endpoints(&self, description: &[u8]) -> Vec<SocketAddr> {
        let _ = description;
        vec![]
    }
    /// The digests of a program's parts, which lie in the registered memory. A carrier that has no
    /// means to look at it answers [`Error::Unsupported`].
    fn digest(&self, program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
        let _ = (program, deadline);
        Err(Error::Unsupported(format!("{} cannot look at its memory", self.name())))
    }
    /// What the memory to pack into for peers is used for.
    fn staging(&self) -> StagingStatistics {
        StagingStatistics::default()
    }
    /// Connections that its ports for data turned away: those that proved nothing, and those too many.
    fn turned_away(&self) -> u64 {
        0
    }
}

/// The way that was chosen to a rank, of several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    /// The transport that reads it.
    pub transport: &'static str,
    /// Why none of those that would be better does, each by its name; empty where it is the best.
    pub not_by: String,
}

/// A rank that can be read. Dropping it ends the connection, unless that was done before.
pub trait Source: fmt::Debug + Send + Sync {
    /// Whether what is read from it is encrypted on its way.
    fn is_encrypted(&self) -> bool {
        false
    }
    /// The way to it, where its carrier has several.
    fn chosen(&self) -> Option<&Chosen> {
        None
    }
    /// Runs of fewer bytes than this arrive earlier packed; 0 where nothing can be.
    fn packs_below(&self) -> u64 {
        0
    }
    /// Starts to read what loops describe. If this or the next panics, it has started nothing.
    fn read(&self, loops: &Loops, deadline: Instant) -> Result<Box<dyn Operation>, Error>;
    /// Starts to read what loops describe, packed by the source where it can.
    fn read_packed(&self, loops: &Loops, deadline: Instant) -> Result<Box<dyn Operation>, Error> {
        self.read(loops, deadline)
    }
    /// Ends the connection; reads under way fail. Only the first call does anything: the same rank
    /// may have been connected to again since.
    fn disconnect(&self);
}

/// Makes a [`Carrier`] of a transport.
pub fn carry<T: Transport + fmt::Debug>(transport: Arc<T>) -> Arc<dyn Carrier> {
    Arc::new(Carried(Arc::new(Keeping { transport, _memory: () })))
}

/// Makes a [`Carrier`] of a transport that keeps its registered memory alive. Whoever uses the
/// transport, an agent, a connection or a read under way, shares it: `memory` is dropped after the last
/// of them, when the transport is gone and nothing can touch the memory any more.
pub fn carry_with<T, M>(transport: T, memory: M) -> Arc<dyn Carrier>
where
    T: Transport + fmt::Debug,
    M: Send + Sync + 'static,
{
    let transport = Arc::new(transport);
    Arc::new(Carried(Arc::new(Keeping { transport, _memory: memory })))
}

/// A transport and what keeps its memory alive. Fields are dropped in order: the memory last.
struct Keeping<T, M> {
    transport: Arc<T>,
    _memory: M,
}

struct Carried<T, M>(Arc<Keeping<T, M>>);

impl<T: fmt::Debug, M> fmt::Debug for Carried<T, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.transport.fmt(f)
    }
}

struct Connected<T: Transport, M> {
    keeping: Arc<Keeping<T, M>>,
    peer: T::Peer,
    ended: AtomicBool,
}

impl<T: Transport, M> fmt::Debug for Connected<T, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.peer.fmt(f)
    }
}

impl<T, M> Carrier for Carried<T, M>
where
    T: Transport + fmt::Debug,
    M: Send + Sync + 'static,
{
    fn name(&self) -> &'static str {
        self.0.transport.name()
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        self.0.transport.describe()
    }

    fn connect(&self, description: &[u8], deadline: Instant) -> Result<Box<dyn Source>, Error> {
        let peer = self.0.transport.connect(description, deadline)?;
        Ok(Box::new(Connected { keeping: self.0.clone(), peer, ended: AtomicBool::new(false) }))
    }

    fn endpoints(&self, description: &[u8]) -> Vec<SocketAddr> {
        self.0.transport.endpoints(description)
    }

    fn staging(&self) -> StagingStatistics {
        self.0.transport.staging()
    }

    fn turned_away(&self) -> u64 {
        self.0.transport.statistics().turned_away
    }

    fn digest(&self, program: &Program, deadline: Instant) -> Result<Vec<Digest>, Error> {
        self.0.transport.digest(program, deadline)
    }
}

impl<T: Transport, M: Send + Sync + 'static> Source for Connected<T, M> {
    fn is_encrypted(&self) -> bool {
        self.keeping.transport.is_encrypted(&self.peer)
    }

    fn packs_below(&self) -> u64 {
        self.keeping.transport.packs_below(&self.peer)
    }

    fn read(&self, loops: &Loops, deadline: Instant) -> Result<Box<dyn Operation>, Error> {
        let operation = self.keeping.transport.read(&self.peer, loops, deadline)?;
        Ok(Box::new(operation))
    }

    fn read_packed(&self, loops: &Loops, deadline: Instant) -> Result<Box<dyn Operation>, Error> {
        let operation = self.keeping.transport.read_packed(&self.peer, loops, deadline)?;
        Ok(Box::new(operation))
    }

    fn disconnect(&self) {
        self.end();
    }
}

impl<T: Transport, M> Connected<T, M> {
    fn end(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            self.keeping.transport.disconnect(&self.peer);
        }
    }
}

impl<T: Transport, M> Drop for Connected<T, M> {
    fn drop(&mut self) {
        self.end();
    }
}
