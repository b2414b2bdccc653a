//! `qemu-nbd`: serves one image over NBD, or as a device of the kernel, with that program's command line.

mod device;
mod list;
mod netlink;
mod view;

use crate::cache::{CacheMode, Discard, is_native};
use crate::compressed::Compressed;
use crate::failure::{Failure, Outcome};
use crate::host::{self, ImageHost, images};
use crate::image_name::{Image, NO_SNAPSHOT, Naming, reason};
use crate::options::NamedFormat;
use crate::server::daemon::{Daemon, WhenReady};
use crate::server::endpoint::{Endpoint, PORT};
use crate::server::handed_in::{self, HandedIn};
use crate::server::tls::{Mode, SecuredEndpoint, Tls};
use crate::server::{io_flusher, log_file, pid_file, signals, threads};
use crate::{cores, messages, options, runtime, size, temporary, tls_objects};
use device::Connected;
use isobath_disk::clock::SystemClock;
use isobath_disk::{
    BlockDevice, ImageFormat, InfoOptions, LiveDisk, MetadataMode, OpenOptions, SnapshotChoice,
    info, read_bitmap,
};
use isobath_export::frontend::Entrance;
use isobath_export::nbd::wire::MAX_STRING;
use isobath_export::nbd::{
    Export, ExportError, ExportedBitmap, Limits, Server, SessionError, WhenFull,
};
use isobath_ring::net::{Access, Stream};
use isobath_ring::{Handle, handle, spawn, unblock};
use isobath_storage::Locking;
use isobath_tls::Channel;
use netlink::Connection;
use std::io::Write;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use view::{DetectZeroes, View};

/// Longer than any server runs.
const NO_LIMIT: Duration = Duration::from_secs(u32::MAX as u64);

/// Bytes to which the kernel's requests are aligned, as with QEMU.
const BLOCK: u64 = 512;

/// Serve an image over NBD, with qemu-nbd's options
///
/// Exits when the last client that used the image disconnects, unless --persistent is given, or when a signal arrives.
/// Without --tls-creds connections are neither authenticated nor encrypted: without --socket or --bind, anyone who can
/// reach this host can connect. 'isobath serve' has more features.
#[derive(clap::Args)]
#[allow(clippy::doc_markdown)]
pub(crate) struct Args {
    /// List the exports of the server at the address instead
    #[arg(short = 'L', long)]
    list: bool,
    /// The address to listen on, or to connect to
    #[arg(short, long, value_name = "IFACE")]
    bind: Option<String>,
    /// The TCP port to listen on, or to connect to [default: 10809]
    #[arg(short, long, value_name = "PORT")]
    port: Option<u16>,
    /// The socket file to listen on, or to connect to
    #[arg(short = 'k', long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// Maximum number of clients at a time, 0 for no limit; others wait
    #[arg(short = 'e', long, value_name = "NUM", default_value = "1", value_parser = shared)]
    shared: usize,
    /// Continue when the last client disconnects
    #[arg(short = 't', long)]
    persistent: bool,
    /// The export's name
    #[arg(short = 'x', long, value_name = "NAME", default_value = "")]
    export_name: String,
    /// The export's description
    #[arg(short = 'D', long, value_name = "TEXT", default_value = "")]
    description: String,
    /// Connect the image to the kernel's NBD device, such as /dev/nbd0, and run in the background until it is
    /// disconnected; other clients can connect only with --socket
    #[arg(short, long, value_name = "DEV")]
    connect: Option<PathBuf>,
    /// Disconnect the kernel's NBD device that is named instead of an image
    #[arg(short, long)]
    disconnect: bool,
    /// Run in the background; the command returns once clients can connect
    #[arg(long)]
    fork: bool,
    /// Write the process ID to this file once clients can connect
    #[arg(long, value_name = "PATH")]
    pid_file: Option<PathBuf>,
    /// Serve the image from this byte offset on
    #[arg(short, long, value_name = "OFFSET", value_parser = size::parse, default_value = "0")]
    offset: u64,
    /// The image's format [default: detected]. Required for raw images unless they are served read-only
    #[arg(short, long, value_name = "FORMAT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// Refuse writes
    #[arg(short, long)]
    read_only: bool,
    /// Write to a temporary file instead of the image
    #[arg(short, long)]
    snapshot: bool,
    /// Serve an internal snapshot, by ID or name or as snapshot.id=ID,snapshot.name=NAME; read-only
    #[arg(short, long, value_name = "SNAPSHOT", value_parser = options::snapshot)]
    load_snapshot: Option<SnapshotChoice>,
    /// Same as --cache=none
    #[arg(short, long, conflicts_with = "cache")]
    nocache: bool,
    /// Cache mode: none, writeback, writethrough, directsync or unsafe
    #[arg(long, value_name = "MODE", default_value = "writeback", value_parser = CacheMode::parse)]
    cache: CacheMode,
    /// Asynchronous I/O mode; accepted for compatibility, makes no difference
    #[arg(long, value_name = "MODE", value_parser = is_native)]
    aio: Option<bool>,
    /// Whether discards reach the image: ignore or unmap
    #[arg(long, value_name = "MODE", default_value = "ignore", value_parser = Discard::parse)]
    discard: Discard,
    /// Whether writes of zeroes are detected, and their space released: off, on or unmap
    #[arg(long, value_name = "MODE", default_value = "off", value_parser = DetectZeroes::parse)]
    detect_zeroes: DetectZeroes,
    /// Offer the metadata context qemu:allocation-depth: which layer of the chain has the data
    #[arg(short = 'A', long)]
    allocation_depth: bool,
    /// Offer a persistent bitmap of the image or of a backing file as the metadata context qemu:dirty-bitmap:NAME; can
    /// be repeated
    #[arg(short = 'B', long, value_name = "NAME")]
    bitmap: Vec<String>,
    /// Encrypt the connections by TLS, with the credentials of the object with this ID
    #[arg(long, value_name = "ID")]
    tls_creds: Option<String>,
    /// Admit only clients whose certificate has the name in the object authz-simple with this ID
    #[arg(long, value_name = "ID")]
    tls_authz: Option<String>,
    /// With --list: the name that the server's certificate is for [default: the host]
    #[arg(long, value_name = "NAME", requires = "list")]
    tls_hostname: Option<String>,
    /// Seconds that a client's handshake may take, 0 for no limit
    #[arg(long, value_name = "SECONDS", default_value = "10")]
    handshake_limit: u32,
    /// With --connect: stay in the foreground
    #[arg(short, long)]
    verbose: bool,
    /// Accepted for compatibility; has no effect
    #[arg(short = 'T', long, value_name = "OPTIONS")]
    trace: Vec<String>,
    #[command(flatten)]
    naming: Naming,
    #[command(flatten)]
    refused: Refused,
    /// The image
    image: Option<PathBuf>,
}

/// Options of qemu-nbd that are not supported.
#[derive(clap::Args)]
struct Refused {
    /// Not supported: a label for the socket
    #[arg(long, value_name = "LABEL", hide = true)]
    selinux_label: Option<String>,
}

impl Refused {
    fn check(&self) -> Result<(), Failure> {
        match self.selinux_label {
            Some(_) => Err(Failure::new("--selinux-label is not supported")),
            None => Ok(()),
        }
    }
}

/// Parses the number of clients, which may follow blanks as in QEMU.
fn shared(text: &str) -> Result<usize, std::num::ParseIntError> {
    text.trim_start().parse()
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    args.refused.check()?;
    let endpoint = args.endpoint()?;
    if args.list {
        if args.image.is_some() {
            return Err(Failure::usage("List mode is incompatible with a file name"));
        }
        if args.connect.is_some() || args.disconnect {
            return Err(Failure::new("List mode is incompatible with per-device settings"));
        }
        list::print(&endpoint, args.channel(&endpoint)?, out)?;
        return Ok(0);
    }
    let Some(name) = &args.image else {
        return Err(Failure::usage("Invalid number of arguments"));
    };
    if args.connect.is_some() && args.tls_creds.is_some() {
        return Err(Failure::new("TLS is not supported with a host device"));
    }
    let (mode, tls) = args.tls()?;
    if args.disconnect {
        device::disconnect(name)?;
        writeln!(out, "{} disconnected", name.display())?;
        return Ok(0);
    }
    let endpoint = SecuredEndpoint { mode: Some(mode), ..endpoint.into() };
    let image = args.naming.parse(name, args.format).map_err(|reason| args.cannot_open(reason))?;
    args.check()?;
    let log = log_file::of_environment()?;
    let daemon = match args.forks().then(Daemon::start) {
        None => None,
        Some(Ok(daemon)) => Some(daemon),
        Some(Err(error)) => {
            return Err(Failure::new(error).context("Failed to fork"));
        }
    };
    messages::detach();
    cores::withhold();
    host::map_reads(None);
    host::write_at_once();
    if args.connect.is_some() {
        io_flusher::become_one();
    }
    let ready = WhenReady { daemon, log };
    runtime::block_on(async || Box::pin(args.serve(&image, &endpoint, &tls, ready)).await)?;
    Ok(0)
}

impl Args {
    /// Whether it goes to the background.
    fn forks(&self) -> bool {
        self.fork || self.connect.is_some() && !self.verbose
    }

    /// Whether clients can connect, besides the kernel.
    fn listens(&self) -> bool {
        self.connect.is_none() || self.socket.is_some()
    }

    /// The only socket that a service manager has handed in, if it has, in qemu-nbd's words.
    fn handed_in(&self) -> Result<Option<Endpoint>, Failure> {
        let count = handed_in::count();
        if count == 0 {
            return Ok(None);
        }
        let refused = [
            (self.connect.is_some(), "NBD device can't be set when using socket activation"),
            (self.socket.is_some(), "Unix socket can't be set when using socket activation"),
            (self.bind.is_some(), "The interface can't be set when using socket activation"),
            (self.port.is_some(), "TCP port number can't be set when using socket activation"),
            (self.list, "List mode is incompatible with socket activation"),
            (count > 1, "qemu-nbd does not support socket activation with LISTEN_FDS > 1"),
        ];
        match refused.into_iter().find(|(given, _)| *given) {
            Some((_, message)) => Err(Failure::new(message)),
            None => Ok(Some(Endpoint::HandedIn(HandedIn::Number(handed_in::FIRST)))),
        }
    }

    fn endpoint(&self) -> Result<Endpoint, Failure> {
        if let Some(endpoint) = self.handed_in()? {
            return Ok(endpoint);
        }
        match &self.socket {
            Some(_) if self.bind.is_some() || self.port.is_some() => {
                Err(Failure::new("Cannot use both a socket file and a TCP address"))
            }
            Some(path) if !path.is_absolute() => Err(Failure::new("socket path must be absolute")),
            Some(path) => Ok(Endpoint::Unix(path.clone())),
            None => {
                let any = if self.list { "localhost" } else { "0.0.0.0" };
                let host = self.bind.clone().unwrap_or_else(|| any.into());
                Ok(Endpoint::Tcp { host, port: self.port.unwrap_or(PORT) })
            }
        }
    }

    /// The client's side of an encrypted connection to the server at `endpoint`, if there is to be one.
    fn channel(&self, endpoint: &Endpoint) -> Result<Option<Channel>, Failure> {
        if self.tls_authz.is_some() {
            return Err(Failure::new("TLS authorization is incompatible with export list"));
        }
        let Some(id) = &self.tls_creds else {
            return match self.tls_hostname {
                Some(_) => Err(Failure::new("--tls-hostname needs --tls-creds")),
                None => Ok(None),
            };
        };
        tls_objects::define(self.naming.objects.tls());
        let credentials = tls_objects::client(id).map_err(Failure::new)?;
        let host = match (self.tls_hostname.as_deref(), endpoint) {
            (Some(host), _) => host,
            (None, Endpoint::Tcp { host, .. }) => host,
            (None, Endpoint::Unix(_) | Endpoint::HandedIn(_)) => {
                return Err(Failure::new(
                    "a socket file has no host name; give the name in the server's certificate by \
                     --tls-hostname",
                ));
            }
        };
        credentials.channel(host).map(Some).map_err(Failure::new)
    }

    /// The encryption of the connections.
    fn tls(&self) -> Result<(Mode, Tls), Failure> {
        let objects = self.naming.objects.tls();
        Tls::of_objects(&objects, self.tls_creds.as_deref(), self.tls_authz.as_deref())
    }

    fn cache(&self) -> CacheMode {
        if self.nocache { CacheMode::None } else { self.cache }
    }

    fn check(&self) -> Result<(), Failure> {
        if self.detect_zeroes == DetectZeroes::Unmap && self.discard == Discard::Ignore {
            return Err(Failure::new(
                "setting detect-zeroes to unmap is not allowed without setting discard operation \
                 to unmap",
            ));
        }
        if self.aio == Some(true) && !self.cache().is_direct() {
            return Err(self.cannot_open(
                "aio=native was specified, but it requires cache.direct=on, which was not \
                 specified.",
            ));
        }
        for (field, text) in [("name", &self.export_name), ("description", &self.description)] {
            if text.len() > MAX_STRING {
                let error = ExportError::TooLong { field, length: text.len() };
                return Err(Failure::new(error));
            }
        }
        Ok(())
    }

    /// Whether writes are refused.
    fn is_read_only(&self) -> bool {
        self.read_only || self.load_snapshot.is_some()
    }

    /// Whether writes go to a temporary overlay.
    fn is_overlaid(&self) -> bool {
        self.snapshot && !self.is_read_only()
    }

    fn cannot_open(&self, reason: impl std::fmt::Display) -> Failure {
        let name = self.image.as_ref().map(|name| options::printable(&name.to_string_lossy()));
        let name = name.unwrap_or_default();
        Failure::new(format_args!("Failed to blk_new_open '{name}': {reason}"))
    }

    async fn open(&self, image: &Image) -> Result<Arc<LiveDisk<ImageHost>>, Failure> {
        let direct = self.cache().is_direct();
        let overlaid = self.is_overlaid();
        let options = if self.is_read_only() || overlaid {
            image.options(direct, Locking::Exclusive)
        } else {
            image.writable(direct)?
        };
        let options = options.snapshot(self.load_snapshot.clone()).metadata(MetadataMode::Ordered);
        let live = LiveDisk::open(images().clone(), &image.path, &options).await;
        let live = live.map_err(|error| {
            let reason = reason(&error);
            if reason == NO_SNAPSHOT {
                return Failure::new(format_args!("Failed to load snapshot: {reason}"));
            }
            self.cannot_open(if reason.starts_with("Could not open") {
                reason
            } else {
                format!("Could not open '{}': {reason}", image.path.display())
            })
        })?;
        let format = live.layers().first().map_or(ImageFormat::Raw, |layer| layer.format());
        if format == ImageFormat::Raw && image.format.is_none() && !live.is_read_only() {
            live.close().await?;
            return Err(Failure::new(format_args!(
                "'{}' was detected as raw. A guest that can write to a raw image can make it look \
                 like another format at the next start; use -f raw to confirm that it is raw",
                image.path.display()
            )));
        }
        if !overlaid {
            return Ok(live);
        }
        let size = live.size();
        live.close().await?;
        let (disk, options) =
            temporary::overlay(image, format, size, direct, Locking::Exclusive).await?;
        // It has kept writers out until now, so the overlay matches the image.
        drop(live);
        Ok(LiveDisk::new(disk, &options, Arc::new(SystemClock::default())))
    }

    /// The bitmaps to offer, each from the highest layer that has a bitmap of that name.
    async fn bitmaps(&self, disk: &LiveDisk<ImageHost>) -> Result<Vec<ExportedBitmap>, Failure> {
        let mut bitmaps = Vec::new();
        let layers = disk.layers();
        // The temporary overlay's file no longer has a name.
        let named = || layers.iter().skip(usize::from(self.is_overlaid()));
        let trust = self.naming.trusting.trust()?;
        let is_below = |layer| named().next().is_none_or(|first| !Arc::ptr_eq(first, layer));
        // In qemu-nbd's order.
        for name in self.bitmap.iter().rev() {
            let mut found = None;
            for layer in named().filter(|layer| layer.format() == ImageFormat::Qcow2) {
                let look = InfoOptions {
                    locking: Locking::Unlocked,
                    trust: trust.clone(),
                    named: is_below(layer),
                    ..InfoOptions::default()
                };
                let info = info(images(), layer.name(), &look).await?.qcow2;
                let bitmap =
                    info.and_then(|info| info.bitmaps.into_iter().find(|one| one.name == *name));
                if let Some(bitmap) = bitmap {
                    found = Some((layer, bitmap));
                    break;
                }
            }
            let Some((layer, bitmap)) = found else {
                return Err(Failure::new(format_args!("Bitmap '{name}' is not found")));
            };
            let is_active = layers.first().is_some_and(|active| Arc::ptr_eq(active, layer));
            if bitmap.auto && is_active && !disk.is_read_only() {
                return Err(Failure::new(format_args!(
                    "Bitmap '{name}' is enabled, and would become stale when clients write to the \
                     disk; use --read-only, or disable it with 'isobath bitmap --disable'"
                )));
            }
            let options = OpenOptions::new()
                .locking(Locking::Unlocked)
                .format(ImageFormat::Qcow2)
                .data_file(layer.given_data_file().map(Path::to_owned))
                .trust(trust.clone())
                .named(is_below(layer));
            let bits = read_bitmap(images(), layer.name(), &options, name).await;
            let bits = bits.map_err(|error| Failure::new(reason(&error)))?;
            let from = |at: u64| at.saturating_sub(self.offset);
            let ranges = bits.ranges().map(|range| from(range.start)..from(range.end));
            bitmaps.push(ExportedBitmap::new(name.clone(), ranges));
        }
        Ok(bitmaps)
    }

    /// Serves the image until it is no longer used, or a signal arrives.
    async fn serve(
        &self,
        image: &Image,
        endpoint: &SecuredEndpoint,
        tls: &Tls,
        ready: WhenReady,
    ) -> Result<(), Failure> {
        let mut image = image.clone();
        let compress = image.take_compress();
        let end = signals::Order::receive()?;
        let disk = match Box::pin(end.unless_given(self.open(&image))).await {
            Some(disk) => disk?,
            None => return Err(Failure::new("interrupted by a signal during startup")),
        };
        let layers = disk.layers();
        let active = layers.first().map(|layer| &**layer);
        let compressed = if compress { Compressed::of(active).map(Some) } else { Ok(None) };
        let served = match compressed {
            Ok(compressed) => self.serve_disk(&disk, compressed, endpoint, tls, ready, &end).await,
            Err(reason) => Err(self.cannot_open(reason)),
        };
        end.closes();
        let closed = disk.close().await.map_err(Failure::from);
        served.and(closed)
    }

    async fn serve_disk(
        &self,
        disk: &Arc<LiveDisk<ImageHost>>,
        compressed: Option<Compressed>,
        endpoint: &SecuredEndpoint,
        tls: &Tls,
        ready: WhenReady,
        end: &signals::Order,
    ) -> Result<(), Failure> {
        let size = BlockDevice::size(&**disk);
        if self.offset > size {
            return Err(Failure::new(format_args!(
                "Offset ({}) cannot be greater than size of the containing file ({size})",
                self.offset
            )));
        }
        let view = View {
            disk: Arc::clone(disk),
            offset: self.offset,
            size: size - self.offset,
            cache: self.cache(),
            compressed,
            discards: self.discard == Discard::Unmap,
            detect_zeroes: self.detect_zeroes,
        };
        let bitmaps = self.bitmaps(disk).await?;
        let export = Export {
            name: self.export_name.clone(),
            description: self.description.clone(),
            read_only: self.is_read_only(),
            allocation_depth: self.allocation_depth,
            bitmaps: bitmaps.into(),
            device: Arc::new(view),
        };
        let connections = if self.shared == 0 { usize::MAX } else { self.shared };
        let handshake = match self.handshake_limit {
            0 => NO_LIMIT,
            seconds => Duration::from_secs(seconds.into()),
        };
        let limits =
            Limits { connections, when_full: WhenFull::Wait, handshake, ..Limits::default() };
        let server = Arc::new(Server::new(vec![export], limits).map_err(Failure::new)?);
        let endpoints = if self.listens() { std::slice::from_ref(endpoint) } else { &[] };
        let mut entrances = tls.listen(endpoints, "--port", Access::default())?;
        let entrance = entrances.pop();
        let workers = threads::start(None)?;
        let handles: Vec<Handle> = workers.iter().map(|worker| worker.handle().clone()).collect();
        let pid_file = self.pid_file.as_deref().map(pid_file::create).transpose()?;
        let upkeep = Arc::clone(disk);
        spawn(async move {
            if let Err(error) = upkeep.upkeep().await {
                tracing::warn!(%error, "background upkeep ended");
            }
        });
        let served = match (&self.connect, entrance) {
            (Some(device), entrance) => {
                let kernel = Kernel { server: &server, entrance, handles: &handles };
                self.serve_kernel(device, kernel, ready, end).await
            }
            (None, Some(entrance)) => {
                self.serve_clients(&server, entrance, &handles, ready, end).await
            }
            (None, None) => Err(Failure::new("there is no address to listen on")),
        };
        drop(workers);
        drop(pid_file);
        served
    }

    /// Serves clients until no one uses the image any longer, or a signal arrives.
    async fn serve_clients(
        &self,
        server: &Arc<Server<View>>,
        entrance: Entrance,
        handles: &[Handle],
        ready: WhenReady,
        end: &signals::Order,
    ) -> Result<(), Failure> {
        ready.ready()?;
        let (stopped, end) = (Arc::clone(server), end.clone());
        spawn(async move {
            end.given().await;
            end.ends("requests in flight, and a client that has not received its replies");
            stopped.stop();
        });
        if !self.persistent {
            let unused = Arc::clone(server);
            spawn(async move {
                unused.left().await;
                unused.stop();
            });
        }
        let served = server.serve_at(entrance, handles).await;
        served.map_err(listener_failed)
    }

    /// Serves the kernel, which has the disk as its device, and other clients if they can connect, until the device is
    /// disconnected; a signal disconnects it.
    async fn serve_kernel(
        &self,
        device: &Path,
        kernel: Kernel<'_>,
        ready: WhenReady,
        end: &signals::Order,
    ) -> Result<(), Failure> {
        let Kernel { server, entrance, handles } = kernel;
        let (ours, theirs) = UnixStream::pair().map_err(Failure::new)?;
        let attached = server.attach(Stream::from(OwnedFd::from(ours)), &self.export_name);
        let attached = attached.map_err(Failure::new)?;
        let info = attached.info();
        let (size, flags) = (info.size - info.size % BLOCK, info.flags(false));
        if size < info.size {
            tracing::warn!(
                "the device ends {} bytes before the disk, whose size is no multiple of {BLOCK} bytes",
                info.size - size
            );
        }
        let worker = handles.first().cloned().unwrap_or_else(handle);
        let serves = Arc::clone(server);
        let mut session =
            pin!(worker.spawn_with(move || async move { serves.serve_attached(attached).await }));
        let connection = Connection { socket: theirs.as_fd(), size, block_size: BLOCK, flags };
        let connected = end.unless_given(Connected::connect(device, &connection)).await;
        // The kernel has its own hold of it. If it has not been given one, the session ends.
        drop(theirs);
        let interrupted = || Failure::new("interrupted by a signal during startup");
        let connected = match connected.unwrap_or_else(|| Err(interrupted())) {
            Ok(connected) => connected,
            Err(failure) => {
                server.stop();
                let _ = session.await;
                return Err(failure);
            }
        };
        let (accepting, handles) = (Arc::clone(server), handles.to_vec());
        let listening = entrance.map(|entrance| {
            spawn(async move {
                let served = accepting.serve_at(entrance, &handles).await;
                if let Err(error) = &served {
                    // The device is served until somebody disconnects it.
                    tracing::warn!(%error, "the listener failed: no other clients can connect");
                }
                served
            })
        });
        let used = async {
            if let Some(Err(error)) = end.unless_given(unblock(connected.look())).await {
                tracing::debug!(%error, "the partitions were not read");
            }
            ready.ready()?;
            if !self.forks() {
                let image = self.image.as_deref().unwrap_or(Path::new(""));
                let (device, image) = (device.display(), image.display());
                let _ =
                    writeln!(std::io::stderr(), "NBD device {device} is now connected to {image}");
            }
            Ok::<_, Failure>(signals::either(session.as_mut(), end.given()).await)
        }
        .await;
        end.ends("what the kernel has still to write to the disk");
        let (ended, mut result) = match used {
            Ok(ended) => (ended, Ok(())),
            Err(failure) => (None, Err(failure)),
        };
        let left =
            ended.as_ref().is_some_and(|ended| matches!(ended, Ok(ended) if is_usual(ended)));
        if !left {
            match unblock(connected.disconnect(ended.is_none())).await {
                Ok(unflushed) => result = result.and(unflushed.map_or(Ok(()), Err)),
                Err(error) => {
                    let error = Failure::new(netlink::reason(&error));
                    let what = format!("Cannot disconnect {}", device.display());
                    result = result.and(Err(error.context(what)));
                    server.stop();
                }
            }
        }
        let ended = match ended {
            Some(ended) => ended,
            None => session.await,
        };
        end.ends("requests in flight, and a client that has not received its replies");
        server.stop();
        let listened = match listening {
            Some(listening) => listening.await,
            None => Ok(Ok(())),
        };
        let listened = listened.map_err(Failure::new).and_then(|end| end.map_err(listener_failed));
        match ended {
            Ok(ended) if is_usual(&ended) => {}
            Ok(ended) => result = result.and(ended.map_err(Failure::new)),
            Err(error) => result = result.and(Err(Failure::new(error))),
        }
        result.and(listened)
    }
}

/// Whether a session ended as it does when its device is disconnected. The kernel then shuts the connection down,
/// whatever is in flight.
fn is_usual(ended: &Result<(), SessionError>) -> bool {
    matches!(ended, Ok(()) | Err(SessionError::Io(_) | SessionError::Truncated))
}

fn listener_failed(error: std::io::Error) -> Failure {
    Failure::new(error).context("the listener failed")
}

/// What the kernel is served by.
struct Kernel<'a> {
    server: &'a Arc<Server<View>>,
    /// Where other clients connect.
    entrance: Option<Entrance>,
    handles: &'a [Handle],
}
