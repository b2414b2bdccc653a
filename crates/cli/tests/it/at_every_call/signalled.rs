//! A command that is interrupted by a signal.

use super::scenes::program;
use super::tracer::{Call, Deed, Kind, trace};
use std::ffi::OsString;
use std::fs;
use std::path::Path;

fn words(line: &str) -> Vec<OsString> {
    line.split(' ').map(OsString::from).collect()
}

#[test]
fn a_chain_that_is_interrupted_while_its_index_is_written_is_removed() {
    const ACTIVE: &str = "chain/layer-00002.qcow2";
    let arguments = words("chain generate --indexed --layers 3 --size 4M --data zero chain");
    let run = |at, deed: Deed<'_>| {
        let root = tempfile::tempdir().unwrap();
        (trace(root.path(), &mut program(&arguments), at, deed), root)
    };
    let (whole, root) = run(usize::MAX, Deed::Nothing);
    assert_eq!(whole.finished.code(), 0, "{}", whole.finished.report());
    assert!(root.path().join(ACTIVE).exists());
    // The active image is complete when it is opened the last time.
    let of_active = |kind| {
        let calls = whole.calls.iter().enumerate();
        calls.filter(move |(_, call)| call.kind == kind && call.text.ends_with(ACTIVE))
    };
    let (opened, _) = of_active(Kind::Open).next_back().expect("the image is opened for its index");
    let mut written = of_active(Kind::Write).skip_while(|(at, _)| *at < opened);
    let (at, call) = written.next().expect("the index is written");
    let (interrupted, root) = run(at, Deed::Signal(libc::SIGINT));
    let report = interrupted.finished.report();
    assert_eq!(interrupted.finished.code(), 128 + libc::SIGINT, "{}: {report}", call.text);
    let said = "isobath: interrupted; the images created so far were removed\n";
    assert!(interrupted.finished.stderr.ends_with(said), "{report}");
    assert!(!root.path().join("chain").exists());
}

#[test]
fn forks_that_are_interrupted_while_they_are_written_are_removed() {
    let run = |at, deed: Deed<'_>| {
        let root = tempfile::tempdir().unwrap();
        let base = words("create -q -f qcow2 base 4M");
        let made = trace(root.path(), &mut program(&base), usize::MAX, Deed::Nothing);
        assert_eq!(made.finished.code(), 0, "{}", made.finished.report());
        let arguments = words("fork -q -n 40 base fork-{}");
        (trace(root.path(), &mut program(&arguments), at, deed), root)
    };
    let count = |root: &Path| fs::read_dir(root).unwrap().count();
    let (whole, root) = run(usize::MAX, Deed::Nothing);
    assert_eq!(whole.finished.code(), 0, "{}", whole.finished.report());
    assert_eq!(count(root.path()), 41);
    let is_first = |call: &Call| call.kind == Kind::Write && call.text.contains("fork-");
    let at = whole.calls.iter().position(is_first).expect("the overlays are written");
    let (interrupted, root) = run(at, Deed::Signal(libc::SIGTERM));
    let report = interrupted.finished.report();
    assert_eq!(interrupted.finished.code(), 128 + libc::SIGTERM, "{report}");
    let said = "isobath: interrupted; the overlays made so far were removed\n";
    assert!(interrupted.finished.stderr.ends_with(said), "{report}");
    assert_eq!(count(root.path()), 1, "{report}");
}
