//! `qemu-nbd` by QEMU and by us: the same command lines, and the same for clients.

use crate::programs::isobath;
use crate::serving::ISOBATH;
use isobath_testkit::process::{Finished, PATIENCE, run};
use isobath_testkit::{args, qemu, tools};
use std::fmt::Write as _;
use std::fs;
use std::io::{ErrorKind, Read, Write as _};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const SIZE: u64 = 4 << 20;

/// A directory with an image, its snapshot, an overlay, and the link to our program.
struct World {
    directory: TempDir,
}

impl World {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let world = Self { directory };
        let at = |name: &str| world.at(name);
        symlink(ISOBATH, at("qemu-nbd")).unwrap();
        qemu::create(&at("base.qcow2"), "qcow2", SIZE, "");
        let _ = qemu::io(&at("base.qcow2"), "qcow2", &["write -P 1 0 1M", "write -P 2 3M 64k"]);
        let _ = qemu::img(args!["snapshot", "-c", "before", at("base.qcow2")]).ok();
        let _ = qemu::io(&at("base.qcow2"), "qcow2", &["write -P 3 512k 1M"]).ok();
        for (bitmap, marks) in
            [("enabled", "write -P 3 64k 1k"), ("disabled", "write -P 1 256k 70k")]
        {
            let _ = qemu::img(args!["bitmap", "--add", at("base.qcow2"), bitmap]).ok();
            let _ = qemu::io(&at("base.qcow2"), "qcow2", &[marks]).ok();
        }
        let _ = qemu::img(args!["bitmap", "--disable", at("base.qcow2"), "disabled"]).ok();
        qemu::create_overlay(&at("top.qcow2"), &at("base.qcow2"), "qcow2", "");
        let _ = qemu::io(&at("top.qcow2"), "qcow2", &["write -P 4 2M 100k"]).ok();
        qemu::create(&at("raw.img"), "raw", SIZE, "");
        let _ = qemu::io(&at("raw.img"), "raw", &["write -P 5 1M 1M"]).ok();
        world
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// One of the two programs, which is to run in the directory.
    fn program(&self, ours: bool) -> Command {
        let program = if ours { self.at("qemu-nbd") } else { qemu::program("qemu-nbd") };
        let mut command = Command::new(program);
        command.current_dir(self.directory.path());
        command
    }

    /// Starts a server in the background, which must listen when the command returns.
    fn serve(&self, ours: bool, options: &str) -> Serving<'_> {
        let mut command = self.program(ours);
        command.args(["--fork", "--pid-file=pid", "-k"]).arg(self.at("socket"));
        let done = run(command.args(options.split_whitespace()));
        assert!(done.stderr.is_empty(), "{options}: {}", done.report());
        let _ = done.ok();
        let process = fs::read_to_string(self.at("pid")).unwrap().trim().parse().unwrap();
        Serving { world: self, process }
    }

    /// The exports as one of the programs lists them.
    fn list(&self, ours: bool) -> String {
        run(self.program(ours).args(["-L", "-k"]).arg(self.at("socket"))).ok().text()
    }

    fn uri(&self, export: &str) -> String {
        format!("nbd+unix:///{export}?socket={}", self.at("socket").display())
    }
}

/// A server in the background.
struct Serving<'a> {
    world: &'a World,
    process: i32,
}

impl Serving<'_> {
    /// What a client reads.
    fn disk(&self, export: &str) -> Vec<u8> {
        let raw = self.world.at("read.raw");
        let uri = self.world.uri(export);
        let _ = qemu::img(args!["convert", "-f", "raw", "-O", "raw", uri, &raw]).ok();
        fs::read(raw).unwrap()
    }

    /// What a client sees of a bitmap: extents without neighbours of one kind; `None` if it is not offered.
    fn dirty(&self, bitmap: &str) -> Option<Vec<(u64, String)>> {
        let context = format!("--map=qemu:dirty-bitmap:{bitmap}");
        let mut command = Command::new(tools::require("nbdinfo"));
        let done = run(command.args([&context, "--json", &self.world.uri("")]));
        let found = (done.code() == 0).then(|| done.json())?;
        let mut extents: Vec<(u64, String)> = Vec::new();
        for extent in found.as_array().unwrap() {
            let (length, kind) = (extent["length"].as_u64().unwrap(), extent["type"].to_string());
            match extents.last_mut() {
                Some(last) if last.1 == kind => last.0 += length,
                _ => extents.push((length, kind)),
            }
        }
        Some(extents)
    }

    /// Waits until it has ended.
    fn ended(self) {
        let until = Instant::now() + PATIENCE;
        while Path::new(&format!("/proc/{}", self.process)).exists() && !self.is_zombie() {
            assert!(Instant::now() < until, "it does not end");
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn is_zombie(&self) -> bool {
        let status = fs::read_to_string(format!("/proc/{}/stat", self.process));
        status.is_ok_and(|status| status.contains(") Z "))
    }

    fn stop(self) {
        // SAFETY: it is a process of this test.
        unsafe { libc::kill(self.process, libc::SIGTERM) };
        self.ended();
    }
}

/// The lines that must be equal: not the best size of requests, which is a cluster's here.
fn without_sizes(text: &str) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("  opt block:")).collect();
    lines.join("\n")
}

#[test]
fn clients_find_the_same() {
    let world = World::new();
    for (options, export) in [
        ("-t base.qcow2", ""),
        ("-t -x a -D text top.qcow2", "a"),
        ("-t -r -f qcow2 top.qcow2", ""),
        ("-t -e 3 -A top.qcow2", ""),
        ("-t -s top.qcow2", ""),
        ("-t -r -B enabled -B disabled -A base.qcow2", ""),
        ("-t -B disabled base.qcow2", ""),
        ("-t -s -B enabled top.qcow2", ""),
        ("-t -l before base.qcow2", ""),
        ("-t -l snapshot.name=before base.qcow2", ""),
        ("-t -o 1048576 base.qcow2", ""),
        ("-t -f raw base.qcow2", ""),
        ("-t -f raw raw.img", ""),
        ("-t -n --aio=native --discard=unmap --detect-zeroes=unmap top.qcow2", ""),
        ("-t --image-opts driver=qcow2,file.filename=top.qcow2", ""),
        ("-t --cache=writethrough --verbose top.qcow2", ""),
    ] {
        let look = |ours| {
            let serving = world.serve(ours, options);
            let lists = [world.list(false), world.list(true)];
            assert_eq!(lists[0], lists[1], "{options}");
            let bits = ["enabled", "disabled"].map(|bitmap| serving.dirty(bitmap));
            let disk = serving.disk(export);
            serving.stop();
            assert!(!world.at("socket").exists(), "{options}: the socket file stays");
            ((without_sizes(&lists[0]), bits), disk)
        };
        let (theirs, ours) = (look(false), look(true));
        assert_eq!(ours.0, theirs.0, "{options}");
        assert!(ours.1 == theirs.1, "{options}: the disks differ");
    }
}

/// QEMU finds no bitmaps behind an offset.
#[test]
fn bitmaps_are_moved_by_an_offset() {
    let world = World::new();
    let serving = world.serve(true, "-r -B disabled -o 65536 base.qcow2");
    let extent = |length, kind: &str| (length, kind.to_owned());
    let clean = SIZE - (384 << 10);
    let expected = [extent(192 << 10, "0"), extent(128 << 10, "1"), extent(clean, "0")];
    assert_eq!(serving.dirty("disabled").unwrap(), expected);
    serving.ended();
}

#[test]
fn writes_do_the_same() {
    let world = World::new();
    let writes = [
        "write -P 9 0 100k",
        "write -P 0 1M 512k",
        "write -z -u 512k 256k",
        "discard 3M 64k",
        "flush",
    ];
    for options in [
        "",
        "--discard=unmap",
        "--discard=unmap --detect-zeroes=unmap",
        "--detect-zeroes=on",
        "--cache=writethrough",
        "--cache=unsafe --discard=unmap",
        "--cache=none",
    ] {
        let done = |ours| {
            let image = world.at(if ours { "ours.qcow2" } else { "theirs.qcow2" });
            fs::copy(world.at("base.qcow2"), &image).unwrap();
            let name = image.file_name().unwrap().to_str().unwrap().to_owned();
            let serving = world.serve(ours, &format!("{options} {name}"));
            let _ = qemu::io(Path::new(&world.uri("")), "raw", &writes).ok();
            // That was its only client.
            serving.ended();
            qemu::assert_clean(&image);
            let map = qemu::map(&image);
            let is = |value: &serde_json::Value| value.as_bool().unwrap();
            let kinds = |entry: &serde_json::Value| (is(&entry["zero"]), is(&entry["data"]));
            let mut runs: Vec<(bool, bool, u64)> = Vec::new();
            for entry in map.as_array().unwrap() {
                let (zero, data) = kinds(entry);
                let length = entry["length"].as_u64().unwrap();
                match runs.last_mut() {
                    Some(last) if (last.0, last.1) == (zero, data) => last.2 += length,
                    _ => runs.push((zero, data, length)),
                }
            }
            (runs, qemu::read_disk(&image, "qcow2"))
        };
        let (theirs, ours) = (done(false), done(true));
        assert!(ours.1 == theirs.1, "{options}: the disks differ");
        assert_eq!(ours.0, theirs.0, "{options}");
    }
}

#[test]
fn what_is_not_to_be_written_stays() {
    let world = World::new();
    let before = fs::read(world.at("base.qcow2")).unwrap();
    for (options, written) in [("-s", true), ("-r", false), ("-l before", false), ("-r -s", false)]
    {
        let serving = world.serve(true, &format!("-t {options} base.qcow2"));
        let commands = ["write -P 7 0 64k", "read -P 7 0 64k"];
        let done = qemu::io(Path::new(&world.uri("")), "raw", &commands);
        assert_eq!(done.code() == 0, written, "{options}: {}", done.report());
        assert_eq!(done.text().contains("read 65536"), written, "{options}: {}", done.report());
        serving.stop();
        assert!(fs::read(world.at("base.qcow2")).unwrap() == before, "{options}");
    }
}

/// Reads a server's greeting; `false` if none comes soon.
fn is_greeted(stream: &mut UnixStream, patience: Duration) -> bool {
    stream.set_read_timeout(Some(patience)).unwrap();
    match stream.read_exact(&mut [0; 18]) {
        Ok(()) => true,
        Err(error) if error.kind() == ErrorKind::WouldBlock => false,
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn clients_wait_for_their_turn_and_the_last_one_ends_it() {
    let world = World::new();
    let (soon, late) = (Duration::from_millis(200), Duration::from_secs(30));
    for ours in [false, true] {
        let serving = world.serve(ours, "-e 2 base.qcow2");
        let connect = || UnixStream::connect(world.at("socket")).unwrap();
        let (mut first, mut second, mut third) = (connect(), connect(), connect());
        assert!(is_greeted(&mut first, late) && is_greeted(&mut second, late));
        assert!(!is_greeted(&mut third, soon), "ours {ours}: there is no room");
        drop(first);
        assert!(is_greeted(&mut third, late), "ours {ours}: there is room");
        drop((second, third));
        assert!(is_greeted(&mut connect(), late), "ours {ours}: nobody has used it yet");
        let _ = world.list(ours);
        let _ = serving.disk("");
        serving.ended();
        let serving = world.serve(ours, "-t base.qcow2");
        let _ = serving.disk("");
        assert!(is_greeted(&mut connect(), late), "ours {ours}: it goes on");
        serving.stop();
    }
}

#[test]
fn command_lines_are_refused_as_by_qemu() {
    let world = World::new();
    let last_line = |done: &Finished| {
        let line = done.stderr.lines().next().unwrap_or_default();
        line.trim_end_matches('.').to_owned()
    };
    for line in [
        "",
        "nosuch.qcow2",
        "-l nosuch base.qcow2",
        "--detect-zeroes=unmap base.qcow2",
        "-o 5242880 base.qcow2",
        "-B nosuch base.qcow2",
        "-L base.qcow2",
        "-L -k /nosuch/socket",
        "-k socket base.qcow2",
        "-L -c /dev/nbd0",
        "-d",
        "-c /dev/nbd0",
        "-c /dev/nbd0 --tls-creds=tls0 base.qcow2",
        "-c /dev/nbd0 nosuch.qcow2",
        "--aio=native base.qcow2",
        "--image-opts base.qcow2",
    ] {
        let [theirs, ours] = [false, true].map(|ours| {
            let mut command = world.program(ours);
            if !line.contains("-L") && !line.contains("-k") {
                command.arg("-k").arg(world.at("socket"));
            }
            let done = run(command.args(line.split_whitespace()));
            assert!(!ours || !world.at("socket").exists(), "{line}");
            let _ = fs::remove_file(world.at("socket"));
            done
        });
        assert_eq!(ours.code(), theirs.code(), "{line}: {}", ours.report());
        assert_eq!(last_line(&ours), last_line(&theirs), "{line}");
    }
    // These differ in their words, or are refused by us alone.
    for (line, words) in [
        ("--foo base.qcow2", "unrecognized option '--foo'"),
        ("--cache=x base.qcow2", "Invalid cache option: x"),
        ("--discard=x base.qcow2", "Invalid discard option: x"),
        ("-f x base.qcow2", "Unknown file format 'x'"),
        ("-k /nosuch/socket base.qcow2", "cannot listen on unix:/nosuch/socket: No such file"),
        ("-k /nosuch/socket raw.img", "was detected as raw"),
        ("-c nosuch base.qcow2", "Failed to open nosuch: No such file or directory"),
        ("-c /dev/null base.qcow2", "Failed to open /dev/null: it is no NBD device"),
        ("-d nosuch", "Cannot open nosuch: No such file or directory"),
        ("-d /dev/null", "Cannot open /dev/null: it is no NBD device"),
        ("-B enabled base.qcow2", "Bitmap 'enabled' is enabled"),
        ("--tls-creds=tls0 base.qcow2", "No TLS credentials with id 'tls0'"),
        ("-k a -p 1 base.qcow2", "Cannot use both a socket file and a TCP address"),
    ] {
        let done = run(world.program(true).args(line.split_whitespace()));
        assert_eq!(done.code(), 1, "{line}: {}", done.report());
        assert!(done.stderr.contains(words), "{line}: {}", done.report());
    }
    let done = isobath(world.directory.path(), ["qemu-nbd", "--help"]).ok();
    assert!(done.text().contains("--load-snapshot"), "{}", done.report());
}

/// What a test does with an option, and what the table says of it.
enum Does {
    /// Both programs serve the image with these options, and list the same.
    Serves(&'static str),
    /// Both end at once with these words, alike.
    Ends(&'static str),
    /// Other tests do it: those of TLS, and of the handshake below.
    Elsewhere,
    /// Isobath alone refuses these words, for this reason.
    Refused(&'static str, &'static str),
}

/// Every option, in the order of qemu-nbd's help: its forms, what is done with it, and a remark.
const OPTIONS: &[(&str, Does, &str)] = &[
    ("-h, --help", Does::Ends("--help"), "the text is Isobath's"),
    ("-V, --version", Does::Ends("-V"), "Isobath's version follows that of QEMU"),
    ("-p, --port", Does::Ends("-L -b 127.0.0.1 -p 1"), ""),
    ("-b, --bind", Does::Ends("-L -b 127.0.0.1 -p 1"), ""),
    ("-k, --socket", Does::Serves("-t base.qcow2"), ""),
    ("-e, --shared", Does::Serves("-t -e 3 base.qcow2"), ""),
    ("-t, --persistent", Does::Serves("-t base.qcow2"), ""),
    ("-v, --verbose", Does::Ends("-v -L -k /nosuch/socket"), "prints more only with `-c`"),
    ("-x, --export-name", Does::Serves("-t -x a base.qcow2"), ""),
    ("-D, --description", Does::Serves("-t -D text base.qcow2"), ""),
    ("--handshake-limit", Does::Elsewhere, ""),
    ("-o, --offset", Does::Serves("-t -o 1048576 base.qcow2"), "also with a suffix, and with `-B`"),
    ("-A, --allocation-depth", Does::Serves("-t -A top.qcow2"), ""),
    ("-B, --bitmap", Does::Serves("-t -B disabled base.qcow2"), "an enabled one only with `-r`"),
    ("-L, --list", Does::Ends("-L -k /nosuch/socket"), ""),
    (
        "--object",
        Does::Serves("-t --object secret,id=s,file=raw.img base.qcow2"),
        "`secret` (from a file), `tls-creds-x509`, `authz-simple`",
    ),
    ("--tls-creds", Does::Elsewhere, ""),
    ("--tls-authz", Does::Elsewhere, ""),
    ("--tls-hostname", Does::Elsewhere, ""),
    ("-T, --trace", Does::Serves("-t -T events=/dev/null base.qcow2"), "has no effect"),
    ("--fork", Does::Serves("-t base.qcow2"), ""),
    ("--pid-file", Does::Serves("-t base.qcow2"), ""),
    (
        "--selinux-label",
        Does::Refused("--selinux-label=x base.qcow2", "--selinux-label is not supported"),
        "sockets get no labels",
    ),
    (
        "-c, --connect",
        Does::Ends("-c nosuch base.qcow2"),
        "listens for other clients only with `-k`",
    ),
    (
        "-d, --disconnect",
        Does::Ends("-d nosuch"),
        "flushes the device before; refused for what is no NBD device",
    ),
    (
        "-f, --format",
        Does::Serves("-t -f raw raw.img"),
        "required for a raw image, unless with `-r`",
    ),
    ("-r, --read-only", Does::Serves("-t -r base.qcow2"), ""),
    ("-s, --snapshot", Does::Serves("-t -s base.qcow2"), ""),
    ("-l, --load-snapshot", Does::Serves("-t -r -l before base.qcow2"), ""),
    ("-n, --nocache", Does::Serves("-t -n base.qcow2"), ""),
    ("--cache", Does::Serves("-t --cache=writethrough base.qcow2"), ""),
    ("--aio", Does::Serves("-t --aio=threads base.qcow2"), "makes no difference"),
    ("--discard", Does::Serves("-t --discard=unmap base.qcow2"), ""),
    ("--detect-zeroes", Does::Serves("-t --detect-zeroes=on base.qcow2"), ""),
    (
        "--image-opts",
        Does::Serves("-t --image-opts driver=qcow2,file.filename=base.qcow2"),
        "[the drivers and options](commands/image-names.md) that all commands have",
    ),
];

#[test]
fn every_option_of_qemu_nbd_is_taken_or_refused_with_a_reason() {
    let world = World::new();
    // Every option that the installed version has.
    let help = run(world.program(false).arg("--help")).ok().text();
    for word in help.split([' ', '=', ',', '\n']).filter(|word| word.starts_with("--")) {
        let known = |forms: &str| forms.split(", ").any(|form| form == word);
        assert!(OPTIONS.iter().any(|(forms, ..)| known(forms)), "{word}");
    }
    let mut table = String::from("| option | as in QEMU | |\n|---|---|---|\n");
    for (forms, option, remark) in OPTIONS {
        let mut verdict = "yes";
        match option {
            Does::Serves(options) => {
                let [theirs, ours] = [false, true].map(|ours| {
                    let serving = world.serve(ours, options);
                    let list = without_sizes(&world.list(false));
                    serving.stop();
                    list
                });
                assert_eq!(theirs, ours, "{options}");
            }
            Does::Ends(options) => {
                let [theirs, ours] = [false, true]
                    .map(|ours| run(world.program(ours).args(options.split_whitespace())));
                assert_eq!(theirs.code(), ours.code(), "{}", ours.report());
            }
            Does::Elsewhere => {}
            Does::Refused(options, words) => {
                verdict = "refused";
                let done = run(world.program(true).args(options.split_whitespace())).exits(1);
                assert!(done.stderr.contains(words), "{}", done.report());
            }
        }
        let forms = forms.replace(", ", "`, `");
        writeln!(table, "| `{forms}` | {verdict} | {remark} |").unwrap();
    }
    let page = tools::workspace().join("docs/compatibility.md");
    let text = fs::read_to_string(&page).unwrap();
    let (start, end) = ("<!-- options of qemu-nbd -->\n", "<!-- end of qemu-nbd's -->");
    let (before, rest) = text.split_once(start).expect("the table's start");
    let (old, after) = rest.split_once(end).expect("the table's end");
    if old != table && std::env::var_os("ISOBATH_UPDATE").is_some() {
        fs::write(&page, format!("{before}{start}{table}{end}{after}")).unwrap();
        return;
    }
    assert!(old == table, "docs/compatibility.md is out of date; run this with ISOBATH_UPDATE=1");
}

/// A client that says nothing keeps the only place. With a limit it is closed, and another one served.
#[test]
fn a_handshake_has_a_limit_unless_it_is_0() {
    let world = World::new();
    for (limit, is_ended) in [("1", true), ("0", false)] {
        let serving = world.serve(true, &format!("-t -e 2 --handshake-limit={limit} base.qcow2"));
        let mut silent = UnixStream::connect(world.at("socket")).unwrap();
        silent.set_read_timeout(Some(PATIENCE)).unwrap();
        silent.read_exact(&mut [0; 18]).unwrap();
        if is_ended {
            assert_eq!(silent.read(&mut [0]).unwrap(), 0, "it is closed");
        } else {
            // Another client comes and goes, and this one may still choose an export.
            let _ = world.list(true);
            silent.write_all(&3_u32.to_be_bytes()).unwrap();
            silent.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
            silent.read_exact(&mut [0; 10]).unwrap();
        }
        drop(silent);
        serving.stop();
    }
}
