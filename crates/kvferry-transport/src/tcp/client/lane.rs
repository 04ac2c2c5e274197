//! The thread of one connection: it sends chunks, and settles what a broken connection leaves open.

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use kvferry_layout::Region;

use super::super::frame::{self, Answer, Request, Verb, Verdict};
use super::super::socket;
use super::{HELLO_PATIENCE, Lane, Link, Refusal, Table, TableRequest};
use crate::bytes::Fields;
use crate::error::{Error, InvalidFrame, Side};
use crate::merge::Direction;
use crate::progress::{Chunk, Next, Progress};
use crate::region::Spans;

/// Bytes per request. Large enough to hide the cost of a request, small enough to spread an
/// operation over the lanes and to be cancelled soon.
const CHUNK_BYTES: u64 = 1 << 20;
/// Requests on the way per lane.
const DEPTH: usize = 4;
/// Between two tries to learn whether a write can still land.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// A request that has not been answered.
enum OnTheWay {
    Chunk(Arc<Progress>, Chunk, u64),
    Notify(Arc<Progress>, u64),
    Table(Arc<TableRequest>, u64),
}

enum Work {
    /// Send a chunk of it.
    Operation(Arc<Progress>),
    /// Send its notification, under this number.
    Notify(Arc<Progress>, u64),
    /// Ask for the table.
    Table(Arc<TableRequest>),
    /// Connect: there is something to do, or writes that may still land must be settled.
    Connect,
    /// Wait for the answer that is due.
    Answer,
    /// End.
    Closing,
}

pub(super) struct LaneThread<'a> {
    link: &'a Arc<Link>,
    number: usize,
    stream: Option<Arc<TcpStream>>,
    on_the_way: VecDeque<OnTheWay>,
    next_request: u64,
    next_notification: u64,
    /// Notifications that were on a connection that broke, with their numbers: the peer may have
    /// them or not, and knows by the number.
    unheard: VecDeque<(Arc<Progress>, u64)>,
    /// Write chunks that were on a connection that broke: they may still land until the peer has
    /// ended its side of it.
    may_land: Vec<(Arc<Progress>, Chunk, Option<Error>)>,
    /// When to try again to learn whether they can.
    retry_at: Option<Instant>,
    entries: Vec<libc::iovec>,
    frame: Vec<u8>,
}

impl<'a> LaneThread<'a> {
    pub(super) fn new(link: &'a Arc<Link>, number: usize, stream: Option<Arc<TcpStream>>) -> Self {
        Self {
            link,
            number,
            stream,
            on_the_way: VecDeque::with_capacity(DEPTH),
            next_request: 1,
            next_notification: 1,
            unheard: VecDeque::new(),
            may_land: Vec::new(),
            retry_at: None,
            entries: Vec::with_capacity(frame::MAX_PIECES + 2),
            frame: Vec::new(),
        }
    }

    fn lane(&self) -> &'a Lane {
        &self.link.lanes[self.number]
    }

    pub(super) fn run(mut self) {
        loop {
            let work = if self.on_the_way.len() < DEPTH { self.next_work() } else { Work::Answer };
            let done = match work {
                Work::Closing => {
                    self.broken(&Error::Disconnected);
                    self.settle_writes(Some(&Error::Disconnected));
                    return;
                }
                Work::Answer => self.receive(),
                other => match self.connected() {
                    Ok(stream) => self.send(&stream, other),
                    Err(error) => {
                        self.decline(other, &error);
                        Ok(())
                    }
                },
            };
            if let Err(error) = done {
                self.broken(&error);
            }
        }
    }

    /// Waits for something to do; does not wait while answers are due.
    fn next_work(&mut self) -> Work {
        let mut queue = self.link.lock();
        loop {
            if queue.closing {
                return Work::Closing;
            }
            // A lane without a connection takes nothing before it has one: opening it may take long
            // when the peer is slow, and other lanes may have theirs.
            let waiting = !queue.operations.is_empty()
                || (self.number == 0
                    && !(queue.tables.is_empty()
                        && queue.notify.is_empty()
                        && self.unheard.is_empty()));
            if self.stream.is_none() && waiting {
                self.link.work.notify_one();
                return Work::Connect;
            }
            if self.number == 0 {
                if let Some(table) = queue.tables.pop_front() {
                    return Work::Table(table);
                }
                while let Some((operation, number)) = self.unheard.pop_front() {
                    if !operation.is_stopped() {
                        return Work::Notify(operation, number);
                    }
                }
                if let Some(operation) = queue.notify.pop_front() {
                    let number = self.next_notification;
                    self.next_notification += 1;
                    return Work::Notify(operation, number);
                }
            }
            // A write is sent only when no bytes are due from the peer: both sides would
            // otherwise be sending, and neither receiving.
            let bytes_due = self.on_the_way.iter().any(|request| match request {
                OnTheWay::Chunk(operation, ..) => operation.direction == Direction::Read,
                _ => false,
            });
            let fits =
                |operation: &Arc<Progress>| !(bytes_due && operation.direction == Direction::Write);
            if queue.operations.front().is_some_and(fits)
                && let Some(operation) = queue.operations.pop_front()
            {
                return Work::Operation(operation);
            }
            if !self.on_the_way.is_empty() {
                return Work::Answer;
            }
            let pause = if self.may_land.is_empty() {
                None
            } else {
                let now = Instant::now();
                match self.retry_at.filter(|&at| at > now) {
                    Some(at) => Some(at - now),
                    None => return Work::Connect,
                }
            };
            let work = &self.link.work;
            queue = match pause {
                None => work.wait(queue).unwrap_or_else(PoisonError::into_inner),
                Some(pause) => {
                    work.wait_timeout(queue, pause).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// The connection, opened anew where it was lost. A peer that cannot be reached fails all
    /// operations that wait for it.
    fn connected(&mut self) -> Result<Arc<TcpStream>, Error> {
        if let Some(stream) = &self.stream {
            return Ok(stream.clone());
        }
        match self.link.open_lane(self.number, HELLO_PATIENCE) {
            Ok(stream) => {
                self.stream = Some(stream.clone());
                self.lane().cut.store(false, Ordering::SeqCst);
                self.settle_writes(None);
                Ok(stream)
            }
            Err(refusal) => {
                *self.lane().lock_stream() = None;
                self.retry_at = Some(Instant::now() + RETRY_PAUSE);
                let error = refusal.error().clone();
                if matches!(refusal, Refusal::Gone(_)) {
                    self.settle_writes(Some(&error));
                }
                self.link.fail_all(&error);
                for (operation, _) in self.unheard.drain(..) {
                    operation.stop(error.clone());
                }
                Err(error)
            }
        }
    }

    fn decline(&self, work: Work, error: &Error) {
        match work {
            Work::Operation(operation) | Work::Notify(operation, _) => {
                operation.stop(error.clone());
            }
            Work::Table(table) => table.set(Err(error.clone())),
            Work::Connect | Work::Answer | Work::Closing => {}
        }
    }

    fn send(&mut self, stream: &TcpStream, work: Work) -> Result<(), Error> {
        let sent = match work {
            Work::Operation(operation) => return self.send_chunk(stream, operation),
            Work::Notify(operation, number) => {
                let message = operation.notification.clone().unwrap_or_default();
                let header = Request {
                    verb: Verb::Notify,
                    pieces: 0,
                    id: number,
                    bytes: message.len() as u64,
                };
                self.on_the_way.push_back(OnTheWay::Notify(operation, number));
                let mut frame = header.encode().to_vec();
                frame.extend(message);
                socket::send_bytes(stream, &frame)
            }
            Work::Table(table) => {
                let header =
                    Request { verb: Verb::Table, pieces: 0, id: self.number_request(), bytes: 0 };
                self.on_the_way.push_back(OnTheWay::Table(table, header.id));
                socket::send_bytes(stream, &header.encode())
            }
            Work::Connect | Work::Answer | Work::Closing => Ok(()),
        };
        sent.map_err(lost)
    }

    fn number_request(&mut self) -> u64 {
        let id = self.next_request;
        self.next_request += 1;
        id
    }

    fn send_chunk(&mut self, stream: &TcpStream, operation: Arc<Progress>) -> Result<(), Error> {
        // First the note, then the chunk: whoever stops the operation looks the other way round,
        // and so sees the note or keeps us from taking the chunk.
        self.lane().lock_on_the_way().push(operation.id);
        let Some((chunk, more)) = operation.take(frame::MAX_PIECES, CHUNK_BYTES) else {
            self.lane().forget(operation.id);
            return Ok(());
        };
        if more {
            self.link.lock().operations.push_back(operation.clone());
            self.link.work.notify_one();
        }
        let direction = operation.direction;
        let header = Request {
            verb: match direction {
                Direction::Read => Verb::Read,
                Direction::Write => Verb::Write,
            },
            pieces: chunk.copies.len() as u32,
            id: self.number_request(),
            bytes: chunk.bytes,
        };
        self.frame.clear();
        self.frame.extend(header.encode());
        for copy in &chunk.copies {
            let theirs = match direction {
                Direction::Read => copy.source,
                Direction::Write => copy.destination,
            };
            frame::put_piece(&mut self.frame, theirs, copy.bytes);
        }
        self.entries.clear();
        self.entries.push(socket::entry_of(&self.frame));
        if direction == Direction::Write {
            let ours = chunk.copies.iter();
            self.entries.extend(ours.map(|copy| socket::entry(copy.source, copy.bytes)));
        }
        self.on_the_way.push_back(OnTheWay::Chunk(operation, chunk, header.id));
        // SAFETY: the sources lie in registered regions (`Regions::admit`), which may be read at
        // any time and which the operation holds until its chunks are settled.
        unsafe { socket::send_all(stream, &mut self.entries) }.map_err(lost)
    }

    /// Takes in the answer to the oldest request.
    fn receive(&mut self) -> Result<(), Error> {
        let (Some(stream), Some(request)) = (self.stream.clone(), self.on_the_way.front()) else {
            return Err(Error::Disconnected);
        };
        let mut header = [0; Answer::BYTES];
        socket::receive_bytes(&stream, &mut header).map_err(lost)?;
        let answer = Answer::decode(&header).map_err(Error::PeerMisbehaved)?;
        let (id, bytes) = match request {
            OnTheWay::Chunk(operation, chunk, id) => match operation.direction {
                Direction::Read => (*id, Some(chunk.bytes)),
                Direction::Write => (*id, Some(0)),
            },
            OnTheWay::Notify(_, id) => (*id, Some(0)),
            OnTheWay::Table(_, id) => (*id, None),
        };
        if answer.id != id {
            return Err(Error::PeerMisbehaved(InvalidFrame::Answer));
        }
        if answer.verdict == Verdict::Done && bytes.is_some_and(|bytes| bytes != answer.bytes) {
            return Err(Error::PeerMisbehaved(InvalidFrame::Length(answer.bytes)));
        }
        if let OnTheWay::Chunk(operation, chunk, _) = request
            && answer.verdict == Verdict::Done
            && operation.direction == Direction::Read
        {
            self.entries.clear();
            let ours = chunk.copies.iter();
            self.entries.extend(ours.map(|copy| socket::entry(copy.destination, copy.bytes)));
            // SAFETY: the destinations lie in registered regions (`Regions::admit`), which may be
            // written at any time and which the operation holds until its chunks are settled.
            unsafe { socket::receive_all(&stream, &mut self.entries) }.map_err(lost)?;
        }
        let mut table = None;
        if let OnTheWay::Table(..) = request {
            table = Some(receive_table(&stream, answer.bytes)?);
        }
        match self.on_the_way.pop_front() {
            Some(OnTheWay::Chunk(operation, chunk, _)) => {
                self.lane().forget(operation.id);
                if answer.verdict == Verdict::Outside {
                    operation.settle_failed(outside(&operation, &chunk, answer.bytes));
                } else if operation.settle_done(chunk.bytes) == Next::Notify {
                    self.link.notify(operation);
                }
            }
            Some(OnTheWay::Notify(operation, _)) => operation.notified(),
            Some(OnTheWay::Table(request, _)) => {
                if let Some(table) = table {
                    request.set(Ok(table));
                }
            }
            None => {}
        }
        Ok(())
    }

    /// The connection is no more: whatever was on it is sorted out.
    fn broken(&mut self, error: &Error) {
        let own = self.lane().cut.swap(false, Ordering::SeqCst);
        let error = (!own).then_some(error);
        self.lane().cut();
        self.stream = None;
        *self.lane().lock_stream() = None;
        if let Some(error) = error {
            tracing::debug!("a connection to {} broke: {error}", self.link.instance);
        }
        while let Some(request) = self.on_the_way.pop_front() {
            match request {
                OnTheWay::Chunk(operation, chunk, _) => {
                    self.lane().forget(operation.id);
                    match operation.direction {
                        // Only this thread puts bytes there, and it has stopped.
                        Direction::Read => self.retry(operation, chunk, error),
                        Direction::Write => self.may_land.push((operation, chunk, error.cloned())),
                    }
                }
                OnTheWay::Notify(operation, number) => self.unheard.push_back((operation, number)),
                OnTheWay::Table(table, _) => {
                    // Nobody waits for it any more when this is the last hold on it.
                    if Arc::strong_count(&table) > 1 {
                        self.link.lock().tables.push_back(table);
                    }
                }
            }
        }
        self.unheard.make_contiguous().sort_unstable_by_key(|&(_, number)| number);
    }

    fn retry(&self, operation: Arc<Progress>, chunk: Chunk, error: Option<&Error>) {
        if operation.settle_retry(chunk, error) {
            self.link.lock().operations.push_front(operation);
            self.link.work.notify_one();
        }
    }

    /// The peer has ended its side of the broken connection, or is gone: nothing that was on it
    /// can land any more. With an error when they cannot be tried again either.
    fn settle_writes(&mut self, error: Option<&Error>) {
        for (operation, chunk, broken_by) in std::mem::take(&mut self.may_land) {
            self.retry(operation, chunk, error.or(broken_by.as_ref()));
        }
    }
}

fn lost(error: io::Error) -> Error {
    Error::PeerLost(match error.kind() {
        io::ErrorKind::UnexpectedEof => "the connection was closed".to_owned(),
        _ => error.to_string(),
    })
}

fn outside(operation: &Progress, chunk: &Chunk, address: u64) -> Error {
    let piece = chunk.copies.iter().find(|copy| match operation.direction {
        Direction::Read => copy.source == address,
        Direction::Write => copy.destination == address,
    });
    Error::OutsideRegion { side: Side::Peer, address, bytes: piece.map_or(0, |piece| piece.bytes) }
}

fn receive_table(stream: &TcpStream, bytes: u64) -> Result<Table, Error> {
    let invalid = Error::PeerMisbehaved(InvalidFrame::Length(bytes));
    if bytes < 8 || bytes - 8 > frame::MAX_REGIONS * frame::PIECE_BYTES as u64 {
        return Err(invalid);
    }
    let mut body = vec![0; bytes as usize];
    socket::receive_bytes(stream, &mut body).map_err(lost)?;
    let mut fields = Fields(&body);
    let generation = fields.u64().ok_or_else(|| invalid.clone())?;
    let mut regions = Vec::new();
    while !fields.0.is_empty() {
        let (Some(base), Some(bytes)) = (fields.u64(), fields.u64()) else {
            return Err(invalid);
        };
        regions.push(Region::host(base, bytes));
    }
    Ok(Table { generation, spans: Spans::from_peer(regions)? })
}
