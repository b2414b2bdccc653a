//! The target of `convert`.

use super::Args;
use crate::commands::create;
use crate::failure::Failure;
use crate::host::{self, ImageHost, images};
use crate::image_name::Image;
use crate::options;
use isobath_disk::{Created, Disk, ImageFormat, NewDisk, create_held_beside};
use isobath_storage::{FileId, Storage, StorageExt};
use std::path::Path;
use std::sync::Arc;

/// The target of a copy.
pub(super) struct Target {
    pub(super) disk: Arc<Disk<ImageHost>>,
    /// Only the source's active layer is copied.
    pub(super) shares_backing: bool,
    /// Its files, if they were created for it. They are held, with their locks, until the disk is closed.
    made: Option<Created<'static, ImageHost>>,
}

impl Target {
    /// Creates the target for a disk of `size` bytes; on a device that there is, if so told.
    pub(super) async fn create(
        name: &Image,
        size: u64,
        sources: &[Arc<Disk<ImageHost>>],
        on_device: bool,
        args: &Args,
    ) -> Result<Self, Failure> {
        let (mut image, name) = (name.clone(), name.path.as_path());
        let mut new = NewDisk::default().format(args.output_format());
        let given = options::parse(&args.options);
        create::apply_all(&mut new, &given).map_err(Failure::new)?;
        let encryption = create::encryption(&new, &given, &args.naming.objects);
        new.encryption = encryption.map_err(|reason| {
            if new.format != ImageFormat::Luks {
                return Failure::new(reason);
            }
            Failure::new(reason).context("error while converting luks").context(name.display())
        })?;
        if let Some(encryption) = &new.encryption {
            if args.compress {
                return Err(Failure::new(
                    "Compression and encryption not supported at the same time",
                ));
            }
            image.set_secret(Arc::clone(&encryption.secret));
        }
        new.size = Some(size);
        new.on_device = on_device;
        new.backing_file = args.backing_file.clone().or(new.backing_file);
        new.backing_format = args.backing_format.clone().or(new.backing_format);
        if args.compress && new.preallocation != isobath_disk::Preallocation::Off {
            return Err(Failure::new(
                "Compression and preallocation not supported at the same time",
            ));
        }
        if new.backing_file.is_none() && new.backing_format.is_some() {
            let reason = "Backing format cannot be used without backing file";
            let what = format!("error while converting {}", new.format.name());
            return Err(Failure::new(reason).context(what).context(name.display()));
        }
        if new.backing_file.is_some() && new.backing_format.is_none() {
            return Err(Failure::new("Use of backing file requires explicit backing format"));
        }
        let made = create_held_beside(images(), name, &new, &files_of(sources)).await;
        let made = made.map_err(|error| image.failed(&error))?;
        let shares_backing = new.backing_file.is_some();
        let options = image.writable(args.cache.is_direct())?.format(args.output_format());
        made.let_in().await?;
        match image.open(&options).await {
            Ok(disk) => Ok(Self { disk, shares_backing, made: Some(made) }),
            Err(error) => {
                made.remove().await;
                Err(error)
            }
        }
    }

    /// Opens an existing target.
    pub(super) async fn existing(
        name: &Image,
        sources: &[Arc<Disk<ImageHost>>],
        args: &Args,
    ) -> Result<Self, Failure> {
        let options = name.writable(args.cache.is_direct())?;
        let disk = name.open(&options).await?;
        // The file that was opened, whatever its name led to before.
        let active = disk.layers().take(1).flat_map(|layer| layer.files().map(StorageExt::id));
        if active.into_iter().any(|file| files_of(sources).contains(&file)) {
            return Err(is_source(&name.path));
        }
        Ok(Self { disk, shares_backing: args.backing_file.is_some(), made: None })
    }

    /// The file that holds the target's data.
    pub(super) fn storage(&self) -> &impl Storage {
        let mut layers = self.disk.layers();
        // A disk has at least one layer.
        layers.next().map_or_else(|| unreachable!(), |layer| &**layer.data())
    }

    /// Removes the files created for the target; returns whether there were any.
    pub(super) async fn remove(self) -> bool {
        match self.made {
            Some(made) => made.remove().await,
            None => false,
        }
    }

    /// Lets this process open the copied image again; no other program can write to it in between.
    pub(super) async fn let_in(&self) -> Result<(), Failure> {
        for layer in self.disk.layers().take(1) {
            layer.retire().await?;
            layer.admit_writer(true).await?;
        }
        Ok(())
    }
}

/// Fails if the target is one of the files to copy, under any name.
pub(crate) async fn refuse_source(
    name: &Path,
    sources: &[Arc<Disk<ImageHost>>],
) -> Result<(), Failure> {
    // A file that cannot be opened now is created, or refused, later.
    let Some(target) = host::identity(name).await else { return Ok(()) };
    if files_of(sources).contains(&target) {
        return Err(is_source(name));
    }
    Ok(())
}

fn is_source(target: &Path) -> Failure {
    Failure::new(format_args!(
        "the target '{}' is one of the images to copy, or in their backing chains",
        target.display()
    ))
}

/// The files of disks.
pub(crate) fn files_of(disks: &[Arc<Disk<ImageHost>>]) -> Vec<FileId> {
    let layers = disks.iter().flat_map(|disk| disk.layers());
    layers.flat_map(|layer| layer.files()).map(StorageExt::id).collect()
}
