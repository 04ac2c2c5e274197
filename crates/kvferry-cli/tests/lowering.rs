//! `kvferry bench lowering` on a bad day.

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

fn bench(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command
        .args(["bench", "lowering"])
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
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
