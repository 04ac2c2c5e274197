//! Whom an agent trusts, as Python says it.

use std::path::{Path, PathBuf};

use kvferry_agent::{Error, Key, Network, Tls, TlsFiles, Trust};

/// Where peers may be.
pub(crate) fn networks(peers: &[String]) -> Result<Vec<Network>, Error> {
    peers.iter().map(|network| network.parse()).collect()
}

pub(crate) fn trust(
    key: Option<&str>,
    key_file: Option<PathBuf>,
    tls: Option<(PathBuf, PathBuf, PathBuf)>,
    insecure: bool,
) -> Result<Trust, Error> {
    match (key, key_file, tls, insecure) {
        (Some(key), None, None, false) => Ok(Trust::Key(Key::new(key.as_bytes())?)),
        (None, Some(file), None, false) => Ok(Trust::Key(Key::from_file(Path::new(&file))?)),
        (None, None, Some((certificate, private_key, authority)), false) => {
            let files = TlsFiles { certificate, private_key, authority };
            Ok(Trust::Tls(Tls::from_files(&files)?))
        }
        (None, None, None, false) => Trust::from_environment(),
        (None, None, None, true) => Ok(Trust::Insecure),
        _ => Err(Error::Options("give only one of key, key_file, tls and insecure".to_owned())),
    }
}
