//! Writes a small corpus for the fuzz targets: `corpus DIRECTORY`.

use std::path::Path;
use std::{env, fs, io};

use kvferry_testkit::fuzz::seeds;
use kvferry_testkit::random::Dice;

fn main() -> io::Result<()> {
    let directory = env::args().nth(1).unwrap_or_else(|| "fuzz/corpus".to_owned());
    let mut dice = Dice::new(1);
    // Numbers that are small mean tokens and blocks that exist.
    let small: Vec<Vec<u8>> =
        (0..32).map(|_| (0..200).map(|_| dice.within(0, 12) as u8).collect()).collect();
    write(&Path::new(&directory).join("decode_manifest"), &seeds(8))?;
    write(&Path::new(&directory).join("request_against_plan"), &small)?;
    write(&Path::new(&directory).join("hostile_manifests"), &small)
}

fn write(directory: &Path, inputs: &[Vec<u8>]) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    for (index, input) in inputs.iter().enumerate() {
        fs::write(directory.join(format!("{index:02}")), input)?;
    }
    println!("{}: {} inputs", directory.display(), inputs.len());
    Ok(())
}
