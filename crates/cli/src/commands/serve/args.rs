//! The arguments of `isobath serve`.

use super::frontends::FrontendArgs;
use super::pausing;
#[cfg(feature = "slow-disk")]
use super::slow;
use super::throttle::{self, Throttling};
use crate::cache::Cache;
use crate::failure::Failure;
use crate::host::is_stored;
use crate::image_name::{self, SecretFile};
use crate::layers::Layers;
use crate::server::add_fd::{self, AddFd};
use crate::server::endpoint::Endpoint;
use crate::server::group;
use crate::server::handed_in::HandedIn;
use crate::server::sandbox::SandboxArgs;
use crate::server::tls::{SecuredEndpoint, TlsArgs};
use crate::stored::CacheOptions;
use crate::trust::Trusting;
use crate::{options, size};
use isobath_disk::pausing::OnFailure;
use isobath_disk::{Below, ImageFormat, MetadataMode, OpenOptions, SnapshotChoice};
use isobath_export::nbd::ExportError;
use isobath_export::nbd::wire::MAX_STRING;
use isobath_qmp::server as qmp;
use isobath_ring::net::Access;
#[cfg(feature = "slow-disk")]
use isobath_storage_test::slow::SlowDisk;
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// An image, and what is below each layer, where something else than the headers says that.
struct Layered {
    images: Vec<PathBuf>,
    below: Vec<Below>,
}

/// The least memory limit in bytes.
const LEAST_MEMORY: u64 = 256 << 20;

/// Serve images to virtual machines and other clients over NBD, over vhost-user-blk or as files
///
/// Once clients can connect, prints each export's address and the QEMU options to use it. After that it only logs to
/// stderr. SIGTERM, SIGINT or SIGHUP shuts it down: requests in flight are completed, and the images are flushed and
/// closed. Further signals change nothing: they are answered by what it still waits for. SIGKILL ends it immediately,
/// like a crash: flushed data is not lost.
///
/// Without --tls-creds connections are neither authenticated nor encrypted: anyone who can connect can read the disk
/// and, unless --read-only is given, write to it. To a socket file only this user can connect, unless --socket-mode
/// says otherwise.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(super) frontends: FrontendArgs,
    /// Listen for QMP connections, from 'isobath ctl' and other management programs, on a socket file or a TCP port (of
    /// the loopback interface unless HOST is given), or on a socket that was handed in; can be repeated.
    /// ',tls=required' or ',tls=off' behind it overrides what --tls-creds says
    #[arg(long, value_name = "unix:PATH|HOST:PORT|fd:NAME")]
    pub(super) qmp: Vec<SecuredEndpoint>,
    /// Accept QMP clients of every user whom the permissions of the socket file let connect, not only of this server's
    /// user and root
    #[arg(long)]
    pub(super) qmp_any_user: bool,
    /// Let whoever can connect to a TCP port of --qmp control the server
    #[arg(long)]
    pub(super) insecure: bool,
    /// Serve Prometheus metrics over HTTP at /metrics, on a socket file or a TCP port (of the loopback interface unless
    /// HOST is given), or on a socket that was handed in; can be repeated
    #[arg(long, value_name = "[HOST:]PORT|unix:PATH|fd:NAME")]
    pub(super) metrics: Vec<Endpoint>,
    #[command(flatten)]
    pub(super) tls: TlsArgs,
    /// The permissions of the server's socket files, in octal, whatever the umask
    #[arg(long, value_name = "MODE", default_value = "0600", value_parser = socket_mode)]
    pub(super) socket_mode: u32,
    /// The group of the server's socket files, by name or number; it can connect with --socket-mode 0660 [default: the
    /// user's]
    #[arg(long, value_name = "GROUP", value_parser = group::parse)]
    pub(super) socket_group: Option<u32>,
    /// The export's name; with several images, repeat the option, one per image in order [default: the image's file
    /// name without its extension]. The empty name also selects the first export
    #[arg(long, value_name = "NAME")]
    pub(super) export_name: Vec<String>,
    /// Refuse writes, and let other programs read the images meanwhile
    #[arg(short, long)]
    pub(super) read_only: bool,
    /// Serve an internal snapshot of the images, by ID or name, instead of their current state; read-only
    #[arg(long, alias = "load-snapshot", value_name = "SNAPSHOT", value_parser = options::snapshot)]
    pub(super) snapshot: Option<SnapshotChoice>,
    #[command(flatten)]
    pub(super) secret_file: SecretFile,
    /// Cache mode for the images and their backing files
    #[arg(long, value_name = "MODE", default_value = "writeback")]
    pub(super) cache: Cache,
    /// How metadata changes reach an image. 'journal': one sync per flush; after a crash, other programs refuse the
    /// image until 'isobath seal' recovers it. 'embedded': like 'journal', but mappings are stored in compressible
    /// data, without extra writes. 'ordered': two syncs per flush; the image stays usable by other programs. 'auto':
    /// enables the journal after a few flushes
    #[arg(long, value_name = "MODE", default_value = "auto", value_parser = metadata)]
    pub(super) metadata: MetadataMode,
    /// With 'embedded': maximum number of zones in use, each of --zone-size; closing and recovering an image takes time
    /// for each zone [default: 8]
    #[arg(long, value_name = "N")]
    pub(super) zones: Option<u32>,
    /// With 'embedded': zone size, such as 16M [default: 64M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(super) zone_size: Option<u64>,
    /// Memory limit of each disk's map, such as 64M [default: as much as the disk needs, at most 132M]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(super) map_cache: Option<u64>,
    /// Limit how much of the images' files is mapped to copy from it what is in the page cache, such as 64G; up to
    /// 1/512 of that is needed for page tables. With 0, reads are system calls [default: 16G, at most half of the
    /// memory]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub(super) map_reads: Option<u64>,
    /// Limit the memory for requests, free buffers, maps, caches and L1 tables of all images and clients together, such
    /// as 2G; at least 256M. What does not fit is refused: an image, also one that a QMP client adds, or an export
    /// [default: each has a limit of its own]
    #[arg(long, value_name = "SIZE", value_parser = memory_limit)]
    pub(super) memory_limit: Option<u64>,
    /// Limit the requests to an image: iops-total, iops-read, iops-write, bps-total, bps-read and bps-write, in
    /// requests and bytes per second, each also with -max (the rate of a burst) and -max-length (of a burst, in
    /// seconds); iops-size, above which a request counts as several; and group, the name of limits that images share.
    /// With several images, repeat the option, one per image in order; an empty value sets no limit
    #[arg(long, value_name = "LIMIT=N,...", value_parser = throttle::parse)]
    pub(super) throttle: Vec<Throttling>,
    /// What a client's write, discard or flush does when the storage fails. 'report': it fails. 'stop': the disk
    /// pauses: the request and those after it wait until 'isobath ctl SOCKET cont' has them tried again; reads go on.
    /// 'enospc': like 'stop' if there is no space left, otherwise like 'report'. All but 'report' need --qmp. With
    /// several images, give the option once for all, or repeat it, one per image in order [default: report]
    #[arg(long, value_name = "report|enospc|stop", value_parser = pausing::of_writes)]
    pub(super) werror: Vec<OnFailure>,
    /// The same for a client's read
    #[arg(long, value_name = "report|stop", value_parser = pausing::of_reads)]
    pub(super) rerror: Vec<OnFailure>,
    /// The images' format [default: detected]. Required for raw images unless --read-only is given
    #[arg(short, long, value_name = "FMT", value_parser = options::format)]
    pub(super) format: Option<ImageFormat>,
    #[command(flatten)]
    pub(super) trusting: Trusting,
    /// The external data file of an image, instead of the one that it names; with several images, repeat the option,
    /// one per image in order; an empty value leaves the choice to the image
    #[arg(long, value_name = "FILE")]
    data_file: Vec<OsString>,
    /// The backing file of an image, instead of the one that its header names, which stays there; with several images,
    /// repeat the option, one per image in order; an empty value leaves the choice to the image. No snapshots are taken
    /// unless the header names the same file
    #[arg(long, value_name = "FILE", conflicts_with = "no_backing")]
    backing_file: Vec<String>,
    /// The format of a --backing-file [default: the one that the image's header names; with --untrusted none]; with
    /// several images, repeat the option, one per image in order; an empty value stands for the default
    #[arg(long, value_name = "FMT", requires = "backing_file", value_parser = format_or_none)]
    backing_file_format: Vec<FormatOrNone>,
    /// Read the images without their backing files: what is not in them reads as zeroes; requires --read-only
    #[arg(long)]
    no_backing: bool,
    /// Writes to a chain in a store go to this local qcow2 image above it. If there is none, it is made; one that there
    /// is must be above this chain, or above local images that are. With several images, repeat the option, one per
    /// image in order; an empty value leaves the chain read-only
    #[arg(long, value_name = "FILE")]
    overlay: Vec<OsString>,
    /// Record what is read of the chain in a store, and in which order, in this file, which is new or empty and is
    /// written when the server ends; 'isobath remote trace' has servers fetch that ahead
    #[arg(long, value_name = "FILE")]
    pub(super) record_trace: Option<PathBuf>,
    #[command(flatten)]
    layers: Layers,
    /// The image and what is below it, once --layers or --checkpoint was looked at.
    #[arg(skip)]
    layered: OnceLock<Layered>,
    #[command(flatten)]
    pub(super) stored: CacheOptions,
    #[command(flatten)]
    pub(super) sandbox: SandboxArgs,
    /// Add a descriptor of an image, by its number or the name that a service manager gives it, to a set: the image is
    /// then opened as /dev/fdset/M, for which no right to the file is needed; can be repeated, also for one set
    #[arg(long, value_name = "fd=N,set=M[,opaque=TEXT]", value_parser = add_fd::parse)]
    pub(super) add_fd: Vec<AddFd>,
    /// Number of threads that serve clients; each client is served by one thread [default: one per CPU, at most 8]
    #[arg(long, value_name = "N")]
    pub(super) threads: Option<NonZeroUsize>,
    /// Write the process ID to this file once clients can connect
    #[arg(long, value_name = "FILE")]
    pub(super) pid_file: Option<PathBuf>,
    /// Run in the background; the command returns once clients can connect. Messages are lost from then on, unless
    /// --log is given
    #[arg(long)]
    pub(super) daemonize: bool,
    /// Append messages to this file instead of stderr, once clients can connect
    #[arg(long, value_name = "FILE")]
    pub(super) log: Option<PathBuf>,
    /// For experiments: simulate the timing of a slow disk that holds all images, given by bytes per second, latency in
    /// microseconds, queue depth and flush time in microseconds; or 'hdd' or 'ssd'
    #[cfg(feature = "slow-disk")]
    #[arg(long, hide = true, value_name = "hdd|ssd|BANDWIDTH,LATENCY,DEPTH,FLUSH", value_parser = slow::parse)]
    pub(super) slow_disk: Option<SlowDisk>,
    /// The images; each becomes an export. A chain in a store, named as for 'isobath pull', is served read-only
    /// unless it has an --overlay
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<PathBuf>,
}

fn metadata(name: &str) -> Result<MetadataMode, String> {
    MetadataMode::from_name(name).ok_or_else(|| {
        let modes = MetadataMode::ALL.map(MetadataMode::name).join(", ");
        format!("unknown mode '{name}'; expected {modes}")
    })
}

/// A format, or none in its place.
#[derive(Clone, Copy, Debug)]
pub(super) struct FormatOrNone(Option<ImageFormat>);

fn format_or_none(name: &str) -> Result<FormatOrNone, String> {
    if name.is_empty() {
        return Ok(FormatOrNone(None));
    }
    options::format(name).map(|format| FormatOrNone(Some(format)))
}

fn memory_limit(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text)?;
    if bytes < LEAST_MEMORY {
        return Err(
            "the limit must be at least 256M, since any client's requests need some of it".into()
        );
    }
    Ok(bytes)
}

fn socket_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| "expected permissions in octal, such as 0660".into())
}

impl Args {
    /// Who may connect to the socket files.
    pub(super) fn access(&self) -> Access {
        Access { mode: self.socket_mode, group: self.socket_group }
    }

    /// The limits for QMP clients.
    pub(super) fn qmp_limits(&self) -> qmp::Limits {
        let limits = qmp::Limits::default();
        qmp::Limits { users: limits.users.filter(|_| !self.qmp_any_user), ..limits }
    }

    /// Whether writes are refused.
    pub(super) fn is_read_only(&self) -> bool {
        self.read_only || self.snapshot.is_some()
    }

    /// The descriptors that the options name.
    pub(super) fn handed_in(&self) -> impl Iterator<Item = &HandedIn> {
        let controls = self.qmp.iter().map(|secured| &secured.endpoint);
        let own = controls.chain(&self.metrics).filter_map(Endpoint::handed_in);
        let files = self.add_fd.iter().map(|add| &add.descriptors);
        self.frontends.handed_in().chain(own).chain(files)
    }

    /// The images.
    pub(super) fn images(&self) -> &[PathBuf] {
        self.layered.get().map_or(&self.images, |layered| &layered.images)
    }

    /// Finds the image and the layers that --layers or --checkpoint names, if any, before anything else is done.
    ///
    /// # Errors
    /// They cannot be used with the other options, or an index of checkpoints does not fit.
    pub(super) fn find_layers(&self) -> Result<(), Failure> {
        if !self.layers.is_any() {
            return Ok(());
        }
        let option = "--layers and --checkpoint";
        let [image] = self.images.as_slice() else {
            return Err(Failure::new(format_args!("{option} are for one image")));
        };
        if !self.is_read_only() {
            return Err(Failure::new(format_args!(
                "{option} require --read-only: the headers of the layers do not lead from one to the next"
            )));
        }
        if !self.backing_file.is_empty() || self.no_backing {
            return Err(Failure::new(format_args!(
                "{option} say what is below the image: leave out --backing-file and --no-backing"
            )));
        }
        if self.format.is_some_and(|format| format != ImageFormat::Qcow2) {
            return Err(Failure::new(format_args!("{option} are for layers in the format qcow2")));
        }
        if let Some(given) = self.layers.of(image).map_err(Failure::new)? {
            let layered = Layered { images: vec![given.top], below: given.below };
            // Once, at the start.
            let _ = self.layered.set(layered);
        }
        Ok(())
    }

    /// Whether something else than the headers says what is below each layer.
    pub(super) fn is_layered(&self) -> bool {
        self.layered.get().is_some()
    }

    /// How far the image with this number is trusted, and which files take the place of those that it names.
    ///
    /// # Errors
    /// If a directory of trusted files does not exist, or a file cannot be named so.
    pub(super) fn files_of(
        &self,
        image: usize,
        options: OpenOptions,
    ) -> Result<OpenOptions, Failure> {
        let data = self.data_file.get(image).filter(|file| !file.is_empty());
        let backing = self.backing_file.get(image).filter(|file| !file.is_empty());
        let format = self.backing_file_format.get(image).and_then(|format| format.0);
        let backing = backing.map(|file| image_name::backing_file(file, format)).transpose();
        let mut below: Vec<Below> = backing.map_err(Failure::new)?.into_iter().collect();
        let options = match self.layered.get() {
            Some(layered) => {
                below.clone_from(&layered.below);
                options.format(Some(ImageFormat::Qcow2))
            }
            None => options,
        };
        Ok(options
            .trust(self.trusting.trust()?)
            .data_file(data.map(PathBuf::from))
            .backing_files(below)
            .backing(!self.no_backing))
    }

    /// The local image above a chain in a store, the image with this number.
    pub(super) fn overlay_of(&self, image: usize) -> Option<&Path> {
        self.overlay.get(image).filter(|file| !file.is_empty()).map(Path::new)
    }

    /// Refuses what a chain in a store, the image with this number, cannot have.
    pub(super) fn check_stored(&self, image: usize) -> Result<(), Failure> {
        let given = |files: &[OsString]| files.get(image).is_some_and(|file| !file.is_empty());
        let other = given(&self.data_file)
            || self.backing_file.get(image).is_some_and(|file| !file.is_empty())
            || self.no_backing
            || self.is_layered();
        if other {
            return Err(Failure::new(
                "the layers of a chain in a store are those of its manifest: leave out --data-file, --backing-file, \
                 --no-backing, --layers and --checkpoint",
            ));
        }
        if self.format.is_some() {
            return Err(Failure::new(
                "the formats of a chain in a store are those of its manifest: leave out --format",
            ));
        }
        if self.trusting.untrusted && self.overlay_of(image).is_some() {
            return Err(Failure::new(
                "the header of an overlay names its chain, which that of an untrusted image may not: leave out \
                 --untrusted or --overlay",
            ));
        }
        if self.cache == Cache::None {
            return Err(Failure::new(
                "a chain in a store is read through the page cache: leave out --cache none",
            ));
        }
        Ok(())
    }

    /// Refuses files for more images than there are, formats without files, and writes to images without backing files.
    pub(super) fn check_files(&self) -> Result<(), Failure> {
        let images = self.images().len();
        for (option, given) in [
            ("--data-file", self.data_file.len()),
            ("--backing-file", self.backing_file.len()),
            ("--backing-file-format", self.backing_file_format.len()),
            ("--overlay", self.overlay.len()),
        ] {
            if given > images {
                return Err(Failure::new(format_args!(
                    "{option} is given {given} times for {images} images; give it at most once per image"
                )));
            }
        }
        let data = self.data_file.iter().map(|file| ("--data-file", Path::new(file)));
        let backing = self.backing_file.iter().map(|file| ("--backing-file", Path::new(file)));
        if let Some((option, file)) = data.chain(backing).find(|(_, file)| is_stored(file)) {
            return Err(Failure::new(format_args!(
                "{option} is '{}', which is in a store: a chain in a store is only served whole; pull it, and name the \
                 file",
                isobath_storage::shown(file)
            )));
        }
        let mut images = self.images().iter().enumerate();
        if let Some((_, image)) =
            images.find(|(number, image)| self.overlay_of(*number).is_some() && !is_stored(image))
        {
            return Err(Failure::new(format_args!(
                "--overlay is given for '{}', which is no chain in a store; 'isobath create -b' makes an overlay of a \
                 file",
                isobath_storage::shown(image)
            )));
        }
        for (image, format) in self.backing_file_format.iter().enumerate() {
            let file = self.backing_file.get(image).filter(|file| !file.is_empty());
            if file.is_none() && format.0.is_some() {
                return Err(Failure::new(format_args!(
                    "--backing-file-format is given for image {}, which has no --backing-file",
                    image + 1
                )));
            }
        }
        if self.no_backing && !self.is_read_only() {
            return Err(Failure::new(
                "--no-backing requires --read-only: what is written to an image without its backing file hides that",
            ));
        }
        Ok(())
    }

    /// The name of each image's export.
    pub(super) fn export_names(&self) -> Result<Vec<String>, Failure> {
        export_names(self.images(), &self.export_name)
    }
}

/// A name for each image: the given names, then the file names, numbered if they clash.
fn export_names(images: &[PathBuf], given: &[String]) -> Result<Vec<String>, Failure> {
    if given.len() > images.len() {
        return Err(Failure::new(format_args!(
            "{} export names for {} images; give --export-name at most once per image",
            given.len(),
            images.len()
        )));
    }
    let mut names: Vec<String> = Vec::new();
    for name in given {
        if names.contains(name) {
            return Err(Failure::new(ExportError::DuplicateName(name.clone())));
        }
        if name.len() > MAX_STRING {
            let error = ExportError::TooLong { field: "name", length: name.len() };
            return Err(Failure::new(error));
        }
        names.push(name.clone());
    }
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
    fn permissions_are_octal() {
        assert_eq!(["0600", "660", "0"].map(|text| socket_mode(text).unwrap()), [0o600, 0o660, 0]);
        for text in ["", "-1", "0o600", "u=rw", "1777", "668"] {
            assert!(socket_mode(text).is_err(), "{text}");
        }
    }

    #[test]
    fn every_export_has_a_name_of_its_own() {
        let images = ["a/x.qcow2", "b/x.qcow2", "x-2", "y.img"].map(PathBuf::from);
        assert_eq!(export_names(&images, &[]).unwrap(), ["x", "x-2", "x-2-2", "y"]);
        let given = ["y".to_owned(), "z".to_owned()];
        assert_eq!(export_names(&images, &given).unwrap(), ["y", "z", "x-2", "y-2"]);
        assert!(export_names(&images[..1], &given).is_err());
        assert!(export_names(&images, &["y".to_owned(), "y".to_owned()]).is_err());
        assert!(export_names(&images, &["n".repeat(MAX_STRING + 1)]).is_err());
    }
}
