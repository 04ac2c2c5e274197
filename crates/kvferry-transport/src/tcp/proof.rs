//! How the two ends of a connection prove to each other that they know the token, without sending it.
//!
//! The client's [`Hello`] carries a nonce, and how it would have the connection sealed. The server answers with a nonce of
//! its own, with what is agreed, and with a proof over all of that and over who it is; the client checks it and sends its own
//! proof. Both nonces are new for every connection, so that nothing recorded from one opens another. What seals the
//! connection from then on follows from the token and the same words.

use std::fmt;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::frame::{Hello, Nonce, Proof, Token};
use super::seal::{Secrets, Terms, derive};
use crate::contract::Instance;

/// What a server's description tells of it.
#[derive(Clone, Copy)]
pub struct Secret {
    /// Who the server is.
    pub instance: Instance,
    /// What both ends prove that they know.
    pub token: Token,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token opens the door: it does not belong into a log.
        f.debug_struct("Secret").field("instance", &self.instance).finish_non_exhaustive()
    }
}

/// Which end proves: a proof of one is none of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Server,
    Client,
}

impl End {
    fn proves(self) -> &'static [u8] {
        match self {
            Self::Server => b"kvferry data server\0",
            Self::Client => b"kvferry data client\0",
        }
    }
}

/// What was said in a greeting before anything is proven.
#[derive(Clone, Debug)]
pub(crate) struct Said {
    pub(crate) hello: [u8; Hello::BYTES],
    /// The server's.
    pub(crate) nonce: Nonce,
    pub(crate) terms: Terms,
}

impl Secret {
    /// The proof of one end, over all that was said before.
    pub(crate) fn prove(&self, end: End, said: &Said) -> Proof {
        self.mac(end.proves(), said).finalize().into_bytes().into()
    }

    /// Whether a proof is right; takes the same time wherever it is wrong.
    pub(crate) fn is_proven(&self, end: End, said: &Said, proof: &Proof) -> bool {
        self.mac(end.proves(), said).verify_slice(proof).is_ok()
    }

    /// What seals a connection that begins like this.
    pub(crate) fn secrets(&self, said: &Said) -> Secrets {
        let both = self.mac(b"kvferry data secrets\0", said).finalize().into_bytes().into();
        Secrets {
            of_client: derive(&both, b"kvferry secret of the client\0"),
            of_server: derive(&both, b"kvferry secret of the server\0"),
        }
    }

    fn mac(&self, purpose: &[u8], said: &Said) -> Hmac<Sha256> {
        let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(&self.token)
            .expect("HMAC takes keys of any length");
        mac.update(purpose);
        mac.update(&self.instance.0);
        mac.update(&said.hello);
        mac.update(&said.nonce);
        mac.update(&[said.terms.encode()]);
        mac
    }
}
