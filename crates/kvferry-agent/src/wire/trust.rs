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
            Ok(secret) => Ok(Self::Key(Key::new(secret.trim().as_bytes())?)),
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

/// The shared key.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; 32]);

impl Key {
    /// The shortest secret that is accepted.
    pub const SHORTEST: usize = 16;

    /// Makes a key from a secret of at least [`SHORTEST`](Self::SHORTEST) bytes.
    pub fn new(secret: &[u8]) -> Result<Self, Error> {
        if secret.len() < Self::SHORTEST {
            return Err(Error::Key(format!(
                "a key of {} bytes is too short: take at least {}, for example from \
                 'openssl rand -hex 32'",
                secret.len(),
                Self::SHORTEST
            )));
        }
        let digest = Sha256::new().chain_update(b"kvferry shared key\0").chain_update(secret);
        Ok(Self(digest.finalize().into()))
    }

    /// Reads the secret from a file; white space around it does not count.
    pub fn from_file(path: &Path) -> Result<Self, Error> {
        let secret = std::fs::read(path).map_err(|error| {
            Error::Key(format!("cannot read the key file {}: {error}", path.display()))
        })?;
        Self::new(secret.trim_ascii())
    }

    pub(crate) fn bytes(&self) -> &[u8; 32] {
        &self.0
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
            .map_err(|e| bad(&files.certificate, &e))?;
        let client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(versions)
            .and_then(|builder| {
                builder.with_root_certificates(roots).with_client_auth_cert(chain, key)
            })
            .map_err(|e| bad(&files.certificate, &e))?;
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
        let key = Key::new(b"0123456789abcdef").unwrap();
        assert_eq!(format!("{key:?}"), "Key(…)");
        assert_ne!(key, Key::new(b"0123456789abcdeg").unwrap());
    }
}
