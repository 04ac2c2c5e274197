//! Numbers that nobody can guess.

use crate::error::Error;

pub(crate) fn random() -> Result<u64, Error> {
    getrandom::u64().map_err(|error| Error::Io {
        what: format!("drawing a random number: {error}"),
        kind: std::io::ErrorKind::Other,
    })
}
