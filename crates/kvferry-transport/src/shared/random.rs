//! Bytes nobody can guess.

use crate::contract::Error;

/// Fills an array from the system's random source.
pub fn random<const N: usize>() -> Result<[u8; N], Error> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)
        .map_err(|error| Error::system("asking the system for random bytes", &error.into()))?;
    Ok(bytes)
}
