//! Writes `docs/errors.md`: `cargo run -p kvferry-docs`.

use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let written = kvferry_docs::read(&root.join("crates"))
        .and_then(|types| std::fs::write(root.join("docs/errors.md"), kvferry_docs::page(&types)));
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}
