//! Writes `docs/errors.md` and `docs/log.md`: `cargo run -p kvferry-docs`.

use std::path::Path;
use std::process::ExitCode;
use std::{fs, io};

use kvferry_docs::log;

fn main() -> ExitCode {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match write(&root) {
        Ok(problems) if problems.is_empty() => ExitCode::SUCCESS,
        Ok(problems) => {
            eprintln!("crates/kvferry-docs/log.txt:\n  {}", problems.join("\n  "));
            ExitCode::FAILURE
        }
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn write(root: &Path) -> io::Result<Vec<String>> {
    let types = kvferry_docs::read(&root.join("crates"))?;
    fs::write(root.join("docs/errors.md"), kvferry_docs::page(&types))?;
    let sites = log::sites(root)?;
    let table = log::table(&fs::read_to_string(root.join("crates/kvferry-docs/log.txt"))?)?;
    fs::write(root.join("docs/log.md"), log::page(&sites, &table))?;
    Ok(log::problems(&sites, &table))
}
