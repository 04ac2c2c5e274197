//! Who may knock at addresses that have never answered.
//!
//! Tickets name addresses, and clients can write tickets. Each try takes a connection of this process, so there are
//! so many at a time. Nobody who does not answer may keep those waiting who would: a try lasts a second, and
//! addresses that are tried for the first time do not wait behind those that were tried before.

use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout_at};

use crate::error::PeerError;
use crate::wire::link::{Link, Links, is_final};

/// Addresses that are tried for the first time at once, and again.
const FIRST: usize = 128;
const AGAIN: usize = 64;
/// Engines that have greeted, and are asked whether they fit.
const ASKED: usize = 256;
/// How long the first try lasts; each that follows, twice as long.
const TRY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Places {
    first: Semaphore,
    again: Semaphore,
    /// For what comes after the greeting.
    pub(super) asked: Semaphore,
}

impl Default for Places {
    fn default() -> Self {
        let [first, again, asked] = [FIRST, AGAIN, ASKED].map(Semaphore::new);
        Self { first, again, asked }
    }
}

impl Places {
    /// The connection to an address, opened in its turn.
    pub(super) async fn connect(
        &self,
        links: &Links,
        address: &str,
        deadline: Instant,
    ) -> Result<Link, PeerError> {
        let (mut places, mut patience) = (&self.first, TRY);
        let mut said = None;
        loop {
            if let Some(link) = links.opened(address) {
                return Ok(link);
            }
            let Ok(_place) = timeout_at(deadline, places.acquire()).await else {
                return Err(said.unwrap_or(PeerError::Slow(
                    "a turn to connect, behind other addresses that do not answer,",
                )));
            };
            let until = deadline.min(Instant::now() + patience);
            match links.get(address, until).await {
                // A try that was cut short says less than the one before it.
                Err(error) if !is_final(&error) => match (until < deadline, said) {
                    (true, before) => said = Some(before.unwrap_or(error)),
                    (false, before) => return Err(before.unwrap_or(error)),
                },
                got => return got,
            }
            (places, patience) = (&self.again, patience * 2);
        }
    }
}
