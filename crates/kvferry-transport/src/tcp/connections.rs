//! The connections that are served, each by a thread of its own.

use std::collections::HashMap;
use std::fmt::Display;
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvferry_layout::Place;
use parking_lot::Mutex;

use super::bounds::Bounds;
use super::frame::{self, AGAIN, Answer, Listing, Request, Verb, Verdict};
use super::proof::Secret;
use super::{gather, socket};
use crate::contract::{Error, InvalidFrame};
use crate::shared::packing_area::PackingAreas;
use crate::shared::region::{Hold, Regions};
use crate::shared::staging::{Full, Slot, Use};
use crate::strangers::{Mentions, Origin};

/// How long a connection may wait for memory to pack into before its peer is told to ask again. It is deaf until
/// then.
const STAGING_PATIENCE: Duration = Duration::from_millis(50);
/// How long a card may take to gather before its peer is told to read directly.
const GATHER_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) listener: TcpListener,
    pub(super) bounds: Bounds,
    pub(super) secret: Secret,
    pub(super) regions: Arc<Regions>,
    pub(super) generation: Arc<dyn Generation>,
    pub(super) areas: Arc<PackingAreas>,
    pub(super) delivery: Delivery,
    pub(super) turned_away: AtomicU64,
    pub(super) mentions: Mutex<Mentions>,
    pub(super) state: Mutex<State>,
}

/// How what was gathered gets to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// On the connection.
    Sent,
    /// By another transport: the peer is told the slot, reads it, and says so. Until then the slot is
    /// kept, for as long as the connection lives.
    Fetched,
}

/// Slots that one connection may keep: its requests on the way, and those that it is about to release.
const MAX_KEPT: usize = 8;

/// Counts the changes of the registered regions.
pub trait Generation: std::fmt::Debug + Send + Sync {
    /// How often they have changed.
    fn get(&self) -> u64;
}

impl Generation for AtomicU64 {
    fn get(&self) -> u64 {
        self.load(Ordering::SeqCst)
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) closing: bool,
    next: u64,
    pub(super) connections: HashMap<u64, Connection>,
    /// How many of them each origin has.
    held: HashMap<Origin, usize>,
    pub(super) finished: Vec<JoinHandle<()>>,
}

impl State {
    /// An origin may have as many connections as are left for all others: one that takes all it can get leaves half of
    /// them, two leave a third, and whoever has none yet gets one as long as there is any. (An engine that reads takes
    /// up to four for each pair of ranks, or eight by `nixl`, and many may share an address.)
    fn has_room(&self, from: Origin, most: usize) -> Result<(), String> {
        let free = most.saturating_sub(self.connections.len());
        match self.held.get(&from).copied().unwrap_or_default() {
            held if held < free => Ok(()),
            held => {
                Err(format!("it has {held} of {most} connections, and {free} are left for all"))
            }
        }
    }

    fn let_go(&mut self, from: Origin) {
        if let Some(held) = self.held.get_mut(&from) {
            *held -= 1;
            if *held == 0 {
                self.held.remove(&from);
            }
        }
    }
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) stream: Arc<TcpStream>,
    pub(super) thread: Option<JoinHandle<()>>,
}

/// Why a connection ended.
#[derive(Debug)]
enum End {
    Io(io::Error),
    Invalid(InvalidFrame),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<InvalidFrame> for End {
    fn from(error: InvalidFrame) -> Self {
        Self::Invalid(error)
    }
}

impl Shared {
    /// Lets go of the threads of connections that have ended. Whether the server is closing.
    pub(super) fn tidy_up(&self) -> bool {
        let mut state = self.state.lock();
        for thread in state.finished.drain(..) {
            // It has ended, or is about to: it put itself here as its last act.
            let _ = thread.join();
        }
        state.closing
    }

    /// Whether a connection from there may be served, too. Otherwise why not.
    pub(super) fn has_room(&self, peer: SocketAddr) -> Result<(), String> {
        self.state.lock().has_room(peer.ip().into(), self.bounds.connections)
    }

    /// Gives a connection that has proven itself a thread of its own.
    pub(super) fn serve_from_now_on(self: &Arc<Self>, stream: TcpStream, peer: SocketAddr) {
        let from = Origin::from(peer.ip());
        let mut state = self.state.lock();
        if state.closing {
            return;
        }
        if let Err(why) = state.has_room(from, self.bounds.connections) {
            drop(state);
            return self.turn_away(peer, &why);
        }
        let stream = Arc::new(stream);
        let id = state.next;
        state.next += 1;
        let spawned = std::thread::Builder::new().name("kvferry-serve".to_owned()).spawn({
            let shared = self.clone();
            let stream = stream.clone();
            move || shared.run(id, &stream, peer)
        });
        match spawned {
            Ok(thread) => {
                state.connections.insert(id, Connection { stream, thread: Some(thread) });
                *state.held.entry(from).or_default() += 1;
            }
            Err(error) => tracing::warn!("starting a thread for a connection: {error}"),
        }
    }

    /// A connection is not served, or no longer: counts it, and says so now and then.
    pub(super) fn turn_away(&self, peer: SocketAddr, why: &dyn Display) {
        self.turned_away.fetch_add(1, Ordering::Relaxed);
        let from = peer.ip().to_canonical();
        if let Some(others) = self.mentions.lock().mention(from.into(), Instant::now()) {
            tracing::warn!(
                "turning away a connection from {from}: {why} ({others} others since the last such line)"
            );
        }
    }

    fn run(&self, id: u64, stream: &TcpStream, peer: SocketAddr) {
        match self.serve(stream) {
            Ok(()) => {}
            Err(End::Io(error)) => tracing::debug!("the connection from {peer} ended: {error}"),
            Err(End::Invalid(error)) => self.turn_away(peer, &error),
        }
        let _ = stream.shutdown(Shutdown::Both);
        let mut state = self.state.lock();
        if let Some(connection) = state.connections.remove(&id) {
            state.finished.extend(connection.thread);
            state.let_go(peer.ip().into());
        }
    }

    /// Serves one connection until it ends.
    fn serve(&self, stream: &TcpStream) -> Result<(), End> {
        socket::set_up(stream)?;
        // Who asks and never reads is let go: a send that moves nothing for so long is an error.
        stream.set_write_timeout(Some(self.bounds.sending))?;
        let mut body = Vec::new();
        let mut spans = Vec::with_capacity(frame::MAX_SPANS);
        let mut entries = Vec::with_capacity(frame::MAX_SPANS + 1);
        // What the peer has not read yet; it comes back when the connection ends.
        let mut kept: Vec<Slot> = Vec::new();
        loop {
            let mut header = [0; Request::BYTES];
            match socket::receive_bytes(stream, &mut header) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
                other => other?,
            }
            let request = Request::decode(&header)?;
            body.resize(request.body_bytes(), 0);
            socket::receive_bytes(stream, &mut body)?;
            let mut answer =
                Answer { verdict: Verdict::Done, id: request.id, bytes: request.bytes };
            match request.verb {
                Verb::Read => {
                    frame::spans(&request, &body, &mut spans)?;
                    // Held until the bytes are sent.
                    let _holds = match self.readable(&mut spans, Place::Host) {
                        Ok(holds) => holds,
                        Err(address) => {
                            let refused =
                                Answer { verdict: Verdict::Outside, bytes: address, ..answer };
                            socket::send_bytes(stream, &refused.encode())?;
                            continue;
                        }
                    };
                    let header = answer.encode();
                    entries.clear();
                    entries.push(socket::entry_of(&header));
                    entries.extend(spans.iter().map(|&(at, n)| socket::entry(at, n)));
                    // SAFETY: the spans lie in registered regions, which may be read at any time
                    // (`Transport::register`) and are held while they are served, or in memory to
                    // practise with, which is never written.
                    unsafe { socket::send_all(stream, &mut entries)? };
                }
                Verb::Gather => {
                    let slot = match kept.len() < MAX_KEPT {
                        true => {
                            // What its peer gives back is behind this request.
                            let patience =
                                if kept.is_empty() { STAGING_PATIENCE } else { Duration::ZERO };
                            self.gather(&request, &body, patience, &mut spans, &mut answer)?
                        }
                        false => {
                            (answer.verdict, answer.bytes) = (Verdict::Busy, 0);
                            None
                        }
                    };
                    let fetched = self.delivery == Delivery::Fetched;
                    entries.clear();
                    match slot {
                        Some(slot) if fetched => {
                            answer.bytes = slot.address();
                            kept.push(slot);
                            socket::send_bytes(stream, &answer.encode())?;
                        }
                        slot => {
                            let header = answer.encode();
                            entries.push(socket::entry_of(&header));
                            let gathered = slot.as_ref();
                            entries.extend(
                                gathered.map(|slot| socket::entry(slot.address(), answer.bytes)),
                            );
                            // SAFETY: the slot is ours until it is dropped, and as long as what was
                            // gathered.
                            unsafe { socket::send_all(stream, &mut entries)? };
                        }
                    }
                }
                Verb::Release => {
                    let slot = kept.iter().position(|slot| slot.address() == request.bytes);
                    let slot = slot.ok_or(InvalidFrame::Answer)?;
                    kept.swap_remove(slot);
                    answer.bytes = 0;
                    socket::send_bytes(stream, &answer.encode())?;
                }
                Verb::Regions => {
                    // The generation first: a list that changes meanwhile is newer than it says.
                    let generation = self.generation.get();
                    let regions = self.regions.spans().0;
                    let listing = Listing { generation, regions }.encode();
                    answer.bytes = listing.len() as u64;
                    let mut message = answer.encode().to_vec();
                    message.extend(listing);
                    socket::send_bytes(stream, &message)?;
                }
            }
        }
    }

    /// Checks the spans of a request and holds the regions they lie in. Otherwise the address that
    /// lies outside.
    fn readable(&self, spans: &mut [(u64, u64)], place: Place) -> Result<Vec<Hold>, u64> {
        self.regions.serve(spans, place).map_err(|error| match error {
            Error::OutsideRegion { address, .. } => address,
            _ => 0,
        })
    }

    /// Gathers what a request asks for into a slot, or says in the answer why not.
    fn gather(
        &self,
        request: &Request,
        body: &[u8],
        patience: Duration,
        spans: &mut Vec<(u64, u64)>,
        answer: &mut Answer,
    ) -> Result<Option<Slot>, End> {
        let loops = gather::decode(body, self.areas.most())?;
        if loops.packed_bytes() != Some(request.bytes) {
            return Err(InvalidFrame::Length(request.bytes).into());
        }
        // Before anything is touched: all that the loops can reach.
        spans.clear();
        for nest in loops.nests() {
            let (read, _) = nest.extents().ok_or(InvalidFrame::Length(nest.run))?;
            spans.push((read.start, read.end - read.start));
        }
        let place = self.regions.spans().place(spans.iter().copied()).unwrap_or(Place::Host);
        // Held until it is gathered.
        let holds = match self.readable(spans, place) {
            Ok(holds) => holds,
            Err(address) => {
                (answer.verdict, answer.bytes) = (Verdict::Outside, address);
                return Ok(None);
            }
        };
        let busy = Answer { verdict: Verdict::Busy, bytes: 0, ..*answer };
        let area = self.areas.of(place);
        let (area, slot) = match area.map(|area| (area, area.staging.take(Use::Peer, patience))) {
            Some((area, Ok(slot))) => (area, slot),
            Some((_, Err(Full::Moving))) => {
                *answer = Answer { bytes: AGAIN, ..busy };
                return Ok(None);
            }
            Some((_, Err(Full::Stalled))) | None => {
                *answer = busy;
                return Ok(None);
            }
        };
        if request.bytes > slot.bytes() {
            return Err(InvalidFrame::Length(request.bytes).into());
        }
        let gathered = loops.gather(slot.address()).map_err(InvalidFrame::Loops)?;
        // SAFETY: what is read was checked above, lies in memory of the packing area's kind that may be read at any
        // time, and is held; what is written lies in the slot, which is long enough and has no other user.
        // Both are kept until the bytes have been moved.
        let Ok(moving) = (unsafe { area.start(&gathered) }) else {
            *answer = busy;
            return Ok(None);
        };
        match moving.wait(Instant::now() + GATHER_PATIENCE) {
            Some(Ok(())) => Ok(Some(slot)),
            Some(Err(_)) => {
                *answer = busy;
                Ok(None)
            }
            None => {
                area.keep(moving, Box::new((slot, holds)));
                *answer = busy;
                Ok(None)
            }
        }
    }
}
