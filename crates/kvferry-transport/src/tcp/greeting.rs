//! What a connection has to say before it is served, as the server hears it: byte by byte, as they come.
//!
//! It waits for nothing and touches no socket, so that one thread can listen to many.

use super::frame::{Challenge, Hello, Proof};
use super::proof::{self, Said, Secret};
use super::seal::{Cipher, Terms};
use crate::contract::InvalidFrame;
use crate::shared::random::random;

/// A greeting that has begun.
pub(crate) struct Greeting {
    bytes: [u8; Hello::BYTES],
    have: usize,
    /// What is ours to ask for.
    terms: Terms,
    /// What was said already.
    challenged: Option<Said>,
}

/// What follows from the bytes that came.
#[derive(Debug)]
pub(crate) enum Next {
    /// More of them have to come.
    More,
    /// The hello is complete: this is the answer. More has to come.
    Answer([u8; Challenge::BYTES]),
    /// The other end knows the token, and this is what was said.
    Proven(Said),
}

/// Why a greeting ends without a proof.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    #[error("{0}")]
    Hello(InvalidFrame),
    /// The last word is an answer that says which version we speak, and proves nothing.
    #[error("{0}")]
    Version(InvalidFrame, [u8; Challenge::BYTES]),
    #[error("it does not know this process's token")]
    Token,
    #[error("the system gives no random bytes")]
    Random,
}

const PROOF: usize = size_of::<Proof>();

impl Greeting {
    /// Bytes that are moved are sealed where either end wants it.
    pub(crate) fn new(seals_content: bool) -> Self {
        let terms = Terms { cipher: Cipher::of_this_processor(), content: seals_content };
        Self { bytes: [0; Hello::BYTES], have: 0, terms, challenged: None }
    }

    /// Where the next bytes belong: as many as are missing, and no more, since what follows the proof is for others.
    pub(crate) fn room(&mut self) -> &mut [u8] {
        let whole = if self.challenged.is_some() { PROOF } else { Hello::BYTES };
        &mut self.bytes[self.have..whole]
    }

    /// So many bytes have come into the [`room`](Self::room).
    pub(crate) fn came(&mut self, bytes: usize, secret: &Secret) -> Result<Next, Refusal> {
        let missing = self.room().len();
        self.have += bytes.min(missing);
        if bytes < missing {
            return Ok(Next::More);
        }
        self.have = 0;
        if let Some(said) = self.challenged.take() {
            let mut proof: Proof = [0; PROOF];
            proof.copy_from_slice(&self.bytes[..PROOF]);
            let proven = secret.is_proven(proof::End::Client, &said, &proof);
            return if proven { Ok(Next::Proven(said)) } else { Err(Refusal::Token) };
        }
        let terms = match Hello::decode(&self.bytes) {
            Ok(hello) => hello.terms.with(self.terms),
            Err(error @ InvalidFrame::Version { .. }) => {
                // So that the other end can say what is wrong.
                return Err(Refusal::Version(error, Challenge::EMPTY.encode()));
            }
            Err(error) => return Err(Refusal::Hello(error)),
        };
        let nonce = random().map_err(|_| Refusal::Random)?;
        let said = Said { hello: self.bytes, nonce, terms };
        let proof = secret.prove(proof::End::Server, &said);
        self.challenged = Some(said);
        Ok(Next::Answer(Challenge { nonce, terms, proof }.encode()))
    }
}
