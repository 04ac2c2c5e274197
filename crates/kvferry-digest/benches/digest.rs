//! How fast digests are computed, beside what copying the same bytes takes in the same run:
//! `cargo bench -p kvferry-digest`.

use std::hint::black_box;
use std::time::Duration;

use kvferry_digest::{Held, Key, Program, host};
use kvferry_layout::{
    Axis, Draft, Format, Group, Kind, Law, Manifest, Phase, Piece, Region, Span, StateBox, View,
    Window,
};

const LAYERS: u64 = 16;
const TOKENS: u64 = 4096;
const PER_BLOCK: u64 = 16;
const DIM: u64 = 128;

/// Heads of a rank, and whether tokens of a head lie together (or heads of a token).
fn manifest(base: u64, heads: u64, by_head: bool) -> Manifest {
    let row = DIM * 2;
    let block = PER_BLOCK * heads * row;
    let layer = (TOKENS / PER_BLOCK) * block;
    let (entry, head) = if by_head { (row, PER_BLOCK * row) } else { (heads * row, row) };
    let pieces = (0..LAYERS).map(|number| Piece {
        state: format!("layers.{number}/k"),
        kind: 0,
        bounds: StateBox::new([0..heads, 0..DIM]),
        phase: Phase::ALL,
        need: None,
        view: View {
            region: 0,
            offset: number * layer,
            block,
            kernel: None,
            entry,
            axes: vec![head, 2],
        },
    });
    let draft = Draft {
        regions: vec![Region::host(base, LAYERS * layer)],
        kinds: vec![Kind {
            format: Format::new("bf16", 2),
            axes: vec![Axis::new("head", heads), Axis::new("dim", DIM)],
            law: Law::PER_TOKEN,
        }],
        groups: vec![Group {
            name: "attention".to_owned(),
            blocks: (TOKENS / PER_BLOCK) as u32,
            null_block: None,
            tokens_per_block: Some(PER_BLOCK),
            window: Window::FULL,
            pieces: pieces.collect(),
            scratch: vec![],
        }],
        ..Draft::default()
    };
    Manifest::new(draft).expect("the layout is sound")
}

/// Time that this thread has had a processor: others may want it meanwhile.
fn now() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a clock that there is, and a place for what it says.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The shortest of several interleaved runs of both.
fn shortest(mut one: impl FnMut(), mut other: impl FnMut()) -> (Duration, Duration) {
    let mut best = (Duration::MAX, Duration::MAX);
    for _ in 0..15 {
        let began = now();
        one();
        let between = now();
        other();
        best.0 = best.0.min(between - began);
        best.1 = best.1.min(now() - between);
    }
    best
}

fn main() {
    let bytes = (LAYERS * TOKENS * 8 * DIM * 2) as usize;
    let source: Vec<u8> = (0..bytes).map(|i| ((i * 31) >> 3) as u8).collect();
    let mut copy = vec![0_u8; bytes];
    println!("{:<34} {:>9} {:>9} {:>7}", "layout", "memcpy", "digest", "ratio");
    for (name, heads, by_head) in [
        ("8 heads, heads of a token together", 8, false),
        ("8 heads, tokens of a head together", 8, true),
        ("1 head", 1, false),
    ] {
        let manifest = manifest(source.as_ptr() as u64, heads, by_head);
        let blocks = (TOKENS / PER_BLOCK) as u32;
        // Blocks in no order.
        let table: Vec<u32> = (0..blocks).map(|block| block * 97 % blocks).collect();
        let tables = [(0, &table[..])];
        let held = Held { manifest: &manifest, tokens: TOKENS, tables: &tables };
        let pieces: Vec<_> =
            (0..LAYERS as usize).map(|p| ((0, p), Span::from(0..TOKENS))).collect();
        let looked = (LAYERS * TOKENS * heads * DIM * 2) as usize;
        let (copied, summed) = shortest(
            || black_box(&mut copy)[..looked].copy_from_slice(black_box(&source[..looked])),
            || {
                // Making the program is part of it.
                let program = Program::of_pieces(held, &Key([1, 2]), &pieces).expect("it is held");
                assert_eq!(program.bytes() as usize, looked);
                // SAFETY: the region is `source`, and the manifest was checked against it.
                black_box(unsafe { host::digest(&program, &|| false) });
            },
        );
        let rate = |time: Duration| looked as f64 / time.as_secs_f64() / 1e9;
        println!(
            "{name:<34} {:>4.1} GB/s {:>4.1} GB/s {:>7.2}",
            rate(copied),
            rate(summed),
            copied.as_secs_f64() / summed.as_secs_f64()
        );
    }
}
