//! What cannot happen is checked: so many invariants in each crate to which people trust their data.

use std::fs;
use std::path::Path;

/// Crates, and the least number of checks in 1,000 lines of code.
const LEAST: [(&str, usize); 4] = [("image", 10), ("disk", 10), ("chain", 5), ("jobs", 5)];

/// The functions that check an invariant.
const CHECKS: [&str; 3] = ["violated(", "invariant(", "always("];

/// Checks and lines of code in the sources below a directory, without their tests.
fn count(directory: &Path) -> (usize, usize) {
    let (mut checks, mut lines) = (0, 0);
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            let (more_checks, more_lines) = count(&path);
            checks += more_checks;
            lines += more_lines;
            continue;
        }
        if path.file_name().is_some_and(|name| name == "tests.rs") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let mut code = text.lines().map(str::trim).peekable();
        while let Some(line) = code.next() {
            let of_tests = line.starts_with("#[cfg(") && line.contains("test");
            if of_tests
                && code.peek().is_some_and(|next| next.starts_with("mod ") && next.ends_with('{'))
            {
                // Tests are the last of a file.
                break;
            }
            if line.is_empty() || line.starts_with("//") {
                continue;
            }
            lines += 1;
            checks += CHECKS.iter().filter(|check| calls(line, check)).count();
        }
    }
    (checks, lines)
}

/// Whether a line calls a function by this name, and does not define it.
fn calls(line: &str, name: &str) -> bool {
    line.match_indices(name).any(|(at, _)| {
        let before = &line[..at];
        !before.ends_with(|c: char| c.is_alphanumeric() || c == '_') && !before.ends_with("fn ")
    })
}

#[test]
fn there_are_enough_of_them() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    for (name, least) in LEAST {
        let (checks, lines) = count(&crates.join(name).join("src"));
        println!("{name}: {checks} checks in {lines} lines of code");
        assert!(checks * 1000 >= least * lines, "{name}: only {checks} checks in {lines} lines");
    }
}

#[test]
fn calls_are_told_from_definitions() {
    assert!(calls("always(a, b)?", "always("));
    assert!(calls("None => violated(X),", "violated("));
    assert!(!calls("pub fn violated(what: &str) -> ! {", "violated("));
    assert!(!calls("self.check_invariant(state)", "invariant("));
}
