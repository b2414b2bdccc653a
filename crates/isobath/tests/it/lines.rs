//! Lines of code, documentation and scripts fit a window: rustfmt breaks code, nothing breaks the rest.

use std::fs;
use std::path::{Path, PathBuf};

/// Characters in a line at most.
const WIDTH: usize = 120;

/// The text files below a directory that people write; a program writes those of `docs/results`.
fn texts(directory: &Path, into: &mut Vec<PathBuf>) {
    const GENERATED: [&str; 5] = ["target", "results", "figures", "corpus", "artifacts"];
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let is_script = directory.ends_with("scripts") || name == "Makefile";
        let is_text =
            path.extension().is_some_and(|extension| extension == "rs" || extension == "md");
        if name.starts_with('.') || GENERATED.contains(&name.as_str()) {
            continue;
        }
        if path.is_dir() {
            texts(&path, into);
        } else if is_text || is_script {
            into.push(path);
        }
    }
}

/// The numbers of the lines that are too long. A row of a table, a line of a program's output in a fenced
/// block and a single word, such as a link, cannot be broken.
fn too_long(text: &str, is_markdown: bool) -> Vec<usize> {
    let mut fenced = false;
    let mut found = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let content = line.trim_start();
        fenced ^= is_markdown && content.starts_with("```");
        let row = content.trim_start_matches(['/', '!']).trim_start().starts_with('|');
        let fixed = row || fenced;
        if line.chars().count() > WIDTH && !fixed && content.contains(' ') {
            found.push(number + 1);
        }
    }
    found
}

#[test]
fn lines_are_not_too_long() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = Vec::new();
    texts(&root, &mut files);
    assert!(files.len() > 600, "{} files", files.len());
    let mut found = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let is_markdown = file.extension().is_some_and(|extension| extension == "md");
        for line in too_long(&text, is_markdown) {
            found.push(format!("{}:{line}", file.strip_prefix(&root).unwrap().display()));
        }
    }
    assert!(found.is_empty(), "lines of more than {WIDTH} characters:\n{}", found.join("\n"));
}

#[test]
fn what_cannot_be_broken_may_be_long() {
    let long = "word ".repeat(30);
    let (row, link) = (format!("| {long} |"), format!("https://{}", "a".repeat(200)));
    let text = format!("{long}\n{row}\n{link}\n```\n{long}\n```\n{long}");
    assert_eq!(too_long(&text, true), [1, 7]);
    assert_eq!(too_long(&text, false), [1, 5, 7]);
    assert_eq!(too_long(&format!("//! {row}\n/// {long}"), false), [2]);
}
