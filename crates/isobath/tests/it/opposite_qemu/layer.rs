//! One image of a chain, and what is known of it.

use crate::opposite_qemu::history::ImageOptions;
use isobath_testkit::bytes::first_difference;
use isobath_testkit::model::Model;
use isobath_testkit::nbd::Run;
use isobath_testkit::{args, qemu};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub(crate) struct Layer {
    pub(crate) path: PathBuf,
    pub(crate) format: &'static str,
    pub(crate) data: Option<PathBuf>,
    pub(crate) options: ImageOptions,
    /// What it shows, unless it is the active one.
    pub(crate) view: Model,
    /// The name of each internal snapshot, and what it holds; that is unknown once the layers have gone
    /// from which it takes what it lacks.
    pub(crate) snapshots: Vec<(String, Option<Model>)>,
    pub(crate) bitmaps: Vec<Tracked>,
    /// As they were when another layer came above.
    pub(crate) frozen: Vec<(PathBuf, SystemTime, u64)>,
}

/// A persistent bitmap, and what the disk held when it was made.
#[derive(Clone)]
pub(crate) struct Tracked {
    pub(crate) name: String,
    pub(crate) since: Model,
}

impl Layer {
    /// What the host knows of its files.
    pub(crate) fn freeze(&mut self) {
        let files = std::iter::once(&self.path).chain(&self.data);
        self.frozen = files.map(|file| stamp(file)).collect();
    }

    /// Fails unless its files are as they were when it was frozen.
    pub(crate) fn assert_frozen(&self) {
        for before in &self.frozen {
            let now = stamp(&before.0);
            assert!(now == *before, "a backing file changed: {}", before.0.display());
        }
    }

    pub(crate) fn is_qcow2(&self) -> bool {
        self.format == "qcow2"
    }

    /// The bitmaps that claim to know every write.
    pub(crate) fn valid_bitmaps(&self) -> Vec<String> {
        if self.bitmaps.is_empty() {
            return Vec::new();
        }
        let info = qemu::info(&self.path);
        let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().cloned();
        let has = |bitmap: &serde_json::Value, flag: &str| {
            bitmap["flags"].as_array().is_some_and(|flags| flags.iter().any(|f| f == flag))
        };
        bitmaps
            .unwrap_or_default()
            .iter()
            .filter(|bitmap| has(bitmap, "auto") && !has(bitmap, "in-use"))
            .filter_map(|bitmap| bitmap["name"].as_str().map(str::to_owned))
            .collect()
    }

    /// Removes all bitmaps.
    pub(crate) fn drop_bitmaps(&mut self) {
        self.keep_bitmaps(&[]);
    }

    /// Removes the bitmaps that are in use, with which QEMU neither resizes nor commits.
    pub(crate) fn drop_bitmaps_in_use(&mut self) {
        let valid = self.valid_bitmaps();
        self.keep_bitmaps(&valid);
    }

    fn keep_bitmaps(&mut self, kept: &[String]) {
        let path = &self.path;
        self.bitmaps.retain(|bitmap| {
            let keep = kept.contains(&bitmap.name);
            if !keep {
                let _ = qemu::img(args!["bitmap", "--remove", path, &bitmap.name]).ok();
            }
            keep
        });
    }

    /// Every byte that differs from what it was when a bitmap was made is dirty there, if the bitmap is
    /// taken for consistent.
    pub(crate) fn assert_covered(&self, now: &Model, consistent: &[(String, Vec<Run>)]) {
        for (name, runs) in consistent {
            let Some(tracked) = self.bitmaps.iter().find(|bitmap| bitmap.name == *name) else {
                panic!("{} has a bitmap {name} that nobody made", self.path.display());
            };
            let end = now.size().min(tracked.since.size());
            let mut at = 0;
            for (length, flags) in runs {
                let part = (*length).min(end - at);
                if flags & 1 == 0 && part > 0 {
                    let (before, now) =
                        (tracked.since.read(at, part as usize), now.read(at, part as usize));
                    if let Some(byte) = first_difference(&before, &now) {
                        let byte = at + byte as u64;
                        panic!(
                            "the consistent bitmap {name} does not tell that byte {byte} changed"
                        );
                    }
                }
                at += part;
            }
            assert!(at == end, "the bitmap {name} ends at {at}");
        }
    }
}

fn stamp(path: &Path) -> (PathBuf, SystemTime, u64) {
    let data = path.metadata().unwrap();
    (path.to_owned(), data.modified().unwrap(), data.len())
}
