//! How the two ends of a connection prove to each other that they know the token, without sending it.
//!
//! The client's [`Hello`] carries a nonce. The server answers with a nonce of its own and a proof over
//! both and over who it is; the client checks it and sends its own proof. Both nonces are new for
//! every connection, so that nothing recorded from one opens another.

use std::fmt;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::frame::{Hello, Nonce, Proof, Token};
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
pub enum End {
    Server,
    Client,
}

impl Secret {
    /// The proof of one end, over all that was said so far.
    pub fn prove(&self, end: End, hello: &[u8; Hello::BYTES], nonce: &Nonce) -> Proof {
        self.mac(end, hello, nonce).finalize().into_bytes().into()
    }

    /// Whether a proof is right; takes the same time wherever it is wrong.
    pub fn is_proven(
        &self,
        end: End,
        hello: &[u8; Hello::BYTES],
        nonce: &Nonce,
        proof: &Proof,
    ) -> bool {
        self.mac(end, hello, nonce).verify_slice(proof).is_ok()
    }

    fn mac(&self, end: End, hello: &[u8; Hello::BYTES], nonce: &Nonce) -> Hmac<Sha256> {
        let mut mac = <Hmac<Sha256> as Mac>::new_from_slice(&self.token)
            .expect("HMAC takes keys of any length");
        mac.update(match end {
            End::Server => b"kvferry data server\0",
            End::Client => b"kvferry data client\0",
        });
        mac.update(&self.instance.0);
        mac.update(hello);
        mac.update(nonce);
        mac
    }
}
