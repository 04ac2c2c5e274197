//! The page on errors is what the code says, and every error says what to do.

use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn the_page_is_fresh() {
    let types = kvferry_docs::read(&root().join("crates")).unwrap();
    let found = std::fs::read_to_string(root().join("docs/errors.md")).unwrap_or_default();
    let expected = kvferry_docs::page(&types);
    let line = found.lines().zip(expected.lines()).position(|(found, expected)| found != expected);
    assert!(
        found == expected,
        "docs/errors.md is stale, first at line {}: run `cargo run -p kvferry-docs`",
        line.unwrap_or(found.lines().count().min(expected.lines().count())) + 1
    );
}

#[test]
fn every_error_says_what_to_do() {
    let types = kvferry_docs::read(&root().join("crates")).unwrap();
    assert!(types.len() >= 10, "only {} error types were found", types.len());
    // Those of tools that nobody is given are left out.
    assert!(types.iter().all(|one| one.package != "kvferry-wire"));
    let helpless = kvferry_docs::helpless(&types);
    assert!(
        helpless.is_empty(),
        "{} errors have no last paragraph `{}…` in their documentation:\n  {}",
        helpless.len(),
        kvferry_docs::REMEDY,
        helpless.join("\n  ")
    );
}
