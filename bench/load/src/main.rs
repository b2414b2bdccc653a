//! Load for the benchmarks, each on the same terms: a virtio driver over vhost-user, a file through
//! io_uring, and, without any frontend, the engine and its peer alone.
//!
//! Every command prints one line of JSON.

mod alone;
mod drive;
mod memory;
mod offsets;
mod options;
mod raw;
mod tally;
mod usage;
mod vhost_user;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: usage::Counting = usage::Counting;

/// Anything that ends a run: it is only printed.
type Failure = Box<dyn std::error::Error + Send + Sync>;
type Result<T> = std::result::Result<T, Failure>;

/// Load for the benchmarks: one line of JSON a run
#[derive(Parser)]
#[command(name = "isobath-load", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Drive a vhost-user-blk device
    VhostUser(vhost_user::Args),
    /// Read or write a file through io_uring
    Raw(raw::Args),
    /// Read from an image and its chain with Isobath's engine, in this process
    Engine(alone::Args),
    /// Read from an image and its chain with the crate imago, in this process
    Imago(alone::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::VhostUser(args) => vhost_user::run(&args),
        Command::Raw(args) => raw::run(&args),
        Command::Engine(args) => alone::engine::run(&args),
        Command::Imago(args) => alone::imago::run(&args),
    };
    match result {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("isobath-load: {error}");
            ExitCode::FAILURE
        }
    }
}
