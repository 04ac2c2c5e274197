//! The kernel's own code, compiled for the CPU, against the digests of host memory; and the kernel
//! compiled for cards.

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock};

use kvferry_digest::{Held, Key, Program, host};
use kvferry_layout::{Draft, Manifest, Place, Span};
use kvferry_testkit::drive::Drawn;
use kvferry_testkit::large::hundred_layers;
use kvferry_testkit::random::Dice;
use kvferry_testkit::request::{Shape, draw};

use super::encode::Encoded;
use super::{KERNEL, KERNEL_HEADER};
use kvferry_transport::Error;

type Twin = unsafe extern "C" fn(*const u8, *mut [u64; 2]) -> u64;

/// sum.h, compiled by the C compiler of this machine.
fn twin() -> Twin {
    static TWIN: OnceLock<Twin> = OnceLock::new();
    *TWIN.get_or_init(|| {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/digest/host.c");
        let directory = std::env::temp_dir().join(format!("kvferry-sum-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let library = directory.join("libsum.so");
        let built = Command::new("cc")
            .args(["-std=c11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"])
            .args([&library, &source])
            .status()
            .expect("a C compiler called cc");
        assert!(built.success(), "host.c does not compile");
        // SAFETY: the library was just built from host.c, and so is the declaration; it is never
        // unloaded.
        unsafe {
            let loaded = Box::leak(Box::new(libloading::Library::new(&library).unwrap()));
            std::fs::remove_dir_all(&directory).unwrap();
            *loaded.get(b"kvferry_digest\0").unwrap()
        }
    })
}

/// What the kernel's code adds up is what the host does, however many warps there are.
///
/// # Safety
///
/// Every extent of the program must be readable.
unsafe fn check(program: &Program, what: &str) {
    // SAFETY: the caller's promise.
    let expected = unsafe { host::digest(program, &|| false) }.unwrap();
    for warps in [1, 30, 5000] {
        let encoded = Encoded::new(program, warps).unwrap();
        // Words, for the alignment.
        let mut words = vec![0_u128; encoded.bytes.len().div_ceil(16)];
        let mut sums = vec![[0; 2]; encoded.units as usize];
        // SAFETY: there is room for the program and for its sums, and the caller vouches for the rest.
        let misaligned = unsafe {
            let start = words.as_mut_ptr().cast::<u8>();
            start.copy_from_nonoverlapping(encoded.bytes.as_ptr(), encoded.bytes.len());
            twin()(start, sums.as_mut_ptr())
        };
        assert_eq!(misaligned, 0, "{what}: accesses that a card would refuse");
        assert_eq!(encoded.digests(program, &sums), expected, "{what}, {warps} warps");
    }
}

/// Memory for a draft's regions, each at a multiple of 16.
fn memory(draft: &mut Draft, dice: &mut Dice) -> Vec<Vec<u128>> {
    let regions = draft.regions.iter_mut().map(|region| {
        let words = region.bytes.div_ceil(16);
        let any = |_| u128::from(dice.any()) << 64 | u128::from(dice.any());
        let words: Vec<u128> = (0..words).map(any).collect();
        (region.base, region.place) = (words.as_ptr() as u64, Place::Host);
        words
    });
    regions.collect()
}

#[test]
fn the_kernel_adds_up_what_the_host_does() {
    let mut pieces = 0;
    for seed in 0..120 {
        let drawn = Drawn::new(seed);
        let dice = &mut Dice::new(!seed);
        let request = draw(&drawn.source, &drawn.destination, 60, Shape::Scattered, dice);
        for rank in &drawn.source.ranks {
            let mut draft = rank.manifest.clone().into_draft();
            let _memory = memory(&mut draft, dice);
            let manifest = Manifest::new(draft).unwrap();
            let mut all = vec![];
            for (group, facts) in drawn.source.recipe.groups.iter().enumerate() {
                for (piece, holding) in rank.holdings[group].iter().enumerate() {
                    let live = facts.reach().live(holding.law, request.tokens);
                    all.push(((group, piece), Span::from(live)));
                }
            }
            let tables: Vec<(u64, &[u32])> =
                request.source.iter().map(|table| (table.first, &table.blocks[..])).collect();
            let held = Held { manifest: &manifest, tokens: request.tokens, tables: &tables };
            let key = Key([dice.any(), dice.any()]);
            // The source need not have kept what nobody needs.
            all.retain(|piece| Program::of_pieces(held, &key, &[*piece]).is_ok());
            pieces += all.len();
            let program = Program::of_pieces(held, &key, &all).unwrap();
            // SAFETY: the manifest's regions are the memory that was just made.
            unsafe { check(&program, &format!("seed {seed}")) };
        }
    }
    assert!(pieces > 300, "{pieces}");
}

#[test]
fn real_sizes_are_added_up_by_tiles() {
    let dice = &mut Dice::new(3);
    for group in [0, 3] {
        let mut draft = hundred_layers(3);
        draft.regions.truncate(1);
        draft.groups.swap(0, group);
        draft.groups.truncate(1);
        let of_region = if group == 3 { 2 } else { 4 };
        draft.groups[0].pieces.truncate(of_region);
        let _memory = memory(&mut draft, dice);
        let manifest = Manifest::new(draft).unwrap();
        let (blocks, tokens, entries) =
            if group == 3 { (&[2, 1][..], 1300, 5..1300) } else { (&[1][..], 1, 0..1) };
        let tables = [(0, blocks)];
        let held = Held { manifest: &manifest, tokens, tables: &tables };
        let all: Vec<_> =
            (0..of_region).map(|piece| ((0, piece), Span::from(entries.clone()))).collect();
        let program = Program::of_pieces(held, &Key([dice.any(), dice.any()]), &all).unwrap();
        // SAFETY: the manifest's region is the memory that was just made.
        unsafe { check(&program, &format!("group {group}")) };
    }
}

/// Units fill whole rounds of warps: no last round in which most of them have nothing to do.
#[test]
fn units_are_dealt_out_evenly() {
    let mut draft = hundred_layers(3);
    draft.regions.truncate(1);
    draft.groups.swap(0, 3);
    draft.groups.truncate(1);
    draft.groups[0].pieces.truncate(2);
    let _memory = memory(&mut draft, &mut Dice::new(4));
    let manifest = Manifest::new(draft).unwrap();
    let tables = [(0, &[2, 1][..])];
    let held = Held { manifest: &manifest, tokens: 1300, tables: &tables };
    let all: Vec<_> = (0..2).map(|piece| ((0, piece), Span::from(0..1300))).collect();
    let program = Program::of_pieces(held, &Key([1, 2]), &all).unwrap();
    for warps in [7, 40, 133, 500] {
        let units = u64::from(Encoded::new(&program, warps).unwrap().units);
        let rounds = units.div_ceil(warps);
        assert!(units * 5 >= rounds * warps * 4, "{units} units for {warps} warps");
    }
}

/// As for the kernel of copies.
#[test]
fn the_kernel_compiles_for_cards() {
    let nvrtc = match crate::tests::nvrtc_for_tests() {
        Ok(nvrtc) => nvrtc,
        Err(error) => {
            let required = std::env::var_os("KVFERRY_REQUIRE_NVRTC").is_some();
            assert!(!required, "{error}\nHere NVRTC is required: run tools/vllm-env.sh.");
            // Not by a macro: the output of tests that pass is not shown.
            let said = "NOT TESTED: the kernel of digests was not compiled, because NVRTC was not \
                        found: run tools/vllm-env.sh\n";
            std::io::Write::write_all(&mut std::io::stderr(), said.as_bytes()).unwrap();
            return;
        }
    };
    for (architecture, machine_code) in
        [("compute_80", false), ("sm_80", true), ("sm_90", true), ("sm_100", true)]
    {
        let image = nvrtc.compile("sum.cu", KERNEL, &[KERNEL_HEADER], architecture, machine_code);
        let image = image.unwrap_or_else(|error| panic!("{architecture}: {error}"));
        let found = |name: &[u8]| image.windows(name.len()).any(|part| part == name);
        assert!(found(b"kvferry_digest"), "{architecture}");
    }
}

/// On a machine with a card: transports share what they look with, and the last one takes it away.
#[test]
fn what_looks_at_a_card_goes_with_the_last_that_has_it() {
    let (one, other) = (super::DigestLaunchers::default(), super::DigestLaunchers::default());
    let Ok(looker) = one.of(0) else { return };
    let left = Arc::downgrade(&looker);
    drop(looker);
    assert!(std::ptr::eq(left.as_ptr(), Arc::as_ptr(&other.of(0).unwrap())));
    drop(one);
    assert!(left.upgrade().is_some(), "the other has it still");
    drop(other);
    assert!(left.upgrade().is_none());
}

#[test]
fn without_a_driver_the_error_says_so() {
    match super::DigestLauncher::of(0) {
        Err(Error::NoDriver(reason)) => assert!(!reason.is_empty()),
        // On a machine with a card it works, or names what is missing.
        other => assert!(Path::new("/dev/nvidiactl").exists(), "{:?}", other.err()),
    }
}
