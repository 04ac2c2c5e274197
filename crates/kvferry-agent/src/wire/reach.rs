//! Which addresses this side connects to, where others name them: tickets, which come through clients, and what engines
//! say of their ranks. Without a bound, whoever may send a request could have this side knock on any door.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use super::trust::Trust;
use crate::error::{Error, PeerError};

/// Addresses that begin alike, as in `10.0.0.0/8` and `fd00::/8`; or a single one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    first: IpAddr,
    bits: u8,
}

impl Network {
    /// Whether an address is one of them.
    pub fn contains(&self, address: IpAddr) -> bool {
        let ((ours, first), (theirs, other)) = (left_aligned(self.first), left_aligned(address));
        // What is shifted out of the last bit is all that there is.
        let differ = (first ^ other).checked_shr(128 - u32::from(self.bits)).unwrap_or(0);
        ours == theirs && differ == 0
    }
}

/// How long addresses of this family are, and an address with its first bit at the left.
fn left_aligned(address: IpAddr) -> (u8, u128) {
    match address.to_canonical() {
        IpAddr::V4(address) => (32, u128::from(address.to_bits()) << 96),
        IpAddr::V6(address) => (128, address.to_bits()),
    }
}

impl FromStr for Network {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let network = || {
            let (first, bits) = match text.trim().split_once('/') {
                Some((first, bits)) => (first, Some(bits.parse().ok()?)),
                None => (text.trim(), None),
            };
            let first = first.parse::<IpAddr>().ok()?.to_canonical();
            let (longest, _) = left_aligned(first);
            let bits = bits.unwrap_or(longest);
            (bits <= longest).then_some(Self { first, bits })
        };
        network().ok_or_else(|| {
            Error::Options(format!(
                "{text:?} is neither an address nor a network, such as 10.0.0.0/8 or fd00::/8"
            ))
        })
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.bits)
    }
}

/// Which addresses are connected to.
#[derive(Clone, Debug)]
pub(crate) enum Reach {
    /// All: the operator or the engine itself has named them.
    Own,
    /// Whatever can be a peer's.
    Peers,
    /// Loopback.
    Loopback,
    /// The same, for engines that run no agent.
    Foreign,
    /// Those of these networks.
    Networks(Arc<[Network]>),
}

impl Reach {
    /// Where peers are, as far as that was said; by what they prove otherwise.
    pub(crate) fn to_peers(trust: &Trust, peers: &[Network]) -> Self {
        match trust {
            _ if !peers.is_empty() => Self::Networks(peers.into()),
            Trust::Loopback => Self::Loopback,
            Trust::Key(_) | Trust::Tls(_) | Trust::Insecure => Self::Peers,
        }
    }

    /// Where engines are that run no agent, and so prove nothing, whatever the others do.
    pub(crate) fn to_foreign(trust: &Trust, peers: &[Network]) -> Self {
        match trust {
            _ if !peers.is_empty() => Self::Networks(peers.into()),
            Trust::Insecure => Self::Peers,
            Trust::Loopback | Trust::Key(_) | Trust::Tls(_) => Self::Foreign,
        }
    }

    /// Of the addresses that a name stands for, those that may be connected to; or why none may.
    pub(crate) fn choose(&self, named: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, PeerError> {
        let (mut chosen, mut refused) = (vec![], None);
        for address in named {
            match self.check(address) {
                Ok(()) => chosen.push(address),
                Err(error) => refused = Some(error),
            }
        }
        match refused {
            Some(error) if chosen.is_empty() => Err(error),
            _ => Ok(chosen),
        }
    }

    /// Whether an address may be connected to, or why not.
    pub(crate) fn check(&self, address: SocketAddr) -> Result<(), PeerError> {
        let ip = address.ip().to_canonical();
        let rule = match self {
            Self::Own => return Ok(()),
            _ if is_nobodys(ip) => {
                "a peer's address is never link-local, multicast or unspecified".to_owned()
            }
            Self::Peers => return Ok(()),
            Self::Loopback | Self::Foreign if ip.is_loopback() => return Ok(()),
            Self::Loopback => "without a key or TLS peers are looked for on loopback alone. Give \
                both sides a key, or name its network in 'peers', if it is a peer's"
                .to_owned(),
            Self::Foreign => "an engine without kvferry proves nothing, and is looked for on loopback alone. Name \
                its network in 'peers', if it is one of yours"
                .to_owned(),
            Self::Networks(networks) if networks.iter().any(|one| one.contains(ip)) => {
                return Ok(());
            }
            Self::Networks(networks) => {
                let networks: Vec<String> = networks.iter().map(Network::to_string).collect();
                format!(
                    "'peers' names only {}. Add its network there, if it is a peer's",
                    networks.join(", ")
                )
            }
        };
        Err(PeerError::OutOfReach { address, rule })
    }
}

/// Addresses that are no engine's: what answers there is this host, a network card's neighbour, or a cloud's service for
/// its machines, which tells secrets to whoever asks.
fn is_nobodys(ip: IpAddr) -> bool {
    ip.is_unspecified()
        || ip.is_multicast()
        || match ip {
            IpAddr::V4(ip) => ip.is_link_local() || ip.is_broadcast(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::trust::Key;

    fn allows(reach: &Reach, ip: &str) -> bool {
        reach.check(SocketAddr::new(ip.parse().unwrap(), 1)).is_ok()
    }

    #[test]
    fn networks_are_addresses_that_begin_alike() {
        let within = |network: &str, ip: &str| {
            network.parse::<Network>().unwrap().contains(ip.parse().unwrap())
        };
        for (network, ip) in [
            ("10.0.0.0/8", "10.255.0.1"),
            ("10.1.2.3/8", "10.9.9.9"),
            ("0.0.0.0/0", "203.0.113.9"),
            ("10.0.0.4/31", "10.0.0.5"),
            (" 10.0.0.5 ", "10.0.0.5"),
            ("10.0.0.0/8", "::ffff:10.0.0.1"),
            ("fd00::/8", "fd12::1"),
            ("::/0", "2001:db8::1"),
        ] {
            assert!(within(network, ip), "{network} {ip}");
        }
        for (network, ip) in [
            ("10.0.0.0/8", "11.0.0.1"),
            ("10.0.0.5", "10.0.0.4"),
            ("10.0.0.4/31", "10.0.0.6"),
            ("0.0.0.0/0", "::1"),
            ("::/0", "10.0.0.1"),
            ("fd00::/8", "fe00::1"),
        ] {
            assert!(!within(network, ip), "{network} {ip}");
        }
        for wrong in
            ["", "10.0.0.0/33", "10.0.0.0/", "10.0.0/8", "p.example", "fd00::/129", "1/2/3"]
        {
            assert!(wrong.parse::<Network>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_reached_depends_on_what_peers_prove_unless_it_is_said() {
        let key = Trust::Key(Key::new(b"0123456789abcdef").unwrap());
        let here = Reach::to_peers(&Trust::Loopback, &[]);
        for ip in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
            assert!(allows(&here, ip), "{ip}");
        }
        for ip in ["192.0.2.1", "10.0.0.1", "0.0.0.0", "fd00::1", "::", "::ffff:10.0.0.1"] {
            assert!(!allows(&here, ip), "{ip}");
        }
        let said = ["10.0.0.0/8".parse().unwrap(), "169.254.0.0/16".parse().unwrap()];
        for trust in [&key, &Trust::Insecure] {
            assert!(allows(&Reach::to_peers(trust, &[]), "192.0.2.1"));
            assert!(allows(&Reach::to_peers(trust, &said), "10.0.0.1"));
            assert!(!allows(&Reach::to_peers(trust, &said), "127.0.0.1"));
        }
        // Whoever says where peers are knows better.
        assert!(allows(&Reach::to_peers(&Trust::Loopback, &said), "10.0.0.1"));
        let never =
            ["169.254.169.254", "fe80::1", "::ffff:169.254.169.254", "0.0.0.0", "224.0.0.1"];
        for reach in [Reach::to_peers(&key, &[]), Reach::to_peers(&key, &said), here] {
            for ip in never {
                assert!(!allows(&reach, ip), "{reach:?} {ip}");
            }
        }
        assert!(never.iter().all(|ip| allows(&Reach::Own, ip)));
    }

    #[test]
    fn what_proves_nothing_is_reached_where_that_was_said() {
        let key = Trust::Key(Key::new(b"0123456789abcdef").unwrap());
        let said = ["10.0.0.0/8".parse().unwrap()];
        for trust in [&key, &Trust::Loopback] {
            let reach = Reach::to_foreign(trust, &[]);
            assert!(allows(&reach, "127.0.0.1") && !allows(&reach, "10.0.0.1"));
            let reach = Reach::to_foreign(trust, &said);
            assert!(allows(&reach, "10.0.0.1") && !allows(&reach, "127.0.0.1"));
        }
        let anywhere = Reach::to_foreign(&Trust::Insecure, &[]);
        assert!(allows(&anywhere, "10.0.0.1") && !allows(&anywhere, "169.254.169.254"));
    }

    /// Of a name that stands for several addresses those are taken that may be.
    #[test]
    fn of_several_addresses_those_are_chosen_that_may_be_reached() {
        let named = |ips: &[&str]| {
            ips.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 1)).collect::<Vec<_>>()
        };
        let here = Reach::to_peers(&Trust::Loopback, &[]);
        let chosen = here.choose(named(&["10.0.0.1", "127.0.0.1", "::1"])).unwrap();
        assert_eq!(chosen, named(&["127.0.0.1", "::1"]));
        assert!(here.choose(named(&["10.0.0.1", "10.0.0.2"])).is_err());
        assert_eq!(here.choose(vec![]).unwrap(), []);
    }
}
