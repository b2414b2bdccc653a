//! Writes the seeds of every fuzz target to `fuzz/corpus/TARGET/`, where libFuzzer starts from.

use isobath_fuzz::{TARGETS, seeds};
use std::path::Path;

fn main() -> std::io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (target, _) in TARGETS {
        let directory = corpus.join(target);
        std::fs::create_dir_all(&directory)?;
        for (number, seed) in seeds(target).into_iter().enumerate() {
            std::fs::write(directory.join(format!("seed-{number}")), seed)?;
        }
    }
    Ok(())
}
