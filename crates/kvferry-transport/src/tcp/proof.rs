//! How the two ends of a connection prove to each other that they know the token, without sending it.
//!
//! The client's [`Hello`](super::frame::Hello) carries a nonce. The server answers with a nonce of its
//! own and a proof over both; the client checks it and sends its own proof. Both nonces are new for
//! every connection, so that nothing recorded from one opens another.

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::frame::{Hello, Token};

pub(crate) type Nonce = [u8; 32];
pub(crate) type Proof = [u8; 32];

/// The server's nonce and proof.
pub(crate) const CHALLENGE_BYTES: usize = 64;

/// Which end proves: a proof of one is none of the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    Server,
    Client,
}

/// The proof of one end, over all that was said so far.
pub(crate) fn prove(token: &Token, end: End, hello: &[u8; Hello::BYTES], nonce: &Nonce) -> Proof {
    mac(token, end, hello, nonce).finalize().into_bytes().into()
}

/// Whether a proof is right; takes the same time wherever it is wrong.
pub(crate) fn is_proven(
    token: &Token,
    end: End,
    hello: &[u8; Hello::BYTES],
    nonce: &Nonce,
    proof: &[u8],
) -> bool {
    mac(token, end, hello, nonce).verify_slice(proof).is_ok()
}

fn mac(token: &Token, end: End, hello: &[u8; Hello::BYTES], nonce: &Nonce) -> Hmac<Sha256> {
    let mut mac =
        <Hmac<Sha256> as Mac>::new_from_slice(token).expect("HMAC takes keys of any length");
    mac.update(match end {
        End::Server => b"kvferry data server\0",
        End::Client => b"kvferry data client\0",
    });
    mac.update(hello);
    mac.update(nonce);
    mac
}
