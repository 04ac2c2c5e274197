//! Exact, vectored transfers between a socket and memory given by address.
//!
//! Registered memory changes at any time, so no slice of it may exist: the vectored calls of the
//! standard library and of `socket2` take slices, and are not used for it.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::yield_now;
use tokio::time::timeout;

/// Parts of memory, for one call of the system.
pub(crate) struct Entries(Vec<libc::iovec>);

// SAFETY: addresses and lengths, which mean the same on every thread. What may be done with them is said where they are
// used.
unsafe impl Send for Entries {}

impl Entries {
    /// Null addresses are never given: a registered region cannot hold address zero, because nothing is mapped there.
    pub(crate) fn of(spans: impl IntoIterator<Item = (u64, u64)>) -> Self {
        Self(spans.into_iter().map(|(at, bytes)| entry(at, bytes)).collect())
    }
}

/// One of them.
pub(crate) fn entry(address: u64, bytes: u64) -> libc::iovec {
    libc::iovec { iov_base: address as *mut libc::c_void, iov_len: bytes as usize }
}

/// Where bytes of our own lie.
pub(crate) fn place(bytes: &[u8]) -> (u64, u64) {
    (bytes.as_ptr() as u64, bytes.len() as u64)
}

/// How many entries the kernel takes in one call.
const MAX_ENTRIES: usize = 1024;

/// A call that moves so many bytes takes long enough for others to wait.
const LONG: usize = 64 << 10;
/// Of what is to come, so much comes before a task is woken, where that is not all: woken for every packet, it would take
/// longer to wake than to receive.
const ENOUGH: usize = 256 << 10;

/// A connected socket that a task waits for, so that its thread has time for others.
#[derive(Debug)]
pub(crate) struct Socket {
    fd: AsyncFd<Arc<TcpStream>>,
    /// How long it waits while nothing moves.
    sending: Duration,
    /// For ever, unless it is said.
    receiving: Option<Duration>,
    /// How many bytes have to come before it is woken.
    woken_by: AtomicUsize,
}

impl Socket {
    /// Only where tasks run.
    pub(crate) fn new(stream: Arc<TcpStream>, sending: Duration) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        // SAFETY: the descriptor is the stream's, which it keeps, and which is not closed before that.
        let fd = unsafe { AsyncFd::register(stream) }.map_err(|refused| refused.into_parts().1)?;
        Ok(Self { fd, sending, receiving: None, woken_by: AtomicUsize::new(1) })
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        self.fd.get_ref()
    }

    /// How long to wait for bytes that are to come.
    pub(crate) fn receive_within(&mut self, most: Option<Duration>) {
        self.receiving = most;
    }

    /// Sends buffers of our own.
    pub(crate) async fn send<const N: usize>(&self, parts: [&[u8]; N]) -> io::Result<()> {
        // SAFETY: live slices, borrowed until this ends or is dropped.
        unsafe { self.send_all(Entries::of(parts.map(place))) }.await
    }

    /// Fills buffers of our own.
    pub(crate) async fn receive<const N: usize>(&self, parts: [&mut [u8]; N]) -> io::Result<()> {
        let entries = parts.map(|part| (part.as_mut_ptr() as u64, part.len() as u64));
        // SAFETY: live slices that are ours to write, borrowed until this ends or is dropped.
        unsafe { self.receive_all(Entries::of(entries)) }.await
    }

    /// Sends all bytes of all entries. The entries are used up.
    ///
    /// A bad address is an error of the call (`EFAULT`), not a crash.
    ///
    /// # Safety
    ///
    /// The kernel reads the memory the entries name: it must be memory that may be read by anyone, at
    /// any time, until this ends or is dropped.
    pub(crate) async unsafe fn send_all(&self, entries: Entries) -> io::Result<()> {
        self.all(entries, Interest::WRITABLE, |socket, message| {
            // SAFETY: the message points to live entries; the memory they name is the caller's promise.
            unsafe { libc::sendmsg(socket, message, libc::MSG_NOSIGNAL) }
        })
        .await
    }

    /// Receives until all entries are full. The entries are used up.
    ///
    /// # Safety
    ///
    /// The kernel writes the memory the entries name: it must be memory that may be written by anyone,
    /// at any time, until this ends or is dropped.
    pub(crate) async unsafe fn receive_all(&self, entries: Entries) -> io::Result<()> {
        self.all(entries, Interest::READABLE, |socket, message| {
            // SAFETY: the message points to live entries; the memory they name is the caller's promise.
            unsafe { libc::recvmsg(socket, message, libc::MSG_WAITALL) }
        })
        .await
    }

    async fn all(
        &self,
        mut entries: Entries,
        interest: Interest,
        call: impl Fn(i32, *mut libc::msghdr) -> isize,
    ) -> io::Result<()> {
        let mut done = 0;
        loop {
            while let Some(0) = entries.0.get(done).map(|first| first.iov_len) {
                done += 1;
            }
            let Some(left) = entries.0.get_mut(done..).filter(|left| !left.is_empty()) else {
                return Ok(());
            };
            let moved = once(self.stream(), left, &call);
            match moved {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(moved) => {
                    done += pass(left, moved);
                    // Others have their turn.
                    if moved >= LONG {
                        yield_now().await;
                    }
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::Interrupted => {}
                    io::ErrorKind::WouldBlock => {
                        if interest.is_readable() {
                            self.wake_by(left.iter().map(|entry| entry.iov_len).sum())?;
                        }
                        self.ready(interest).await?;
                    }
                    _ => return Err(error),
                },
            }
        }
    }

    /// Waits for something to come, or its end, but not for longer than that. Whether there is something.
    pub(crate) async fn has_input_within(&self, most: Duration) -> io::Result<bool> {
        self.wake_by(1)?;
        let came = async {
            while !has_input(self.stream()) {
                // As above: what comes after the look is seen here.
                self.fd.ready(Interest::READABLE).await?.clear_ready();
            }
            Ok(())
        };
        timeout(most, came).await.map_or(Ok(false), |came: io::Result<()>| came.map(|()| true))
    }

    /// Is woken when so many bytes have come, or enough of them.
    fn wake_by(&self, left: usize) -> io::Result<()> {
        let bytes = if left < LONG { 1 } else { left.min(ENOUGH) };
        if self.woken_by.swap(bytes, Ordering::Relaxed) == bytes {
            return Ok(());
        }
        let (bytes, size) = (bytes as libc::c_int, size_of::<libc::c_int>() as libc::socklen_t);
        // SAFETY: the option's value is live, and as long as that.
        let set = unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVLOWAT,
                (&raw const bytes).cast(),
                size,
            )
        };
        if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Waits until a call that found nothing to do is worth another try.
    async fn ready(&self, interest: Interest) -> io::Result<()> {
        let most = if interest.is_writable() { Some(self.sending) } else { self.receiving };
        // The call has found it so; what came since is seen here.
        let mut guard = match most {
            Some(most) => timeout(most, self.fd.ready(interest)).await??,
            None => self.fd.ready(interest).await?,
        };
        guard.clear_ready();
        Ok(())
    }
}

/// One call. How many bytes it moved.
fn once(
    stream: &TcpStream,
    entries: &mut [libc::iovec],
    call: impl Fn(i32, *mut libc::msghdr) -> isize,
) -> io::Result<usize> {
    // SAFETY: all-zero bytes are a valid `msghdr`: null pointers with zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = entries.as_mut_ptr();
    message.msg_iovlen = entries.len().min(MAX_ENTRIES) as _;
    let moved = call(stream.as_raw_fd(), &raw mut message);
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

/// Takes bytes that were moved off the entries. How many of them are used up.
fn pass(entries: &mut [libc::iovec], mut moved: usize) -> usize {
    for (used, entry) in entries.iter_mut().enumerate() {
        let part = moved.min(entry.iov_len);
        entry.iov_base = entry.iov_base.wrapping_byte_add(part);
        entry.iov_len -= part;
        moved -= part;
        if entry.iov_len > 0 {
            return used;
        }
    }
    entries.len()
}

/// Whether a call that receives would not wait: something has come, also if it is the end.
pub(crate) fn has_input(stream: &TcpStream) -> bool {
    let mut byte = [0u8];
    let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
    // SAFETY: the buffer is live, and as long as that.
    let came = unsafe { libc::recv(stream.as_raw_fd(), byte.as_mut_ptr().cast(), 1, flags) };
    came >= 0 || io::Error::last_os_error().kind() != io::ErrorKind::WouldBlock
}

/// Sets a new connection up: nothing is held back to be sent with what comes later, and the kernel
/// notices when the other host has vanished, whether bytes are on the way to it (the time-out) or not
/// (the questions now and then), so that no thread waits for ever.
pub(crate) fn set_up(stream: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(20))
        .with_interval(Duration::from_secs(5))
        .with_retries(4);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(Duration::from_secs(40)))
}
