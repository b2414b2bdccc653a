//! The manual pages, and what `make install` puts where.

use crate::programs::isobath;
use crate::serving::ISOBATH;
use isobath_testkit::args;
use isobath_testkit::process::{Finished, run};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The files and links below a directory, by their names from there.
fn files(directory: &Path) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let mut left = vec![directory.to_owned()];
    while let Some(next) = left.pop() {
        for entry in fs::read_dir(next).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_dir() {
                left.push(entry.path());
            } else {
                let path = entry.path();
                let name = path.strip_prefix(directory).unwrap();
                found.insert(name.to_str().unwrap().to_owned());
            }
        }
    }
    found
}

/// What a command says with `--help`.
fn help(words: &[String]) -> String {
    let arguments: Vec<&str> = words.iter().map(String::as_str).chain(["--help"]).collect();
    isobath(Path::new("/"), arguments).ok().text()
}

/// The words that begin lines of a section of a help.
fn listed(help: &str, section: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| *line != section).skip(1);
    let entries = lines.take_while(|line| line.is_empty() || line.starts_with(' '));
    let names = entries.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    names.filter_map(|line| line.split_whitespace().next().map(str::to_owned)).collect()
}

/// All commands, with those of commands.
fn commands() -> Vec<Vec<String>> {
    let known = help(&[]);
    let groups = ["Images:", "Long chains:", "Servers:", "Contents:", "The program:"];
    let mut names: Vec<String> = groups.iter().flat_map(|group| listed(&known, group)).collect();
    names.retain(|name| name != "help");
    names.extend(["qemu-nbd", "qemu-storage-daemon"].map(String::from));
    let mut all = Vec::new();
    for name in names {
        let mut inner = listed(&help(std::slice::from_ref(&name)), "Commands:");
        inner.retain(|name| name != "help");
        all.extend(inner.into_iter().map(|inner| vec![name.clone(), inner]));
        all.push(vec![name]);
    }
    all
}

/// The options in a help: those that begin a line, in all their forms.
fn options(help: &str) -> BTreeSet<String> {
    // What describes them is farther to the right.
    let lines = help.lines().filter(|line| line.starts_with("  ") && !line.starts_with("       "));
    let lines = lines.map(str::trim_start);
    let forms = lines.filter(|line| line.starts_with('-') && !line.starts_with("- "));
    let words = forms.flat_map(|line| line.split("  ").next().unwrap_or_default().split(' '));
    let words = words.map(|word| word.trim_end_matches(','));
    let words = words.map(|word| word.split(['=', '[']).next().unwrap_or_default());
    words.filter(|word| word.starts_with('-')).map(str::to_owned).collect()
}

/// Makes the pages in a directory.
fn make_pages(directory: &Path) {
    let mut command = Command::new(root().join("scripts/man"));
    let _ = run(command.arg(ISOBATH).arg(directory).arg("/usr/share/doc/isobath")).ok();
}

/// A page as text, without which groff has nothing to say about it.
fn formatted(pages: &Path, page: &str) -> String {
    let mut groff = Command::new("groff");
    groff.current_dir(pages).args(["-man", "-ww", "-Tutf8", "-P-cbou", page]);
    let done = run(&mut groff).ok();
    assert_eq!(done.stderr, "", "{}", done.report());
    done.text()
}

#[test]
fn each_command_has_a_page_with_all_of_its_options_and_groff_warns_of_none() {
    let directory = tempfile::tempdir().unwrap();
    make_pages(directory.path());
    let pages = files(directory.path());
    let texts: Vec<(String, String)> =
        pages.iter().map(|page| (page.clone(), formatted(directory.path(), page))).collect();
    let text_of = |name: &str| {
        let found = texts.iter().find(|(page, _)| page == name);
        found.map_or_else(|| panic!("there is no {name}"), |(_, text)| text.as_str())
    };
    let all = commands();
    assert!(all.len() > 50, "{} commands", all.len());
    let mut checked = 0;
    for words in &all {
        // The commands of `ctl` are in its page.
        let page = if words[0] == "ctl" { &words[..1] } else { &words[..] };
        let name = format!("man1/isobath-{}.1", page.join("-"));
        let text = text_of(&name);
        let typed: BTreeSet<&str> = text
            .split(|c: char| c.is_whitespace() || ",=[]()'".contains(c))
            .map(|word| word.trim_end_matches(['.', ';', ':']))
            .collect();
        for option in options(&help(words)) {
            assert!(typed.contains(option.as_str()), "{name} lacks {option}:\n{text}");
            checked += 1;
        }
        assert!(text.contains("NAME\n") && text.contains("SEE ALSO\n"), "{text}");
    }
    assert!(checked > 400, "{checked} options");
    // What a page names is there.
    for (page, text) in &texts {
        for word in text.split(|c: char| c.is_whitespace() || c == ',') {
            let word = word.trim_start_matches('(');
            let Some((name, rest)) = word.split_once('(') else { continue };
            let section = rest.chars().next().filter(char::is_ascii_digit);
            let Some(section) = section.filter(|_| name.starts_with("isobath")) else { continue };
            if name != "isobath-COMMAND" {
                let named = format!("man{section}/{name}.{section}");
                assert!(pages.contains(&named), "{page} names {word}");
            }
        }
        let unmade = ["](", "**", "```", "\\f", "\\("].into_iter().find(|mark| text.contains(mark));
        assert_eq!(unmade, None, "{page}:\n{text}");
    }
}

#[test]
fn options_are_found_in_both_layouts_of_a_help() {
    let long =
        "Options:\n  -x, --one-file <A>\n          Or -y\n\n      --two[=<B>]\n          c\n";
    let short = "Options:\n  -p, --progress  Show -q\n      --three <C>  x\n  - item\n";
    let found = |help| options(help).into_iter().collect::<Vec<_>>();
    assert_eq!(found(long), ["--one-file", "--two", "-x"]);
    assert_eq!(found(short), ["--progress", "--three", "-p"]);
}

/// Runs a target of the Makefile for the program that was built for the tests.
fn make(target: &str, variables: &[&str]) -> Finished {
    let mut command = Command::new("make");
    command.env_remove("MAKEFLAGS").env_remove("MAKELEVEL").current_dir(root());
    // What is set for a package's build would lead out of the test's directory.
    for variable in ["DESTDIR", "PREFIX", "BINDIR", "DATADIR", "MANDIR", "DOCDIR", "UNITDIR"] {
        command.env_remove(variable);
    }
    command.args(["--no-print-directory", target]).arg(format!("BINARY={ISOBATH}"));
    // Removing symbols takes a while; a real installation does it.
    run(command.arg("STRIP=true").args(variables))
}

#[test]
fn what_is_installed_is_whole_and_is_uninstalled() {
    let directory = tempfile::tempdir().unwrap();
    let stage = directory.path();
    let into = format!("DESTDIR={}", stage.display());
    let variables = [into.as_str(), "PREFIX=/usr"];
    for others in ["man/man1/other.1", "man/man1/isobath-foo.1", "doc/isobath/docs/other.md"] {
        let others = stage.join("usr/share").join(others);
        fs::create_dir_all(others.parent().unwrap()).unwrap();
        fs::write(&others, "another's").unwrap();
    }
    let before = files(stage);
    let _ = make("install", &variables).ok();
    let installed = files(stage);
    for name in [
        "bin/isobath",
        "share/man/man1/isobath.1",
        "share/man/man1/isobath-chain-flatten.1",
        "share/man/man7/isobath-qmp.7",
        "share/bash-completion/completions/isobath",
        "share/zsh/site-functions/_isobath",
        "share/fish/vendor_completions.d/isobath.fish",
        "lib/systemd/system/isobath@.service",
        "share/doc/isobath/LICENSE-APACHE",
        "share/doc/isobath/LICENSE-MIT",
        "share/doc/isobath/docs/commands/serve.md",
    ] {
        let name = format!("usr/{name}");
        assert!(installed.contains(&name), "{name}");
        assert!(fs::metadata(stage.join(&name)).unwrap().len() > 20, "{name}");
    }
    assert!(!installed.iter().any(|name| name.contains("qemu-img")), "{installed:?}");
    let script = stage.join("usr/share/bash-completion/completions/isobath");
    let _ = run(Command::new("bash").arg("-n").arg(script)).ok();
    let unit = fs::read_to_string(stage.join("usr/lib/systemd/system/isobath@.service")).unwrap();
    assert!(unit.contains("\nExecStart=/usr/bin/isobath serve "), "{unit}");

    // Links are made on request, in no file's place.
    let bin = stage.join("usr/bin");
    fs::write(bin.join("qemu-io"), "another's").unwrap();
    let refused = make("install-links", &variables).exits(2);
    assert!(refused.stderr.contains("qemu-io: there is a file"), "{}", refused.report());
    assert!(!bin.join("qemu-img").exists());
    fs::remove_file(bin.join("qemu-io")).unwrap();
    for _ in 0..2 {
        let _ = make("install-links", &variables).ok();
    }
    let as_qemu = run(Command::new(bin.join("qemu-img")).arg("--version")).ok();
    assert!(as_qemu.text().starts_with("qemu-img version "), "{}", as_qemu.report());
    // A link of someone else stays.
    fs::remove_file(bin.join("qemu-io")).unwrap();
    symlink("other", bin.join("qemu-io")).unwrap();
    // A document that this version has no longer.
    let list = stage.join("usr/share/doc/isobath/isobath.pages");
    let former = "usr/share/doc/isobath/docs/commands/former.md";
    fs::write(stage.join(former), "of a former version").unwrap();
    let listed = fs::read_to_string(&list).unwrap();
    assert!(listed.contains("\ndocument docs/commands/serve.md\n"), "{listed}");
    fs::write(&list, listed + "document docs/commands/former.md\n").unwrap();

    let _ = make("uninstall", &variables).ok();
    let mut left = files(stage);
    assert!(left.remove("usr/bin/qemu-io"));
    assert_eq!(left, before);
    assert!(!stage.join("usr/share/doc/isobath/docs/commands").exists());
}

#[test]
fn uninstalling_leaves_what_others_have_in_a_directory_that_is_shared() {
    let directory = tempfile::tempdir().unwrap();
    let stage = directory.path();
    let other = stage.join("usr/share/doc/other/file");
    fs::create_dir_all(other.parent().unwrap()).unwrap();
    fs::write(&other, "another's").unwrap();
    // A list of pages names no others.
    let page = stage.join("usr/share/kept.1");
    fs::write(&page, "another's").unwrap();
    let into = format!("DESTDIR={}", stage.display());
    let variables = [into.as_str(), "PREFIX=/usr", "DOCDIR=/usr/share/doc"];
    let before = files(stage);
    let _ = make("install", &variables).ok();
    let list = stage.join("usr/share/doc/isobath.pages");
    let pages = fs::read_to_string(&list).unwrap();
    assert!(pages.lines().any(|page| page == "man1/isobath.1"), "{pages}");
    fs::write(&list, pages + "../kept.1\nman1/isobath/../../../kept.1\ndocument ../kept.1\n")
        .unwrap();
    let _ = make("uninstall", &variables).ok();
    assert_eq!(files(stage), before);
}

#[test]
fn a_path_that_the_shell_would_take_apart_is_refused_before_anything_is_done() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().display().to_string();
    let file = directory.path().join("my");
    fs::write(&file, "a user's").unwrap();
    for target in ["install", "install-links", "uninstall"] {
        for mark in " '\"`&|;<>()*?[]{}\\!#\t\n".chars() {
            let refused = make(target, &[&format!("DESTDIR={root}/my{mark}disk")]).exits(2);
            assert!(refused.stderr.contains("DESTDIR is '"), "{}", refused.report());
        }
        for variable in ["DESTDIR=/x$$y", "BINDIR=/a b", "DATADIR=/a|b", "DOCDIR=", "UNITDIR=x"] {
            let into = format!("DESTDIR={root}/stage");
            let refused = make(target, &[&into, variable]).exits(2);
            let (name, _) = variable.split_once('=').unwrap();
            assert!(refused.stderr.contains(&format!("{name} is '")), "{}", refused.report());
        }
    }
    assert_eq!(files(directory.path()), BTreeSet::from(["my".to_owned()]));
}

#[test]
fn systemd_accepts_the_unit() {
    let directory = tempfile::tempdir().unwrap();
    let prefix = format!("PREFIX={}", directory.path().display());
    let _ = make("install", &[&prefix]).ok();
    let unit = directory.path().join("lib/systemd/system/isobath@.service");
    // It reports what it does not know of any unit, too: of others it would not be ours.
    let arguments: Vec<&OsStr> = vec![
        "verify".as_ref(),
        "--man=no".as_ref(),
        "--recursive-errors=no".as_ref(),
        unit.as_ref(),
    ];
    let done = run(Command::new("systemd-analyze").args(arguments)).ok();
    let ours = done.stderr.lines().find(|line| line.contains("isobath"));
    assert_eq!(ours, None, "{}", done.report());
    // One with a mistake is refused.
    let text = fs::read_to_string(&unit).unwrap();
    fs::write(&unit, text.replace("Type=notify", "Type=notified")).unwrap();
    let wrong = run(Command::new("systemd-analyze").args(args!["verify", "--man=no", &unit]));
    assert!(wrong.stderr.contains("notified"), "{}", wrong.report());
}
