//! Commands on images that nobody else uses, crashed at any moment.

use isobath_crash::mode::Mode;
use isobath_crash::offline::run_offline;
use isobath_crash::outcome::{Settings, Totals, history_seed};

#[test]
fn commands_survive_crashes() {
    let settings = Settings::new(Mode::from_name("ordered").unwrap());
    let mut totals = Totals::default();
    for number in 0..25 {
        match run_offline(&settings, history_seed(11, number)) {
            Ok(more) => totals.add(&more),
            Err(failure) => panic!("{}", failure.report(&settings)),
        }
    }
    println!("{}", totals.table());
    assert!(totals.states > 1000, "{} states", totals.states);
}

/// A cluster of which a part reads as zeroes was released as a whole; and what version 2 cannot do is refused.
#[test]
fn amends_that_are_refused_leave_the_disk_as_it_is() {
    let settings = Settings {
        qemu_every: 0,
        offline: true,
        ..Settings::new(Mode::from_name("ordered").unwrap())
    };
    for seed in [0x44f6_e60b_8273_2a57, 0x2e51_e8f1_b9d6_1232, 0x8e62_6b69_2b3f_ba4e] {
        if let Err(failure) = run_offline(&settings, seed) {
            panic!("{}", failure.report(&settings));
        }
    }
}
