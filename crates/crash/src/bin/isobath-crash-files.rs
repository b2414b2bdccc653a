//! `isobath-crash-files`: records a server's changes of real files, and crashes it.

use clap::Parser;
use isobath_crash::files::campaign::{Settings, Totals, run};
use isobath_crash::files::workload::Workload;
use isobath_disk::MetadataMode;
use isobath_testkit::evidence::{Evidence, Run};
use std::process::ExitCode;
use std::thread;
use std::time::Instant;

/// Records a server's changes of an image, builds the images that crashes would have left, and checks their recovery;
/// `qemu-img check` checks each as well.
#[derive(Parser)]
struct Arguments {
    /// Crash states for each workload and mode.
    #[arg(long, default_value_t = 200)]
    states: usize,
    /// Crash states for each run of a workload.
    #[arg(long, default_value_t = 200)]
    each: usize,
    /// One workload: append, overwrite, random, writers or guest [default: all].
    #[arg(long)]
    workload: Option<String>,
    /// The metadata mode [default: all].
    #[arg(long)]
    mode: Option<String>,
    /// The first run's seed; it is incremented for each further run.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// States checked concurrently [default: the number of processors].
    #[arg(long)]
    threads: Option<usize>,
    /// Makes every other sync do nothing, to verify that this is detected.
    #[arg(long)]
    sabotage: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let workloads = match &arguments.workload {
        None => Workload::ALL.to_vec(),
        Some(name) => Workload::from_name(name).into_iter().collect(),
    };
    let modes = match &arguments.mode {
        None => MetadataMode::ALL.to_vec(),
        Some(name) => MetadataMode::from_name(name).into_iter().collect(),
    };
    if workloads.is_empty() || modes.is_empty() {
        eprintln!("there is no such workload, or no such mode");
        return ExitCode::from(2);
    }
    let threads =
        arguments.threads.unwrap_or_else(|| thread::available_parallelism().map_or(1, usize::from));
    // A run with sabotage is to fail.
    let evidence = if arguments.sabotage { Ok(None) } else { Evidence::begin() };
    let evidence = match evidence {
        Ok(evidence) => evidence,
        Err(error) => {
            eprintln!("results cannot be recorded: {error}");
            return ExitCode::from(2);
        }
    };
    for &workload in &workloads {
        for &mode in &modes {
            let begun = Instant::now();
            let mut totals = Totals::default();
            let mut seed = arguments.seed;
            let mut failure = None;
            while failure.is_none() && totals.states < arguments.states as u64 {
                let left = arguments.states - totals.states as usize;
                let states = arguments.each.clamp(1, left);
                let sabotage = arguments.sabotage;
                match run(&Settings { workload, mode, states, seed, threads, sabotage }) {
                    Ok(more) => totals.add(&more),
                    Err(found) => failure = Some(found),
                }
                seed += 1;
            }
            if let Some(evidence) = &evidence {
                let run = Run {
                    campaign: "crash-files",
                    kind: workload.name(),
                    mode: mode.name(),
                    count: totals.states,
                    also: &[
                        ("different", totals.different.len() as u64),
                        ("refused by QEMU before recovery", totals.refused),
                        ("leaking before recovery", totals.leaking),
                        ("lost data", totals.losses.data),
                        ("lost metadata", totals.losses.metadata),
                        ("lost the journal", totals.losses.journal),
                    ],
                    seeds: format!("{} to {}", arguments.seed, seed - 1),
                    failure: failure.clone(),
                    seconds: begun.elapsed().as_secs_f64(),
                    threads: Some(threads),
                };
                if let Err(error) = evidence.add(&run) {
                    eprintln!("results are not recorded: {error}");
                    return ExitCode::from(2);
                }
            }
            if let Some(found) = failure {
                println!("{found}");
                return ExitCode::FAILURE;
            }
            println!(
                "{} {}: {} states passed, {} of them different; before recovery {} refused by QEMU, \
                 {} leaking; {} read by QEMU; lost: data in {}, metadata in {}, journal in {}; \
                 seeds {}..{seed}, {} changes and {} syncs, {:.0} s",
                workload.name(),
                mode.name(),
                totals.states,
                totals.different.len(),
                totals.refused,
                totals.leaking,
                totals.read_by_qemu,
                totals.losses.data,
                totals.losses.metadata,
                totals.losses.journal,
                arguments.seed,
                totals.changes,
                totals.syncs,
                begun.elapsed().as_secs_f64()
            );
        }
    }
    ExitCode::SUCCESS
}
