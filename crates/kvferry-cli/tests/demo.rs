//! The demo, as a user runs it.

use std::process::Command;

use serde_json::Value;

fn demo(arguments: &[&str]) -> (bool, Value) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(["demo", "--json"])
        .args(arguments)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let report = serde_json::from_str(&text)
        .unwrap_or_else(|_| panic!("{text}\n{}", String::from_utf8_lossy(&output.stderr)));
    (output.status.success(), report)
}

fn is_exact(report: &Value, requests: u64) {
    assert_eq!(report["wrong_bytes"], 0, "{report:#}");
    assert_eq!(report["lost_blocks"], 0, "{report:#}");
    assert_eq!(report["survivors"], 0, "{report:#}");
    let failed: u64 =
        report["failed"].as_object().unwrap().values().map(|n| n.as_u64().unwrap()).sum();
    let count = |name: &str| report[name].as_u64().unwrap();
    assert_eq!(count("exact") + count("aborted") + failed, requests, "{report:#}");
    assert!(count("exact") > 0 && count("bytes") > 0 && count("audited_bytes") > 0);
}

/// Hands 20 requests over between engines of different shape: all are exact.
fn hands_over(model: &str, prefill: &str, decode: &[&str], transport: &str) {
    let mut arguments = vec!["--requests", "20", "--model", model, "--prefill", prefill];
    for engine in decode {
        arguments.extend(["--decode", engine]);
    }
    arguments.extend(["--transport", transport]);
    let (success, report) = demo(&arguments);
    is_exact(&report, 20);
    assert!(success, "{report:#}");
    assert!(report["failed"].as_object().unwrap().is_empty());
}

#[test]
fn delta_attention_and_latents_go_to_two_engines() {
    hands_over("kimi-linear-48b-a3b", "tp=2", &["tp=1,pp=2", "tp=4"], "local");
}

#[test]
fn mamba_and_attention_go_from_pipeline_stages_over_tcp() {
    hands_over("nemotron-3-nano-30b-a3b", "tp=2,pp=2", &["tp=1"], "tcp");
}

#[test]
fn windows_go_to_other_blocks() {
    hands_over("gemma-3-27b", "tp=1", &["tp=2,block=32"], "local");
}

#[test]
fn compressed_latents_and_rings_go_to_other_ranks() {
    hands_over("deepseek-v4-flash", "tp=2", &["tp=4,kv=fp8"], "local");
    hands_over("deepseek-v4.1-flash", "tp=1,spec=6", &["tp=2"], "tcp");
}

#[test]
fn quantised_caches_go_to_other_blocks_and_layouts() {
    hands_over("llama-3.1-8b", "tp=2,kv=nvfp4", &["tp=1,kv=nvfp4,block=32"], "local");
    hands_over(
        "qwen3-next-80b-a3b",
        "tp=1,kv=fp8,kscale=0.5",
        &["tp=2,kv=fp8,kscale=0.5,layout=LBNHC"],
        "local",
    );
}

#[test]
fn tokens_that_ranks_take_turns_at_go_to_those_that_do_not() {
    hands_over("deepseek-v3.2", "tp=2,pcp=2,dcp=4,interleave=4", &["tp=1", "tp=2,dcp=2"], "local");
}

#[test]
fn chaos_loses_nothing() {
    let (success, report) = demo(&[
        "--requests",
        "60",
        "--model",
        "llama-3.1-8b",
        "--layers",
        "2",
        "--decode",
        "tp=1",
        "--chaos",
        "--seed",
        "3",
    ]);
    is_exact(&report, 60);
    assert!(success, "{report:#}");
    assert!(
        report["chaos"]["stopped"].as_u64().unwrap() + report["chaos"]["killed"].as_u64().unwrap()
            > 0
    );
}

#[test]
fn what_cannot_be_is_refused_with_the_reason() {
    for (arguments, words) in [
        (vec!["--model", "no-such-model"], "there is no preset 'no-such-model'"),
        (vec!["--prefill", "tp=3"], "cannot run kimi-linear-48b-a3b with tp=3"),
        (vec!["--prefill", "pt=3"], "no key 'pt'"),
        (vec!["--requests", "0"], "0 is not in 1.."),
        (vec!["--prefill", "tp=2,blocks=2"], "give the engines more blocks"),
        (
            vec!["--model", "deepseek-v4-flash", "--prefill", "kv=nvfp4"],
            "cannot run deepseek-v4-flash with kv=nvfp4",
        ),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .arg("demo")
            .args(&arguments)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(text.contains(words), "{text}");
    }
}
