//! How a running agent is reached, for commands that ask it something.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kvferry_agent::{Key, PeerError, Tls, TlsFiles, Trust};

use crate::failure::Failure;

// Not doc comments: they would take the place of the command's own.
// Where an agent is, and what it trusts.
#[derive(Debug, Args)]
pub(crate) struct Reach {
    /// Where the agent listens, as host:port. The server's log says it at the start.
    pub(crate) address: String,
    #[command(flatten)]
    proof: Proof,
    /// How long to wait for an answer, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
}

// What both sides prove to each other.
#[derive(Debug, Args)]
pub(crate) struct Proof {
    /// A file that holds the shared key.
    #[arg(long, value_name = "FILE", conflicts_with = "tls_certificate")]
    pub(crate) key_file: Option<PathBuf>,
    /// This side's certificate, where the other side uses TLS (PEM).
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_authority"])]
    pub(crate) tls_certificate: Option<PathBuf>,
    /// Its private key (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_key: Option<PathBuf>,
    /// The authority that both sides' certificates come from (PEM).
    #[arg(long, value_name = "FILE", requires = "tls_certificate")]
    tls_authority: Option<PathBuf>,
}

impl Proof {
    pub(crate) fn trust(&self) -> Result<Trust, Failure> {
        let tls = (&self.tls_certificate, &self.tls_key, &self.tls_authority);
        let trust = match (&self.key_file, tls) {
            (Some(path), _) => Key::from_file(path).map(Trust::Key),
            (None, (Some(certificate), Some(private_key), Some(authority))) => {
                Tls::from_files(&TlsFiles {
                    certificate: certificate.clone(),
                    private_key: private_key.clone(),
                    authority: authority.clone(),
                })
                .map(Trust::Tls)
            }
            _ => Trust::from_environment(),
        };
        trust.map_err(Failure::input)
    }
}

/// Whether something is `host:port`; what is wrong with it otherwise.
pub(crate) fn check_address(address: &str) -> Result<(), Failure> {
    let has_port = address.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    if has_port && !address.contains("//") {
        return Ok(());
    }
    let url = match address.contains("//") {
        true => ", of kvferry's own port (the server's log says 'listens on' it), not a URL",
        false => "",
    };
    Err(Failure::input(format!("'{address}' is not an address: give host:port{url}")))
}

impl Reach {
    pub(crate) fn patience(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// What proves to the agent that it may answer, once the address is one.
    pub(crate) fn trust(&self) -> Result<Trust, Failure> {
        check_address(&self.address)?;
        self.proof.trust()
    }

    /// It could not be asked.
    pub(crate) fn silent(&self, error: &PeerError) -> Failure {
        Failure::input(format!("{} does not answer: {error}", self.address))
    }
}
