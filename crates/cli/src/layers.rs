//! Chains whose order something else gives than the names in their headers: the command line, or an index of backups.
//!
//! OADP's data mover for virtual machines keeps a full backup of each disk and increments as qcow2 files, in a
//! directory for each checkpoint, beside an `index.json` that has the checkpoints of a virtual machine and the parent
//! of each. The files name no backing files, or ones that do not exist where they are restored.

use isobath_disk::{BackingFile, Below, ImageFormat, ImageInfo, Layer};
use isobath_qcow2::text::Shown;
use isobath_storage::{Storage, shown};
use serde::Deserialize;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

/// Most bytes of an index.
const MOST: u64 = 64 << 20;

/// The layers of a chain in the place of the files that the headers name.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Layers {
    /// The layers below the image, from the base up, separated by commas: all qcow2, whatever backing files their
    /// headers name; read-only. Can be repeated
    #[arg(long, value_name = "FILE,...", value_delimiter = ',')]
    layers: Vec<PathBuf>,
    /// The image is the index.json of a virtual machine's checkpoints, as OADP's data mover keeps it: read this disk
    /// of it, at the last checkpoint or the one with this ID, from the files beside it
    #[arg(long, value_name = "DISK[@ID]", conflicts_with = "layers")]
    checkpoint: Option<String>,
}

impl Layers {
    /// Whether any are given.
    pub(crate) fn is_any(&self) -> bool {
        !self.layers.is_empty() || self.checkpoint.is_some()
    }

    /// Whether files below the image are given.
    pub(crate) fn has_files(&self) -> bool {
        !self.layers.is_empty()
    }

    /// The image that a name stands for, and what is below it; `None` if nothing is given.
    ///
    /// # Errors
    /// The name is not that of an index, the disk or the checkpoint is not in it, or its files are not what it says.
    pub(crate) fn of(&self, name: &Path) -> Result<Option<Given>, String> {
        let (top, layers) = match &self.checkpoint {
            None if self.layers.is_empty() => return Ok(None),
            None => (name.to_owned(), self.layers.clone()),
            Some(wanted) => {
                let (disk, id) = match wanted.split_once('@') {
                    Some((disk, id)) => (disk, Some(id)),
                    None => (wanted.as_str(), None),
                };
                let mut files = Index::read(name)?.files(name, disk, id)?;
                let Some(top) = files.pop() else { unreachable!("a chain has a layer") };
                (top, files)
            }
        };
        let format = Some(ImageFormat::Qcow2);
        let below = layers.into_iter().rev();
        let below = below.map(|name| Below::Beneath(BackingFile { name, format }));
        Ok(Some(Given { top, below: below.chain([Below::Nothing]).collect() }))
    }
}

/// An image, and what is below it.
pub(crate) struct Given {
    pub(crate) top: PathBuf,
    pub(crate) below: Vec<Below>,
}

/// What is compared of a layer in an order that something else gives.
pub(crate) struct Compared<'l> {
    name: &'l Path,
    /// Bytes of the disk.
    size: u64,
    /// The backing file that its header names.
    backing_file: Option<String>,
}

impl<'l, S: Storage> From<&'l Arc<Layer<S>>> for Compared<'l> {
    fn from(layer: &'l Arc<Layer<S>>) -> Self {
        let backing_file = layer.header().and_then(|header| header.backing_file);
        Self { name: layer.name(), size: layer.size(), backing_file }
    }
}

impl<'l> From<&'l ImageInfo> for Compared<'l> {
    fn from(info: &'l ImageInfo) -> Self {
        let backing_file = info.backing_filename.clone();
        Self { name: &info.filename, size: info.virtual_size, backing_file }
    }
}

/// Checks that layers in an order that something else gives can be those of one disk, from the top down.
///
/// # Errors
/// A layer is smaller than the one below it, or the base names a backing file.
pub(crate) fn check<'l>(layers: impl Iterator<Item: Into<Compared<'l>>>) -> Result<(), String> {
    let layers: Vec<Compared<'_>> = layers.map(Into::into).collect();
    for (above, below) in layers.iter().zip(layers.iter().skip(1)) {
        if above.size < below.size {
            return Err(format!(
                "'{}' has {} bytes, but the layer below it, '{}', has {}: they are in another order, or not of one \
                 disk",
                shown(above.name),
                above.size,
                shown(below.name),
                below.size
            ));
        }
    }
    match layers.last().and_then(|base| Some((base, base.backing_file.as_deref()?))) {
        Some((base, below)) => Err(format!(
            "'{}' is the first layer, but its header names a backing file, '{}': a layer is missing",
            shown(base.name),
            Shown(below)
        )),
        None => Ok(()),
    }
}

/// The checkpoints of a virtual machine.
#[derive(Deserialize)]
struct Index {
    checkpoints: Vec<Checkpoint>,
}

#[derive(Deserialize)]
struct Checkpoint {
    id: String,
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    parent: String,
    #[serde(default)]
    files: Vec<CheckpointFile>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CheckpointFile {
    filename: String,
    #[serde(default)]
    disk_name: String,
    size: u64,
}

impl Index {
    fn read(path: &Path) -> Result<Self, String> {
        let failed = |error: &dyn std::fmt::Display| {
            format!("cannot read the index of checkpoints '{}': {error}", shown(path))
        };
        let file = File::open(path).map_err(|error| failed(&isobath_storage::cause(&error)))?;
        let mut text = Vec::new();
        let read = file.take(MOST + 1).read_to_end(&mut text);
        read.map_err(|error| failed(&isobath_storage::cause(&error)))?;
        if text.len() as u64 > MOST {
            return Err(failed(&format_args!("it has more than {MOST} bytes")));
        }
        serde_json::from_slice(&text).map_err(|error| failed(&error))
    }

    /// The files of a disk, from the full backup to the checkpoint with this ID, or the last one that has the disk.
    fn files(&self, path: &Path, disk: &str, id: Option<&str>) -> Result<Vec<PathBuf>, String> {
        let wrong = |what: &dyn std::fmt::Display| format!("'{}': {what}", shown(path));
        let with_id = |id: &str| {
            let mut found = self.checkpoints.iter().filter(|checkpoint| checkpoint.id == id);
            let shown = Shown(id);
            match (found.next(), found.next()) {
                (Some(checkpoint), None) => Ok(checkpoint),
                (None, _) => Err(wrong(&format_args!("there is no checkpoint '{shown}'"))),
                (Some(_), Some(_)) => {
                    Err(wrong(&format_args!("there are two checkpoints '{shown}'")))
                }
            }
        };
        let has_disk =
            |checkpoint: &&Checkpoint| checkpoint.files.iter().any(|file| file.disk_name == disk);
        let mut next = match id {
            Some(id) => with_id(id)?,
            None => self.checkpoints.iter().rev().find(has_disk).ok_or_else(|| {
                wrong(&format_args!("no checkpoint has a disk '{}'", Shown(disk)))
            })?,
        };
        let mut files = Vec::new();
        loop {
            files.push(next.file(path, disk).map_err(|what| wrong(&what))?);
            let of = Shown(&next.id);
            match (next.kind.to_ascii_lowercase().as_str(), next.parent.as_str()) {
                ("full", "") => break,
                ("incremental", parent) if !parent.is_empty() => {
                    // A chain is no longer than the index: whatever comes after that is a loop.
                    if files.len() == self.checkpoints.len() {
                        return Err(wrong(&format_args!("the parents of '{of}' lead back to it")));
                    }
                    next = with_id(parent)?;
                }
                ("full", _) => {
                    return Err(wrong(&format_args!("'{of}' is a full backup, but has a parent")));
                }
                ("incremental", _) => {
                    return Err(wrong(&format_args!("'{of}' is incremental, but has no parent")));
                }
                (kind, _) => {
                    return Err(wrong(&format_args!(
                        "'{of}' is of the type '{}', which is neither full nor incremental",
                        Shown(kind)
                    )));
                }
            }
        }
        files.reverse();
        Ok(files)
    }
}

impl Checkpoint {
    /// The file of a disk, which lies beside the index, in the directory of the checkpoint.
    fn file(&self, index: &Path, disk: &str) -> Result<PathBuf, String> {
        let (of, shown_disk) = (Shown(&self.id), Shown(disk));
        let mut found = self.files.iter().filter(|file| file.disk_name == disk);
        let file = match (found.next(), found.next()) {
            (Some(file), None) => file,
            (None, _) => return Err(format!("the checkpoint '{of}' has no disk '{shown_disk}'")),
            (Some(_), Some(_)) => {
                return Err(format!("the checkpoint '{of}' has two files for '{shown_disk}'"));
            }
        };
        // Names of the index must not lead elsewhere.
        for name in [&self.id, &file.filename] {
            let mut parts = Path::new(name).components();
            let only = parts.next();
            if !matches!(only, Some(Component::Normal(part)) if part == OsStr::new(name)) {
                return Err(format!("'{}' is not the name of a file", Shown(name)));
            }
        }
        let path = index.with_file_name(&self.id).join(&file.filename);
        let length = std::fs::metadata(&path).map_err(|error| {
            format!("cannot find '{}': {}", shown(&path), isobath_storage::cause(&error))
        })?;
        if length.len() != file.size {
            return Err(format!(
                "'{}' has {} bytes, where the index says {}: it was not copied whole, or changed",
                shown(&path),
                length.len(),
                file.size
            ));
        }
        Ok(path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::fs;
    use tempfile::TempDir;

    /// A full backup, two increments of it, and another full one, with a disk `root` of 3, 5, 7 and 9 bytes.
    struct Backups {
        directory: TempDir,
        index: Value,
    }

    impl Backups {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let mut checkpoints = Vec::new();
            let described = [
                ("a", "full", "", 3_usize),
                ("b", "incremental", "a", 5),
                ("c", "incremental", "b", 7),
                ("d", "full", "", 9),
            ];
            for (id, kind, parent, size) in described {
                fs::create_dir(directory.path().join(id)).unwrap();
                let name = format!("vmb-{id}-root.qcow2");
                fs::write(directory.path().join(id).join(&name), vec![0; size]).unwrap();
                checkpoints.push(json!({
                    "id": id, "type": kind, "parent": parent, "pvcs": ["root"],
                    "files": [{"filename": name, "diskName": "root", "size": size, "objectPath": "p"}],
                    "referencedBy": []
                }));
            }
            let index = json!({"vmName": "vm", "namespace": "n", "checkpoints": checkpoints});
            Self { directory, index }
        }

        /// The directories of the files that are found.
        fn files(&self, disk: &str, id: Option<&str>) -> Result<Vec<String>, String> {
            let path = self.directory.path().join("index.json");
            fs::write(&path, self.index.to_string()).unwrap();
            let files = Index::read(&path)?.files(&path, disk, id)?;
            let name = |file: &PathBuf| {
                assert!(file.is_file());
                let directory = file.parent().unwrap();
                directory.file_name().unwrap().to_str().unwrap().to_owned()
            };
            Ok(files.iter().map(name).collect())
        }

        fn refused(&self) -> String {
            self.files("root", Some("c")).unwrap_err()
        }
    }

    #[test]
    fn a_checkpoint_has_its_parents_below_it_in_any_order_of_the_index() {
        let mut backups = Backups::new();
        assert_eq!(backups.files("root", Some("c")).unwrap(), ["a", "b", "c"]);
        assert_eq!(backups.files("root", Some("a")).unwrap(), ["a"]);
        assert_eq!(backups.files("root", None).unwrap(), ["d"]);
        backups.index["checkpoints"].as_array_mut().unwrap().reverse();
        assert_eq!(backups.files("root", Some("c")).unwrap(), ["a", "b", "c"]);
        assert_eq!(backups.files("root", None).unwrap(), ["a"]);
    }

    #[test]
    fn an_index_that_does_not_fit_is_refused() {
        type Change = fn(&mut Value);
        let changes: [(Change, &str); 11] = [
            (|all| all[1]["parent"] = "".into(), "'b' is incremental, but has no parent"),
            (|all| all[0]["parent"] = "d".into(), "'a' is a full backup, but has a parent"),
            (|all| all[1]["parent"] = "x".into(), "there is no checkpoint 'x'"),
            (|all| all[3]["id"] = "b".into(), "there are two checkpoints 'b'"),
            (|all| all[0]["type"] = "half".into(), "'a' is of the type 'half'"),
            (|all| all[1]["files"] = json!([]), "the checkpoint 'b' has no disk 'root'"),
            (|all| all[1]["files"][0]["size"] = 6.into(), "has 5 bytes, where the index says 6"),
            (|all| all[1]["files"][0]["filename"] = "../c/x".into(), "is not the name of a file"),
            (|all| all[1]["files"][0]["filename"] = "..".into(), "is not the name of a file"),
            (|all| all[1]["files"][0]["filename"] = "x".into(), "cannot find"),
            (
                |all| {
                    all[0]["type"] = "incremental".into();
                    all[0]["parent"] = "c".into();
                },
                "lead back to it",
            ),
        ];
        for (change, why) in changes {
            let mut backups = Backups::new();
            change(&mut backups.index["checkpoints"]);
            assert!(backups.refused().contains(why), "{}", backups.refused());
        }
        let mut backups = Backups::new();
        assert!(
            backups.files("swap", None).unwrap_err().contains("no checkpoint has a disk 'swap'")
        );
        backups.index = json!([]);
        assert!(backups.refused().contains("cannot read the index of checkpoints"));
    }
}
