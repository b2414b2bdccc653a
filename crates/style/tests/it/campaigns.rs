//! The page of the campaigns' results is what their lines make, and says which of them are of other sources.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const LINES: &str = "docs/results/campaigns.jsonl";
const PAGE: &str = "docs/campaigns.md";

/// A directory with a copy of the script, a source of the engine and no lines. It goes with this value.
struct Tree(PathBuf);

impl Tree {
    fn new(name: &str) -> Self {
        let directory = format!("campaigns-{name}-{}", std::process::id());
        let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join(directory);
        for directory in ["scripts", "docs/results", "crates/image/src", "crates/cli/src"] {
            fs::create_dir_all(root.join(directory)).unwrap();
        }
        // Not by this process: a descriptor of it is open in each process that another test begins meanwhile, and the
        // kernel runs no file that is open for writing.
        let copied = Command::new("cp").arg(script()).arg(root.join("scripts/evidence")).status();
        assert!(copied.unwrap().success());
        let tree = Self(root);
        for file in [LINES, "crates/image/src/lib.rs", "crates/cli/src/main.rs"] {
            tree.write(file, "");
        }
        tree
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.0.join(file), text).unwrap();
    }

    fn read(&self, file: &str) -> String {
        fs::read_to_string(self.0.join(file)).unwrap()
    }

    fn run(&self, program: &Path, words: &[&str]) -> Output {
        let mut command = Command::new(program);
        // A repository around this one is not its own.
        command.args(words).current_dir(&self.0).env("ISOBATH_EVIDENCE", self.0.join(LINES));
        command.output().unwrap_or_else(|error| panic!("{}: {error}", program.display()))
    }

    #[track_caller]
    fn evidence(&self, words: &[&str]) -> String {
        succeeded(&self.run(&self.0.join("scripts/evidence"), words))
    }

    /// What the script says as it fails.
    #[track_caller]
    fn refused(&self, words: &[&str]) -> String {
        let done = self.run(&self.0.join("scripts/evidence"), words);
        assert!(!done.status.success(), "{words:?} succeeded");
        String::from_utf8(done.stderr).unwrap()
    }

    #[track_caller]
    fn git(&self, words: &[&str]) {
        let settings = ["user.name=test", "user.email=t@example.invalid", "commit.gpgsign=no"];
        let all: Vec<&str> = settings.iter().flat_map(|setting| ["-c", setting]).collect();
        succeeded(&self.run(Path::new("git"), &[&all, words].concat()));
    }

    /// Adds a run of a campaign with these fields.
    #[track_caller]
    fn ran(&self, fields: &[&str]) {
        let begun = self.evidence(&["begin"]);
        self.evidence(&[&["add", begun.trim()], fields].concat());
    }

    /// The page's rows that begin with a campaign's name.
    #[track_caller]
    fn rows(&self, campaign: &str) -> Vec<String> {
        self.evidence(&[]);
        self.evidence(&["check"]);
        let begin = format!("| {campaign} |");
        let page = self.read(PAGE);
        page.lines().filter(|line| line.starts_with(&begin)).map(str::to_owned).collect()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/evidence")
}

#[track_caller]
fn succeeded(done: &Output) -> String {
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{out}{err}");
    out.into_owned()
}

/// It needs no history: the page names the sources that it compares with, and lines name theirs, by digests.
#[test]
fn the_page_is_what_the_lines_make() {
    let done = Command::new(script()).arg("check").output();
    let said = succeeded(&done.expect("python3 is not installed: run scripts/setup"));
    assert!(said.contains("is what the"), "{said}");
    print!("{said}");
}

#[test]
fn a_row_sums_runs_and_says_that_the_sources_have_changed() {
    let tree = Tree::new("rows");
    let run = |count, seeds| {
        let (count, seeds) = (format!("count={count}"), format!("seeds={seeds}"));
        tree.ran(&["campaign=crash", "kind=disk", "mode=journal", &count, &seeds, "also.judged=2"]);
    };
    run(1000, "1");
    run(500, "2");
    tree.ran(&["campaign=kills", "count=10"]);
    let rows = tree.rows("crash");
    let [row] = &rows[..] else { panic!("{rows:?}") };
    let begin = "| crash | disk | journal | 1,500 states | 4 judged | 0 of 2 | 1; 2 |";
    assert!(row.starts_with(begin), "{row}");
    assert!(row.ends_with(" | no | 1,500 |"), "{row}");
    assert!(
        tree.read(PAGE).contains("No run is recorded of: crash-small, "),
        "{}",
        tree.read(PAGE)
    );

    // The simulator runs the library, the kills the program.
    tree.write("crates/cli/src/main.rs", "fn main() {}");
    assert!(tree.evidence(&["check"]).contains("the program has changed since the page was made"));
    assert!(tree.rows("crash")[0].contains(" | no | "));
    assert!(tree.rows("kills")[0].contains("**program has changed since**"));
    tree.write("crates/image/src/lib.rs", "// another engine");
    assert!(tree.rows("crash")[0].ends_with(" | **engine has changed since** | 1,500 |"));
    run(7, "3");
    let row = &tree.rows("crash")[0];
    assert!(row.contains(" | 7 states | 2 judged | 0 of 1 | 3 | "), "{row}");
    assert!(row.ends_with(" | no | 1,507 |"), "{row}");
}

#[test]
fn a_failed_run_is_told_with_its_reason() {
    let tree = Tree::new("failed");
    tree.ran(&["campaign=soak", "count=3", "failure=seed 7: a `byte` | differs\nand more"]);
    let row = &tree.rows("soak")[0];
    assert!(row.contains(" | 3 operations | - | **1 of 1** | "), "{row}");
    let page = tree.read(PAGE);
    assert!(page.contains(", soak, at not known: `seed 7: a 'byte' | differs`\n"), "{page}");
}

#[test]
fn a_run_names_its_commit() {
    let tree = Tree::new("commits");
    tree.git(&["init", "-q"]);
    tree.git(&["add", "-A"]);
    tree.git(&["commit", "-q", "-m", "one"]);
    tree.ran(&["campaign=soak", "count=1"]);
    // The campaigns' own lines are no change.
    tree.ran(&["campaign=soak", "count=2"]);
    assert!(tree.read(LINES).lines().all(|line| line.contains(r#""dirty": false"#)));
    assert!(!tree.rows("soak")[0].contains("with changes"));
    assert!(tree.read(PAGE).contains(", last changed in "), "{}", tree.read(PAGE));
    tree.write("crates/image/src/lib.rs", "// not committed");
    tree.ran(&["campaign=soak", "count=4"]);
    let row = &tree.rows("soak")[0];
    assert!(row.contains(" | 4 operations | ") && row.contains(", with changes | "), "{row}");
    // A clone of the last commit alone has another history, and the same lines make the same page.
    tree.git(&["commit", "-q", "-a", "-m", "two"]);
    fs::remove_dir_all(tree.0.join(".git")).unwrap();
    assert!(tree.evidence(&["check"]).contains("is what the 3 lines"));
}

#[test]
fn what_does_not_fit_is_refused() {
    let tree = Tree::new("refused");
    let begun = tree.evidence(&["begin"]);
    let add = |fields: &[&str]| tree.refused(&[&["add", begun.trim()], fields].concat());
    assert!(add(&["campaign=walks", "count=1"]).contains("no campaign 'walks'"));
    assert!(add(&["campaign=soak", "count=1", "host=name"]).contains("unknown fields: host"));
    assert_eq!(tree.read(LINES), "");
    tree.ran(&["campaign=soak", "count=1"]);
    assert_eq!(tree.rows("soak").len(), 1);
    tree.write(PAGE, &tree.read(PAGE).replace("1 operations", "9 operations"));
    assert!(tree.refused(&["check"]).contains("run 'make evidence'"));
    tree.write(LINES, &tree.read(LINES).replace("\"count\"", "\"number\""));
    assert!(tree.refused(&[]).contains("campaigns.jsonl, line 1: unknown fields ['number']"));
}

#[test]
fn a_command_is_counted_by_what_it_prints() {
    let tree = Tree::new("counted");
    let orders = "echo 'gate: 7 orders, all'; echo 'map: 5 orders, all'";
    tree.evidence(&["run", "interleavings", "kind=two", "--", "sh", "-c", orders]);
    let row = &tree.rows("interleavings")[0];
    assert!(row.contains(" | two | - | 12 orders | 2 structures | 0 of 1 | "), "{row}");
    let failing = "echo 'a: 3 orders, all'; echo \"thread 'x' panicked at y\"; exit 3";
    tree.refused(&["run", "interleavings", "--", "sh", "-c", failing]);
    assert!(tree.read(PAGE).lines().all(|line| !line.contains("panicked at")));
    assert!(tree.rows("interleavings")[0].contains(" | 3 orders | 1 structures | **1 of 1** | "));
    assert!(tree.read(PAGE).contains("`thread 'x' panicked at y`"));
    // What was not compiled did not run.
    let lines = tree.read(LINES);
    tree.refused(&[
        "run",
        "miri",
        "--",
        "sh",
        "-c",
        "echo 'error: could not compile `x`'; exit 101",
    ]);
    assert_eq!(tree.read(LINES), lines);
}

#[test]
fn a_campaign_that_ends_without_a_line_has_failed() {
    let tree = Tree::new("aborted");
    let add = |fields: &str| {
        format!("scripts/evidence add \"$(scripts/evidence begin)\" campaign=soak {fields}")
    };
    let passed = add("count=5");
    tree.evidence(&["run", "soak", "--", "sh", "-c", &passed]);
    let failed = add("count=6 failure='seed 7'") + "; exit 1";
    tree.refused(&["run", "soak", "--", "sh", "-c", &failed]);
    assert_eq!(tree.read(LINES).lines().count(), 2);
    let aborted = format!("{passed}; echo 'memory allocation of 9 bytes failed'; kill -ABRT $$");
    tree.refused(&["run", "soak", "--", "sh", "-c", &aborted]);
    let row = &tree.rows("soak")[0];
    assert!(row.contains(" | 16 operations | - | **2 of 4** | "), "{row}");
    let page = tree.read(PAGE);
    assert!(page.contains("`seed 7`\n"), "{page}");
    assert!(page.contains("`memory allocation of 9 bytes failed`\n"), "{page}");
}
