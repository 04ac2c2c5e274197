//! What the documents show of the command is what it prints.
//!
//! Every block of README.md and docs/ that begins with `$ kvferry …` is run. Spaces and line breaks may
//! differ, and a line of its own with `…` stands for what was left out. `UPDATE_DOCS=1 cargo test`
//! rewrites the blocks; read the difference before you commit it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const FENCE: &str = "```console\n$ kvferry ";

#[test]
fn blocks_show_what_the_command_prints() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let update = std::env::var_os("UPDATE_DOCS").is_some();
    let mut seen = 0;
    let mut wrong = vec![];
    for path in documents(&root) {
        let text = fs::read_to_string(&path).unwrap();
        let mut updated = text.clone();
        for block in text.split(FENCE).skip(1) {
            let (block, _) = block.split_once("```").expect("every block ends");
            let (arguments, shown) = block.split_once('\n').expect("a block shows something");
            seen += 1;
            let found = print(&root, arguments);
            if !shows(shown, &found) {
                wrong.push(format!("{}: kvferry {arguments}\n{found}", path.display()));
            }
            let old = format!("{FENCE}{arguments}\n{shown}");
            updated =
                updated.replace(&old, &format!("{FENCE}{arguments}\n{}", renew(shown, &found)));
        }
        if update && updated != text {
            fs::write(&path, updated).unwrap();
        }
    }
    assert!(seen >= 3, "only {seen} blocks were found");
    assert!(update || wrong.is_empty(), "these print something else now:\n\n{}", wrong.join("\n"));
}

/// What the demo prints differs from run to run; the parts that a request's time is divided into do not.
#[test]
fn the_demo_on_the_page_has_every_part_of_a_requests_time() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/agent.md")).unwrap();
    let blocks = page.split("```").skip(1).step_by(2);
    let [demo] = blocks.filter(|block| block.contains("wrong bytes")).collect::<Vec<_>>()[..]
    else {
        panic!("docs/agent.md shows the demo once");
    };
    let parts = demo.lines().filter_map(|line| line.strip_prefix("    "));
    let parts: Vec<&str> = parts.filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(parts, kvferry_agent::Timings::NAMES);
}

fn print(root: &Path, arguments: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(arguments.split_whitespace())
        .current_dir(root)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    text(output.stdout) + &text(output.stderr)
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

/// What was found, with the same lines left out: as many at the start as before, and at the end those from
/// the last that begins with the same word.
fn renew(shown: &str, found: &str) -> String {
    let shown: Vec<&str> = shown.lines().collect();
    let found: Vec<&str> = found.lines().collect();
    let word = |line: &str| line.split_whitespace().next().map(str::to_owned);
    let Some(gap) = shown.iter().position(|line| line.trim() == "…") else {
        return found.join("\n") + "\n";
    };
    let after = shown.get(gap + 1).and_then(|line| word(line));
    let tail = found.iter().rposition(|line| word(line) == after).unwrap_or(found.len());
    let head = gap.min(found.len());
    [&found[..head], &["…"], &found[tail.max(head)..]].concat().join("\n") + "\n"
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

#[test]
fn a_renewed_block_leaves_out_the_same() {
    let found = "a 1\nb 2\nc 3\nd 4\n  5\n";
    assert_eq!(renew("a\n…\nd\n", found), "a 1\n…\nd 4\n  5\n");
    assert_eq!(renew("x\n", found), found);
    assert!(shows(&renew("a\n…\nd\n", found), found));
}
