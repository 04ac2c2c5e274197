//! What can be judged without a GPU: the kernel's own code, compiled for the CPU, against the twin, and
//! the kernel compiled for cards.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use kvferry_layout::{BlockPair, Loop};
use proptest::prelude::*;

use super::launch_queue::{DENSE, INLINE, WIDE};
use super::program::Limits;
use super::*;

/// loops.h, compiled by the C compiler of this machine.
struct Host {
    carry_out: unsafe extern "C" fn(*const u8) -> u64,
    sizes: [u64; 6],
}

impl Host {
    fn get() -> &'static Self {
        static HOST: OnceLock<Host> = OnceLock::new();
        HOST.get_or_init(|| {
            let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/host.c");
            let directory =
                std::env::temp_dir().join(format!("kvferry-loops-{}", std::process::id()));
            std::fs::create_dir_all(&directory).unwrap();
            let library = directory.join("libloops.so");
            let built = Command::new("cc")
                .args(["-std=c11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o"])
                .args([&library, &source])
                .status()
                .expect("a C compiler called cc");
            assert!(built.success(), "host.c does not compile");
            // SAFETY: the library was just built from host.c, and so are the declarations; it is
            // never unloaded.
            unsafe {
                let loaded = Box::leak(Box::new(libloading::Library::new(&library).unwrap()));
                std::fs::remove_dir_all(&directory).unwrap();
                let sizes: libloading::Symbol<'_, unsafe extern "C" fn(*mut u64)> =
                    loaded.get(b"kvferry_sizes\0").unwrap();
                let mut found = [0; 6];
                sizes(found.as_mut_ptr());
                let carry_out = *loaded.get(b"kvferry_carry_out\0").unwrap();
                Self { carry_out, sizes: found }
            }
        })
    }

    /// Carries a program out by the kernel's code.
    ///
    /// # Safety
    ///
    /// As for the twin.
    unsafe fn carry_out(&self, program: &Program<'_>) {
        // Words, for the alignment.
        let mut words = vec![0u128; program.bytes().div_ceil(16)];
        // SAFETY: there is room for the program, and the caller vouches for the addresses.
        let misaligned = unsafe {
            program.write(words.as_mut_ptr().cast(), program::Ends::default());
            (self.carry_out)(words.as_ptr().cast())
        };
        assert_eq!(misaligned, 0, "accesses that a card would refuse");
    }
}

#[test]
fn both_sides_of_the_interface_have_the_same_structures() {
    assert_eq!(Host::get().sizes, program::SIZES);
}

/// Kernels that users have compiled beforehand know the programs of one form.
#[test]
fn what_programs_mean_is_of_the_form_that_names_say() {
    let (_, text) = KERNEL_HEADER;
    let code: String = without_comments(text).split_whitespace().collect();
    let sum = code.bytes().fold(0xcbf2_9ce4_8422_2325, |sum: u64, byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    assert_eq!(
        (program::FORM, sum),
        (2, 0x4a43_9f32_93d5_6e11),
        "loops.h has changed. Where a kernel that was compiled from the old one would do something else \
         with a program of today, FORM must grow, and the names in copy.cu with it. Then write the new sum here"
    );
}

/// A warp that took as many bytes in tiles as in long runs would be the last to end.
#[test]
fn tiles_are_dealt_to_many_warps() {
    let batches = |run, repeated: &[Loop]| {
        let mut loops = Loops::default();
        let table = loops.add_table([BlockPair::default()]);
        loops.add_nest((0, 0), run, (0, 0), repeated, table).unwrap();
        Program::new(&loops, 16 << 10, |_| 0).batches()
    };
    let repeated = |count, source, destination| Loop { count, source, destination };
    // The convolutions of Kimi-Linear's delta layers, in the other order: three tiles for each part of a layer.
    let layers = repeated(6, 2_359_296_000, 4_718_592_000);
    let across = [repeated(3, 2048, 12288), repeated(1024, 2, 6), repeated(3, 6144, 2)];
    assert_eq!(batches(2, &[&[layers], &across[..]].concat()), 6 * 3 * 3);
    // The states behind them.
    assert_eq!(batches(524_288, &[layers]), 6 * 524_288 / (16 << 10));
}

fn without_comments(text: &str) -> String {
    let mut parts = text.split("/*");
    let first = parts.next().unwrap().to_owned();
    parts.fold(first, |code, part| code + part.split_once("*/").unwrap().1)
}

/// A nest as numbers, and the memory that it needs.
#[derive(Clone, Debug)]
struct Drawn {
    run: u64,
    loops: Vec<Loop>,
    blocks: (u64, u64),
    offsets: (u64, u64),
    pairs: Vec<BlockPair>,
}

/// Strides for loops of these counts around a run, in a given order from the inside out, with gaps.
fn strides(run: u64, counts: &[u64], order: &[usize], gaps: &[u64], unit: u64) -> (Vec<u64>, u64) {
    let mut strides = vec![0; counts.len()];
    let mut extent = run;
    for (&at, gap) in order.iter().zip(gaps) {
        extent += gap * unit;
        strides[at] = extent;
        extent *= counts[at];
    }
    (strides, extent)
}

fn drawn() -> impl Strategy<Value = Drawn> {
    let runs = prop::sample::select(vec![
        1u64, 2, 2, 2, 3, 4, 4, 6, 8, 8, 12, 16, 16, 32, 48, 80, 512, 512, 1024, 1024, 2048, 4096,
        4080, 4097, 5008, 9000, 20_480,
    ]);
    let counts = prop::collection::vec(
        prop::sample::select(vec![1u64, 2, 2, 3, 3, 4, 5, 7, 16, 33, 100]),
        0..4,
    );
    (runs, counts).prop_flat_map(|(run, mut counts)| {
        // Small enough to be quick.
        while run * counts.iter().product::<u64>() > 60_000 {
            counts.pop();
        }
        let len = counts.len();
        let order = || Just((0..len).collect::<Vec<_>>()).prop_shuffle();
        let gaps = || prop::collection::vec(prop::sample::select(vec![0u64, 0, 0, 1, 3]), len);
        let blocks = (1usize..7).prop_flat_map(|blocks| {
            let ids = (0..blocks as u32).collect::<Vec<_>>();
            (Just(ids.clone()).prop_shuffle(), prop::collection::vec(0..blocks as u32, blocks))
        });
        let unit = prop::sample::select(vec![1u64, 2, 4, 8, 16, 16, 16]);
        (
            (order(), gaps(), order(), gaps(), any::<bool>()),
            (0u64..3, 0u64..3, 0u64..4, 0u64..4, unit),
            blocks,
        )
            .prop_map(move |(orders, spare, (to, from))| {
                let (source_order, source_gaps, order, destination_gaps, alike) = orders;
                let unit = spare.4;
                let source_order = if alike { &order } else { &source_order };
                let source = strides(run, &counts, source_order, &source_gaps, unit);
                let destination = strides(run, &counts, &order, &destination_gaps, unit);
                let mut loops: Vec<Loop> = (0..counts.len())
                    .map(|at| Loop {
                        count: counts[at],
                        source: source.0[at],
                        destination: destination.0[at],
                    })
                    .collect();
                loops.sort_by_key(|repeat| std::cmp::Reverse(repeat.destination));
                let pair = |(source, destination)| BlockPair { source, destination };
                Drawn {
                    run,
                    loops,
                    blocks: (source.1 + spare.0 * unit, destination.1 + spare.1 * unit),
                    offsets: (spare.2 * unit, spare.3 * unit),
                    pairs: from.iter().copied().zip(to.iter().copied()).map(pair).collect(),
                }
            })
    })
}

/// Memory that starts at a multiple of 64, as cards have it.
fn aligned(bytes: u64) -> Vec<u128> {
    vec![0; bytes as usize / 16 + 16]
}

fn start(memory: &mut [u128]) -> u64 {
    (memory.as_mut_ptr() as u64).next_multiple_of(64)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// The kernel's code does to every byte what the twin does, padding and neighbours included, however small the
    /// parts are that nests are cut into.
    #[test]
    fn the_kernel_does_what_the_twin_does(
        nests in prop::collection::vec(drawn(), 1..4),
        batch_bytes in prop::sample::select(vec![4u64 << 10, 13 << 10, 64 << 10]),
        items in prop::sample::select(vec![32u64, 64, 100, 300, 1 << 31, 1 << 31]),
        narrow_ids in prop::sample::select(vec![0u32, 2, 1 << 16]),
        seed in any::<u64>(),
    ) {
        let sizes = |side: fn(&Drawn) -> u64| -> Vec<u64> {
            nests.iter().map(|nest| side(nest).next_multiple_of(64)).collect()
        };
        let sources = sizes(|nest| nest.offsets.0 + nest.blocks.0 * 6);
        let destinations = sizes(|nest| nest.offsets.1 + nest.blocks.1 * 6);
        let mut from = aligned(sources.iter().sum());
        for (at, word) in from.iter_mut().enumerate() {
            *word = (at as u128 + 1).wrapping_mul(u128::from(seed) << 64 | 0x9e37_79b9_7f4a_7c15);
        }
        let poison = 0x5a5a_a5a5_0f0f_f0f0_1234_5678_9abc_def0_u128;
        let mut expected = aligned(destinations.iter().sum());
        expected.fill(poison);
        let mut found = expected.clone();
        let loops = |to: u64, from: u64| {
            let mut loops = Loops::default();
            let (mut source, mut destination) = (from, to);
            for (at, nest) in nests.iter().enumerate() {
                let table = loops.add_table(nest.pairs.iter().copied());
                let start = (source + nest.offsets.0, destination + nest.offsets.1);
                loops.add_nest(start, nest.run, nest.blocks, &nest.loops, table).unwrap();
                source += sources[at];
                destination += destinations[at];
            }
            loops
        };
        let source = start(&mut from);
        let (to_expected, to_found) = (start(&mut expected), start(&mut found));
        prop_assert_eq!(to_expected % 64, to_found % 64);
        // SAFETY: the vectors hold everything that the nests reach.
        unsafe {
            carry_out(&loops(to_expected, source));
            let loops = loops(to_found, source);
            let limits = Limits { batch_bytes, items, narrow_ids };
            let program = Program::in_parts(&loops, |_| 0, limits);
            prop_assert!(program.counts().flatten().all(|count| count < items));
            Host::get().carry_out(&program);
        }
        let bytes = |memory: &[u128], start: u64| {
            let skipped = (start - memory.as_ptr() as u64) as usize;
            let bytes: Vec<u8> = memory.iter().flat_map(|word| word.to_ne_bytes()).collect();
            bytes[skipped..skipped + destinations.iter().sum::<u64>() as usize].to_vec()
        };
        prop_assert!(bytes(&expected, to_expected) == bytes(&found, to_found));
    }
}

#[test]
fn conv_columns_and_channels_that_change_places_are_tiles() {
    // 3 columns of 2048 channels of 2 bytes on the source, channels outside on the destination.
    let mut loops = Loops::default();
    let table = loops.add_table([BlockPair { source: 5, destination: 7 }]);
    let columns = Loop { count: 3, source: 4096, destination: 2 };
    let channels = Loop { count: 2048, source: 2, destination: 6 };
    loops.add_nest((0, 0), 2, (1 << 20, 1 << 20), &[channels, columns], table).unwrap();
    assert!(Program::new(&loops, 4 << 10, |_| 0).uses_tiles());
}

#[test]
fn pairs_take_half_the_room_where_all_numbers_are_small() {
    let bytes = |source, destination| {
        let mut loops = Loops::default();
        let table = loops.add_table([BlockPair { source, destination }; 100]);
        loops.add_nest((0, 0), 16, (16, 16), &[], table).unwrap();
        Program::new(&loops, 4 << 10, |_| 0).bytes()
    };
    let narrow = bytes(0, 0);
    assert_eq!(bytes(65_535, 65_535), narrow);
    assert_eq!([bytes(65_536, 0), bytes(0, 65_536)], [narrow + 400; 2]);
}

#[test]
fn nests_that_are_too_large_are_cut() {
    let mut loops = Loops::default();
    let one = loops.add_table([BlockPair { source: 1, destination: 2 }]);
    let two = loops.add_table((0..2).map(|at| BlockPair { source: at, destination: at }));
    let same = |count, stride| Loop { count, source: stride, destination: stride };
    // Runs of more words than can be counted, around which a loop is cut until it goes round once.
    let run = (1 << 36) + 48;
    loops.add_nest((0, 0), run, (0, 0), &[same(3, 1 << 40), same(1, 1 << 50)], one).unwrap();
    loops.add_nest((0, 0), run, (1 << 40, 1 << 40), &[], two).unwrap();
    // Many short ones.
    loops.add_nest((0, 0), 48, (0, 0), &[same(1 << 20, 1 << 30), same(1 << 14, 96)], one).unwrap();
    for [items, words, ..] in Program::new(&loops, 4 << 10, |_| 0).counts() {
        assert!(items < 1 << 31 && words < 1 << 31, "{items} items, {words} words");
    }
}

#[test]
fn a_tile_that_is_too_wide_is_cut() {
    let mut loops = Loops::default();
    let table = loops.add_table([BlockPair::default()]);
    let many = (1 << 32) + 5;
    let columns = Loop { count: many, source: 2, destination: 6 };
    let rows = Loop { count: 3, source: 1 << 34, destination: 2 };
    loops.add_nest((0, 0), 2, (0, 0), &[columns, rows], table).unwrap();
    let program = Program::new(&loops, 4 << 10, |_| 0);
    assert!(program.uses_tiles());
    let words = program.counts().map(|[_, _, across, along]| across * along);
    assert_eq!(words.sum::<u64>(), many * 3);
    assert!(program.counts().flatten().all(|count| count < 1 << 31));
}

#[test]
fn without_a_driver_the_error_says_so() {
    match Cuda::new(&CudaOptions::default()) {
        Err(Error::NoDriver(reason)) => assert!(!reason.is_empty()),
        // On a machine with a card it works, or names what is missing.
        other => assert!(Path::new("/dev/nvidiactl").exists(), "{other:?}"),
    }
}

/// NVRTC as the environment of tools/vllm-env.sh has it, or as any user would find it.
pub(super) fn nvrtc_for_tests() -> Result<nvrtc::Nvrtc, Error> {
    let entries = |directory: PathBuf| std::fs::read_dir(directory).into_iter().flatten().flatten();
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache"));
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
    let environments = cache.into_iter().flat_map(|cache| entries(cache.join("kvferry")));
    let pythons = environments.flat_map(|environment| entries(environment.path().join("lib")));
    let packages: Vec<PathBuf> =
        pythons.map(|python| python.path().join("site-packages")).collect();
    nvrtc::Nvrtc::find(&packages)
}

/// Needs NVRTC, which the engines' environment brings. `tools/test.sh` makes that environment first, and
/// requires the test; a `cargo test` before says aloud that it has not compiled the kernel.
#[test]
fn the_kernel_compiles_for_cards() {
    let nvrtc = match nvrtc_for_tests() {
        Ok(nvrtc) => nvrtc,
        Err(error) => {
            let required = std::env::var_os("KVFERRY_REQUIRE_NVRTC").is_some();
            assert!(!required, "{error}\nHere NVRTC is required: run tools/vllm-env.sh.");
            // Not by a macro: the output of tests that pass is not shown.
            let said = "NOT TESTED: the kernel of the cuda transport was not compiled, because NVRTC \
                        was not found: run tools/vllm-env.sh\n";
            std::io::Write::write_all(&mut std::io::stderr(), said.as_bytes()).unwrap();
            return;
        }
    };
    for (architecture, machine_code) in
        [("compute_80", false), ("sm_80", true), ("sm_90", true), ("sm_100", true)]
    {
        let image = nvrtc.compile("copy.cu", KERNEL, &[KERNEL_HEADER], architecture, machine_code);
        let image = image.unwrap_or_else(|error| panic!("{architecture}: {error}"));
        // The whole name: others begin alike.
        let found = |name: &str| {
            let begins = |part: &[u8]| part.starts_with(name.as_bytes());
            image.windows(name.len() + 1).any(|part| begins(part) && part[name.len()] != b'_')
        };
        for threads in [WIDE, DENSE] {
            let uploaded = format!("kvferry_copy_{}_{threads}", program::FORM);
            let inline = INLINE.map(|bytes| format!("{uploaded}_{bytes}"));
            for name in inline.into_iter().chain([uploaded]) {
                assert!(found(&name), "{architecture}: {name}");
            }
        }
    }
    let broken = nvrtc.compile("broken.cu", "int x = ;", &[], "sm_90", true);
    assert!(broken.unwrap_err().to_string().contains("broken.cu"));
}
