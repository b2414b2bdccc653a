//! The target of `convert`.

use super::Args;
use crate::commands::create;
use crate::failure::Failure;
use crate::options;
use isobath_disk::{Disk, NewDisk, OpenOptions};
use isobath_storage::file::FileHost;
use isobath_storage::{FileId, Host, Locking, OpenMode, Storage, StorageExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The target of a copy.
pub(super) struct Target {
    pub(super) disk: Arc<Disk<FileHost>>,
    /// Only the source's active layer is copied.
    pub(super) shares_backing: bool,
    /// The files created for it.
    made: Vec<PathBuf>,
}

impl Target {
    /// Creates the target for a disk of `size` bytes.
    pub(super) async fn create(name: &Path, size: u64, args: &Args) -> Result<Self, Failure> {
        let mut new = NewDisk::default().format(args.output_format);
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
        // A device existed before, and stays.
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

    /// Opens an existing target.
    pub(super) async fn existing(name: &Path, args: &Args) -> Result<Self, Failure> {
        if !args.options.is_empty() {
            return Err(Failure::new("-o cannot be combined with -n"));
        }
        let disk = open(name, args).await?;
        let shares_backing = args.backing_file.is_some();
        if shares_backing && disk.depth() < 2 {
            return Err(Failure::new(format_args!(
                "-B with -n needs a target with a backing file, but '{}' has none",
                name.display()
            )));
        }
        Ok(Self { disk, shares_backing, made: Vec::new() })
    }

    /// The file that holds the target's data.
    pub(super) fn storage(&self) -> &impl Storage {
        let mut layers = self.disk.layers();
        // A disk has a layer.
        layers.next().map_or_else(|| unreachable!(), |layer| &**layer.data())
    }

    /// Removes the files created for the target; returns whether there were any.
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
    let options =
        OpenOptions::new().writable(true).format(args.output_format).direct(args.cache.is_direct());
    Ok(Arc::new(Disk::open(FileHost, name, &options).await?))
}

/// Fails if the target is one of the files to copy, under whatever name.
pub(super) async fn refuse_source(
    name: &Path,
    sources: &[Arc<Disk<FileHost>>],
) -> Result<(), Failure> {
    let look = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
    // A file that cannot be opened now is created, or refused, later.
    let Ok(file) = FileHost.open(name, look).await else { return Ok(()) };
    let mut layers = sources.iter().flat_map(|source| source.layers());
    let ids = |layer: &isobath_disk::Layer<_>| -> [FileId; 2] {
        [StorageExt::id(&**layer.storage()), StorageExt::id(&**layer.data())]
    };
    if layers.any(|layer| ids(layer).contains(&file.id())) {
        return Err(Failure::new(format_args!(
            "the target '{}' is one of the images to copy, or part of their chains",
            name.display()
        )));
    }
    Ok(())
}
