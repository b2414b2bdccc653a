//! Lines of code, documentation and scripts fit a window: rustfmt breaks code, nothing breaks the rest.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Characters in a line at most.
const WIDTH: usize = 120;

/// Whether a file is text that people write: code, documentation, a script by its ending or its first line.
fn is_text(path: &Path) -> bool {
    let Some(extension) = path.extension() else {
        let mut first = [0; 2];
        let read = fs::File::open(path).and_then(|mut file| file.read_exact(&mut first));
        return path.ends_with("Makefile") || read.is_ok() && first == *b"#!";
    };
    ["rs", "md", "py", "c", "sh"].iter().any(|known| extension == *known)
}

/// The text files below a directory that people write; a program writes those of `docs/results`.
pub(crate) fn texts(directory: &Path, into: &mut Vec<PathBuf>) {
    const GENERATED: [&str; 5] = ["target", "results", "figures", "corpus", "artifacts"];
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with('.') || GENERATED.contains(&name.as_str()) {
            continue;
        }
        if path.is_dir() {
            texts(&path, into);
        } else if is_text(&path) {
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
    for written in ["bench/papers", "bench/isobath_bench/tools.py", "scripts/setup", "Makefile"] {
        assert!(files.contains(&root.join(written)), "{written}");
    }
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
