//! The simulator soon detects a flush that does nothing, in the same way each time; and what a raw data file lacks.

use isobath_crash::campaign::run_history;
use isobath_crash::guest::{Before, Log, Oracle};
use isobath_crash::host::Conduct;
use isobath_crash::image::{self, Kind, Start};
use isobath_crash::mode::{MODES, Mode};
use isobath_crash::outcome::{Settings, history_seed};
use isobath_crash::recover::{Case, Way, recover};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::path::Path;
use std::sync::Arc;

#[test]
fn a_flush_left_out_is_a_loss_that_is_found() {
    for mode in MODES {
        // Of a data file, a commit flushes it first.
        for (kind, flush) in [(None, 0), (None, 3), (Some(Kind::RawDataFile), 0)] {
            let settings = Settings {
                kind,
                sabotage: Some(flush),
                faultless: true,
                qemu_every: 0,
                ..Settings::new(mode)
            };
            let mut states = 0;
            let found = (0..100).map(|number| history_seed(7, number)).find_map(|seed| {
                match run_history(&settings, seed) {
                    Ok(totals) => {
                        states += totals.states;
                        None
                    }
                    Err(failure) => Some(failure),
                }
            });
            let Some(found) = found else {
                panic!("{}: flush {flush} is left out, and nobody notices", mode.name())
            };
            assert!(states < 30_000, "found only after {states} states");
            let again = run_history(&settings, found.seed).expect_err("it is found again");
            assert_eq!((again.what, again.story), (found.what, found.story));
        }
    }
}

/// Recovers a disk after a crash in which nothing was lost, except that its data file holds something else at a byte.
fn with_other_byte(start: &Start, at: Option<u64>, alone: bool) -> Result<(), String> {
    let before = Before::Bytes(Arc::clone(&start.content));
    let oracle = Arc::new(Oracle::of_crash(&Arc::new(Log::new(before)), 1));
    let case = Case {
        mode: Mode::from_name("ordered").unwrap(),
        start,
        kind: Kind::RawDataFile,
        atomic: 512,
        alone: alone.then(|| Arc::clone(&oracle)),
        oracle,
        lives: 1,
        leaked: 0,
        qemu: false,
        host: Conduct::default(),
        may_leak: false,
    };
    let mut files = start.files.clone();
    let data = start.new.data_file.as_deref().map(Path::new);
    let data = files.iter_mut().find(|(name, _)| Some(&**name) == data);
    if let (Some((_, content)), Some(at)) = (data, at) {
        Arc::make_mut(content).write(at, &[0xa5]);
    }
    recover(files, &case, Way::Open, 7, &mut Vec::new())
}

#[test]
fn a_raw_data_file_that_holds_something_else_than_the_disk_is_found() {
    let mut hidden = 0;
    for seed in 0..20 {
        let start = image::make(Kind::RawDataFile, true, &mut SmallRng::seed_from_u64(seed));
        let start = start.unwrap();
        with_other_byte(&start, None, true).unwrap();
        for at in (0..start.size()).step_by(start.new.cluster_size as usize) {
            let found = with_other_byte(&start, Some(at), true).unwrap_err();
            assert!(found.contains("the raw data file, read on its own"), "{found}");
            // The image's tables say that the cluster is zero.
            hidden += u32::from(with_other_byte(&start, Some(at), false).is_ok());
        }
    }
    assert!(hidden > 0, "no other check would have missed it");
}
