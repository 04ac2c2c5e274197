//! A decode engine that runs meanwhile: how much its steps slow down while loads come in.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvferry_cuda::CudaOptions;
use kvferry_cuda::driver::{Card, Kernel, Module, Stream};
use kvferry_cuda::nvrtc;
use kvferry_nixl::Nixl;
use kvferry_transport::Transport;
use serde::Serialize;

use super::case::Case;
use super::measure::{Bench, median, transfer};
use super::memory::{Memory, argument};
use super::outcome::Outcome;
use super::packed;
use super::source::Packing;
use crate::Failure;

/// Weights of a rank, and launches that read them in a step: those of llama-3.1-70b on 8 cards.
const WEIGHTS: u64 = 17_600 << 20;
const LAUNCHES: u64 = 160;
const STEPS: usize = 30;
const THREADS: u32 = 256;
/// Steps go on until so many loads have come in, or for so long.
const LEAST_LOADS: u64 = 4;
const PATIENCE: Duration = Duration::from_secs(5);

/// How the kernels of a step fill the card.
struct Kind {
    name: &'static str,
    ctas_per_sm: u32,
    /// Bytes of shared memory of a CTA.
    shared: u32,
}

const KINDS: [Kind; 2] = [
    // As attention and element-wise kernels do.
    Kind { name: "small CTAs, 8 to a multiprocessor", ctas_per_sm: 8, shared: 0 },
    // As matrix products do: what is left of a multiprocessor is of no use to others, and the other way round.
    Kind { name: "large CTAs, 1 to a multiprocessor", ctas_per_sm: 1, shared: 200 << 10 },
];

/// Steps beside loads. Times are in microseconds.
#[derive(Debug, Serialize)]
pub(super) struct Beside {
    kind: &'static str,
    /// What loads: a transport, and how many multiprocessors it may take.
    by: String,
    alone_us: f64,
    step_us: f64,
    slowest_us: f64,
    /// Bytes loaded meanwhile, in GB/s.
    loaded: f64,
    /// Milliseconds that steps took longer, for each GB that was loaded.
    ms_per_gb: f64,
}

/// `nixl` says why there is no NIXL, whose loads are left out then.
pub(super) fn run(
    bench: &mut Bench,
    nixl: Option<&str>,
    rows: &mut Vec<Beside>,
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let engine = Engine::new(&bench.card)?;
    let case = Case::scattered("llama-3.1-70b", "tp=4", "tp=8", 8 << 10);
    println!(
        "\ndecode steps ({LAUNCHES} kernels that read {:.1} GB) beside loads of llama-3.1-70b tp=4 -> tp=8, 8k",
        WEIGHTS as f64 / 1e9
    );
    println!(
        "{:<36} {:<24} {:>9} {:>9} {:>6} {:>9} {:>12} {:>9}",
        "kernels",
        "loads by",
        "alone us",
        "step us",
        "ratio",
        "slowest",
        "loaded GB/s",
        "ms per GB"
    );
    let measured = by_cuda(bench, &engine, &case, rows, outcome);
    outcome.keep("loads by cuda beside a running model", measured);
    const NIXL: &str = "loads by nixl beside a running model";
    if let Some(why) = nixl {
        outcome.miss(NIXL, why);
        return Ok(());
    }
    let measured = by_nixl(bench, &engine, &case, rows, outcome);
    outcome.keep(NIXL, measured);
    Ok(())
}

fn by_cuda(
    bench: &mut Bench,
    engine: &Engine,
    case: &Case,
    rows: &mut Vec<Beside>,
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let all = bench.card.multiprocessors()?;
    let ready = bench.prepare(case)?;
    let (transport, peer) = ready.transport(&CudaOptions::default())?;
    let load = || {
        let loaded =
            ready.with_request(|request| transfer(&transport, &peer, &ready.plan, request));
        loaded.map(|_| ())
    };
    for kind in &KINDS {
        for sms in [Some(4), Some(8), Some(16), Some(32), Some(66), None, Some(all)] {
            transport.set_sms(sms);
            let by = match sms {
                Some(sms) => format!("cuda, {sms} SMs"),
                None => "cuda, by default".to_owned(),
            };
            let name = format!("beside {}: {by}", kind.name);
            rows.extend(outcome.keep(&name, engine.beside(kind, by, ready.bytes, load)));
        }
    }
    Ok(())
}

fn by_nixl(
    bench: &mut Bench,
    engine: &Engine,
    case: &Case,
    rows: &mut Vec<Beside>,
    outcome: &mut Outcome,
) -> Result<(), Failure> {
    let ready = bench.prepare_for(case, Some(Packing::default()), None)?;
    let (transport, peer) = ready.over_nixl(Packing::default())?;
    let ways: [(&str, packed::Read); 2] =
        [("nixl, packed", Nixl::read_packed), ("nixl, run by run", <Nixl as Transport>::read)];
    for kind in &KINDS {
        for (way, read) in ways {
            let load = || {
                let loaded = ready
                    .with_request(|request| packed::read(&transport, &peer, &ready, request, read));
                loaded.map(|_| ())
            };
            let name = format!("beside {}: {way}", kind.name);
            let row = engine.beside(kind, way.to_owned(), ready.bytes, load);
            rows.extend(outcome.keep(&name, row));
        }
    }
    Ok(())
}

/// What a decode engine does on the card.
struct Engine {
    card: Card,
    weights: Memory,
    out: Memory,
    stream: Stream,
    layer: Kernel,
    sms: u32,
    _module: Module,
}

impl Engine {
    fn new(card: &Card) -> Result<Self, Failure> {
        let source = include_str!("step.cu");
        let module = card.module(&nvrtc::compile("step.cu", source, &[], card.capability()?)?)?;
        Ok(Self {
            card: card.clone(),
            weights: Memory::new(card, WEIGHTS, false)?,
            out: Memory::new(card, u64::from(THREADS) * 4, false)?,
            stream: card.stream(false)?,
            layer: module.kernel("layer", 200 << 10)?,
            sms: card.multiprocessors()?,
            _module: module,
        })
    }

    /// Steps while loads come in, one after the other, of so many bytes each.
    fn beside(
        &self,
        kind: &Kind,
        by: String,
        bytes: u64,
        load: impl Fn() -> Result<(), Failure> + Sync,
    ) -> Result<Beside, Failure> {
        self.steps(kind)?;
        let alone = median(self.steps(kind)?);
        let (stop, loads) = (AtomicBool::new(false), AtomicU64::new(0));
        let (mut times, loaded, seconds) = std::thread::scope(|scope| -> Result<_, Failure> {
            let loader = scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    if let Err(error) = load() {
                        return Some(error.to_string());
                    }
                    loads.fetch_add(1, Ordering::Relaxed);
                }
                None
            });
            while loads.load(Ordering::Relaxed) < 2 && !loader.is_finished() {
                std::thread::yield_now();
            }
            let (began, start) = (loads.load(Ordering::Relaxed), Instant::now());
            let loaded = || loads.load(Ordering::Relaxed) - began;
            let steps = || -> Result<_, Failure> {
                let mut times = self.steps(kind)?;
                // Loads that take longer than those steps.
                while loaded() < LEAST_LOADS && start.elapsed() < PATIENCE {
                    times.extend(self.steps(kind)?);
                }
                Ok(times)
            };
            let times = steps();
            let (loaded, seconds) = (loaded(), start.elapsed().as_secs_f64());
            stop.store(true, Ordering::Relaxed);
            match loader.join() {
                Ok(None) => Ok((times?, loaded, seconds)),
                Ok(Some(error)) => Err(error.into()),
                Err(_) => Err("the thread that loads panicked".into()),
            }
        })?;
        let loaded = loaded as f64 * bytes as f64 / 1e9;
        let longer = (times.iter().sum::<f64>() - alone * times.len() as f64) / 1e3;
        times.sort_by(f64::total_cmp);
        let row = Beside {
            kind: kind.name,
            by,
            alone_us: alone,
            step_us: times[times.len() / 2],
            slowest_us: times[times.len() - 1],
            loaded: loaded / seconds,
            ms_per_gb: longer / loaded,
        };
        println!(
            "{:<36} {:<24} {:>9.0} {:>9.0} {:>6.2} {:>9.0} {:>12.0} {:>9.3}",
            row.kind,
            row.by,
            row.alone_us,
            row.step_us,
            row.step_us / row.alone_us,
            row.slowest_us,
            row.loaded,
            row.ms_per_gb
        );
        Ok(row)
    }

    /// Microseconds of steps, one right after the other.
    fn steps(&self, kind: &Kind) -> Result<Vec<f64>, Failure> {
        let mut marks = vec![];
        for _ in 0..=STEPS {
            marks.push(self.card.event(true)?);
        }
        self.stream.record(&marks[0])?;
        for mark in &marks[1..] {
            for launch in 0..LAUNCHES {
                let part = WEIGHTS / LAUNCHES;
                let (mut from, mut words) = (self.weights.base + launch * part, part / 16);
                let (mut by, mut out) = (0.5f32, self.out.base);
                let mut arguments = [
                    argument(&mut from),
                    argument(&mut words),
                    argument(&mut by),
                    argument(&mut out),
                ];
                let shape = (self.sms * kind.ctas_per_sm, THREADS);
                // SAFETY: the arguments are the kernel's, and the memory is there until the stream has been
                // waited for.
                unsafe { self.stream.launch(&self.layer, shape, kind.shared, &mut arguments)? };
            }
            self.stream.record(mark)?;
        }
        self.stream.synchronize()?;
        std::iter::zip(&marks, &marks[1..])
            .map(|(before, after)| Ok(f64::from(after.since(before)?) * 1e3))
            .collect()
    }
}
