//! A connection over which TLS is to be spoken, to somebody who may not speak it: what came first is kept, to be
//! shown. TLS itself only says that it is not TLS, and waits for more where little comes.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How TLS's first record may begin: an alert or a handshake, then its major version.
const FIRST: [&[u8]; 2] = [&[0x15, 0x16], &[0x03]];
/// How much is kept: enough for a line that says who it is.
pub(super) const KEPT: usize = 24;

pub(super) struct Overheard<S> {
    pub(super) stream: S,
    /// What came first, at most [`KEPT`] bytes.
    pub(super) first: Vec<u8>,
}

impl<S> Overheard<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, first: vec![] }
    }

    /// As far as can be told from what came.
    pub(super) fn is_tls(&self) -> bool {
        self.first.iter().zip(FIRST).all(|(byte, valid)| valid.contains(byte))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Overheard<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(context, buffer))?;
        let came = &buffer.filled()[before..];
        let room = KEPT - self.first.len();
        self.first.extend(&came[..came.len().min(room)]);
        Poll::Ready(if self.is_tls() { Ok(()) } else { Err(io::ErrorKind::InvalidData.into()) })
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Overheard<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
