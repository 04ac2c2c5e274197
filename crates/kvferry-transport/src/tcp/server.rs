//! Serves this process's registered memory.

use std::net::{Shutdown, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use socket2::SockRef;

use super::bounds::Bounds;
use super::connections::{Delivery, Generation, Shared};
use super::door::Door;
use super::proof::Secret;
use crate::contract::Error;
use crate::ports;
use crate::shared::io::IoThreads;
use crate::shared::packing_area::PackingAreas;
use crate::shared::region::Regions;

/// Serves registered memory at one port.
#[derive(Debug)]
pub struct Server {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
    /// After all that they serve.
    _io: Arc<IoThreads>,
}

impl Server {
    /// Starts to listen, at one of these ports.
    pub fn start(
        (bind, ports): (SocketAddr, Option<&RangeInclusive<u16>>),
        bounds: Bounds,
        secret: Secret,
        regions: Arc<Regions>,
        generation: Arc<dyn Generation>,
        areas: Arc<PackingAreas>,
        delivery: Delivery,
    ) -> Result<Self, Error> {
        let listener = ports::listen(bind, ports, TcpListener::bind).map_err(|error| {
            Error::system(format!("listening on {}", ports::place(bind, ports)), &error)
        })?;
        let io = IoThreads::of_this_process()?;
        let (turned_away, mentions, state, tasks) = Default::default();
        let shared = Arc::new(Shared {
            listener,
            bounds,
            secret,
            regions,
            generation,
            areas,
            delivery,
            io: Arc::downgrade(&io),
            turned_away,
            mentions,
            state,
            tasks,
        });
        let door = Door::open(shared.clone())?;
        let acceptor = std::thread::Builder::new()
            .name("kvferry-accept".to_owned())
            .spawn(move || door.attend())
            .map_err(|error| Error::system("starting a thread", &error))?;
        Ok(Self { shared, acceptor: Some(acceptor), _io: io })
    }

    /// Where it listens.
    pub fn address(&self) -> Result<SocketAddr, Error> {
        self.shared
            .listener
            .local_addr()
            .map_err(|error| Error::system("asking for the listening address", &error))
    }

    /// How many connections were turned away, whoever came with them.
    pub fn turned_away(&self) -> u64 {
        self.shared.turned_away.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(super) fn connections(&self) -> usize {
        self.shared.state.lock().connections.len()
    }

    /// Ends every connection; clients that still want something connect again.
    pub fn cut_all(&self) {
        for stream in self.shared.state.lock().connections.values() {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.state.lock().closing = true;
        // The acceptor looks at that under the lock before it adds another.
        self.cut_all();
        // This wakes the acceptor.
        let _ = SockRef::from(&self.shared.listener).shutdown(Shutdown::Both);
        if let Some(acceptor) = self.acceptor.take() {
            let _ = acceptor.join();
        }
        self.shared.tasks.wait();
    }
}
