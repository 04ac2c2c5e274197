//! The rank that reads, and what it makes known to others.

use std::sync::Arc;

use kvferry_layout::Manifest;
use kvferry_plan::Spread;

use crate::carrier::Carrier;
use crate::error::Error;
use crate::wire::message::{Card, ServiceCard};
use crate::wire::reach::Reach;

/// The rank that reads.
#[derive(Debug)]
pub(super) struct Rank {
    pub(super) engine: String,
    pub(super) number: u32,
    /// How many ranks its engine has.
    pub(super) ranks: u32,
    pub(super) manifest: Arc<Manifest>,
    pub(super) manifest_bytes: Vec<u8>,
    pub(super) carrier: Arc<dyn Carrier>,
    /// Where it reads.
    pub(super) reach: Reach,
    /// Where it takes tasks.
    pub(super) service: Option<ServiceCard>,
}

impl Rank {
    pub(super) fn new(
        manifest: Manifest,
        ranks: u32,
        carrier: Arc<dyn Carrier>,
        reach: Reach,
    ) -> Self {
        Self {
            engine: manifest.engine().to_owned(),
            number: manifest.rank(),
            ranks,
            manifest_bytes: manifest.to_bytes(),
            manifest: Arc::new(manifest),
            carrier,
            reach,
            service: None,
        }
    }

    /// How it shares what several ranks of another engine hold with the other ranks of its own.
    pub(super) fn spread(&self) -> Spread {
        Spread::among(self.ranks)
    }

    /// What it makes known to other engines.
    pub(super) fn card(&self) -> Result<Card, Error> {
        Ok(Card {
            rank: self.number,
            manifest: self.manifest_bytes.clone(),
            transport: self.carrier.name().to_owned(),
            description: self.carrier.describe()?,
            service: self.service.clone(),
        })
    }
}
