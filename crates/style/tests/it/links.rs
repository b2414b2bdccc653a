//! Links of the documentation to files and headings of this repository lead somewhere.

use crate::lines::texts;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The targets of inline links in Markdown, outside code.
fn targets(text: &str) -> Vec<String> {
    let mut fenced = false;
    let mut found = Vec::new();
    for line in text.lines() {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        if fenced || fence || line.starts_with("    ") {
            continue;
        }
        // Every other part is code.
        let prose: String = line.split('`').step_by(2).collect();
        for (at, _) in prose.match_indices("](") {
            let rest = &prose[at + 2..];
            if let Some(end) = rest.find(')') {
                found.push(rest[..end].to_owned());
            }
        }
    }
    found
}

/// The anchors of a page's headings, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut fenced = false;
    let mut found = BTreeSet::new();
    for line in text.lines() {
        fenced ^= line.starts_with("```");
        let heading = line.trim_start_matches('#');
        if fenced || heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let heading = heading.trim().to_lowercase();
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        let anchor: String = kept.map(|c| if c == ' ' { '-' } else { c }).collect();
        let again = (1..).map(|number| format!("{anchor}-{number}"));
        let free = std::iter::once(anchor.clone()).chain(again).find(|one| !found.contains(one));
        found.extend(free);
    }
    found
}

/// What is wrong with a link on a page; `None` if it leads somewhere, or out of the repository.
fn broken(page: &Path, text: &str, target: &str) -> Option<String> {
    if target.contains("://") || target.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = target.split_once('#').map_or((target, None), |(p, a)| (p, Some(a)));
    let file = if path.is_empty() { page.to_owned() } else { page.parent().unwrap().join(path) };
    if !file.exists() {
        return Some(format!("no file {}", file.display()));
    }
    let anchor = anchor.filter(|_| file.extension().is_some_and(|extension| extension == "md"))?;
    let text = if path.is_empty() { text.to_owned() } else { fs::read_to_string(&file).unwrap() };
    (!anchors(&text).contains(anchor)).then(|| format!("no heading #{anchor}"))
}

#[test]
fn links_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut files = Vec::new();
    texts(&root, &mut files);
    let pages: Vec<PathBuf> =
        files.into_iter().filter(|file| file.extension().is_some_and(|e| e == "md")).collect();
    let (mut checked, mut found) = (0, Vec::new());
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        for target in targets(&text) {
            checked += 1;
            if let Some(reason) = broken(&page, &text, &target) {
                let page = page.strip_prefix(&root).unwrap().display();
                found.push(format!("{page}: ({target}): {reason}"));
            }
        }
    }
    assert!(checked > 100, "{checked} links");
    assert!(found.is_empty(), "broken links:\n{}", found.join("\n"));
}

#[test]
fn a_broken_link_is_found() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("page.md");
    let text = "# One `two` three\n[a](#one-two-three) [b](#four) [c](Cargo.toml) [d](none.md)\n`[e](f)`\n";
    let targets = targets(text);
    assert_eq!(targets, ["#one-two-three", "#four", "Cargo.toml", "none.md"]);
    let found: Vec<bool> =
        targets.iter().map(|target| broken(&page, text, target).is_some()).collect();
    // The page itself is not there, but its text is.
    assert_eq!(found[1..], [true, false, true]);
}
