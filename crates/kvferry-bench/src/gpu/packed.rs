//! Packing over `nixl`: the card gathers, NIXL moves long pieces, the card scatters. Between two processes on
//! one card, where all three share its memory.

use std::time::Instant;

use kvferry_cuda::CudaOptions;
use kvferry_layout::{Place, Region};
use kvferry_nixl::{Nixl, NixlOptions, NixlPeer};
use kvferry_plan::{Loops, Request};
use kvferry_transport::{Operation, Status, Transport};
use serde::Serialize;

use super::case::Case;
use super::measure::{Bench, Ready, median, soon};
use super::outcome::Outcome;
use super::source::Packing;
use crate::Failure;
use crate::bare::Bare;

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
    /// NIXL by itself, for the same copies, from lists that were prepared beforehand; where `direct_us` is
    /// measured.
    alone_us: Option<f64>,
}

/// Direct reads of more copies than this take seconds, and those of NIXL alone likewise: each costs 6 to 13 us.
const MOST_COPIES: usize = 100_000;
const DIRECT_ROUNDS: usize = 3;

/// Cases whose name contains `only`.
pub(super) fn run(bench: &mut Bench, only: &str, rows: &mut Vec<Packed>, outcome: &mut Outcome) {
    let llama = "llama-3.1-70b";
    let cases = [
        Case::scattered(llama, "tp=4", "tp=8", 8 << 10),
        Case::scattered(llama, "tp=4", "tp=8", 128 << 10),
        Case::scattered(llama, "tp=4", "tp=4", 8 << 10),
        Case::scattered(llama, "tp=4,layout=LBNHC", "tp=8,layout=LBNHC", 8 << 10),
        Case::scattered("kimi-linear-48b-a3b", "tp=4,conv=sd", "tp=2,conv=ds", 8 << 10),
        Case::scattered("nemotron-3-nano-30b-a3b", "tp=2", "tp=1", 8 << 10),
    ];
    println!(
        "\npacked over nixl: slot and staging in MiB; NIXL alone: every copy \
         by itself, in us, from lists that were prepared beforehand"
    );
    println!(
        "{:<64} {:>4} {:>5} {:>5} {:>8} {:>8} {:>9} {:>6} {:>6} {:>6} {:>10} {:>10} {:>6}",
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
        "direct us",
        "NIXL alone",
        "wrong"
    );
    let wanted = |case: &&Case| case.name().contains(only);
    for case in cases.iter().filter(wanted) {
        bench.packed_row(case, Packing::default(), true, rows, outcome);
    }
    // Other ways to pack, for the first two.
    for (slot, staging, lanes) in [(16, 128, 4), (32, 256, 4), (32, 256, 8), (64, 256, 4)] {
        let packing = Packing { slot, staging, lanes };
        for case in cases[..2].iter().filter(wanted) {
            bench.packed_row(case, packing, false, rows, outcome);
        }
    }
}

fn show(row: &Packed) {
    let or_none = |us: Option<f64>| us.map_or_else(|| "-".to_owned(), |us| format!("{us:.1}"));
    let (direct, alone) = (or_none(row.direct_us), or_none(row.alone_us));
    println!(
        "{:<64} {:>4} {:>5} {:>5} {:>8.1} {:>8} {:>9.1} {:>6.0} {:>6.0} {:>6.3} {direct:>10} {alone:>10} {:>6}",
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
        row.wrong_bytes,
    );
}

impl Bench {
    /// Measures a row, shows and keeps it.
    fn packed_row(
        &mut self,
        case: &Case,
        packing: Packing,
        directly: bool,
        rows: &mut Vec<Packed>,
        outcome: &mut Outcome,
    ) {
        let row = self.packed(case, packing, directly, outcome);
        let Some(row) = outcome.keep(&format!("packed: {}", case.name()), row) else { return };
        show(&row);
        if row.wrong_bytes > 0 {
            outcome.fail(&format!("wrong bytes: {row:?}"));
        }
        rows.push(row);
    }

    fn packed(
        &mut self,
        case: &Case,
        packing: Packing,
        directly: bool,
        outcome: &mut Outcome,
    ) -> Result<Packed, Failure> {
        let ready = self.prepare_for(case, Some(packing), None)?;
        let directly = directly && ready.copies.len() <= MOST_COPIES;
        let limit_us = {
            let (transport, peer) = ready.transport(&CudaOptions::default())?;
            self.limit(&transport, &peer, &ready, ready.bytes)?
        };
        let mut wrong_bytes = 0;
        let mut alone_us = None;
        if directly {
            let name = format!("NIXL alone: {}", case.name());
            if let Some((us, wrong)) = outcome.keep(&name, self.nixl_alone(&ready)) {
                alone_us = Some(us);
                wrong_bytes += wrong;
            }
        }
        let (transport, peer) = ready.over_nixl(packing)?;
        if transport.packs_below(&peer) == 0 {
            return Err("the pair does not pack: see the log".into());
        }
        let copies = ready.copies.len() as u64;
        let (mut times, mut direct) = (vec![], vec![]);
        self.poison(&ready)?;
        ready.with_request(|request| -> Result<(), Failure> {
            for _ in 0..if directly { DIRECT_ROUNDS } else { 0 } {
                direct.push(read(&transport, &peer, &ready, request, <Nixl as Transport>::read)?);
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
            alone_us,
        })
    }

    /// Microseconds of the same copies by NIXL alone, with the settings of kvferry's `nixl`, and how many bytes
    /// are wrong afterwards.
    fn nixl_alone(&self, ready: &Ready) -> Result<(f64, u64), Failure> {
        const PLACE: Place = Place::Gpu(0);
        let memory = ready.memory.iter().map(|span| (span.base, span.bytes, PLACE)).collect();
        let description = ready.nixl.as_ref().ok_or("the source has no NIXL")?;
        self.poison(ready)?;
        // SAFETY: the memory is there for longer; the copies are from the source's memory to it.
        let time = unsafe {
            let bare = Bare::new(&NixlOptions::default().settings(), memory, description)?;
            bare.median(&ready.copies, PLACE, DIRECT_ROUNDS)?
        };
        Ok((time.as_secs_f64() * 1e6, self.check(ready)?))
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
        .map(|source| Ok(read(transport, peer, &checked.loops(source)?, soon())?))
        .collect::<Result<Vec<_>, Failure>>()?;
    for operation in &operations {
        match operation.wait(soon()) {
            Status::Done(_) => {}
            other => return Err(format!("a transfer ended as {other:?}").into()),
        }
    }
    Ok(began.elapsed().as_secs_f64() * 1e6)
}
