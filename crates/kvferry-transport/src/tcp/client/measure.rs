//! How long reads from a peer take: measured on a new connection, from memory that is there for that.
//!
//! A few milliseconds: each figure is the best of a few tries, and what a slow peer leaves no time for is
//! left open.

use std::net::TcpStream;
use std::time::{Duration, Instant};

use kvferry_layout::{BlockPair, Loop, Loops, Price};

use crate::contract::{Error, InvalidFrame};
use crate::shared::walk;
use crate::tcp::frame::{self, AGAIN, Answer, Request, Verb, Verdict};
use crate::tcp::{gather, socket};

/// No try begins after so long.
const BUDGET: Duration = Duration::from_millis(8);
/// The longest wait for one answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Tries of each kind, of which the best counts.
const TRIES: usize = 3;
/// Requests that are on the way at once, as in a real read.
const REQUESTS: u64 = 4;

/// Bytes of short pieces, and how many of them a request has.
const SHORT: u64 = 64;
const SPANS: u64 = 256;
const RUNS: u64 = 1024;
/// Bytes of a long piece.
const LONG: u64 = 128 << 10;

/// What was measured, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Measured {
    /// A small read, from the question to the answer.
    pub(crate) round_trip: f64,
    /// Reading copies one by one; `None` where there was no time to tell.
    pub(crate) direct: Option<Price>,
    /// Packing; `None` where there was no time, or where the peer has no memory to pack into.
    pub(crate) packed: Option<Price>,
    /// Whether the peer packs at all.
    pub(crate) packs: bool,
}

/// Measures. An error is a connection that is of no further use.
pub(crate) fn measure(stream: &TcpStream, deadline: Instant) -> Result<Measured, Error> {
    let began = Instant::now();
    let patience = deadline.saturating_duration_since(began);
    let lost = |error: std::io::Error| Error::PeerLost(error.to_string());
    let patience = patience.clamp(Duration::from_millis(1), PATIENCE);
    stream.set_read_timeout(Some(patience)).map_err(lost)?;
    let mut trial =
        Trial { stream, began, next: 1 << 63, only_busy: false, buffer: vec![0; 1 << 20] };
    let mut measured = Measured::default();
    // The first is slower than any other.
    trial.reads(1, SHORT, 1)?;
    measured.round_trip = trial.best(|trial| trial.reads(1, SHORT, 1))?.unwrap_or_default();
    measured.packs = trial.gathers(1, SHORT, 1)?.is_some() || trial.only_busy;
    let rest = |time: Option<f64>| time.map(|time| (time - measured.round_trip).max(0.0));
    let long = rest(trial.best(|trial| trial.reads(1, LONG, REQUESTS))?);
    let short = rest(trial.best(|trial| trial.reads(SPANS, SHORT, REQUESTS))?);
    measured.direct = price(measured.round_trip, long, short, SPANS);
    if measured.packs {
        let long = rest(trial.best(|trial| trial.gathers(1, LONG, REQUESTS))?);
        let short = rest(trial.best(|trial| trial.gathers(RUNS, SHORT, REQUESTS))?);
        measured.packed = price(measured.round_trip, long, short, RUNS);
    }
    stream.set_read_timeout(None).map_err(lost)?;
    Ok(measured)
}

/// A price from the times of requests with one long piece and of requests with many short ones.
fn price(launch: f64, long: Option<f64>, short: Option<f64>, pieces: u64) -> Option<Price> {
    let byte = long? / (REQUESTS * LONG) as f64;
    let copy = short? / (REQUESTS * pieces) as f64 - SHORT as f64 * byte;
    // Below this the clock tells nothing.
    Some(Price { launch, copy: copy.max(0.5), byte: byte.max(0.001) })
}

struct Trial<'s> {
    stream: &'s TcpStream,
    began: Instant,
    /// The number of the next request.
    next: u64,
    /// The peer has memory to pack into, all of which was in use.
    only_busy: bool,
    buffer: Vec<u8>,
}

impl Trial<'_> {
    /// The best of a few tries in nanoseconds; `None` where there is no time for one.
    fn best(
        &mut self,
        mut try_once: impl FnMut(&mut Self) -> Result<Option<f64>, Error>,
    ) -> Result<Option<f64>, Error> {
        let mut best: Option<f64> = None;
        for _ in 0..TRIES {
            if self.began.elapsed() > BUDGET {
                break;
            }
            let time = try_once(self)?;
            best = best.into_iter().chain(time).reduce(f64::min);
        }
        Ok(best)
    }

    /// Some requests at once, of `count` spans of `each` bytes.
    fn reads(&mut self, count: u64, each: u64, requests: u64) -> Result<Option<f64>, Error> {
        let mut body = vec![];
        for span in 0..count {
            frame::put_span(&mut body, span * 2 * each, each);
        }
        let header = |id| Request {
            verb: Verb::Read,
            practice: true,
            spans: count as u32,
            id,
            bytes: count * each,
        };
        self.ask(header, &body, requests, |stream, buffer| {
            let base = buffer.as_mut_ptr() as u64;
            let place = |span| socket::entry(base + span * 2 * each, each);
            let mut entries: Vec<libc::iovec> = (0..count).map(place).collect();
            // SAFETY: the entries lie in the buffer, which is ours and longer than two of all.
            unsafe { socket::receive_all(stream, &mut entries) }
        })
    }

    /// Some requests at once, each to gather `count` runs of `each` bytes. `None` where the peer has
    /// no memory to pack into.
    fn gathers(&mut self, count: u64, each: u64, requests: u64) -> Result<Option<f64>, Error> {
        let mut loops = Loops::default();
        let table = loops.add_table([BlockPair::default()]);
        let base = self.buffer.as_ptr() as u64;
        let half = self.buffer.len() as u64 / 2;
        let runs = Loop { count, source: 2 * each, destination: 2 * each };
        // Into the second half of the buffer, by way of the first.
        let sound = |error| Error::PeerMisbehaved(InvalidFrame::Loops(error));
        loops.add_nest((0, base + half), each, (0, 0), &[runs], table).map_err(sound)?;
        let scatter = loops.scatter(base).map_err(sound)?;
        let mut body = vec![];
        gather::encode(&loops, &mut body);
        let bytes = loops.packed_bytes().unwrap_or(u64::MAX);
        let spans = body.len() as u32;
        let header = |id| Request { verb: Verb::Gather, practice: true, spans, id, bytes };
        self.ask(header, &body, requests, |stream, buffer| {
            socket::receive_bytes(stream, &mut buffer[..bytes as usize])?;
            // SAFETY: both sides lie in the buffer, which is ours, each in a half of its own.
            unsafe { walk::carry_out(&scatter) };
            Ok(())
        })
    }

    /// Nanoseconds from the first request to the last byte; `None` where the peer is busy.
    fn ask(
        &mut self,
        header: impl Fn(u64) -> Request,
        body: &[u8],
        requests: u64,
        mut receive: impl FnMut(&TcpStream, &mut [u8]) -> std::io::Result<()>,
    ) -> Result<Option<f64>, Error> {
        let lost = |error: std::io::Error| Error::PeerLost(error.to_string());
        let began = Instant::now();
        let first = self.next;
        self.next += requests;
        for id in first..self.next {
            let message = [&header(id).encode()[..], body].concat();
            socket::send_bytes(self.stream, &message).map_err(lost)?;
        }
        let mut busy = false;
        for id in first..self.next {
            let mut bytes = [0; Answer::BYTES];
            socket::receive_bytes(self.stream, &mut bytes).map_err(lost)?;
            let answer = Answer::decode(&bytes).map_err(Error::PeerMisbehaved)?;
            match answer.verdict {
                Verdict::Done if answer.id == id && answer.bytes == header(id).bytes => {
                    receive(self.stream, &mut self.buffer).map_err(lost)?;
                }
                Verdict::Busy if answer.id == id => {
                    busy = true;
                    self.only_busy |= answer.bytes == AGAIN;
                }
                _ => return Err(Error::PeerMisbehaved(InvalidFrame::Answer)),
            }
        }
        Ok((!busy).then(|| began.elapsed().as_nanos() as f64))
    }
}
