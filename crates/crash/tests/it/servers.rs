//! Servers with jobs and chains that change, crashed and killed: a few histories; `make crash` has the others.

use isobath_crash::campaign::{Settings, history_seed};
use isobath_crash::mode::MODES;
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

#[test]
fn a_flush_left_out_by_a_server_is_found() {
    for mode in MODES {
        for flush in [1, 4] {
            let settings = Settings {
                sabotage: Some(flush),
                faultless: true,
                qemu_every: 0,
                server: true,
                ..Settings::new(mode)
            };
            let seeds = (0..60).map(|number| history_seed(7, number));
            let found = seeds.into_iter().any(|seed| run_server(&settings, None, seed).is_err());
            assert!(found, "{}: flush {flush} is left out, and nobody notices", mode.name());
        }
    }
}
