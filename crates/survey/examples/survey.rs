//! Finds the longest backing chains below some directories:
//!
//! ```sh
//! cargo run --release -p isobath-survey --example survey -- /var/lib/libvirt/images
//! ```

use isobath_survey::{Options, Progress, SortBy, survey};
use std::error::Error;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    let paths: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if paths.is_empty() {
        return Err("usage: survey PATH...".into());
    }
    let survey = survey(&paths, &Options::default(), &Progress::default())?;
    let counts = survey.report().counts;
    println!("{} images in {} chains", counts.images, counts.chains);
    for chain in survey.top(10, SortBy::Length) {
        println!("{:>6} layers  {}", chain.length, chain.image);
    }
    Ok(())
}
