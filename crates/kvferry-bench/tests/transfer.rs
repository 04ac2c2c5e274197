//! `kvferry-bench transfer`, as a user runs it.

use std::process::Command;

#[test]
fn a_bench_of_all_back_ends_is_json() {
    kvferry_nixl::install(None).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry-bench"))
        .args(["transfer", "--json", "--mib", "8", "--rounds", "2"])
        .args(["--pieces", "4,1024"])
        .args(["--only", "local,tcp,nixl,nixl-bare,nixl-bare-tcp"])
        .output()
        .unwrap();
    let json = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(results["absent"].as_array().unwrap().len(), 0, "{json}");
    let cases = results["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 4);
    for case in cases {
        let names: Vec<_> = case["contenders"]
            .as_array()
            .unwrap()
            .iter()
            .map(|contender| {
                assert!(contender["ratio_to_memcpy"].as_f64().unwrap() > 0.0);
                contender["contender"].as_str().unwrap()
            })
            .collect();
        let all = ["memcpy", "local", "nixl", "nixl-bare", "tcp", "nixl-bare-tcp"];
        assert_eq!(names, all);
    }
    assert_eq!(results["idle"].as_array().unwrap().len(), 5);
}
