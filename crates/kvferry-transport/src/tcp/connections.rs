//! The connections that are served, each by a task of the I/O threads: one that is slow, or asks for much, keeps none of
//! them from the others.

use std::collections::HashMap;
use std::fmt::Display;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kvferry_layout::{Loops, Place};
use parking_lot::Mutex;
use tokio::task::yield_now;

use super::bounds::Bounds;
use super::channel::{Broken, Channel};
use super::frame::{self, AGAIN, Answer, Listing, Request, Verb, Verdict};
use super::gather;
use super::proof::{End, Said, Secret};
use super::seal::Encrypt;
use super::socket::{self, Socket};
use crate::contract::{Error, InvalidFrame};
use crate::shared::io::{IoThreads, Pauses, Tasks};
use crate::shared::packing_area::{Moving, PackingArea, PackingAreas};
use crate::shared::region::{Hold, Regions};
use crate::shared::staging::{Full, Slot, Use, Waiting};
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
    pub(super) io: Weak<IoThreads>,
    pub(super) turned_away: AtomicU64,
    pub(super) mentions: Mutex<Mentions>,
    pub(super) state: Mutex<State>,
    /// That serve connections.
    pub(super) tasks: Arc<Tasks>,
}

/// How what was gathered gets to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// On the connection.
    Sent(Encrypt),
    /// By another transport: the peer is told the slot, reads it, and says so. Until then the slot is
    /// kept, for as long as the connection lives.
    Fetched,
}

impl Delivery {
    /// Whether bytes that are moved to a peer are to be encrypted.
    pub(super) fn seals(self, peer: IpAddr) -> bool {
        match self {
            Self::Sent(encrypt) => encrypt.with(peer),
            Self::Fetched => false,
        }
    }
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
    pub(super) connections: HashMap<u64, Arc<TcpStream>>,
    /// How many of them each origin has.
    held: HashMap<Origin, usize>,
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

/// What a peer has asked for, on its way to a slot.
struct Gathering<'a> {
    answer: Answer,
    place: Place,
    area: &'a PackingArea,
    /// And what is read.
    under_way: Option<(Moving, Slot, Vec<Hold>)>,
}

impl Gathering<'_> {
    /// How it ended; `None` while the card may still be at it.
    fn outcome(&self) -> Option<Result<(), Error>> {
        self.under_way.as_ref().and_then(|(moving, ..)| moving.outcome())
    }
}

impl Drop for Gathering<'_> {
    fn drop(&mut self) {
        if let Some((moving, slot, holds)) = self.under_way.take()
            && moving.outcome().is_none()
        {
            self.area.keep(moving, Box::new((slot, holds)));
        }
    }
}

/// Takes a connection off the list, however its task ends.
struct Served {
    shared: Arc<Shared>,
    id: u64,
    from: Origin,
}

impl Drop for Served {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        if let Some(stream) = state.connections.remove(&self.id) {
            let _ = stream.shutdown(Shutdown::Both);
            state.let_go(self.from);
        }
    }
}

impl Shared {
    pub(super) fn is_closing(&self) -> bool {
        self.state.lock().closing
    }

    /// Whether a connection from there may be served, too. Otherwise why not.
    pub(super) fn has_room(&self, peer: SocketAddr) -> Result<(), String> {
        self.state.lock().has_room(peer.ip().into(), self.bounds.connections)
    }

    /// Serves a connection that has proven itself, by a task of its own.
    pub(super) fn serve_from_now_on(
        self: &Arc<Self>,
        stream: TcpStream,
        peer: SocketAddr,
        said: Said,
    ) {
        let from = Origin::from(peer.ip());
        let Some(io) = self.io.upgrade() else { return };
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
        state.connections.insert(id, stream.clone());
        *state.held.entry(from).or_default() += 1;
        drop(state);
        let running = self.tasks.begin();
        let served = Served { shared: self.clone(), id, from };
        let secrets = self.secret.secrets(&said);
        io.next().spawn(async move {
            // When it ends, nothing of it is left.
            let _running = running;
            let served = served;
            let shared = &served.shared;
            let socket =
                socket::set_up(&stream).and_then(|()| Socket::new(stream, shared.bounds.sending));
            let ended = match socket {
                Ok(socket) => {
                    let channel = Channel::new(socket, End::Server, said.terms, &secrets);
                    shared.serve(channel).await
                }
                Err(error) => Err(error.into()),
            };
            match ended {
                Ok(()) => {}
                Err(Broken::Io(error)) => {
                    tracing::debug!("the connection from {peer} ended: {error}");
                }
                Err(Broken::Invalid(error)) => shared.turn_away(peer, &error),
            }
        });
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

    /// Serves one connection until it ends.
    async fn serve(&self, mut channel: Channel) -> Result<(), Broken> {
        let mut next = None;
        let ended = self.serve_until(&mut channel, &mut next).await;
        if let Some(gathering) = next {
            // A card may still be at it.
            _ = self.gathered(gathering).await;
        }
        ended
    }

    /// The same. `next` is what a card gathers while what comes before it is sent.
    async fn serve_until<'a>(
        &'a self,
        channel: &mut Channel,
        next: &mut Option<Gathering<'a>>,
    ) -> Result<(), Broken> {
        let (mut asked, mut spans) = (vec![], Vec::with_capacity(frame::MAX_SPANS));
        // What the peer has not read yet; it comes back when the connection ends.
        let mut kept: Vec<Slot> = Vec::new();
        loop {
            // Answers go in the order of the requests. One that is not ready yet is put off while there are more.
            if next.is_some() && !socket::has_input(channel.stream()) {
                self.send_gathered(channel, next.take()).await?;
            }
            // Who stops in the middle of a request must not keep a slot for ever.
            channel.receive_within(next.as_ref().map(|_| self.bounds.sending));
            if !channel.receive(&mut asked).await? {
                return Ok(());
            }
            // However fast its requests come, others have their turn.
            yield_now().await;
            let (header, body) = asked.split_first_chunk().ok_or(InvalidFrame::Cut)?;
            let request = Request::decode(header)?;
            if body.len() != request.body_bytes() {
                return Err(InvalidFrame::Length(body.len() as u64).into());
            }
            let mut answer =
                Answer { verdict: Verdict::Done, id: request.id, bytes: request.bytes };
            if request.verb != Verb::Gather {
                self.send_gathered(channel, next.take()).await?;
            }
            match request.verb {
                Verb::Read => {
                    frame::spans(&request, body, &mut spans)?;
                    // Held until the bytes are sent.
                    let _holds = match self.readable(&mut spans, Place::Host) {
                        Ok(holds) => holds,
                        Err(address) => {
                            let refused =
                                Answer { verdict: Verdict::Outside, bytes: address, ..answer };
                            channel.send(&refused.encode()).await?;
                            continue;
                        }
                    };
                    let header = answer.encode();
                    // SAFETY: the spans lie in registered regions, which may be read at any time
                    // (`Transport::register`) and are held while they are served.
                    let sent = unsafe { channel.send_spans(&header, &spans) };
                    sent.await?;
                }
                Verb::Gather if self.delivery == Delivery::Fetched => {
                    let loops = self.decode(&request, body)?;
                    let slot = match kept.len() < MAX_KEPT {
                        true => {
                            // What its peer gives back is behind this request.
                            let patience =
                                if kept.is_empty() { STAGING_PATIENCE } else { Duration::ZERO };
                            match self.gather(&request, &loops, patience).await? {
                                Ok(gathering) => self.gathered(gathering).await,
                                Err(answer) => Err(answer),
                            }
                        }
                        false => Err(Answer { verdict: Verdict::Busy, bytes: 0, ..answer }),
                    };
                    let answer = match slot {
                        Ok((slot, answer)) => {
                            let bytes = slot.address();
                            kept.push(slot);
                            Answer { bytes, ..answer }
                        }
                        Err(answer) => answer,
                    };
                    channel.send(&answer.encode()).await?;
                }
                Verb::Gather => {
                    let loops = self.decode(&request, body)?;
                    // With a slot in hand nobody waits for another.
                    let patience = if next.is_none() { STAGING_PATIENCE } else { Duration::ZERO };
                    let mut begun = self.gather(&request, &loops, patience).await?;
                    let before = next.take();
                    if before.is_some() {
                        self.send_gathered(channel, before).await?;
                        if matches!(begun, Err(Answer { verdict: Verdict::Busy, .. })) {
                            begun = self.gather(&request, &loops, STAGING_PATIENCE).await?;
                        }
                    }
                    match begun {
                        Ok(gathering) if gathering.outcome().is_none() => {
                            *next = Some(gathering);
                        }
                        Ok(gathering) => self.send_gathered(channel, Some(gathering)).await?,
                        Err(answer) => channel.send(&answer.encode()).await?,
                    }
                }
                Verb::Release => {
                    let slot = kept.iter().position(|slot| slot.address() == request.bytes);
                    let slot = slot.ok_or(InvalidFrame::Answer)?;
                    kept.swap_remove(slot);
                    answer.bytes = 0;
                    channel.send(&answer.encode()).await?;
                }
                Verb::Regions => {
                    // The generation first: a list that changes meanwhile is newer than it says.
                    let generation = self.generation.get();
                    let regions = self.regions.spans().0;
                    let mut listing = Listing { generation, regions }.encode();
                    answer.bytes = listing.len() as u64;
                    channel.send_sealed(&answer.encode(), &mut listing).await?;
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

    /// What a request asks to be gathered.
    fn decode(&self, request: &Request, body: &[u8]) -> Result<Loops, InvalidFrame> {
        let loops = gather::decode(body, self.areas.most())?;
        match loops.packed_bytes() == Some(request.bytes) {
            true => Ok(loops),
            false => Err(InvalidFrame::Length(request.bytes)),
        }
    }

    /// Begins to gather what a request asks for into a slot, or answers why not.
    async fn gather(
        &self,
        request: &Request,
        loops: &Loops,
        patience: Duration,
    ) -> Result<Result<Gathering<'_>, Answer>, Broken> {
        let answer = Answer { verdict: Verdict::Done, id: request.id, bytes: request.bytes };
        // Before anything is touched: all that the loops can reach.
        let mut spans = Vec::with_capacity(loops.nests().len());
        for nest in loops.nests() {
            let (read, _) = nest.extents().ok_or(InvalidFrame::Length(nest.run))?;
            spans.push((read.start, read.end - read.start));
        }
        let place = self.regions.spans().place(spans.iter().copied()).unwrap_or(Place::Host);
        // Held until it is gathered.
        let holds = match self.readable(&mut spans, place) {
            Ok(holds) => holds,
            Err(address) => {
                return Ok(Err(Answer { verdict: Verdict::Outside, bytes: address, ..answer }));
            }
        };
        let refused = self.not_packed(place, answer);
        let Some(area) = self.areas.of(place) else { return Ok(Err(refused)) };
        let slot = match slot(area, patience).await {
            Ok(slot) => slot,
            // What cannot be read in another way has all the time that its reader gives it.
            Err(full) if full == Full::Moving || refused.verdict == Verdict::Unable => {
                return Ok(Err(Answer { verdict: Verdict::Busy, bytes: AGAIN, ..answer }));
            }
            Err(_) => return Ok(Err(refused)),
        };
        if request.bytes > slot.bytes() {
            return Err(InvalidFrame::Length(request.bytes).into());
        }
        let gathered = loops.gather(slot.address()).map_err(InvalidFrame::Loops)?;
        // SAFETY: what is read was checked above, lies in memory of the packing area's kind that may be read at any
        // time, and is held; what is written lies in the slot, which is long enough and has no other user.
        // Both are kept until the bytes have been moved.
        Ok(match unsafe { area.start(&gathered) } {
            Ok(moving) => {
                Ok(Gathering { answer, place, area, under_way: Some((moving, slot, holds)) })
            }
            Err(_) => Err(refused),
        })
    }

    /// What is answered where memory of a place is not packed: it is read in another way, if there is one.
    fn not_packed(&self, place: Place, answer: Answer) -> Answer {
        let verdict = match (self.delivery, place) {
            (Delivery::Sent(_), Place::Gpu(_)) => Verdict::Unable,
            _ => Verdict::Busy,
        };
        Answer { verdict, bytes: 0, ..answer }
    }

    /// Waits until it is gathered, or answers why it is not.
    async fn gathered(&self, mut gathering: Gathering<'_>) -> Result<(Slot, Answer), Answer> {
        let until = Instant::now() + GATHER_PATIENCE;
        let mut pauses = Pauses::default();
        let outcome = loop {
            match gathering.outcome() {
                None if Instant::now() < until => {}
                outcome => break outcome,
            }
            pauses.pause().await;
        };
        match (outcome, gathering.under_way.take()) {
            (Some(Ok(())), Some((_, slot, _))) => Ok((slot, gathering.answer)),
            (_, under_way) => {
                // Where the card is still at it, all that it touches is kept.
                gathering.under_way = under_way;
                Err(self.not_packed(gathering.place, gathering.answer))
            }
        }
    }

    /// Sends what is gathered, if anything is.
    async fn send_gathered(
        &self,
        channel: &mut Channel,
        next: Option<Gathering<'_>>,
    ) -> Result<(), Broken> {
        let Some(gathering) = next else { return Ok(()) };
        match self.gathered(gathering).await {
            Err(answer) => channel.send(&answer.encode()).await?,
            Ok((mut slot, answer)) => {
                // SAFETY: what is sent on a connection is gathered in the host's memory, or has been copied there.
                let gathered = unsafe { slot.host_bytes(answer.bytes) };
                channel.send_own(&answer.encode(), gathered).await?;
            }
        }
        Ok(())
    }
}

/// A slot to pack into for a peer, as soon as there is one.
async fn slot(area: &PackingArea, patience: Duration) -> Result<Slot, Full> {
    let (mut waiting, mut pauses) = (Waiting::new(patience), Pauses::default());
    loop {
        match area.staging.take_now(Use::Peer, &mut waiting)? {
            Some(slot) => return Ok(slot),
            None => pauses.pause().await,
        }
    }
}
