//! `isobath io`

mod command;
mod report;
mod session;
mod transfer;
mod words;

use crate::cache::Cache;
use crate::failure::{Failure, Outcome};
use crate::{options, runtime};
use isobath_disk::{Disk, ImageFormat, OpenOptions};
use isobath_ring::Readiness;
use isobath_storage::file::FileHost;
use session::{Next, Session};
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::Arc;

/// Read and write an image with qemu-io's commands
///
/// Takes commands such as 'write -P 7 0 64k' from -c or, without -c, from standard input, one per line; 'help' lists
/// them. The exit code is 1 if a command failed.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A command to run; may be given several times
    #[arg(short, long = "cmd", value_name = "CMD")]
    command: Vec<String>,
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::format)]
    format: Option<ImageFormat>,
    /// Open the image read-only
    #[arg(short, long)]
    read_only: bool,
    /// Bypass the page cache; short for -t none
    #[arg(short, long)]
    nocache: bool,
    /// Cache mode
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback")]
    cache: Cache,
    /// Take no lock on the image and ignore other programs' locks; requires -r
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The image
    image: PathBuf,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let options = OpenOptions::new()
        .writable(!args.read_only)
        .direct(args.nocache || args.cache == Cache::None)
        .locking(options::locking(args.force_share))
        .format(args.format);
    runtime::block_on(async || {
        let disk = Arc::new(Disk::open(FileHost, &args.image, &options).await?);
        let mut session = Session::new(disk.clone(), out);
        let result = Box::pin(carry_out(&mut session, &args.command)).await;
        let good = session.end().await?;
        disk.close().await?;
        result?;
        Ok(u8::from(!good))
    })
}

async fn carry_out(
    session: &mut Session<'_, FileHost>,
    commands: &[String],
) -> Result<(), Failure> {
    if commands.is_empty() {
        return Box::pin(interact(session)).await;
    }
    for command in commands {
        if Box::pin(session.carry_out(command)).await? == Next::Quit {
            break;
        }
    }
    Ok(())
}

/// Takes commands from standard input while asynchronous requests are in flight.
async fn interact(session: &mut Session<'_, FileHost>) -> Result<(), Failure> {
    let input_error =
        |error: io::Error| Failure::new(format_args!("cannot read standard input: {error}"));
    let stdin = io::stdin();
    let prompt = if stdin.is_terminal() { "isobath> " } else { "" };
    let file = stdin.as_fd().try_clone_to_owned().map_err(input_error)?;
    let readiness = Readiness::from(file.try_clone().map_err(input_error)?);
    let mut input = File::from(file);
    let mut pending = Vec::new();
    let mut chunk = [0; 4096];
    session.print(prompt)?;
    loop {
        readiness.ready(libc::POLLIN).await.map_err(input_error)?;
        let count = input.read(&mut chunk).map_err(input_error)?;
        // The last line may lack a newline.
        let end = if count == 0 { &b"\n"[..] } else { &[] };
        for byte in chunk.iter().take(count).chain(end) {
            if *byte != b'\n' {
                pending.push(*byte);
                continue;
            }
            let line = String::from_utf8_lossy(&std::mem::take(&mut pending)).into_owned();
            if Box::pin(session.carry_out(&line)).await? == Next::Quit {
                return Ok(());
            }
            session.print(if count == 0 { "" } else { prompt })?;
        }
        if count == 0 {
            return session.print(if prompt.is_empty() { "" } else { "\n" });
        }
    }
}
