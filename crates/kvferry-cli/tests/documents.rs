//! What the documents show of the command is what it prints.
//!
//! Every block of README.md and docs/ that begins with `$ kvferry …` is run. Spaces and line breaks may
//! differ, and a line of its own with `…` stands for what was left out.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn blocks_show_what_the_command_prints() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut shown = 0;
    let mut wrong = vec![];
    for path in documents(&root) {
        let text = fs::read_to_string(&path).unwrap();
        for block in text.split("```console\n").skip(1) {
            let (block, _) = block.split_once("```").expect("every block ends");
            let Some(block) = block.strip_prefix("$ kvferry ") else { continue };
            let (arguments, expected) = block.split_once('\n').unwrap();
            shown += 1;
            let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
                .args(arguments.split_whitespace())
                .current_dir(&root)
                .output()
                .unwrap();
            let found = String::from_utf8(output.stdout).unwrap();
            let errors = String::from_utf8(output.stderr).unwrap();
            let found = format!("{found}{errors}");
            if !shows(expected, &found) {
                wrong.push(format!("{}: kvferry {arguments}\n{found}", path.display()));
            }
        }
    }
    assert!(shown >= 3, "only {shown} blocks were found");
    assert!(wrong.is_empty(), "these print something else now:\n\n{}", wrong.join("\n"));
}

fn documents(root: &Path) -> Vec<PathBuf> {
    let mut documents = vec![root.join("README.md")];
    for entry in fs::read_dir(root.join("docs")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "md") {
            documents.push(path);
        }
    }
    documents
}

/// Whether what is shown is what was found, but for what was left out.
fn shows(shown: &str, found: &str) -> bool {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let found = words(found);
    let lines: Vec<&str> = shown.lines().collect();
    let parts: Vec<String> =
        lines.split(|line| line.trim() == "…").map(|lines| words(&lines.join("\n"))).collect();
    let (Some(first), Some(last)) = (parts.first(), parts.last()) else { return false };
    if parts.len() == 1 {
        return *first == found;
    }
    let Some(mut rest) = found.strip_prefix(first.as_str()) else { return false };
    for part in &parts[1..parts.len() - 1] {
        match rest.split_once(part.as_str()) {
            Some((_, after)) => rest = after,
            None => return false,
        }
    }
    rest.ends_with(last.as_str())
}

#[test]
fn what_is_left_out_is_marked() {
    let found = "a b\nc  d\ne f\n";
    for right in ["a b\nc d\ne f", "a b\n…\ne\n f", "…\ne f", "a b\n…\nd\n…\nf"] {
        assert!(shows(right, found), "{right}");
    }
    for wrong in ["a b\ne f", "a b\n…\ne", "b\n…\nf", "a b\n…\nx\n…\nf", ""] {
        assert!(!shows(wrong, found), "{wrong}");
    }
}
