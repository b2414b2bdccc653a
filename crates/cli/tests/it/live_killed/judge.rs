//! What is found after a kill, against what was promised.

use super::SIZE;
use super::field::{Expected, Field, OTHER, Task, Unsure, promised};
use crate::live::load::{Log, Stamps, judge};
use crate::live::{ISOBATH, Live};
use isobath_qcow2::Header;
use isobath_testkit::process::{Finished, run_program};
use isobath_testkit::{args, qemu, until_some};
use rand::RngExt;
use std::fs;
use std::path::PathBuf;

impl Field {
    /// Whether a snapshot that was not confirmed has become the active image: its file is complete.
    pub(super) fn settle_snapshot(&mut self) -> bool {
        let Some(Unsure::Snapshot(file, from)) = &self.unsure else { return false };
        let (file, expected) = (file.clone(), Expected::Written(promised(*from)));
        self.unsure = None;
        let complete = self.backing(&file).is_some();
        if complete {
            self.expected.insert(self.active(), expected);
            self.chain.push(file);
        }
        complete
    }

    /// Recovers the images and judges what is in them.
    pub(super) fn judge(&mut self, logs: &[Log], served: Option<Stamps>) -> Result<(), String> {
        let killed = self.shared.clock.now();
        let flushed = promised;
        let unsure = self.unsure.take();
        // Who starts the server again finds all, with journals that nobody has looked at.
        let mut served = served;
        if served.is_none()
            && !matches!(unsure, Some(Unsure::Complete(_)))
            && self.rng.random_ratio(1, 2)
        {
            let live = Live::start(self.directory.path(), &self.active(), &["--read-only"]);
            served = Some(self.read_served(&live)?);
            let _ = live.stop();
        }
        for file in self.chain.clone() {
            self.recover(&file)?;
        }
        // The images say what the chain is.
        let asked = std::mem::take(&mut self.chain);
        self.chain = self.chain_of(asked.last().unwrap());
        let without = |task: &Task| {
            let at = |file: &str| asked.iter().position(|name| name == file).unwrap();
            let last = at(&task.top) + usize::from(task.command == "block-commit");
            let mut chain = asked.clone();
            chain.drain(at(&task.base) + 1..last);
            chain
        };
        if self.chain != asked {
            let task = self.interrupted.take();
            let shorter = task.as_ref().map(without);
            if shorter.as_ref() != Some(&self.chain) {
                return Err(format!("the chain is {:?}, not {asked:?} or {shorter:?}", self.chain));
            }
        }
        let mut now = self.read(&self.active())?;
        if let Some(served) = served {
            served.compare(&now).map_err(|error| format!("read by the server: {error}"))?;
        }
        let mut judged = judge(&self.before, logs, flushed(killed), &now);
        if let (Err(error), Some(Unsure::Complete(base))) = (&judged, unsure) {
            // Then the base has taken the disk's place.
            let error = error.clone();
            // A mirror's target was not in the chain before.
            self.recover(&base)?;
            now = self.read(&base)?;
            judged = judge(&self.before, logs, flushed(killed), &now);
            judged = judged.map_err(|other| format!("{error}; in the base: {other}"));
            self.chain = self.chain_of(&base);
            self.interrupted = None;
        }
        judged.map_err(|error| format!("the disk: {error}"))?;
        self.judge_size()?;

        let chain = self.chain.clone();
        for file in &chain[..chain.len() - 1] {
            let Some(expected) = self.expected.remove(file) else { continue };
            let found = self.read(file)?;
            let judged = match &expected {
                Expected::Found(stamps) => stamps.compare(&found),
                Expected::Written(window) => judge(&self.before, logs, *window, &found),
            };
            judged.map_err(|error| format!("{file} in {chain:?}: {error}"))?;
            self.expected.insert(file.clone(), Expected::Found(found));
        }
        self.expected.retain(|file, _| chain[..chain.len() - 1].contains(file));
        self.before = now;
        Ok(())
    }

    /// What an image names as its backing file; `None` if it is not complete.
    fn backing(&self, file: &str) -> Option<String> {
        let path = self.path(file);
        if !path.exists() {
            return None;
        }
        let done = qemu::img(args!["info", "-U", "--output=json", &path]);
        if done.stderr.contains("isobath check -r all") {
            // It was in use: QEMU does not open an image with a journal.
            return Header::parse(&fs::read(path).ok()?).ok()?.backing_file;
        }
        let info = (done.code() == 0).then(|| done.json())?;
        info["backing-filename"].as_str().map(str::to_owned)
    }

    /// The chain below an image, by the images' headers; from the base up.
    fn chain_of(&self, file: &str) -> Vec<String> {
        let mut chain = vec![file.to_owned()];
        while let Some(next) = self.backing(&chain[0]) {
            let name = PathBuf::from(next).file_name().unwrap().to_str().unwrap().to_owned();
            chain.insert(0, name);
        }
        chain
    }

    /// `qemu-img check` of an image, after a recovery if it asks for one. Leaks are repaired.
    fn recover(&self, file: &str) -> Result<(), String> {
        let path = self.path(file);
        // The kernel gives up a killed process's locks a moment after its end.
        let check = || {
            until_some("the end of a killed server's locks", || {
                Some(qemu::check(&path)).filter(|check| !check.stderr.contains("lock"))
            })
        };
        let mut done: Finished = check();
        if done.stderr.contains("isobath check -r all") || done.code() == 3 {
            let _ = run_program(ISOBATH, args!["check", "-q", "-r", "all", &path]).ok();
            done = check();
        }
        if done.code() == 0 { Ok(()) } else { Err(format!("{file}: {}", done.report())) }
    }

    fn read(&self, file: &str) -> Result<Stamps, String> {
        stamps(&qemu::read_disk(&self.path(file), "qcow2"))
            .map_err(|error| format!("{file} in {:?}: {error}", self.chain))
    }

    /// What a server shows of the disk.
    pub(super) fn read_served(&self, live: &Live) -> Result<Stamps, String> {
        let raw = self.path("raw");
        let _ = qemu::img(args!["convert", "-f", "raw", "-O", "raw", live.uri(), &raw]).ok();
        stamps(&fs::read(raw).unwrap()).map_err(|error| format!("read by the server: {error}"))
    }

    /// The disk is as long as it was told to be, or as it was being told.
    fn judge_size(&mut self) -> Result<(), String> {
        let info = qemu::info(&self.path(&self.active()));
        let size = info["virtual-size"].as_u64().unwrap();
        if size != self.size && size != self.may_be {
            return Err(format!("its size is {size}, not {} or {}", self.size, self.may_be));
        }
        (self.size, self.may_be) = (size, size);
        Ok(())
    }

    /// The second disk, of which nothing changed but its content.
    pub(super) fn judge_other(&mut self, logs: &[Log]) -> Result<(), String> {
        let killed = self.shared.clock.now();
        if logs.iter().any(Log::survives) {
            let live = Live::start(self.directory.path(), OTHER, &[]);
            let _ = live.stop();
        }
        self.recover(OTHER)?;
        let found = self.read(OTHER)?;
        judge(&self.other, logs, promised(killed), &found)
            .map_err(|error| format!("the other disk: {error}"))?;
        self.other = found;
        Ok(())
    }
}

/// The stamps of what every image has; nobody writes to what came by growth.
fn stamps(disk: &[u8]) -> Result<Stamps, String> {
    let (used, grown) = disk.split_at(SIZE);
    if grown.iter().any(|byte| *byte != 0) {
        return Err("what was never written is not zero".into());
    }
    Stamps::of(used)
}
