//! Two hosts on one machine, and a wire between them; and a third host on that wire, for whoever comes from elsewhere.
//!
//! A [`Host`] is a network namespace with one interface and one address. What a program in it sends to
//! another's address passes through this process, which delivers it as the [`Weather`] says: late, not at
//! all, out of order, or no faster than a rate. Programs on the hosts see nothing else of each other,
//! and nothing of the machine's own network.
//!
//! Nothing has to be taken down: namespaces and interfaces have no name outside of this process, and go
//! when it ends, however it ends.

mod host;
mod weather;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use parking_lot::Mutex;

pub use host::Host;
pub use weather::Weather;

/// Why there is no wire.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The kernel does not let this process do a step.
    ///
    /// What to do: run it as root, or under `unshare --map-root-user --net`; the kernel must have TUN
    /// (`/dev/net/tun`) and network namespaces.
    #[error("{step}: {source}")]
    Kernel {
        /// What was tried.
        step: &'static str,
        /// What the kernel answered.
        source: std::io::Error,
    },
    /// A number that makes no sense.
    ///
    /// What to do: give a loss from 0 to 1, and a rate above 0.
    #[error("{what} is {found}")]
    Weather {
        /// Which number.
        what: &'static str,
        /// What it is.
        found: f64,
    },
}

/// Hosts that can reach each other.
#[derive(Debug)]
pub struct Wire {
    /// One end.
    pub left: Host,
    /// The other.
    pub right: Host,
    /// A third one.
    pub third: Host,
    weather: Arc<Mutex<Weather>>,
    over: Arc<AtomicBool>,
    carriers: Vec<JoinHandle<()>>,
}

impl Wire {
    /// Makes the hosts, with packets of at most `mtu` bytes between them, in fair weather.
    pub fn lay(mtu: u16) -> Result<Self, Error> {
        let (left, from_left) = Host::make([10, 99, 0, 1], mtu)?;
        let (right, from_right) = Host::make([10, 99, 0, 2], mtu)?;
        let (third, from_third) = Host::make([10, 99, 0, 3], mtu)?;
        let (weather, over) = (Arc::default(), Arc::default());
        let carriers = weather::carry(&[from_left, from_right, from_third], &weather, &over);
        Ok(Self { left, right, third, weather, over, carriers })
    }

    /// From now on. What is on its way already arrives as it would have.
    pub fn set(&self, weather: Weather) -> Result<(), Error> {
        *self.weather.lock() = weather.checked()?;
        Ok(())
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        for carrier in self.carriers.drain(..) {
            // A thread that panicked has nothing more to say here.
            let _ = carrier.join();
        }
    }
}
