//! The decisions, `docs/decisions`: each says when it was made, and whether it holds.

use std::fs;
use std::path::Path;

fn is_date(text: &str) -> bool {
    let form = text.bytes().map(|byte| if byte.is_ascii_digit() { b'0' } else { byte });
    form.eq(*b"0000-00-00")
}

/// What is wrong with the head of a decision, if anything is.
fn wrong(number: usize, name: &str, text: &str) -> Option<String> {
    let mut lines = text.lines();
    let (title, head) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    if !name.starts_with(&format!("{number:04}-")) {
        return Some(format!("is not {number:04}"));
    }
    if !title.starts_with(&format!("# {number:04}: ")) {
        return Some(format!("has the title '{title}'"));
    }
    let dated = head.strip_prefix("Date: ").and_then(|rest| rest.split_once(". Status: "));
    let holds = |status: &str| {
        let replaced = status.strip_prefix("superseded by ").and_then(|by| by.strip_suffix('.'));
        status == "accepted."
            || replaced
                .is_some_and(|by| by.len() == 4 && by.bytes().all(|digit| digit.is_ascii_digit()))
    };
    match dated {
        Some((date, status)) if is_date(date) && holds(status) => None,
        _ => Some(format!("has no date and status, but '{head}'")),
    }
}

#[test]
fn each_has_a_number_a_date_and_a_status() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/decisions");
    let mut files: Vec<_> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut found = Vec::new();
    for (number, path) in (1..).zip(&files) {
        let name = path.file_name().unwrap().to_str().unwrap();
        let text = fs::read_to_string(path).unwrap();
        found.extend(wrong(number, name, &text).map(|what| format!("{name} {what}")));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
    assert!(!files.is_empty());
}

#[test]
fn a_head_without_its_parts_is_found() {
    let whole = "# 0001: A\nDate: 2026-11-20. Status: superseded by 0002.\n";
    assert_eq!(wrong(1, "0001-a.md", whole), None);
    for (name, text) in [
        ("0002-a.md", whole.to_owned()),
        ("0001-a.md", whole.replace("0001:", "1.")),
        ("0001-a.md", whole.replace("11-20", "11")),
        ("0001-a.md", whole.replace("0002", "another")),
        ("0001-a.md", "# 0001: A\n\nText.\n".to_owned()),
    ] {
        assert!(wrong(1, name, &text).is_some(), "{name}: {text}");
    }
}
