//! `isobath io`

mod command;
mod on_disk;
mod opening;
mod reopen;
mod report;
mod session;
mod transfer;
mod words;

use crate::cache::{CacheMode, Discard, is_native};
use crate::failure::{Failure, Outcome};
use crate::image_name::Naming;
use crate::null::{self, is_null};
use crate::{options, program, runtime};
use isobath_disk::SnapshotChoice;
use isobath_ring::Readiness;
use opening::{Opening, cannot_open};
use session::{Next, Session};
use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;

/// Read and write an image with qemu-io's commands
///
/// Takes commands such as 'write -P 7 0 64k' from -c or, without -c, from standard input, one per line; 'help' lists
/// them. The exit code is 1 if a command failed.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// A command to run; can be repeated
    #[arg(short, long = "cmd", value_name = "CMD")]
    command: Vec<String>,
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT")]
    format: Option<String>,
    /// Open the image read-only
    #[arg(short, long)]
    read_only: bool,
    /// Write to a temporary overlay instead of the image
    #[arg(short, long)]
    snapshot: bool,
    /// Read an internal snapshot, by ID or name
    #[arg(short, long, value_name = "SNAPSHOT", value_parser = options::snapshot)]
    load_snapshot: Option<SnapshotChoice>,
    /// Bypass the page cache; short for -t none
    #[arg(short, long)]
    nocache: bool,
    /// Copy what is read from backing files into the image
    #[arg(short = 'C', long)]
    copy_on_read: bool,
    /// Accepted for compatibility; has no effect
    #[arg(short, long)]
    misalign: bool,
    /// Accepted for compatibility; short for -i native
    #[arg(short = 'k', long)]
    native_aio: bool,
    /// Accepted for compatibility: threads, native or io_uring
    #[arg(short = 'i', long, value_name = "MODE", value_parser = is_native)]
    aio: Option<bool>,
    /// Cache mode: none, writeback, writethrough, directsync or unsafe
    #[arg(short = 't', long, value_name = "MODE", default_value = "writeback")]
    #[arg(value_parser = CacheMode::parse)]
    cache: CacheMode,
    /// Discards: 'ignore' does nothing, 'unmap' frees the range
    #[arg(short = 'd', long, value_name = "MODE", default_value = "unmap")]
    #[arg(value_parser = Discard::parse)]
    discard: Discard,
    /// Read the image even while another program writes to it; requires -r
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Accepted for compatibility; has no effect
    #[arg(short = 'T', long, value_name = "TRACE")]
    trace: Option<String>,
    #[command(flatten)]
    naming: Naming,
    /// The image; without it, 'open' opens one
    image: Option<PathBuf>,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let opening = match &args.image {
        None => None,
        Some(name) => {
            if args.naming.image_opts && args.format.is_some() {
                return Err(Failure::new("--image-opts and -f are mutually exclusive"));
            }
            let shown = name.display().to_string();
            let shown = Some(shown).filter(|_| !args.naming.image_opts);
            // That of a disk without contents, which is named with its driver.
            let driver = args.format.as_deref().filter(|format| is_null(format));
            let format = args.format.as_deref().filter(|format| !is_null(format));
            let format = format.map(|format| {
                options::named_format(format).map_err(|_| format!("Unknown driver '{format}'"))
            });
            let image = format.transpose().and_then(|format| args.naming.found(name, format));
            let image = image.and_then(|image| match driver {
                Some(driver) if !null::is_name(&image.path) => {
                    Err(format!("The only allowed filename for this driver is '{driver}://'"))
                }
                _ => Ok(image),
            });
            let image = image.map_err(|reason| cannot_open(shown.as_deref(), reason))?;
            Some(Opening {
                image,
                shown,
                read_only: args.read_only,
                cache: if args.nocache { CacheMode::None } else { args.cache },
                discard: args.discard,
                native: args.native_aio || args.aio == Some(true),
                copy_on_read: args.copy_on_read,
                overlay: args.snapshot,
                force_share: args.force_share,
                snapshot: args.load_snapshot.clone(),
            })
        }
    };
    runtime::block_on(async || {
        let mut session = Session::new(&args.naming, out);
        if let Some(opening) = opening {
            session.open(opening).await?;
        }
        let result = Box::pin(carry_out(&mut session, &args.command)).await;
        let good = session.end().await?;
        result?;
        Ok(u8::from(!good))
    })
}

async fn carry_out(session: &mut Session<'_>, commands: &[String]) -> Result<(), Failure> {
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

/// Runs commands from standard input, while asynchronous requests are in flight.
async fn interact(session: &mut Session<'_>) -> Result<(), Failure> {
    let input_error =
        |error: io::Error| Failure::new(format_args!("cannot read standard input: {error}"));
    let stdin = io::stdin();
    let prompt = match program::name() {
        // Like qemu-io, even if standard input is a pipe.
        "qemu-io" => "qemu-io> ",
        _ if stdin.is_terminal() => "isobath> ",
        _ => "",
    };
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
            return session.print(if stdin.is_terminal() { "\n" } else { "" });
        }
    }
}
