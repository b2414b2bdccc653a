//! `isobath chain`: tools for whole chains and for many of them.

mod generate;
mod survey;

use crate::failure::Outcome;
use clap::Subcommand;
use std::io::Write;

/// Generate chains for tests and benchmarks, or survey existing ones
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Generate(generate::Args),
    Survey(survey::Args),
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    match &args.command {
        Command::Generate(args) => generate::run(args, out),
        Command::Survey(args) => survey::run(args, out),
    }
}
