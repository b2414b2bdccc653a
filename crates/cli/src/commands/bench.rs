//! `isobath bench`

use crate::cache::CacheMode;
use crate::failure::{Failure, Outcome};
use crate::host::ImageHost;
use crate::image_name::{Naming, reason};
use crate::options::NamedFormat;
use crate::{options, runtime, size, workers};
use isobath_disk::{Disk, DiskError};
use isobath_ring::spawn;
use isobath_storage::IoBuf;
use isobath_sync::Semaphore;
use std::cell::Cell;
use std::io::Write;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

/// Benchmark an image with requests of one size
///
/// With -w, the disk's contents are overwritten.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of requests
    #[arg(short, long, value_name = "COUNT", default_value = "75000", value_parser = count)]
    count: u64,
    /// Number of requests in flight at once
    #[arg(short, long, value_name = "DEPTH", default_value = "64", value_parser = depth)]
    depth: u64,
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// With -w: flush after this many requests; 0 for never
    #[arg(long, value_name = "COUNT", default_value = "0", value_parser = interval)]
    flush_interval: u64,
    /// I/O interface: threads, native or io_uring; accepted for compatibility, makes no difference
    #[arg(short = 'i', long, value_name = "AIO", value_parser = aio)]
    aio: Option<String>,
    /// Same as -i native
    #[arg(short = 'n', long = "native")]
    native: bool,
    /// With --flush-interval: do not wait for requests in flight before a flush
    #[arg(long)]
    no_drain: bool,
    /// The guest offset of the first request
    #[arg(short, long, value_name = "OFFSET", default_value = "0", value_parser = offset)]
    offset: u64,
    /// With -w: the byte to write, 0 to 255
    #[arg(long, value_name = "BYTE", default_value = "0", value_parser = pattern)]
    pattern: u8,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// Size of a request in bytes
    #[arg(short = 's', long, value_name = "SIZE", default_value = "4k", value_parser = buffer)]
    buffer_size: u64,
    /// Distance between the starts of consecutive requests in bytes [default: the size of a request]
    #[arg(short = 'S', long, value_name = "STEP", default_value = "0", value_parser = step)]
    step_size: u64,
    /// Cache mode for the image
    #[arg(short = 't', long = "cache", value_name = "MODE", default_value = "writeback", value_parser = mode)]
    cache: CacheMode,
    /// Write instead of reading
    #[arg(short, long)]
    write: bool,
    /// Read the image even while another program writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    naming: Naming,
    /// The image
    image: PathBuf,
}

fn number(text: &str, what: &str) -> Result<u64, String> {
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    };
    let parsed = parsed.filter(|number| i32::try_from(*number).is_ok());
    parsed.ok_or_else(|| format!("Invalid {what} specified"))
}

fn count(text: &str) -> Result<u64, String> {
    number(text, "request count")
}

fn depth(text: &str) -> Result<u64, String> {
    number(text, "queue depth").and_then(|depth| match depth {
        0 => Err("Invalid queue depth specified".into()),
        depth => Ok(depth),
    })
}

fn interval(text: &str) -> Result<u64, String> {
    number(text, "flush interval")
}

fn pattern(text: &str) -> Result<u8, String> {
    let byte = number(text, "pattern byte")?;
    u8::try_from(byte).map_err(|_| "Invalid pattern byte specified".into())
}

fn offset(text: &str) -> Result<u64, String> {
    size::parse(text).map_err(|_| "Invalid offset specified".into())
}

fn buffer(text: &str) -> Result<u64, String> {
    let size = size::parse(text).ok().filter(|size| i32::try_from(*size).is_ok());
    size.ok_or_else(|| "Invalid buffer size specified".into())
}

fn step(text: &str) -> Result<u64, String> {
    let size = size::parse(text).ok().filter(|size| i32::try_from(*size).is_ok());
    size.ok_or_else(|| "Invalid step size specified".into())
}

fn aio(text: &str) -> Result<String, String> {
    let known = ["threads", "native", "io_uring"].contains(&text);
    known.then(|| text.to_owned()).ok_or_else(|| format!("Invalid aio option: {text}"))
}

fn mode(text: &str) -> Result<CacheMode, String> {
    CacheMode::parse(text).map_err(|_| "Invalid cache mode".into())
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    if args.flush_interval > 0 && !args.write {
        return Err(Failure::new("--flush-interval is only available in write tests"));
    }
    if args.flush_interval > 0 && args.flush_interval < args.depth {
        return Err(Failure::new("Flush interval can't be smaller than depth"));
    }
    let direct = args.cache.is_direct();
    if (args.native || args.aio.as_deref() == Some("native")) && !direct {
        let reason = "aio=native was specified, but it requires cache.direct=on, which was not \
                      specified.";
        return Err(crate::image_name::could_not_open(&args.image.to_string_lossy(), reason));
    }
    let image = args.naming.image(&args.image, args.format)?;
    let options = if args.write {
        image.writable(direct)?
    } else {
        image.options(direct, options::locking(args.force_share))
    };
    let step = if args.step_size == 0 { args.buffer_size } else { args.step_size };
    runtime::block_on(async || {
        let disk = image.open(&options).await?;
        if !args.quiet {
            writeln!(
                out,
                "Sending {} {} requests, {} bytes each, {} in parallel (starting at offset {}, \
                 step size {step})",
                args.count,
                if args.write { "write" } else { "read" },
                args.buffer_size,
                args.depth,
                args.offset
            )?;
            if args.flush_interval > 0 {
                writeln!(out, "Sending flush every {} requests", args.flush_interval)?;
            }
        }
        let begun = Instant::now();
        let depth = args.depth.min(args.count) as usize;
        let load = Rc::new(Load {
            disk: Arc::clone(&disk),
            write: args.write.then_some(args.pattern),
            size: args.buffer_size,
            step,
            interval: args.flush_interval,
            drains: !args.no_drain,
            left: Cell::new(args.count),
            sent: Cell::new(0),
            at: Cell::new(args.offset),
            in_flight: Semaphore::new(depth),
            depth,
        });
        let tasks: Vec<_> = (0..depth)
            .map(|_| {
                let load = Rc::clone(&load);
                spawn(async move { load.run().await })
            })
            .collect();
        let mut failed = None;
        for task in tasks {
            let result = task.await.map_err(workers::panicked)?;
            failed = failed.or(result.err());
        }
        if let Some(error) = failed {
            out.flush()?;
            if args.write {
                // Avoids leaked clusters; an error here matters less than the failed request.
                let _ = disk.close().await;
            }
            return Err(Failure::new(format_args!("Failed request: {}", reason(&error))));
        }
        let took = begun.elapsed();
        if args.write {
            disk.close().await?;
        }
        if !args.quiet {
            writeln!(out, "Run completed in {:.3} seconds.", took.as_secs_f64())?;
        }
        Ok(())
    })?;
    Ok(0)
}

/// State shared by the tasks.
struct Load {
    disk: Arc<Disk<ImageHost>>,
    /// The byte to write; `None` to read.
    write: Option<u8>,
    size: u64,
    step: u64,
    interval: u64,
    drains: bool,
    left: Cell<u64>,
    sent: Cell<u64>,
    at: Cell<u64>,
    /// Each request takes one permit; a flush that waits for the others takes all of them.
    in_flight: Semaphore,
    depth: usize,
}

impl Load {
    async fn run(&self) -> Result<(), DiskError> {
        let mut buf = IoBuf::zeroed(self.size as usize);
        buf.fill(self.write.unwrap_or(0));
        while let Some(left) = self.left.get().checked_sub(1) {
            self.left.set(left);
            let at = self.at.get();
            // As in QEMU, requests wrap around at the end of the disk.
            self.at.set((at + self.step) % self.disk.size().max(1));
            self.sent.set(self.sent.get() + 1);
            let flushes = self.interval > 0 && self.sent.get().is_multiple_of(self.interval);
            {
                let _in_flight = self.in_flight.acquire().await;
                buf = self.request(at, buf).await?;
            }
            if flushes {
                let _alone = if self.drains {
                    Some(self.in_flight.acquire_many(self.depth).await)
                } else {
                    None
                };
                self.disk.flush().await?;
            }
        }
        Ok(())
    }

    async fn request(&self, at: u64, buf: IoBuf) -> Result<IoBuf, DiskError> {
        match self.write {
            Some(_) => self.disk.write(at, buf).await,
            None => self.disk.read(at, buf).await,
        }
    }
}
