//! Small fleets of images that are headers alone.

use isobath_qcow2::{
    AutoclearFeatures, CompatibleFeatures, CompressionType, Extension, Header, HostOffset,
    IncompatibleFeatures,
};
use isobath_survey::{ChainRow, Options, Progress, Report, Survey, survey};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};
use tempfile::TempDir;

/// When the first file of a fleet is made, in seconds since 1970.
pub(crate) const BEGIN: u64 = 1_700_000_000;

pub(crate) struct Fleet {
    directory: TempDir,
}

impl Fleet {
    pub(crate) fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn root(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Makes an image of 1 GiB; an empty name is for no backing file.
    pub(crate) fn image(&self, name: impl AsRef<Path>, backing: &str) -> PathBuf {
        self.image_as(name, backing, Some("qcow2"))
    }

    pub(crate) fn image_as(
        &self,
        name: impl AsRef<Path>,
        backing: &str,
        format: Option<&str>,
    ) -> PathBuf {
        self.put(name, &header(backing, format).encode().unwrap())
    }

    pub(crate) fn put(&self, name: impl AsRef<Path>, bytes: &[u8]) -> PathBuf {
        let path = self.at(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, bytes).unwrap();
        path
    }

    /// Dates a file that many seconds after the begin.
    pub(crate) fn date(&self, name: impl AsRef<Path>, seconds: u64) {
        let time = UNIX_EPOCH + Duration::from_secs(BEGIN + seconds);
        File::options().write(true).open(self.at(name)).unwrap().set_modified(time).unwrap();
    }

    /// Surveys all of it, dated by the last write.
    pub(crate) fn survey(&self) -> Survey {
        self.survey_with(&Options { births: false, ..Options::default() })
    }

    pub(crate) fn survey_with(&self, options: &Options) -> Survey {
        survey(&[self.root().to_owned()], options, &Progress::default()).unwrap()
    }
}

/// A header of an image of 1 GiB.
pub(crate) fn header(backing: &str, format: Option<&str>) -> Header {
    let mut header = Header {
        version: 3,
        backing_file: None,
        cluster_bits: 16,
        size: 1 << 30,
        crypt_method: 0,
        l1_size: 2,
        l1_table_offset: HostOffset::new(0x30000),
        refcount_table_offset: HostOffset::new(0x10000),
        refcount_table_clusters: 1,
        nb_snapshots: 0,
        snapshots_offset: HostOffset::new(0),
        incompatible: IncompatibleFeatures::default(),
        compatible: CompatibleFeatures::default(),
        autoclear: AutoclearFeatures::default(),
        refcount_order: 4,
        header_length: 112,
        compression_type: CompressionType::Zlib,
        unknown_fields: vec![0; 7],
        extensions: vec![Extension::Unknown { magic: 5, data: vec![1, 2, 3] }],
    };
    if !backing.is_empty() {
        header.set_backing(Some((backing.to_owned(), format.map(str::to_owned))));
    }
    header
}

/// The row of the chain whose active image's name ends so.
pub(crate) fn row(survey: &Survey, name: &str) -> ChainRow {
    let mut rows = survey.chains().filter(|row| row.image.ends_with(name));
    let row = rows.next().unwrap_or_else(|| panic!("no chain of '{name}'"));
    assert_eq!(rows.next(), None, "'{name}' is no single chain");
    row
}

/// The problems as pairs of a file's name and a word, sorted.
pub(crate) fn problems(report: &Report, root: &Path) -> Vec<(String, &'static str)> {
    let prefix = format!("{}/", root.display());
    let mut found: Vec<_> = report
        .problems
        .list()
        .iter()
        .map(|one| {
            let name = String::from_utf8_lossy(&one.image).replace(&prefix, "");
            (name, one.trouble.word())
        })
        .collect();
    found.sort_unstable();
    found
}
