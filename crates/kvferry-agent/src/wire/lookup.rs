//! Names of hosts. The system looks them up in its own time, on a thread that waits.

use std::io::ErrorKind;
use std::net::{SocketAddr, ToSocketAddrs};

use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;

use crate::error::PeerError;

/// So many names are looked up at once. Clients may name hosts, and a name that nobody knows can take the system half a
/// minute: it must not take the threads that others wait on.
pub(crate) const LOOKUPS: usize = 16;

/// The addresses of `host:port`. What is an address already needs no looking up.
pub(super) async fn lookup(address: &str) -> Result<Vec<SocketAddr>, PeerError> {
    static PLACES: Semaphore = Semaphore::const_new(LOOKUPS);
    if let Ok(address) = address.parse() {
        return Ok(vec![address]);
    }
    let place = PLACES.acquire().await.map_err(|_| PeerError::Closed)?;
    let address = address.to_owned();
    let found = spawn_blocking(move || {
        // Until the system answers, also where nobody waits for that any more.
        let _place = place;
        lookup_here(&address)
    });
    found.await.unwrap_or_else(|_| Err(unknown()))
}

/// The same; this thread waits.
pub(crate) fn lookup_here(address: &str) -> Result<Vec<SocketAddr>, PeerError> {
    address.to_socket_addrs().map(Vec::from_iter).map_err(|_| unknown())
}

/// What the system says of a name that it does not know is in no category.
fn unknown() -> PeerError {
    PeerError::Io { what: "looking up the name of the host", kind: ErrorKind::NotFound }
}
