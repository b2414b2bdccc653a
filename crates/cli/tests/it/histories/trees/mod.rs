//! Random histories of commands on a tree of images: several chains that share layers, in several directories, by
//! names of every form. `isobath` works on one copy of it, or `qemu-img` in its turn; `qemu-img` on another. Meanwhile
//! servers use images, or are killed. After each step both copies hold the same.

mod judge;
mod names;
mod steps;
mod tree;

use super::campaign::Campaign;
use tree::Tree;

/// Histories of `make test`.
const SLICE: u64 = 3;
/// Steps of a history, after those that make the tree.
const STEPS: usize = 60;

#[test]
fn histories_of_trees_leave_the_same_disks_as_qemu_img() {
    let campaign = Campaign::start("trees", "histories_of_trees", SLICE);
    campaign.run(STEPS, |seed| {
        let mut rng = seed.rng();
        let mut tree = Tree::random(&mut rng);
        for _ in 0..STEPS {
            tree.step(&mut rng);
        }
        tree.end(&mut rng);
        std::mem::take(&mut tree.done)
    });
}
