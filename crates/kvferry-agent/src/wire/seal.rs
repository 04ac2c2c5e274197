//! P's word for what reaches D through routers and clients.
//!
//! A ticket names an address, and D connects there. Where engines share a key, P seals what it hands out, and D checks
//! the seal before it connects, reads or gives up anything: whoever does not hold the key can neither make up a ticket
//! nor change one. With TLS there is no secret that both sides hold, and without a key there is none at all; then
//! nothing is sealed, and the addresses that tickets may name are what is left.

use std::fmt;
use std::str::FromStr;

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::ticket::Ticket;
use super::trust::Trust;
use crate::error::Error;
use crate::rules::grant::Grant;

/// What a seal vouches for.
#[derive(Clone, Copy, Debug)]
pub enum Sealed<'a> {
    /// A ticket, and what was granted with it.
    Ticket(&'a Ticket, &'a Grant),
    /// That an engine listens at an address: all that a router passes on which sends a request to both sides at once.
    Engine {
        /// The engine.
        engine: &'a str,
        /// Where it listens: `host:port`.
        address: &'a str,
    },
}

/// A seal: 16 bytes of an HMAC with a key that is derived from the shared one. It is text in JSON.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Seal([u8; 16]);

impl Trust {
    /// The seal of what this engine hands out; `None` where the sides share no key.
    pub(crate) fn seal(&self, what: Sealed<'_>) -> Option<Seal> {
        let Self::Key(key) = self else { return None };
        let mut seal = [0; 16];
        seal.copy_from_slice(&mac(key.own(), what).finalize().into_bytes()[..16]);
        Some(Seal(seal))
    }

    /// Checks what has come through a router. Everything passes where the sides share no key.
    pub(crate) fn check_seal(&self, what: Sealed<'_>, seal: Option<Seal>) -> Result<(), Error> {
        let Self::Key(key) = self else { return Ok(()) };
        let (engine, address) = match what {
            Sealed::Ticket(ticket, _) => (&*ticket.engine, &*ticket.address),
            Sealed::Engine { engine, address } => (engine, address),
        };
        let named = || (engine.to_owned(), address.to_owned());
        match seal {
            // Takes the same time wherever it differs.
            Some(Seal(seal))
                if key
                    .accepted()
                    .any(|key| mac(key, what).verify_truncated_left(&seal).is_ok()) =>
            {
                Ok(())
            }
            Some(_) => {
                let (engine, address) = named();
                Err(Error::Forged { engine, address })
            }
            None => {
                let (engine, address) = named();
                Err(Error::Unsealed { engine, address })
            }
        }
    }
}

/// Each part with its length before it: no two lists of parts are the same bytes.
fn mac(key: &[u8; 32], what: Sealed<'_>) -> Hmac<Sha256> {
    let mut mac =
        <Hmac<Sha256> as Mac>::new_from_slice(key).expect("HMAC takes keys of any length");
    let mut part = |bytes: &[u8]| {
        mac.update(&(bytes.len() as u64).to_le_bytes());
        mac.update(bytes);
    };
    match what {
        Sealed::Ticket(ticket, grant) => {
            // By name: a field that is added to tickets does not compile until it is here.
            let Ticket { engine, address, incarnation, request, nonce, term_ms } = ticket;
            part(b"kvferry ticket");
            part(engine.as_bytes());
            part(address.as_bytes());
            part(&incarnation.0.to_le_bytes());
            part(request.as_bytes());
            part(&nonce.to_le_bytes());
            part(&term_ms.to_le_bytes());
            part(&grant.fingerprint().0);
        }
        Sealed::Engine { engine, address } => {
            part(b"kvferry engine");
            part(engine.as_bytes());
            part(address.as_bytes());
        }
    }
    mac
}

impl fmt::Display for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for Seal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Seal({self})")
    }
}

impl FromStr for Seal {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        // What is shorter or longer is another number, and no seal of anything.
        u128::from_str_radix(text, 16).map(|seal| Self(seal.to_be_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use kvferry_plan::BlockTable;

    use super::*;
    use crate::wire::ticket::Incarnation;
    use crate::wire::trust::Key;

    fn trust(secret: &str) -> Trust {
        Trust::Key(Key::new(secret.as_bytes()).unwrap())
    }

    fn ticket() -> (Ticket, Grant) {
        let ticket = Ticket {
            engine: "prefill".to_owned(),
            address: "127.0.0.1:5000".to_owned(),
            incarnation: Incarnation(7),
            request: "one".to_owned(),
            nonce: 8,
            term_ms: 30_000,
        };
        let tables = vec![BlockTable { first: 0, blocks: vec![1, 2, 3] }];
        (ticket, Grant { epoch: 0, tokens: 48, tables })
    }

    #[test]
    fn what_is_changed_on_the_way_is_noticed() {
        let ours = trust("the key that both sides hold");
        let (ticket, grant) = ticket();
        let seal = ours.seal(Sealed::Ticket(&ticket, &grant)).unwrap();
        let read = seal.to_string().parse().unwrap();
        assert_eq!(ours.check_seal(Sealed::Ticket(&ticket, &grant), Some(read)), Ok(()));

        let changes: [fn(&mut Ticket); 6] = [
            |t| t.engine.push('x'),
            |t| t.address = "192.0.2.1:5000".to_owned(),
            |t| t.incarnation.0 ^= 1,
            |t| t.request.push('x'),
            |t| t.nonce ^= 1,
            |t| t.term_ms += 1,
        ];
        for change in changes {
            let mut other = ticket.clone();
            change(&mut other);
            let checked = ours.check_seal(Sealed::Ticket(&other, &grant), Some(seal));
            assert!(matches!(checked, Err(Error::Forged { .. })), "{other:?}: {checked:?}");
        }
        let mut tables = grant.tables.clone();
        tables[0].blocks[1] = 9;
        for other in [
            Grant { epoch: 1, ..grant.clone() },
            Grant { tokens: 47, ..grant.clone() },
            Grant { tables, ..grant.clone() },
        ] {
            assert!(ours.check_seal(Sealed::Ticket(&ticket, &other), Some(seal)).is_err());
        }
        // What was sealed with a key that is being changed passes where both are held.
        let changing = trust("the key after it\nthe key that both sides hold");
        assert_eq!(changing.check_seal(Sealed::Ticket(&ticket, &grant), Some(seal)), Ok(()));
        let new = changing.seal(Sealed::Ticket(&ticket, &grant));
        assert!(ours.check_seal(Sealed::Ticket(&ticket, &grant), new).is_err());
        // Nor what somebody made who holds another key, or none.
        let theirs = trust("a key that somebody else holds").seal(Sealed::Ticket(&ticket, &grant));
        assert!(ours.check_seal(Sealed::Ticket(&ticket, &grant), theirs).is_err());
        let unsealed = ours.check_seal(Sealed::Ticket(&ticket, &grant), None).unwrap_err();
        assert!(matches!(unsealed, Error::Unsealed { .. }), "{unsealed}");
        assert!(unsealed.to_string().contains("127.0.0.1:5000"), "{unsealed}");
    }

    #[test]
    fn a_seal_of_one_thing_is_none_of_another() {
        let ours = trust("the key that both sides hold");
        let one = Sealed::Engine { engine: "p", address: "host:1" };
        let seal = ours.seal(one);
        assert_eq!(ours.check_seal(one, seal), Ok(()));
        for other in [
            Sealed::Engine { engine: "ph", address: "ost:1" },
            Sealed::Engine { engine: "p", address: "host:2" },
        ] {
            assert!(ours.check_seal(other, seal).is_err());
        }
        let (ticket, grant) = ticket();
        assert!(ours.check_seal(Sealed::Ticket(&ticket, &grant), seal).is_err());
    }

    #[test]
    fn without_a_key_nothing_is_sealed_and_everything_passes() {
        let (ticket, grant) = ticket();
        assert_eq!(Trust::Loopback.seal(Sealed::Ticket(&ticket, &grant)), None);
        assert_eq!(Trust::Loopback.check_seal(Sealed::Ticket(&ticket, &grant), None), Ok(()));
    }
}
