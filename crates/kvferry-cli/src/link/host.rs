//! What this host says of its interfaces, and its kernel of a connection.

use std::ffi::CStr;
use std::net::{IpAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::path::Path as File;
use std::{fs, io, ptr};

use super::words::{Host, Interface, Path, Sent};

/// Where Linux lists interfaces.
pub(super) const SYSTEM: &str = "/sys/class/net";

/// The end of a link at this address, which is said to be another one to others.
pub(super) fn describe(local: IpAddr, advertised: IpAddr, memory: String) -> Host {
    let of_address = addresses().into_iter().find(|(address, _)| *address == local);
    let interface = of_address.map(|(_, name)| interface(File::new(SYSTEM), &name));
    let fastest_other = fastest_besides(File::new(SYSTEM), interface.as_ref());
    Host { address: advertised, memory, interface, fastest_other }
}

/// One interface.
pub(super) fn interface(system: &File, name: &str) -> Interface {
    let read = |what: &str| {
        let text = fs::read_to_string(system.join(name).join(what)).ok()?;
        text.trim().parse::<i64>().ok().filter(|&value| value > 0)
    };
    Interface {
        name: name.to_owned(),
        megabits: read("speed").and_then(|value| value.try_into().ok()),
        mtu: read("mtu").and_then(|value| value.try_into().ok()),
    }
}

/// The fastest of the others that are up and a card: what only the kernel has made says a speed that it made up.
pub(super) fn fastest_besides(system: &File, used: Option<&Interface>) -> Option<Interface> {
    let names = fs::read_dir(system).into_iter().flatten().flatten();
    let names = names.filter(|entry| entry.path().join("device").exists()).filter(|entry| {
        fs::read_to_string(entry.path().join("operstate")).is_ok_and(|state| state.trim() == "up")
    });
    names
        .filter_map(|entry| Some(interface(system, entry.file_name().to_str()?)))
        .filter(|one| used.is_none_or(|used| used.name != one.name))
        .filter(|one| one.megabits.is_some())
        .max_by_key(|one| one.megabits)
}

/// The addresses of this host, each with the name of its interface.
pub(super) fn addresses() -> Vec<(IpAddr, String)> {
    let mut list = ptr::null_mut();
    // SAFETY: it fills in the pointer, or says that it has not.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        return vec![];
    }
    let (mut found, mut next) = (vec![], list);
    // SAFETY: a list as the system made it: each entry and what it points to live until the list is freed.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: as above; an address is as long as its family says.
        let address = unsafe {
            match entry.ifa_addr.as_ref().map(|address| i32::from(address.sa_family)) {
                Some(libc::AF_INET) => {
                    let address = entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned();
                    IpAddr::from(address.sin_addr.s_addr.to_ne_bytes())
                }
                Some(libc::AF_INET6) => {
                    let address = entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned();
                    IpAddr::from(address.sin6_addr.s6_addr)
                }
                _ => continue,
            }
        };
        // SAFETY: a name ends with a zero byte.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        found.push((address, name.to_string_lossy().into_owned()));
    }
    // SAFETY: made above, freed once, and nothing points into it any more.
    unsafe { libc::freeifaddrs(list) };
    found
}

fn of_connection(socket: &TcpStream) -> io::Result<libc::tcp_info> {
    // SAFETY: all zeros are a valid value: numbers alone.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the value is live and as long as is said; an older kernel fills in less of it.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    if done == 0 { Ok(info) } else { Err(io::Error::last_os_error()) }
}

/// The way of a connection.
pub(super) fn path(socket: &TcpStream) -> Path {
    of_connection(socket).map_or_else(
        |_| Path::default(),
        |info| Path {
            mtu: info.tcpi_pmtu,
            segment: info.tcpi_snd_mss,
            round_trip_us: info.tcpi_rtt,
        },
    )
}

/// What a connection has sent.
pub(super) fn sent(socket: &TcpStream) -> io::Result<Sent> {
    of_connection(socket).map(|info| Sent {
        segments: info.tcpi_segs_out.into(),
        retransmitted: info.tcpi_total_retrans.into(),
    })
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    #[test]
    fn interfaces_and_their_speeds() {
        let root = std::env::temp_dir().join(format!("kvferry-net-{}", std::process::id()));
        let make = |name: &str, speed: &str, state: &str, card: bool| {
            let folder = root.join(name);
            fs::create_dir_all(&folder).unwrap();
            for (file, text) in [("speed", speed), ("operstate", state), ("mtu", "9000\n")] {
                fs::write(folder.join(file), text).unwrap();
            }
            if card {
                fs::create_dir_all(folder.join("device")).unwrap();
            }
        };
        make("eth0", "1000\n", "up\n", true);
        make("eth1", "100000\n", "up\n", true);
        make("eth2", "400000\n", "down\n", true);
        make("eth3", "-1\n", "up\n", true);
        make("veth", "10000\n", "up\n", false);
        let used = interface(&root, "eth0");
        let other = fastest_besides(&root, Some(&used));
        let last = fastest_besides(&root, other.as_ref());
        fs::remove_dir_all(&root).unwrap();
        let (name, mtu) = ("eth0".to_owned(), Some(9000));
        assert_eq!(used, Interface { name, megabits: Some(1000), mtu });
        assert_eq!(other.unwrap().name, "eth1");
        assert_eq!(last.unwrap().name, "eth0");
        assert_eq!(interface(&root, "none").megabits, None);
    }

    #[test]
    fn the_kernel_knows_the_way_of_a_connection() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let Path { mtu, segment, .. } = path(&stream);
        assert!(mtu >= segment && segment > 0, "{mtu} {segment}");
        assert!(sent(&stream).is_ok());
        let here = IpAddr::from(Ipv4Addr::LOCALHOST);
        assert!(addresses().iter().any(|(address, _)| *address == here));
        assert_eq!(describe(here, here, String::new()).address, here);
    }
}
