//! Digests on a GPU: right, and how fast, beside what the card's own copy takes in the same run. Needs a
//! card and NVRTC: `cargo run --release -p kvferry-bench --example gpu_digest`.

use std::time::{Duration, Instant};

use kvferry_cuda::digest::DigestLauncher;
use kvferry_cuda::driver::Card;
use kvferry_digest::{Held, Key, Program, host};
use kvferry_layout::{
    Axis, Draft, Format, Group, Kind, Law, Manifest, Phase, Piece, Place, Region, Span, StateBox,
    View, Window,
};

const DIM: u64 = 128;
const PER_BLOCK: u64 = 16;

/// Layers of so many heads on one rank, in host memory or on a card.
fn manifest(region: Region, layers: u64, heads: u64, tokens: u64, by_head: bool) -> Manifest {
    let row = DIM * 2;
    let block = PER_BLOCK * heads * row;
    let layer = tokens.div_ceil(PER_BLOCK) * block;
    let (entry, head) = if by_head { (row, PER_BLOCK * row) } else { (heads * row, row) };
    let pieces = (0..layers).map(|number| Piece {
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
        regions: vec![region],
        kinds: vec![Kind {
            format: Format::new("bf16", 2),
            axes: vec![Axis::new("head", heads), Axis::new("dim", DIM)],
            law: Law::PER_TOKEN,
        }],
        groups: vec![Group {
            name: "attention".to_owned(),
            blocks: tokens.div_ceil(PER_BLOCK) as u32,
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

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let card = Card::open(0)?;
    let (name, cuda) = card.name()?;
    println!("{name}, CUDA {}.{}", cuda / 1000, cuda % 1000 / 10);
    let looker = DigestLauncher::of(0)?;
    let stream = card.stream(false)?;
    println!(
        "{:<40} {:>9} {:>10} {:>10} {:>7} {:>10}",
        "request", "bytes", "copy", "digest", "ratio", "with host"
    );
    for (label, layers, heads, tokens, by_head) in [
        ("8,192 tokens, 8 heads, by token", 64, 8, 8192, false),
        ("8,192 tokens, 8 heads, by head", 64, 8, 8192, true),
        ("8,192 tokens, 1 head", 64, 1, 8192, false),
        ("131,072 tokens, 8 heads, by token", 64, 8, 131_072, false),
        ("1,000 tokens, 8 heads, by head", 64, 8, 1000, true),
    ] {
        let bytes = layers * tokens_up(tokens) * heads * DIM * 2;
        let (memory, other) = (card.allocate(bytes)?, card.allocate(bytes)?);
        let pattern: Vec<u8> =
            (0..1_u32 << 24).map(|i| (i.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
        for at in (0..bytes).step_by(pattern.len()) {
            let part = pattern.len().min((bytes - at) as usize);
            // SAFETY: it was allocated as long as that just now.
            unsafe { card.upload(memory + at, &pattern[..part])? };
        }
        let place = Place::Gpu(0);
        let on_card =
            manifest(Region { base: memory, bytes, place }, layers, heads, tokens, by_head);
        let blocks = tokens.div_ceil(PER_BLOCK) as u32;
        let table: Vec<u32> = (0..blocks)
            .map(|block| (u64::from(block) * 10_007 % u64::from(blocks)) as u32)
            .collect();
        let table = if blocks.is_multiple_of(10_007) { (0..blocks).collect() } else { table };
        let tables = [(0, &table[..])];
        let pieces: Vec<_> =
            (0..layers as usize).map(|p| ((0, p), Span::from(0..tokens))).collect();
        let key = Key([0x1234_5678, 0x9abc_def0]);
        let held = Held { manifest: &on_card, tokens, tables: &tables };
        let program = Program::of_pieces(held, &key, &pieces)?;
        let soon = Instant::now() + Duration::from_secs(30);
        // SAFETY: the region is the card's memory, which stays allocated until the end of the round.
        let found = unsafe { looker.digest(&program, soon)? };
        // The same bytes on the host, for the first layers: what the host adds up.
        let layer_bytes = (bytes / layers) as usize;
        let some = (1 << 28) / layer_bytes.max(1);
        let some = some.clamp(1, layers as usize);
        let mut copy = vec![0_u8; some * layer_bytes];
        // SAFETY: some layers of what was allocated above, which nobody writes.
        unsafe { card.download(&mut copy, memory)? };
        let region = Region::host(copy.as_ptr() as u64, copy.len() as u64);
        let on_host = manifest(region, some as u64, heads, tokens, by_head);
        let held = Held { manifest: &on_host, tokens, tables: &tables };
        let host_program = Program::of_pieces(held, &key, &pieces[..some])?;
        // SAFETY: the region is `copy`, and the manifest was checked against it.
        let expected = unsafe { host::digest(&host_program, &|| false) }.expect("nobody stops it");
        if found[..some] != expected {
            return Err(format!("{label}: the card adds up something else").into());
        }
        // A flipped bit is found.
        // SAFETY: as above.
        let flipped = unsafe {
            card.upload(memory + 1000, &[copy[1000] ^ 4])?;
            looker.digest(&program, soon)?
        };
        if flipped[0] == found[0] || flipped[1..] != found[1..] {
            return Err(format!("{label}: a flipped bit is not found").into());
        }
        // SAFETY: as above.
        let milliseconds = unsafe { looker.measure(&program, 10)? };
        let began = Instant::now();
        // SAFETY: as above.
        unsafe { looker.digest(&program, soon)? };
        let whole = began.elapsed();
        let (start, end) = (card.event(true)?, card.event(true)?);
        let mut copied = f32::INFINITY;
        for _ in 0..5 {
            stream.record(&start)?;
            // SAFETY: both spans are allocated, and the stream is waited for.
            unsafe { stream.copy(other, memory, bytes)? };
            stream.record(&end)?;
            stream.synchronize()?;
            copied = copied.min(end.since(&start)?);
        }
        let rate = |bytes: u64, milliseconds: f32| bytes as f64 / f64::from(milliseconds) / 1e6;
        // A copy reads and writes every byte.
        let (digest, traffic) = (rate(program.bytes(), milliseconds), 2.0 * rate(bytes, copied));
        println!(
            "{label:<40} {:>6.0} MB {traffic:>5.0} GB/s {digest:>5.0} GB/s {:>7.2} {:>5.0} GB/s",
            program.bytes() as f64 / 1e6,
            digest / traffic,
            program.bytes() as f64 / whole.as_secs_f64() / 1e9,
        );
        // SAFETY: allocated above; nothing uses them any more.
        unsafe {
            card.free(memory)?;
            card.free(other)?;
        }
    }
    println!(
        "copy: bytes read and written by the card's own copy of the same memory. ratio: digest / copy."
    );
    println!("with host: until the digests are known, with the program made and uploaded.");
    Ok(())
}

fn tokens_up(tokens: u64) -> u64 {
    tokens.next_multiple_of(PER_BLOCK)
}
