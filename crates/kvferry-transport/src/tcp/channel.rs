//! A connection whose ends have proved themselves: frames go sealed, each behind its length; what is moved goes sealed in
//! pieces, or as it is.

use std::io;
use std::iter::once;
use std::net::TcpStream;
use std::time::Duration;

use super::frame::LONGEST;
use super::proof::End;
use super::seal::{Direction, Secrets, TAG, Terms};
use super::socket::{Entries, Socket, place};
use crate::contract::InvalidFrame;

/// Bytes that are sealed at once: they stay in a core's cache from the copy to the socket.
const PIECE: usize = 128 << 10;
/// Of a frame's length, before it.
const LENGTH: usize = 4;

/// What moved bytes lie in.
pub(super) type Span = (u64, u64);

pub(super) struct Channel {
    socket: Socket,
    sends: Direction,
    receives: Direction,
    seals_content: bool,
    /// A sealed frame on its way out.
    frame: Vec<u8>,
    /// Where bytes of registered memory, which others may change meanwhile, are sealed and opened.
    piece: Vec<u8>,
}

/// Why a connection is of no use any more.
#[derive(Debug)]
pub(super) enum Broken {
    Io(io::Error),
    Invalid(InvalidFrame),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl From<InvalidFrame> for Broken {
    fn from(error: InvalidFrame) -> Self {
        Self::Invalid(error)
    }
}

impl Channel {
    pub(super) fn new(socket: Socket, end: End, terms: Terms, secrets: &Secrets) -> Self {
        let of = |end| {
            let secret = match end {
                End::Client => secrets.of_client,
                End::Server => secrets.of_server,
            };
            Direction::new(terms.cipher, secret)
        };
        let other = match end {
            End::Client => End::Server,
            End::Server => End::Client,
        };
        Self {
            socket,
            sends: of(end),
            receives: of(other),
            seals_content: terms.content,
            frame: vec![],
            piece: vec![],
        }
    }

    pub(super) fn stream(&self) -> &TcpStream {
        self.socket.stream()
    }

    /// Waits for something to come, but not for longer than that. Whether there is something.
    pub(super) async fn has_input_within(&self, most: Duration) -> Result<bool, Broken> {
        Ok(self.socket.has_input_within(most).await?)
    }

    /// How long a task waits for bytes that are to come.
    pub(super) fn receive_within(&mut self, most: Option<Duration>) {
        self.socket.receive_within(most);
    }

    /// Puts a frame, sealed, into the buffer for it.
    fn put(&mut self, frame: &[u8]) {
        self.frame.clear();
        self.frame.extend((frame.len() as u32).to_le_bytes());
        self.frame.extend(frame);
        let tag = self.sends.seal(&mut self.frame[LENGTH..]);
        self.frame.extend(tag);
    }

    /// Sends a frame.
    pub(super) async fn send(&mut self, frame: &[u8]) -> Result<(), Broken> {
        self.put(frame);
        Ok(self.socket.send([&self.frame]).await?)
    }

    /// Sends a frame and the bytes of spans.
    ///
    /// # Safety
    ///
    /// The spans are memory that may be read by anyone, at any time, until this returns.
    pub(super) async unsafe fn send_spans(
        &mut self,
        frame: &[u8],
        spans: &[Span],
    ) -> Result<(), Broken> {
        self.put(frame);
        if !self.seals_content {
            let entries = Entries::of(once(place(&self.frame)).chain(spans.iter().copied()));
            // SAFETY: of the spans, the caller's promise; the frame is our own.
            return unsafe { self.socket.send_all(entries) }.await.map_err(Broken::from);
        }
        self.piece.resize(PIECE, 0);
        let mut spans = Spans { spans: spans.iter().copied(), left: (0, 0) };
        loop {
            let mut bytes = 0;
            while let Some((from, some)) = spans.next(PIECE - bytes) {
                let to = self.piece[bytes..bytes + some].as_mut_ptr();
                // SAFETY: the caller's promise; the destination is our own, and that long.
                unsafe { to.copy_from_nonoverlapping(from as *const u8, some) };
                bytes += some;
            }
            if bytes == 0 {
                return Ok(());
            }
            let tag = self.sends.seal(&mut self.piece[..bytes]);
            self.socket.send([&self.frame, &self.piece[..bytes], &tag]).await?;
            self.frame.clear();
        }
    }

    /// Sends a frame and bytes of our own, which are lost for it.
    pub(super) async fn send_own(&mut self, frame: &[u8], bytes: &mut [u8]) -> Result<(), Broken> {
        if self.seals_content {
            return self.send_sealed(frame, bytes).await;
        }
        self.put(frame);
        Ok(self.socket.send([&self.frame, bytes]).await?)
    }

    /// The same, sealed whatever was agreed.
    pub(super) async fn send_sealed(
        &mut self,
        frame: &[u8],
        bytes: &mut [u8],
    ) -> Result<(), Broken> {
        self.put(frame);
        for piece in bytes.chunks_mut(PIECE) {
            let tag = self.sends.seal(piece);
            self.socket.send([&self.frame, piece, &tag]).await?;
            self.frame.clear();
        }
        Ok(())
    }

    /// Puts the next frame in place of another. Whether there is one, or the other end has hung up.
    pub(super) async fn receive(&mut self, frame: &mut Vec<u8>) -> Result<bool, Broken> {
        let mut length = [0; LENGTH];
        match self.socket.receive([&mut length]).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
            other => other?,
        }
        let length = u32::from_le_bytes(length) as usize;
        // Before there is a place for it.
        if length > LONGEST {
            return Err(InvalidFrame::Length(length as u64).into());
        }
        frame.resize(length, 0);
        let mut tag = [0; TAG];
        self.socket.receive([frame, &mut tag]).await?;
        self.receives.open(frame, tag)?;
        Ok(true)
    }

    /// Receives bytes to spans.
    ///
    /// # Safety
    ///
    /// The spans are memory that may be written by anyone, at any time, until this returns.
    pub(super) async unsafe fn receive_spans(
        &mut self,
        spans: impl Iterator<Item = Span> + Clone,
    ) -> Result<(), Broken> {
        if !self.seals_content {
            let entries = Entries::of(spans);
            // SAFETY: the caller's promise.
            return unsafe { self.socket.receive_all(entries) }.await.map_err(Broken::from);
        }
        self.piece.resize(PIECE, 0);
        let mut left: u64 = spans.clone().map(|(_, bytes)| bytes).sum();
        let mut spans = Spans { spans, left: (0, 0) };
        while left > 0 {
            let bytes = left.min(PIECE as u64) as usize;
            let (piece, mut tag) = (&mut self.piece[..bytes], [0; TAG]);
            self.socket.receive([piece, &mut tag]).await?;
            self.receives.open(piece, tag)?;
            let mut done = 0;
            while let Some((to, some)) = spans.next(bytes - done) {
                let from = piece[done..done + some].as_ptr();
                // SAFETY: the caller's promise; the source is our own, and that long.
                unsafe { (to as *mut u8).copy_from_nonoverlapping(from, some) };
                done += some;
            }
            left -= bytes as u64;
        }
        Ok(())
    }

    /// Receives bytes to memory of our own.
    pub(super) async fn receive_own(&mut self, bytes: &mut [u8]) -> Result<(), Broken> {
        match self.seals_content {
            true => self.receive_sealed(bytes).await,
            false => Ok(self.socket.receive([bytes]).await?),
        }
    }

    /// The same, sealed whatever was agreed.
    pub(super) async fn receive_sealed(&mut self, bytes: &mut [u8]) -> Result<(), Broken> {
        for piece in bytes.chunks_mut(PIECE) {
            let mut tag = [0; TAG];
            self.socket.receive([piece, &mut tag]).await?;
            self.receives.open(piece, tag)?;
        }
        Ok(())
    }
}

/// Spans, cut where a piece ends.
struct Spans<I> {
    spans: I,
    left: Span,
}

impl<I: Iterator<Item = Span>> Spans<I> {
    /// Where the next bytes are, and how many of them, at most so many. `None` where there are none left, or no room.
    fn next(&mut self, room: usize) -> Option<(u64, usize)> {
        while self.left.1 == 0 {
            self.left = self.spans.next()?;
        }
        let (at, bytes) = self.left;
        let some = bytes.min(room as u64);
        self.left = (at + some, bytes - some);
        (some > 0).then_some((at, some as usize))
    }
}
