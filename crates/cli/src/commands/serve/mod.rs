//! `isobath serve`

mod announce;
mod daemon;
mod endpoint;
mod frontends;
mod pid_file;
#[cfg(feature = "slow-disk")]
mod slow;

use crate::cache::Cache;
use crate::failure::{Failure, Outcome};
use crate::{messages, options, runtime, size};
use announce::{Announcement, Frontend};
use daemon::Daemon;
use endpoint::{Endpoint, is_public};
use frontends::FrontendArgs;
use isobath_disk::{BlockDevice, ImageFormat, LiveDisk, MetadataMode, OpenOptions, Trust};
use isobath_export::nbd::{Export, Limits, Server};
use isobath_qmp::metrics;
use isobath_qmp::monitor::{Drive, Monitor};
use isobath_qmp::server::{self as qmp, Events};
use isobath_storage::Host;
use isobath_storage::file::{self, FileHost};
use isobath_storage::ring::net::{Address, Listener};
use isobath_storage::ring::{Config, Handle, JoinHandle, Signals, Worker, spawn};
#[cfg(feature = "slow-disk")]
use isobath_storage::slow::{SlowDisk, SlowHost};
use pid_file::PidFile;
use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};
use std::{fs, future, io, process, thread};

/// The default maximum number of threads.
const THREADS: usize = 8;
/// How long to wait for an address in use.
const BIND_PATIENCE: Duration = Duration::from_millis(500);
/// For how long a repeated signal counts as the same one.
const REPEATED: Duration = Duration::from_secs(1);
/// The signals that end the server.
const SIGNALS: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Serve images to virtual machines and other clients: over NBD, over vhost-user-blk, as files
///
/// Once clients can connect, prints each export's address and the QEMU options to use it. After that it only logs to
/// stderr. SIGTERM, SIGINT or SIGHUP shuts it down: requests in flight are completed, and the images are flushed and
/// closed. A second signal ends it at once, like a crash: flushed data is not lost. The same signal repeated within a
/// second does not count as a second one.
///
/// There is neither authentication nor encryption: whoever can connect can read the disk and, unless --read-only is
/// given, write to it. Restrict access to a Unix socket by the permissions of its directory.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Listen for NBD clients on a socket file, or on a TCP port (of the loopback interface unless HOST is given); may
    /// be given several times [default: 127.0.0.1:10809, unless another frontend is given]
    #[arg(long, value_name = "unix:PATH|[HOST:]PORT")]
    nbd: Vec<Endpoint>,
    #[command(flatten)]
    frontends: FrontendArgs,
    /// Listen for QMP connections, from 'isobath ctl' and other management programs, on a socket file or a TCP port (of
    /// the loopback interface unless HOST is given); may be given several times
    #[arg(long, value_name = "unix:PATH|HOST:PORT")]
    qmp: Vec<Endpoint>,
    /// Serve Prometheus metrics over HTTP at /metrics on this port (of the loopback interface unless HOST is given);
    /// may be given several times
    #[arg(long, value_name = "[HOST:]PORT|unix:PATH")]
    metrics: Vec<Endpoint>,
    /// The export's name; with several images, repeat the option, one per image in order [default: the image's file
    /// name without its extension]. The empty name also selects the first export
    #[arg(long, value_name = "NAME")]
    export_name: Vec<String>,
    /// Refuse writes, and allow other programs to read the images meanwhile
    #[arg(short, long)]
    read_only: bool,
    /// Cache mode for the images and their backing files
    #[arg(long, value_name = "MODE", default_value = "writeback")]
    cache: Cache,
    /// How metadata changes reach an image. 'journal': one sync per flush; other programs refuse an image that was not
    /// closed until 'isobath seal' recovers it. 'embedded': like 'journal', but mappings are stored in data that
    /// compresses, without further writes. 'ordered': two syncs per flush; the image stays usable by other programs.
    /// 'auto': enables the journal after a few flushes
    #[arg(long, value_name = "MODE", default_value = "auto", value_parser = metadata)]
    metadata: MetadataMode,
    /// With 'embedded': maximum number of zones in use, each of --zone-size; closing and recovering an image takes time
    /// for each zone [default: 8]
    #[arg(long, value_name = "N")]
    zones: Option<u32>,
    /// With 'embedded': zone size, such as 16M [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    zone_size: Option<u64>,
    /// Memory limit of each disk's map, such as 64M [default: as much as the disk needs, at most 132M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    map_cache: Option<u64>,
    /// The images' format [default: detected]. Required for raw images unless --read-only is given
    #[arg(short, long, value_name = "FMT", value_parser = options::format)]
    format: Option<ImageFormat>,
    /// Do not trust the images: open only backing files and data files in --backing-dir, and do not guess a backing
    /// file's format
    #[arg(long)]
    untrusted: bool,
    /// A directory whose files an untrusted image may refer to; may be given several times [default: the image's own
    /// directory]
    #[arg(long, value_name = "DIR", requires = "untrusted")]
    backing_dir: Vec<PathBuf>,
    /// Number of threads that serve clients; each client is served by one thread [default: one per CPU, at most 8]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Write the process ID to this file once clients can connect
    #[arg(long, value_name = "FILE")]
    pid_file: Option<PathBuf>,
    /// Run in the background; the command returns once clients can connect. Disables the log
    #[arg(long)]
    daemonize: bool,
    /// For experiments: simulate the timing of a slow disk that holds all images, given by bytes per second, latency in
    /// microseconds, queue depth and flush time in microseconds; or 'hdd' or 'ssd'
    #[cfg(feature = "slow-disk")]
    #[arg(long, hide = true, value_name = "hdd|ssd|BANDWIDTH,LATENCY,DEPTH,FLUSH", value_parser = slow::parse)]
    slow_disk: Option<SlowDisk>,
    /// The images; each becomes an export
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<PathBuf>,
}

fn metadata(name: &str) -> Result<MetadataMode, String> {
    MetadataMode::from_name(name).ok_or_else(|| {
        let modes = MetadataMode::ALL.map(MetadataMode::name).join(", ");
        format!("unknown mode '{name}'; expected {modes}")
    })
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let names = export_names(&args.images, &args.export_name)?;
    args.frontends.check(args.images.len())?;
    let daemon = match args.daemonize.then(Daemon::start) {
        None => None,
        Some(Ok(daemon)) => Some(daemon),
        Some(Err(error)) => {
            return Err(Failure::new(error).context("cannot go into the background"));
        }
    };
    messages::detach();
    runtime::block_on(async || {
        #[cfg(feature = "slow-disk")]
        if let Some(disk) = args.slow_disk {
            let host = SlowHost::new(FileHost, disk);
            return Box::pin(run_on(host, args, names, out, daemon)).await;
        }
        Box::pin(run_on(FileHost, args, names, out, daemon)).await
    })
}

/// Serves images that are kept at `host`.
async fn run_on<H: Host + Clone>(
    host: H,
    args: &Args,
    names: Vec<String>,
    out: &mut dyn Write,
    daemon: Option<Daemon>,
) -> Outcome {
    let mut signals = Signals::new(&SIGNALS)
        .map_err(|error| Failure::new(error).context("cannot set up signal handlers"))?;
    let disks = match unless_signalled(&mut signals, open(&host, args)).await {
        Some(disks) => disks?,
        None => return Err(Failure::new("interrupted by a signal during startup")),
    };
    let served = serve(host, args, names, &disks, signals, out, daemon).await;
    let closed = close(&disks).await;
    served.and(closed).map(|()| 0)
}

/// Opens every image.
async fn open<H: Host + Clone>(host: &H, args: &Args) -> Result<Vec<Arc<LiveDisk<H>>>, Failure> {
    let mut disks = Vec::new();
    for (number, image) in args.images.iter().enumerate() {
        let restart_log = args.frontends.outlives(number);
        let options = OpenOptions { trust: trust(args, image)?, restart_log, ..options(args) };
        let disk = LiveDisk::open(host.clone(), image, &options).await?;
        let format = disk.layers().first().map(|layer| layer.format());
        if format == Some(ImageFormat::Raw) && args.format.is_none() && !args.read_only {
            return Err(Failure::new(format_args!(
                "'{}' was detected as raw. A guest that can write to a raw image can make it look \
                 like another format at the next start; use --format raw to confirm that it is raw",
                image.display()
            )));
        }
        disks.push(disk);
    }
    Ok(disks)
}

/// The options for opening images, without the trust in them.
fn options(args: &Args) -> OpenOptions {
    OpenOptions {
        writable: !args.read_only,
        direct: args.cache == Cache::None,
        format: args.format,
        metadata: args.metadata,
        zones: args.zones,
        zone_size: args.zone_size,
        map_cache: args.map_cache.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
        ..OpenOptions::default()
    }
}

/// Which files the names in an image may refer to.
fn trust(args: &Args, image: &Path) -> Result<Trust, Failure> {
    if !args.untrusted {
        return Ok(Trust::Full);
    }
    let own = [match image.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    }];
    let directories = if args.backing_dir.is_empty() { &own[..] } else { &args.backing_dir };
    let canonical = |directory: &PathBuf| {
        fs::canonicalize(directory)
            .map_err(|error| Failure::new(error).context(format_args!("'{}'", directory.display())))
    };
    Ok(Trust::Within(directories.iter().map(canonical).collect::<Result<_, _>>()?))
}

/// Serves the disks until a signal arrives, or until no client can reach them any more.
async fn serve<H: Host + Clone>(
    host: H,
    args: &Args,
    names: Vec<String>,
    disks: &[Arc<LiveDisk<H>>],
    mut signals: Signals,
    out: &mut dyn Write,
    daemon: Option<Daemon>,
) -> Result<(), Failure> {
    let listeners =
        if args.frontends.any() { control_listeners(&args.nbd)? } else { listen(&args.nbd)? };
    let server = nbd_server(&names, disks)?;
    let controls = control_listeners(&args.qmp)?;
    let scraped = control_listeners(&args.metrics)?;
    let workers = start_workers(args.threads)?;
    let handles: Vec<Handle> = workers.iter().map(|worker| worker.handle().clone()).collect();

    let drives = names.into_iter().zip(disks).map(|(name, disk)| Drive::new(name, disk.clone()));
    let events = Events::default();
    let trust = args.images.first().map_or(Ok(Trust::Full), |image| trust(args, image))?;
    let opening = OpenOptions { format: None, writable: true, trust, ..options(args) };
    let exported = (!listeners.is_empty()).then(|| server.clone());
    let monitor =
        Monitor::new(host, opening, drives.collect(), exported, handles.clone(), events.clone());
    let control = qmp::Server::new(monitor, events, qmp::Limits::default());
    let monitor = control.service();
    let frontends = match args.frontends.open(monitor, &monitor.drives()) {
        Ok(frontends) => frontends,
        Err(failure) => {
            monitor.end().await;
            return Err(failure);
        }
    };

    let addresses: Vec<_> = listeners.iter().map(|listener| listener.address().clone()).collect();
    // Clients are served even if the announcement cannot be printed.
    if let Err(error) = announce(out, &monitor.drives(), &addresses, &frontends) {
        tracing::warn!(%error, "cannot print the exports' addresses");
    }
    let pid_file = args.pid_file.as_deref().map(create_pid_file).transpose()?;
    if let Some(daemon) = daemon {
        daemon.ready().map_err(|error| Failure::new(error).context("/dev/null"))?;
    }
    notify(&[sd_notify::NotifyState::Ready]);

    let others = !controls.is_empty() || !listeners.is_empty();
    let controlling = start_control(&control, controls);
    for listener in scraped {
        let control = control.clone();
        spawn(async move {
            if let Err(error) = metrics::serve(listener, control).await {
                tracing::error!(%error, "metrics are no longer served");
            }
        });
    }

    let (stopping, ending) = (server.clone(), control.clone());
    let told = spawn(async move {
        let quit = ending.service().quit_requested();
        let signal = either(wait_for_signal(&mut signals), quit).await;
        let stopped = Instant::now();
        tracing::info!("stopping");
        notify(&[sd_notify::NotifyState::Stopping]);
        spawn(async move {
            loop {
                let another = wait_for_signal(&mut signals).await;
                if !is_repeat(signal, another, stopped.elapsed()) {
                    break;
                }
                tracing::info!("the same signal was repeated, ignored");
            }
            tracing::warn!("second signal received, exiting at once");
            messages::settle();
            process::exit(1);
        });
        ending.service().end().await;
        stopping.stop();
        ending.stop();
    });
    for disk in disks {
        let disk = disk.clone();
        spawn(async move {
            if let Err(error) = disk.upkeep().await {
                tracing::warn!(%error, "background upkeep ended");
            }
        });
    }
    let mut listening = Vec::new();
    for listener in listeners {
        let (server, handles) = (server.clone(), handles.clone());
        listening.push(spawn(async move {
            let result = server.serve(listener, &handles).await;
            if result.is_err() {
                server.stop();
            }
            result
        }));
    }
    if listening.is_empty() {
        let told = async { drop(told.await) };
        let closed = async {
            if others {
                future::pending::<()>().await;
            }
            monitor.frontends_closed().await;
        };
        either(told, closed).await;
    }
    let mut result = Ok(());
    for ended in listening {
        match ended.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => result = Err(Failure::new(error).context("a listener failed")),
            Err(panicked) => panicked.resume(),
        }
    }
    control.stop();
    for ended in controlling {
        if let Err(panicked) = ended.await {
            panicked.resume();
        }
    }
    drop(workers);
    drop(pid_file);
    result
}

/// Creates an NBD server with an export for each disk.
fn nbd_server<H: Host>(
    names: &[String],
    disks: &[Arc<LiveDisk<H>>],
) -> Result<Arc<Server<LiveDisk<H>>>, Failure> {
    let exports = names.iter().zip(disks).map(|(name, disk)| Export {
        name: name.clone(),
        description: String::new(),
        read_only: false,
        device: disk.clone(),
    });
    let server = Server::new(exports.collect(), Limits::default());
    Ok(Arc::new(server.map_err(Failure::new)?))
}

/// Flushes and closes every disk, even if one fails, and logs its map's counters and the number of syncs.
async fn close<H: Host>(disks: &[Arc<LiveDisk<H>>]) -> Result<(), Failure> {
    let mut result = Ok(());
    for disk in disks {
        if let Err(error) = disk.close().await {
            if let Err(Failure { message: Some(message), .. }) = &result {
                tracing::error!("{message}");
            }
            result = Err(error.into());
        }
        let map = disk.map_stats();
        tracing::info!(
            hits = map.hits,
            unallocated_hits = map.unallocated_hits,
            misses = map.misses,
            bytes = map.bytes,
            lookup_median_ns = map.lookup_median_ns,
            lookup_p99_ns = map.lookup_p99_ns,
            "the map's counters"
        );
    }
    tracing::info!(syncs = file::syncs(), "fdatasyncs of all images");
    result
}

/// Binds every endpoint.
fn listen(endpoints: &[Endpoint]) -> Result<Vec<Listener>, Failure> {
    let default = [Endpoint::default()];
    let endpoints = if endpoints.is_empty() { &default } else { endpoints };
    let bind = |endpoint: &Endpoint| {
        let listener = bind(endpoint, "--nbd")?;
        if is_public(listener.address()) {
            tracing::warn!(
                "{endpoint} may be reachable from other machines, without authentication or \
                 encryption"
            );
        }
        Ok(listener)
    };
    endpoints.iter().map(bind).collect()
}

/// Binds the endpoint of an option.
fn bind(endpoint: &Endpoint, option: &str) -> Result<Listener, Failure> {
    bind_soon(endpoint).map_err(|error| {
        let hint = if error.kind() == io::ErrorKind::AddrInUse {
            format!("; another program listens there already, choose another address with {option}")
        } else {
            String::new()
        };
        Failure::new(format_args!("cannot listen on {endpoint}: {error}{hint}"))
    })
}

/// Binds an endpoint, and retries while a killed server still holds it: the kernel closes its sockets a moment after
/// the process is gone.
fn bind_soon(endpoint: &Endpoint) -> io::Result<Listener> {
    let until = Instant::now() + BIND_PATIENCE;
    loop {
        match endpoint.bind() {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < until => {
                thread::sleep(Duration::from_millis(10));
            }
            result => return result,
        }
    }
}

/// Starts the threads for clients; a single extra one would gain nothing over this thread.
fn start_workers(wanted: Option<NonZeroUsize>) -> Result<Vec<Worker>, Failure> {
    let count = wanted.map_or_else(
        || thread::available_parallelism().map_or(1, NonZeroUsize::get).min(THREADS),
        NonZeroUsize::get,
    );
    let numbers = if count == 1 { 0..0 } else { 0..count };
    let start = |number| Worker::start(&format!("worker-{number}"), &Config::default());
    let workers = numbers.map(start).collect::<io::Result<_>>();
    workers.map_err(|error| Failure::new(error).context("cannot start a thread"))
}

fn announce<H: Host>(
    out: &mut dyn Write,
    drives: &[Rc<Drive<H>>],
    addresses: &[Address],
    frontends: &[(usize, Frontend)],
) -> io::Result<()> {
    for (number, drive) in drives.iter().enumerate() {
        let disk = drive.disk();
        let announcement = Announcement {
            name: drive.device(),
            number,
            size: disk.size(),
            layers: disk.depth(),
            read_only: disk.is_read_only(),
        };
        let own =
            frontends.iter().filter(|(of, _)| *of == number).map(|(_, frontend)| frontend.clone());
        let own: Vec<_> = own.collect();
        out.write_all(announcement.text(addresses, &own).as_bytes())?;
    }
    out.flush()
}

fn create_pid_file(path: &Path) -> Result<PidFile, Failure> {
    PidFile::create(path).map_err(|error| {
        let reason = if error.kind() == io::ErrorKind::ResourceBusy {
            "another process has locked it".to_owned()
        } else {
            error.to_string()
        };
        Failure::new(format_args!("cannot write the pid file '{}': {reason}", path.display()))
    })
}

/// Notifies a service manager that waits for it.
fn notify(state: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

/// Waits for a signal; forever if none can be received.
async fn wait_for_signal(signals: &mut Signals) -> i32 {
    match signals.recv().await {
        Ok(signal) => signal,
        Err(error) => {
            tracing::error!(%error, "cannot receive signals");
            future::pending().await
        }
    }
}

/// Whether a signal this long after the one that stops the server counts as the same one: `timeout` and others signal
/// both the process and its group.
fn is_repeat(first: Option<i32>, another: i32, after: Duration) -> bool {
    first == Some(another) && after < REPEATED
}

/// Binds the control sockets.
fn control_listeners(endpoints: &[Endpoint]) -> Result<Vec<Listener>, Failure> {
    let listeners = if endpoints.is_empty() { Vec::new() } else { listen(endpoints)? };
    Ok(listeners)
}

/// Serves the control sockets, and forwards the jobs' events.
fn start_control<H: Host + Clone>(
    control: &Rc<qmp::Server<Monitor<H>>>,
    listeners: Vec<Listener>,
) -> Vec<JoinHandle<()>> {
    let watching = control.clone();
    spawn(async move { watching.service().watch().await });
    let serve = |listener| {
        let control = control.clone();
        spawn(async move {
            if let Err(error) = control.serve(listener).await {
                tracing::error!(%error, "a control socket failed");
            }
        })
    };
    listeners.into_iter().map(serve).collect()
}

/// Waits for whichever ends first; the output if that is `one`.
async fn either<T>(one: impl Future<Output = T>, other: impl Future<Output = ()>) -> Option<T> {
    let (mut one, mut other) = (pin!(one), pin!(other));
    future::poll_fn(|context| match one.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => other.as_mut().poll(context).map(|()| None),
    })
    .await
}

/// The output of `work`, unless a signal arrives before.
async fn unless_signalled<F: Future>(signals: &mut Signals, work: F) -> Option<F::Output> {
    let work = pin!(work);
    either(work, async {
        let _ = wait_for_signal(signals).await;
    })
    .await
}

/// A name for each image: the names given, then the file names, numbered where they are equal.
fn export_names(images: &[PathBuf], given: &[String]) -> Result<Vec<String>, Failure> {
    if given.len() > images.len() {
        return Err(Failure::new(format_args!(
            "{} export names are given for {} images; give --export-name at most once per image",
            given.len(),
            images.len()
        )));
    }
    let mut names = given.to_vec();
    for image in images.iter().skip(given.len()) {
        let stem = image.file_stem().map_or_else(|| "disk".into(), |stem| stem.to_string_lossy());
        let mut name = stem.clone().into_owned();
        let mut number = 2;
        while names.contains(&name) {
            name = format!("{stem}-{number}");
            number += 1;
        }
        names.push(name);
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_export_has_a_name_of_its_own() {
        let images = ["a/x.qcow2", "b/x.qcow2", "x-2", "y.img"].map(PathBuf::from);
        assert_eq!(export_names(&images, &[]).unwrap(), ["x", "x-2", "x-2-2", "y"]);
        let given = ["y".to_owned(), "z".to_owned()];
        assert_eq!(export_names(&images, &given).unwrap(), ["y", "z", "x-2", "y-2"]);
        assert!(export_names(&images[..1], &given).is_err());
    }

    #[test]
    fn the_same_signal_in_a_moment_is_no_second_one() {
        let term = Some(libc::SIGTERM);
        assert!(is_repeat(term, libc::SIGTERM, Duration::ZERO));
        assert!(is_repeat(term, libc::SIGTERM, Duration::from_millis(999)));
        assert!(!is_repeat(term, libc::SIGTERM, Duration::from_secs(1)));
        assert!(!is_repeat(term, libc::SIGINT, Duration::ZERO));
        assert!(!is_repeat(None, libc::SIGTERM, Duration::ZERO));
    }
}
