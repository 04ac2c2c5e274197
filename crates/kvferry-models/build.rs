//! Lists the presets, so that a preset is added by adding a file.

use std::fmt::Write as _;
use std::path::Path;
use std::{env, fs};

fn main() {
    let root = env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let folder = Path::new(&root).join("presets");
    println!("cargo::rerun-if-changed=presets");
    let mut names: Vec<String> = fs::read_dir(&folder)
        .expect("the presets folder is part of the crate")
        .map(|entry| entry.expect("readable").file_name().into_string().expect("a plain name"))
        .filter_map(|file| file.strip_suffix(".json").map(str::to_owned))
        .filter(|name| name != "SOURCES")
        .collect();
    names.sort_unstable();
    let mut list = String::from("&[\n");
    for name in &names {
        let path = folder.join(format!("{name}.json"));
        writeln!(list, "    ({name:?}, include_str!({path:?})),")
            .expect("strings can be written to");
    }
    list.push_str("]\n");
    let out = env::var("OUT_DIR").expect("cargo sets it");
    fs::write(Path::new(&out).join("presets.rs"), list).expect("the output folder is writable");
}
