//! What a server does with requests that are not right.

use std::net::Shutdown;

use kvferry_layout::{BlockPair, Loop, Loops};
use proptest::prelude::*;

use super::super::frame::{Request, Verb};
use super::super::gather;
use super::{Guest, PAGE, SECRET, Victim, request};

/// Requests that are right, for a victim at `base`.
fn good_requests(base: u64) -> Vec<Vec<u8>> {
    let open = base + PAGE as u64;
    vec![
        request(Verb::Read, 1, &[(open, 100), (open + 500, 1)]),
        request(Verb::Regions, 4, &[]),
        request(Verb::Read, 5, &[(open, PAGE as u64)]),
        to_gather(open, 6),
    ]
}

/// A request to gather, likewise.
fn to_gather(open: u64, id: u64) -> Vec<u8> {
    let mut loops = Loops::default();
    let table = loops.add_table([2, 0].map(|source| BlockPair { source, destination: 0 }));
    let runs = Loop { count: 3, source: 64, destination: 0 };
    loops.add_nest((open, 0), 32, (512, 0), &[runs], table).unwrap();
    let mut body = vec![];
    gather::encode(&loops, &mut body);
    let (spans, bytes) = (body.len() as u32, loops.packed_bytes().unwrap());
    let header = Request { verb: Verb::Gather, spans, id, bytes };
    [&header.encode()[..], &body].concat()
}

/// How to spoil a byte of a request.
#[derive(Clone, Debug)]
enum Spoil {
    Set(prop::sample::Index, u8),
    /// A whole field of eight bytes, where lengths and addresses are.
    Field(prop::sample::Index, u64),
    Cut(prop::sample::Index),
    Insert(prop::sample::Index, Vec<u8>),
}

fn spoils() -> impl Strategy<Value = Spoil> {
    let index = any::<prop::sample::Index>;
    let extremes = prop_oneof![
        Just(0),
        Just(1),
        Just(u64::MAX),
        Just(u64::MAX - 63),
        Just(1 << 63),
        Just(1 << 32),
        Just(4097),
        any::<u64>()
    ];
    prop_oneof![
        (index(), any::<u8>()).prop_map(|(at, value)| Spoil::Set(at, value)),
        (index(), extremes).prop_map(|(at, value)| Spoil::Field(at, value)),
        index().prop_map(Spoil::Cut),
        (index(), prop::collection::vec(any::<u8>(), 1..40))
            .prop_map(|(at, bytes)| Spoil::Insert(at, bytes)),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever a peer sends: nothing outside the registered region is read, nothing is written, and a peer
    /// that plays by the rules does not notice.
    #[test]
    fn spoiled_frames_harm_nobody(
        order in prop::collection::vec(0usize..4, 1..6),
        spoils in prop::collection::vec((any::<prop::sample::Index>(), spoils()), 1..4),
    ) {
        thread_local! {
            // One server for all cases: what one of them broke, the next would notice.
            static VICTIM: (Victim, std::cell::RefCell<Guest>) = {
                let victim = Victim::new();
                let neighbour = victim.enter().into();
                (victim, neighbour)
            };
        }
        VICTIM.with(|(victim, neighbour)| {
            let good = good_requests(victim.base());
            let mut requests: Vec<Vec<u8>> = order.iter().map(|&i| good[i].clone()).collect();
            for (which, spoil) in &spoils {
                let which = which.index(requests.len());
                let bytes = &mut requests[which];
                if bytes.is_empty() {
                    continue;
                }
                match spoil {
                    Spoil::Set(at, value) => {
                        let at = at.index(bytes.len());
                        bytes[at] = *value;
                    }
                    Spoil::Field(at, value) => {
                        let at = at.index(bytes.len()) / 8 * 8;
                        let end = (at + 8).min(bytes.len());
                        bytes[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
                    }
                    Spoil::Cut(at) => bytes.truncate(at.index(bytes.len())),
                    Spoil::Insert(at, more) => {
                        let at = at.index(bytes.len());
                        bytes.splice(at..at, more.iter().copied());
                    }
                }
            }
            let mut guest = victim.enter();
            for request in &requests {
                guest.ask(request);
            }
            let _ = guest.stream().shutdown(Shutdown::Write);
            let mut said = vec![];
            while let Some((_, bytes)) = guest.hear() {
                said.extend(bytes);
            }
            let leaked = said.windows(24).any(|run| run.iter().all(|&byte| byte == SECRET));
            prop_assert!(!leaked, "bytes outside the region were read");
            prop_assert!(victim.is_unharmed(), "bytes were written");
            // The neighbour's connection, open all the while, serves.
            let mut neighbour = neighbour.borrow_mut();
            let target = victim.base() + 2 * PAGE as u64 - 8;
            neighbour.ask(&request(Verb::Read, 77, &[(target, 8)]));
            let (answer, bytes) = neighbour.hear().unwrap();
            prop_assert_eq!((answer.id, bytes.len()), (77, 8));
            Ok(())
        })?;
    }
}
