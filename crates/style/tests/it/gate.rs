//! What `make test` says when something fails: the names, in the last two kilobytes.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

/// A checkout with the script, and programs that stand in for cargo and cargo-nextest.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str, cargo: &str, nextest: &str) -> Self {
        // Two runs of these tests do not share it.
        let directory = format!("gate-{name}-{}", std::process::id());
        let tree = Self(Path::new(env!("CARGO_TARGET_TMPDIR")).join(directory));
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/gate");
        tree.program("scripts/gate", &fs::read_to_string(script).unwrap());
        tree.program("bin/cargo", &format!("#!/bin/sh\n{cargo}\n"));
        let nextest =
            format!("#!/bin/sh\nreport=target/nextest/default\nmkdir -p $report\n{nextest}\n");
        tree.program("target/tools/bin/cargo-nextest", &nextest);
        tree
    }

    fn program(&self, file: &str, text: &str) {
        let path = self.0.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Another process writes it: a descriptor of this one is open in each process that another test begins
        // meanwhile, and the kernel runs no file that is open for writing.
        let mut install = Command::new("install");
        install.args(["-m", "755", "/dev/stdin"]).arg(&path).stdin(Stdio::piped());
        let mut install = install.spawn().unwrap();
        install.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
        assert!(install.wait().unwrap().success());
    }

    /// Runs a step, and gives whether it passed and the end of what was printed.
    fn run(&self, step: &str) -> (bool, String) {
        let path = format!("{}:{}", self.0.join("bin").display(), std::env::var("PATH").unwrap());
        let mut command = Command::new(self.0.join("scripts/gate"));
        command.arg(step).env("PATH", path).env_remove("CARGO_TARGET_DIR");
        let done = command.output().unwrap();
        let printed = String::from_utf8(done.stdout).unwrap();
        let end = printed.len().saturating_sub(2048);
        (done.status.success(), String::from_utf8_lossy(&printed.as_bytes()[end..]).into_owned())
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A report as cargo-nextest writes it.
fn report(cases: &str) -> String {
    format!(
        "cat > $report/junit.xml <<'END'\n<?xml version=\"1.0\"?>\n<testsuites>\
         <testsuite name=\"isobath-cli::it\">{cases}</testsuite></testsuites>\nEND\nexit 100"
    )
}

fn failed(name: &str, says: &str) -> String {
    format!(
        "<testcase name=\"{name}\" classname=\"isobath-cli::it\"><failure message=\"it panicked\" \
         type=\"test failure with exit code 101\">text</failure><system-err>thread '{name}' (7) \
         panicked at tests/it/x.rs:1:2:\n{says}\nnote: run with RUST_BACKTRACE=1</system-err></testcase>"
    )
}

#[test]
fn a_failed_test_is_named_with_its_reason_however_much_it_prints() {
    let long = "x".repeat(200_000);
    let cases = failed("live::a_test", &format!("a reason {long}"))
        + "<testcase name=\"passes\" classname=\"c\"/>";
    let tree = Tree::new("one", "", &format!("seq 100000\n{}", report(&cases)));
    let (passed, end) = tree.run("tests");
    assert!(!passed);
    assert!(end.contains("FAILED in step tests after "), "{end}");
    assert!(end.contains("GiB of disk"), "{end}");
    let line = "FAILED isobath-cli::it live::a_test: tests/it/x.rs:1:2: a reason xxx";
    assert!(end.contains(line), "{end}");
    assert!(!end.contains("passes"), "{end}");
    assert!(end.lines().all(|line| line.len() < 500), "{end}");
}

#[test]
fn many_failed_tests_are_named_and_the_rest_counted() {
    let some: String = (0..12).map(|n| failed(&format!("area::test_{n}"), "a reason")).collect();
    let (_, end) = Tree::new("some", "", &report(&some)).run("tests");
    for n in 0..12 {
        assert!(end.contains(&format!("FAILED isobath-cli::it area::test_{n}")), "{end}");
    }
    let many: String = (0..500).map(|n| failed(&format!("area::test_{n}"), "a reason")).collect();
    let (_, end) = Tree::new("many", "", &report(&many)).run("tests");
    assert!(end.contains("FAILED in step tests") && end.contains("area::test_0"), "{end}");
    assert!(end.contains(" more; see target/gate/tests.log"), "{end}");
}

#[test]
fn a_flaky_test_is_reported_and_passes() {
    let case = "<testcase name=\"boot::it_boots\" classname=\"isobath-cli::it\">\
                <flakyFailure message=\"m\" type=\"t\"/></testcase>";
    let nextest = report(case).replace("exit 100", "exit 0");
    let (passed, end) = Tree::new("flaky", "", &nextest).run("tests");
    assert!(passed, "{end}");
    assert!(
        end.contains("FLAKY isobath-cli::it boot::it_boots") && end.contains("\n1 flaky\n"),
        "{end}"
    );
}

#[test]
fn other_steps_name_what_failed_too() {
    let cargo = "case $1 in\n\
        fmt) echo 'Diff in /src/lib.rs:3:'; echo ' one line'; exit 1;;\n\
        clippy) echo 'error: unused variable: `x`'; echo '  --> src/lib.rs:5:9'; exit 101;;\n\
        test) echo 'test crates/isobath/src/lib.rs - (line 20) ... FAILED'; exit 101;;\n\
        esac";
    let tree = Tree::new("others", cargo, "echo 'error: could not compile `x`'; exit 101");
    for (step, line) in [
        ("format", "FAILED Diff in /src/lib.rs:3:: one line"),
        ("clippy", "FAILED error: unused variable: `x`: --> src/lib.rs:5:9"),
        ("examples", "FAILED crates/isobath/src/lib.rs"),
        ("tests", "FAILED error: could not compile `x`"),
    ] {
        let (passed, end) = tree.run(step);
        assert!(!passed && end.contains(line), "{step}: {end}");
    }
}

#[test]
fn an_interrupted_run_ends_at_once_and_its_step_with_it() {
    let tree = Tree::new("interrupted", "", "echo $$ > $report/pid; exec sleep 1000");
    let pid = tree.0.join("target/nextest/default/pid");
    let mut gate = Command::new(tree.0.join("scripts/gate"))
        .arg("tests")
        .env_remove("CARGO_TARGET_DIR")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let read = || fs::read_to_string(&pid).ok().filter(|text| text.ends_with('\n'));
    let step = wait(read);
    let kill = Command::new("kill").arg(gate.id().to_string()).status();
    assert!(kill.unwrap().success());
    let status = wait(|| gate.try_wait().unwrap());
    assert_eq!(status.code(), Some(130));
    let process = Path::new("/proc").join(step.trim()).join("cmdline");
    wait(|| fs::read(&process).map_or(true, |words| words.is_empty()).then_some(()));
}

/// What `look` finds, within a minute.
fn wait<T>(mut look: impl FnMut() -> Option<T>) -> T {
    for _ in 0..6000 {
        if let Some(found) = look() {
            return found;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("waited for a minute");
}
