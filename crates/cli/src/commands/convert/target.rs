//! What `convert` writes to.

use super::Args;
use crate::commands::create;
use crate::failure::Failure;
use crate::options;
use isobath_disk::{Disk, NewDisk, OpenOptions};
use isobath_storage::file::FileHost;
use isobath_storage::{FileId, Host, Locking, OpenMode, Storage};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The target of a copy.
pub(super) struct Target {
    pub(super) disk: Arc<Disk<FileHost>>,
    /// Only what the source's active layer holds is to be copied.
    pub(super) shares_backing: bool,
    /// The files that were made for it.
    made: Vec<PathBuf>,
}

impl Target {
    /// Makes the target for a disk of `size` bytes.
    pub(super) async fn create(name: &Path, size: u64, args: &Args) -> Result<Self, Failure> {
        let mut new = NewDisk { format: args.output_format, ..NewDisk::default() };
        for (option, value) in options::parse(&args.options) {
            create::apply(&mut new, &option, &value)
                .map_err(|error| Failure::new(error).context(name.display()))?;
        }
        new.size = Some(size);
        new.backing_file = args.backing_file.clone().or(new.backing_file);
        new.backing_format = args.backing_format.clone().or(new.backing_format);
        if args.compress && new.preallocation != isobath_disk::Preallocation::Off {
            return Err(Failure::new(
                "Compression and preallocation not supported at the same time",
            ));
        }
        isobath_disk::create(&FileHost, name, &new).await?;
        let mut made = vec![name.to_owned()];
        made.extend(new.data_file.as_deref().map(|data| FileHost.resolve(name, data)));
        // A device was there before, and stays.
        made.retain(|file| file.is_file());
        let shares_backing = new.backing_file.is_some();
        match open(name, args).await {
            Ok(disk) => Ok(Self { disk, shares_backing, made }),
            Err(error) => {
                remove(&made).await;
                Err(error)
            }
        }
    }

    /// Opens a target that exists.
    pub(super) async fn existing(name: &Path, args: &Args) -> Result<Self, Failure> {
        if !args.options.is_empty() {
            return Err(Failure::new("-o has no use with -n: the target is not made"));
        }
        let disk = open(name, args).await?;
        let shares_backing = args.backing_file.is_some();
        if shares_backing && disk.depth() < 2 {
            return Err(Failure::new("-B: the target has no backing file"));
        }
        Ok(Self { disk, shares_backing, made: Vec::new() })
    }

    /// The file that holds the target's data.
    pub(super) fn storage(&self) -> &impl Storage {
        let mut layers = self.disk.layers();
        // A disk has a layer.
        layers.next().map_or_else(|| unreachable!(), |layer| &**layer.data())
    }

    /// Removes what was made for the target; whether there was anything.
    pub(super) async fn remove(&self) -> bool {
        remove(&self.made).await;
        !self.made.is_empty()
    }
}

async fn remove(files: &[PathBuf]) {
    for file in files {
        if let Err(error) = FileHost.remove(file).await {
            tracing::warn!("{error}");
        }
    }
}

async fn open(name: &Path, args: &Args) -> Result<Arc<Disk<FileHost>>, Failure> {
    let options = OpenOptions {
        writable: true,
        format: Some(args.output_format),
        direct: args.cache.is_direct(),
        ..OpenOptions::default()
    };
    Ok(Arc::new(Disk::open(FileHost, name, &options).await?))
}

/// Fails if the target is one of the files to be copied, under whatever name.
pub(super) async fn refuse_source(
    name: &Path,
    sources: &[Arc<Disk<FileHost>>],
) -> Result<(), Failure> {
    let look = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
    // What cannot be opened now will be made, or refused, later.
    let Ok(file) = FileHost.open(name, look).await else { return Ok(()) };
    let mut layers = sources.iter().flat_map(|source| source.layers());
    let ids = |layer: &isobath_disk::Layer<_>| -> [FileId; 2] {
        [Storage::id(&**layer.storage()), Storage::id(&**layer.data())]
    };
    if layers.any(|layer| ids(layer).contains(&file.id())) {
        return Err(Failure::new(format_args!(
            "the target '{}' is one of the images to be copied, or belongs to their chains",
            name.display()
        )));
    }
    Ok(())
}
