//! The generator itself: engines state true facts, and what they draw is as varied as it should be.

use std::collections::{BTreeSet, HashSet};

use kvferry_layout::{Manifest, Window};
use kvferry_testkit::draw::{Side, engine};
use kvferry_testkit::engine::{Engine, Rank};
use kvferry_testkit::model::{Model, Sight};
use kvferry_testkit::random::Dice;
use kvferry_testkit::request::{Shape, draw, places};

/// The address of every element by the formula that `View` documents.
fn check_views(rank: &Rank) {
    let manifest = &rank.manifest;
    for (index, group) in manifest.groups().iter().enumerate() {
        assert_eq!(group.pieces.len(), rank.holdings[index].len());
        for (number, piece) in group.pieces.iter().enumerate() {
            let holding = &rank.holdings[index][number];
            assert_eq!(manifest.entries_per_block(index, number), holding.slots);
            let view = &piece.view;
            let base = manifest.regions()[view.region as usize].base + view.offset;
            for block in 0..group.blocks {
                for slot in 0..holding.slots {
                    let (kernel, within) = match view.kernel {
                        Some(kernel) => {
                            (slot / kernel.entries * kernel.stride, slot % kernel.entries)
                        }
                        None => (0, slot),
                    };
                    let entry = base + u64::from(block) * view.block + kernel + within * view.entry;
                    for element in 0..holding.volume() {
                        let (mut rest, mut address) = (element, entry);
                        for (span, stride) in piece.bounds.0.iter().zip(&view.axes).rev() {
                            address += rest % span.len() * stride;
                            rest /= span.len();
                        }
                        assert_eq!(holding.address(block, slot, element), address, "{piece:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn engines_state_where_their_bytes_lie() {
    for seed in 0..300 {
        let mut dice = Dice::new(seed);
        let model = Model::draw(&mut dice);
        let engine = engine(&model, Side::Source, &mut dice);
        for rank in &engine.ranks {
            check_views(rank);
        }
    }
}

#[test]
fn a_window_and_looking_back_agree() {
    for sight in [Sight::Full, Sight::Sliding(1), Sight::Sliding(7), Sight::Chunked(5)] {
        for extra in 0..4 {
            let window: Window = sight.window(extra);
            for n in 0..60 {
                assert_eq!(window.first_live(n), sight.first(n, extra), "{window} after {n}");
            }
        }
    }
}

#[test]
fn places_agree_with_phases() {
    for seed in 0..200 {
        let mut dice = Dice::new(seed);
        let model = Model::draw(&mut dice);
        let engine = engine(&model, Side::Destination, &mut dice);
        for rank in &engine.ranks {
            for (group, holdings) in rank.manifest.groups().iter().zip(&rank.holdings) {
                for (piece, holding) in group.pieces.iter().zip(holdings) {
                    let places = places(holding, &(3..40));
                    let by_phase = (3..40).filter(|&entry| piece.phase.holds(entry)).map(|entry| {
                        let local = piece.phase.local(entry);
                        (entry, local / holding.slots, local % holding.slots)
                    });
                    assert_eq!(places, by_phase.collect::<Vec<_>>());
                }
            }
        }
    }
}

/// Every feature that the generator promises turns up, so that no property holds for want of cases.
#[test]
fn the_draws_have_everything() {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    for seed in 0..400 {
        let mut dice = Dice::new(seed);
        let model = Model::draw(&mut dice);
        let source = engine(&model, Side::Source, &mut dice);
        let destination = engine(&model, Side::Destination, &mut dice);
        for engine in [&source, &destination] {
            note(engine, &mut seen);
        }
        let request = draw(&source, &destination, 60, Shape::Scattered, &mut dice);
        let tables = request.source.iter().chain(&request.destination);
        for table in tables {
            if table.first > 0 && !table.blocks.is_empty() {
                seen.insert("clipped table");
            }
        }
        let groups = destination.recipe.groups.iter().zip(&request.destination);
        for (group, table) in groups {
            if table.blocks.iter().any(|&block| Some(block) == group.null_block) {
                seen.insert("dead entry");
            }
        }
        if request.tokens == 0 {
            seen.insert("no token");
        }
        if request.tokens > 30 {
            seen.insert("many tokens");
        }
        if request.cached.iter().any(|&cached| 0 < cached && cached < request.tokens) {
            seen.insert("cached in part");
        }
        if request.cached.iter().any(|&cached| cached > 0 && cached == request.tokens) {
            seen.insert("cached");
        }
    }
    let all = [
        "adjacent regions",
        "blocks of different numbers",
        "cached",
        "cached in part",
        "chunked window",
        "clipped table",
        "context parallelism",
        "dead entry",
        "empty group on a rank",
        "empty rank",
        "entries of several tokens",
        "kernel blocks",
        "less needed than kept",
        "many tokens",
        "no token",
        "nothing of a state on a rank",
        "null block",
        "needs of different lengths in a group",
        "open entries",
        "opaque format",
        "one block",
        "overlay",
        "pipeline",
        "scratch",
        "several regions",
        "six axes",
        "sliding window",
        "snapshot",
        "strides that are never taken",
        "the same twice on a rank",
        "two pieces of a state",
        "uneven split",
        "uneven turns",
    ];
    let missing: Vec<_> = all.iter().filter(|feature| !seen.contains(*feature)).collect();
    assert!(missing.is_empty(), "never drawn: {missing:?}");
    assert_eq!(seen.len(), all.len(), "{seen:?}");
}

fn note(engine: &Engine, seen: &mut BTreeSet<&'static str>) {
    let recipe = &engine.recipe;
    if recipe.stages.len() > 1 {
        seen.insert("pipeline");
    }
    for group in &recipe.groups {
        match group.sight {
            Sight::Sliding(_) => seen.insert("sliding window"),
            Sight::Chunked(_) => seen.insert("chunked window"),
            Sight::Full => false,
        };
        if group.null_block.is_some() {
            seen.insert("null block");
        }
        if group.blocks == 1 {
            seen.insert("one block");
        }
        if group.blocks != recipe.groups[0].blocks {
            seen.insert("blocks of different numbers");
        }
    }
    if recipe.idle_stride.is_some() {
        seen.insert("strides that are never taken");
    }
    for (tensor, state) in recipe.model.states() {
        if state.axes.len() == 6 {
            seen.insert("six axes");
        }
        if tensor.law.entries == 0 {
            seen.insert("snapshot");
        } else if tensor.law.open > 0 {
            seen.insert("open entries");
        }
        if tensor.law.tokens > 1 {
            seen.insert("entries of several tokens");
        }
        if state.format.bytes % 2 == 1 {
            seen.insert("opaque format");
        }
    }
    for rank in &engine.ranks {
        let manifest: &Manifest = &rank.manifest;
        let regions = manifest.regions();
        if regions.len() > 1 {
            seen.insert("several regions");
        }
        if regions.windows(2).any(|pair| pair[0].base + pair[0].bytes == pair[1].base) {
            seen.insert("adjacent regions");
        }
        if manifest.groups().iter().all(|group| group.pieces.is_empty()) {
            seen.insert("empty rank");
        }
        for (index, group) in manifest.groups().iter().enumerate() {
            if manifest.pool(index) != index {
                seen.insert("overlay");
            }
            if group.pieces.is_empty() {
                seen.insert("empty group on a rank");
            }
            if !group.scratch.is_empty() {
                seen.insert("scratch");
            }
            let needs: HashSet<Window> =
                group.pieces.iter().map(|piece| group.need(piece)).collect();
            if needs.iter().any(|need| *need != group.window) {
                seen.insert("less needed than kept");
            }
            if needs.len() > 1 {
                seen.insert("needs of different lengths in a group");
            }
            for piece in &group.pieces {
                if !piece.phase.is_all() {
                    seen.insert("context parallelism");
                }
                if piece.view.kernel.is_some() {
                    seen.insert("kernel blocks");
                }
                let same = group.pieces.iter().filter(|other| other.state == piece.state);
                if same.clone().count() > 1 {
                    seen.insert("two pieces of a state");
                }
                if same.filter(|other| other.bounds.intersect(&piece.bounds).is_some()).count() > 1
                {
                    seen.insert("the same twice on a rank");
                }
            }
        }
    }
    for (at, spread) in &recipe.spreads {
        let lengths = spread.turns.iter().map(|turn| turn.end - turn.start);
        if lengths.collect::<BTreeSet<u64>>().len() > 1 {
            seen.insert("uneven turns");
        }
        let states = recipe.model.layers[at.0].tensors[at.1].states.iter().zip(&spread.parts);
        for (state, parts) in states.filter(|(state, _)| state.cut.is_some()) {
            let whole = |part: &Vec<std::ops::Range<u64>>| -> u64 {
                part.iter().map(|range| range.end - range.start).sum()
            };
            let sizes: BTreeSet<u64> = parts.iter().map(whole).collect();
            if sizes.contains(&0) {
                seen.insert("nothing of a state on a rank");
            }
            if sizes.len() > 1 && !sizes.contains(&state.axes[0].length) {
                seen.insert("uneven split");
            }
        }
    }
}
