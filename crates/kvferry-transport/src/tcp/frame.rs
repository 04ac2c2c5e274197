//! What goes over a connection.
//!
//! A connection opens with a [`Hello`] of the client and a [`Challenge`] of the server, in which the
//! server proves that it knows its token; the client then sends its own proof (see `proof`). From
//! then on frames are sealed (`channel`): the client sends requests and the server answers them in order. A request is a
//! [`Request`] header and the spans it asks for (address and length, both of the server's memory), or the loops that
//! the server is to gather (`gather`). An [`Answer`] is followed by the bytes. All numbers are
//! little-endian. Every field is checked before anything is done with it.

use kvferry_layout::Region;

use super::gather;
use super::seal::{Cipher, Terms};
use crate::contract::InvalidFrame;
use crate::shared::bytes::Fields;

/// The data protocol's own: the control protocol opens with other bytes.
pub(crate) const MAGIC: [u8; 8] = *b"kvf-data";
pub(crate) const VERSION: u32 = 1;

/// The most spans in one request: as many as one vectored system call takes.
pub(crate) const MAX_SPANS: usize = 1024;
/// The most bytes one request may move.
pub(crate) const MAX_REQUEST_BYTES: u64 = 64 << 20;
/// The most regions a server may list.
pub(crate) const MAX_REGIONS: u64 = 1 << 20;

/// The longest frame: a request with its spans or loops.
pub(crate) const LONGEST: usize = Request::BYTES
    + if MAX_SPANS * SPAN_BYTES > gather::MAX_BYTES {
        MAX_SPANS * SPAN_BYTES
    } else {
        gather::MAX_BYTES
    };

/// From the server's description: who does not know it is not served.
pub(crate) type Token = [u8; 32];
/// New for every connection, at each end.
pub(crate) type Nonce = [u8; 32];
/// That one end knows the token.
pub(crate) type Proof = [u8; 32];

/// The first frame of a connection, from the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) nonce: Nonce,
    /// What the client would agree upon.
    pub(crate) terms: Terms,
}

impl Hello {
    pub(crate) const BYTES: usize = 8 + 4 + 32 + 1;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = Vec::with_capacity(Self::BYTES);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(self.nonce);
        out.push(self.terms.encode());
        fixed(&out)
    }

    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, InvalidFrame> {
        let mut fields = Fields(bytes);
        opening(&mut fields)?;
        let nonce = fields.array().ok_or(InvalidFrame::Cut)?;
        Ok(Self { nonce, terms: Terms::decode(&mut fields)? })
    }
}

/// The server's answer to a [`Hello`], also to one of another version: it says which it speaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Challenge {
    pub(crate) nonce: Nonce,
    /// What is agreed upon.
    pub(crate) terms: Terms,
    pub(crate) proof: Proof,
}

impl Challenge {
    /// Says which version we speak, and proves nothing.
    pub(crate) const EMPTY: Self = Self {
        nonce: [0; 32],
        terms: Terms { cipher: Cipher::Aes, content: false },
        proof: [0; 32],
    };
    pub(crate) const BYTES: usize = 8 + 4 + 32 + 1 + 32;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = Vec::with_capacity(Self::BYTES);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(self.nonce);
        out.push(self.terms.encode());
        out.extend(self.proof);
        fixed(&out)
    }

    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, InvalidFrame> {
        let mut fields = Fields(bytes);
        opening(&mut fields)?;
        let nonce = fields.array().ok_or(InvalidFrame::Cut)?;
        let terms = Terms::decode(&mut fields)?;
        let proof = fields.array().ok_or(InvalidFrame::Cut)?;
        Ok(Self { nonce, terms, proof })
    }
}

impl Terms {
    pub(crate) fn encode(self) -> u8 {
        u8::from(self.content) | u8::from(self.cipher == Cipher::ChaCha) << 1
    }

    fn decode(fields: &mut Fields<'_>) -> Result<Self, InvalidFrame> {
        let [terms] = fields.array().ok_or(InvalidFrame::Cut)?;
        if terms > 3 {
            return Err(InvalidFrame::Reserved);
        }
        let cipher = if terms & 2 == 0 { Cipher::Aes } else { Cipher::ChaCha };
        Ok(Self { cipher, content: terms & 1 != 0 })
    }
}

fn opening(fields: &mut Fields<'_>) -> Result<(), InvalidFrame> {
    if fields.array() != Some(MAGIC) {
        return Err(InvalidFrame::Magic);
    }
    match fields.u32() {
        Some(VERSION) => Ok(()),
        Some(theirs) => Err(InvalidFrame::Version { theirs, ours: VERSION }),
        None => Err(InvalidFrame::Cut),
    }
}

fn fixed<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(bytes);
    out
}

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Verb {
    /// Send me these bytes of yours.
    Read = 1,
    /// Which regions have you registered?
    Regions = 2,
    /// Gather these runs of yours, and send them as one; or, where another transport moves the bytes,
    /// say where they are.
    Gather = 3,
    /// What was gathered at the address in `bytes` has been read.
    Release = 4,
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) verb: Verb,
    /// How many spans follow; to gather, how many bytes.
    pub(crate) spans: u32,
    /// The client's number for it.
    pub(crate) id: u64,
    /// How many bytes are asked for in all.
    pub(crate) bytes: u64,
}

impl Request {
    pub(crate) const BYTES: usize = 24;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = Vec::with_capacity(Self::BYTES);
        out.extend([self.verb as u8, 0, 0, 0]);
        out.extend(self.spans.to_le_bytes());
        out.extend(self.id.to_le_bytes());
        out.extend(self.bytes.to_le_bytes());
        fixed(&out)
    }

    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, InvalidFrame> {
        let mut fields = Fields(bytes);
        let [verb, reserved @ ..] = fields.array::<4>().ok_or(InvalidFrame::Cut)?;
        let verb = match verb {
            1 => Verb::Read,
            2 => Verb::Regions,
            3 => Verb::Gather,
            4 => Verb::Release,
            other => return Err(InvalidFrame::Operation(other)),
        };
        if reserved != [0; 3] {
            return Err(InvalidFrame::Reserved);
        }
        let spans = fields.u32().ok_or(InvalidFrame::Cut)?;
        let id = fields.u64().ok_or(InvalidFrame::Cut)?;
        let bytes = fields.u64().ok_or(InvalidFrame::Cut)?;
        let (fewest, most, longest) = match verb {
            Verb::Read => (1, MAX_SPANS as u32, MAX_REQUEST_BYTES),
            Verb::Regions => (0, 0, 0),
            Verb::Gather => (1, gather::MAX_BYTES as u32, gather::MOST_PACKED),
            Verb::Release => (0, 0, u64::MAX),
        };
        if spans < fewest || spans > most {
            return Err(InvalidFrame::Count { spans, fewest, most });
        }
        if bytes > longest {
            return Err(InvalidFrame::Length(bytes));
        }
        Ok(Self { verb, spans, id, bytes })
    }

    /// How many bytes of spans or loops follow the header.
    pub(crate) fn body_bytes(&self) -> usize {
        match self.verb {
            Verb::Gather => self.spans as usize,
            Verb::Read | Verb::Regions | Verb::Release => self.spans as usize * SPAN_BYTES,
        }
    }
}

pub(crate) const SPAN_BYTES: usize = 16;

pub(crate) fn put_span(out: &mut Vec<u8>, address: u64, bytes: u64) {
    out.extend(address.to_le_bytes());
    out.extend(bytes.to_le_bytes());
}

/// Decodes the spans of a request and checks that they add up to what its header said.
pub(crate) fn spans(
    request: &Request,
    bytes: &[u8],
    out: &mut Vec<(u64, u64)>,
) -> Result<(), InvalidFrame> {
    out.clear();
    let mut fields = Fields(bytes);
    let mut sum: u64 = 0;
    for _ in 0..request.spans {
        let address = fields.u64().ok_or(InvalidFrame::Cut)?;
        let length = fields.u64().ok_or(InvalidFrame::Cut)?;
        if length == 0 || address.checked_add(length).is_none() {
            return Err(InvalidFrame::Length(length));
        }
        sum = sum.checked_add(length).ok_or(InvalidFrame::Length(length))?;
        out.push((address, length));
    }
    if sum != request.bytes || !fields.0.is_empty() {
        return Err(InvalidFrame::Length(sum));
    }
    Ok(())
}

/// How a request went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Verdict {
    /// As asked; the bytes follow.
    Done = 0,
    /// A span lies outside the registered regions. Nothing was moved.
    Outside = 1,
    /// There is no memory left to pack into. Nothing was moved.
    Busy = 2,
    /// The memory is a card's, and the card does not gather it.
    Unable = 3,
}

/// What a server that is [busy](Verdict::Busy) says instead of a number of bytes where others give memory back: one
/// may ask again. Otherwise it says 0, as older ones always do.
pub(crate) const AGAIN: u64 = 1;

/// The header of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) verdict: Verdict,
    /// The request's number.
    pub(crate) id: u64,
    /// How many bytes follow; for a span outside the regions, its address; for what was gathered to be
    /// read in another way, where it is.
    pub(crate) bytes: u64,
}

impl Answer {
    pub(crate) const BYTES: usize = 24;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = Vec::with_capacity(Self::BYTES);
        out.extend([self.verdict as u8, 0, 0, 0, 0, 0, 0, 0]);
        out.extend(self.id.to_le_bytes());
        out.extend(self.bytes.to_le_bytes());
        fixed(&out)
    }

    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, InvalidFrame> {
        let mut fields = Fields(bytes);
        let [verdict, reserved @ ..] = fields.array::<8>().ok_or(InvalidFrame::Cut)?;
        let verdict = match verdict {
            0 => Verdict::Done,
            1 => Verdict::Outside,
            2 => Verdict::Busy,
            3 => Verdict::Unable,
            other => return Err(InvalidFrame::Operation(other)),
        };
        if reserved != [0; 7] {
            return Err(InvalidFrame::Reserved);
        }
        Ok(Self {
            verdict,
            id: fields.u64().ok_or(InvalidFrame::Cut)?,
            bytes: fields.u64().ok_or(InvalidFrame::Cut)?,
        })
    }
}

/// What follows the answer to [`Verb::Regions`]: how often the regions have changed, and which they
/// are now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listing {
    pub(crate) generation: u64,
    pub(crate) regions: Vec<Region>,
}

impl Listing {
    /// Whether a listing may be so long: to be asked before anything is allocated for it.
    pub(crate) fn check_length(bytes: u64) -> Result<(), InvalidFrame> {
        let span = SPAN_BYTES as u64;
        match bytes.checked_sub(8) {
            Some(spans) if spans.is_multiple_of(span) && spans / span <= MAX_REGIONS => Ok(()),
            _ => Err(InvalidFrame::Length(bytes)),
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = self.generation.to_le_bytes().to_vec();
        for region in &self.regions {
            put_span(&mut out, region.base, region.bytes);
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, InvalidFrame> {
        Self::check_length(bytes.len() as u64)?;
        let mut fields = Fields(bytes);
        let generation = fields.u64().ok_or(InvalidFrame::Cut)?;
        let mut regions = Vec::with_capacity(fields.0.len() / SPAN_BYTES);
        while !fields.0.is_empty() {
            let base = fields.u64().ok_or(InvalidFrame::Cut)?;
            let bytes = fields.u64().ok_or(InvalidFrame::Cut)?;
            regions.push(Region::host(base, bytes));
        }
        Ok(Self { generation, regions })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn verbs() -> impl Strategy<Value = Verb> {
        prop_oneof![Just(Verb::Read), Just(Verb::Regions), Just(Verb::Gather), Just(Verb::Release)]
    }

    /// The two protocols must not be mistaken for each other.
    #[test]
    fn the_magic_is_the_data_protocols_own() {
        let terms = Terms { cipher: Cipher::Aes, content: false };
        let mut hello = Hello { nonce: [7; 32], terms }.encode();
        hello[..8].copy_from_slice(b"kvferry\x01");
        assert_eq!(Hello::decode(&hello), Err(InvalidFrame::Magic));
    }

    proptest! {
        /// What is encoded decodes to itself, or was over a limit.
        #[test]
        fn requests_come_back(verb in verbs(), spans in 0u32..1100, id in any::<u64>(), bytes in 0u64..1 << 27) {
            let request = Request { verb, spans, id, bytes };
            match Request::decode(&request.encode()) {
                Ok(back) => prop_assert_eq!(back, request),
                Err(InvalidFrame::Count { spans: n, fewest, most }) => {
                    prop_assert!(n == spans && !(fewest..=most).contains(&n));
                }
                Err(InvalidFrame::Length(n)) => prop_assert_eq!(n, bytes),
                Err(other) => prop_assert!(false, "{other}"),
            }
        }

        /// Valid frames with a few bytes changed: what is let through still adds up.
        #[test]
        fn mutated_spans_add_up(
            lengths in prop::collection::vec((any::<u64>(), 1u64..100), 1..20),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        ) {
            let mut body = Vec::new();
            for &(address, bytes) in &lengths {
                put_span(&mut body, address, bytes);
            }
            let mut header = Request {
                verb: Verb::Read,
                spans: lengths.len() as u32,
                id: 7,
                bytes: lengths.iter().map(|l| l.1).sum(),
            }
            .encode();
            for (index, value) in changes {
                let at = index.index(header.len() + body.len());
                match at.checked_sub(header.len()) {
                    None => header[at] = value,
                    Some(at) => body[at] = value,
                }
            }
            let Ok(request) = Request::decode(&header) else { return Ok(()) };
            let mut out = Vec::new();
            if request.verb == Verb::Read && spans(&request, &body, &mut out).is_ok() {
                prop_assert_eq!(out.len(), request.spans as usize);
                let sum: u128 = out.iter().map(|&(_, bytes)| u128::from(bytes)).sum();
                prop_assert_eq!(sum, u128::from(request.bytes));
                for (address, bytes) in out {
                    prop_assert!(bytes > 0 && address.checked_add(bytes).is_some());
                }
            }
        }
    }
}
