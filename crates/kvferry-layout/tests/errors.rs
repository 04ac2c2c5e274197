//! Everything that can be wrong with a manifest: each is its own error, and names the place.

use kvferry_layout::{
    Axis, Draft, Format, Group, Kernel, Kind, Law, MAX_AXES, MAX_BINARY_BYTES, MAX_JSON_BYTES,
    Manifest, ManifestError, Phase, Piece, Place, Region, Scratch, StateBox, View, Window, Writer,
};

/// Two layers of K and V (2 heads of 4 numbers, 16 tokens a block, 10 blocks) and a convolution of
/// 6 channels and 3 columns with one column of scratch, in two regions.
fn good() -> Draft {
    let attention = Kind {
        format: Format::new("bf16", 2),
        axes: vec![Axis::new("head", 2), Axis::new("dim", 4)],
        law: Law::PER_TOKEN,
    };
    let convolution = Kind {
        format: Format::new("f32", 4),
        axes: vec![Axis::new("channel", 6), Axis::new("column", 3)],
        law: Law::SNAPSHOT,
    };
    let piece = |state: &str, offset| Piece {
        state: state.to_owned(),
        kind: 0,
        bounds: StateBox::new([0..2, 0..4]),
        phase: Phase::ALL,
        need: None,
        view: View { region: 0, offset, block: 512, kernel: None, entry: 32, axes: vec![16, 2] },
    };
    let view = View { region: 1, offset: 0, block: 96, kernel: None, entry: 96, axes: vec![16, 4] };
    let bounds = StateBox::new([0..6, 0..3]);
    let state = "layers.1/conv".to_owned();
    let conv = Piece { state, kind: 1, bounds, phase: Phase::ALL, need: None, view };
    Draft {
        identity: [("model".to_owned(), "example".to_owned())].into(),
        engine: "decode".to_owned(),
        rank: 0,
        label: "tp0".to_owned(),
        regions: vec![
            Region { base: 0x1000, bytes: 5120, place: Place::Host },
            Region { base: 0x8000, bytes: 960, place: Place::Gpu(0) },
        ],
        kinds: vec![attention, convolution],
        writers: Default::default(),
        groups: vec![
            Group {
                name: "attention".to_owned(),
                blocks: 10,
                null_block: Some(0),
                tokens_per_block: Some(16),
                window: Window::FULL,
                pieces: vec![piece("layers.0/k", 0), piece("layers.0/v", 8)],
                scratch: vec![],
            },
            Group {
                name: "states".to_owned(),
                blocks: 10,
                null_block: None,
                tokens_per_block: None,
                window: Window::FULL,
                pieces: vec![conv],
                scratch: vec![Scratch {
                    region: 1,
                    offset: 12,
                    block: 96,
                    run: 4,
                    dims: vec![(6, 16)],
                }],
            },
        ],
    }
}

/// The error of the good draft after a change. Its message must have all of `words`.
fn error(words: &[&str], change: impl FnOnce(&mut Draft)) -> ManifestError {
    let mut draft = good();
    change(&mut draft);
    let error = Manifest::new(draft).unwrap_err();
    let message = error.to_string();
    let missing: Vec<_> = words.iter().filter(|word| !message.contains(*word)).collect();
    assert!(missing.is_empty(), "'{message}' does not say {missing:?}");
    error
}

const K: &str = "group 0 'attention', piece 0 'layers.0/k'";
const V: &str = "group 0 'attention', piece 1 'layers.0/v'";
const CONV: &str = "group 1 'states', piece 0 'layers.1/conv'";
const SCRATCH: &str = "group 1 'states', scratch 0";

macro_rules! is {
    ($pattern:pat, $error:expr) => {{
        let error = $error;
        assert!(matches!(error, $pattern), "{error:?}");
    }};
}

#[test]
fn need() {
    use ManifestError::Need;
    let set = |needed| move |draft: &mut Draft| draft.groups[0].pieces[1].need = Some(needed);
    // Anything is less than every token, and what the group keeps is allowed, too.
    for needed in [Window::FULL, Window::sliding(8), Window::chunked(4)] {
        let mut draft = good();
        set(needed)(&mut draft);
        let manifest = Manifest::new(draft).unwrap();
        let group = &manifest.groups()[0];
        assert_eq!(group.need(&group.pieces[0]), Window::FULL);
        assert_eq!(group.need(&group.pieces[1]), needed);
    }
    let words = [V, "the last 9 tokens", "only the last 8 tokens"];
    let found = error(&words, |draft| {
        draft.groups[0].window = Window::sliding(8);
        set(Window::sliding(9))(draft);
    });
    is!(Need { .. }, found);
    for empty in [Window::sliding(0), Window { chunk: 0, ..Window::FULL }] {
        is!(Need { .. }, error(&[V], set(empty)));
    }
}

#[test]
fn the_draft_that_is_broken_below_is_good() {
    let manifest = Manifest::new(good()).unwrap();
    assert_eq!(manifest.entries_per_block(0, 1), 16);
    assert_eq!(manifest.entries_per_block(1, 0), 1);
    assert_ne!(manifest.pool(0), manifest.pool(1));
}

#[test]
fn region_bounds() {
    use ManifestError::RegionBounds;
    is!(RegionBounds { region: 1, .. }, error(&["region 1"], |draft| draft.regions[1].bytes = 0));
    let error = error(&["region 0", "0x1000"], |draft| draft.regions[0].bytes = u64::MAX);
    is!(RegionBounds { region: 0, .. }, error);
}

#[test]
fn regions_overlap() {
    let error = error(&["regions 0 and 1", "once"], |draft| draft.regions[1].base = 0x1000 + 5119);
    assert_eq!(error, ManifestError::RegionsOverlap { first: 0, second: 1 });
    // Side by side is fine.
    let mut draft = good();
    draft.regions[1].base = 0x1000 + 5120;
    Manifest::new(draft).unwrap();
}

#[test]
fn kind() {
    use ManifestError::Kind as Wrong;
    is!(Wrong { kind: 0, .. }, error(&["kind 0"], |draft| draft.kinds[0].format.bytes = 0));
    is!(Wrong { kind: 0, .. }, error(&["kind 0"], |draft| draft.kinds[0].format.name.clear()));
    let zero = error(&["kind 1", "'column'", "zero"], |draft| draft.kinds[1].axes[1].length = 0);
    is!(Wrong { kind: 1, .. }, zero);
    let twice = error(&["kind 1", "'channel'"], |draft| {
        draft.kinds[1].axes[1].name = "channel".to_owned();
    });
    is!(Wrong { kind: 1, .. }, twice);
    let many = error(&["kind 0", "7"], |draft| {
        draft.kinds[0].axes = (0..=MAX_AXES as u64).map(|i| Axis::new(i.to_string(), 1)).collect();
    });
    is!(Wrong { kind: 0, .. }, many);
    let large = error(&["kind 0", "64 bits"], |draft| draft.kinds[0].axes[0].length = u64::MAX / 4);
    is!(Wrong { kind: 0, .. }, large);
    let never = Law { entries: 0, tokens: 1, open: 0 };
    is!(Wrong { kind: 0, .. }, error(&["kind 0", "law"], |draft| draft.kinds[0].law = never));
    let by_none = Law { entries: 1, tokens: 0, open: 0 };
    is!(Wrong { kind: 0, .. }, error(&["kind 0", "law"], |draft| draft.kinds[0].law = by_none));
}

#[test]
fn group() {
    use ManifestError::Group as Wrong;
    let named = "group 0 'attention'";
    is!(Wrong { group: 0, .. }, error(&[named], |draft| draft.groups[0].blocks = 0));
    let null = error(&[named, "10"], |draft| draft.groups[0].null_block = Some(10));
    is!(Wrong { group: 0, .. }, null);
    let none = error(&[named], |draft| draft.groups[0].tokens_per_block = Some(0));
    is!(Wrong { group: 0, .. }, none);
    let window = error(&[named], |draft| draft.groups[0].window = Window::sliding(0));
    is!(Wrong { group: 0, .. }, window);
    let chunk = error(&[named], |draft| draft.groups[0].window = Window::chunked(0));
    is!(Wrong { group: 0, .. }, chunk);
}

#[test]
fn no_such_kind_or_region() {
    use ManifestError::NoSuch;
    let kind = error(&[V, "no kind 2", "2"], |draft| draft.groups[0].pieces[1].kind = 2);
    is!(NoSuch { what: "kind", index: 2, count: 2, .. }, kind);
    let region = error(&[CONV, "no region 9"], |draft| draft.groups[1].pieces[0].view.region = 9);
    is!(NoSuch { what: "region", index: 9, count: 2, .. }, region);
    let region = error(&[SCRATCH, "no region 2"], |draft| draft.groups[1].scratch[0].region = 2);
    is!(NoSuch { what: "region", .. }, region);
}

#[test]
fn box_outside_state() {
    use ManifestError::BoxOutsideState;
    for range in [0..3, 2..3, 1..1] {
        let error = error(&[K, "'head'"], |draft| {
            draft.groups[0].pieces[0].bounds = StateBox::new([range, 0..4]);
        });
        is!(BoxOutsideState { length: 2, .. }, error);
    }
    let backwards = error(&[K, "'dim'"], |draft| {
        draft.groups[0].pieces[0].bounds.0[1] = (4, 3).into();
    });
    is!(BoxOutsideState { .. }, backwards);
}

#[test]
fn axis_count() {
    use ManifestError::AxisCount;
    let of_box = error(&[V, "the box has 1 axes"], |draft| {
        draft.groups[0].pieces[1].bounds.0.pop();
    });
    is!(AxisCount { what: "box", found: 1, expected: 2, .. }, of_box);
    let of_view = error(&[V, "the view has 3 axes"], |draft| {
        draft.groups[0].pieces[1].view.axes.push(1);
    });
    is!(AxisCount { what: "view", found: 3, expected: 2, .. }, of_view);
}

#[test]
fn state_of_two_kinds() {
    let error = error(&["layers.0/k", "kind 2", "kind 0"], |draft| {
        let other = Kind { format: Format::new("f16", 2), ..draft.kinds[0].clone() };
        draft.kinds.push(other);
        let piece = &mut draft.groups[0].pieces[1];
        piece.state = "layers.0/k".to_owned();
        piece.kind = 2;
    });
    is!(ManifestError::StateOfTwoKinds { found: 2, other: 0, .. }, error);
}

#[test]
fn phase() {
    let held = |start, end| Phase { modulus: 4, held: (start, end).into() };
    let wrong = [held(2, 2), held(3, 5), held(3, 2), Phase { modulus: 0, held: (0, 1).into() }];
    for phase in wrong {
        let error = error(&[V], |draft| draft.groups[0].pieces[1].phase = phase);
        is!(ManifestError::Phase { .. }, error);
    }
}

#[test]
fn entries_per_block() {
    use ManifestError::EntriesPerBlock;
    // 16 tokens are no whole number of entries of 3 tokens, nor of turns of 5.
    let law = error(&[K, "16 tokens"], |draft| draft.kinds[0].law = Law::every(3));
    is!(EntriesPerBlock { .. }, law);
    let turns = error(&[K, "16 tokens", "modulo 5"], |draft| {
        draft.groups[0].pieces[0].phase = Phase::share(1, 5, 1);
    });
    is!(EntriesPerBlock { .. }, turns);
    // A block for a whole sequence does not hold tokens, and the other way round.
    let sequence = error(&[CONV], |draft| draft.kinds[1].law = Law::PER_TOKEN);
    is!(EntriesPerBlock { .. }, sequence);
    let tokens = error(&[K], |draft| draft.kinds[0].law = Law::SNAPSHOT);
    is!(EntriesPerBlock { .. }, tokens);
    for entries in [0, 5, 32] {
        let kernel = error(&[K, "16"], |draft| {
            draft.groups[0].pieces[0].view.kernel = Some(Kernel { entries, stride: 128 });
        });
        is!(EntriesPerBlock { .. }, kernel);
    }
}

#[test]
fn scratch() {
    use ManifestError::{ScratchDimensions, ScratchEmpty};
    let run = error(&[SCRATCH, "no byte"], |draft| draft.groups[1].scratch[0].run = 0);
    is!(ScratchEmpty { dimension: None, .. }, run);
    let words = [SCRATCH, "dimension 0"];
    let empty = error(&words, |draft| draft.groups[1].scratch[0].dims[0].0 = 0);
    assert_eq!(empty.kind(), "scratch_empty");
    is!(ScratchEmpty { dimension: Some(0), .. }, empty);
    let words = [SCRATCH, "7 dimensions", "at most 6"];
    let many = error(&words, |draft| draft.groups[1].scratch[0].dims = vec![(1, 1); MAX_AXES + 1]);
    is!(ScratchDimensions { .. }, many);
}

#[test]
fn strides_overlap() {
    use ManifestError::StridesOverlap;
    let axis = error(&[K], |draft| draft.groups[0].pieces[0].view.axes[1] = 1);
    is!(StridesOverlap { stride: 1, extent: 2, .. }, axis);
    // An entry is 24 bytes long: from head 0 to the end of head 1.
    let entry = error(&[V, "23", "24"], |draft| draft.groups[0].pieces[1].view.entry = 23);
    is!(StridesOverlap { stride: 23, extent: 24, .. }, entry);
    let block = error(&[CONV], |draft| draft.groups[1].pieces[0].view.block = 0);
    is!(StridesOverlap { stride: 0, .. }, block);
    let kernel = error(&[K], |draft| {
        draft.groups[0].pieces[0].view.kernel = Some(Kernel { entries: 4, stride: 96 });
    });
    is!(StridesOverlap { .. }, kernel);
    let scratch = error(&[SCRATCH], |draft| draft.groups[1].scratch[0].dims[0].1 = 3);
    is!(StridesOverlap { stride: 3, extent: 4, .. }, scratch);
}

#[test]
fn overflow() {
    use ManifestError::Overflow;
    let block = error(&[K], |draft| draft.groups[0].pieces[0].view.block = u64::MAX / 2);
    is!(Overflow { .. }, block);
    let offset = error(&[V], |draft| draft.groups[0].pieces[1].view.offset = u64::MAX - 5);
    is!(Overflow { .. }, offset);
    let scratch = error(&[SCRATCH], |draft| draft.groups[1].scratch[0].offset = u64::MAX);
    is!(Overflow { .. }, scratch);
}

#[test]
fn view_outside_region() {
    use ManifestError::ViewOutsideRegion;
    let blocks = error(&[K, "region 0", "5120"], |draft| draft.groups[0].blocks = 11);
    is!(ViewOutsideRegion { region: 0, bytes: 5120, .. }, blocks);
    // K and V end 8 and 0 bytes before the region's end.
    let last = error(&[V, "5121"], |draft| draft.groups[0].pieces[1].view.offset = 9);
    is!(ViewOutsideRegion { end: 5121, .. }, last);
    let scratch = error(&[SCRATCH], |draft| draft.groups[1].scratch[0].offset = 13);
    is!(ViewOutsideRegion { region: 1, .. }, scratch);
}

#[test]
fn pieces_overlap() {
    use ManifestError::PiecesOverlap;
    let pieces = error(&[K, V], |draft| draft.groups[0].pieces[1].view.offset = 6);
    is!(PiecesOverlap { .. }, pieces);
    let scratch = error(&[CONV, SCRATCH], |draft| draft.groups[1].scratch[0].offset = 8);
    is!(PiecesOverlap { .. }, scratch);
    // The same part twice is fine where it lies on other bytes.
    let mut draft = good();
    draft.groups[0].pieces[1].state = "layers.0/k".to_owned();
    Manifest::new(draft).unwrap();
}

#[test]
fn unsound_overlay() {
    // The convolution moves into the attention's region, at first with the attention's page.
    let overlay = |block: u64| {
        move |draft: &mut Draft| {
            draft.groups[1].pieces[0].view.region = 0;
            draft.groups[1].pieces[0].view.block = block;
            draft.groups[1].scratch.clear();
        }
    };
    let mut sound = good();
    overlay(512)(&mut sound);
    let manifest = Manifest::new(sound).unwrap();
    assert_eq!(manifest.pool(0), manifest.pool(1), "they share bytes");
    let error = error(&["layers.0/k", CONV, "different blocks"], overlay(96));
    is!(ManifestError::UnsoundOverlay { .. }, error);
}

/// One piece lies on even bytes, the other on odd ones, with strides that have nothing else in common:
/// they never meet, but only a search of all bytes would tell.
#[test]
fn too_complex() {
    let error = error(&["group 0 'attention', piece 0 'layers.0/k'", "irregular"], |draft| {
        draft.regions = vec![Region { base: 0, bytes: 1 << 50, place: Place::Host }];
        draft.kinds[0] = Kind {
            format: Format::new("u8", 1),
            axes: vec![Axis::new("head", 1000), Axis::new("dim", 1000)],
            law: Law::PER_TOKEN,
        };
        draft.groups.truncate(1);
        draft.groups[0].blocks = 100_000;
        draft.groups[0].tokens_per_block = Some(1);
        for (piece, (offset, step)) in draft.groups[0].pieces.iter_mut().zip([(0, 6), (1, 10)]) {
            piece.bounds = StateBox::new([0..1000, 0..1000]);
            piece.view = View {
                region: 0,
                offset,
                block: 1_001_000 * step,
                kernel: None,
                entry: 0,
                axes: vec![1_000 * step + 2, step],
            };
        }
    });
    is!(ManifestError::TooComplex { .. }, error);
}

/// Who writes a kind is said of kinds that are there, in words that are.
#[test]
fn writers() {
    let writer = |name: &str, code: &str| Writer {
        name: name.to_owned(),
        bytes: None,
        code: code.to_owned(),
    };
    for (kind, it) in [(2, writer("it", "1")), (0, writer("", "1")), (1, writer("it", ""))] {
        let error = error(&[&format!("kind {kind}"), "writer"], move |draft| {
            draft.writers.insert(kind, it);
        });
        is!(ManifestError::Kind { .. }, error);
    }
}

/// A manifest without writers is what it was in the version before, and one with them says so.
#[test]
fn writers_make_another_version() {
    let plain = Manifest::new(good()).unwrap();
    let mut draft = good();
    let writer =
        Writer { name: "it".to_owned(), bytes: Some("2".to_owned()), code: "3".to_owned() };
    draft.writers.insert(1, writer.clone());
    let written = Manifest::new(draft).unwrap();
    for (manifest, version) in [(&plain, 2), (&written, 3)] {
        let bytes = manifest.to_bytes();
        assert_eq!(bytes[4], version);
        assert_eq!(&Manifest::from_bytes(&bytes).unwrap(), manifest);
        assert_eq!(&Manifest::from_json(&manifest.to_json()).unwrap(), manifest);
    }
    assert!(!plain.to_json().contains("writers"));
    let piece = written.groups().iter().flat_map(|group| &group.pieces).find(|it| it.kind == 1);
    assert_eq!(written.writer(piece.unwrap()), Some(&writer));
    // The longer form of a manifest without any is the same manifest.
    let mut longer = plain.to_bytes();
    longer[4] = 3;
    longer.push(0);
    assert_eq!(Manifest::from_bytes(&longer).unwrap(), plain);
}

#[test]
fn too_large() {
    let limit = MAX_BINARY_BYTES;
    let error = Manifest::from_bytes(&vec![0; limit + 1]).unwrap_err();
    assert_eq!(error, ManifestError::TooLarge { bytes: limit + 1, limit });
    let limit = MAX_JSON_BYTES;
    let error = Manifest::from_json(&" ".repeat(limit + 1)).unwrap_err();
    assert_eq!(error, ManifestError::TooLarge { bytes: limit + 1, limit });
}

#[test]
fn version() {
    let bytes = Manifest::new(good()).unwrap().to_bytes();
    for short in 0..6 {
        is!(ManifestError::Version { .. }, Manifest::from_bytes(&bytes[..short]).unwrap_err());
    }
    let mut other = bytes.clone();
    other[0] = b'X';
    is!(ManifestError::Version { .. }, Manifest::from_bytes(&other).unwrap_err());
    for version in [1, 4] {
        let mut other = bytes.clone();
        other[4] = version;
        let error = Manifest::from_bytes(&other).unwrap_err();
        assert!(error.to_string().contains(&format!("version {version}")), "{error}");
        is!(ManifestError::Version { known: 3, .. }, error);
    }
    let json = Manifest::new(good()).unwrap().to_json();
    let newer = json.replace("\"kvferry_manifest\": 1", "\"kvferry_manifest\": 2");
    assert_ne!(newer, json);
    is!(ManifestError::Version { known: 1, .. }, Manifest::from_json(&newer).unwrap_err());
    is!(ManifestError::Version { .. }, Manifest::from_json("{}").unwrap_err());
    // Readable manifests from before pieces had a need of their own say nothing of it.
    let older: Vec<&str> = json.lines().filter(|line| !line.contains("\"need\"")).collect();
    assert_ne!(older.len(), json.lines().count());
    assert_eq!(Manifest::from_json(&older.join("\n")).unwrap(), Manifest::new(good()).unwrap());
}

#[test]
fn decode() {
    use ManifestError::Decode;
    let bytes = Manifest::new(good()).unwrap().to_bytes();
    for short in 6..bytes.len() {
        is!(Decode { .. }, Manifest::from_bytes(&bytes[..short]).unwrap_err());
    }
    let mut longer = bytes;
    longer.push(0);
    is!(Decode { .. }, Manifest::from_bytes(&longer).unwrap_err());
    let json = Manifest::new(good()).unwrap().to_json();
    for (from, to) in [("\"rank\"", "\"rnak\""), ("\"blocks\": 10", "\"blocks\": -1"), ("}", "")] {
        is!(Decode { .. }, Manifest::from_json(&json.replacen(from, to, 1)).unwrap_err());
    }
}

/// What is decoded is checked: bytes of a draft that makes no sense do not make a manifest.
#[test]
fn what_is_decoded_is_checked() {
    let json = Manifest::new(good()).unwrap().to_json();
    let wrong = json.replacen("\"bytes\": 5120", "\"bytes\": 5119", 1);
    is!(ManifestError::ViewOutsideRegion { .. }, Manifest::from_json(&wrong).unwrap_err());
    let mut bytes = Manifest::new(good()).unwrap().to_bytes();
    // 5120 is 0x80 0x28 on the wire.
    let at = bytes.windows(2).position(|pair| pair == [0x80, 0x28]).unwrap();
    bytes[at + 1] = 0x27;
    is!(ManifestError::ViewOutsideRegion { .. }, Manifest::from_bytes(&bytes).unwrap_err());
}
