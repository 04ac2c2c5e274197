//! The page about the log is what the code says, and every line that can be logged is on it.

use std::path::{Path, PathBuf};

use kvferry_docs::log::{self, Site, Table};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read() -> (Vec<Site>, Table) {
    let text = std::fs::read_to_string(root().join("crates/kvferry-docs/log.txt")).unwrap();
    (log::sites(&root()).unwrap(), log::table(&text).unwrap())
}

#[test]
fn the_page_is_fresh() {
    let (sites, table) = read();
    let found = std::fs::read_to_string(root().join("docs/log.md")).unwrap_or_default();
    assert!(
        found == log::page(&sites, &table),
        "docs/log.md is stale: run `cargo run -p kvferry-docs`"
    );
    // A message with backticks in it is still one piece of code.
    assert!(found.contains("| `` `kvferry drain …` prepares its end `` |"));
}

#[test]
fn every_line_has_an_entry_and_every_entry_a_line() {
    let (sites, table) = read();
    let of_python = sites.iter().filter(|site| site.file.ends_with(".py")).count();
    assert!(of_python >= 10 && sites.len() - of_python >= 50, "only {} lines", sites.len());
    let problems = log::problems(&sites, &table);
    assert!(
        problems.is_empty(),
        "crates/kvferry-docs/log.txt says what each log line means, and what to do:\n  {}",
        problems.join("\n  ")
    );
}
