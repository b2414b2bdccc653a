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
