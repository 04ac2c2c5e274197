//! Who may talk to this engine.
//!
//! A peer that holds the shared key may read and write this engine's registered memory; nobody else
//! learns anything. The key is proven both ways, and all that follows is encrypted, by the Noise
//! protocol `NNpsk0_25519_ChaChaPoly_BLAKE2s`: the side that connects must prove it first, the other
//! is silent until then. Nothing recorded from one connection is of use in another.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use sha2::{Digest, Sha256};

use crate::error::Error;

/// The environment variable that holds the key, where one is used.
pub const KEY_VARIABLE: &str = "KVFERRY_KEY";

/// How peers prove who they are.
#[derive(Clone, Debug)]
pub enum Trust {
    /// Both sides hold the same key.
    Key(Key),
    /// Both sides hold certificates of the same authority.
    Tls(Tls),
    /// Everyone who can reach a loopback address.
    Loopback,
    /// Everyone who can reach the address, wherever they are. Nothing is encrypted.
    Insecure,
}

impl Trust {
    /// The key in the environment ([`KEY_VARIABLE`]), or loopback only where there is none.
    pub fn from_environment() -> Result<Self, Error> {
        match std::env::var(KEY_VARIABLE) {
            Ok(secret) => Ok(Self::Key(Key::new(secret.as_bytes())?)),
            Err(std::env::VarError::NotPresent) => Ok(Self::Loopback),
            Err(_) => Err(Error::Key(format!("{KEY_VARIABLE} does not hold text"))),
        }
    }

    /// Whether an address may be bound to.
    pub(crate) fn check_bind(&self, address: SocketAddr) -> Result<(), Error> {
        match self {
            Self::Loopback if !address.ip().is_loopback() => Err(Error::NeedsKey(address)),
            _ => Ok(()),
        }
    }

    /// The byte that a connection opens with.
    pub(crate) fn mode(&self) -> u8 {
        match self {
            Self::Loopback | Self::Insecure => 0,
            Self::Key(_) => 1,
            Self::Tls(_) => 2,
        }
    }
}

/// The shared key, and others that are accepted beside it while it is being changed.
#[derive(Clone, PartialEq, Eq)]
pub struct Key {
    /// What this side proves, and seals with.
    own: [u8; 32],
    others: Vec<[u8; 32]>,
}

impl Key {
    /// The shortest secret that is accepted.
    pub const SHORTEST: usize = 16;

    /// The most keys that are accepted at once.
    pub const MOST: usize = 4;

    /// Makes a key from a secret of at least [`SHORTEST`](Self::SHORTEST) bytes. Secrets on further lines are accepted of
    /// others. White space around each does not count.
    pub fn new(secrets: &[u8]) -> Result<Self, Error> {
        let lines = secrets.split(|&byte| byte == b'\n').map(<[u8]>::trim_ascii);
        let digests = lines.filter(|line| !line.is_empty()).map(|secret| {
            if secret.len() < Self::SHORTEST {
                return Err(Error::Key(format!(
                    "a key of {} bytes is too short: take at least {}, for example from \
                     'openssl rand -hex 32'",
                    secret.len(),
                    Self::SHORTEST
                )));
            }
            let digest = Sha256::new().chain_update(b"kvferry shared key\0").chain_update(secret);
            Ok(digest.finalize().into())
        });
        let mut digests = digests.collect::<Result<Vec<_>, Error>>()?;
        if digests.is_empty() || digests.len() > Self::MOST {
            return Err(Error::Key(format!(
                "{} keys, one to a line: give one, and while it is being changed at most {} in all",
                digests.len(),
                Self::MOST
            )));
        }
        Ok(Self { own: digests.remove(0), others: digests })
    }

    /// Reads the secrets from a file.
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        let secret = std::fs::read(path).map_err(|error| {
            Error::Key(format!("cannot read the key file {}: {error}", path.display()))
        })?;
        Self::new(&secret)
    }

    /// What this side proves, and seals with.
    pub(crate) fn own(&self) -> &[u8; 32] {
        &self.own
    }

    /// What others may prove, and have sealed with.
    pub(crate) fn accepted(&self) -> impl Iterator<Item = &[u8; 32]> {
        std::iter::once(&self.own).chain(&self.others)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(…)")
    }
}

/// Where certificates lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// This side's certificate, and those between it and the authority (PEM).
    pub certificate: PathBuf,
    /// Its private key (PEM).
    pub private_key: PathBuf,
    /// The authority that both sides' certificates come from (PEM).
    pub authority: PathBuf,
}

/// TLS 1.3 with certificates on both sides.
#[derive(Clone)]
pub struct Tls {
    pub(crate) client: Arc<ClientConfig>,
    pub(crate) server: Arc<ServerConfig>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(…)")
    }
}

impl Tls {
    /// Reads the certificates.
    pub fn from_files(files: &TlsFiles) -> Result<Self, Error> {
        let bad = |path: &Path, error: &dyn fmt::Display| {
            Error::Key(format!("cannot use {}: {error}", path.display()))
        };
        let certificates = |path: &Path| -> Result<Vec<CertificateDer<'static>>, Error> {
            let all = CertificateDer::pem_file_iter(path).map_err(|e| bad(path, &e))?;
            let all: Result<Vec<_>, _> = all.collect();
            match all {
                Ok(all) if all.is_empty() => Err(bad(path, &"it holds no certificate")),
                Ok(all) => Ok(all),
                Err(error) => Err(bad(path, &error)),
            }
        };
        let mut roots = RootCertStore::empty();
        for certificate in certificates(&files.authority)? {
            roots.add(certificate).map_err(|e| bad(&files.authority, &e))?;
        }
        let roots = Arc::new(roots);
        let chain = certificates(&files.certificate)?;
        let key = PrivateKeyDer::from_pem_file(&files.private_key)
            .map_err(|e| bad(&files.private_key, &e))?;

        // What both sides make of the certificate.
        let unusable = |error: rustls::Error| match error {
            rustls::Error::InconsistentKeys(_) => Error::Key(format!(
                "the private key in {} does not belong to the certificate in {}",
                files.private_key.display(),
                files.certificate.display()
            )),
            error => bad(&files.certificate, &error),
        };
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let versions = &[&rustls::version::TLS13];
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|e| bad(&files.authority, &e))?;
        let server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(versions)
            .and_then(|builder| {
                let builder = builder.with_client_cert_verifier(verifier);
                builder.with_single_cert(chain.clone(), key.clone_key())
            })
            .map_err(unusable)?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .and_then(|builder| {
                builder.with_root_certificates(roots).with_client_auth_cert(chain, key)
            })
            .map_err(unusable)?;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }

    /// The name that a peer's certificate must carry: the host part of its address.
    pub(crate) fn name(address: &str) -> Option<ServerName<'static>> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        ServerName::try_from(host.to_owned()).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_key_only_loopback_is_served() {
        let everywhere: SocketAddr = ([0, 0, 0, 0], 0).into();
        let here: SocketAddr = ([127, 0, 0, 1], 0).into();
        assert_eq!(Trust::Loopback.check_bind(here), Ok(()));
        let refused = Trust::Loopback.check_bind(everywhere).unwrap_err();
        assert_eq!(refused, Error::NeedsKey(everywhere));
        assert!(refused.to_string().contains("insecure"), "{refused}");
        assert_eq!(Trust::Insecure.check_bind(everywhere), Ok(()));
        let key = Key::new(b"0123456789abcdef").unwrap();
        assert_eq!(Trust::Key(key).check_bind(everywhere), Ok(()));
    }

    #[test]
    fn short_secrets_are_no_keys_and_keys_are_not_printed() {
        assert!(Key::new(b"password").is_err());
        assert!(Key::new(b"0123456789abcdef\npassword").is_err());
        assert!(Key::new(b" \n").is_err() && Key::new(&b"0123456789abcdef\n".repeat(5)).is_err());
        let around = Key::new(b"\n 0123456789abcdef \r\n").unwrap();
        assert_eq!(around, Key::new(b"0123456789abcdef").unwrap());
        let key = Key::new(b"0123456789abcdef").unwrap();
        assert_eq!(format!("{key:?}"), "Key(…)");
        assert_ne!(key, Key::new(b"0123456789abcdeg").unwrap());
    }
}
