//! Manifests as they travel: both forms round-trip, stay small, and cost no memory that nobody sent.

use kvferry_layout::{Manifest, ManifestError};
use kvferry_testkit::drive::Drawn;
use kvferry_testkit::heap::{Counting, measure};
use kvferry_testkit::large::hundred_layers;

#[global_allocator]
static HEAP: Counting = Counting;

#[test]
fn both_forms_round_trip() {
    let mut manifests = 0;
    for seed in 0..150 {
        let drawn = Drawn::new(seed);
        for rank in drawn.source.ranks.iter().chain(&drawn.destination.ranks) {
            let manifest = &rank.manifest;
            let binary = Manifest::from_bytes(&manifest.to_bytes()).unwrap();
            let json = Manifest::from_json(&manifest.to_json()).unwrap();
            assert!(binary == *manifest && json == *manifest, "seed {seed}");
            // Derived facts are the same too.
            for (index, group) in manifest.groups().iter().enumerate() {
                assert_eq!(binary.pool(index), manifest.pool(index));
                for piece in 0..group.pieces.len() {
                    let entries = manifest.entries_per_block(index, piece);
                    assert_eq!(json.entries_per_block(index, piece), entries);
                }
            }
            assert_eq!(Manifest::new(manifest.clone().into_draft()).as_ref(), Ok(manifest));
            manifests += 1;
        }
    }
    assert!(manifests > 300);
}

/// Kilobytes for a hundred layers, and not more for more blocks.
#[test]
fn a_hundred_layers_take_kilobytes_whatever_the_blocks() {
    let small = Manifest::new(hundred_layers(1_000)).unwrap();
    let (large, heap) = measure(|| Manifest::new(hundred_layers(1_000_000)).unwrap());
    let (bytes, more) = (small.to_bytes().len(), large.to_bytes().len());
    assert!((5_000..32_000).contains(&bytes), "{bytes} bytes");
    // Some numbers take one byte more.
    assert!(more - bytes < 100, "{bytes} bytes for a thousand blocks, {more} for a million");
    assert!(heap.kept < 300_000, "{} bytes in memory", heap.kept);
    assert_eq!(Manifest::from_bytes(&large.to_bytes()).unwrap(), large);
    assert_eq!(Manifest::from_json(&large.to_json()).unwrap(), large);
}

/// Lengths that are claimed and not there: an error, at the cost of a fixed reserve.
#[test]
fn claimed_lengths_cost_nothing() {
    let huge = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
    let head = b"KVFM\x02\x00";
    // Everything up to a length is empty or zero: identity, engine, rank, label, regions, kinds, groups;
    // then into a group: name, blocks, null, tokens, window (3), pieces; then into a piece.
    let empty = [0u8; 6];
    for depth in 0..=6 {
        let bytes = [&head[..], &empty[..depth], &huge].concat();
        refuse(&bytes);
    }
    // One group: name, blocks, null, tokens, window (tokens, chunk, extra), pieces.
    let group = [&empty[..], &[1], &[0, 0, 0, 0, 0, 0, 0]].concat();
    refuse(&[&head[..], &group, &huge].concat());
    refuse(&[&head[..], &group, &[0], &huge].concat());
    // One piece in it: state, kind, bounds.
    let piece = [&group[..], &[1]].concat();
    for depth in 0..=2 {
        refuse(&[&head[..], &piece, &empty[..depth], &huge].concat());
    }
    // A megabyte of zeros as well.
    refuse(&[&head[..], &vec![0; 1 << 20]].concat());
    refuse(&[&head[..], &vec![1; 1 << 20]].concat());
}

fn refuse(bytes: &[u8]) {
    let (verdict, heap) = measure(|| Manifest::from_bytes(bytes).is_err());
    assert!(verdict, "{bytes:?}");
    assert!(heap.peak < 8 << 20, "{} bytes took {} bytes", bytes.len(), heap.peak);
}

/// 20,000 pieces side by side in one block: two hundred million pairs, refused in bounded work.
#[test]
fn many_pieces_are_refused_in_bounded_work() {
    let mut draft = hundred_layers(4);
    draft.groups.drain(..3);
    let group = &mut draft.groups[0];
    group.tokens_per_block = Some(1);
    let piece = group.pieces[0].clone();
    group.pieces.clear();
    for index in 0..20_000u64 {
        let mut piece = piece.clone();
        piece.state = format!("layers.{index}/k");
        piece.view.offset = index * 2048;
        piece.view.block = 20_000 * 2048;
        piece.view.axes[0] = 256;
        group.pieces.push(piece);
    }
    draft.regions.truncate(1);
    draft.regions[0].bytes = 4 * 20_000 * 2048;
    let (verdict, heap) = measure(|| Manifest::new(draft));
    let error = verdict.unwrap_err();
    assert!(matches!(error, ManifestError::TooComplex { .. }), "{error}");
    assert!(heap.peak < 64 << 20, "{} bytes", heap.peak);
}
