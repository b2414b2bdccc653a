//! Carrying out a history, and judging what comes of it after every step.

use crate::opposite_qemu::history::{History, Side, Step};
use crate::opposite_qemu::world::{Noises, World};
use isobath_testkit::daemon::Daemon;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::ops::AddAssign;
use std::path::Path;

/// What was done.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Totals {
    pub(crate) histories: u64,
    pub(crate) layers: u64,
    pub(crate) sessions: u64,
    pub(crate) isobath: u64,
    pub(crate) qemu: u64,
    pub(crate) jobs: u64,
    pub(crate) bytes_compared: u64,
}

impl Totals {
    pub(crate) fn operations(&self) -> u64 {
        self.isobath + self.qemu + self.jobs
    }
}

impl AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.histories += other.histories;
        self.layers += other.layers;
        self.sessions += other.sessions;
        self.isobath += other.isobath;
        self.qemu += other.qemu;
        self.jobs += other.jobs;
        self.bytes_compared += other.bytes_compared;
    }
}

/// Carries the history out in `directory`; panics where something is wrong.
pub(crate) fn replay(history: &History, directory: &Path, daemon: &RefCell<Daemon>) -> Totals {
    let noises = Noises::make(directory);
    let sides: &[Option<Side>] =
        if history.twin { &[Some(Side::Isobath), Some(Side::Qemu)] } else { &[None] };
    let mut worlds: Vec<World> = sides
        .iter()
        .map(|only| {
            let name = only.map_or("both".to_owned(), |side| side.to_string());
            World::new(directory.join(name), *only, &noises, daemon, &history.base)
        })
        .collect();
    for part in parts(&history.steps) {
        for world in &mut worlds {
            world.take(part);
        }
        if let [one, other] = worlds.as_slice() {
            one.compare(other);
        }
    }
    let mut totals = Totals { histories: 1, ..Totals::default() };
    for mut world in worlds {
        world.end();
        totals += world.totals;
    }
    daemon.borrow_mut().assert_idle();
    totals
}

/// The steps, those of one opening together.
fn parts(steps: &[Step]) -> Vec<&[Step]> {
    steps.chunk_by(|_, next| matches!(next, Step::Op(_))).collect()
}
