//! `isobath completions`

use crate::failure::Outcome;
use crate::{Cli, screen};
use clap::CommandFactory;
use clap_complete::Shell;
use std::io::Write;

/// Print a shell completion script
///
/// For bash: `isobath completions bash > /etc/bash_completion.d/isobath`
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The shell to generate the script for
    shell: Shell,
}

pub(crate) fn run(args: &Args, _out: &mut dyn Write) -> Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "isobath", &mut script);
    // A shell reads it.
    screen::raw().write_all(&script)?;
    Ok(0)
}
