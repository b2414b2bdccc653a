//! Between `fuzz/corpus/TARGET/`, where libFuzzer starts from, and what the repository has.
//!
//! `seed` writes the seeds of every target there; `keep` puts the inputs that are there into `fuzz/kept/`,
//! from which they are seeds: a line of hexadecimal digits each, the shortest first.

use isobath_fuzz::{TARGETS, seeds};
use std::fmt::Write;
use std::path::Path;
use std::{fs, io};

/// Characters of a target's file at most.
const MOST: usize = 32 << 10;

fn main() -> io::Result<()> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"));
    match std::env::args().nth(1).as_deref() {
        Some("seed") => seed(&directory.join("corpus")),
        Some("keep") => keep(&directory.join("corpus"), &directory.join("kept")),
        _ => Err(io::Error::other("say `seed` or `keep`")),
    }
}

fn seed(corpus: &Path) -> io::Result<()> {
    for (target, _) in TARGETS {
        let directory = corpus.join(target);
        fs::create_dir_all(&directory)?;
        for (number, seed) in seeds(target).into_iter().enumerate() {
            fs::write(directory.join(format!("seed-{number}")), seed)?;
        }
    }
    Ok(())
}

fn keep(corpus: &Path, kept: &Path) -> io::Result<()> {
    fs::create_dir_all(kept)?;
    for (target, _) in TARGETS {
        let files = fs::read_dir(corpus.join(target))?;
        let inputs = files.map(|entry| fs::read(entry?.path())).collect::<io::Result<Vec<_>>>();
        let mut inputs = inputs?;
        inputs.sort_by(|a, b| (a.len(), a).cmp(&(b.len(), b)));
        inputs.dedup();
        let mut lines = String::new();
        for input in inputs.iter().filter(|input| !input.is_empty()) {
            if lines.len() + 2 * input.len() < MOST {
                for byte in input {
                    let _ = write!(lines, "{byte:02x}");
                }
                lines.push('\n');
            }
        }
        fs::write(kept.join(target), lines)?;
    }
    Ok(())
}
