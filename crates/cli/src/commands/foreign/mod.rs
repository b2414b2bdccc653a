//! New images in other programs' formats.

mod options;

use crate::failure::Failure;
use crate::host;
use isobath_disk::DiskError;
use isobath_formats::{Error, Writer};
use isobath_storage::{FileId, Host, Layout, Made, OpenMode, StorageExt};
use isobath_storage_file::{FileHost, FileStorage};
pub(crate) use options::{NewImage, Options, help, no_backing};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The files of a new image. While this is there, no other program can write to them.
pub(crate) struct Files {
    kept: Vec<Kept>,
    /// Files that none of them is, by their ids as images.
    others: Vec<FileId>,
    /// How the host lays them out.
    layout: Layout,
}

struct Kept {
    name: PathBuf,
    file: Arc<FileStorage>,
    /// There was no file of that name.
    is_new: bool,
}

/// Refuses what is no regular file, nor to become one.
fn refuse_others(name: &Path) -> Result<(), String> {
    if host::is_file_name(name) && (name.is_file() || !name.exists()) {
        return Ok(());
    }
    Err(format!(
        "'{}' is not a regular file; images in this format must be regular files",
        isobath_storage::shown(name)
    ))
}

/// Refuses a file that cannot be replaced, before any other of the same image is.
async fn refuse_used(name: &Path) -> Result<(), String> {
    refuse_others(name)?;
    let mode = OpenMode { writable: true, ..OpenMode::default() };
    match FileHost.open(name, mode).await {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(reason(Error::Storage(error))),
        _ => Ok(()),
    }
}

/// Why an image cannot be created, without its name.
fn reason(error: Error) -> String {
    match error {
        Error::Storage(error) => crate::image_name::reason(&DiskError::from(error)),
        error @ Error::Format { .. } => error.to_string(),
    }
}

impl Files {
    async fn create(&mut self, name: &Path, direct: bool) -> Result<Arc<FileStorage>, String> {
        refuse_others(name)?;
        let failed = |error| reason(Error::Storage(error));
        let mode = OpenMode { writable: true, direct, ..OpenMode::default() };
        let spared = |id| {
            let own = self.kept.iter().any(|kept| kept.file.id() == id);
            own || self.others.contains(&host::id_of_file(id))
        };
        let made = FileHost.create_unlike(name, mode, &spared).await.map_err(failed)?;
        let Some(Made { file, is_new }) = made else {
            return Err(format!(
                "'{}' is one of the images to copy, or another file of the new image",
                isobath_storage::shown(name)
            ));
        };
        let file = Arc::new(file);
        // A symbolic link stays, whatever happens to the file.
        let name = FileHost.canonical(name).map_err(failed)?;
        // While it is empty: later there is no way to change it.
        file.lay_out(self.layout).await;
        self.kept.push(Kept { name, file: Arc::clone(&file), is_new });
        Ok(file)
    }

    /// Deletes them, or only those that are new, if they still have their names. Returns whether it did.
    pub(crate) async fn remove(&self, only_new: bool) -> bool {
        let mut all = true;
        for Kept { name, file, .. } in self.kept.iter().filter(|kept| kept.is_new || !only_new) {
            match FileHost.remove_file(name, file).await {
                Ok(true) => continue,
                Ok(false) => {
                    let name = isobath_storage::shown(name);
                    tracing::warn!(
                        "'{name}' stays as it is: another program has changed what it names"
                    );
                }
                Err(error) => tracing::warn!("{error}"),
            }
            all = false;
        }
        all
    }
}

impl NewImage {
    /// The files that the image `name` needs besides its own.
    ///
    /// # Errors
    /// If they cannot have names, or the disk is too large.
    pub(crate) fn extents(&self, name: &Path, size: u64) -> Result<Vec<PathBuf>, Failure> {
        match self {
            Self::Vmdk(options) => Ok(options.extents(name, size)?),
            _ => Ok(Vec::new()),
        }
    }

    /// Creates the image's files for a disk of `size` bytes, a multiple of 512. They are no image before the writer has
    /// finished. None of them replaces one of `others`.
    ///
    /// # Errors
    /// Why they cannot be created, without the image's name. Files that are new are then removed.
    pub(crate) async fn create(
        self,
        name: &Path,
        size: u64,
        direct: bool,
        layout: Layout,
        others: &[FileId],
    ) -> Result<(Writer<FileStorage>, Files), String> {
        let mut files = Files { kept: Vec::new(), others: others.to_vec(), layout };
        match self.begin(name, size, direct, &mut files).await {
            Ok(writer) => Ok((writer, files)),
            Err(reason) => {
                files.remove(true).await;
                Err(reason)
            }
        }
    }

    async fn begin(
        self,
        name: &Path,
        size: u64,
        direct: bool,
        files: &mut Files,
    ) -> Result<Writer<FileStorage>, String> {
        let others = match &self {
            Self::Vmdk(options) => options.extents(name, size).map_err(reason)?,
            _ => Vec::new(),
        };
        for one in others.iter().map(PathBuf::as_path).chain([name]) {
            refuse_used(one).await?;
        }
        let directory = name.parent().filter(|directory| !directory.as_os_str().is_empty());
        if directory.is_some_and(|directory| !directory.is_dir()) {
            // The error names the image, not an extent.
            files.create(name, direct).await?;
        }
        // The descriptor is the last: it makes the extents an image.
        let mut extents = Vec::new();
        for other in others {
            extents.push(files.create(&other, direct).await?);
        }
        let file = files.create(name, direct).await?;
        let writer = match self {
            Self::Vmdk(options) => Writer::vmdk(file, extents, size, &options),
            Self::Vhdx(options) => Writer::vhdx(file, size, options),
            Self::Vpc(options) => Writer::vpc(file, size, options),
            Self::Vdi(options) => Writer::vdi(file, size, options),
            Self::Qed(options) => Writer::qed(file, size, options),
        };
        writer.map_err(reason)
    }
}
