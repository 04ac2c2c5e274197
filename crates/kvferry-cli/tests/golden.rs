//! The tables of `kvferry plan` for every kind of pair that the command has to answer: hybrids over one
//! pool, different tensor parallelism, latents beside heads, delta attention with latents, and pipeline
//! stages. `UPDATE_GOLDEN=1 cargo test` rewrites them; read the difference before you commit it.

use std::fs;
use std::path::Path;
use std::process::Command;

use kvferry_models::{Topology, presets, rules::vllm};
use serde_json::Value;

/// Name, arguments, exit code.
const CASES: &[(&str, &str)] = &[
    // Hybrids over one pool, padded pages, an inflated block, kernel blocks.
    ("a-hybrid-pool", "--model granite-4.0-h-tiny --prefill tp=1,blocks=18525 --decode tp=1"),
    ("a-kernel-blocks", "--model nemotron-h-8b --prefill tp=2,kernel=16 --decode tp=2,kernel=16"),
    ("a-cached", "--model nemotron-h-8b --prefill tp=2 --decode tp=2 --cached 4096"),
    // Different tensor parallelism for hybrids, in both directions and both orders of convolutions.
    ("b-narrower-ds", "--model nemotron-h-8b --prefill tp=4,conv=ds --decode tp=2,conv=ds"),
    ("b-wider-sd", "--model nemotron-h-8b --prefill tp=2 --decode tp=8"),
    ("b-one-group", "--model falcon-h1-7b --prefill tp=4 --decode tp=2"),
    ("b-ratios", "--model nemotron-3-nano --prefill tp=1,kernel=16 --decode tp=4,kernel=16"),
    ("b-spec", "--model qwen3-next --prefill tp=4 --decode tp=2,spec=3"),
    // Heads and latents in one group, and sparse-attention indexers.
    ("c-gqa-draft", "--model kimi-k2.5 --draft kimi-k2.5-eagle3 --prefill tp=8 --decode tp=4"),
    ("c-mla-draft", "--model kimi-k2.5 --draft kimi-k2.5-eagle3-mla --prefill tp=2 --decode tp=4"),
    ("c-indexer", "--model deepseek-v3.2 --draft mtp --prefill tp=4 --decode tp=8"),
    // Compressed and sliding latents, pages of several sizes, rings.
    ("c-compressed", "--model deepseek-v4-flash --draft mtp --prefill tp=8 --decode tp=2"),
    ("c-compressed-pp", "--model deepseek-v4-pro --prefill tp=4,pp=2 --decode tp=8,layout=BLNHC"),
    ("c-rings", "--model deepseek-v4.1 --prefill tp=4 --decode tp=2,spec=6"),
    // Delta attention and latents.
    ("d-kimi-linear", "--model kimi-linear --prefill tp=4 --decode tp=1"),
    ("d-kimi-linear-pp", "--model kimi-linear-48b-a3b --prefill tp=4 --decode tp=2,pp=2"),
    ("d-kimi-k3", "--model kimi-k3 --prefill tp=6 --decode tp=4"),
    // Hybrids under pipeline parallelism.
    ("e-pipeline", "--model nemotron-h-8b --prefill tp=1,pp=2 --decode tp=2"),
    ("e-both", "--model qwen3.5-27b --prefill tp=2,pp=3 --decode tp=4,pp=2"),
    // Plain attention: windows, other block sizes, other layouts, fewer heads than ranks.
    ("f-windows", "--model gpt-oss-20b --prefill tp=2 --decode tp=1,block=32 --tokens 1000"),
    ("f-layouts", "--model llama-3.1-8b --prefill tp=2,layout=LBNHC --decode tp=4,layout=BLHNC"),
    (
        "f-link",
        "--model llama-3.1-70b --prefill tp=4 --decode tp=4 --link 100Gbit --requests 2 --prefill-rate 10k",
    ),
    ("f-replicas", "--model llama-3.1-8b --prefill tp=16 --decode tp=2 --contiguous"),
];

/// The same for caches that are quantised, and for ranks that take turns at tokens.
const MORE: &[(&str, &str)] = &[
    ("g-fp8", "--model llama-3.1-8b --prefill tp=2,kv=fp8 --decode tp=4,kv=fp8"),
    (
        "g-records",
        "--model qwen3-next --prefill tp=4,kv=int8_per_token_head --decode tp=2,kv=int8_per_token_head",
    ),
    ("g-slots", "--model gpt-oss-20b --prefill tp=1,kv=nvfp4 --decode tp=2,kv=nvfp4,block=32"),
    ("g-latents", "--model deepseek-v3.2 --prefill tp=2,kv=fp8_ds_mla --decode tp=4,kv=fp8_ds_mla"),
    ("g-compressed", "--model deepseek-v4-flash --prefill tp=2,kv=fp8 --decode tp=4"),
    ("g-four-bits", "--model deepseek-v4.1 --prefill tp=2,kv=nvfp4_ds_mla --decode tp=4"),
    (
        "g-eight-bits",
        "--model deepseek-v4.1 --prefill tp=2,kv=fp8_ds_mla --decode tp=4,kv=fp8_ds_mla",
    ),
    ("h-dcp", "--model deepseek-v3 --prefill tp=4 --decode tp=8,dcp=4,interleave=16"),
    ("h-dcp-heads", "--model llama-3.1-8b --prefill tp=2 --decode tp=16,dcp=2"),
    ("h-pcp", "--model deepseek-v3.2 --prefill tp=2,pcp=2 --decode tp=4"),
    (
        "h-pcp-dcp",
        "--model kimi-linear --prefill tp=2,pcp=2,dcp=4 --decode tp=2,dcp=2,interleave=8",
    ),
    (
        "h-all",
        "--model deepseek-v3.2 --prefill pcp=4,dcp=4,kv=fp8_ds_mla --decode tp=2,kv=fp8_ds_mla",
    ),
];

fn kvferry(arguments: &str) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(arguments.split_whitespace())
        .output()
        .expect("the command starts");
    let text = |bytes| String::from_utf8(bytes).expect("the output is text");
    (output.status.code().expect("it ends by itself"), text(output.stdout), text(output.stderr))
}

#[test]
fn tables_are_as_recorded() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    let mut different = vec![];
    for (name, arguments) in CASES.iter().chain(MORE) {
        let (code, output, errors) = kvferry(&format!("plan {arguments}"));
        assert_eq!((code, errors.as_str()), (0, ""), "{arguments}");
        let found = format!("$ kvferry plan {arguments}\n{output}");
        let path = folder.join(format!("{name}.txt"));
        if update {
            fs::write(&path, &found).expect("the golden folder is writable");
        }
        let expected = fs::read_to_string(&path).unwrap_or_default();
        if found != expected {
            different.push(format!("--- {name}: recorded\n{expected}\n+++ now\n{found}"));
        }
    }
    assert!(different.is_empty(), "{}", different.join("\n"));
}

/// What a plan moves is known without any plan: every decode rank needs all of its boxes, as far as
/// they are live and missing.
#[test]
fn totals_equal_what_the_models_say() {
    for (name, arguments) in CASES {
        let (_, output, _) = kvferry(&format!("plan --json {arguments}"));
        let answer: Value = serde_json::from_str(&output).expect("JSON");
        let words: Vec<&str> = arguments.split_whitespace().collect();
        let option =
            |key: &str| words.iter().position(|word| *word == key).map(|index| words[index + 1]);
        let number = |key: &str, default| option(key).map_or(default, |text| text.parse().unwrap());
        let (tokens, cached) = (number("--tokens", 8192), number("--cached", 0));
        let mut model = presets::find(option("--model").unwrap()).unwrap().model().unwrap();
        match option("--draft") {
            None => {}
            Some("mtp") => model = model.with_own_draft().unwrap(),
            Some(draft) => {
                model = model.with_draft(&presets::find(draft).unwrap().model().unwrap());
            }
        }
        let decode: Topology = option("--decode").unwrap().parse().unwrap();
        let mut needed = 0;
        for cache in &model.caches {
            let first = cache.window().first_live(tokens).max(cached);
            let each = cache.tokens_per_entry();
            let entries = match cache.sort.is_recurrent() {
                true => 1,
                false => tokens.div_ceil(each) - first / each,
            };
            for state in cache.states() {
                for rank in 0..u64::from(decode.tp) {
                    let held = state.held(rank, decode.tp.into()).volume();
                    needed += entries * held * u64::from(state.kind.format.bytes);
                }
            }
        }
        let transfer = &answer["transfer"];
        assert_eq!(transfer["bytes"], needed, "{name}");
        assert_eq!(transfer["minimum"], model.minimum_bytes(tokens, cached), "{name}");
        let pairs = transfer["pairs"].as_array().unwrap();
        let sum = |key: &str| pairs.iter().map(|pair| pair[key].as_u64().unwrap()).sum::<u64>();
        assert_eq!(transfer["bytes"], sum("bytes"), "{name}");
        assert_eq!(transfer["copies"], sum("copies"), "{name}");
        assert_eq!(answer["works"], true, "{name}");
    }
}

/// Where a topology decides what is held, every decode rank needs all entries that its manifest says are
/// its turn, each as large as it says there.
#[test]
fn totals_equal_what_the_ranks_hold() {
    for (name, arguments) in CASES.iter().chain(MORE) {
        let words: Vec<&str> = arguments.split_whitespace().collect();
        let option =
            |key: &str| words.iter().position(|word| *word == key).map(|index| words[index + 1]);
        if option("--draft").is_some() || option("--cached").is_some() {
            continue;
        }
        let (_, output, _) = kvferry(&format!("plan --json {arguments}"));
        let answer: Value = serde_json::from_str(&output).expect("JSON");
        let tokens = option("--tokens").map_or(8192, |text| text.parse().unwrap());
        let model = presets::find(option("--model").unwrap()).unwrap().model().unwrap();
        let decode: Topology = option("--decode").unwrap().parse().unwrap();
        let mut needed = 0;
        for rank in vllm::manifests(&model, &decode, "decode").unwrap() {
            for group in rank.groups() {
                for piece in &group.pieces {
                    let kind = rank.kind(piece);
                    let each = u64::from(kind.law.tokens);
                    let first = group.window.first_live(tokens) / each;
                    let (held, modulus) = (piece.phase.held, piece.phase.modulus);
                    let turn = |entry: &u64| (held.start..held.end).contains(&(entry % modulus));
                    let entries = match kind.law.entries {
                        0 => 1,
                        _ => (first..tokens.div_ceil(each)).filter(turn).count() as u64,
                    };
                    needed += entries * piece.bounds.volume() * u64::from(kind.format.bytes);
                }
            }
        }
        assert_eq!(answer["transfer"]["bytes"], needed, "{name}");
        assert_eq!(answer["works"], true, "{name}");
    }
}

/// The manifests of both sides, named as files or as folders, say the same as a model and topologies.
#[test]
fn manifests_are_judged_like_models() {
    let folder = std::env::temp_dir().join(format!("kvferry-golden-{}", std::process::id()));
    let model = presets::find("kimi-linear").unwrap().model().unwrap();
    let write = |side: &str, topology: &str| -> Vec<String> {
        let topology: Topology = topology.parse().unwrap();
        fs::create_dir_all(folder.join(side)).unwrap();
        let mut paths = vec![];
        for rank in vllm::manifests(&model, &topology, side).unwrap() {
            let path = folder.join(side).join(format!("{}.json", rank.rank()));
            fs::write(&path, rank.to_json()).unwrap();
            paths.push(path.display().to_string());
        }
        paths
    };
    let (prefill, decode) = (write("prefill", "tp=4"), write("decode", "tp=2,pp=2"));
    let (prefill_folder, decode_folder) = (folder.join("prefill"), folder.join("decode"));
    let (prefill_folder, decode_folder) = (prefill_folder.display(), decode_folder.display());
    let read = |text: &str| serde_json::from_str::<Value>(text).unwrap();
    let (_, planned, _) =
        kvferry("plan --model kimi-linear --prefill tp=4 --decode tp=2,pp=2 --json");
    let planned = read(&planned);
    for sides in [
        format!("--prefill {} --decode {}", prefill.join(" "), decode.join(" ")),
        format!("--prefill {prefill_folder} --decode {decode_folder}"),
        // In any order, and one side of a kind.
        format!(
            "--prefill {} {} {} {} --decode {decode_folder}",
            prefill[2], prefill[0], prefill[3], prefill[1]
        ),
        format!("--model kimi-linear --prefill tp=4 --decode {decode_folder}"),
    ] {
        let (code, found, errors) = kvferry(&format!("plan {sides} --json"));
        assert_eq!((code, errors.as_str()), (0, ""), "{sides}");
        assert_eq!(read(&found)["transfer"], planned["transfer"], "{sides}");
        assert_eq!(read(&found)["decode"]["groups"], planned["decode"]["groups"], "{sides}");
        assert_eq!(read(&found)["engine"], Value::Null, "{sides}");
    }

    // One of the prefill ranks is missing: refused, with the state that nobody holds.
    let some = prefill[1..].join(" ");
    let (code, output, errors) =
        kvferry(&format!("check --prefill {some} --decode {decode_folder}"));
    assert_eq!(code, 2, "{errors}");
    assert!(
        output.contains("kvferry    refuses this pair before the first byte moves"),
        "{output}"
    );
    assert!(
        errors.starts_with("refused: decode rank pp0 tp0: state 'layers.0/conv.q'"),
        "{errors}"
    );

    // Another model on the decode side.
    let model = presets::find("llama-3.1-8b").unwrap().model().unwrap();
    let other = folder.join("other.json");
    let rank = &vllm::manifests(&model, &Topology::default(), "decode").unwrap()[0];
    fs::write(&other, rank.to_json()).unwrap();
    let (code, output, errors) =
        kvferry(&format!("plan --prefill {prefill_folder} --decode {} --json", other.display()));
    assert_eq!(code, 2);
    assert!(errors.contains("Start both sides with the same model"), "{errors}");
    assert_eq!(read(&output)["works"], false);
    fs::remove_dir_all(&folder).unwrap();
}
