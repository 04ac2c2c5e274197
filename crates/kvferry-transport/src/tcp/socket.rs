//! Exact, vectored transfers between a socket and memory given by address.
//!
//! Registered memory changes at any time, so no slice of it may exist: the vectored calls of the
//! standard library and of `socket2` take slices, and are not used for it.

use std::io::{self, Read};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};

/// An entry of a vectored call. Null addresses are never built: a registered region cannot hold
/// address zero, because nothing is mapped there.
pub(crate) fn entry(address: u64, bytes: u64) -> libc::iovec {
    libc::iovec { iov_base: address as *mut libc::c_void, iov_len: bytes as usize }
}

pub(crate) fn entry_of(bytes: &[u8]) -> libc::iovec {
    entry(bytes.as_ptr() as u64, bytes.len() as u64)
}

/// How many entries the kernel takes in one call.
const MAX_ENTRIES: usize = 1024;

/// Sends all bytes of all entries. The entries are used up.
///
/// A bad address is an error of the call (`EFAULT`), not a crash.
///
/// # Safety
///
/// The kernel reads the memory the entries name: it must be memory that may be read by anyone, at
/// any time, for the length of the call.
pub(crate) unsafe fn send_all(stream: &TcpStream, entries: &mut [libc::iovec]) -> io::Result<()> {
    all(entries, |message| {
        // SAFETY: the message points to live entries; the memory they name is the caller's promise.
        unsafe { libc::sendmsg(stream.as_raw_fd(), message, libc::MSG_NOSIGNAL) }
    })
}

/// Receives until all entries are full. The entries are used up.
///
/// # Safety
///
/// The kernel writes the memory the entries name: it must be memory that may be written by anyone,
/// at any time, for the length of the call.
pub(crate) unsafe fn receive_all(
    stream: &TcpStream,
    entries: &mut [libc::iovec],
) -> io::Result<()> {
    all(entries, |message| {
        // SAFETY: the message points to live entries; the memory they name is the caller's promise.
        unsafe { libc::recvmsg(stream.as_raw_fd(), message, libc::MSG_WAITALL) }
    })
}

fn all(
    mut entries: &mut [libc::iovec],
    mut call: impl FnMut(*mut libc::msghdr) -> isize,
) -> io::Result<()> {
    loop {
        while let Some(first) = entries.first()
            && first.iov_len == 0
        {
            entries = &mut entries[1..];
        }
        if entries.is_empty() {
            return Ok(());
        }
        let batch = entries.len().min(MAX_ENTRIES);
        // SAFETY: all-zero bytes are a valid `msghdr`: null pointers with zero lengths.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = entries.as_mut_ptr();
        message.msg_iovlen = batch as _;
        let mut moved = match usize::try_from(call(&raw mut message)) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(moved) => moved,
            Err(_) => {
                let error = io::Error::last_os_error();
                match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    _ => return Err(error),
                }
            }
        };
        while moved > 0 {
            let Some(first) = entries.first_mut() else {
                return Ok(());
            };
            let part = moved.min(first.iov_len);
            first.iov_base = first.iov_base.wrapping_byte_add(part);
            first.iov_len -= part;
            moved -= part;
            if first.iov_len == 0 {
                entries = &mut entries[1..];
            }
        }
    }
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

/// Sends a buffer of our own.
pub(crate) fn send_bytes(stream: &TcpStream, bytes: &[u8]) -> io::Result<()> {
    // SAFETY: the entry names a live slice, which the kernel only reads.
    unsafe { send_all(stream, &mut [entry_of(bytes)]) }
}

/// Fills a buffer of our own until a moment, however many pieces it comes in. The stream keeps a time-out.
pub(crate) fn receive_by(
    stream: &TcpStream,
    mut bytes: &mut [u8],
    until: Instant,
) -> io::Result<()> {
    while !bytes.is_empty() {
        let patience = until.saturating_duration_since(Instant::now());
        if patience.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(patience))?;
        let mut from = stream;
        match from.read(bytes) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => bytes = &mut bytes[read..],
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Fills a buffer of our own.
pub(crate) fn receive_bytes(stream: &TcpStream, bytes: &mut [u8]) -> io::Result<()> {
    let entry = entry(bytes.as_mut_ptr() as u64, bytes.len() as u64);
    // SAFETY: the entry names a live slice that is ours to write.
    unsafe { receive_all(stream, &mut [entry]) }
}
