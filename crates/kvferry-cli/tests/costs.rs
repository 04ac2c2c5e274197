//! `kvferry plan` with what reading costs: what is chosen, and what can be forced.

use std::process::{Command, Output};

/// Copies are dear here, so that packing is the cheapest way by far.
const RATES: [&str; 4] = ["--direct", "10000,600,0.3", "--packed", "50000,10,0.3"];

fn plan(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(["plan", "--model", "llama-3.1-70b", "--prefill", "tp=4", "--decode", "tp=4"])
        .args(["--tokens", "1500", "--json"])
        .args(arguments)
        .output()
        .unwrap()
}

fn costs(arguments: &[&str]) -> Vec<serde_json::Value> {
    let output = plan(arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let costs = json["costs"].as_array().unwrap().clone();
    assert!(!costs.is_empty());
    costs
}

#[test]
fn a_way_can_be_forced() {
    let chosen = |way: &[&str], expected: &str| {
        for cost in costs(&[&RATES, way].concat()) {
            assert_eq!(cost["chosen"], expected, "{way:?}: {cost}");
        }
    };
    chosen(&[], "packed");
    for way in ["direct", "over-read", "packed"] {
        chosen(&["--lowering", way], way);
    }
    chosen(&["--lowering", "auto"], "packed");
}

#[test]
fn forced_over_reads_are_whole_blocks() {
    // Bytes are so dear that nobody would read more of them to save a copy.
    let dear = ["--direct", "0,1,1000"];
    let over = |way: &[&str]| -> f64 {
        costs(&[&dear, way].concat())
            .iter()
            .map(|cost| cost["over_read_ms"].as_f64().unwrap())
            .sum()
    };
    let direct: f64 = costs(&dear).iter().map(|cost| cost["direct_ms"].as_f64().unwrap()).sum();
    assert_eq!(over(&[]), direct);
    assert!(over(&["--lowering", "over-read"]) > direct);
}

#[test]
fn a_way_that_cannot_be_forced_is_an_error() {
    let refuses = |arguments: &[&str], parts: &[&str]| {
        let output = plan(arguments);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{errors}");
        for part in parts {
            assert!(errors.contains(part), "no '{part}' in: {errors}");
        }
    };
    let direct = &RATES[..2];
    refuses(
        &[direct, &["--lowering", "packed"]].concat(),
        &["--lowering packed", "--packed LAUNCH,RUN,BYTE"],
    );
    refuses(
        &[direct, &["--lowering", "fast"]].concat(),
        &["'fast'", "use auto, direct, packed or over-read"],
    );
    refuses(&["--lowering", "direct"], &["--direct <LAUNCH,COPY,BYTE>"]);
}
