//! What goes over a connection.
//!
//! A connection opens with a [`Hello`] that presents the server's token and is answered by a
//! [`Welcome`]. Then the client sends requests and the server answers them in order. A request is a
//! [`Request`] header, its pieces (address and length, both of the server's memory), and for a
//! write or a notification the bytes themselves. An [`Answer`] is followed by the bytes for a read.
//! All numbers are little-endian. Every field is checked before anything is done with it.

use crate::bytes::Fields;
use crate::error::InvalidFrame;

pub(crate) const MAGIC: [u8; 8] = *b"kvferry\x01";
pub(crate) const VERSION: u32 = 1;

/// The most pieces in one request: as many as one vectored system call takes.
pub(crate) const MAX_PIECES: usize = 1024;
/// The most bytes one request may move.
pub(crate) const MAX_REQUEST_BYTES: u64 = 64 << 20;
/// The longest proof in a [`Hello`] or [`Welcome`].
pub(crate) const MAX_PROOF_BYTES: u32 = 4096;
/// The most regions a table may list.
pub(crate) const MAX_REGIONS: u64 = 1 << 20;

pub(crate) type Token = [u8; 32];

/// The first frame of a connection, from the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// From the server's description: without it nothing is served.
    pub(crate) token: Token,
    /// Who connects.
    pub(crate) instance: [u8; 16],
    /// All connections of one client to one server belong to a session; within it they are
    /// numbered. A connection of the same number replaces the one before.
    pub(crate) session: [u8; 16],
    pub(crate) lane: u32,
    /// How many bytes of further proof of identity follow. None are asked for yet.
    pub(crate) proof_bytes: u32,
}

impl Hello {
    pub(crate) const BYTES: usize = 8 + 4 + 32 + 16 + 16 + 4 + 4;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = Vec::with_capacity(Self::BYTES);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(self.token);
        out.extend(self.instance);
        out.extend(self.session);
        out.extend(self.lane.to_le_bytes());
        out.extend(self.proof_bytes.to_le_bytes());
        fixed(&out)
    }

    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, InvalidFrame> {
        let mut fields = Fields(bytes);
        opening(&mut fields)?;
        let mut parse = || {
            Some(Self {
                token: fields.array()?,
                instance: fields.array()?,
                session: fields.array()?,
                lane: fields.u32()?,
                proof_bytes: fields.u32()?,
            })
        };
        let hello = parse().ok_or(InvalidFrame::Cut)?;
        if hello.proof_bytes > MAX_PROOF_BYTES {
            return Err(InvalidFrame::Length(hello.proof_bytes.into()));
        }
        if hello.lane >= 1024 {
            return Err(InvalidFrame::Count(hello.lane));
        }
        Ok(hello)
    }
}

/// The server's answer to a [`Hello`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Welcome {
    pub(crate) admitted: bool,
    /// Who serves.
    pub(crate) instance: [u8; 16],
    /// How many bytes of further proof follow.
    pub(crate) proof_bytes: u32,
}

impl Welcome {
    pub(crate) const BYTES: usize = 8 + 4 + 4 + 16 + 4;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = Vec::with_capacity(Self::BYTES);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(u32::from(self.admitted).to_le_bytes());
        out.extend(self.instance);
        out.extend(self.proof_bytes.to_le_bytes());
        fixed(&out)
    }

    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, InvalidFrame> {
        let mut fields = Fields(bytes);
        opening(&mut fields)?;
        let admitted = fields.u32().ok_or(InvalidFrame::Cut)?;
        let instance = fields.array().ok_or(InvalidFrame::Cut)?;
        let proof_bytes = fields.u32().ok_or(InvalidFrame::Cut)?;
        if proof_bytes > MAX_PROOF_BYTES {
            return Err(InvalidFrame::Length(proof_bytes.into()));
        }
        Ok(Self { admitted: admitted == 1, instance, proof_bytes })
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
    /// Put the bytes that follow there.
    Write = 2,
    /// Here is a message for your caller.
    Notify = 3,
    /// Which regions have you registered?
    Table = 4,
}

/// The header of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) verb: Verb,
    /// How many pieces follow.
    pub(crate) pieces: u32,
    /// The client's number for it. Those of a session's notifications only ever rise, and the
    /// server takes in each of them once.
    pub(crate) id: u64,
    /// How many bytes are moved in all.
    pub(crate) bytes: u64,
}

impl Request {
    pub(crate) const BYTES: usize = 24;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = Vec::with_capacity(Self::BYTES);
        out.extend([self.verb as u8, 0, 0, 0]);
        out.extend(self.pieces.to_le_bytes());
        out.extend(self.id.to_le_bytes());
        out.extend(self.bytes.to_le_bytes());
        fixed(&out)
    }

    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Result<Self, InvalidFrame> {
        let mut fields = Fields(bytes);
        let [verb, reserved @ ..] = fields.array::<4>().ok_or(InvalidFrame::Cut)?;
        let verb = match verb {
            1 => Verb::Read,
            2 => Verb::Write,
            3 => Verb::Notify,
            4 => Verb::Table,
            other => return Err(InvalidFrame::Operation(other)),
        };
        if reserved != [0; 3] {
            return Err(InvalidFrame::Reserved);
        }
        let pieces = fields.u32().ok_or(InvalidFrame::Cut)?;
        let id = fields.u64().ok_or(InvalidFrame::Cut)?;
        let bytes = fields.u64().ok_or(InvalidFrame::Cut)?;
        let (fewest, most, longest) = match verb {
            Verb::Read | Verb::Write => (1, MAX_PIECES, MAX_REQUEST_BYTES),
            Verb::Notify => (0, 0, crate::transport::MAX_NOTIFICATION_BYTES as u64),
            Verb::Table => (0, 0, 0),
        };
        if pieces < fewest || pieces as usize > most {
            return Err(InvalidFrame::Count(pieces));
        }
        if bytes > longest {
            return Err(InvalidFrame::Length(bytes));
        }
        Ok(Self { verb, pieces, id, bytes })
    }

    /// How many bytes of pieces follow the header.
    pub(crate) fn piece_bytes(&self) -> usize {
        self.pieces as usize * PIECE_BYTES
    }
}

pub(crate) const PIECE_BYTES: usize = 16;

pub(crate) fn put_piece(out: &mut Vec<u8>, address: u64, bytes: u64) {
    out.extend(address.to_le_bytes());
    out.extend(bytes.to_le_bytes());
}

/// Decodes the pieces of a request and checks that they add up to what its header said.
pub(crate) fn pieces(
    request: &Request,
    bytes: &[u8],
    out: &mut Vec<(u64, u64)>,
) -> Result<(), InvalidFrame> {
    out.clear();
    let mut fields = Fields(bytes);
    let mut sum: u64 = 0;
    for _ in 0..request.pieces {
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
    /// As asked; for a read or table the bytes follow.
    Done = 0,
    /// A piece lies outside the registered regions. Nothing was moved.
    Outside = 1,
}

/// The header of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) verdict: Verdict,
    /// The request's number.
    pub(crate) id: u64,
    /// How many bytes follow; for a piece outside the regions, its address.
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn verbs() -> impl Strategy<Value = Verb> {
        prop_oneof![Just(Verb::Read), Just(Verb::Write), Just(Verb::Notify), Just(Verb::Table)]
    }

    proptest! {
        /// What is encoded decodes to itself, or was over a limit.
        #[test]
        fn requests_come_back(verb in verbs(), pieces in 0u32..1100, id in any::<u64>(), bytes in 0u64..1 << 27) {
            let request = Request { verb, pieces, id, bytes };
            match Request::decode(&request.encode()) {
                Ok(back) => prop_assert_eq!(back, request),
                Err(InvalidFrame::Count(n)) => prop_assert_eq!(n, pieces),
                Err(InvalidFrame::Length(n)) => prop_assert_eq!(n, bytes),
                Err(other) => prop_assert!(false, "{other}"),
            }
        }

        /// No bytes make the decoders panic, and nothing they let through is over a limit.
        #[test]
        fn any_bytes_are_decoded_or_refused(
            header in any::<[u8; Request::BYTES]>(),
            body in prop::collection::vec(any::<u8>(), 0..200),
            answer in any::<[u8; Answer::BYTES]>(),
            hello in any::<[u8; Hello::BYTES]>(),
            welcome in any::<[u8; Welcome::BYTES]>(),
        ) {
            let _ = Answer::decode(&answer);
            let _ = Hello::decode(&hello);
            let _ = Welcome::decode(&welcome);
            if let Ok(request) = Request::decode(&header) {
                prop_assert!(request.pieces as usize <= MAX_PIECES);
                prop_assert!(request.bytes <= MAX_REQUEST_BYTES);
                let mut out = Vec::new();
                let _ = pieces(&request, &body, &mut out);
            }
        }

        /// Valid frames with a few bytes changed: what is let through still adds up.
        #[test]
        fn mutated_pieces_add_up(
            lengths in prop::collection::vec((any::<u64>(), 1u64..100), 1..20),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        ) {
            let mut body = Vec::new();
            for &(address, bytes) in &lengths {
                put_piece(&mut body, address, bytes);
            }
            let mut header = Request {
                verb: Verb::Read,
                pieces: lengths.len() as u32,
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
            if request.verb == Verb::Read && pieces(&request, &body, &mut out).is_ok() {
                prop_assert_eq!(out.len(), request.pieces as usize);
                let sum: u128 = out.iter().map(|&(_, bytes)| u128::from(bytes)).sum();
                prop_assert_eq!(sum, u128::from(request.bytes));
                for (address, bytes) in out {
                    prop_assert!(bytes > 0 && address.checked_add(bytes).is_some());
                }
            }
        }
    }
}
