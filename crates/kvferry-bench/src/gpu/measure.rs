//! The rows, and what is measured of each.

use std::time::{Duration, Instant};

use kvferry_cuda::driver::Card;
use kvferry_cuda::{Cuda, CudaOptions, CudaPeer};
use kvferry_layout::{BlockPair, Manifest, Place, Region};
use kvferry_plan::{ByteCopy, Loops, Plan, Request};
use kvferry_transport::{Operation, Status, Transport};
use serde::Serialize;

use super::case::{Case, Ranks, borrowed, placed, tables};
use super::memory::{Checker, Memory};
use super::source::{Held, Packing, Slots, Source};
use crate::Failure;

/// A card that had nothing to do takes up to a tenth longer at first.
const WARM_UP: Duration = Duration::from_millis(50);

/// What was found for one case. Times are medians in microseconds.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) copies: u64,
    /// Nests, and bytes that go to the card.
    pub(super) nests: usize,
    pub(super) wrong_bytes: u64,
    /// One copy on the card of as many bytes.
    pub(super) limit_us: f64,
    /// From block ids to the last byte, and the fraction of the limit.
    pub(super) us: f64,
    pub(super) of_limit: f64,
    /// On the card alone: upload and kernel, one request right behind the other.
    pub(super) card_us: f64,
    /// From block ids to launched; and the parts of it: tables checked, loops made.
    pub(super) cpu_us: f64,
    pub(super) check_us: f64,
    pub(super) loops_us: f64,
    /// With a bound on multiprocessors: their number, time, fraction of the limit.
    pub(super) bounded: Vec<(u32, f64, f64)>,
}

impl Row {
    pub(super) fn rate(&self) -> f64 {
        self.bytes as f64 / self.us / 1e3
    }
}

pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

pub(super) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

pub(super) struct Bench {
    pub(super) card: Card,
    pub(super) checker: Checker,
    pub(super) source: Source,
    pub(super) rounds: usize,
}

/// Microseconds of the parts of one transfer.
pub(super) struct Times {
    check: f64,
    loops: f64,
    launched: f64,
    all: f64,
}

/// Everything from block ids to the last byte.
pub(super) fn transfer(
    transport: &Cuda,
    peer: &CudaPeer,
    plan: &Plan,
    request: &Request<'_>,
) -> Result<Times, Failure> {
    let began = Instant::now();
    let micros = |since: Instant| since.elapsed().as_secs_f64() * 1e6;
    let checked = plan.transfer(request)?;
    let check = micros(began);
    let mut loops_time = 0.0;
    let mut operations = vec![];
    for source in (0..plan.source_count()).filter(|&source| plan.reads(source)) {
        let at = Instant::now();
        let loops = checked.loops(source)?;
        loops_time += micros(at);
        operations.push(transport.read(peer, &loops, soon())?);
    }
    let launched = micros(began);
    for operation in &operations {
        match operation.wait(soon()) {
            Status::Done(_) => {}
            other => return Err(format!("a transfer ended as {other:?}").into()),
        }
    }
    Ok(Times { check, loops: loops_time, launched, all: micros(began) })
}

/// Memory on both sides, and what to do with it.
pub(super) struct Ready {
    pub(super) plan: Plan,
    description: Vec<u8>,
    /// The source's, for NIXL, where it was asked for.
    pub(super) nixl: Option<Vec<u8>>,
    /// For `tcp`, likewise.
    pub(super) tcp: Option<Vec<u8>>,
    /// Of the source, as it sees them.
    pub(super) spans: Vec<(u64, u64)>,
    pub(super) memory: Vec<Memory>,
    /// Block tables, each with its first position.
    pub(super) from: Vec<(u64, Vec<u32>)>,
    pub(super) to: Vec<(u64, Vec<u32>)>,
    tokens: u64,
    pub(super) copies: Vec<ByteCopy>,
    pub(super) bytes: u64,
    nests: usize,
}

impl Ready {
    /// A transport that knows both sides. The memory must be there until it is dropped.
    pub(super) fn transport(&self, options: &CudaOptions) -> Result<(Cuda, CudaPeer), Failure> {
        let transport = Cuda::new(options)?;
        for span in &self.memory {
            let region = Region { base: span.base, bytes: span.bytes, place: Place::Gpu(0) };
            // SAFETY: the caller keeps the memory.
            unsafe { transport.register(region)? };
        }
        let peer = transport.connect(&self.description, soon())?;
        Ok((transport, peer))
    }

    /// Calls `then` with the request.
    pub(super) fn with_request<R>(&self, then: impl FnOnce(&Request<'_>) -> R) -> R {
        let (from, to) = (borrowed(&self.from), borrowed(&self.to));
        let cached = vec![0; to.len()];
        then(&Request { tokens: self.tokens, cached: &cached, source: &from, destination: &to })
    }
}

impl Bench {
    pub(super) fn prepare(&mut self, case: &Case) -> Result<Ready, Failure> {
        self.prepare_for(case, None, None)
    }

    /// With a source that packs over NIXL, or sends over `tcp`, too.
    pub(super) fn prepare_for(
        &mut self,
        case: &Case,
        packing: Option<Packing>,
        slots: Option<Slots>,
    ) -> Result<Ready, Failure> {
        let Ranks { destination, sources } = Ranks::new(case)?;
        let sizes = sources.iter().flat_map(Manifest::regions).map(|region| region.bytes);
        let Held { bases, description, nixl, tcp } =
            self.source.hold(&sizes.clone().collect::<Vec<_>>(), case.mapped, packing, slots)?;
        let spans: Vec<(u64, u64)> = bases.iter().copied().zip(sizes).collect();
        let mut next = bases.into_iter();
        let sources: Vec<Manifest> =
            sources.into_iter().map(|rank| placed(rank, &mut next)).collect::<Result<_, _>>()?;
        let memory: Vec<Memory> = destination
            .regions()
            .iter()
            .map(|region| Memory::new(&self.card, region.bytes, case.mapped))
            .collect::<Result<_, _>>()?;
        let destination = placed(destination, &mut memory.iter().map(|span| span.base))?;
        let all: Vec<&Manifest> = sources.iter().collect();
        let plan = Plan::compile(&destination, &all)?;
        let mut ready = Ready {
            plan,
            description,
            nixl,
            tcp,
            spans,
            memory,
            from: tables(&sources[0], case, 7),
            to: tables(&destination, case, 11),
            tokens: case.tokens,
            copies: vec![],
            bytes: 0,
            nests: 0,
        };
        let (copies, nests) = ready.with_request(|request| -> Result<_, Failure> {
            let checked = ready.plan.transfer(request)?;
            let (mut copies, mut nests) = (vec![], 0);
            for source in 0..ready.plan.source_count() {
                let loops = checked.loops(source)?;
                copies.extend(loops.copies());
                nests += loops.nests().len();
            }
            Ok((copies, nests))
        })?;
        ready.bytes = copies.iter().map(|copy| copy.bytes).sum();
        (ready.copies, ready.nests) = (copies, nests);
        Ok(ready)
    }

    pub(super) fn poison(&self, ready: &Ready) -> Result<(), Failure> {
        ready.memory.iter().try_for_each(|span| self.checker.poison(span))
    }

    pub(super) fn check(&self, ready: &Ready) -> Result<u64, Failure> {
        self.checker.check(&ready.memory, &ready.copies, &ready.spans)
    }

    pub(super) fn run(&mut self, case: &Case) -> Result<Row, Failure> {
        let ready = self.prepare(case)?;
        ready.with_request(|request| self.measure(case, &ready, request))
    }

    fn measure(&self, case: &Case, ready: &Ready, request: &Request<'_>) -> Result<Row, Failure> {
        let Ready { plan, bytes, nests, copies, .. } = ready;
        let (bytes, nests) = (*bytes, *nests);
        let (transport, peer) = ready.transport(&CudaOptions::default())?;
        let limit_us = self.limit(&transport, &peer, ready, bytes)?;
        self.poison(ready)?;
        let mut wrong_bytes = 0;
        let mut measure = |rounds: usize| -> Result<Vec<Times>, Failure> {
            transfer(&transport, &peer, plan, request)?;
            wrong_bytes += self.check(ready)?;
            let warm = Instant::now() + WARM_UP;
            while Instant::now() < warm {
                transfer(&transport, &peer, plan, request)?;
            }
            let times: Result<Vec<Times>, Failure> =
                (0..rounds).map(|_| transfer(&transport, &peer, plan, request)).collect();
            // The check wants poison before the next first round.
            wrong_bytes += self.check(ready)?;
            times
        };
        let free = measure(self.rounds)?;
        let card_us = self.on_card(&transport, &peer, plan, request)?;
        let mut bounded = vec![];
        for sms in [self.card.multiprocessors()?, 32, 16] {
            transport.set_sms(Some(sms));
            let times = measure(self.rounds / 2 + 1)?;
            let time = median(times.iter().map(|times| times.all).collect());
            bounded.push((sms, time, limit_us / time));
        }
        let of = |part: fn(&Times) -> f64| median(free.iter().map(part).collect());
        let us = of(|times| times.all);
        Ok(Row {
            name: case.name(),
            bytes,
            copies: copies.len() as u64,
            nests,
            wrong_bytes,
            limit_us,
            us,
            of_limit: limit_us / us,
            card_us,
            cpu_us: of(|times| times.launched),
            check_us: of(|times| times.check),
            loops_us: of(|times| times.loops),
            bounded,
        })
    }

    /// Microseconds on the card: of the second of two requests, so that nothing waits for the CPU.
    fn on_card(
        &self,
        transport: &Cuda,
        peer: &CudaPeer,
        plan: &Plan,
        request: &Request<'_>,
    ) -> Result<f64, Failure> {
        let checked = plan.transfer(request)?;
        let sources = (0..plan.source_count()).filter(|&source| plan.reads(source));
        let loops: Vec<Loops> =
            sources.map(|source| checked.loops(source)).collect::<Result<_, _>>()?;
        let (before, after) = (self.card.event(true)?, self.card.event(true)?);
        let mut times = vec![];
        for _ in 0..self.rounds {
            let mut operations = vec![];
            for again in [false, true] {
                if again {
                    transport.mark(&before)?;
                }
                for loops in &loops {
                    operations.push(transport.read(peer, loops, soon())?);
                }
            }
            transport.mark(&after)?;
            for operation in &operations {
                operation.wait(soon());
            }
            self.card.synchronize()?;
            times.push(f64::from(after.since(&before)?) * 1e3);
        }
        Ok(median(times))
    }

    /// Microseconds that the card's own copy takes for so many bytes of the peer's memory.
    pub(super) fn limit(
        &self,
        transport: &Cuda,
        peer: &CudaPeer,
        ready: &Ready,
        bytes: u64,
    ) -> Result<f64, Failure> {
        let Ready { spans, memory, .. } = ready;
        let mut parts = vec![];
        let (mut to, mut left) = (0, bytes);
        for &(base, all) in spans {
            let part = all.min(left).min(memory[0].bytes - to);
            let here = transport.address_here(peer, base).ok_or("a region is not open here")?;
            parts.push((memory[0].base + to, here, part));
            to += part;
            left -= part;
        }
        let moved = bytes - left;
        let stream = &self.checker.stream;
        let copy = || -> Result<f64, Failure> {
            let began = Instant::now();
            for &(to, from, bytes) in &parts {
                // SAFETY: both spans are there until the stream has been waited for.
                unsafe { stream.copy(to, from, bytes)? };
            }
            stream.synchronize()?;
            Ok(began.elapsed().as_secs_f64() * 1e6)
        };
        let warm = Instant::now() + WARM_UP;
        while Instant::now() < warm {
            copy()?;
        }
        let times: Vec<f64> = (0..self.rounds).map(|_| copy()).collect::<Result<_, _>>()?;
        Ok(median(times) * bytes as f64 / moved as f64)
    }

    /// Microseconds of a request of `count` copies of 8 KiB each, as loops and as a list.
    pub(super) fn small(&mut self, count: u32) -> Result<f64, Failure> {
        const RUN: u64 = 8 << 10;
        let bytes = u64::from(count) * 2 * RUN;
        let Held { bases, description, .. } = self.source.hold(&[bytes], false, None, None)?;
        let memory = Memory::new(&self.card, bytes, false)?;
        let transport = Cuda::new(&CudaOptions::default())?;
        let region = Region { base: memory.base, bytes, place: Place::Gpu(0) };
        // SAFETY: the memory is freed after the transport is dropped.
        unsafe { transport.register(region)? };
        let peer = transport.connect(&description, soon())?;
        let mut loops = Loops::default();
        let pair = |at| BlockPair { source: at * 2, destination: (count - 1 - at) * 2 + 1 };
        let table = loops.add_table((0..count).map(pair));
        loops.add_nest((bases[0], memory.base), RUN, (RUN, RUN), &[], table)?;
        let copies: Vec<ByteCopy> = loops.copies().collect();
        self.checker.poison(&memory)?;
        let mut times = vec![];
        let done = |operation: kvferry_cuda::CudaTransfer| match operation.wait(soon()) {
            Status::Done(_) => Ok(()),
            other => Err(format!("a transfer ended as {other:?}")),
        };
        for _ in 0..200 {
            let began = Instant::now();
            done(transport.read(&peer, &loops, soon())?)?;
            times.push(began.elapsed().as_secs_f64() * 1e6);
        }
        let wrong =
            self.checker.check(std::slice::from_ref(&memory), &copies, &[(bases[0], bytes)])?;
        if wrong > 0 {
            return Err(format!("{wrong} bytes of a small request are wrong").into());
        }
        Ok(median(times))
    }
}
