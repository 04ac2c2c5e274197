//! A lease that grows and is followed, for the tests of that.

use std::sync::Mutex;
use std::time::Duration;

use crate::common::*;
use kvferry_agent::{Load, Lost, Progress, Ticket};

/// For what is to come too late.
pub(crate) const SHORT: Duration = Duration::from_secs(2);

/// A P whose peers wait for news for much longer than it takes to tell them, however busy the machine.
pub(crate) fn patient() -> Recipe {
    let mut p = Recipe::new("p", 1);
    p.scheduler.limits.poll = Duration::from_secs(30);
    p
}

/// A P and a D whose reads wait until the test lets them land.
pub(crate) fn held_pair() -> (Engine, Engine) {
    (Recipe::new("p", 1).by(By::Held).start(), Recipe::new("d", 1).by(By::Held).start())
}

/// A load that follows the lease of a ticket.
pub(crate) fn follow(name: &str, ticket: &Ticket, destination: &[u32], tokens: u64) -> Load {
    load(name, ticket, granted(&[], tokens), destination).granted(None)
}

/// So much of a request is computed, in these blocks.
pub(crate) fn advance(p: &Engine, request: u64, name: &str, blocks: &[u32], tokens: u64) {
    p.prefill(request, blocks, tokens);
    let blocks = &blocks[..tokens.div_ceil(TOKENS_PER_BLOCK) as usize];
    p.scheduler.advance(name, tokens, table(blocks)).unwrap();
}

/// What D has lost, as soon as it has lost something.
pub(crate) fn lost(d: &Engine) -> Vec<Lost> {
    let lost = Mutex::new(vec![]);
    eventually("something is lost", || {
        lost.lock().unwrap().extend(d.scheduler.lost());
        !lost.lock().unwrap().is_empty()
    });
    lost.into_inner().unwrap()
}

/// How far D has heard that a request is, as soon as that is what is waited for.
pub(crate) fn heard(d: &Engine, request: &str, what: impl Fn(&Progress) -> bool) -> Progress {
    eventually("it is heard of", || d.scheduler.frontier(request).is_some_and(|p| what(&p)));
    d.scheduler.frontier(request).unwrap()
}
