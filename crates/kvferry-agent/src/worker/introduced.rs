//! Engines that run no agent: what is known of them came from elsewhere, and nobody there can be asked.
//!
//! Such an engine can be read, by the same plans and transports as any other. What it cannot do is
//! confirm: there is no lease to ask for, nothing to audit, and nothing to follow while it grows. How
//! long its blocks stay as they are, and that it is told when they have been read, is up to whoever
//! introduced it.

use std::collections::HashMap;

use kvferry_layout::Manifest;
use parking_lot::Mutex;
use tracing::warn;

use super::rank::Rank;
use crate::error::Error;
use crate::several::offer_one;
use crate::wire::message::Card;
use crate::wire::ticket::Incarnation;

/// The transport that such engines are read by.
const NIXL: &str = "nixl";

/// One rank of an engine that runs no agent.
#[derive(Clone, Debug)]
pub struct IntroducedRank {
    /// The facts of its cache.
    pub manifest: Manifest,
    /// How the `nixl` transport reaches its memory.
    pub description: Vec<u8>,
}

/// The engines that were introduced, by address.
#[derive(Debug, Default)]
pub(super) struct Introduced(Mutex<HashMap<String, (Incarnation, Vec<Card>)>>);

impl Introduced {
    /// Whether the engine at this address cannot be asked.
    pub(super) fn knows(&self, address: &str) -> bool {
        self.0.lock().contains_key(address)
    }

    /// Makes one known. Loads with tickets of this address and life are read from it, **and used without a
    /// confirmation**.
    pub(super) fn add(
        &self,
        reader: &Rank,
        address: &str,
        incarnation: Incarnation,
        ranks: Vec<IntroducedRank>,
    ) -> Result<(), Error> {
        let cards = ranks.into_iter().map(|rank| card(reader, rank)).collect::<Result<_, _>>()?;
        warn!(
            address,
            %incarnation,
            "this engine runs no agent: what is read from it is used without a confirmation and without \
             audits"
        );
        self.0.lock().insert(address.to_owned(), (incarnation, cards));
        Ok(())
    }

    /// What is known of it.
    pub(super) fn get(&self, address: &str) -> Option<(Incarnation, Vec<Card>)> {
        self.0.lock().get(address).cloned()
    }
}

/// A rank as the carrier of `reader` connects to it.
fn card(reader: &Rank, rank: IntroducedRank) -> Result<Card, Error> {
    let IntroducedRank { manifest, description } = rank;
    let own = reader.carrier.name();
    let description = match own {
        NIXL => description,
        "gpu" => offer_one(NIXL, &description),
        _ => {
            return Err(Error::Options(format!(
                "an engine without kvferry is read by the transport nixl, but the transport of this one \
                 is {own}: set it to nixl"
            )));
        }
    };
    Ok(Card {
        rank: manifest.rank(),
        manifest: manifest.to_bytes(),
        transport: own.to_owned(),
        description,
        service: None,
    })
}
