//! Crashed and killed servers with jobs and changing chains, whose histories end.

use isobath_crash::mode::Mode;
use isobath_crash::outcome::Settings;
use isobath_crash::server::campaign::run_server;
use isobath_crash::server::chain::make;
use isobath_crash::server::kind::Kind;
use isobath_disk::ImageFormat;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use std::path::Path;
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

/// The judge took a raw image for a qcow2 one if a guest had copied the header of the active image to sector 0, and a
/// commit had put it there.
#[test]
fn a_header_that_a_guest_writes_into_a_raw_image_is_data() {
    let mode = Mode::from_name("ordered").unwrap();
    let mut rng = SmallRng::seed_from_u64(1);
    let (begin, raw) = loop {
        let begin = make(Kind::Commits, mode, &mut rng).unwrap();
        if let Some(raw) = begin.raw.clone() {
            break (begin, raw);
        }
    };
    let active = begin.start.image.as_path();
    let mut files = begin.start.files.clone();
    let other = files.iter().find(|(name, _)| name == active).unwrap().1.clone();
    files.iter_mut().find(|(name, _)| *name == raw).unwrap().1 = other;
    assert!(begin.header(&files, active).is_some());
    assert_eq!(begin.header(&files, &raw), None);
    assert_eq!(begin.format(&raw), Some(ImageFormat::Raw));
    assert_eq!(begin.format(Path::new("layer0.qcow2")), None);
}
