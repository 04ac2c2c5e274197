//! GPU memory over `tcp`, as between machines: the card gathers into pinned slots, sockets carry them, the card scatters.
//! Beside plain sockets that carry as many bytes from and to memory of the host, in the same run, as it is and encrypted. Between two processes
//! on one machine, which share its cores and, where there is one card, the card.

use std::time::Instant;

use kvferry_layout::{Place, Region};
use kvferry_plan::Request;
use kvferry_transport::tcp::{Tcp, TcpPeer};
use kvferry_transport::{Operation, Status, Transport};
use serde::Serialize;

use super::case::Case;
use super::measure::{Bench, Ready, median, soon};
use super::outcome::Outcome;
use super::plain;
use super::source::Slots;
use crate::Failure;

const PLAIN: [usize; 4] = [1, 2, 4, 8];

/// What was found. Times are medians in microseconds, from block ids to the last byte.
#[derive(Debug, Serialize)]
pub(super) struct Sockets {
    name: String,
    slots: Slots,
    bytes: u64,
    copies: u64,
    wrong_bytes: u64,
    us: f64,
    /// Seconds of CPUs for a GB, of both processes together.
    cpu: f64,
    /// Plain sockets: how many, microseconds for as many bytes, and seconds of CPUs for a GB.
    plain: Vec<(usize, f64, f64)>,
}

/// Cases whose name contains `only`.
pub(super) fn run(bench: &mut Bench, only: &str, rows: &mut Vec<Sockets>, outcome: &mut Outcome) {
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
        "\nGPU memory over tcp: slot in KiB, all of them in MiB; GB/s of 1, 2, 4 and 8 plain sockets from and to host \
         memory, and what part of the last; cpu: seconds of CPUs for a GB, and of 8 plain sockets"
    );
    println!(
        "{:<64} {:>5} {:>5} {:>4} {:>5} {:>4} {:>8} {:>8} {:>9} {:>6} {:>23} {:>6} {:>6} {:>6} {:>6}",
        "case",
        "",
        "slot",
        "all",
        "conns",
        "SMs",
        "MB",
        "copies",
        "us",
        "GB/s",
        "plain",
        "of it",
        "cpu",
        "plain",
        "wrong"
    );
    let wanted = |case: &&Case| case.name().contains(only);
    for case in cases.iter().filter(wanted) {
        for encrypted in [false, true] {
            bench.sockets_row(case, Slots { encrypted, ..Slots::default() }, rows, outcome);
        }
    }
    // Other slots and connections, for the first two.
    for (slot, all, connections) in [(2048, 128, 8), (8192, 256, 8), (4096, 128, 6)] {
        let slots = Slots { slot, all, connections, ..Slots::default() };
        for case in cases[..2].iter().filter(wanted) {
            bench.sockets_row(case, slots, rows, outcome);
        }
    }
    match plain::cipher() {
        Ok((seal, open)) => println!(
            "AES-128-GCM by itself, on one core: {seal:.3} s to seal a GB, {open:.3} s to open it"
        ),
        Err(error) => outcome.fail(&format!("the cipher by itself: {error}")),
    }
}

fn show(row: &Sockets) {
    let rate = |us: f64| row.bytes as f64 / us / 1e3;
    let plain: Vec<String> =
        row.plain.iter().map(|&(_, us, _)| format!("{:>5.1}", rate(us))).collect();
    let (most_us, most_cpu) =
        row.plain.last().map_or((f64::NAN, f64::NAN), |most| (most.1, most.2));
    let sms = row.slots.sms.map_or_else(|| "-".to_owned(), |sms| sms.to_string());
    let sealed = if row.slots.encrypted { "AES" } else { "" };
    println!(
        "{:<64} {sealed:>5} {:>5} {:>4} {:>5} {sms:>4} {:>8.1} {:>8} {:>9.1} {:>6.1} {} {:>6.3} {:>6.3} {most_cpu:>6.3} {:>6}",
        row.name,
        row.slots.slot,
        row.slots.all,
        row.slots.connections,
        row.bytes as f64 / 1e6,
        row.copies,
        row.us,
        rate(row.us),
        plain.join(" "),
        most_us / row.us,
        row.cpu,
        row.wrong_bytes,
    );
}

impl Bench {
    /// Measures a row, shows and keeps it.
    fn sockets_row(
        &mut self,
        case: &Case,
        slots: Slots,
        rows: &mut Vec<Sockets>,
        outcome: &mut Outcome,
    ) {
        let row = self.sockets(case, slots);
        let Some(row) = outcome.keep(&format!("tcp: {}", case.name()), row) else { return };
        show(&row);
        if row.wrong_bytes > 0 {
            outcome.fail(&format!("wrong bytes: {row:?}"));
        }
        rows.push(row);
    }

    fn sockets(&mut self, case: &Case, slots: Slots) -> Result<Sockets, Failure> {
        let ready = self.prepare_for(case, None, Some(slots))?;
        let rounds = self.rounds;
        let bytes = ready.bytes;
        let mut plain = vec![];
        for count in PLAIN {
            let streams = self.source.sockets(count)?;
            plain::receive(&streams, bytes)?;
            let (us, cpu) =
                self.timed(rounds, bytes, || Ok(plain::receive(&streams, bytes)? * 1e6))?;
            plain.push((count, us, cpu));
        }
        let (transport, peer) = ready.over_tcp(slots)?;
        self.poison(&ready)?;
        let (mut wrong_bytes, mut us, mut cpu) = (0, 0.0, 0.0);
        ready.with_request(|request| -> Result<(), Failure> {
            read(&transport, &peer, &ready, request)?;
            wrong_bytes += self.check(&ready)?;
            self.poison(&ready)?;
            (us, cpu) = self.timed(rounds, bytes, || read(&transport, &peer, &ready, request))?;
            wrong_bytes += self.check(&ready)?;
            Ok(())
        })?;
        let copies = ready.copies.len() as u64;
        Ok(Sockets { name: case.name(), slots, bytes, copies, wrong_bytes, us, cpu, plain })
    }

    /// The median time of some rounds, and the seconds of CPUs for each GB of these bytes, of both processes.
    fn timed(
        &mut self,
        rounds: usize,
        bytes: u64,
        mut round: impl FnMut() -> Result<f64, Failure>,
    ) -> Result<(f64, f64), Failure> {
        let before = self.source.cpu_seconds()? + plain::cpu_seconds();
        let times = (0..rounds).map(|_| round()).collect::<Result<Vec<_>, _>>()?;
        let taken = self.source.cpu_seconds()? + plain::cpu_seconds() - before;
        Ok((median(times), taken / (rounds as f64 * bytes as f64 / 1e9)))
    }
}

impl Ready {
    /// `tcp` with the destination's memory registered, and the source connected to.
    fn over_tcp(&self, slots: Slots) -> Result<(Tcp, TcpPeer), Failure> {
        let transport = slots.transport()?;
        for span in &self.memory {
            let region = Region { base: span.base, bytes: span.bytes, place: Place::Gpu(0) };
            // SAFETY: the caller keeps the memory.
            unsafe { transport.register(region)? };
        }
        let description = self.tcp.as_ref().ok_or("the source has no tcp")?;
        let peer = transport.connect(description, soon())?;
        Ok((transport, peer))
    }
}

/// Microseconds from block ids to the last byte.
fn read(
    transport: &Tcp,
    peer: &TcpPeer,
    ready: &Ready,
    request: &Request<'_>,
) -> Result<f64, Failure> {
    let began = Instant::now();
    let checked = ready.plan.transfer(request)?;
    let sources = (0..ready.plan.source_count()).filter(|&source| ready.plan.reads(source));
    let operations = sources
        .map(|source| Ok(transport.read(peer, &checked.loops(source)?, soon())?))
        .collect::<Result<Vec<_>, Failure>>()?;
    for operation in &operations {
        match operation.wait(soon()) {
            Status::Done(_) => {}
            other => return Err(format!("a transfer ended as {other:?}").into()),
        }
    }
    Ok(began.elapsed().as_secs_f64() * 1e6)
}
