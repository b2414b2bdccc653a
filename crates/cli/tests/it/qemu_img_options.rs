//! Every option of qemu-img and qemu-io, run by both programs: `qemu_img.txt` and `qemu_io.txt` have the command lines,
//! and the table in `docs/compatibility.md` is made from what they showed.

use isobath_testkit::process::{Finished, run};
use isobath_testkit::{args, qemu, tools};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt::Write;
use std::fs;
use std::io::{Seek as _, Write as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const OF_IMG: &str = include_str!("qemu_img.txt");
const OF_IO: &str = include_str!("qemu_io.txt");
const OPTIONS: &str = include_str!("../qemu_img_options.txt");

/// A line of a scenario.
enum Line {
    Prepare { program: &'static str, words: Vec<String> },
    Remove(String),
    Compare { words: Vec<String>, input: Option<String>, differs: Option<String>, since: u32 },
}

/// The words of a line; single quotes keep one together.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut rest = line.trim_start();
    while !rest.is_empty() {
        let (word, after) = match rest.strip_prefix('\'') {
            Some(quoted) => quoted.split_once('\'').expect("a closing quote"),
            None => rest.split_once(' ').unwrap_or((rest, "")),
        };
        words.push(word.to_owned());
        rest = after.trim_start();
    }
    words
}

/// The words of a line that may end in commands for -c (after `|`) or for standard input (after `<`).
fn words_and_input(line: &str) -> (Vec<String>, Option<String>) {
    if let Some((options, commands)) = line.split_once("| ") {
        let mut words = words(options);
        for command in commands.split(';') {
            words.extend(["-c".to_owned(), command.trim().to_owned()]);
        }
        return (words, None);
    }
    match line.split_once("< ") {
        Some((options, commands)) => {
            let input = commands.split(';').map(|command| format!("{}\n", command.trim()));
            (words(options), Some(input.collect()))
        }
        None => (words(line), None),
    }
}

fn scenarios(text: &str) -> Vec<(String, Vec<Line>)> {
    let mut scenarios: Vec<(String, Vec<Line>)> = Vec::new();
    let mut differs = None;
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[') {
            scenarios.push((name.trim_end_matches(']').to_owned(), Vec::new()));
            continue;
        }
        let (_, lines) = scenarios.last_mut().expect("a scenario's name comes first");
        if let Some(reason) = line.strip_prefix("~ ") {
            differs = Some(reason.to_owned());
        } else if let Some(file) = line.strip_prefix("x ") {
            lines.push(Line::Remove(file.to_owned()));
        } else if let Some(prepare) = line.strip_prefix("q ") {
            lines.push(Line::Prepare { program: "qemu-img", words: words(prepare) });
        } else if let Some(prepare) = line.strip_prefix("io ") {
            let (image, commands) = prepare.split_once(' ').unwrap();
            let mut words = vec!["-f".to_owned(), "qcow2".to_owned(), image.to_owned()];
            for command in commands.split(';') {
                words.extend(["-c".to_owned(), command.trim().to_owned()]);
            }
            lines.push(Line::Prepare { program: "qemu-io", words });
        } else {
            let (line, since) = match line.strip_prefix("10 ") {
                Some(line) => (line, 10),
                None => (line, 0),
            };
            let (words, input) = words_and_input(line);
            lines.push(Line::Compare { words, input, differs: differs.take(), since });
        }
    }
    scenarios
}

/// The directories of the two programs, each with what it runs.
struct Sides {
    directories: [PathBuf; 2],
    programs: [PathBuf; 2],
}

impl Sides {
    fn new(root: &Path, program: &str) -> Self {
        let directories = ["q", "i"].map(|side| root.join(side));
        for directory in &directories {
            fs::create_dir(directory).unwrap();
        }
        let link = root.join(program);
        symlink(env!("CARGO_BIN_EXE_isobath"), &link).unwrap();
        Self { directories, programs: [qemu::program(program), link] }
    }

    fn run(&self, side: usize, words: &[String], input: Option<&String>) -> Finished {
        let mut command = Command::new(&self.programs[side]);
        command.current_dir(&self.directories[side]).args(words);
        if let Some(input) = input {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(input.as_bytes()).unwrap();
            file.rewind().unwrap();
            command.stdin(Stdio::from(file));
        }
        run(&mut command)
    }
}

/// What a command printed, without what no two runs have in common.
pub(crate) fn normal(text: &str) -> String {
    let mut out = String::new();
    for line in text.split(['\n', '\r']).filter(|line| !line.is_empty()) {
        // Where data lies in a file, and what the file takes, is each program's own affair.
        if line.contains("disk size:") || line.contains("\"actual-size\"") {
            continue;
        }
        if line.starts_with("Try 'qemu-img") || line.starts_with("Image end offset:") {
            continue;
        }
        // The identity of a VMDK's contents.
        if line.trim_start().starts_with("cid:") || line.contains("\"cid\":") {
            continue;
        }
        // How often progress is shown depends on the time that it takes.
        if line.contains("/100%)") {
            if !out.contains("progress") {
                writeln!(out, "progress").unwrap();
            }
            continue;
        }
        let line = line.split_once(", 1 ops; ").map_or(line, |(amount, _)| amount);
        // How a command of qemu-io is used, each in its own words.
        let line = line.split_once(" [").filter(|_| line.contains(" -- ")).map_or(line, |(n, _)| n);
        // Statistics for programs.
        let mut fields = line.split(',');
        let counts = [fields.next(), fields.next()].into_iter().flatten();
        let line = match counts.map(|count| count.parse::<u64>().is_ok()).collect::<Vec<_>>()[..] {
            [true, true] => line.split(",0:00:").next().unwrap_or(line),
            _ => line,
        };
        let line = if line.starts_with("Run completed in") { "Run completed" } else { line };
        let line = &line[..date(line).unwrap_or(line.len())];
        writeln!(out, "{line}").unwrap();
    }
    out
}

/// Where a line has a date with a time, which differs between two runs.
fn date(line: &str) -> Option<usize> {
    const SHAPE: &[u8] = b"0000-00-00 00:00:00";
    let is_alike = |(byte, shape): (&u8, &u8)| match shape {
        b'0' => byte.is_ascii_digit(),
        _ => byte == shape,
    };
    line.as_bytes().windows(SHAPE.len()).position(|at| at.iter().zip(SHAPE).all(is_alike))
}

#[test]
fn dates_are_found() {
    let line = "1         s1                    0 B 2026-11-24 00:00:29 00:00:00.000          0";
    assert_eq!(date(line), line.find("2026"));
    assert_eq!(date("virtual size: 10 MiB (10485760 bytes)"), None);
}

/// What QEMU says of an image (`qemu-img info`), as far as both programs must agree.
pub(crate) fn described(mut info: Value) -> Value {
    let object = info.as_object_mut().unwrap();
    for key in ["actual-size", "filename", "children", "full-backing-filename"] {
        object.remove(key);
    }
    for snapshot in info["snapshots"].as_array_mut().into_iter().flatten() {
        for key in ["date-sec", "date-nsec"] {
            snapshot.as_object_mut().unwrap().remove(key);
        }
    }
    if info["format-specific"]["type"] == "vmdk" {
        let data = info["format-specific"]["data"].as_object_mut().unwrap();
        data.remove("cid");
        for extent in data["extents"].as_array_mut().unwrap() {
            let name = Path::new(extent["filename"].as_str().unwrap()).file_name().unwrap();
            extent["filename"] = name.to_str().unwrap().into();
        }
    }
    info
}

/// What QEMU says of an image in a directory; `None` of an extent that is no image without its descriptor. A fixed VHD
/// cannot be detected.
fn image_info(path: &Path) -> Option<Value> {
    let name = path.file_name().unwrap().to_str().unwrap();
    match name.rsplit_once('.') {
        Some((_, "vhd")) => {
            let info = args!["info", "-f", "vpc", "--output=json", path];
            Some(described(qemu::img(info).ok().json()))
        }
        Some((front, "vmdk")) if front.rsplit_once("-s").is_some_and(|(_, n)| n.len() == 3) => None,
        _ => Some(described(qemu::info(path))),
    }
}

fn files(directory: &Path) -> BTreeSet<OsString> {
    fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect()
}

/// Compares the images that both sides have, and what there is of them.
fn same_images(sides: &Sides, after: &str, problems: &mut Vec<String>) {
    let [theirs, ours] = sides.directories.each_ref().map(|directory| files(directory));
    if theirs != ours {
        problems.push(format!("{after}: QEMU left {theirs:?}, Isobath {ours:?}"));
    }
    for name in theirs.intersection(&ours) {
        let file = name.display();
        let [their, our] = sides.directories.each_ref().map(|directory| directory.join(name));
        let (Some(one), Some(other)) = (image_info(&their), image_info(&our)) else { continue };
        if one != other {
            problems
                .push(format!("{after}: {file} is\n{one:#}\nto QEMU, and from Isobath\n{other:#}"));
            continue;
        }
        let format = one["format"].as_str().unwrap().to_owned();
        let compare = qemu::img(args!["compare", "-f", &format, "-F", &format, &their, &our]);
        if compare.code() != 0 {
            problems.push(format!("{after}: {file} differs: {}", compare.report()));
        }
        if format == "qcow2" {
            let check = qemu::check(&our);
            if check.code() != 0 {
                problems.push(format!("{after}: {file}: {}", check.report()));
            }
        }
    }
}

#[test]
fn each_command_line_does_what_qemu_img_does() {
    compare("qemu-img", OF_IMG);
}

#[test]
fn each_command_line_does_what_qemu_io_does() {
    compare("qemu-io", OF_IO);
}

#[track_caller]
fn compare(program: &str, text: &str) {
    let mut problems = Vec::new();
    let (version, _) = qemu::version();
    for (name, lines) in scenarios(text) {
        let root = tempfile::tempdir().unwrap();
        let sides = Sides::new(root.path(), program);
        for line in &lines {
            match line {
                Line::Prepare { program, words } => {
                    for directory in &sides.directories {
                        let program = qemu::program(program);
                        let _ = run(Command::new(program).current_dir(directory).args(words)).ok();
                    }
                }
                Line::Remove(file) => {
                    for directory in &sides.directories {
                        let _ = fs::remove_file(directory.join(file));
                    }
                }
                Line::Compare { words, input, since, .. } if *since > version => {
                    let _ = sides.run(1, words, input.as_ref()).ok();
                }
                Line::Compare { words, input, differs, .. } => {
                    let [theirs, ours] = [0, 1].map(|side| sides.run(side, words, input.as_ref()));
                    // What Isobath has to say beyond QEMU's message comes after it.
                    let says = |done: &Finished| normal(&done.stderr);
                    // The messages are those of QEMU 7.2; later versions have some others.
                    let same = version > 7 && differs.is_none()
                        || normal(&theirs.text()) == normal(&ours.text())
                            && says(&ours).starts_with(&says(&theirs))
                            && says(&theirs).is_empty() == says(&ours).is_empty();
                    let code = theirs.code() == ours.code();
                    let what = format!("[{name}] {}", words.join(" "));
                    match differs {
                        None if !same || !code => problems.push(format!(
                            "{what}\n--- QEMU:\n{}\n--- Isobath:\n{}",
                            theirs.report(),
                            ours.report()
                        )),
                        Some(reason) if same && version < 8 => {
                            problems.push(format!("{what}: nothing differs, although '{reason}'"));
                        }
                        _ => {}
                    }
                }
            }
        }
        same_images(&sides, &name, &mut problems);
    }
    assert!(problems.is_empty(), "{} problems\n{}", problems.len(), problems.join("\n\n"));
}

/// What the scenarios show of each command's options.
fn covered() -> BTreeMap<(String, String), Vec<Option<String>>> {
    let mut covered: BTreeMap<_, Vec<_>> = BTreeMap::new();
    let of_io = scenarios(OF_IO).into_iter().map(|(_, lines)| ("qemu-io", lines));
    let of_img = scenarios(OF_IMG).into_iter().map(|(_, lines)| ("", lines));
    for (program, lines) in of_img.chain(of_io) {
        for line in lines {
            let Line::Compare { mut words, differs, .. } = line else { continue };
            let command = match program {
                "" if words.is_empty() => continue,
                "" => words.remove(0),
                program => program.to_owned(),
            };
            for word in words.iter().filter(|word| word.starts_with('-')) {
                let option = word.split('=').next().unwrap_or_default().to_owned();
                covered.entry((command.clone(), option)).or_default().push(differs.clone());
            }
        }
    }
    covered
}

#[test]
fn the_table_has_every_option() {
    let covered = covered();
    let mut table = String::from(
        "| command | option | as in QEMU | command lines compared |\n|---|---|---|---|\n",
    );
    let mut missing = Vec::new();
    for line in OPTIONS.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split(' ');
        let command = words.next().unwrap();
        let forms: Vec<&str> = words.collect();
        let runs: Vec<_> = forms
            .iter()
            .filter_map(|form| covered.get(&(command.to_owned(), (*form).to_owned())))
            .flatten()
            .collect();
        if runs.is_empty() {
            missing.push(line);
        }
        let reasons: BTreeSet<_> = runs.iter().filter_map(|differs| differs.as_ref()).collect();
        let verdict = match reasons.iter().next() {
            None => "yes".to_owned(),
            Some(reason) => format!("yes, but for a message: {reason}"),
        };
        writeln!(table, "| `{command}` | `{}` | {verdict} | {} |", forms.join("`, `"), runs.len())
            .unwrap();
    }
    assert!(missing.is_empty(), "no command line has these options:\n{}", missing.join("\n"));
    let page = tools::workspace().join("docs/compatibility.md");
    let text = fs::read_to_string(&page).unwrap();
    let (before, rest) =
        text.split_once("<!-- options of qemu-img -->\n").expect("the table's start");
    let (old, after) = rest.split_once("<!-- end -->").expect("the table's end");
    if old != table && std::env::var_os("ISOBATH_UPDATE").is_some() {
        let new = format!("{before}<!-- options of qemu-img -->\n{table}<!-- end -->{after}");
        fs::write(&page, new).unwrap();
        return;
    }
    assert!(old == table, "docs/compatibility.md is out of date; run this with ISOBATH_UPDATE=1");
}
