//! Crashed and killed servers with jobs and changing chains; their histories are reproducible.

use isobath_crash::mode::MODES;
use isobath_crash::outcome::{Settings, history_seed};
use isobath_crash::server::campaign::run_server;

#[test]
fn a_servers_history_can_be_repeated() {
    for mode in MODES {
        let settings = Settings { qemu_every: 0, server: true, ..Settings::new(mode) };
        let digest = |seed| match run_server(&settings, None, seed) {
            Ok(totals) => (totals.states, totals.digest, totals.sorts),
            Err(failure) => panic!("{}", failure.report(&settings)),
        };
        let seed = history_seed(11, 1);
        assert_eq!(digest(seed), digest(seed));
    }
}
