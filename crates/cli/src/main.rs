//! The `isobath` command: argument parsing and printing, nothing else.
//!
//! A command is a file under `commands/` with an `Args` and a `run`, and a line in
//! [`commands::Command`].

mod cache;
mod commands;
mod descriptors;
mod failure;
mod json;
mod options;
mod runtime;
mod size;
mod workers;

use clap::Parser;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// A virtual-disk engine for qcow2 images with long snapshot chains
#[derive(Parser)]
#[command(name = "isobath", version, arg_required_else_help = true)]
#[command(
    after_help = "ISOBATH_LOG sets the log level on stderr (error, warn, info, debug, trace)."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // What cannot be printed cannot be told either.
            let _ = error.print();
            // qemu-img's code for a wrong command line is 1, clap's would be 2.
            return if error.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    tracing_subscriber::fmt()
        .with_env_filter(
            EnvFilter::try_from_env("ISOBATH_LOG").unwrap_or_else(|_| EnvFilter::new("warn")),
        )
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    let mut out = io::stdout().lock();
    let result = cli.command.run(&mut out);
    match result.and_then(|code| Ok(out.flush().map(|()| code)?)) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            if let Some(message) = &failure.message {
                eprintln!("isobath: {message}");
            }
            ExitCode::from(failure.code)
        }
    }
}
