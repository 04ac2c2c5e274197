//! Opens the memory of an engine's ranks: the plan, and a connection to everybody that it reads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use kvferry_layout::Manifest;
use kvferry_plan::Plan;
use kvferry_transport::Error;
use tokio::task::JoinSet;
use tracing::warn;

use super::departures::{Arrival, Departures, Whose};
use super::rank::Rank;
use crate::panics::broken;
use crate::rules::failure::Failure;
use crate::wire::message::Card;

/// What is read of an engine, and from whom: all but the plan by source.
pub(super) struct Readable {
    pub(super) plan: Plan,
    pub(super) manifests: Vec<Manifest>,
    pub(super) ranks: Vec<u32>,
    pub(super) sources: Vec<Option<Arrival>>,
}

/// Compiles the plan and connects to every rank that it reads; without ranks that cannot be connected to,
/// where others hold what they hold.
pub(super) async fn open(
    reader: &Rank,
    whose: &Whose,
    mut cards: Vec<Card>,
    deadline: Instant,
    departures: &Arc<Departures>,
) -> Result<Readable, Failure> {
    for card in &cards {
        for endpoint in reader.carrier.endpoints(&card.description) {
            reader.reach.check(endpoint).map_err(|error| {
                Failure::Refused(format!("rank {} is read elsewhere: {error}", card.rank))
            })?;
        }
    }
    let manifests = cards.iter().map(|card| {
        Manifest::from_bytes(&card.manifest).map_err(|error| Failure::Refused(error.to_string()))
    });
    let mut manifests: Vec<Manifest> = manifests.collect::<Result<_, _>>()?;
    let mut sources: Vec<Option<Arrival>> = cards.iter().map(|_| None).collect();
    let mut closed: Vec<(u32, Error)> = vec![];
    loop {
        let (own, how) = (reader.manifest.clone(), reader.spread());
        // Compiled here as well: what this rank writes into its memory it proves itself.
        let compiled = tokio::task::spawn_blocking(move || {
            let theirs: Vec<&Manifest> = manifests.iter().collect();
            (Plan::compile_spread(&own, &theirs, how), manifests)
        });
        let compiled = compiled.await;
        let (plan, same) = compiled.map_err(|_| broken("compiling a plan"))?;
        manifests = same;
        let plan = plan.map_err(|error| match closed.is_empty() {
            true => Failure::Refused(error.to_string()),
            false => not_connected(&closed),
        })?;
        let arrival = || Arrival::new(departures, whose);
        let failed = connect(reader, &plan, &cards, &mut sources, arrival, deadline).await?;
        if failed.is_empty() {
            for (rank, error) in closed {
                warn!(
                    address = &*whose.0,
                    rank,
                    %error,
                    "a rank cannot be connected to: what it holds is read from others"
                );
            }
            let ranks = cards.iter().map(|card| card.rank).collect();
            return Ok(Readable { plan, manifests, ranks, sources });
        }
        // From the last to the first: the places of those before stay the same.
        for (index, error) in failed.into_iter().rev() {
            closed.push((cards.remove(index).rank, error));
            manifests.remove(index);
            sources.remove(index);
        }
    }
}

/// Connects the transport to every rank that the plan reads, all at once, and ends connections to others. Says
/// which of them cannot be connected to, by their places in order, and why.
async fn connect(
    reader: &Rank,
    plan: &Plan,
    cards: &[Card],
    sources: &mut [Option<Arrival>],
    arrival: impl Fn() -> Arrival,
    deadline: Instant,
) -> Result<BTreeMap<usize, Error>, Failure> {
    // Others may have to be connected to instead of one that does not answer.
    let now = Instant::now();
    let until = now + deadline.saturating_duration_since(now) / 2;
    let mut connecting = JoinSet::new();
    for (index, (card, source)) in cards.iter().zip(&mut *sources).enumerate() {
        if !plan.reads(index) {
            *source = None;
        } else if source.is_none() {
            let (carrier, description) = (reader.carrier.clone(), card.description.clone());
            let arrival = arrival();
            connecting.spawn_blocking(move || {
                let connected = carrier.connect(&description, until);
                (index, connected.map(|source| arrival.with(source)))
            });
        }
    }
    let mut failed = BTreeMap::new();
    while let Some(connected) = connecting.join_next().await {
        match connected {
            Ok((index, Ok(source))) => sources[index] = Some(source),
            Ok((index, Err(error))) => _ = failed.insert(index, error),
            Err(_) => return Err(broken("connecting the transport")),
        }
    }
    Ok(failed)
}

/// These ranks are needed and cannot be connected to. Where somebody is gone, that may change by itself; where a
/// transport cannot do it, the next request will find the same.
fn not_connected(closed: &[(u32, Error)]) -> Failure {
    let ranks: Vec<String> =
        closed.iter().map(|(rank, error)| format!("rank {rank}: {error}")).collect();
    let reason =
        format!("{}; no other rank that can be connected to holds the same", ranks.join("; "));
    let is_gone = |error: &Error| {
        matches!(
            error,
            Error::PeerLost(_)
                | Error::PeerMisbehaved(_)
                | Error::Disconnected
                | Error::DeadlinePassed
        )
    };
    match closed.iter().any(|(_, error)| is_gone(error)) {
        true => Failure::PeerGone(reason),
        false => Failure::Refused(reason),
    }
}
