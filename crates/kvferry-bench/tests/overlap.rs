//! `kvferry-bench overlap`, as a user runs it.

use std::process::Command;

fn overlap(arguments: &[&str]) -> (bool, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry-bench"));
    let output = command.arg("overlap").args(arguments).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.success(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn exposed_time_is_a_table_json_and_a_picture() {
    let folder = std::env::temp_dir().join(format!("kvferry-overlap-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (json, svg) = (folder.join("o.json"), folder.join("o.svg"));
    let (done, table, errors) = overlap(&[
        "--tokens",
        "100,1600",
        "--speed",
        "2000",
        "--chunk",
        "100",
        "--rounds",
        "2",
        "--json",
        json.to_str().unwrap(),
        "--svg",
        svg.to_str().unwrap(),
    ]);
    assert!(done, "{errors}");
    assert!(table.contains("prefill (simulated): 2000 tokens/s in chunks of 100"), "{table}");
    let results: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    let picture = std::fs::read_to_string(&svg).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    assert_eq!(picture.matches("<circle").count(), 8);
    let long = &results["lengths"][1];
    assert_eq!(long["tokens"], 1600);
    let exposed = |way: &str| long["exposed"][way].as_f64().unwrap();
    // The link takes 727 ms for all of it, whoever else uses this machine.
    assert!(exposed("sequential") >= 720.0, "{results}");
    assert!(exposed("following") < exposed("sequential"), "{results}");
    assert!(exposed("by_layer") < exposed("sequential"), "{results}");
    assert!(long["total"]["sequential"].as_f64().unwrap() >= 1500.0, "{results}");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (arguments, problem) in [
        (["--rounds", "0"], "at least 1"),
        (["--tokens", "0"], "at least 1"),
        (["--speed", "0"], "at least 1"),
        (["--chunk", "0"], "at least 1"),
        (["--link", "0"], "--link 0: that is not a rate"),
        (["--link", "NaN"], "that is not a rate"),
        (["--tokens", "2000000"], "--tokens 2000000: that is too long"),
    ] {
        let (done, _, errors) = overlap(&arguments);
        assert!(!done && errors.contains(problem), "{arguments:?}: {errors}");
    }
}
