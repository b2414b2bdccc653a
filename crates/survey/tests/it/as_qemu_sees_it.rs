//! Chain lengths are those of `qemu-img info --backing-chain`; hidden bytes are what `qemu-img map`
//! leaves of them.

use isobath_survey::render::{self, Listing};
use isobath_survey::{Options, Progress, SortBy, Survey, survey};
use isobath_testkit::{args, qemu};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const UNIT: u64 = 512;

fn surveyed(directory: &Path) -> Survey {
    let options = Options { clusters: true, ..Options::default() };
    let found = survey(&[directory.to_owned()], &options, &Progress::default()).unwrap();
    let problems = found.report().problems;
    assert_eq!(problems.list(), [], "{problems:?}");
    found
}

/// A tree: a base, layers of several geometries, and clones.
struct Tree {
    directory: tempfile::TempDir,
    layers: Vec<(&'static str, Option<&'static str>)>,
}

impl Tree {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap(), layers: Vec::new() }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Makes an image and runs `qemu-io` commands on it.
    fn image(
        &mut self,
        name: &'static str,
        below: Option<&'static str>,
        size: u64,
        options: &str,
        commands: &[&str],
    ) {
        match below {
            None => qemu::create(&self.at(name), "qcow2", size, options),
            Some(below) => {
                qemu::create_overlay(&self.at(name), Path::new(below), "qcow2", options);
                let _ =
                    qemu::img(args!["resize", "-q", "--shrink", self.at(name), size.to_string()])
                        .ok();
            }
        }
        let _ = qemu::io(&self.at(name), "qcow2", commands).ok();
        self.layers.push((name, below));
    }

    fn below(&self, name: &str) -> Option<&'static str> {
        self.layers.iter().find(|layer| layer.0 == name).unwrap().1
    }

    /// The layers from `name` down.
    fn chain(&self, name: &'static str) -> Vec<&'static str> {
        std::iter::successors(Some(name), |name| self.below(name)).collect()
    }

    fn active(&self) -> impl Iterator<Item = &'static str> {
        let used: BTreeSet<_> = self.layers.iter().filter_map(|layer| layer.1).collect();
        self.layers.iter().map(|layer| layer.0).filter(move |name| !used.contains(name))
    }

    /// Bytes of clusters in a layer that hold something and of which no disk shows any part, by
    /// `qemu-img map`; and all that hold something.
    fn hidden(&self, name: &'static str, cluster: u64) -> (u64, u64) {
        let mut seen: BTreeSet<u64> = BTreeSet::new();
        for active in self.active() {
            let Some(depth) = self.chain(active).iter().position(|&one| one == name) else {
                continue;
            };
            for extent in qemu::map(&self.at(active)).as_array().unwrap() {
                if extent["depth"] == depth {
                    let start = extent["start"].as_u64().unwrap();
                    let end = start + extent["length"].as_u64().unwrap();
                    seen.extend(
                        (start / UNIT..end.div_ceil(UNIT)).map(|unit| unit * UNIT / cluster),
                    );
                }
            }
        }
        let mut held: BTreeSet<u64> = BTreeSet::new();
        for extent in qemu::map(&self.at(name)).as_array().unwrap() {
            let own = extent["depth"] == 0 && extent["data"] == true;
            if own {
                let start = extent["start"].as_u64().unwrap();
                let end = start + extent["length"].as_u64().unwrap();
                held.extend(start / cluster..end.div_ceil(cluster));
            }
        }
        let hidden = held.difference(&seen).count() as u64;
        (hidden * cluster, held.len() as u64 * cluster)
    }
}

#[test]
fn lengths_are_those_of_the_backing_chain() {
    let mut tree = Tree::new();
    let size = 1 << 20;
    tree.image("base", None, size, "", &[]);
    tree.image("one", Some("base"), size, "", &[]);
    tree.image("two", Some("one"), size, "", &[]);
    tree.image("old", None, size, "compat=0.10", &[]);
    tree.image("over-old", Some("old"), size, "compat=0.10,cluster_size=512", &[]);
    std::fs::write(tree.at("raw"), vec![0; 1 << 20]).unwrap();
    qemu::create_overlay(&tree.at("on-raw"), Path::new("raw"), "raw", "");
    let found = surveyed(tree.directory.path());
    assert_eq!(found.chain_count(), 3);
    for row in found.chains() {
        let info =
            qemu::img(args!["info", "--backing-chain", "--output=json", &row.image]).ok().json();
        assert_eq!(row.length as usize, info.as_array().unwrap().len(), "{}", row.image);
        assert_eq!(info[0]["virtual-size"], row.disk_bytes);
    }
}

#[test]
fn hidden_bytes_are_what_no_disk_shows() {
    let mut tree = Tree::new();
    let size = 8 << 20;
    tree.image("base", None, size, "", &["write -P 1 0 4M", "write -P 1 6M 64k"]);
    tree.image("low", Some("base"), size, "", &["write -P 2 0 1M", "write -z 6M 64k"]);
    // Smaller clusters above hide only what they cover.
    let small = "cluster_size=4k";
    let writes = ["write -P 3 512k 256k", "write -P 3 1M 4k", "write -P 3 768k 60k"];
    tree.image("small", Some("low"), size, small, &writes);
    tree.image(
        "sub",
        Some("small"),
        size,
        "extended_l2=on",
        &["write -P 4 0 130k", "write -P 4 512k 130k", "write -P 4 2M 2k"],
    );
    // A second disk sees what the first has replaced; a third is shorter.
    tree.image("clone", Some("low"), size, "", &["write -P 5 0 512k"]);
    tree.image("shorter", Some("base"), 2 << 20, "", &["write -P 6 1M 1M"]);
    tree.image("alone", None, size, "", &["write -P 7 0 1M"]);
    let found = surveyed(tree.directory.path());
    let clusters = found.report().clusters.unwrap();
    let cluster_of = |name: &str| if name == "small" { 4 << 10 } else { 64 << 10 };
    let told: BTreeMap<_, _> =
        tree.layers.iter().map(|(name, _)| (*name, tree.hidden(name, cluster_of(name)))).collect();
    let (hidden, held) =
        told.values().fold((0, 0), |sum, (hidden, held)| (sum.0 + hidden, sum.1 + held));
    assert!(told["base"].0 > 0 && told["low"].0 > 0 && told["small"].0 > 0, "{told:?}");
    assert_eq!((clusters.hidden_bytes, clusters.images), (hidden, 7), "{told:?}");
    assert_eq!(clusters.data_bytes, held, "{told:?}");
    for row in found.chains() {
        let name = row.image.rsplit('/').next().unwrap();
        let active = tree.active().find(|active| *active == name).unwrap();
        let expected: u64 = tree.chain(active).iter().map(|layer| told[layer].0).sum();
        assert_eq!(row.hidden_bytes, Some(expected), "{name}");
    }
}

#[test]
fn internal_snapshots_keep_what_the_disk_hides() {
    let mut tree = Tree::new();
    tree.image("base", None, 1 << 20, "", &["write -P 1 0 1M"]);
    let _ = qemu::img(args!["snapshot", "-c", "kept", tree.at("base")]).ok();
    tree.image("top", Some("base"), 1 << 20, "", &["write -P 2 0 1M"]);
    let report = surveyed(tree.directory.path()).report();
    assert_eq!(report.clusters.unwrap().hidden_bytes, 0);
    let _ = qemu::img(args!["snapshot", "-d", "kept", tree.at("base")]).ok();
    let report = surveyed(tree.directory.path()).report();
    assert_eq!(report.clusters.unwrap().hidden_bytes, 1 << 20);
}

#[test]
fn corrupt_tables_hide_nothing_and_cost_no_more_than_the_file() {
    let mut tree = Tree::new();
    tree.image("base", None, 64 << 30, "", &["write -P 1 0 1M"]);
    tree.image("top", Some("base"), 64 << 30, "", &["write -P 2 0 1M"]);
    let l1_at = 0x30000;
    let mut bytes = std::fs::read(tree.at("top")).unwrap();
    // Every entry of the L1 table names the same L2 table.
    let entry: [u8; 8] = bytes[l1_at..l1_at + 8].try_into().unwrap();
    for at in 0..128 {
        bytes[l1_at + at * 8..][..8].copy_from_slice(&entry);
    }
    std::fs::write(tree.at("top"), &bytes).unwrap();
    let options = Options { clusters: true, ..Options::default() };
    let paths = [tree.directory.path().to_owned()];
    let count = || survey(&paths, &options, &Progress::default()).unwrap();
    let report = count().report();
    let words: Vec<_> = report.problems.list().iter().map(|one| one.trouble.word()).collect();
    assert_eq!(words, ["bad-tables"]);
    assert!(report.problems.list()[0].detail.contains("more tables than the file can hold"));
    // A table past the end of the file, and an entry that no cluster starts at.
    bytes[l1_at..l1_at + 1024].fill(0);
    bytes[l1_at..l1_at + 8].copy_from_slice(&(1_u64 << 63 | 1 << 40).to_be_bytes());
    std::fs::write(tree.at("top"), &bytes).unwrap();
    let found = count();
    let report = found.report();
    assert_eq!(report.clusters.unwrap().hidden_bytes, 0);
    assert!(report.problems.list()[0].detail.contains("extends past the end of the file"));
    // And yet all is printed.
    let listing = Listing { count: 10, sort: SortBy::Hidden };
    let mut text = Vec::new();
    render::text(&found, &report, listing, &mut text).unwrap();
    assert!(String::from_utf8(text).unwrap().contains("its tables are corrupt"));
}
