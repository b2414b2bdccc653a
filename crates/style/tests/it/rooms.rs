//! The modules of a crate use each other in one direction: no circle of imports among those at its root.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

type Imports = BTreeMap<String, BTreeSet<String>>;

fn sources(directory: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

/// What code names behind `crate::`: one name, or those of a list.
fn named(text: &str) -> Vec<String> {
    let word = |text: &str| -> String {
        text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
    };
    let Some(list) = text.strip_prefix('{') else { return vec![word(text)] };
    let (mut depth, mut names, mut begins) = (0, Vec::new(), true);
    for (at, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => begins = true,
            c if begins && c.is_alphabetic() => {
                names.push(word(&list[at..]));
                begins = false;
            }
            _ => {}
        }
    }
    names
}

/// Who imports whom, of the modules at the root of a crate. Tests are left out.
fn imports(source: &Path) -> Imports {
    let mut files = Vec::new();
    sources(source, &mut files);
    let room = |file: &Path| {
        let within = file.strip_prefix(source).unwrap();
        let first = within.iter().next().unwrap().to_str().unwrap();
        first.trim_end_matches(".rs").to_owned()
    };
    let rooms: BTreeSet<String> = files.iter().map(|file| room(file)).collect();
    let mut imports = Imports::new();
    for file in &files {
        let own = room(file);
        if matches!(&*own, "lib" | "main" | "bin") {
            continue;
        }
        let text = fs::read_to_string(file).unwrap();
        let code = text.split("#[cfg(test)]\nmod ").next().unwrap();
        let code = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        let code = code.collect::<Vec<_>>().join("\n");
        for (at, _) in code.match_indices("crate::") {
            let part_of_a_name =
                code[..at].ends_with(|c: char| c == ':' || c == '_' || c.is_alphanumeric());
            let names = if part_of_a_name { Vec::new() } else { named(&code[at + 7..]) };
            let others = names.into_iter().filter(|name| *name != own && rooms.contains(name));
            imports.entry(own.clone()).or_default().extend(others);
        }
    }
    imports
}

/// Takes away what imports nothing that is left, again and again. What stays is in a circle, or uses one.
fn circles(mut imports: Imports) -> Imports {
    loop {
        let left: BTreeSet<String> = imports.keys().cloned().collect();
        let before = left.len();
        imports.retain(|_, others| others.iter().any(|other| left.contains(other)));
        if imports.len() == before {
            return imports;
        }
    }
}

#[test]
fn imports_have_one_direction() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut checked = 0;
    for entry in fs::read_dir(crates).unwrap() {
        let source = entry.unwrap().path().join("src");
        let found = imports(&source);
        checked += found.len();
        let circles = circles(found);
        assert!(circles.is_empty(), "{}: {circles:#?}", source.display());
    }
    assert!(checked > 100, "{checked}");
}

#[test]
fn a_circle_is_found() {
    assert_eq!(named("a::b;"), ["a"]);
    assert_eq!(named("{a::{b, c}, d, e::f};"), ["a", "d", "e"]);
    let of = |list: &[(&str, &[&str])]| -> Imports {
        let entry = |(from, to): &(&str, &[&str])| {
            ((*from).to_owned(), to.iter().map(|&name| name.to_owned()).collect())
        };
        list.iter().map(entry).collect()
    };
    assert!(circles(of(&[("a", &["b"]), ("b", &["c"]), ("c", &[])])).is_empty());
    assert_eq!(circles(of(&[("a", &["b"]), ("b", &["a"]), ("c", &["a"]), ("d", &[])])).len(), 3);
}
