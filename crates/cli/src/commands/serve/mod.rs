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

/// The most threads unless more are asked for.
const THREADS: usize = 8;
/// How long an address may be in use before that is an error.
const BIND_PATIENCE: Duration = Duration::from_millis(500);
/// For how long a repeated signal is the same order.
const REPEATED: Duration = Duration::from_secs(1);
/// What ends the server.
const SIGNALS: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Serve images to virtual machines and other clients: over NBD, by vhost-user-blk, as files
///
/// Once clients can connect, prints each export's address and options for QEMU that use it. Then
/// writes only to its log, on stderr. SIGTERM, SIGINT or SIGHUP ends it: requests under way are
/// finished and answered, the images flushed and closed. A second signal ends it at once, as a crash
/// would: nothing flushed is lost. The same signal within a second is no second one.
///
/// There is neither authentication nor encryption: whoever can connect can read, and unless
/// --read-only is given write, the disk. Give a unix socket's directory the permissions that clients
/// need.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where to listen for NBD, may be given several times: a socket file, or a TCP port, on the loopback
    /// interface unless a HOST is named [default: 127.0.0.1:10809, unless another frontend is asked for]
    #[arg(long, value_name = "unix:PATH|[HOST:]PORT")]
    nbd: Vec<Endpoint>,
    #[command(flatten)]
    frontends: FrontendArgs,
    /// Where programs and 'isobath ctl' control the disks in QEMU's language, QMP; may be given several
    /// times. A TCP port without a HOST is on the loopback interface
    #[arg(long, value_name = "unix:PATH|HOST:PORT")]
    qmp: Vec<Endpoint>,
    /// Where Prometheus gets figures, over HTTP at /metrics; may be given several times. A port without a
    /// HOST is on the loopback interface
    #[arg(long, value_name = "[HOST:]PORT|unix:PATH")]
    metrics: Vec<Endpoint>,
    /// The export's name; with several images, may be given for each in turn [default: the image's
    /// file name without its extension]. The first export is also found by the empty name
    #[arg(long, value_name = "NAME")]
    export_name: Vec<String>,
    /// Refuse writes, and let other programs read the images meanwhile
    #[arg(short, long)]
    read_only: bool,
    /// How the host caches the images and their backing files
    #[arg(long, value_name = "MODE", default_value = "writeback")]
    cache: Cache,
    /// How changes of metadata reach an image: 'journal' makes one sync for each flush, and keeps other
    /// programs out of an image that was not closed ('isobath seal' recovers it); 'embedded' does, and
    /// writes nothing but the data where that compresses a little; 'ordered' makes two, and leaves the
    /// image usable by all; 'auto' takes a journal for who flushes
    #[arg(long, value_name = "MODE", default_value = "auto", value_parser = metadata)]
    metadata: MetadataMode,
    /// With 'embedded': the most zones in use, each of --zone-size; closing and recovering an image take
    /// time for each of them [default: 8]
    #[arg(long, value_name = "N")]
    zones: Option<u32>,
    /// With 'embedded': bytes of a zone, such as 16M [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    zone_size: Option<u64>,
    /// Memory for each disk's map, such as 64M [default: what the disk needs, at most 132M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    map_cache: Option<u64>,
    /// The images' format; found out unless given. A raw image that is written needs it
    #[arg(short, long, value_name = "FMT", value_parser = options::format)]
    format: Option<ImageFormat>,
    /// The images may come from strangers: open only files in --backing-dir that they name, and
    /// trust no guess at a backing file's format
    #[arg(long)]
    untrusted: bool,
    /// A directory whose files an untrusted image may name, may be given several times [default:
    /// the image's own]
    #[arg(long, value_name = "DIR", requires = "untrusted")]
    backing_dir: Vec<PathBuf>,
    /// Threads that serve clients, each client on one of them [default: one per CPU, at most 8]
    #[arg(long, value_name = "N")]
    threads: Option<NonZeroUsize>,
    /// Write the process's number to this file, once clients can connect
    #[arg(long, value_name = "FILE")]
    pid_file: Option<PathBuf>,
    /// Go into the background; the command returns once clients can connect. There is no log then
    #[arg(long)]
    daemonize: bool,
    /// Let all images lie on one slow disk, as far as time goes, to try things out: bytes per second,
    /// microseconds of latency, requests at a time, microseconds of a flush; or 'hdd' or 'ssd'
    #[cfg(feature = "slow-disk")]
    #[arg(long, hide = true, value_name = "hdd|ssd|BANDWIDTH,LATENCY,DEPTH,FLUSH", value_parser = slow::parse)]
    slow_disk: Option<SlowDisk>,
    /// The images, each an export
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<PathBuf>,
}

fn metadata(name: &str) -> Result<MetadataMode, String> {
    MetadataMode::from_name(name).ok_or_else(|| {
        let modes = MetadataMode::ALL.map(MetadataMode::name).join(", ");
        format!("there is no mode '{name}', but {modes}")
    })
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let names = export_names(&args.images, &args.export_name)?;
    args.frontends.check(args.images.len())?;
    let daemon = match args.daemonize.then(Daemon::start) {
        None => None,
        Some(Ok(daemon)) => Some(daemon),
        Some(Err(error)) => return Err(Failure::new(error).context("cannot start a daemon")),
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
        .map_err(|error| Failure::new(error).context("cannot receive signals"))?;
    let disks = match unless_signalled(&mut signals, open(&host, args)).await {
        Some(disks) => disks?,
        None => return Err(Failure::new("stopped by a signal before it was ready")),
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
                "'{}' is taken for a raw image, and a guest that may write to a raw image can make \
                 it look like another format at the next start; say what it is with --format raw",
                image.display()
            )));
        }
        disks.push(disk);
    }
    Ok(disks)
}

/// How images are opened, but for whom they come from.
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

/// How far the names in an image are believed.
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

/// Serves the disks until a signal arrives, or nobody can reach them any more.
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
    // Whatever happens to a reader of the announcement, the disks are there for the others.
    if let Err(error) = announce(out, &monitor.drives(), &addresses, &frontends) {
        tracing::warn!(%error, "the exports' addresses could not be printed");
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
                tracing::error!(%error, "figures are no longer given");
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
                tracing::info!("the same signal again, taken for one");
            }
            tracing::warn!("a second signal: ending at once");
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
                tracing::warn!(%error, "upkeep ended");
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

/// An NBD server with an export for each disk.
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

/// Flushes and closes every disk, also when one fails, and logs what its map did and how often the host
/// had to sync.
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
                "{endpoint} may be reached from other machines, without authentication or encryption"
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
            format!("; somebody listens there already, choose another with {option}")
        } else {
            String::new()
        };
        Failure::new(format_args!("cannot listen on {endpoint}: {error}{hint}"))
    })
}

/// Binds an endpoint; also one that a killed server still holds, whose sockets the kernel closes only a
/// moment after the process is gone.
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

/// Starts the threads for clients; a single one would gain nothing over this thread.
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
            "another process holds it".to_owned()
        } else {
            error.to_string()
        };
        Failure::new(format_args!("cannot write the pid file '{}': {reason}", path.display()))
    })
}

/// Tells a service manager that waits to be told.
fn notify(state: &[sd_notify::NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        tracing::warn!(%error, "the service manager could not be told");
    }
}

/// Waits for a signal; for ever where none can be received.
async fn wait_for_signal(signals: &mut Signals) -> i32 {
    match signals.recv().await {
        Ok(signal) => signal,
        Err(error) => {
            tracing::error!(%error, "signals cannot be received");
            future::pending().await
        }
    }
}

/// Whether a signal, so long after the one that stops the server, is the same order: `timeout` and others
/// send theirs to the process and to its group.
fn is_repeat(first: Option<i32>, another: i32, after: Duration) -> bool {
    first == Some(another) && after < REPEATED
}

/// Binds the control sockets.
fn control_listeners(endpoints: &[Endpoint]) -> Result<Vec<Listener>, Failure> {
    let listeners = if endpoints.is_empty() { Vec::new() } else { listen(endpoints)? };
    Ok(listeners)
}

/// Serves the control sockets, and passes on what jobs tell.
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

/// A name for each image: those given, then the files', told apart by numbers where they are equal.
fn export_names(images: &[PathBuf], given: &[String]) -> Result<Vec<String>, Failure> {
    if given.len() > images.len() {
        return Err(Failure::new(format_args!(
            "there are {} export names for {} images",
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
