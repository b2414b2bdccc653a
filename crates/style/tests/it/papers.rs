//! The papers' pages have a reason for each figure that is missed, and their rounds are measured on a quiet machine:
//! the tests of the benchmarks' Python hold, which measure nothing.

use std::path::Path;
use std::process::Command;

#[test]
fn the_papers_verdicts_pages_and_rounds_are_as_their_tests_say() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut command = Command::new("python3");
    command.args(["-B", "-m", "unittest", "discover", "--top-level-directory", "bench"]);
    command.args(["--start-directory", "bench/tests"]).current_dir(root);
    let done = command.output().unwrap();
    let printed = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.success(), "{printed}");
    // It succeeds where it finds no tests, too.
    assert!(printed.contains("\nRan ") && !printed.contains("\nRan 0 tests"), "{printed}");
}
