//! Shapes and pages, held against the rules that made them.

use kvferry_models::rules::vllm;
use kvferry_models::{Topology, presets};

use super::*;

fn repeat(count: u64, distance: u64) -> Repeat {
    Repeat { count, distance }
}

#[test]
fn runs_that_touch_are_joined() {
    let repeats = vec![repeat(16, 512), repeat(4, 8192), repeat(128, 2)];
    let shape = Shape::new("k".to_owned(), 0, 2, repeats);
    assert_eq!((shape.run, shape.repeats), (256, vec![repeat(64, 512)]));
    let repeats = vec![repeat(3, 32), repeat(8, 4), repeat(1, 7)];
    let dense = Shape::new("ssm".to_owned(), 8, 4, repeats);
    assert_eq!((dense.run, dense.repeats.len()), (96, 0));
    assert!(dense.contains(8) && dense.contains(103) && !dense.contains(104) && !dense.contains(7));
}

/// The pages that the manifests tell are those that the engine's rules made.
#[test]
fn pages_are_found_again() {
    for (model, topology) in [
        ("llama-3.1-8b", "tp=2"),
        ("llama-3.1-8b", "tp=2,layout=LHBNC"),
        ("llama-3.1-8b", "tp=2,layout=BLHNC"),
        ("kimi-linear", "tp=4"),
        ("kimi-linear", "tp=2,pp=2"),
        ("gemma-4-31b", "tp=8,block=32,layout=LBNHC"),
        ("qwen3.5-397b", "tp=4,pp=2,kernel=16,conv=ds,spec=2"),
        ("deepseek-v3.2", "tp=2,block=128"),
        ("falcon-h1-0.5b", "tp=2"),
    ] {
        let model = presets::find(model).unwrap().model().unwrap();
        let topology: Topology = topology.parse().unwrap();
        let pools = vllm::pools(&model, &topology).unwrap();
        let ranks = pools.manifests(&model, &topology, "engine").unwrap();
        for (number, rank) in ranks.iter().enumerate() {
            let frame = Frame::new(rank).unwrap();
            let case = format!("{} {topology} rank {number}", model.name);
            let block = rank.regions()[0].bytes / u64::from(pools.blocks);
            assert_eq!(frame.row, block, "{case}");
            for (group, pages) in pools.groups.iter().zip(&frame.groups) {
                // A layer's latents and its indexer keys are two caches there, one page here.
                let mut made: BTreeMap<&str, u64> = BTreeMap::new();
                for (&cache, &bytes) in group.caches.iter().zip(&group.pages) {
                    let state = model.caches[cache].states().next().unwrap();
                    *made.entry(name_parts(&state.name).0).or_default() += bytes;
                }
                for page in pages {
                    let bytes = made[page.name.as_str()];
                    assert_eq!(page.bytes, bytes, "{case} {} {}", group.name, page.name);
                }
            }
        }
    }
}

/// Where the layers of a block are interleaved, they are one page.
#[test]
fn interleaved_layers_are_one_page() {
    let model = presets::find("llama-3.1-8b").unwrap().model().unwrap();
    let topology: Topology = "tp=4,layout=BHLNC".parse().unwrap();
    let ranks = vllm::manifests(&model, &topology, "engine").unwrap();
    let frame = Frame::new(&ranks[0]).unwrap();
    let [page] = &frame.groups[0][..] else { panic!("{:?}", frame.groups) };
    assert_eq!((page.name.as_str(), page.at, page.bytes), ("all layers", 0, frame.row));
    assert_eq!(page.states.len(), 64);
}
