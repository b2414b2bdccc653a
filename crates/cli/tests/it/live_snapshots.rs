//! Many snapshots in a row under load: each holds what the guest had written before it, and a server
//! has descriptors for all of them.
//!
//! There are 100 snapshots, or as many as `ISOBATH_SNAPSHOTS` says.

use crate::live::load::{Log, SECTOR, Shared, Stamps, Window, judge, run};
use crate::live::{DEVICE, ISOBATH, Live};
use isobath_testkit::nbd::Nbd;
use isobath_testkit::process::run_program;
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu};
use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

const SIZE: u64 = 16 << 20;
const SECTORS: u32 = (SIZE / SECTOR as u64) as u32;
/// QEMU takes its time to open chains that are longer.
const FEW: usize = 100;

/// Open descriptors of a process, and the most memory it had, in KiB.
fn used(pid: u32) -> (usize, u64) {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    (descriptors, most.trim().trim_end_matches(" kB").parse().unwrap())
}

/// The stamp in the first sector.
fn counter(image: &Path) -> u32 {
    let done = run_program(ISOBATH, args!["io", "-r", "-c", "read -v 0 4", image]).ok();
    let text = done.text();
    let line = text.lines().find_map(|line| line.strip_prefix("00000000:")).unwrap();
    let bytes = line.split_whitespace().take(4).map(|byte| u8::from_str_radix(byte, 16).unwrap());
    u32::from_le_bytes(bytes.collect::<Vec<_>>().try_into().unwrap())
}

#[test]
fn each_of_many_snapshots_holds_what_was_written_before_it() {
    let count = std::env::var("ISOBATH_SNAPSHOTS").map_or(FEW, |text| text.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let path = |number: usize| directory.path().join(format!("s{number}"));
    qemu::create(&path(0), "qcow2", SIZE, "cluster_size=16k");
    let seed = Seed::new();
    let mut rng = seed.rng();
    let live = Live::start(directory.path(), "s0", &["--metadata", "auto"]);
    let frontend = live.frontend();
    let shared = Shared::default();
    let clock = &shared.clock;
    let mut windows = Vec::new();
    let mut counted = Log::default();
    let mut times = Vec::new();
    let logs = thread::scope(|scope| {
        let (frontend, shared) = (&frontend, &shared);
        let load = scope.spawn(move || run(frontend, 8..SECTORS, shared, 1 << 24, false, &mut rng));
        let mut client = Nbd::connect(&live.nbd(), DEVICE).unwrap();
        let mut control = live.control();
        for number in 0..count {
            counted.put(&mut client, clock, number as u32 + 1).unwrap();
            let from = clock.now();
            let begun = Instant::now();
            control.snapshot(&format!("s{}", number + 1)).unwrap();
            times.push(begun.elapsed());
            windows.push(Window { from, until: clock.now(), flushed: false });
            thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(control.nodes().unwrap().len(), count + 1);
        shared.stop.store(true, Ordering::SeqCst);
        [load.join().unwrap(), counted]
    });
    let (descriptors, memory) = used(live.server.pid());
    let _ = live.stop();
    times.sort();
    println!(
        "{count} snapshots: median {:?}, longest {:?}; {descriptors} descriptors, {memory} KiB",
        times[count / 2],
        times[count - 1]
    );

    let nothing = Stamps::none(SECTORS as usize);
    let raw = directory.path().join("raw");
    for (number, window) in windows.iter().enumerate() {
        let image = path(number);
        assert_eq!(counter(&image), number as u32 + 1, "{}", image.display());
        if number % count.div_ceil(50) > 0 {
            continue;
        }
        if number < FEW {
            qemu::assert_clean(&image);
            qemu::to_raw(&image, "qcow2", &raw);
        } else {
            let _ = run_program(ISOBATH, args!["check", "-q", &image]).ok();
            let _ = run_program(ISOBATH, args!["convert", "-O", "raw", &image, &raw]).ok();
        }
        let found = Stamps::of(&fs::read(&raw).unwrap()).unwrap();
        judge(&nothing, &logs, *window, &found)
            .unwrap_or_else(|error| panic!("{}: {error}; {seed:?}", image.display()));
    }
}
