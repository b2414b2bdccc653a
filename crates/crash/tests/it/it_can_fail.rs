//! The simulator soon detects a flush that does nothing, in the same way each time.

use isobath_crash::campaign::run_history;
use isobath_crash::mode::MODES;
use isobath_crash::outcome::{Settings, history_seed};

#[test]
fn a_flush_left_out_is_a_loss_that_is_found() {
    for mode in MODES {
        for flush in [0, 3] {
            let settings = Settings {
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
