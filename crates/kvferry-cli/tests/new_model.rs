//! The command of docs/new-model.md, run as the page has it.

use std::process::Command;

const PAGE: &str = include_str!("../../../docs/new-model.md");

/// The blocks of the page in a language.
fn blocks(language: &str) -> Vec<&'static str> {
    let fence = format!("```{language}\n");
    let starts = PAGE.match_indices(&fence).map(|(at, _)| at + fence.len());
    starts.map(|at| PAGE[at..].split("```").next().expect("split gives a part")).collect()
}

#[test]
fn the_pages_command_works() {
    let folder = std::env::temp_dir().join(format!("kvferry-new-model-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let json = blocks("json");
    std::fs::write(folder.join("facts.json"), json[0]).unwrap();
    std::fs::write(folder.join("config.json"), json[1]).unwrap();
    let mut words = blocks("sh")[0].split_whitespace();
    assert_eq!(words.next(), Some("kvferry"));
    let words: Vec<&str> = words.collect();
    let run = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvferry"));
        let output = command.args(words).current_dir(&folder).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    let (works, out, problem) = run(&words);
    assert!(works, "{problem}");
    assert!(out.contains("4 echo"), "{out}");
    // Facts that cannot be read are named.
    std::fs::write(folder.join("facts.json"), "{").unwrap();
    let (works, _, problem) = run(&words);
    assert!(!works && problem.contains("--facts facts.json"), "{problem}");
    // And without any, the family is one that nobody knows.
    let at = words.iter().position(|word| *word == "--facts").unwrap();
    let without: Vec<&str> = [&words[..at], &words[at + 2..]].concat();
    let (works, _, problem) = run(&without);
    assert!(!works && problem.contains("'echo_lm' is not known"), "{problem}");
    std::fs::remove_dir_all(&folder).unwrap();
}
