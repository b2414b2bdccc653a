//! Another program that begins while a command is held.

use super::judge::{Disk, Rules, View, Written};
use super::scenes::{FREE, IMAGES, qemu_io, state};
use super::tracer::{Call, Deed};
use super::{Undisturbed, Worker, ended_well, well};
use crate::programs::{isobath, qemu_img};
use isobath_testkit::args;
use isobath_testkit::locks::{denies_writing, is_written};
use isobath_testkit::process::Finished;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// A program that begins while a command is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Second {
    QemuWrites(&'static str),
    Writes(&'static str),
    QemuReads,
    Reads,
    QemuSnapshot,
    QemuLeaves,
    Overlay(&'static str),
    Commit,
    Delete,
}

/// QEMU's are refused at once.
const QEMUS: [Second; 7] = [
    Second::QemuWrites("top"),
    Second::QemuReads,
    Second::QemuWrites("mid"),
    Second::QemuWrites("top"),
    Second::QemuSnapshot,
    Second::QemuWrites("base"),
    Second::QemuLeaves,
];

/// Isobath's wait for a second to be let in.
const OURS: [Second; 8] = [
    Second::Writes("top"),
    Second::Delete,
    Second::Reads,
    Second::Writes("mid"),
    Second::Overlay("mid"),
    Second::Commit,
    Second::Writes("base"),
    Second::Overlay("low"),
];
/// Images that no other one reads.
const OUTSIDE: [&str; 2] = ["target", "other"];
/// At one of so many calls, Isobath is tried, too.
const RARELY: usize = 5;

/// The overlay that a second program makes.
const NEW: &str = "new";

/// What the second program writes.
const TAG: u8 = 0x77;
const LENGTH: usize = 20 << 10;

impl Second {
    /// Those that are tried at a call.
    pub(super) fn some(call: usize) -> impl Iterator<Item = Self> {
        let qemus = [QEMUS[call % QEMUS.len()], QEMUS[(call + 1) % QEMUS.len()]];
        let ours = call.is_multiple_of(RARELY).then(|| OURS[call / RARELY % OURS.len()]);
        qemus.into_iter().chain(ours)
    }

    fn run(self, directory: &Path) -> Finished {
        let write = format!("write -P {TAG} {FREE} {LENGTH}");
        let raw = format!("{}.raw", directory.display());
        match self {
            Self::QemuWrites(image) => qemu_io(directory, image, &[write]),
            Self::Writes(image) => isobath(directory, args!["io", "-c", write, image]),
            Self::QemuReads => qemu_img(directory, args!["convert", "-O", "raw", "top", raw]),
            Self::Reads => isobath(directory, args!["convert", "-O", "raw", "top", raw]),
            Self::QemuSnapshot => qemu_img(directory, ["snapshot", "-c", "beside", "top"]),
            // It takes mid out of top's chain, which loses what that holds.
            Self::QemuLeaves => {
                qemu_img(directory, ["rebase", "-u", "-b", "low", "-F", "qcow2", "top"])
            }
            Self::Overlay(image) => {
                isobath(directory, ["create", "-q", "-f", "qcow2", "-b", image, "-F", "qcow2", NEW])
            }
            Self::Commit => isobath(directory, ["commit", "top"]),
            Self::Delete => isobath(directory, ["chain", "delete", "top", "mid"]),
        }
    }
}

impl Worker<'_> {
    /// Holds the command at a call while another program runs.
    pub(super) fn beside(
        &self,
        what: &Undisturbed<'_>,
        at: usize,
        second: Second,
    ) -> Result<(), String> {
        let directory = self.path().to_owned();
        let mut other = None;
        let mut meanwhile = || other = Some(second.run(&directory));
        let done = self.run(what.step, at, Deed::Hold(&mut meanwhile));
        let Some(other) = other else { return Ok(()) };
        let report = |what: String| format!("{what}\n{}{}", other.report(), done.finished.report());
        ended_well(&done).and_then(|()| well(&other)).map_err(report)?;
        let raw = directory.with_added_extension("raw");
        let seen = fs::read(&raw).ok();
        let _ = fs::remove_file(raw);
        let succeeded = other.code() == 0;
        if matches!(second, Second::Overlay(_)) && succeeded {
            let new = qemu_img(&directory, ["compare", NEW, NEW]);
            fs::remove_file(directory.join(NEW)).unwrap();
            if new.code() != 0 {
                return Err(report(format!("the overlay cannot be read\n{}", new.report())));
            }
        }
        let left = state(self.path());
        let completed = done.finished.code() == 0;
        let but = what.step.target.filter(|_| !completed);
        let view = self.judge.look(&left, but);
        self.note(what, &outcome(second, &other, &done.finished));
        match second {
            Second::QemuReads | Second::Reads if succeeded => {
                what.rules().has_read(&Disk::of(&seen.unwrap_or_default())).map_err(report)?;
            }
            _ => {}
        }
        sound(what, second, succeeded, completed, &view).map_err(report)
    }
}

/// Whether what both programs leave is sound.
fn sound(
    what: &Undisturbed<'_>,
    second: Second,
    succeeded: bool,
    completed: bool,
    view: &View,
) -> Result<(), String> {
    let rules = what.rules();
    let written = match second {
        Second::QemuWrites(image) | Second::Writes(image) => Some(Written { image }),
        Second::QemuReads | Second::Reads => None,
        // What top does not have any more, mid's file has.
        Second::QemuLeaves if succeeded && view.images.contains_key("mid") => return Ok(()),
        _ if succeeded => return rules.sound(view, second == Second::QemuSnapshot),
        _ => None,
    };
    let written = written.filter(|_| succeeded);
    if completed && written.is_none() {
        return rules.complete(view);
    }
    let before = if completed { rules.after } else { rules.before };
    Rules { before, ..rules }.between(view, written)?;
    let Some(Written { image }) = written else { return Ok(()) };
    // What the command replaces, it replaces.
    if matches!(what.step.name, "snapshot-apply") && image == "top" {
        return Ok(());
    }
    let length = LENGTH / 512;
    view.has(image, FREE as usize / 512, &Disk::of(&vec![TAG; LENGTH]), length)
}

/// What became of both programs, for the totals.
fn outcome(second: Second, other: &Finished, first: &Finished) -> String {
    let became = |done: &Finished| if done.code() == 0 { "completes" } else { "is refused" };
    format!("beside {second:?}, which {}: {}", became(other), became(first))
}

/// From which images a command keeps writers out, while it runs.
#[derive(Default)]
pub(super) struct Watched {
    kept: BTreeSet<usize>,
    /// Those that it has opened for writing.
    written: BTreeSet<usize>,
    /// Those that it has let writers in to: the call before, and the images above that it has kept all the time since.
    let_go: BTreeMap<usize, (String, BTreeSet<usize>)>,
    last: String,
    wrong: Option<String>,
}

impl Watched {
    /// Looks, before a call is made.
    pub(super) fn look(&mut self, directory: &Path, call: &Call) {
        let images = || IMAGES.into_iter().map(|image| directory.join(image)).enumerate();
        let kept: BTreeSet<usize> =
            images().filter(|(_, image)| denies_writing(image)).map(|(number, _)| number).collect();
        let written: BTreeSet<usize> =
            images().filter(|(_, image)| is_written(image)).map(|(number, _)| number).collect();
        let above = |image: usize, other: &usize| {
            *other > image
                && !OUTSIDE.contains(&IMAGES[image])
                && !OUTSIDE.contains(&IMAGES[*other])
        };
        for image in self.kept.difference(&kept) {
            let above = kept.iter().copied().filter(|other| above(*image, other)).collect();
            self.let_go.insert(*image, (self.last.clone(), above));
        }
        for (image, (since, above)) in &mut self.let_go {
            above.retain(|other| kept.contains(other));
            let again = kept.contains(image) && !self.kept.contains(image);
            let written_again = self.written.contains(image) && written.contains(image);
            let why = match above.first() {
                Some(above) => format!("{} is kept", IMAGES[*above]),
                None => "it is opened for writing both before and after".to_owned(),
            };
            if again && (!above.is_empty() || written_again) {
                self.wrong = Some(format!(
                    "between '{since}' and '{}' another program may write to {}, though {why}",
                    self.last, IMAGES[*image],
                ));
            }
        }
        self.written.extend(written);
        self.kept = kept;
        self.last.clone_from(&call.text);
    }

    /// Whether no image was let go and opened for writing once more, or let go and kept again while an image that reads
    /// it was kept: another program could have changed what the command relies on.
    pub(super) fn verdict(self) -> Result<(), String> {
        self.wrong.map_or(Ok(()), Err)
    }
}
