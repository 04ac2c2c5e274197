//! Bodies of the fuzz targets: whatever the bytes, nothing may panic, and nothing may be half right.
//!
//! The same bodies run in a normal test, on random and on mutated bytes.

use std::sync::OnceLock;

use kvferry_layout::{Draft, Kernel, Manifest};
use kvferry_plan::{Plan, Request};

use crate::drive::{Drawn, tables};
use crate::random::Dice;
use crate::request::{self, OwnedRequest, OwnedTable, Shape};

/// Decodes a manifest. What decodes must encode, and decode to the same again.
pub fn decode_manifest(bytes: &[u8]) {
    if let Ok(manifest) = Manifest::from_bytes(bytes) {
        let again = Manifest::from_bytes(&manifest.to_bytes()).expect("what was encoded decodes");
        assert_eq!(again, manifest);
        let again = Manifest::from_json(&manifest.to_json()).expect("what was written reads");
        assert_eq!(again, manifest);
    }
    if let Ok(Ok(manifest)) = std::str::from_utf8(bytes).map(Manifest::from_json) {
        let again = Manifest::from_bytes(&manifest.to_bytes()).expect("what was read encodes");
        assert_eq!(again, manifest);
    }
}

/// Asks a plan for a request that is made of the bytes: an error, or copies and a rest that lie in the
/// regions and write no byte twice. Returns the number of copies.
pub fn request_against_plan(bytes: &[u8]) -> u64 {
    let mut bytes = Bytes(bytes);
    let pairs = pairs();
    let pair = &pairs[bytes.number() as usize % pairs.len()];
    pair.ask(&pair.plan, &pair.destination, &pair.sources, &mut bytes)
}

/// Changes numbers of good manifests, compiles what is left of them, and asks for a request. Returns
/// whether a plan was made, and the number of copies.
pub fn hostile_manifests(bytes: &[u8]) -> (bool, u64) {
    let mut bytes = Bytes(bytes);
    let pairs = pairs();
    let pair = &pairs[bytes.number() as usize % pairs.len()];
    let mut drafts: Vec<Draft> = [&pair.destination]
        .into_iter()
        .chain(&pair.sources)
        .map(|good| good.clone().into_draft())
        .collect();
    for _ in 0..1 + bytes.byte() % 3 {
        let at = usize::from(bytes.byte()) % drafts.len();
        change(&mut drafts[at], &mut bytes);
    }
    let manifests: Result<Vec<Manifest>, _> = drafts.into_iter().map(Manifest::new).collect();
    let Ok(mut sources) = manifests else { return (false, 0) };
    let destination = sources.remove(0);
    match Plan::compile(&destination, &sources.iter().collect::<Vec<_>>()) {
        Ok(plan) => (true, pair.ask(&plan, &destination, &sources, &mut bytes)),
        Err(_) => (false, 0),
    }
}

/// Plans to try requests on.
fn pairs() -> &'static [Pair] {
    static PAIRS: OnceLock<Vec<Pair>> = OnceLock::new();
    PAIRS.get_or_init(|| {
        let drawn = (0..).map(Drawn::new).filter_map(|drawn| {
            let mut dice = Dice::new(drawn.seed);
            let Drawn { source, sources, destination, .. } = drawn;
            let good = request::draw(&source, &destination, 30, Shape::Scattered, &mut dice);
            let rank = &destination.ranks[0].manifest;
            let sources: Vec<Manifest> = sources
                .iter()
                .map(|&source_rank| source.ranks[source_rank].manifest.clone())
                .collect();
            let plan = Plan::compile(rank, &sources.iter().collect::<Vec<_>>()).ok()?;
            Some(Pair { plan, destination: rank.clone(), sources, good })
        });
        drawn.take(64).collect()
    })
}

struct Pair {
    plan: Plan,
    destination: Manifest,
    sources: Vec<Manifest>,
    good: OwnedRequest,
}

impl Pair {
    /// The good request with some of its numbers changed, or one that is made of the bytes alone.
    fn request(&self, bytes: &mut Bytes<'_>) -> OwnedRequest {
        if !bytes.byte().is_multiple_of(4) {
            let mut request = self.good.clone();
            for _ in 0..bytes.byte() % 4 {
                change_request(&mut request, bytes);
            }
            return request;
        }
        let mut tables = |count: usize| {
            let table = |_| OwnedTable {
                first: bytes.number(),
                blocks: (0..bytes.number() % 40).map(|_| bytes.number() as u32).collect(),
            };
            (0..count).map(table).collect()
        };
        let (source, destination) =
            (tables(self.good.source.len()), tables(self.good.destination.len()));
        let tokens = bytes.number();
        let cached = self.good.cached.iter().map(|_| bytes.number().min(tokens)).collect();
        OwnedRequest { tokens, cached, source, destination }
    }

    /// Asks a plan for a request and checks what it yields; returns the number of copies.
    fn ask(&self, plan: &Plan, to: &Manifest, from: &[Manifest], bytes: &mut Bytes<'_>) -> u64 {
        let owned = self.request(bytes);
        let request = Request {
            tokens: owned.tokens,
            cached: &owned.cached,
            source: &tables(&owned.source),
            destination: &tables(&owned.destination),
        };
        let Ok(transfer) = plan.transfer(&request) else { return 0 };

        let inside = |manifest: &Manifest, address: u64, bytes: u64| {
            manifest.regions().iter().any(|region| {
                let start = address.checked_sub(region.base);
                let end = start.and_then(|start| start.checked_add(bytes));
                bytes > 0 && end.is_some_and(|end| end <= region.bytes)
            })
        };
        let mut written: Vec<(u64, u64)> = vec![];
        let mut total = 0;
        for (index, manifest) in from.iter().enumerate() {
            let loops = transfer.loops(index).expect("loops of a proven plan");
            for copy in loops.copies().take(100_000) {
                assert!(inside(manifest, copy.source, copy.bytes), "{copy:?} reads outside");
                assert!(inside(to, copy.destination, copy.bytes), "{copy:?}");
                written.push((copy.destination, copy.bytes));
            }
            total += loops.runs();
        }
        for area in transfer.rest().expect("areas of a proven plan").into_iter().take(100_000) {
            assert!(inside(to, area.address, area.bytes), "{area:?} is outside");
            written.push((area.address, area.bytes));
        }
        written.sort_unstable();
        let twice = written.windows(2).find(|pair| pair[0].0 + pair[0].1 > pair[1].0);
        assert_eq!(twice, None, "written twice");
        total
    }
}

/// Bytes read as numbers, zero after their end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                *first
            }
            None => 0,
        }
    }

    /// A small number mostly, and sometimes one at the end of a range.
    fn number(&mut self) -> u64 {
        match self.byte() {
            250 => u64::from(self.byte()) << 8 | u64::from(self.byte()),
            251 => u64::from(u32::MAX) - u64::from(self.byte()),
            252 => u64::MAX - u64::from(self.byte()),
            253 => 1 << (self.byte() % 64),
            254 => (1 << (self.byte() % 64)) - 1,
            255 => (0..8).fold(0, |number, _| number << 8 | u64::from(self.byte())),
            small => small.into(),
        }
    }
}

/// Changes one number of a request, or the number of its tables.
fn change_request(request: &mut OwnedRequest, bytes: &mut Bytes<'_>) {
    let mut numbers = vec![&mut request.tokens];
    numbers.extend(&mut request.cached);
    let mut ids: Vec<&mut u32> = vec![];
    for table in request.source.iter_mut().chain(&mut request.destination) {
        numbers.push(&mut table.first);
        ids.extend(&mut table.blocks);
    }
    let at = usize::from(bytes.byte()) % (numbers.len() + ids.len() + 1);
    if at < numbers.len() {
        *numbers[at] = bytes.number();
    } else if let Some(id) = ids.get_mut(at - numbers.len()) {
        **id = bytes.number() as u32;
    } else {
        request.destination.truncate(usize::from(bytes.byte()) % 4);
    }
}

/// Changes one number of a draft.
fn change(draft: &mut Draft, bytes: &mut Bytes<'_>) {
    let mut numbers: Vec<&mut u64> = vec![];
    for region in &mut draft.regions {
        numbers.extend([&mut region.base, &mut region.bytes]);
    }
    let mut small: Vec<&mut u32> = vec![];
    for kind in &mut draft.kinds {
        numbers.extend(kind.axes.iter_mut().map(|axis| &mut axis.length));
        small.extend([&mut kind.format.bytes, &mut kind.law.entries]);
        small.extend([&mut kind.law.tokens, &mut kind.law.open]);
    }
    for group in &mut draft.groups {
        small.push(&mut group.blocks);
        numbers.extend(&mut group.tokens_per_block);
        numbers.extend(&mut group.window.tokens);
        numbers.extend([&mut group.window.chunk, &mut group.window.extra]);
        for piece in &mut group.pieces {
            if let Some(need) = &mut piece.need {
                numbers.extend(&mut need.tokens);
                numbers.extend([&mut need.chunk, &mut need.extra]);
            }
            for span in &mut piece.bounds.0 {
                numbers.extend([&mut span.start, &mut span.end]);
            }
            let phase = &mut piece.phase;
            numbers.extend([&mut phase.modulus, &mut phase.held.start, &mut phase.held.end]);
            let view = &mut piece.view;
            numbers.extend([&mut view.offset, &mut view.block, &mut view.entry]);
            numbers.extend(&mut view.axes);
            if let Some(Kernel { entries, stride }) = &mut view.kernel {
                numbers.extend([entries, stride]);
            }
        }
        for scratch in &mut group.scratch {
            numbers.extend([&mut scratch.offset, &mut scratch.block, &mut scratch.run]);
            numbers.extend(scratch.dims.iter_mut().flat_map(|(count, stride)| [count, stride]));
        }
    }
    let at = bytes.number() as usize % (numbers.len() + small.len());
    match at.checked_sub(numbers.len()) {
        None => *numbers[at] = bytes.number(),
        Some(at) => *small[at] = bytes.number() as u32,
    }
}

/// Good encodings to start mutating from: manifests, in binary and in JSON.
pub fn seeds(count: u64) -> Vec<Vec<u8>> {
    let mut seeds = vec![];
    for seed in 0..count {
        let drawn = Drawn::new(seed);
        for engine in [&drawn.source, &drawn.destination] {
            let manifest = &engine.ranks[0].manifest;
            seeds.push(manifest.to_bytes());
            seeds.push(manifest.to_json().into_bytes());
        }
    }
    seeds
}

/// Bytes like `bytes`, changed in a few places: flipped, set, cut, doubled, or with a number at the end
/// of its range in it.
pub fn mutate(bytes: &[u8], dice: &mut Dice) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..dice.within(1, 6) {
        if bytes.is_empty() {
            bytes.push(dice.any() as u8);
        }
        let at = dice.index(bytes.len());
        match dice.within(0, 6) {
            0 => bytes[at] ^= 1 << dice.within(0, 7),
            1 => bytes[at] = dice.any() as u8,
            2 => bytes.truncate(at),
            3 => drop(bytes.remove(at)),
            4 => bytes.insert(at, dice.any() as u8),
            // The largest number of the wire format, in place of one.
            5 => drop(
                bytes.splice(at..at + 1, [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]),
            ),
            _ => {
                let end = dice.within(at as u64, bytes.len() as u64) as usize;
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
        }
    }
    bytes
}
