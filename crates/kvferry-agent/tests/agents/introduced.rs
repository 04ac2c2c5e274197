//! Engines that run no agent: they are read, and nobody there is asked.

use crate::common::*;
use kvferry_agent::{Audit, Error, Failure, Incarnation, IntroducedRank, Outcome, Ticket};
use kvferry_layout::Manifest;
use kvferry_nixl::describe_foreign;
use kvferry_transport::Instance;

const LIFE: Incarnation = Incarnation(7);
/// Nobody listens there.
const ADDRESS: &str = "nixl://127.0.0.1:1";
const TOKENS: u64 = 22;

fn ticket(incarnation: Incarnation) -> Ticket {
    Ticket {
        engine: "p".to_owned(),
        address: ADDRESS.to_owned(),
        incarnation,
        request: "theirs".to_owned(),
        nonce: 0,
        term_ms: 30_000,
    }
}

/// What somebody who has asked the engine in its own way knows of it.
fn known(p: &Engine) -> Vec<IntroducedRank> {
    let ranks = p.ranks.iter().enumerate().map(|(number, rank)| {
        let card = rank.worker.card().unwrap();
        let manifest = Manifest::from_bytes(&card.manifest).unwrap();
        // NIXL's own metadata is the last block of the description, behind 8 + 16 bytes of names, 4 of a
        // count, 20 for each region and its length. What kvferry puts behind it does not disturb NIXL.
        let count = u32::from_le_bytes(card.description[24..28].try_into().unwrap());
        let metadata = &card.description[8 + 16 + 4 + 20 * count as usize + 4..];
        let name = Instance([number as u8; 16]);
        let description = describe_foreign(name, manifest.regions().to_vec(), metadata).unwrap();
        IntroducedRank { manifest, description }
    });
    ranks.collect()
}

fn read(d: &Engine, name: &str, ticket: &Ticket, first: u32) -> Vec<Outcome> {
    let (source, destination) = (blocks_for(TOKENS, 3), blocks_for(TOKENS, first));
    d.load(&load(name, ticket, granted(&source, TOKENS), &destination));
    d.wait_ends(name)
}

/// Without a word to an agent: P's has granted nothing, and its address is not told. Audits that could not be
/// made do not stand in the way.
#[test]
fn an_engine_without_an_agent_is_read() {
    for (wide, narrow) in [(2, 1), (1, 2)] {
        let p = Recipe::new("p", wide).by(By::Nixl).start();
        let d = Recipe::new("d", narrow).by(By::Nixl).audit(Audit::ALL).start();
        p.prefill(7, &blocks_for(TOKENS, 3), TOKENS);
        for rank in &d.ranks {
            rank.worker.introduce(ADDRESS, LIFE, known(&p)).unwrap();
        }
        for (name, first) in [("r1", 9), ("r2", 20)] {
            assert_eq!(read(&d, name, &ticket(LIFE), first), vec![Outcome::Done; d.ranks.len()]);
            for rank in &d.ranks {
                assert_eq!(rank.wrong(7, &blocks_for(TOKENS, first), TOKENS), 0);
            }
        }
        // Another life of it is not known.
        for outcome in read(&d, "r3", &ticket(Incarnation(8)), 30) {
            assert_eq!(outcome, Outcome::Failed(Failure::Restarted));
        }
    }
}

#[test]
fn an_engine_that_does_not_fit_is_refused() {
    let p = Recipe { model: "another", ..Recipe::new("p", 1).by(By::Nixl) }.start();
    let d = Recipe::new("d", 1).by(By::Nixl).start();
    d.ranks[0].worker.introduce(ADDRESS, LIFE, known(&p)).unwrap();
    let outcomes = read(&d, "r", &ticket(LIFE), 9);
    assert!(
        matches!(&outcomes[0], Outcome::Failed(Failure::Refused(why)) if why.contains("another")),
        "{outcomes:?}"
    );
}

#[test]
fn the_transport_must_be_nixl() {
    let p = Recipe::new("p", 1).by(By::Nixl).start();
    let d = Recipe::new("d", 1).by(By::Tcp).start();
    let refused = d.ranks[0].worker.introduce(ADDRESS, LIFE, known(&p));
    let Err(Error::Options(why)) = refused else { panic!("{refused:?}") };
    assert!(why.contains("is tcp: set it to nixl"), "{why}");
}
