//! The command lines of `cases.txt`, which projects run, by QEMU's programs and by links of their names to Isobath:
//! what they print, how they end and what they leave must be the same.

mod fixtures;
mod probe;

use crate::qemu_img_options::{described, normal};
use fixtures::Fixtures;
use isobath_testkit::loop_device::LoopDevice;
use isobath_testkit::process::{Finished, run};
use isobath_testkit::{args, qemu};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

const CASES: &str = include_str!("cases.txt");

/// The programs whose names are linked to Isobath.
const PROGRAMS: [&str; 4] = ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];

/// What no two runs have in common.
const VOLATILE: [&str; 12] = [
    "actual-size",
    "date-sec",
    "date-nsec",
    "vm-clock-sec",
    "vm-clock-nsec",
    "image-end-offset",
    "filename",
    "full-backing-filename",
    "cid",
    "uuid",
    "iters",
    "master-key-iters",
];

/// A command line, and what it needs.
#[derive(Clone, Debug, Default)]
struct Case {
    prep: Vec<String>,
    /// Block devices: their names and the files behind them.
    loops: Vec<(String, String)>,
    serve: Option<String>,
    probe: Option<String>,
    fails: bool,
    /// Why it prints something else.
    differs: Option<String>,
    /// Why what it leaves takes other space.
    held: Option<String>,
    /// Why Isobath refuses it.
    refused: Option<String>,
    command: String,
}

impl Case {
    /// All that names images.
    fn text(&self) -> String {
        let files = self.loops.iter().map(|(_, file)| file);
        let parts = self.prep.iter().chain(files).chain(&self.serve).chain([&self.command]);
        parts.map(String::as_str).collect::<Vec<_>>().join(" ")
    }
}

fn cases() -> Vec<Case> {
    let (mut cases, mut case) = (Vec::new(), Case::default());
    for line in CASES.lines() {
        let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
        match word {
            "" | "#" | ">" => {}
            "prep" => case.prep.push(rest.to_owned()),
            "loop" => {
                let (name, file) = rest.split_once(' ').expect("a name and a file");
                case.loops.push((name.to_owned(), file.to_owned()));
            }
            "serve" => case.serve = Some(rest.to_owned()),
            "probe" => case.probe = Some(rest.to_owned()),
            "fails" => case.fails = true,
            "~" => case.differs = Some(rest.to_owned()),
            "held" => case.held = Some(rest.to_owned()),
            "refused" => case.refused = Some(rest.to_owned()),
            _ => {
                line.clone_into(&mut case.command);
                cases.push(std::mem::take(&mut case));
            }
        }
    }
    cases
}

/// One of the two programs.
struct Side {
    /// Where its programs are.
    programs: PathBuf,
    directory: PathBuf,
}

/// What a run left.
struct Left {
    done: Finished,
    /// What a server that was asked exports.
    exported: Option<Value>,
    /// The files; `None` of those that are as they were.
    files: BTreeMap<String, Option<Described>>,
}

/// A file, as QEMU sees it.
struct Described {
    info: Value,
    /// A raw image with what it shows; `None` if that is encrypted.
    contents: Option<PathBuf>,
    /// The exit code of a check.
    check: i32,
    /// Bytes of space.
    held: u64,
}

impl Side {
    /// A shell with a command line.
    fn shell(&self, command: &str) -> Command {
        let path = env::var("PATH").unwrap();
        let mut shell = Command::new("bash");
        shell.env("PATH", format!("{}:{path}:/usr/sbin:/sbin", self.programs.display()));
        shell.env("LC_ALL", "C").current_dir(&self.directory).args(["-c", command]);
        shell
    }

    /// Runs a case, and puts what images show into `shown`.
    fn run(&self, case: &Case, fixtures: &Fixtures, port: u16, shown: &Path) -> Left {
        fs::create_dir(&self.directory).unwrap();
        fs::create_dir(shown).unwrap();
        fixtures.copy(&case.text(), &self.directory);
        let loops: Vec<(String, LoopDevice)> = case
            .loops
            .iter()
            .map(|(name, file)| (name.clone(), LoopDevice::new(&self.directory.join(file))))
            .collect();
        let socket = self.directory.join("nbd.sock");
        let mut values = vec![
            ("dir".to_owned(), self.directory.display().to_string()),
            ("sock".to_owned(), socket.display().to_string()),
            ("nbd".to_owned(), format!("nbd+unix:///?socket={}", socket.display())),
            ("port".to_owned(), port.to_string()),
        ];
        values
            .extend(loops.iter().map(|(name, it)| (name.clone(), it.path().display().to_string())));
        let fill = |text: &str| {
            let filled = |text: String, (name, value): &(String, String)| {
                text.replace(&format!("{{{name}}}"), value)
            };
            values.iter().fold(text.to_owned(), filled)
        };
        let theirs = Self { programs: fixtures::programs(), directory: self.directory.clone() };
        for command in &case.prep {
            let _ = qemu::run(&mut theirs.shell(&fill(command))).ok();
        }
        let server = case.serve.as_ref().map(|image| {
            let mut command = Command::new(qemu::program("qemu-nbd"));
            command.args(args!["-t", "-f", "raw", "-k", &socket, image]);
            command.current_dir(&self.directory);
            isobath_testkit::process::Server::start(
                &mut command,
                isobath_testkit::process::Ready::Socket(&socket),
            )
        });
        let command = fill(&case.command);
        let (done, exported) = match &case.probe {
            Some(uri) => probe::serve(self.shell(&format!("exec {command}")), &fill(uri), self),
            None => (qemu::run(&mut self.shell(&command)), None),
        };
        for (_, device) in &loops {
            device.write_back();
        }
        let devices: Vec<_> =
            loops.iter().map(|(_, device)| device.path().display().to_string()).collect();
        let described = |name: String| {
            let is_changed = !fixtures.has(&name, &self.directory.join(&name));
            let described = is_changed.then(|| describe(&self.directory, &name, &devices, shown));
            (name, described)
        };
        let files = fixtures::files(&self.directory).into_iter().map(described).collect();
        let mut names: Vec<_> =
            loops.iter().map(|(name, it)| (it.path().display().to_string(), name)).collect();
        // One name may be the beginning of the other.
        names.sort_by_key(|(device, _)| std::cmp::Reverse(device.len()));
        let named = |text: String| {
            names.iter().fold(text, |text, (device, name)| text.replace(device, name))
        };
        let (stdout, stderr) = (named(done.text()).into_bytes(), named(done.stderr));
        let done = Finished { stdout, stderr, ..done };
        if let Some(server) = server {
            let _ = server.stop_qemu();
        }
        Left { done, exported, files }
    }
}

/// Describes a file in `directory`; what it shows goes into the directory `shown`.
fn describe(directory: &Path, name: &str, devices: &[String], shown: &Path) -> Described {
    // An image's external data file is found from there.
    let img = |arguments: Vec<OsString>| {
        run(Command::new(qemu::program("qemu-img")).current_dir(directory).args(arguments))
    };
    let held = fs::metadata(directory.join(name)).unwrap().blocks() * 512;
    let vpc = [".vhd", ".vpc"].iter().any(|end| name.ends_with(end));
    let format = if vpc { args!["-f", "vpc"] } else { Vec::new() };
    let info = [args!["info", "-U", "--output=json"], format, args![name]].concat();
    let mut text = img(info).ok().text();
    for (number, device) in devices.iter().enumerate() {
        text = text.replace(&format!("\"{device}\""), &format!("\"device {number}\""));
    }
    let mut info = described(serde_json::from_str(&text).unwrap());
    stable(&mut info);
    let format = info["format"].as_str().unwrap().to_owned();
    let raw = shown.join(name);
    let contents = (info["encrypted"] != true).then(|| {
        let _ = img(args!["convert", "-U", "-f", &format, "-O", "raw", name, &raw]).ok();
        raw
    });
    let check = args!["check", "-U", "-q", "-f", &format, name];
    let check = if format == "qcow2" { img(check).code() } else { 0 };
    Described { info, contents, check, held }
}

/// Removes what no two runs have in common.
fn stable(value: &mut Value) {
    match value {
        Value::Object(object) => {
            object.retain(|key, _| !VOLATILE.contains(&key.as_str()));
            object.values_mut().for_each(stable);
        }
        Value::Array(array) => array.iter_mut().for_each(stable),
        _ => {}
    }
}

/// What `theirs` has and `ours` has not, or otherwise.
fn lacking(theirs: &Value, ours: &Value, at: &str, lacks: &mut Vec<String>) {
    match (theirs, ours) {
        (Value::Object(theirs), Value::Object(ours)) => {
            for (key, value) in theirs {
                match ours.get(key) {
                    Some(own) => lacking(value, own, &format!("{at}.{key}"), lacks),
                    // QEMU 10 shows the nodes below an image.
                    None if key == "children" => {}
                    None => lacks.push(format!("there is no {at}.{key}")),
                }
            }
        }
        (Value::Array(theirs), Value::Array(ours)) if theirs.len() == ours.len() => {
            for (number, (value, own)) in theirs.iter().zip(ours).enumerate() {
                lacking(value, own, &format!("{at}[{number}]"), lacks);
            }
        }
        _ if theirs == ours => {}
        _ => lacks.push(format!("{at} is {ours}, not {theirs}")),
    }
}

/// How the standard outputs differ.
fn outputs(theirs: &Finished, ours: &Finished) -> Vec<String> {
    let json = |done: &Finished| serde_json::from_slice::<Value>(&done.stdout).ok();
    let mut lacks = Vec::new();
    match (json(theirs), json(ours)) {
        (Some(mut theirs), Some(mut ours)) => {
            stable(&mut theirs);
            stable(&mut ours);
            lacking(&theirs, &ours, "output", &mut lacks);
        }
        _ if normal(&theirs.text()) == normal(&ours.text()) => {}
        _ => lacks.push("other output".into()),
    }
    lacks
}

/// How the files differ that the two left.
fn compare_files(case: &Case, left: &[Left; 2], fixtures: &Fixtures, root: &Path) -> Vec<String> {
    let [theirs, ours] = left.each_ref().map(|left| &left.files);
    let names = |files: &BTreeMap<String, _>| files.keys().cloned().collect::<BTreeSet<String>>();
    if names(theirs) != names(ours) {
        return vec![format!("QEMU left {:?}, Isobath {:?}", names(theirs), names(ours))];
    }
    let mut problems = Vec::new();
    let mut as_explained = case.held.is_none();
    for (name, one) in theirs {
        let as_it_was;
        let (one, other) = match (one, &ours[name]) {
            (None, None) => continue,
            (Some(one), Some(other)) => (one, other),
            (one, other) => {
                as_it_was = fixtures.describe(name, &root.join("as-it-was"));
                (one.as_ref().unwrap_or(&as_it_was), other.as_ref().unwrap_or(&as_it_was))
            }
        };
        if one.info != other.info {
            let (one, other) = (&one.info, &other.info);
            problems.push(format!("{name} is\n{one:#}\nto QEMU, and from Isobath\n{other:#}"));
            continue;
        }
        if let (Some(one), Some(other)) = (&one.contents, &other.contents) {
            let compared = qemu::img(args!["compare", "-f", "raw", "-F", "raw", one, other]);
            if compared.code() != 0 {
                problems.push(format!("{name} differs: {}", compared.report()));
            }
        }
        if one.check != other.check {
            problems.push(format!("{name}: check ends with {}, not {}", other.check, one.check));
        }
        let about = (one.held / 2).saturating_sub(1 << 20)..=one.held + one.held / 2 + (1 << 20);
        if !about.contains(&other.held) {
            as_explained = true;
            if case.held.is_none() {
                problems.push(format!("{name} holds {} bytes, QEMU's {}", other.held, one.held));
            }
        }
    }
    if !as_explained {
        problems.push("all holds as much as QEMU's".into());
    }
    problems
}

/// What differs in a case.
fn judge(case: &Case, fixtures: &Fixtures, root: &Path, port: u16) -> Vec<String> {
    let links = root.join("bin");
    if !links.exists() {
        fs::create_dir(&links).unwrap();
        for program in PROGRAMS {
            symlink(env!("CARGO_BIN_EXE_isobath"), links.join(program)).unwrap();
        }
    }
    // In the same directory, one after the other: its name is printed and stored.
    let place = root.join("run");
    let left = [(fixtures::programs(), "theirs"), (links, "ours")].map(|(programs, name)| {
        let side = Side { programs, directory: place.clone() };
        let left = side.run(case, fixtures, port, &root.join(name));
        fs::remove_dir_all(&place).unwrap();
        left
    });
    let [theirs, ours] = &left;
    let mut problems = Vec::new();
    let (version, _) = qemu::version();
    let as_expected = (theirs.done.code() != 0) == case.fails;
    if version < 8 && !as_expected {
        problems.push(format!("QEMU does not do what it did: {}", theirs.done.report()));
    }
    if let Some(reason) = &case.refused {
        if ours.done.code() == 0 {
            problems.push(format!("it is not refused, although '{reason}'"));
        }
        for (name, described) in &ours.files {
            if described.is_some() {
                problems.push(format!("it is refused, and {name} is new or changed"));
            }
        }
    } else if ours.done.code() != theirs.done.code() {
        problems.push(format!(
            "--- QEMU:\n{}\n--- Isobath:\n{}",
            theirs.done.report(),
            ours.done.report()
        ));
    } else {
        let mut lacks = outputs(&theirs.done, &ours.done);
        if let (Some(theirs), Some(ours)) = (&theirs.exported, &ours.exported) {
            lacking(theirs, ours, "export", &mut lacks);
        }
        match &case.differs {
            None if !lacks.is_empty() && version < 8 => problems.push(format!(
                "{}\n--- QEMU:\n{}\n--- Isobath:\n{}",
                lacks.join("\n"),
                theirs.done.report(),
                ours.done.report()
            )),
            Some(reason) if lacks.is_empty() && version < 8 => {
                problems.push(format!("nothing differs, although '{reason}'"));
            }
            _ => {}
        }
        problems.extend(compare_files(case, &left, fixtures, root));
    }
    for name in ["theirs", "ours"] {
        fs::remove_dir_all(root.join(name)).unwrap();
    }
    problems
}

/// How many tests share the cases.
const PARTS: usize = 4;

#[track_caller]
fn run_part(part: usize) {
    let root = tempfile::tempdir().unwrap();
    let cases = cases();
    let own: Vec<&Case> = cases.iter().skip(part).step_by(PARTS).collect();
    let texts: Vec<String> = own.iter().map(|case| case.text()).collect();
    let fixtures = Fixtures::make(&root.path().join("fixtures"), &texts.join(" "));
    let port = probe::free_port();
    let mut problems = Vec::new();
    for case in own {
        let found = judge(case, &fixtures, root.path(), port);
        problems.extend(found.into_iter().map(|problem| format!("{}\n{problem}", case.command)));
    }
    assert!(problems.is_empty(), "{} problems\n{}", problems.len(), problems.join("\n\n"));
}

#[test]
fn command_lines_of_projects_do_the_same_part_1() {
    run_part(0);
}

#[test]
fn command_lines_of_projects_do_the_same_part_2() {
    run_part(1);
}

#[test]
fn command_lines_of_projects_do_the_same_part_3() {
    run_part(2);
}

#[test]
fn command_lines_of_projects_do_the_same_part_4() {
    run_part(3);
}

/// The table of the programs' cases in `docs/compatibility.md`.
fn table() -> String {
    let mut counts: BTreeMap<&str, [usize; 3]> = BTreeMap::new();
    for case in cases() {
        let named = |program: &&str| {
            let words = || case.command.split(|c: char| !(c.is_alphanumeric() || c == '-'));
            words().any(|word| word == *program)
        };
        let program = PROGRAMS.into_iter().find(named).expect("one of QEMU's programs");
        let kind = match (&case.refused, case.differs.as_ref().or(case.held.as_ref())) {
            (Some(_), _) => 2,
            (None, Some(_)) => 1,
            (None, None) => 0,
        };
        counts.entry(program).or_default()[kind] += 1;
    }
    let mut table = String::from(
        "| program | command lines | the same | other text or space | refused |\n|---|---|---|---|---|\n",
    );
    for (program, [same, other, refused]) in counts {
        let all = same + other + refused;
        writeln!(table, "| `{program}` | {all} | {same} | {other} | {refused} |").unwrap();
    }
    table
}

#[test]
fn the_page_has_the_counts_of_projects_command_lines() {
    let page = isobath_testkit::tools::workspace().join("docs/compatibility.md");
    let text = fs::read_to_string(&page).unwrap();
    let (begin, end) = ("<!-- command lines of projects -->\n", "<!-- end of them -->");
    let (before, rest) = text.split_once(begin).expect("the table's start");
    let (old, after) = rest.split_once(end).expect("the table's end");
    let table = table();
    if old != table && env::var_os("ISOBATH_UPDATE").is_some() {
        fs::write(&page, format!("{before}{begin}{table}{end}{after}")).unwrap();
        return;
    }
    assert!(old == table, "docs/compatibility.md is out of date; run this with ISOBATH_UPDATE=1");
}
