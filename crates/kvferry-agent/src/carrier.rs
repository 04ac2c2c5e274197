//! A transport, whichever it is.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use kvferry_transport::{ByteCopy, Error, Operation, Price, Transport};

/// A transport whose memory is registered, behind one type for all back ends.
pub trait Carrier: fmt::Debug + Send + Sync {
    /// The back end's name.
    fn name(&self) -> &'static str;
    /// What a peer needs to reach the registered memory.
    fn describe(&self) -> Result<Vec<u8>, Error>;
    /// Connects to the rank that gave this description.
    fn connect(&self, description: &[u8], deadline: Instant) -> Result<Box<dyn Source>, Error>;
}

/// A rank that can be read. Dropping it ends the connection, unless that was done before.
pub trait Source: fmt::Debug + Send + Sync {
    /// What its transport takes for reads from it.
    fn price(&self) -> Price;
    /// Starts to read.
    fn read(&self, copies: &[ByteCopy], deadline: Instant) -> Result<Box<dyn Operation>, Error>;
    /// Ends the connection; reads under way fail. Only the first call does anything: the same rank
    /// may have been connected to again since.
    fn disconnect(&self);
}

/// Makes a [`Carrier`] of a transport.
pub fn carry<T: Transport + fmt::Debug>(transport: Arc<T>) -> Arc<dyn Carrier> {
    Arc::new(Carried(transport))
}

#[derive(Debug)]
struct Carried<T>(Arc<T>);

struct Connected<T: Transport> {
    transport: Arc<T>,
    peer: T::Peer,
    ended: AtomicBool,
}

impl<T: Transport> fmt::Debug for Connected<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.peer.fmt(f)
    }
}

impl<T: Transport + fmt::Debug> Carrier for Carried<T> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn describe(&self) -> Result<Vec<u8>, Error> {
        self.0.describe()
    }

    fn connect(&self, description: &[u8], deadline: Instant) -> Result<Box<dyn Source>, Error> {
        let peer = self.0.connect(description, deadline)?;
        Ok(Box::new(Connected { transport: self.0.clone(), peer, ended: AtomicBool::new(false) }))
    }
}

impl<T: Transport> Source for Connected<T> {
    fn price(&self) -> Price {
        self.transport.price(&self.peer)
    }

    fn read(&self, copies: &[ByteCopy], deadline: Instant) -> Result<Box<dyn Operation>, Error> {
        let operation = self.transport.read(&self.peer, copies, deadline)?;
        Ok(Box::new(operation))
    }

    fn disconnect(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            self.transport.disconnect(&self.peer);
        }
    }
}

impl<T: Transport> Drop for Connected<T> {
    fn drop(&mut self) {
        self.disconnect();
    }
}
