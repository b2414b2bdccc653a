//! The `isobath` command: argument parsing and printing, nothing else.
//!
//! A command is a file under `commands/` with an `Args` and a `run`, and a line in
//! [`commands::Command`].

mod block_job;
mod cache;
mod chain_files;
mod commands;
mod descriptors;
mod failure;
mod json;
mod messages;
mod options;
mod runtime;
mod size;
mod workers;

use clap::Parser;
use failure::{Failure, Outcome};
use std::io::{self, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// A virtual-disk engine for qcow2 images with long snapshot chains
#[derive(Parser)]
#[command(name = "isobath", version, arg_required_else_help = true, args_override_self = true)]
#[command(
    after_help = "ISOBATH_LOG sets the log level on stderr (error, warn, info, debug, trace)."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

fn main() -> ExitCode {
    let code = run();
    messages::settle();
    code
}

fn run() -> ExitCode {
    messages::take_over(
        EnvFilter::try_from_env("ISOBATH_LOG").unwrap_or_else(|_| EnvFilter::new("warn")),
    );
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Errors of the command line go to stderr; help and version, which were asked for, to stdout.
        Err(error) => match error.print() {
            // qemu-img's code for a wrong command line is 1, clap's would be 2.
            _ if error.use_stderr() => return ExitCode::FAILURE,
            printed => return ended(printed.map_err(Failure::from).map(|()| 0)),
        },
    };
    let mut out = io::stdout().lock();
    let result = cli.command.run(&mut out);
    ended(result.and_then(|code| Ok(out.flush().map(|()| code)?)))
}

/// Returns the exit code and prints the error, if any.
fn ended(result: Outcome) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            if let Some(message) = &failure.message {
                messages::complain(message);
            }
            ExitCode::from(failure.code)
        }
    }
}
