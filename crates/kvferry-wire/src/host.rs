//! A network namespace with one interface.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use crate::Error;

/// One end of the wire.
#[derive(Debug)]
pub struct Host {
    /// Where the other end finds it.
    pub address: Ipv4Addr,
    namespace: File,
}

impl Host {
    /// The host, and the end of its interface that this process holds: what is read from it the host has
    /// sent, and what is written to it the host receives.
    pub(crate) fn make(address: [u8; 4], mtu: u16) -> Result<(Self, Arc<File>), Error> {
        // A namespace belongs to a thread: this one's life is over when the host is there.
        let made = thread::spawn(move || -> Result<_, Error> {
            // SAFETY: unshare takes a number and touches no memory of ours; only this thread, which ends
            // below, is in the new namespace.
            check("a network namespace", unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
            let namespace = step("its file", File::open("/proc/thread-self/ns/net"))?;
            let interface = interface(address, mtu)?;
            Ok((Self { address: address.into(), namespace }, Arc::new(interface)))
        });
        made.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Runs something on this host, on a thread of its own. Sockets that it opens, and processes and threads
    /// that it starts, stay there.
    pub fn run<T: Send>(&self, what: impl FnOnce() -> T + Send) -> Result<T, Error> {
        thread::scope(|scope| {
            let ran = scope.spawn(|| {
                let namespace = self.namespace.as_raw_fd();
                // SAFETY: setns takes an open file and a number; only this thread moves.
                check("to enter", unsafe { libc::setns(namespace, libc::CLONE_NEWNET) })?;
                Ok(what())
            });
            ran.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// What another process enters it by, as long as this process lives: `nsenter --net=PATH command`.
    pub fn path(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", std::process::id(), self.namespace.as_raw_fd()).into()
    }
}

/// A TUN interface in the namespace of this thread, with its address, up; and the loopback interface too.
fn interface(address: [u8; 4], mtu: u16) -> Result<File, Error> {
    let tun = OpenOptions::new().read(true).write(true).open("/dev/net/tun");
    let tun = step("/dev/net/tun", tun)?;
    let mut wire = named(b"wire");
    wire.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as i16;
    ask("an interface", tun.as_raw_fd(), libc::TUNSETIFF, &mut wire)?;

    // SAFETY: socket takes numbers and touches no memory of ours.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    check("a socket to configure by", socket)?;
    // SAFETY: the number was just given to us, and nobody else has it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    let configure = |name: &[u8], what, request, set: &dyn Fn(&mut libc::ifreq)| {
        let mut asked = named(name);
        set(&mut asked);
        ask(what, socket.as_raw_fd(), request, &mut asked)
    };
    let up = |asked: &mut libc::ifreq| {
        asked.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    };
    configure(b"wire", "its address", libc::SIOCSIFADDR, &|asked| {
        asked.ifr_ifru.ifru_addr = internet(address);
    })?;
    configure(b"wire", "its network", libc::SIOCSIFNETMASK, &|asked| {
        asked.ifr_ifru.ifru_netmask = internet([255, 255, 255, 0]);
    })?;
    configure(b"wire", "its packets' size", libc::SIOCSIFMTU, &|asked| {
        asked.ifr_ifru.ifru_mtu = i32::from(mtu);
    })?;
    configure(b"wire", "to start it", libc::SIOCSIFFLAGS, &up)?;
    configure(b"lo", "to start loopback", libc::SIOCSIFFLAGS, &up)?;
    Ok(tun)
}

fn named(name: &[u8]) -> libc::ifreq {
    // SAFETY: the structure is plain numbers, for which zero is a value.
    let mut asked: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in asked.ifr_name.iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    asked
}

/// An IPv4 address in the place of any kind of address: family, port 0, and four bytes.
fn internet(address: [u8; 4]) -> libc::sockaddr {
    let mut data = [0; 14];
    for (to, from) in data[2..].iter_mut().zip(address) {
        *to = from as libc::c_char;
    }
    libc::sockaddr { sa_family: libc::AF_INET as u16, sa_data: data }
}

fn ask(
    step: &'static str,
    on: i32,
    request: libc::Ioctl,
    asked: &mut libc::ifreq,
) -> Result<(), Error> {
    // SAFETY: all requests above read or write one `ifreq`, which is what is passed.
    check(step, unsafe { libc::ioctl(on, request, std::ptr::from_mut(asked)) })
}

fn check(step: &'static str, answer: i32) -> Result<(), Error> {
    if answer < 0 {
        return Err(Error::Kernel { step, source: io::Error::last_os_error() });
    }
    Ok(())
}

fn step<T>(step: &'static str, answer: io::Result<T>) -> Result<T, Error> {
    answer.map_err(|source| Error::Kernel { step, source })
}
