//! `kvferry nixl`, as a user runs it.

use std::path::Path;
use std::process::{Command, Output};

fn kvferry(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    command.args(arguments);
    command
}

fn said(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn nixl_is_installed_and_found() {
    let output = kvferry(&["nixl", "install"]).output().unwrap();
    let (installed, errors) = said(&output);
    assert!(output.status.success(), "{errors}");
    assert!(Path::new(installed.trim_end()).is_file(), "{installed}");
    // What is there is not fetched again: without a Python, a fetch would fail.
    let output = kvferry(&["nixl", "install", "--python", "/nonexistent/python"]).output().unwrap();
    assert_eq!(said(&output).0, installed);
    let output = kvferry(&["nixl", "where"]).env_remove("KVFERRY_NIXL").output().unwrap();
    assert_eq!(said(&output).0, installed);
}

#[test]
fn a_missing_nixl_is_an_error_that_says_what_to_do() {
    let output =
        kvferry(&["nixl", "where"]).env("KVFERRY_NIXL", "/nonexistent/nixl").output().unwrap();
    let (_, errors) = said(&output);
    assert_eq!(output.status.code(), Some(1));
    assert!(errors.contains("/nonexistent/nixl/libnixl_capi.so"), "{errors}");
    assert!(errors.contains("kvferry nixl install"), "{errors}");
}

#[test]
fn an_install_that_cannot_be_done_says_why() {
    let cache = std::env::temp_dir().join(format!("kvferry-test-{}", std::process::id()));
    let output = kvferry(&["nixl", "install", "--python", "/nonexistent/python"])
        .env("XDG_CACHE_HOME", &cache)
        .output()
        .unwrap();
    let (_, errors) = said(&output);
    let _ = std::fs::remove_dir_all(&cache);
    assert_eq!(output.status.code(), Some(1));
    assert!(errors.contains("/nonexistent/python"), "{errors}");
}
