//! One connection: its task sends chunks, and settles what a broken connection leaves open.

use std::collections::VecDeque;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvferry_layout::Loops;

use super::arrival::{Arrival, Room};
use super::fetching::{self, Landing, SCATTER_PATIENCE};
use super::state::{HELLO_PATIENCE, Lane, PeerRegions, Question, State};
use crate::contract::{Error, InvalidFrame, Side};
use crate::shared::chunks::{Chunk, Chunked, Piece};
use crate::shared::io::Pauses;
use crate::shared::packing_area::Moving;
use crate::shared::spans::Spans;
use crate::shared::staging::{Full, Slot, Waiting};
use crate::shared::walk;
use crate::tcp::channel::{Broken, Channel};
use crate::tcp::frame::{self, AGAIN, Answer, Listing, Request, Verb, Verdict};
use crate::tcp::gather;

/// Bytes per request. Large enough to hide the cost of a request, small enough to spread an
/// operation over the lanes and to be cancelled soon.
const CHUNK_BYTES: u64 = 1 << 20;
/// Requests on the way per lane.
const DEPTH: usize = 4;
/// The same for what goes to slots: one part arrives, the peer gathers the next, and the request for a third is on its way.
const SLOT_DEPTH: usize = 3;
/// Parts that a card puts in place while the next arrives.
const LANDINGS: usize = 2;
/// How long a lane that waits for its peer lets what a card has done wait.
const GLANCE: Duration = Duration::from_millis(1);

/// A request that has not been answered, with its number.
enum OnTheWay {
    /// With room for what is to be fetched.
    Chunk(Arc<Chunked>, Chunk, Option<Room>, u64),
    /// A chunk that was fetched, if the peer says that it kept the slot until then. Without a chunk, a
    /// slot that was of no use.
    Release(Option<Landing>, u64),
    Question(Question, u64),
}

enum Work {
    /// Send a chunk of it.
    Operation(Arc<Chunked>),
    /// Ask for the peer's regions.
    Question(Question),
    /// Connect: there is something to do.
    Connect,
    /// Wait for what a card is putting in place.
    Land,
    /// Wait for the answer that is due.
    Answer,
    /// End.
    Closing,
}

pub(super) struct LaneTask<'a> {
    state: &'a State,
    number: usize,
    channel: Option<Channel>,
    on_the_way: VecDeque<OnTheWay>,
    /// What has come, and a card is putting in place; the first came first.
    landings: VecDeque<Landing>,
    next_request: u64,
    frame: Vec<u8>,
    /// Where packed chunks arrive, made when the first does.
    packed: Vec<u8>,
}

impl<'a> LaneTask<'a> {
    pub(super) fn new(state: &'a State, number: usize) -> Self {
        Self {
            state,
            number,
            channel: None,
            on_the_way: VecDeque::with_capacity(DEPTH),
            landings: VecDeque::with_capacity(LANDINGS),
            next_request: 1,
            frame: Vec::new(),
            packed: Vec::new(),
        }
    }

    fn lane(&self) -> &'a Lane {
        &self.state.lanes[self.number]
    }

    pub(super) async fn run(&mut self) {
        loop {
            self.settle_landings(false).await;
            let work = if self.has_room() { self.next_work().await } else { Work::Answer };
            let done = match work {
                Work::Closing => {
                    self.broken(&Error::Disconnected).await;
                    return;
                }
                Work::Answer => self.receive().await,
                Work::Land => {
                    self.settle_landings(true).await;
                    Ok(())
                }
                other => match self.connect().await {
                    Ok(()) => self.send(other).await,
                    Err(error) => {
                        decline(other, &error);
                        Ok(())
                    }
                },
            };
            if let Err(error) = done {
                self.broken(&self.state.why(error)).await;
            }
        }
    }

    /// Whether one more request may be sent.
    fn has_room(&self) -> bool {
        let chunk = |request: &&OnTheWay| matches!(request, OnTheWay::Chunk(..));
        let chunks = self.on_the_way.iter().filter(chunk).count();
        let to_slots = |request: &OnTheWay| matches!(request, OnTheWay::Chunk(_, _, Some(_), _));
        let most = match self.state.fetch() {
            None if self.on_the_way.iter().any(to_slots) => SLOT_DEPTH,
            _ => self.state.gathers,
        };
        self.on_the_way.len() < DEPTH && chunks < most
    }

    /// Settles what is in place, and waits for it where that is `all`, or more than may be under way.
    async fn settle_landings(&mut self, all: bool) {
        while let Some(first) = self.landings.front()
            && (all || self.landings.len() > LANDINGS || first.moving.outcome().is_some())
        {
            let Some(landing) = self.landings.pop_front() else { return };
            self.settle(landing).await;
        }
    }

    /// While nothing comes, what has come is settled: its operation may be waiting for nothing else.
    async fn settle_until_input(&mut self) -> Result<(), Error> {
        let until = Instant::now() + SCATTER_PATIENCE;
        let Some(channel) = &self.channel else { return Ok(()) };
        while !self.landings.is_empty() && Instant::now() < until {
            if channel.has_input_within(GLANCE).await.map_err(lost)? {
                return Ok(());
            }
            while let Some(landing) = self.landings.pop_front_if(|it| it.moving.outcome().is_some())
            {
                self.settle(landing).await;
            }
        }
        self.settle_landings(true).await;
        Ok(())
    }

    async fn settle(&self, landing: Landing) {
        if let Some((_, chunk, outcome)) = landing.wait(self.state, self.lane()).await {
            match outcome {
                Ok(()) => chunk.in_place(),
                Err(error) => chunk.fail(error),
            }
        }
    }

    /// Waits for something to do; does not wait while answers are due.
    async fn next_work(&mut self) -> Work {
        loop {
            // What is notified from here on is not missed.
            let mut notified = pin!(self.state.work.notified());
            notified.as_mut().enable();
            if let Some(work) = self.work_at_hand() {
                return work;
            }
            notified.await;
        }
    }

    /// What there is to do now.
    fn work_at_hand(&self) -> Option<Work> {
        let mut queue = self.state.queue.lock();
        if queue.closing {
            return Some(Work::Closing);
        }
        let waiting = !(queue.operations.is_empty() && queue.questions.is_empty());
        if self.channel.is_none() && waiting {
            // A lane without a connection takes nothing before it has one: opening it may take
            // long when the peer is slow, and other lanes may have theirs.
            self.state.work.notify_one();
            return Some(Work::Connect);
        }
        if let Some(question) = queue.questions.pop_front() {
            return Some(Work::Question(question));
        }
        if let Some(operation) = queue.operations.pop_front() {
            return Some(Work::Operation(operation));
        }
        match (self.on_the_way.is_empty(), self.landings.is_empty()) {
            (false, _) => Some(Work::Answer),
            (true, false) => Some(Work::Land),
            (true, true) => None,
        }
    }

    /// Opens the first connection of all.
    pub(super) async fn begin(&mut self, patience: Duration) -> Result<(), Error> {
        self.channel = Some(self.state.open(self.number, patience).await?);
        Ok(())
    }

    /// Opens the connection anew where it was lost. A peer that cannot be reached fails all
    /// operations that wait for it.
    async fn connect(&mut self) -> Result<(), Error> {
        if self.channel.is_some() {
            return Ok(());
        }
        match self.state.open(self.number, HELLO_PATIENCE).await {
            Ok(channel) => {
                self.channel = Some(channel);
                self.lane().cut_by_us.store(false, Ordering::SeqCst);
                Ok(())
            }
            Err(error) => {
                *self.lane().stream.lock() = None;
                let error = self.state.why(error);
                self.state.fail_all(&error);
                Err(error)
            }
        }
    }

    async fn send(&mut self, work: Work) -> Result<(), Error> {
        match work {
            Work::Operation(operation) => self.send_chunk(operation).await,
            Work::Question(question) => {
                let id = self.number_request();
                let header = Request { verb: Verb::Regions, spans: 0, id, bytes: 0 };
                self.on_the_way.push_back(OnTheWay::Question(question, id));
                self.tell(&header.encode()).await
            }
            Work::Connect | Work::Answer | Work::Land | Work::Closing => Ok(()),
        }
    }

    async fn tell(&mut self, frame: &[u8]) -> Result<(), Error> {
        let channel = self.channel.as_mut().ok_or(Error::Disconnected)?;
        channel.send(frame).await.map_err(lost)
    }

    fn number_request(&mut self) -> u64 {
        let id = self.next_request;
        self.next_request += 1;
        id
    }

    async fn send_chunk(&mut self, operation: Arc<Chunked>) -> Result<(), Error> {
        // First the note, then the chunk: whoever stops the operation looks the other way round,
        // and so sees the note or keeps us from taking the chunk.
        let operation_id = operation.custody().id();
        self.lane().on_the_way.lock().push(operation_id);
        let Some((chunk, more)) = operation.take(frame::MAX_SPANS, CHUNK_BYTES) else {
            self.lane().forget(operation_id);
            return Ok(());
        };
        if more {
            self.state.queue.lock().operations.push_back(operation.clone());
            self.state.work.notify_one();
        }
        let room = match (&chunk.piece, self.state.fetch()) {
            (Piece::Copies(_), None) => None,
            (Piece::Copies(_), Some(fetch)) => {
                fetching::read_otherwise(self.state, self.lane(), fetch, &operation, chunk).await;
                return Ok(());
            }
            (Piece::Packed(loops), fetch) => match self.room(&operation, loops).await {
                Ok(room) => room,
                Err(Full::Stalled) if fetch.is_some() => {
                    self.read_directly(operation, chunk);
                    return Ok(());
                }
                Err(Full::Moving | Full::Stalled) => {
                    self.put_back(operation, chunk);
                    // What is on the way here is what others wait for.
                    return if self.on_the_way.is_empty() { Ok(()) } else { self.receive().await };
                }
            },
        };
        let id = self.number_request();
        self.frame.clear();
        let header = |verb, spans, bytes| Request { verb, spans, id, bytes };
        match &chunk.piece {
            Piece::Copies(copies) => {
                let spans = copies.len() as u32;
                self.frame.extend(header(Verb::Read, spans, chunk.bytes).encode());
                for copy in copies {
                    frame::put_span(&mut self.frame, copy.source, copy.bytes);
                }
            }
            Piece::Packed(loops) => {
                self.frame.resize(Request::BYTES, 0);
                gather::encode(loops, &mut self.frame);
                let body = (self.frame.len() - Request::BYTES) as u32;
                let bytes = loops.packed_bytes().unwrap_or(u64::MAX);
                let header = header(Verb::Gather, body, bytes).encode();
                self.frame[..Request::BYTES].copy_from_slice(&header);
            }
        }
        self.on_the_way.push_back(OnTheWay::Chunk(operation, chunk, room, id));
        let channel = self.channel.as_mut().ok_or(Error::Disconnected)?;
        channel.send(&self.frame).await.map_err(lost)
    }

    /// Takes memory of our own for a chunk, before the peer is asked for it. A lane waits for some only while it
    /// has none in hand, nor any of the peer's.
    async fn room(&mut self, operation: &Chunked, loops: &Loops) -> Result<Option<Room>, Full> {
        if self.on_the_way.is_empty() {
            self.settle_landings(true).await;
        }
        let custody = operation.custody();
        let patience = match self.on_the_way.is_empty() {
            true => custody.deadline().saturating_duration_since(Instant::now()),
            false => Duration::ZERO,
        };
        let (mut waiting, mut pauses) = (Waiting::new(patience), Pauses::default());
        loop {
            let room = match &self.state.arrival {
                Arrival::Fetched(fetch) => fetch.room(loops, &mut waiting)?,
                Arrival::Sent(rooms) if rooms.are_needed() => rooms.take(&mut waiting)?,
                Arrival::Sent(_) => return Ok(None),
            };
            if room.is_some() {
                return Ok(room);
            }
            if custody.is_stopped() || self.state.queue.lock().closing {
                return Err(Full::Moving);
            }
            pauses.pause().await;
        }
    }

    /// Takes in the answer to the oldest request.
    async fn receive(&mut self) -> Result<(), Error> {
        let lane = self.lane();
        self.settle_until_input().await?;
        let Some(request) = self.on_the_way.front_mut() else { return Err(Error::Disconnected) };
        let Some(channel) = &mut self.channel else { return Err(Error::Disconnected) };
        let answer = receive_answer(channel, &mut self.frame).await?;
        let (OnTheWay::Chunk(_, _, _, id) | OnTheWay::Release(_, id) | OnTheWay::Question(_, id)) =
            request;
        if answer.id != *id {
            return Err(Error::PeerMisbehaved(InvalidFrame::Answer));
        }
        // What the answer means, as long as the request is still on the list: if the connection
        // breaks now, the request is on it.
        let mut regions = None;
        let mut fetched = None;
        let mut landing = None;
        match (request, answer.verdict) {
            (OnTheWay::Chunk(operation, chunk, room, _), Verdict::Done) => {
                match (&chunk.piece, self.state.fetch(), room.take()) {
                    (Piece::Packed(loops), Some(fetch), Some(room)) => {
                        let (state, custody) = (self.state, operation.custody());
                        let from = (answer.bytes, room);
                        let fetching = fetching::fetch(state, lane, fetch, custody, loops, from);
                        fetched = Some(fetching.await?);
                    }
                    (Piece::Packed(loops), None, Some(room)) => {
                        let stopped = operation.custody().is_stopped();
                        let taken = take_to_slot(channel, loops, room, answer.bytes, stopped);
                        landing = Some(taken.await?);
                    }
                    _ => take_in(channel, &mut self.packed, operation, chunk, answer.bytes).await?,
                }
            }
            (OnTheWay::Release(..), Verdict::Done) if answer.bytes == 0 => {}
            (OnTheWay::Question(..), Verdict::Done) => {
                regions = Some(receive_regions(channel, answer.bytes).await?);
            }
            (OnTheWay::Chunk(..), Verdict::Outside) => {}
            (
                OnTheWay::Chunk(_, Chunk { piece: Piece::Packed(_), .. }, ..),
                Verdict::Busy | Verdict::Unable,
            ) => {}
            (OnTheWay::Chunk(..), Verdict::Busy | Verdict::Unable)
            | (OnTheWay::Release(..), _)
            | (OnTheWay::Question(..), Verdict::Outside | Verdict::Busy | Verdict::Unable) => {
                return Err(Error::PeerMisbehaved(InvalidFrame::Answer));
            }
        }
        match self.on_the_way.pop_front() {
            Some(OnTheWay::Chunk(operation, chunk, ..)) if fetched.is_some() => {
                let kept = match fetched.flatten() {
                    Some((moving, slot)) => Some(Landing { operation, chunk, moving, slot }),
                    None => {
                        self.read_directly(operation, chunk);
                        None
                    }
                };
                let id = self.number_request();
                let verb = Verb::Release;
                let header = Request { verb, spans: 0, id, bytes: answer.bytes };
                self.on_the_way.push_back(OnTheWay::Release(kept, id));
                self.tell(&header.encode()).await?;
            }
            Some(OnTheWay::Release(Some(landing), _)) => self.settle(landing).await,
            Some(OnTheWay::Release(None, _)) => {}
            Some(OnTheWay::Chunk(operation, chunk, ..)) if landing.is_some() => match landing {
                Some(Ok((moving, slot))) => {
                    self.landings.push_back(Landing { operation, chunk, moving, slot });
                }
                Some(Err(error)) => {
                    self.lane().forget(operation.custody().id());
                    chunk.fail(error);
                }
                None => {}
            },
            Some(OnTheWay::Chunk(operation, chunk, room, _)) => {
                drop(room);
                if answer.verdict == Verdict::Busy {
                    match answer.bytes {
                        AGAIN => self.put_back(operation, chunk),
                        _ => self.read_directly(operation, chunk),
                    }
                    return Ok(());
                }
                self.lane().forget(operation.custody().id());
                match answer.verdict {
                    Verdict::Done => chunk.in_place(),
                    Verdict::Outside => {
                        let error = outside(&chunk, answer.bytes);
                        chunk.fail(error);
                    }
                    Verdict::Unable => chunk.fail(Error::Library(
                        "the peer's GPU does not gather what was asked for: see its log".to_owned(),
                    )),
                    Verdict::Busy => {}
                }
            }
            Some(OnTheWay::Question(question, _)) => {
                if let Some(regions) = regions {
                    question.answer(Ok(regions));
                }
            }
            None => {}
        }
        Ok(())
    }

    /// A chunk whose turn has not come goes back to the queue, behind what others wait for.
    fn put_back(&self, operation: Arc<Chunked>, chunk: Chunk) {
        self.lane().forget(operation.custody().id());
        if operation.try_again(chunk, None) {
            let mut queue = self.state.queue.lock();
            // Once is enough, however often this happens.
            if !queue.operations.iter().any(|other| Arc::ptr_eq(other, &operation)) {
                queue.operations.push_back(operation);
            }
            drop(queue);
            self.state.work.notify_one();
        }
    }

    /// A chunk that cannot be packed goes back to the queue, as copies.
    fn read_directly(&self, operation: Arc<Chunked>, chunk: Chunk) {
        self.lane().forget(operation.custody().id());
        if operation.unpack(chunk, frame::MAX_SPANS) {
            self.state.queue.lock().operations.push_front(operation);
            self.state.work.notify_one();
        }
    }

    /// The connection is no more: whatever was on it is sorted out. Only this task puts bytes into
    /// the destinations, and a card for it; both have stopped, so all of it may be tried again.
    pub(super) async fn broken(&mut self, error: &Error) {
        // What has come is none the worse for it.
        self.settle_landings(true).await;
        let by_us = self.lane().cut_by_us.swap(false, Ordering::SeqCst);
        let error = (!by_us).then_some(error);
        self.lane().cut();
        self.channel = None;
        *self.lane().stream.lock() = None;
        if let Some(error) = error {
            let peer = self.state.secret.instance;
            tracing::debug!("a connection to {peer} broke: {error}");
            if *error == Error::PeerMisbehaved(InvalidFrame::Changed) {
                self.state.complain(error);
            }
        }
        while let Some(request) = self.on_the_way.pop_front() {
            match request {
                OnTheWay::Chunk(operation, chunk, ..) => {
                    self.lane().forget(operation.custody().id());
                    if operation.try_again(chunk, error) {
                        self.state.queue.lock().operations.push_front(operation);
                        self.state.work.notify_one();
                    }
                }
                OnTheWay::Release(None, _) => {}
                // Whether the peer kept the slot will never be known.
                OnTheWay::Release(Some(landing), _) => {
                    let landed = landing.wait(self.state, self.lane()).await;
                    let Some((operation, chunk, outcome)) = landed else { continue };
                    if let Err(error) = outcome {
                        chunk.fail(error);
                    } else if operation.try_again(chunk, error) {
                        self.state.queue.lock().operations.push_front(operation);
                        self.state.work.notify_one();
                    }
                }
                OnTheWay::Question(question, _) if Instant::now() >= question.until => {}
                OnTheWay::Question(question, _) => {
                    self.state.queue.lock().questions.push_back(question);
                    self.state.work.notify_one();
                }
            }
        }
    }
}

/// Takes in the bytes of a chunk, and puts them where they belong.
async fn take_in(
    channel: &mut Channel,
    packed: &mut Vec<u8>,
    operation: &Chunked,
    chunk: &Chunk,
    bytes: u64,
) -> Result<(), Error> {
    let expected = match &chunk.piece {
        Piece::Copies(_) => Some(chunk.bytes),
        Piece::Packed(loops) => loops.packed_bytes(),
    };
    if expected != Some(bytes) {
        return Err(Error::PeerMisbehaved(InvalidFrame::Length(bytes)));
    }
    match &chunk.piece {
        Piece::Copies(copies) => {
            let ours = copies.iter().map(|copy| (copy.destination, copy.bytes));
            // SAFETY: the destinations lie in registered regions (`Regions::admit`), which may
            // be written at any time and which the operation holds until its chunks are settled.
            unsafe { channel.receive_spans(ours) }.await.map_err(lost)
        }
        Piece::Packed(loops) => {
            // The peer's slots are longer where a card fills them.
            let least = bytes.max(gather::SLOT_BYTES) as usize;
            packed.resize(packed.len().max(least), 0);
            let packed = &mut packed[..bytes as usize];
            channel.receive_own(packed).await.map_err(lost)?;
            if operation.custody().is_stopped() {
                return Ok(());
            }
            let scatter = loops.scatter(packed.as_ptr() as u64);
            let scatter = scatter.map_err(|e| Error::PeerMisbehaved(InvalidFrame::Loops(e)))?;
            // SAFETY: what is read lies in the buffer, which is as long as both halves say. What
            // is written lies in registered regions (`Regions::hold`), which may be written at any
            // time and which the operation holds until its chunks are settled.
            unsafe { walk::carry_out(&scatter) };
            Ok(())
        }
    }
}

async fn receive_answer(channel: &mut Channel, frame: &mut Vec<u8>) -> Result<Answer, Error> {
    if !channel.receive(frame).await.map_err(lost)? {
        return Err(lost(io::Error::from(io::ErrorKind::UnexpectedEof).into()));
    }
    let answer = frame[..].try_into().map_err(|_| InvalidFrame::Length(frame.len() as u64));
    answer.and_then(Answer::decode).map_err(Error::PeerMisbehaved)
}

/// Takes in the bytes of a chunk to a slot, and starts to put them where they belong. An error of the card's is its own.
async fn take_to_slot(
    channel: &mut Channel,
    loops: &Loops,
    mut room: Room,
    bytes: u64,
    stopped: bool,
) -> Result<Result<(Moving, Slot), Error>, Error> {
    if loops.packed_bytes() != Some(bytes) || bytes > room.slot.bytes() {
        return Err(Error::PeerMisbehaved(InvalidFrame::Length(bytes)));
    }
    // SAFETY: slots for what comes on a connection are in the host's memory, too, and no card has been told of this one.
    let slot = unsafe { room.slot.host_bytes(bytes) };
    channel.receive_own(slot).await.map_err(lost)?;
    if stopped {
        return Ok(Ok((Moving::nothing(), room.slot)));
    }
    // SAFETY: what is read lies in the slot, which is as long as both halves say. What is written lies in registered
    // regions (`Regions::hold`), all of the slot's card (`Tcp::register`), which may be written at any time and which the
    // operation holds until its chunks are settled: this one, when the bytes have been moved.
    let moving = unsafe { room.scatter(loops)? };
    let none = || Err(Error::Library("there is no card to put bytes in place".to_owned()));
    Ok(moving.unwrap_or_else(none).map(|moving| (moving, room.slot)))
}

fn decline(work: Work, error: &Error) {
    match work {
        Work::Operation(operation) => operation.custody().stop(error.clone()),
        Work::Question(question) => question.answer(Err(error.clone())),
        Work::Connect | Work::Answer | Work::Land | Work::Closing => {}
    }
}

fn lost(why: Broken) -> Error {
    match why {
        Broken::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Error::PeerLost("the connection was closed".to_owned())
        }
        Broken::Io(error) => Error::PeerLost(error.to_string()),
        Broken::Invalid(error) => Error::PeerMisbehaved(error),
    }
}

fn outside(chunk: &Chunk, address: u64) -> Error {
    let bytes = match &chunk.piece {
        Piece::Copies(copies) => {
            copies.iter().find(|copy| copy.source == address).map_or(0, |copy| copy.bytes)
        }
        Piece::Packed(loops) => {
            let mut read = loops.nests().filter_map(|nest| nest.extents()).map(|(read, _)| read);
            read.find(|read| read.start == address).map_or(0, |read| read.end - read.start)
        }
    };
    Error::OutsideRegion { side: Side::Peer, address, bytes }
}

async fn receive_regions(channel: &mut Channel, bytes: u64) -> Result<PeerRegions, Error> {
    Listing::check_length(bytes).map_err(Error::PeerMisbehaved)?;
    let mut body = vec![0; bytes as usize];
    channel.receive_sealed(&mut body).await.map_err(lost)?;
    let Listing { generation, regions } = Listing::decode(&body).map_err(Error::PeerMisbehaved)?;
    Ok(PeerRegions { generation, spans: Spans::from_peer(regions)? })
}
