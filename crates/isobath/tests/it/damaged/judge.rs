//! One damaged image, read, checked, repaired and written by both programs, each on a copy.

use crate::damaged::inflict::inflict;
use crate::damaged::kinds::Kind;
use crate::damaged::pool::{IMAGE, Sample};
use crate::damaged::sides::{
    Content, SECTOR, Write, host, isobath_checks, isobath_reads, isobath_shrinks, isobath_writes,
    length, qemu_checks, qemu_reads, qemu_writes,
};
use isobath_disk::{MetadataMode, Repair};
use isobath_qcow2::Header;
use isobath_storage::memory::MemoryHost;
use isobath_testkit::process::Finished;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::fs;
use std::path::Path;

/// No write makes a file longer, unless QEMU's does as well: a damaged refcount table may say that all clusters before
/// are in use.
const MOST_LENGTH: u64 = 256 << 20;

/// What came of an image.
pub(crate) struct Verdict {
    /// Which image it was, and what was done to it.
    pub(crate) what: String,
    /// Accepted disagreements, each with what tells more of it.
    pub(crate) accepted: Vec<(Kind, String)>,
    /// What must not be.
    pub(crate) violations: Vec<String>,
}

struct Case<'a> {
    sample: &'a Sample,
    directory: &'a Path,
    image: Vec<u8>,
    verdict: Verdict,
}

/// Damages one of the images by chance, and judges it. `directory` is this call's own.
pub(crate) fn judge(pool: &[Sample], seed: u64, directory: &Path) -> Verdict {
    let mut rng = StdRng::seed_from_u64(seed);
    let sample = &pool[rng.random_range(0..pool.len())];
    let (image, done) = inflict(&sample.image, &mut rng);
    let what = format!("image {seed:#x} ({}): {done}", sample.what);
    let damaged = damaged_clusters(&sample.image, &image);
    let verdict = Verdict { what, accepted: Vec::new(), violations: Vec::new() };
    let mut case = Case { sample, directory, image, verdict };
    let write = write(sample, &damaged, &mut rng);
    // Most disks end within a cluster then.
    let size = aim(sample, &damaged, &mut rng).unwrap_or(sample.size) / 512 * 512;
    case.judge(write, size);
    case.verdict
}

/// Where the guest clusters begin whose L2 entries are damaged.
fn damaged_clusters(before: &[u8], after: &[u8]) -> Vec<u64> {
    let header = Header::parse(before).unwrap();
    let geometry = header.geometry().unwrap();
    let size = geometry.cluster_size() as usize;
    let mut found = Vec::new();
    for index in 0..header.l1_size as usize {
        let at = header.l1_table_offset.get() as usize + index * 8;
        let entry = u64::from_be_bytes(before[at..at + 8].try_into().unwrap());
        let table = (entry & 0x00ff_ffff_ffff_fe00) as usize;
        let (Some(before), Some(after)) = (before.get(table..), after.get(table..)) else {
            continue;
        };
        let width = size / geometry.l2_entries() as usize;
        let pairs = before.chunks(width).zip(after.chunks(width)).take(size / width);
        let damaged = pairs.enumerate().filter(|(_, (one, other))| table > 0 && one != other);
        let first = index as u64 * geometry.l2_entries();
        found.extend(damaged.map(|(number, _)| (first + number as u64) * size as u64));
    }
    found
}

/// A place on the disk; half of them in damaged clusters, if there are any.
fn aim(sample: &Sample, damaged: &[u64], rng: &mut StdRng) -> Option<u64> {
    let start = damaged.get(rng.random_range(0..damaged.len().max(1)));
    let aimed = start
        .filter(|_| rng.random())
        .map(|start| start + rng.random_range(0..sample.cluster_size));
    let place = aimed.unwrap_or_else(|| rng.random_range(0..=sample.size));
    (place < sample.size).then_some(place)
}

fn write(sample: &Sample, damaged: &[u64], rng: &mut StdRng) -> Write {
    let clones = rng.random_ratio(1, 4);
    let unit = if clones { sample.cluster_size } else { 512 };
    let offset = aim(sample, damaged, rng).unwrap_or(0) / unit * unit;
    let most = (sample.size - offset).min((80 << 10).max(unit));
    let length = rng.random_range(1..=most / unit) * unit;
    let modes = MetadataMode::ALL;
    let mode = match modes[rng.random_range(0..modes.len())] {
        // Version 2 can have no journal.
        _ if sample.version < 3 => MetadataMode::Auto,
        mode => mode,
    };
    Write { clones, offset, length, pattern: rng.random_range(1..=255), mode }
}

/// Whether QEMU says nothing of the image, since a file that it names is not there.
fn lacks_file(judged: &Finished) -> bool {
    let said = &judged.stderr;
    let missing = said.contains("No such file") || said.contains("Could not open backing file");
    judged.code() == 1 && missing
}

/// What two readings of a disk have in common.
fn first_difference(one: &Content, other: &Content, skip: impl Fn(usize) -> bool) -> Option<usize> {
    (0..one.sectors()).filter(|n| !skip(*n)).find(|n| {
        let (before, after) = (one.sector(*n), other.sector(*n));
        before.is_some() && before != after
    })
}

impl Case<'_> {
    fn accept(&mut self, kind: Kind, why: impl Into<String>) {
        self.verdict.accepted.push((kind, why.into()));
    }

    fn violate(&mut self, how: impl Into<String>) {
        self.verdict.violations.push(how.into());
    }

    fn host(&self) -> MemoryHost {
        host(&self.image, self.sample)
    }

    /// Gives QEMU the files of `host`.
    fn lay_out(&self, host: &MemoryHost) {
        fs::write(self.directory.join(IMAGE), host.contents(IMAGE).unwrap()).unwrap();
        for (name, _) in &self.sample.others {
            fs::write(self.directory.join(name), host.contents(name).unwrap()).unwrap();
        }
    }

    fn judge(&mut self, write: Write, size: u64) {
        let host = self.host();
        self.lay_out(&host);
        let ours = isobath_reads(&host);
        let theirs = qemu_reads(self.directory);
        if let Some((at, length)) = ours.as_ref().ok().and_then(|content| content.only_in_parts) {
            self.violate(format!("{length} bytes at {at} can be read only in parts"));
        }
        self.compare_reads(&ours, &theirs);
        let findings = self.compare_checks(&host);
        if host.contents(IMAGE).unwrap() != self.image {
            self.violate("a look at the image changed it");
        }
        for repair in [Repair::Leaks, Repair::All] {
            self.repair(repair, &ours, &theirs);
        }
        self.write(write, &ours, &theirs, &findings);
        self.shrink(size, write, &ours, &findings);
    }

    fn compare_reads(&mut self, ours: &Result<Content, String>, theirs: &Result<Content, String>) {
        match (ours, theirs) {
            (Err(_), Err(_)) => {}
            (Err(error), Ok(_)) => self.accept(Kind::OpenedByQemuOnly, error),
            (Ok(_), Err(error)) => self.accept(Kind::OpenedByIsobathOnly, error),
            (Ok(ours), Ok(theirs)) if ours.size != theirs.size => {
                self.violate(format!("sizes differ: {} and QEMU's {}", ours.size, theirs.size));
            }
            (Ok(ours), Ok(theirs)) => {
                let (mut here, mut there) = (0, 0);
                for number in 0..ours.sectors() {
                    match (ours.sector(number), theirs.sector(number)) {
                        (Some(one), Some(other)) if one != other => {
                            self.violate(format!("sector {number} differs from QEMU's"));
                            break;
                        }
                        (Some(_), None) => here += 1,
                        (None, Some(_)) => there += 1,
                        _ => {}
                    }
                }
                if here > 0 {
                    self.accept(Kind::ReadByIsobathOnly, format!("{here} sectors"));
                }
                if there > 0 {
                    self.accept(Kind::ReadByQemuOnly, format!("{there} sectors"));
                }
            }
        }
    }

    /// Compares what the checks say; returns what ours found.
    fn compare_checks(&mut self, host: &MemoryHost) -> Vec<String> {
        let (ours, findings) = isobath_checks(host, Repair::None);
        let theirs = qemu_checks(self.directory);
        let first = findings.first().cloned().unwrap_or_default();
        match (ours, theirs.code()) {
            (Err(_), 1) => {}
            (Err(error), _) => self.accept(Kind::ExaminedByQemuOnly, error),
            (Ok(report), 0) if report.is_clean() => {}
            (Ok(_), 1) if lacks_file(&theirs) => {
                self.accept(Kind::ExaminedByIsobathOnly, theirs.stderr);
            }
            (Ok(report), _) if report.is_clean() => {
                self.violate(format!("called clean, but QEMU says:\n{}", theirs.report()));
            }
            (Ok(_), 0) => self.accept(Kind::FoundByIsobathOnly, first),
            (Ok(_), 1) => self.accept(Kind::ExaminedByIsobathOnly, theirs.stderr),
            (Ok(report), 2 | 3) => {
                let theirs = theirs.json();
                let number = |key: &str| theirs[key].as_u64().unwrap_or(0);
                if (report.corruptions, report.leaks) != (number("corruptions"), number("leaks")) {
                    self.accept(Kind::CountedDifferently, first);
                }
            }
            (Ok(_), code) => {
                self.violate(format!("qemu-img check exits with {code}:\n{}", theirs.report()));
            }
        }
        findings
    }

    fn repair(
        &mut self,
        repair: Repair,
        ours: &Result<Content, String>,
        theirs: &Result<Content, String>,
    ) {
        let host = self.host();
        let (report, said) = isobath_checks(&host, repair);
        let after = isobath_reads(&host);
        match (ours, &after) {
            (Ok(_), Err(error)) => self.violate(format!("unreadable after {repair:?}: {error}")),
            (Ok(ours), Ok(after)) => {
                if let Some(number) = first_difference(ours, after, |_| false) {
                    self.violate(format!("{repair:?} changed sector {number}; it said {said:?}"));
                }
            }
            _ => {}
        }
        for (name, bytes) in &self.sample.others {
            if host.contents(name).as_ref() != Some(bytes) {
                self.violate(format!("{repair:?} changed {name}"));
            }
        }
        let Ok(report) = report else { return };
        let changed = host.contents(IMAGE).unwrap() != self.image;
        if report.is_clean() {
            let (again, found) = isobath_checks(&host, Repair::None);
            if again.as_ref().map_or(true, |again| !again.is_clean()) {
                self.violate(format!("{repair:?} calls it clean, then: {again:?} {found:?}"));
            }
        }
        if !changed || repair == Repair::Leaks && !report.is_clean() {
            return;
        }
        self.lay_out(&host);
        if report.is_clean() {
            let judged = qemu_checks(self.directory);
            if judged.code() != 0 && !lacks_file(&judged) {
                let judged = judged.report();
                self.violate(format!("{repair:?} calls it clean, but QEMU says:\n{judged}"));
            }
        }
        if let Ok(theirs) = theirs {
            match qemu_reads(self.directory) {
                Err(error) => {
                    self.violate(format!("QEMU cannot open it after {repair:?}: {error}"));
                }
                Ok(after) => {
                    if let Some(number) = first_difference(theirs, &after, |_| false) {
                        self.violate(format!("{repair:?} changed sector {number} of QEMU's"));
                    }
                }
            }
        }
    }

    fn write(
        &mut self,
        write: Write,
        ours: &Result<Content, String>,
        theirs: &Result<Content, String>,
        findings: &[String],
    ) {
        let host = self.host();
        let written = isobath_writes(&host, write);
        if self.is_too_long(&host, write, &format!("{write:?} ({written:?})")) {
            return;
        }
        let after = isobath_reads(&host);
        self.judge_write("Isobath", write, &written, ours, &after, findings);
        if let (Ok(()), Ok(before)) = (&written, theirs) {
            self.lay_out(&host);
            let after = qemu_reads(self.directory);
            self.judge_write("QEMU's reading", write, &written, &Ok(before), &after, findings);
        }
        self.lay_out(&self.host());
        let by_qemu = qemu_writes(self.directory, write);
        match (written, by_qemu) {
            (Ok(()), Err(said)) => self.accept(Kind::WrittenByIsobathOnly, said),
            (Err(said), Ok(())) => self.accept(Kind::WrittenByQemuOnly, said),
            _ => {}
        }
    }

    /// Whether a file has become too long to be judged further. It should not have, unless it does so as well when QEMU
    /// does `write`.
    fn is_too_long(&mut self, host: &MemoryHost, write: Write, after: &str) -> bool {
        let names = self.sample.others.iter().map(|(name, _)| *name).chain([IMAGE]);
        let Some(name) = names.into_iter().find(|name| length(host, name) > MOST_LENGTH) else {
            return false;
        };
        self.lay_out(&self.host());
        let by_qemu = qemu_writes(self.directory, write);
        let theirs = fs::metadata(self.directory.join(name)).unwrap().len();
        if theirs <= MOST_LENGTH {
            let ours = length(host, name);
            self.violate(format!(
                "{after} makes {name} {ours} bytes long, QEMU {theirs} ({by_qemu:?})"
            ));
        }
        true
    }

    /// A disk that becomes smaller keeps the rest of its bytes; one that does not keeps all.
    fn shrink(
        &mut self,
        size: u64,
        write: Write,
        before: &Result<Content, String>,
        findings: &[String],
    ) {
        let (host, mode) = (self.host(), write.mode);
        let shrunk = isobath_shrinks(&host, size, mode);
        let what = format!("a shrink to {size} bytes ({mode:?}, {shrunk:?})");
        let Ok(before) = before else { return };
        if self.is_too_long(&host, write, &what) {
            return;
        }
        let after = match isobath_reads(&host) {
            Ok(after) => after,
            Err(error) => {
                self.violate(format!("unreadable after {what}: {error}"));
                return;
            }
        };
        if shrunk.is_ok() && after.size != size {
            self.violate(format!("{what} leaves {} bytes", after.size));
        }
        let end = if after.size == size { size } else { before.size };
        let changed = first_difference(before, &after, |number| (number * SECTOR) as u64 >= end);
        if let Some(number) = changed {
            self.wrong(findings, format!("{what} changed sector {number}"));
        }
    }

    /// What must not be, unless the tables say too little to know better.
    fn wrong(&mut self, findings: &[String], how: String) {
        let low = |text: &String| {
            text.starts_with("ERROR cluster") && text.contains("reference=")
                || text.contains("OFLAG_COPIED")
                || text.starts_with("ERROR: overflow")
                // The file grows, and the cluster is allocated.
                || text.starts_with("ERROR: counting reference for region exceeding the end")
        };
        if findings.iter().any(low) {
            self.accept(Kind::RefcountsTooLow, how);
        } else {
            self.violate(format!("{how}; the check found {findings:?}"));
        }
    }

    fn judge_write(
        &mut self,
        reader: &str,
        write: Write,
        written: &Result<(), String>,
        before: &Result<impl std::borrow::Borrow<Content>, String>,
        after: &Result<Content, String>,
        findings: &[String],
    ) {
        let Ok(before) = before else { return };
        let before = before.borrow();
        let after = match after {
            Ok(after) => after,
            Err(error) => {
                self.violate(format!("{reader}: unreadable after {write:?}: {error}"));
                return;
            }
        };
        let changed = first_difference(before, after, |number| write.touches(number));
        if let Some(number) = changed {
            self.wrong(
                findings,
                format!("{reader}: {write:?} ({written:?}) changed sector {number} too"),
            );
            return;
        }
        if written.is_ok() {
            let missing = (0..after.sectors()).filter(|n| write.touches(*n)).find(|n| {
                after.sector(*n).is_none_or(|bytes| bytes.iter().any(|b| *b != write.pattern))
            });
            if let Some(number) = missing {
                self.wrong(findings, format!("{reader}: {write:?} is not in sector {number}"));
            }
        }
    }
}
