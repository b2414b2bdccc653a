//! Disks in stores: chains that are read from where `push` has put them, through a cache of this machine.

use crate::failure::Failure;
use crate::host::remotes;
use crate::messages;
use crate::size;
use isobath_disk::memory::Reserved;
use isobath_disk::{BackingFile, Below, ImageFormat, MemoryLimit, OpenOptions};
use isobath_remote::cache::Cache;
use isobath_remote::served::{self, Chain};
use isobath_remote::{Address, Format};
use isobath_ring::unblock;
use std::env;
use std::fs;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Where root's cache is.
const OF_ROOT: &str = "/var/cache/isobath";

/// Bytes of a cache, and seconds that a read waits, unless told otherwise.
const SIZE: u64 = 16 << 30;
const TIMEOUT: u64 = 30;

/// How chains in stores are read.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct CacheOptions {
    /// The directory in which what is read from stores is kept; several servers may share it [default:
    /// /var/cache/isobath for root, otherwise isobath in the cache directory of the user]
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Limit the bytes of that directory
    #[arg(long, value_name = "SIZE", default_value = "16G", value_parser = size::parse)]
    cache_size: u64,
    /// Time limit in seconds for reads from a store; then they fail. With 0 they wait until the store answers
    #[arg(long, value_name = "SECONDS", default_value = "30")]
    #[arg(value_parser = clap::value_parser!(u64).range(0..=1800))]
    remote_timeout: u64,
}

/// The caches in use, by their directories: one of a process shares its files.
static CACHES: Mutex<Vec<(PathBuf, Arc<Cache>)>> = Mutex::new(Vec::new());

/// The memory that chains may take, which stay known until the process ends.
static RESERVED: Mutex<Vec<Reserved>> = Mutex::new(Vec::new());

impl CacheOptions {
    /// The directory of the cache.
    ///
    /// # Errors
    /// The user has none.
    pub(crate) fn directory(&self) -> Result<PathBuf, Failure> {
        if let Some(directory) = &self.cache_dir {
            return Ok(directory.clone());
        }
        if rustix::process::geteuid().is_root() {
            return Ok(OF_ROOT.into());
        }
        let of =
            |name: &str| env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
        let of_user = of("XDG_CACHE_HOME").or_else(|| of("HOME").map(|home| home.join(".cache")));
        of_user.map(|path| path.join("isobath")).ok_or_else(|| {
            Failure::new(
                "neither XDG_CACHE_HOME nor HOME is set: name a directory with --cache-dir",
            )
        })
    }

    /// Makes the directory of the cache, if it does not exist.
    ///
    /// # Errors
    /// It cannot be made.
    pub(crate) fn make_directory(&self) -> Result<PathBuf, Failure> {
        let directory = self.directory()?;
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory).map_err(|error| {
            let text = format!(
                "cannot create the cache directory '{}'; name another with --cache-dir",
                isobath_storage::shown(&directory)
            );
            Failure::new(isobath_storage::cause(&error)).context(text)
        })?;
        Ok(directory)
    }

    fn limit(&self) -> Option<Duration> {
        (self.remote_timeout > 0).then(|| Duration::from_secs(self.remote_timeout))
    }

    /// Reads the manifest and the heads of a chain, whose layers can be opened from then on.
    ///
    /// # Errors
    /// There is no such chain, it is damaged, the store does not answer, or the cache cannot be used. Less memory is
    /// left than reading the layers may take.
    pub(crate) async fn open(
        &self,
        address: &Address,
        memory: Option<&Arc<MemoryLimit>>,
    ) -> Result<Arc<Chain>, Failure> {
        if let Some(chain) = remotes().chain(&address.to_string()) {
            return Ok(chain);
        }
        let (options, own) = (self.clone(), address.clone());
        let opened = unblock(move || Ok(options.read(&own))).await??;
        if let Some(limit) = memory {
            let reserved = limit.reserve("the checksums of its layers", opened.memory());
            let reserved = reserved.map_err(|error| Failure::new(error).context(address))?;
            RESERVED.lock().unwrap_or_else(PoisonError::into_inner).push(reserved);
        }
        Ok(remotes().add(&opened))
    }

    /// As [`open`](Self::open), without a limit of memory, for a command that has nothing else to do. Blocks.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn open_now(&self, address: &Address) -> Result<Arc<Chain>, Failure> {
        match remotes().chain(&address.to_string()) {
            Some(chain) => Ok(chain),
            None => Ok(remotes().add(&self.read(address)?)),
        }
    }

    /// Reads the manifest and the heads of a chain.
    fn read(&self, address: &Address) -> Result<Arc<Chain>, Failure> {
        let failed = |error| Failure::new(error).context(address);
        let cache = cache(&self.make_directory()?, self.cache_size).map_err(failed)?;
        let opened = Chain::open(address, &cache, self.limit()).map_err(failed)?;
        if let Some(reason) = opened.last_known() {
            messages::complain(format_args!(
                "'{address}' is as it was when it was last read: {reason}"
            ));
        }
        Ok(opened)
    }
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self { cache_dir: None, cache_size: SIZE, remote_timeout: TIMEOUT }
    }
}

/// The cache in a directory.
fn cache(directory: &Path, size: u64) -> isobath_remote::Result<Arc<Cache>> {
    let mut caches = CACHES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, cache)) = caches.iter().find(|(known, _)| known == directory) {
        return Ok(Arc::clone(cache));
    }
    let cache = Cache::open(directory, size)?;
    caches.push((directory.to_owned(), Arc::clone(&cache)));
    Ok(cache)
}

/// The chain in a store that a name on the command line stands for, if it has the form of such names. That of a file
/// never has it there: it is a path.
///
/// # Errors
/// The name begins like that of a chain, and is none.
pub(crate) fn address(name: &Path) -> Result<Option<Address>, Failure> {
    match name.to_str().filter(|text| served::is_name(text)) {
        Some(text) => Ok(Some(Address::parse(text)?)),
        None => Ok(None),
    }
}

/// The options for opening a chain in a store: nothing is written, and what is below each layer is what the manifest
/// says.
pub(crate) fn options_of(chain: &Chain, options: OpenOptions) -> OpenOptions {
    let (format, below) = files_of(chain);
    options.writable(false).format(format).backing_files(below)
}

/// The format of a chain's top layer, and what is below each layer.
pub(crate) fn files_of(chain: &Chain) -> (Option<ImageFormat>, Vec<Below>) {
    let mut layers = chain.layers();
    let top = layers.next().map(|(_, of)| format_of(of));
    let below =
        layers.map(|(name, of)| Below::Given(BackingFile { name, format: Some(format_of(of)) }));
    (top, below.chain([Below::Nothing]).collect())
}

/// The format of a layer.
pub(crate) fn format_of(format: Format) -> ImageFormat {
    match format {
        Format::Qcow2 => ImageFormat::Qcow2,
        Format::Raw => ImageFormat::Raw,
    }
}

/// The files that clients of object stores read: the certificates of authorities, and credentials. What lies beside the
/// certificates, such as private keys, is not among them.
pub(crate) fn files_of_clients() -> Vec<PathBuf> {
    const CERTIFICATES: [&str; 10] = [
        "/etc/ssl/certs",
        "/etc/ssl/cert.pem",
        "/etc/ssl/ca-bundle.pem",
        "/etc/pki/tls/certs",
        "/etc/pki/tls/cert.pem",
        "/etc/pki/tls/cacert.pem",
        "/etc/pki/ca-trust",
        "/etc/ca-certificates",
        "/usr/share/ca-certificates",
        "/usr/local/share/ca-certificates",
    ];
    const VARIABLES: [&str; 9] = [
        "AWS_CA_BUNDLE",
        "AWS_CONFIG_FILE",
        "AWS_SHARED_CREDENTIALS_FILE",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
        "AZURE_FEDERATED_TOKEN_FILE",
    ];
    let named = VARIABLES.into_iter().filter_map(env::var_os).map(PathBuf::from);
    let home = env::var_os("HOME").map(PathBuf::from);
    let profiles = home.map(|home| [home.join(".aws/credentials"), home.join(".aws/config")]);
    let files = CERTIFICATES.into_iter().map(PathBuf::from).chain(named);
    files.chain(profiles.into_iter().flatten()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: CacheOptions,
    }

    #[test]
    fn a_line_without_options_has_the_defaults() {
        let CacheOptions { cache_dir, cache_size, remote_timeout } =
            Line::try_parse_from(["x"]).unwrap().options;
        let usual = CacheOptions::default();
        assert_eq!(cache_dir, usual.cache_dir);
        assert_eq!((cache_size, remote_timeout), (usual.cache_size, usual.remote_timeout));
    }

    #[test]
    fn private_keys_are_not_among_the_files_of_clients() {
        let files = files_of_clients();
        for private in [
            "/etc/ssl/private/key.pem",
            "/etc/pki/tls/private/key.pem",
            "/etc/pki/libvirt/private/serverkey.pem",
            "/etc/pki/qemu/server-key.pem",
        ] {
            let found = files.iter().find(|file| Path::new(private).starts_with(file));
            assert_eq!(found, None, "{private}");
        }
    }
}
