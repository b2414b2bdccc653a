//! Crashed and killed servers with jobs and changing chains, whose histories end.

use isobath_crash::mode::Mode;
use isobath_crash::outcome::Settings;
use isobath_crash::server::campaign::run_server;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Zones were short, and those that took no more clusters had no embedded lead blocks: background work looked for some
/// for ever, and nothing else ran on its thread.
#[test]
fn background_work_ends_where_there_is_none() {
    let (done, ended) = mpsc::channel();
    thread::spawn(move || {
        let mode = Mode::from_name("embedded").unwrap();
        let settings = Settings { qemu_every: 0, server: true, ..Settings::new(mode) };
        let passed = run_server(&settings, None, 0x197e_86e5_f8be_3267);
        done.send(passed.map(drop).map_err(|failure| failure.report(&settings))).unwrap();
    });
    // Takes a few seconds.
    let passed = ended.recv_timeout(Duration::from_mins(5)).expect("the history ends");
    passed.unwrap_or_else(|report| panic!("{report}"));
}
