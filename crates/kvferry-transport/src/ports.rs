//! The ports that a process may listen at.

use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;

/// Listens at an address. Where it names no port, that is the first free one of these, or any one that the system chooses
/// where there are none.
pub fn listen<T>(
    address: SocketAddr,
    ports: Option<&RangeInclusive<u16>>,
    mut listen: impl FnMut(SocketAddr) -> io::Result<T>,
) -> io::Result<T> {
    let Some(ports) = ports.filter(|_| address.port() == 0) else { return listen(address) };
    let mut taken = io::ErrorKind::AddrInUse.into();
    for port in ports.clone() {
        match listen(SocketAddr::new(address.ip(), port)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => taken = error,
            done => return done,
        }
    }
    Err(taken)
}

/// How these are said where none of them is free.
pub fn place(address: SocketAddr, ports: Option<&RangeInclusive<u16>>) -> String {
    match ports.filter(|_| address.port() == 0) {
        Some(ports) => {
            format!("{} (a port from {} to {})", address.ip(), ports.start(), ports.end())
        }
        None => address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    #[test]
    fn the_first_free_one_is_taken_and_no_other() {
        let any: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
        let one = listen(any, None, TcpListener::bind).unwrap();
        let port = one.local_addr().unwrap().port();
        let ports = port..=port;
        let error = listen(any, Some(&ports), TcpListener::bind).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        assert_eq!(place(any, Some(&ports)), format!("127.0.0.1 (a port from {port} to {port})"));
        drop(one);
        let again = listen(any, Some(&ports), TcpListener::bind).unwrap();
        assert_eq!(again.local_addr().unwrap().port(), port);
        // In their order, past those that are taken; and never where a port is named.
        let mut tried = vec![];
        let third = listen(any, Some(&(7..=9)), |at| {
            tried.push(at.port());
            if at.port() < 9 { Err(io::ErrorKind::AddrInUse.into()) } else { Ok(at.port()) }
        });
        assert_eq!((third.unwrap(), tried), (9, vec![7, 8, 9]));
        let named = (Ipv4Addr::LOCALHOST, 5).into();
        assert_eq!(listen(named, Some(&(7..=9)), |at| Ok(at.port())).unwrap(), 5);
    }

    #[test]
    fn what_is_no_question_of_the_port_is_said_at_once() {
        let any: SocketAddr = (Ipv4Addr::LOCALHOST, 0).into();
        let mut tried = 0;
        let error = listen(any, Some(&(7..=9)), |_| -> io::Result<()> {
            tried += 1;
            Err(io::ErrorKind::AddrNotAvailable.into())
        });
        assert_eq!((error.unwrap_err().kind(), tried), (io::ErrorKind::AddrNotAvailable, 1));
    }
}
