//! Variants of the kernel, side by side.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvferry_transport::cuda::{CudaOptions, KERNEL, KERNEL_HEADER, Tuning, Upload, nvrtc};

use super::Failure;
use super::measure::{self, Bench, median, transfer};

struct Variant {
    name: String,
    defines: Vec<(&'static str, String)>,
    tuning: Tuning,
}

const STREAM: (&str, &str) = ("ld.global.cs", "st.global.cs");
const NC: &str = "ld.global.nc.L1::no_allocate";

fn variant(
    name: &str,
    hints: (&str, &str),
    (threads, ctas, deep): (u32, u32, u64),
    order: u32,
    change: impl FnOnce(&mut Tuning),
) -> Variant {
    let mut tuning = Tuning { threads, ctas, deep, ..Tuning::default() };
    change(&mut tuning);
    let defines = vec![
        ("KV_LOAD_16", format!("{:?}", hints.0)),
        ("KV_STORE_16", format!("{:?}", hints.1)),
        ("KV_THREADS", threads.to_string()),
        ("KV_CTAS", ctas.to_string()),
        ("KV_DEEP", deep.to_string()),
        ("KV_ORDER", order.to_string()),
        ("KV_LONG", u32::from(tuning.inline > 4000).to_string()),
    ];
    let name =
        format!("{threads}x{ctas} d{deep} {}/{} o{order} {name}", &hints.0[9..], &hints.1[9..]);
    Variant { name, defines, tuning }
}

fn variants() -> Vec<Variant> {
    let one = (1024, 1, 8);
    let mut all = vec![
        variant("base", STREAM, one, 0, |_| ()),
        variant("base again", STREAM, one, 0, |_| ()),
        variant("no rows", STREAM, one, 0, |tuning| tuning.rows = false),
    ];
    // Hints.
    for load in ["ld.global", "ld.global.nc", NC, "ld.global.L1::no_allocate"] {
        for store in ["st.global", "st.global.cs"] {
            all.push(variant("", (load, store), one, 0, |_| ()));
        }
    }
    for hints in [
        ("ld.global.cs", "st.global"),
        ("ld.global.nc.L1::no_allocate.L2::128B", "st.global"),
        ("ld.global.nc.L1::no_allocate.L2::256B", "st.global"),
        (NC, "st.global.L1::no_allocate"),
        (NC, "st.global.cg"),
        (NC, "st.global.wt"),
        ("ld.global.lu", "st.global"),
    ] {
        all.push(variant("", hints, one, 0, |_| ()));
    }
    // Shapes.
    for hints in [STREAM, (NC, "st.global")] {
        for shape in [
            (512, 2, 8),
            (256, 4, 8),
            (512, 1, 8),
            (512, 1, 16),
            (256, 2, 16),
            (1024, 1, 4),
            (256, 6, 4),
        ] {
            all.push(variant("", hints, shape, 0, |_| ()));
        }
        // Who takes what, and how much at a time.
        for order in [1, 2] {
            all.push(variant("", hints, one, order, |_| ()));
            all.push(variant("", hints, (256, 4, 8), order, |_| ()));
        }
        for batch in [4 << 10, 8 << 10, 32 << 10] {
            let name = format!("batch {}k", batch >> 10);
            all.push(variant(&name, hints, one, 0, |tuning| {
                (tuning.least_batch, tuning.most_batch) = (batch.min(8 << 10), batch);
            }));
        }
        for (shape, batch) in [((256, 4, 8), 4), ((256, 4, 8), 8), ((256, 4, 8), 32), (one, 8)] {
            all.push(variant(&format!("one pass {batch}k"), hints, shape, 1, |tuning| {
                (tuning.least_batch, tuning.most_batch) = (batch << 10, batch << 10);
                tuning.one_pass = true;
            }));
        }
    }
    // The way to the card.
    all.push(variant("inline 32000", STREAM, one, 0, |tuning| tuning.inline = 32_000));
    all.push(variant("inline 8000", STREAM, one, 0, |tuning| tuning.inline = 8_000));
    all.push(variant("mapped", STREAM, one, 0, |tuning| tuning.upload = Upload::Mapped));
    all.push(variant("inline 32000 mapped", STREAM, one, 0, |tuning| {
        (tuning.inline, tuning.upload) = (32_000, Upload::Mapped);
    }));
    all
}

/// Compiles all variants, on all cores.
fn compile(variants: &[Variant], capability: u32) -> Result<Vec<PathBuf>, Failure> {
    let next = AtomicUsize::new(0);
    let directory = std::env::temp_dir().join(format!("kvferry-sweep-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;
    let path = |at: usize| directory.join(format!("{at}.cubin"));
    let work = || -> Result<(), String> {
        while let Some(variant) = variants.get(next.fetch_add(1, Ordering::Relaxed)) {
            let at = variants.iter().position(|other| std::ptr::eq(other, variant));
            let defines = variant.defines.iter();
            let mut source: String =
                defines.map(|(name, value)| format!("#define {name} {value}\n")).collect();
            source.push_str(KERNEL);
            let image = nvrtc::compile("copy.cu", &source, &[KERNEL_HEADER], capability);
            let image = image.map_err(|error| format!("{}: {error}", variant.name))?;
            let written = std::fs::write(path(at.unwrap_or_default()), image);
            written.map_err(|error| error.to_string())?;
        }
        Ok(())
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| "a panic".to_owned())?)
    })?;
    Ok((0..variants.len()).map(path).collect())
}

struct Found {
    card: Vec<f64>,
    wall: Vec<f64>,
    bounded: Vec<f64>,
    wrong: u64,
}

fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

const ROWS: [&str; 8] = [
    "llama-3.1-70b tp=4 -> tp=8, 8k",
    "llama-3.1-70b tp=4 -> tp=8, 128k",
    "llama-3.1-70b tp=4,layout=LBNHC -> tp=8,layout=LBNHC, 8k",
    "qwen3-32b tp=2,block=16 -> tp=4,block=32, 8k",
    "gpt-oss-120b tp=2 -> tp=4, 128k",
    "kimi-linear-48b-a3b tp=4 -> tp=2, 8k",
    "kimi-linear-48b-a3b tp=4 -> tp=2, 128k",
    "nemotron-3-nano-30b-a3b tp=2 -> tp=1, 8k",
];

pub(super) fn sweep(bench: &mut Bench, only: &str) -> Result<(), Failure> {
    let variants = variants();
    let began = std::time::Instant::now();
    let kernels = compile(&variants, bench.card.capability()?)?;
    println!("{} variants compiled in {:.1} s", variants.len(), began.elapsed().as_secs_f64());
    let mut found: Vec<Found> = variants
        .iter()
        .map(|_| Found { card: vec![], wall: vec![], bounded: vec![], wrong: 0 })
        .collect();
    let cases = measure::cases();
    let cases = ROWS.iter().filter_map(|name| cases.iter().find(|case| case.name() == *name));
    for case in cases.filter(|case| case.name().contains(only)) {
        if began.elapsed().as_secs() > 400 {
            println!("no time for {}", case.name());
            continue;
        }
        let ready = bench.prepare(case)?;
        let mut limits = vec![];
        let all = variants.iter().zip(&kernels).zip(&mut found).enumerate();
        for (number, ((variant, kernel), found)) in all {
            let tuning = variant.tuning.clone();
            let kernel = Some(kernel.clone());
            let (transport, peer) =
                ready.transport(&CudaOptions { kernel, tuning, ..CudaOptions::default() })?;
            // Now and then again: cards grow warm.
            if number % 16 == 0 {
                limits.push(bench.limit(&transport, &peer, &ready)?);
            }
            let limit = median(limits.clone());
            bench.poison(&ready)?;
            ready.with_request(|request| -> Result<(), Failure> {
                let once = || transfer(&transport, &peer, &ready.plan, request);
                once()?;
                found.wrong += bench.check(&ready)?;
                let times: Vec<_> = (0..bench.rounds).map(|_| once()).collect::<Result<_, _>>()?;
                let wall = median(times.iter().map(|times| times.all).collect());
                let cpu = median(times.iter().map(|times| times.launched).collect());
                let card = bench.on_card(&transport, &peer, &ready.plan, request)?;
                let laps = transport.laps();
                transport.set_sms(Some(16));
                once()?;
                let times: Vec<_> =
                    (0..bench.rounds / 2 + 1).map(|_| once()).collect::<Result<_, _>>()?;
                let bounded = median(times.iter().map(|times| times.all).collect());
                found.card.push(limit / card);
                found.wall.push(limit / wall);
                found.bounded.push(limit / bounded);
                println!(
                    "{:<60} {:<72} limit {limit:>7.1} card {card:>7.1} wall {wall:>7.1} 16: {bounded:>8.1} cpu {cpu:>5.1} post {laps:.1?} wrong {}",
                    case.name(), variant.name, found.wrong
                );
                Ok(())
            })?;
        }
        println!("{}: limits {limits:.1?}", case.name());
    }
    let mut order: Vec<usize> = (0..variants.len()).collect();
    order.sort_by(|&a, &b| least(&found[b].wall).total_cmp(&least(&found[a].wall)));
    println!(
        "\nfractions of the limit, rows as above: worst wall, worst card, worst 16 | wall | card | 16"
    );
    for at in order {
        let Found { card, wall, bounded, wrong } = &found[at];
        let list = |values: &[f64]| -> String {
            values.iter().map(|value| format!(" {:>3.0}", value * 100.0)).collect()
        };
        println!(
            "{:<64} {:.3} {:.3} {:.3} |{} |{} |{}{}",
            variants[at].name,
            least(wall),
            least(card),
            least(bounded),
            list(wall),
            list(card),
            list(bounded),
            if *wrong > 0 { format!(" WRONG {wrong}") } else { String::new() }
        );
    }
    match found.iter().map(|found| found.wrong).sum::<u64>() {
        0 => Ok(()),
        wrong => Err(format!("{wrong} bytes are wrong").into()),
    }
}
