//! A real server on real files, crashed between its syncs (section 4.1 of the FAST '16 paper).

use isobath_crash::files::campaign::{Settings, Totals, run};
use isobath_crash::files::serve::record;
use isobath_crash::files::workload::Workload;
use isobath_disk::{MetadataMode, OpenOptions};
use isobath_testkit::qemu;
use isobath_testkit::seed::Seed;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Half as many as in the paper, for each of its workloads.
const STATES: usize = 100;
/// In modes that the paper does not have.
const FEWER: usize = 40;

fn settings(workload: Workload, mode: MetadataMode, states: usize, seed: &Seed) -> Settings {
    Settings { workload, mode, states, seed: seed.value(), threads: 2, sabotage: false }
}

fn passed(workload: Workload, mode: MetadataMode, states: usize, seed: &Seed) -> Totals {
    let totals =
        run(&settings(workload, mode, states, seed)).unwrap_or_else(|found| panic!("{found}"));
    assert_eq!(totals.states, states as u64);
    totals
}

#[test]
fn the_papers_workloads_survive_its_crashes() {
    let seed = Seed::new();
    let mut lost = 0;
    for workload in [Workload::Append, Workload::Overwrite] {
        let journal = passed(workload, MetadataMode::Journal, STATES, &seed);
        assert!(journal.refused > 0, "no journal was in use");
        assert!(journal.losses.data > 0 && journal.losses.journal > 0);
        let ordered = passed(workload, MetadataMode::Ordered, FEWER, &seed);
        assert_eq!(ordered.refused, 0, "an ordered image is open to all");
        assert!(ordered.losses.data > 0);
        lost += ordered.losses.metadata;
        passed(workload, MetadataMode::Embedded, FEWER, &seed);
    }
    // A fifth of the states or so; which ones depends on what the server's threads did.
    assert!(lost > 0);
}

#[test]
fn scattered_and_concurrent_writes_survive() {
    let seed = Seed::new();
    for workload in [Workload::Random, Workload::Writers] {
        for mode in MetadataMode::ALL {
            passed(workload, mode, 20, &seed);
        }
    }
}

#[test]
fn a_guest_finds_its_synced_files() {
    passed(Workload::Guest, MetadataMode::Auto, 20, &Seed::new());
}

#[test]
fn lying_syncs_are_noticed() {
    let seed = Seed::new();
    for mode in [MetadataMode::Journal, MetadataMode::Ordered] {
        let honest = settings(Workload::Append, mode, 200, &seed);
        run(&Settings { sabotage: true, ..honest }).unwrap_err();
    }
}

/// The server's thread was waited for, and nobody stopped it.
#[test]
fn a_panic_beside_the_server_ends_it() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk");
    qemu::create(&image, "qcow2", 1 << 20, "");
    let options = OpenOptions::new().writable(true);
    let work = || record::<()>(&image, &options, |_| panic!("the client has failed"));
    let panic = catch_unwind(AssertUnwindSafe(work)).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"the client has failed"));
    let again = record(&image, &options, |_| Ok(()));
    assert!(again.is_ok(), "somebody still uses the image: {:?}", again.err());
}
