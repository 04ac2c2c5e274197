//! `kvferry-bench lowering`, as a user runs it, and on a bad day.

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry-bench"));
    command.arg("lowering").args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// The only child of a process, once there is one.
fn child_of(process: u32) -> u32 {
    let until = Instant::now() + Duration::from_secs(90);
    while Instant::now() < until {
        let children = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
        if let Some(child) = children.unwrap().split_whitespace().next() {
            return child.parse().unwrap();
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("process {process} starts no other");
}

#[test]
fn a_source_that_is_gone_is_an_error() {
    // More rounds than anybody waits for.
    let mut bench = bench(&["--transports", "local", "--only", "llama", "--rounds", "1000000000"]);
    let bench = bench.spawn().unwrap();
    let source = child_of(child_of(bench.id()));
    assert!(Command::new("kill").args(["-9", &source.to_string()]).status().unwrap().success());
    let output = bench.wait_with_output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("error: local: the process that reads ended"), "{errors}");
}

#[test]
fn nothing_to_measure_is_an_error() {
    let mut bench = bench(&["--transports", "nixl"]);
    let output = bench.env("KVFERRY_NIXL", "/nonexistent/nixl").output().unwrap();
    let (said, errors) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{said}{errors}");
    assert!(said.contains("nixl did not take part: "), "{said}");
    assert!(errors.contains("error: no transport took part"), "{errors}");
}

#[test]
fn the_ways_side_by_side_are_json_and_a_picture() {
    let svg = std::env::temp_dir().join(format!("kvferry-lowering-{}.svg", std::process::id()));
    let output = bench(&["--only", "qwen3-next", "--rounds", "1", "--transports", "tcp,local"])
        .args(["--json", "--svg"])
        .arg(&svg)
        .output()
        .unwrap();
    // Bytes that are not where they belong would have been an error.
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let results: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(results["absent"].as_array().unwrap().len(), 0, "{results}");
    let rows = results["rows"].as_array().unwrap();
    let by: Vec<&str> = rows.iter().map(|row| row["transport"].as_str().unwrap()).collect();
    assert_eq!(by, ["tcp", "local"]);
    for row in rows {
        assert!(row["case"].as_str().unwrap().starts_with("qwen3-next"), "{row}");
        assert!(row["copies"].as_u64().unwrap() > 0 && row["bytes"].as_u64().unwrap() > 0, "{row}");
        let way = |name: &str| row[name].as_f64().is_some_and(|ms| ms > 0.0);
        let ways = ["direct_ms", "packed_ms", "full_read_ms", "chosen_ms"];
        assert!(ways.into_iter().all(way), "{row}");
        assert!(row["of_best"].as_f64().unwrap() > 0.0, "{row}");
    }
    // A background; for each way a colour, and a bar for each row.
    assert_eq!(count_in_xml(&svg, "rect"), 1 + 4 + 4 * rows.len());
    std::fs::remove_file(&svg).unwrap();
}

/// How many elements of a name there are in a file, which must be well-formed.
fn count_in_xml(path: &std::path::Path, element: &str) -> usize {
    const COUNT: &str = "import sys, xml.etree.ElementTree as tree\n\
        print(len(list(tree.parse(sys.argv[1]).iter('{http://www.w3.org/2000/svg}' + sys.argv[2]))))";
    let output =
        Command::new("python3").args(["-c", COUNT]).arg(path).arg(element).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
}
