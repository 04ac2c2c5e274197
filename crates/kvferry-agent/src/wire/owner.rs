//! Whose the other end of a connection on this host is, by the kernel's word.
//!
//! Without a key, every process of the host reaches a loopback address. The kernel knows which user each end of a
//! connection belongs to, and neither end can say anything else: both look before they tell the other one anything.
//! Two containers that share the host's network and both run as root look alike.

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use socket2::{Domain, Protocol, Socket, Type};

use super::trust::Trust;
use crate::error::PeerError;

/// From the kernel's `linux/netlink.h`, `linux/sock_diag.h` and `linux/inet_diag.h`.
const AF_NETLINK: i32 = 16;
const NETLINK_SOCK_DIAG: i32 = 4;
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
const TCP: u8 = 6;
/// The header of a message, and of what it says of a socket: its family and state first, then its addresses.
const HEADER: usize = 16;
const USER: usize = HEADER + 4 + 48 + 12;
const INODE: usize = USER + 4;

/// Checks that both ends of a connection belong to one user, or the other one to root, who can read this process anyway.
/// `near` is the address of this end. To be called when the other end has accepted, and before it is believed.
pub(crate) fn check(trust: &Trust, near: SocketAddr, far: SocketAddr) -> Result<(), PeerError> {
    if !matches!(trust, Trust::Loopback) {
        return Ok(());
    }
    let unknown = |error: io::Error| PeerError::UnknownUser(error.kind());
    let ours = owner(near, far).map_err(unknown)?;
    let theirs = owner(far, near).map_err(unknown)?;
    if theirs == ours || theirs == 0 { Ok(()) } else { Err(PeerError::OtherUser { theirs, ours }) }
}

/// The user whose process holds the end of a TCP connection whose own address is `end`.
fn owner(end: SocketAddr, other: SocketAddr) -> io::Result<u32> {
    let mut socket = Socket::new(
        Domain::from(AF_NETLINK),
        Type::DGRAM,
        Some(Protocol::from(NETLINK_SOCK_DIAG)),
    )?;
    // It answers at once, or never.
    socket.set_read_timeout(Some(Duration::from_secs(1)))?;
    socket.send(&question(end, other))?;
    let mut answer = [0; 1024];
    let n = socket.read(&mut answer)?;
    read(&answer[..n])
}

fn question(end: SocketAddr, other: SocketAddr) -> Vec<u8> {
    let (ends, others) = (end.ip().to_canonical(), other.ip().to_canonical());
    let mut message = vec![];
    message.extend(72_u32.to_ne_bytes());
    message.extend(SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    message.extend(NLM_F_REQUEST.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([if ends.is_ipv4() { AF_INET } else { AF_INET6 }, TCP, 0, 0]);
    // In any state.
    message.extend(u32::MAX.to_ne_bytes());
    message.extend(end.port().to_be_bytes());
    message.extend(other.port().to_be_bytes());
    for address in [ends, others] {
        let mut bytes = [0; 16];
        match address {
            IpAddr::V4(address) => bytes[..4].copy_from_slice(&address.octets()),
            IpAddr::V6(address) => bytes = address.octets(),
        }
        message.extend(bytes);
    }
    // At any interface, and whichever of the sockets that had these addresses one after the other.
    message.extend(0_u32.to_ne_bytes());
    message.extend(u64::MAX.to_ne_bytes());
    message
}

fn read(answer: &[u8]) -> io::Result<u32> {
    let number = |at: usize| {
        let bytes = answer.get(at..at + 4).ok_or(io::ErrorKind::InvalidData)?;
        Ok::<_, io::Error>(u32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
    };
    let kind = answer.get(4..6).map_or(0, |kind| u16::from_ne_bytes([kind[0], kind[1]]));
    match kind {
        // What no process holds (not accepted yet, or closed already) has no user: zero would be root's.
        SOCK_DIAG_BY_FAMILY if number(INODE)? != 0 => number(USER),
        NLMSG_ERROR => {
            Err(io::Error::from_raw_os_error(number(HEADER)?.cast_signed().saturating_neg()))
        }
        _ => Err(io::ErrorKind::NotFound.into()),
    }
}
