//! `isobath chain`: tools for whole chains and for many of them.

mod doomed;
mod generate;
mod merge;
mod note;
mod retain;
mod survey;
mod unfinished;
mod users;

use crate::failure::Outcome;
use clap::Subcommand;
use std::io::Write;

/// Merge and remove layers of a chain, retain snapshots by a policy, survey many chains, or generate one
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Flatten(merge::FlattenArgs),
    Merge(merge::MergeArgs),
    Delete(merge::DeleteArgs),
    Retain(Box<retain::Args>),
    Survey(survey::Args),
    Generate(generate::Args),
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    match &args.command {
        Command::Flatten(args) => merge::flatten(args, out),
        Command::Merge(args) => merge::merge(args, out),
        Command::Delete(args) => merge::delete(args, out),
        Command::Retain(args) => retain::run(args, out),
        Command::Survey(args) => survey::run(args, out),
        Command::Generate(args) => generate::run(args, out),
    }
}
