//! A command that is interrupted by a signal.

use super::scenes::program;
use super::tracer::{Deed, Kind, trace};
use std::ffi::OsString;

#[test]
fn a_chain_that_is_interrupted_while_its_index_is_written_is_removed() {
    const ACTIVE: &str = "chain/layer-00002.qcow2";
    let words = "chain generate --indexed --layers 3 --size 4M --data zero chain";
    let arguments: Vec<OsString> = words.split(' ').map(OsString::from).collect();
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
