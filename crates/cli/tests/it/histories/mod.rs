//! Random histories of commands on a chain of images: `isobath` on one copy of the chain, `qemu-img` on another. After
//! each command both copies hold the same: every disk, internal snapshot and bitmap, and what the headers say.
//!
//! [`trees`] does so with images that share layers, in several directories and beside servers.
//!
//! `ISOBATH_HISTORIES` says how many histories (`make histories` sets it), `ISOBATH_SEED` which one is the first. A
//! failure prints its seed and the commands that led to it. With `ISOBATH_HISTORIES_KEEP` the images of a failure stay.

mod campaign;
mod chain;
mod judge;
mod steps;
mod trees;

use campaign::Campaign;
use chain::Chain;

/// Histories of `make test`.
const SLICE: u64 = 2;
/// Commands of a history, after those that make the chain.
const STEPS: usize = 30;

#[test]
fn histories_leave_the_same_disks_as_qemu_img() {
    let campaign = Campaign::start("", "histories_leave", SLICE);
    campaign.run(STEPS, |seed| {
        let mut rng = seed.rng();
        let mut chain = Chain::random(&mut rng);
        for _ in 0..STEPS {
            chain.step(&mut rng);
        }
        chain.done().map(|(what, times)| (what.to_owned(), times)).collect()
    });
}
