//! The page of `kvferry explain` in a real browser: what is drawn is what the plan says.
//!
//! Needs chromium and chromedriver; `tools/test-explain.sh` installs them and runs this.

mod webdriver;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use kvferry_layout::Manifest;
use kvferry_models::{Topology, presets, rules::vllm};
use kvferry_plan::{Plan, Request, Spread, Table};
use serde_json::{Value, json};

use webdriver::Browser;

const ARROW_DOWN: &str = "\u{E015}";
const TAB: &str = "\u{E004}";

struct Case {
    model: &'static str,
    prefill: &'static str,
    decode: &'static str,
}

/// Pages that differ in everything: overlaid groups, sliding windows, interleaved heads, other block
/// sizes, kernel blocks, spare columns, layouts with blocks outside, and eight ranks by eight.
const CASES: &[Case] = &[
    Case { model: "kimi-linear", prefill: "tp=4", decode: "tp=2,pp=2" },
    Case { model: "gemma-4-31b", prefill: "tp=8", decode: "tp=8,block=32,layout=LBNHC" },
    Case { model: "qwen3.5-397b", prefill: "tp=8", decode: "tp=4,pp=2,kernel=16,conv=ds,spec=2" },
    Case { model: "llama-3.1-8b", prefill: "tp=2,layout=BLHNC", decode: "tp=2,layout=BLHNC" },
    Case { model: "llama-3.1-8b", prefill: "tp=2,layout=LHBNC", decode: "tp=4,layout=BHLNC" },
    Case { model: "deepseek-v3.2", prefill: "tp=2", decode: "tp=2,block=128" },
];

fn kvferry(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry")).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Writes the manifests of an engine into a folder of its own, as a running server would.
fn dump(folder: &Path, model: &str, topology: &str, engine: &str) -> PathBuf {
    let model = presets::find(model).unwrap().model().unwrap();
    let topology: Topology = topology.parse().unwrap();
    let folder = folder.join(engine);
    std::fs::create_dir_all(&folder).unwrap();
    for rank in vllm::manifests(&model, &topology, engine).unwrap() {
        let name = format!("{engine}-{}.json", rank.label().replace(' ', "-"));
        std::fs::write(folder.join(name), rank.to_json()).unwrap();
    }
    folder
}

/// The data that a page draws.
fn data(page: &Path) -> Value {
    let text = std::fs::read_to_string(page).unwrap();
    let (_, rest) = text.split_once("<script type=\"application/json\" id=\"data\">").unwrap();
    serde_json::from_str(rest.split_once("</script>").unwrap().0).unwrap()
}

fn page(folder: &Path, number: usize, case: &Case) -> PathBuf {
    let path = folder.join(format!("page-{number}.html"));
    let out = path.to_str().unwrap();
    let pair = ["--model", case.model, "--prefill", case.prefill, "--decode", case.decode];
    kvferry(&[&["explain"], &pair[..], &["--out", out]].concat());
    path
}

/// Bytes and copies of one block of a group of a decode rank, by prefill rank: from the plan alone.
fn one_block(
    prefill: &[Manifest],
    (rank, ranks): (&Manifest, usize),
    group: usize,
) -> BTreeMap<String, (u64, u64)> {
    let sources: Vec<&Manifest> = prefill.iter().collect();
    let plan = Plan::compile_spread(rank, &sources, Spread::among(ranks as u32)).unwrap();
    let tokens = rank.groups()[group].tokens_per_block.unwrap_or(1);
    let mut cached = vec![tokens; rank.groups().len()];
    cached[group] = 0;
    // Every third block, so that none follows another.
    let tables = |rank: &Manifest| -> Vec<Vec<u32>> {
        let mut next = 1;
        let groups = rank.groups().iter();
        groups
            .map(|group| {
                let count = group.tokens_per_block.map_or(1, |block| tokens.div_ceil(block));
                (0..count)
                    .map(|_| {
                        next += 3;
                        next
                    })
                    .collect()
            })
            .collect()
    };
    fn borrow(tables: &[Vec<u32>]) -> Vec<Table<'_>> {
        tables.iter().map(|blocks| Table::new(blocks)).collect()
    }
    let (from, to) = (tables(&prefill[0]), tables(rank));
    let (source, destination) = (borrow(&from), borrow(&to));
    let request = Request { tokens, cached: &cached, source: &source, destination: &destination };
    let transfer = plan.transfer(&request).unwrap();
    let mut found = BTreeMap::new();
    for number in 0..prefill.len() {
        // Counted one by one, not taken from the plan's own summary.
        let copies: Vec<_> = transfer.loops(number).unwrap().copies().collect();
        if !copies.is_empty() {
            let bytes = copies.iter().map(|copy| copy.bytes).sum();
            found.insert(number.to_string(), (bytes, copies.len() as u64));
        }
    }
    found
}

const DRAWN: &str = "
    const found = {};
    for (const node of document.querySelectorAll('#copies .ribbon')) {
        const entry = found[node.dataset.source] ||= [0, 0];
        entry[0] += Number(node.dataset.bytes);
        entry[1] += Number(node.dataset.copies);
    }
    const value = (id) => { const node = document.getElementById(id); return node && Number(node.dataset.value); };
    return { found, rank: document.getElementById('rank').value, group: document.getElementById('group').value,
        bytes: value('drawn-bytes'), copies: value('drawn-copies') };";

fn drawn(browser: &Browser) -> (Value, BTreeMap<String, (u64, u64)>) {
    let answer = browser.run(DRAWN);
    let found = answer["found"].as_object().unwrap().iter().map(|(source, sums)| {
        let sum = |index: usize| sums[index].as_f64().unwrap().round() as u64;
        (source.clone(), (sum(0), sum(1)))
    });
    let found = found.collect();
    (answer, found)
}

/// Presses Tab until an element has the focus, as someone without a mouse would.
fn tab_to(browser: &Browser, id: &str) {
    for _ in 0..200 {
        if browser.run("return document.activeElement && document.activeElement.id") == id {
            return;
        }
        browser.press(TAB);
    }
    panic!("Tab never reaches #{id}");
}

#[test]
#[ignore = "needs chromium: run tools/test-explain.sh"]
fn what_is_drawn_is_what_the_plan_says() {
    let folder = std::env::temp_dir().join(format!("kvferry-explain-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let browser = Browser::start(&folder);
    for (number, case) in CASES.iter().enumerate() {
        let path = page(&folder, number, case);
        browser.open(&format!("file://{}", path.display()));
        // The title says what becomes of the pair.
        let title = browser.run("return document.title");
        let title = title.as_str().unwrap();
        assert!(title.contains(": kvferry works, vLLM 0.32 "), "{title}");
        let model = presets::find(case.model).unwrap().model().unwrap();
        let ranks = |topology: &str, engine| {
            let topology: Topology = topology.parse().unwrap();
            vllm::manifests(&model, &topology, engine).unwrap()
        };
        let (prefill, decode) = (ranks(case.prefill, "prefill"), ranks(case.decode, "decode"));

        // The matrix has the numbers of `kvferry plan`.
        let arguments =
            ["--model", case.model, "--prefill", case.prefill, "--decode", case.decode, "--json"];
        let planned: Value =
            serde_json::from_str(&kvferry(&[&["plan"], &arguments[..]].concat())).unwrap();
        let cells = browser.run(
            "return [...document.querySelectorAll('#matrix button')].map((button) => ({
                decode: data.decode.ranks[button.dataset.decode].label,
                prefill: data.prefill.ranks[button.dataset.prefill].label,
                bytes: Number(button.dataset.bytes), copies: Number(button.dataset.copies) }))",
        );
        let expected: Vec<Value> = planned["transfer"]["pairs"]
            .as_array()
            .unwrap()
            .iter()
            .map(|pair| {
                json!({ "decode": pair["decode"], "prefill": pair["prefill"],
                    "bytes": pair["bytes"], "copies": pair["copies"] })
            })
            .collect();
        assert_eq!(cells, Value::Array(expected), "{}", case.model);

        // Choose ranks with the keyboard, and every group of each, with all of its layers.
        browser.run(
            "const select = document.getElementById('layer');
             select.value = '-1'; select.dispatchEvent(new Event('change'));",
        );
        tab_to(&browser, "rank");
        let last = decode.len() - 1;
        for (rank, manifest) in decode.iter().enumerate() {
            let wanted = json!(rank.to_string());
            while browser.run("return document.getElementById('rank').value") != wanted {
                browser.press(ARROW_DOWN);
            }
            if rank != 0 && rank != 1 && rank != last {
                continue;
            }
            for group in 0..manifest.groups().len() {
                if manifest.groups()[group].pieces.is_empty() {
                    continue;
                }
                browser.run(&format!(
                    "const select = document.getElementById('group');
                     select.value = '{group}'; select.dispatchEvent(new Event('change'));"
                ));
                let (answer, found) = drawn(&browser);
                assert_eq!(answer["rank"], rank.to_string(), "{}", case.model);
                assert_eq!(answer["group"], group.to_string(), "{}", case.model);
                let expected = one_block(&prefill, (manifest, decode.len()), group);
                assert_eq!(found, expected, "{} rank {rank} group {group}", case.model);
                let bytes: u64 = expected.values().map(|(bytes, _)| bytes).sum();
                assert_eq!(answer["bytes"].as_f64().unwrap() as u64, bytes);
            }
        }

        // One layer shows its share, and all layers together the whole.
        let shares = browser.run(
            "const select = document.getElementById('layer');
             const shares = [];
             for (const option of select.options) {
                select.value = option.value;
                select.dispatchEvent(new Event('change'));
                const node = document.getElementById('drawn-bytes');
                shares.push(node ? Number(node.dataset.value) : 0);
             }
             return shares;",
        );
        let shares: Vec<u64> =
            shares.as_array().unwrap().iter().map(|share| share.as_f64().unwrap() as u64).collect();
        assert_eq!(shares[0], shares[1..].iter().sum::<u64>(), "{}", case.model);

        // Ribbons can be walked through with the keyboard, and say what they are.
        browser.run("document.getElementById('copies').focus()");
        browser.press(ARROW_DOWN);
        let detail = browser.run("return document.getElementById('detail').textContent");
        assert!(detail.as_str().unwrap().starts_with("Ribbon 1 of "), "{detail}");
        assert!(detail.as_str().unwrap().contains("from prefill"), "{detail}");
        // Pointing at a ribbon shows the same.
        let tip = browser.run(
            "const ribbon = document.querySelector('.ribbon');
             ribbon.dispatchEvent(new PointerEvent('pointermove', { bubbles: true, clientX: 5, clientY: 5 }));
             const tip = document.getElementById('tip');
             return tip.style.opacity === '1' ? tip.textContent : '';",
        );
        assert!(tip.as_str().unwrap().contains("to decode"), "{tip}");
        // Every byte of the block is accounted for: states, spare columns and padding fill the pages.
        let legend = browser.run("return document.getElementById('legend').textContent");
        assert!(legend.as_str().unwrap().contains("padding"));
        assert_eq!(browser.run("return performance.getEntriesByType('resource').length"), 0);
    }

    // Dark mode is another set of colours.
    let background = "return getComputedStyle(document.body).backgroundColor";
    browser.scheme("light");
    let light = browser.run(background);
    browser.scheme("dark");
    let dark = browser.run(background);
    assert_ne!(light, dark);
    browser.stop();
    std::fs::remove_dir_all(&folder).unwrap();
}

/// The page stands alone: it names no other file and no host.
#[test]
fn the_page_is_self_contained() {
    let folder = std::env::temp_dir().join(format!("kvferry-page-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let text = std::fs::read_to_string(page(&folder, 0, &CASES[0])).unwrap();
    let bare = text.replace("http://www.w3.org/2000/svg", "");
    for sign in ["http:", "https:", "<link", "src=", "@import", "/*DATA*/"] {
        assert!(!bare.contains(sign), "{sign}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

/// Manifests are all that a picture needs: dumped ones give the same as a model's name.
#[test]
fn dumped_manifests_are_drawn_like_models() {
    let folder = std::env::temp_dir().join(format!("kvferry-dumps-{}", std::process::id()));
    for (number, case) in CASES.iter().enumerate() {
        let folder = folder.join(number.to_string());
        let prefill = dump(&folder, case.model, case.prefill, "prefill");
        let decode = dump(&folder, case.model, case.decode, "decode");
        let named = data(&page(&folder, number, case));
        let path = folder.join("dumped.html");
        let (prefill, decode) = (prefill.to_str().unwrap(), decode.to_str().unwrap());
        let sides = ["--prefill", prefill, "--decode", decode];
        kvferry(&[&["explain"], &sides[..], &["--out", path.to_str().unwrap()]].concat());
        let dumped = data(&path);
        for key in ["model", "draft", "tokens", "cached", "blocks", "works", "transfer", "moves"] {
            assert_eq!(dumped[key], named[key], "{} {key}", case.model);
        }
        for side in ["prefill", "decode"] {
            for key in ["ranks", "frames", "groups"] {
                assert_eq!(dumped[side][key], named[side][key], "{} {side} {key}", case.model);
            }
        }
        // What vLLM's own connector would do depends on more than manifests say.
        assert!(dumped["engine"].is_null() && named["engine"].is_object());
        let files = folder.join("decode").read_dir().unwrap();
        assert_eq!(files.count(), named["decode"]["ranks"].as_array().unwrap().len());
    }
    std::fs::remove_dir_all(&folder).unwrap();
}
