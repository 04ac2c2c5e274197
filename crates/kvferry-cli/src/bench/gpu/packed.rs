//! Packing over `nixl`: the card gathers, NIXL moves long pieces, the card scatters. Between two processes on
//! one card, where all three share its memory.

use std::time::Instant;

use kvferry_layout::{Place, Region};
use kvferry_plan::{Loops, Request};
use kvferry_transport::cuda::CudaOptions;
use kvferry_transport::nixl::{CardPacking, Nixl, NixlPeer};
use kvferry_transport::{Operation, Status, Transport};
use serde::Serialize;

use super::Failure;
use super::measure::{Bench, Case, Ready, median, soon};
use super::source::Packing;

/// As it is used unless something else is asked for.
pub(super) fn usual() -> Packing {
    let CardPacking { staging, slot, lanes, .. } = CardPacking::default();
    Packing { slot: slot >> 20, staging: staging >> 20, lanes }
}

/// What was found. Times are medians in microseconds, from block ids to the last byte.
#[derive(Debug, Serialize)]
pub(super) struct Packed {
    pub(super) name: String,
    packing: Packing,
    bytes: u64,
    copies: u64,
    pub(super) wrong_bytes: u64,
    /// One copy on the card of as many bytes.
    limit_us: f64,
    us: f64,
    /// Every copy by itself; not measured for each way to pack.
    direct_us: Option<f64>,
    /// What the prices say that both take.
    price_us: f64,
    direct_price_us: f64,
}

/// Direct reads of more copies than this take seconds.
const MOST_COPIES: usize = 100_000;

pub(super) fn run(bench: &mut Bench, rows: &mut Vec<Packed>) -> Result<(), Failure> {
    let llama = "llama-3.1-70b";
    let cases = [
        Case::scattered(llama, "tp=4", "tp=8", 8 << 10),
        Case::scattered(llama, "tp=4", "tp=8", 128 << 10),
        Case::scattered(llama, "tp=4", "tp=4", 8 << 10),
        Case::scattered(llama, "tp=4,layout=LBNHC", "tp=8,layout=LBNHC", 8 << 10),
        Case::scattered("kimi-linear-48b-a3b", "tp=4,conv=sd", "tp=2,conv=ds", 8 << 10),
        Case::scattered("nemotron-3-nano-30b-a3b", "tp=2", "tp=1", 8 << 10),
    ];
    println!("\npacked over nixl: slot and staging in MiB; price: what the model says, in us");
    println!(
        "{:<64} {:>4} {:>5} {:>5} {:>8} {:>8} {:>9} {:>6} {:>6} {:>6} {:>9} {:>10} {:>10} {:>6}",
        "case",
        "slot",
        "all",
        "lanes",
        "MB",
        "copies",
        "us",
        "GB/s",
        "limit",
        "of it",
        "price",
        "direct us",
        "price",
        "wrong"
    );
    for case in &cases {
        show(bench.packed(case, usual(), true)?, rows);
    }
    // Other ways to pack, for the first two.
    for (slot, staging, lanes) in [(16, 128, 4), (32, 256, 4), (32, 256, 8), (64, 256, 4)] {
        for case in &cases[..2] {
            show(bench.packed(case, Packing { slot, staging, lanes }, false)?, rows);
        }
    }
    Ok(())
}

fn show(row: Packed, rows: &mut Vec<Packed>) {
    let direct = row.direct_us.map_or_else(|| "-".to_owned(), |us| format!("{us:.1}"));
    println!(
        "{:<64} {:>4} {:>5} {:>5} {:>8.1} {:>8} {:>9.1} {:>6.0} {:>6.0} {:>6.3} {:>9.1} {direct:>10} {:>10.1} {:>6}",
        row.name,
        row.packing.slot,
        row.packing.staging,
        row.packing.lanes,
        row.bytes as f64 / 1e6,
        row.copies,
        row.us,
        row.bytes as f64 / row.us / 1e3,
        row.bytes as f64 / row.limit_us / 1e3,
        row.limit_us / row.us,
        row.price_us,
        row.direct_price_us,
        row.wrong_bytes,
    );
    rows.push(row);
}

impl Bench {
    fn packed(&mut self, case: &Case, packing: Packing, directly: bool) -> Result<Packed, Failure> {
        let ready = self.prepare_packed(case, Some(packing))?;
        let limit_us = {
            let (transport, peer) = ready.transport(&CudaOptions::default())?;
            self.limit(&transport, &peer, &ready, ready.bytes)?
        };
        let (transport, peer) = ready.over_nixl(packing)?;
        let rates = transport.rates(&peer);
        let price = rates.packed.ok_or("the pair does not pack: see the log")?;
        let copies = ready.copies.len() as u64;
        let (mut times, mut direct) = (vec![], vec![]);
        let mut wrong_bytes = 0;
        self.poison(&ready)?;
        ready.with_request(|request| -> Result<(), Failure> {
            let rounds = if directly && ready.copies.len() <= MOST_COPIES { 3 } else { 0 };
            for _ in 0..rounds {
                direct.push(read(&transport, &peer, &ready, request, Nixl::read_loops)?);
            }
            self.poison(&ready)?;
            for round in 0..self.rounds + 2 {
                let time = read(&transport, &peer, &ready, request, Nixl::read_packed)?;
                if round == 0 {
                    wrong_bytes += self.check(&ready)?;
                }
                if round > 1 {
                    times.push(time);
                }
            }
            wrong_bytes += self.check(&ready)?;
            Ok(())
        })?;
        Ok(Packed {
            name: case.name(),
            packing,
            bytes: ready.bytes,
            copies,
            wrong_bytes,
            limit_us,
            us: median(times),
            direct_us: (!direct.is_empty()).then(|| median(direct)),
            price_us: price.of(copies, ready.bytes) / 1e3,
            direct_price_us: rates.direct.of(copies, ready.bytes) / 1e3,
        })
    }
}

impl Ready {
    /// NIXL with the destination's memory registered, and the source connected to.
    pub(super) fn over_nixl(&self, packing: Packing) -> Result<(Nixl, NixlPeer), Failure> {
        let transport = Nixl::new(&packing.options())?;
        for span in &self.memory {
            let region = Region { base: span.base, bytes: span.bytes, place: Place::Gpu(0) };
            // SAFETY: the caller keeps the memory.
            unsafe { transport.register(region)? };
        }
        let description = self.nixl.as_ref().ok_or("the source has no NIXL")?;
        let peer = transport.connect(description, soon())?;
        Ok((transport, peer))
    }
}

pub(super) type Read = fn(
    &Nixl,
    &NixlPeer,
    &Loops,
    Instant,
) -> Result<kvferry_transport::Transfer, kvferry_transport::Error>;

/// Microseconds from block ids to the last byte.
pub(super) fn read(
    transport: &Nixl,
    peer: &NixlPeer,
    ready: &Ready,
    request: &Request<'_>,
    read: Read,
) -> Result<f64, Failure> {
    let began = Instant::now();
    let checked = ready.plan.transfer(request)?;
    let sources = (0..ready.plan.source_count()).filter(|&source| ready.plan.reads(source));
    let operations = sources
        .map(|source| read(transport, peer, &checked.loops(source), soon()))
        .collect::<Result<Vec<_>, _>>()?;
    for operation in &operations {
        match operation.wait(soon()) {
            Status::Done(_) => {}
            other => return Err(format!("a transfer ended as {other:?}").into()),
        }
    }
    Ok(began.elapsed().as_secs_f64() * 1e6)
}
