//! A seed gives the same history each time, to the byte and to the moment.

use isobath_crash::campaign::run_history;
use isobath_crash::mode::MODES;
use isobath_crash::outcome::{Settings, history_seed};

#[test]
fn a_history_can_be_repeated() {
    for mode in MODES {
        let settings = Settings { qemu_every: 0, ..Settings::new(mode) };
        for number in 0..8 {
            let seed = history_seed(3, number);
            let run = || match run_history(&settings, seed) {
                Ok(totals) => (totals.states, totals.digest, totals.sorts),
                Err(failure) => panic!("{}", failure.report(&settings)),
            };
            assert_eq!(run(), run(), "seed {seed:#x}");
        }
    }
}
