//! Exports of NBD servers as images: the same command lines by QEMU's programs and by ours under their names, each with
//! a server of its own that serves a copy of the same image.

use isobath_testkit::process::{Finished, Ready, Server, run};
use isobath_testkit::{args, qemu};
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Bytes of the served disk.
const SIZE: usize = 3 << 20;

/// A program and a directory with its images. The socket is `s`.
struct Side {
    root: tempfile::TempDir,
}

impl Side {
    fn new(is_ours: bool) -> Self {
        let root = tempfile::tempdir().unwrap();
        for program in ["qemu-img", "qemu-io"] {
            let file =
                if is_ours { env!("CARGO_BIN_EXE_isobath").into() } else { qemu::program(program) };
            symlink(file, root.path().join(program)).unwrap();
        }
        let mut disk = vec![0; SIZE];
        disk[..3].copy_from_slice(b"abc");
        disk[2_000_000..2_100_000].fill(b'x');
        fs::write(root.path().join("base.raw"), disk).unwrap();
        qemu::create(&root.path().join("top.qcow2"), "qcow2", SIZE as u64, "");
        let _ = qemu::io(&root.path().join("top.qcow2"), "qcow2", &["write -P 7 1M 100k"]).ok();
        Self { root }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    /// Serves an image to one client, and then ends: as scripts start a `qemu-nbd`.
    fn serve(&self, image: &str, options: &[&str]) -> Server {
        let pid_file = self.path("pid");
        let _ = fs::remove_file(&pid_file);
        let mut command = Command::new(qemu::program("qemu-nbd"));
        command.args(["--format", "raw", "--discard=unmap", "--socket"]).arg(self.path("s"));
        command.arg("--pid-file").arg(&pid_file).args(options).arg(self.path(image));
        Server::start(&mut command, Ready::File(&pid_file))
    }

    /// Runs a program on the words of a line; `SOCK` in them is the socket's path.
    fn run(&self, line: &str) -> Finished {
        let socket = self.path("s").display().to_string();
        let mut words = line.split(' ').map(|word| word.replace("SOCK", &socket).replace('~', " "));
        let program = self.path(&words.next().unwrap());
        run(Command::new(program).current_dir(self.root.path()).args(words))
    }

    /// What a command printed, without what names this side, takes time, or is ours alone.
    fn shown(&self, finished: &Finished) -> String {
        let directory = self.root.path().display().to_string();
        let text = finished.text().replace(&directory, "DIR").replace('\r', "\n");
        let differs = ["disk size: ", "actual-size", "ops; "];
        let lines = text.lines().filter(|line| !line.trim_start().starts_with('('));
        let lines = lines.filter(|line| {
            let unknown = line.contains("unavailable");
            unknown || !differs.iter().any(|part| line.contains(part))
        });
        lines.map(|line| line.to_owned() + "\n").collect()
    }
}

fn sides() -> [Side; 2] {
    [Side::new(false), Side::new(true)]
}

/// Runs a line on both sides, each with a server for one client. Returns what both printed.
#[track_caller]
fn both(sides: &[Side; 2], image: &str, line: &str) -> [Finished; 2] {
    let finished = sides.each_ref().map(|side| {
        let server = side.serve(image, &[]);
        let finished = side.run(line);
        // It ends when its client has gone: then what the client has written is in the file.
        let failed = finished.code() != 0;
        let _ = if failed { server.stop_qemu() } else { server.wait() };
        finished
    });
    same(sides, line, &finished);
    finished
}

#[track_caller]
fn same(sides: &[Side; 2], line: &str, [qemu, own]: &[Finished; 2]) {
    let (report, codes) = (own.report(), (qemu.code(), own.code()));
    assert_eq!(codes.0, codes.1, "{line}\n{}\n{report}", qemu.report());
    assert_eq!(sides[0].shown(qemu), sides[1].shown(own), "{line}\n{report}");
}

/// Both sides' files hold the same bytes.
#[track_caller]
fn same_bytes(sides: &[Side; 2], name: &str) {
    let [qemu, own] = sides.each_ref().map(|side| fs::read(side.path(name)).unwrap());
    assert!(qemu == own, "{name}");
}

/// Both disks have the same bytes.
#[track_caller]
fn identical(one: &Path, one_format: &str, other: &Path, other_format: &str) {
    let _ = qemu::img(args!["compare", "-f", one_format, "-F", other_format, one, other]).ok();
}

#[test]
fn an_export_is_converted_from() {
    let sides = sides();
    for (line, target) in [
        ("qemu-img convert -t writeback -p -O raw nbd+unix:///?socket=SOCK new.raw", "new.raw"),
        ("qemu-img convert -t none -O raw nbd+unix:///?socket=SOCK direct.raw", "direct.raw"),
        ("qemu-img convert -T none -f raw -O raw nbd+unix://?socket=SOCK t.raw", "t.raw"),
        ("qemu-img dd -f raw -O raw if=nbd:unix:SOCK of=dd.raw bs=1M", "dd.raw"),
    ] {
        let [_, own] = both(&sides, "base.raw", line);
        let _ = own.ok();
        same_bytes(&sides, target);
    }
    both(&sides, "base.raw", "qemu-img convert -f raw -O qcow2 nbd:unix:SOCK new.qcow2");
    for side in &sides {
        let (new, base) = (side.path("new.qcow2"), side.path("base.raw"));
        identical(&new, "qcow2", &base, "raw");
        qemu::assert_clean(&new);
    }
}

#[test]
fn an_export_is_converted_to() {
    let sides = sides();
    for line in [
        "qemu-img convert -p -t none -T none -f qcow2 -O raw -n top.qcow2 nbd:unix:SOCK",
        "qemu-img convert -n -O raw top.qcow2 nbd+unix:///?socket=SOCK",
        "qemu-img convert -n --target-is-zero -O raw top.qcow2 nbd+unix:///?socket=SOCK",
    ] {
        for side in &sides {
            let old = if line.contains("is-zero") { 0 } else { 0xcc };
            fs::write(side.path("target"), vec![old; SIZE]).unwrap();
        }
        let [_, own] = both(&sides, "target", line);
        let _ = own.ok();
        same_bytes(&sides, "target");
        let [one, other] = ["target", "top.qcow2"].map(|name| sides[1].path(name));
        identical(&one, "raw", &other, "qcow2");
    }
    // `dd` writes zeroes, too.
    for side in &sides {
        fs::write(side.path("target"), vec![0xcc; SIZE]).unwrap();
        let _server = side.serve("target", &["--persistent"]);
        let dd = "qemu-img dd -f qcow2 -O raw bs=64k if=top.qcow2 of=nbd+unix:///?socket=SOCK";
        let _ = side.run(dd).ok();
    }
    same_bytes(&sides, "target");
    // Without -n it is created in the place that is there, if that is large enough.
    for (length, code) in [(SIZE, 0), (4 << 20, 0), (SIZE - 512, 1)] {
        let finished = sides.each_ref().map(|side| {
            fs::write(side.path("target"), vec![0xcc; length]).unwrap();
            let _server = side.serve("target", &["--persistent"]);
            side.run("qemu-img convert -O raw top.qcow2 nbd:unix:SOCK")
        });
        assert_eq!(finished[1].code(), code, "{}", finished[1].report());
        same(&sides, "create", &finished);
    }
}

#[test]
fn an_export_is_described() {
    let sides = sides();
    for line in [
        "qemu-img info --output=json nbd+unix:///?socket=SOCK",
        "qemu-img info nbd+unix:///?socket=SOCK",
        "qemu-img info nbd:unix:SOCK",
        "qemu-img info -f raw nbd:unix:SOCK",
        "qemu-img info --image-opts driver=raw,file.driver=nbd,file.server.type=unix,file.server.path=SOCK",
        "qemu-img info --image-opts driver=raw,file.driver=nbd,file.path=SOCK",
        "qemu-img info --image-opts file.driver=nbd,file.server.type=unix,file.server.path=SOCK,file.export=",
        "qemu-img info json:{\"driver\":\"raw\",\"file\":{\"driver\":\"nbd\",\"path\":\"SOCK\"}}",
        "qemu-img info json:{\"file\":{\"driver\":\"nbd\",\"server\":{\"type\":\"unix\",\"path\":\"SOCK\"}}}",
        "qemu-img map nbd:unix:SOCK",
        "qemu-img map --output=json -f raw nbd:unix:SOCK",
        "qemu-img measure -O qcow2 nbd:unix:SOCK",
        "qemu-img check nbd:unix:SOCK",
        "qemu-img compare -U nbd:unix:SOCK base.raw",
        "qemu-img compare -U nbd:unix:SOCK top.qcow2",
        "qemu-img info nbd:unix:SOCK:exportname=other",
        "qemu-io -f raw -r -c read~-P~0x78~2000000~100 -c read~-P~0~100~100 nbd:unix:SOCK",
    ] {
        both(&sides, "base.raw", line);
    }
    for line in [
        "qemu-img info nbd:unix:SOCK.none",
        "qemu-img info nbd:localhost:1",
        "qemu-img info nbd:x",
        "qemu-img info nbd+unix:///?foo=1",
        "qemu-img info nbds://localhost/",
        "qemu-img info file:nbd:unix:SOCK",
        "qemu-img info --image-opts driver=nbd",
        "qemu-img info --image-opts driver=nbd,server.type=unix",
        "qemu-img info --image-opts driver=nbd,path=SOCK,host=h",
        "qemu-img create -f qcow2 -F raw -b nbd:unix:SOCK.none x.qcow2",
    ] {
        let finished = sides.each_ref().map(|side| side.run(line));
        assert_eq!(finished[1].code(), 1, "{line}");
        same(&sides, line, &finished);
    }
}

#[test]
fn an_export_is_a_backing_file() {
    let sides = sides();
    let create = "qemu-img create new.qcow2 -f qcow2 -F raw -b nbd+unix:///?socket=SOCK";
    let [_, own] = both(&sides, "base.raw", create);
    let _ = own.ok();
    for side in &sides {
        let info = qemu::info(&side.path("new.qcow2"));
        let name = format!("nbd+unix:///?socket={}", side.path("s").display());
        assert_eq!(info["backing-filename"], Value::from(name));
        assert_eq!(info["virtual-size"], SIZE);
    }
    // No server is needed for it.
    let finished = sides.each_ref().map(|side| side.run("qemu-img info new.qcow2"));
    same(&sides, "info", &finished);
    for line in [
        "qemu-img info --backing-chain new.qcow2",
        "qemu-img convert -O raw new.qcow2 copy.raw",
        "qemu-img compare -U new.qcow2 base.raw",
        "qemu-img compare new.qcow2 top.qcow2",
        "qemu-img map new.qcow2",
        "qemu-img map --output=json new.qcow2",
        "qemu-io -r -c read~-P~0x78~2000000~100000 -c read~-P~0~1M~4k new.qcow2",
        "qemu-io -c write~-P~9~65000~70000 -c read~-P~9~65000~70000 -c read~0~64k new.qcow2",
        "qemu-img convert -O raw new.qcow2 copy.raw",
    ] {
        both(&sides, "base.raw", line);
    }
    same_bytes(&sides, "copy.raw");
    let rebase = "qemu-img rebase -u -F raw -b nbd:unix:SOCK new.qcow2";
    let finished = sides.each_ref().map(|side| side.run(rebase));
    same(&sides, rebase, &finished);
    both(&sides, "base.raw", "qemu-img convert -O raw new.qcow2 copy.raw");
    same_bytes(&sides, "copy.raw");
    both(&sides, "base.raw", "qemu-img rebase -U -F qcow2 -b top.qcow2 new.qcow2");
    for side in &sides {
        let (new, copy) = (side.path("new.qcow2"), side.path("copy.raw"));
        identical(&new, "qcow2", &copy, "raw");
        qemu::assert_clean(&new);
    }
}

#[test]
fn changes_are_committed_to_an_export() {
    let sides = sides();
    for side in &sides {
        let uri = format!("nbd+unix:///?socket={}", side.path("s").display());
        let new = side.path("new.qcow2");
        let _ = qemu::img(args![
            "create",
            "-f",
            "qcow2",
            "-u",
            "-F",
            "raw",
            "-b",
            &uri,
            &new,
            SIZE.to_string()
        ])
        .ok();
        let _server = side.serve("base.raw", &["--persistent"]);
        let _ = qemu::io(&new, "qcow2", &["write -P 9 65000 70000"]).ok();
    }
    let finished = sides.each_ref().map(|side| {
        let _server = side.serve("base.raw", &["--persistent"]);
        side.run("qemu-img commit new.qcow2")
    });
    same(&sides, "commit", &finished);
    same_bytes(&sides, "base.raw");
    assert!(fs::read(sides[1].path("base.raw")).unwrap()[65000..135_000].iter().all(|b| *b == 9));
}

#[test]
fn an_image_is_in_an_export() {
    let sides = sides();
    for side in &sides {
        fs::write(side.path("place"), vec![0; 8 << 20]).unwrap();
    }
    // QEMU connects more than once for this.
    let create = "qemu-img create -f qcow2 nbd:unix:SOCK 1M";
    let finished = sides.each_ref().map(|side| {
        let _server = side.serve("place", &["--persistent"]);
        side.run(create)
    });
    same(&sides, create, &finished);
    for line in [
        "qemu-img info nbd:unix:SOCK",
        "qemu-img info --output=json nbd:unix:SOCK",
        "qemu-io -f qcow2 -c write~-P~5~100~70000 nbd:unix:SOCK",
        "qemu-img check nbd:unix:SOCK",
        "qemu-img snapshot -c one nbd:unix:SOCK",
        "qemu-img resize nbd:unix:SOCK 2M",
        "qemu-img map --output=json nbd:unix:SOCK",
        "qemu-img convert -O raw nbd:unix:SOCK inner.raw",
        "qemu-img resize -f raw nbd:unix:SOCK 9M",
        "qemu-img resize -f raw --shrink nbd:unix:SOCK 1M",
    ] {
        both(&sides, "place", line);
    }
    same_bytes(&sides, "inner.raw");
    for side in &sides {
        qemu::assert_clean(&side.path("place"));
    }
}

#[test]
fn an_image_in_an_export_names_no_file_beside_it() {
    let side = Side::new(true);
    fs::write(side.path("place"), vec![0; 8 << 20]).unwrap();
    let _server = side.serve("place", &["--persistent"]);
    let create = "qemu-img create -f qcow2 -u -F raw -b base.raw nbd:unix:SOCK 1M";
    let _ = side.run(create).ok();
    assert!(side.run("qemu-img info nbd:unix:SOCK").ok().text().contains("file: base.raw"));
    let finished = side.run("qemu-img map nbd:unix:SOCK").exits(1);
    assert!(finished.stderr.contains("a relative name has no meaning"), "{}", finished.report());
}

fn isobath(directory: &Path, words: &[&OsStr]) -> Finished {
    run(Command::new(env!("CARGO_BIN_EXE_isobath")).current_dir(directory).args(words))
}

#[test]
fn what_needs_files_refuses_exports() {
    let side = Side::new(true);
    let name = format!("nbd:unix:{}", side.path("s").display());
    for words in [
        &["seal", &name][..],
        &["index", &name],
        &["chain", "flatten", &name],
        &["chain", "merge", "1", &name],
        &["chain", "delete", &name, "1"],
        &["chain", "retain", &name, "--keep-last", "1"],
        &["convert", "-O", "vmdk", "-o", "subformat=streamOptimized", "top.qcow2", &name],
    ] {
        let words: Vec<&OsStr> = words.iter().map(OsStr::new).collect();
        let finished = isobath(side.root.path(), &words);
        assert_eq!(finished.code(), 1, "{}", finished.report());
        assert!(finished.stderr.contains("is an NBD export"), "{}", finished.report());
    }
}

#[test]
fn an_untrusted_image_names_no_export() {
    let side = Side::new(true);
    let uri = format!("nbd+unix:///?socket={}", side.path("s").display());
    let new = side.path("new.qcow2");
    let _ =
        qemu::img(args!["create", "-f", "qcow2", "-u", "-F", "raw", "-b", &uri, &new, "1M"]).ok();
    let socket = side.path("served");
    let socket = format!("unix:{}", socket.display());
    let words = args!["serve", "--untrusted", "--nbd", &socket, &new];
    let words: Vec<&OsStr> = words.iter().map(AsRef::as_ref).collect();
    let finished = isobath(side.root.path(), &words);
    assert_eq!(finished.code(), 1, "{}", finished.report());
    assert!(finished.stderr.contains("not protocols"), "{}", finished.report());
}

#[test]
fn the_driver_for_files_opens_files() {
    let side = Side::new(true);
    let _server = side.serve("base.raw", &["--persistent"]);
    let name = format!("nbd:unix:{}", side.path("s").display());
    let link = side.path("qemu-storage-daemon");
    symlink(env!("CARGO_BIN_EXE_isobath"), &link).unwrap();
    for nodes in [
        vec![format!("driver=file,node-name=f,filename={name}")],
        vec![format!("driver=raw,node-name=r,file.driver=file,file.filename={name}")],
    ] {
        let nodes = nodes.iter().flat_map(|node| ["--blockdev", node]);
        let finished = run(Command::new(&link).current_dir(side.root.path()).args(nodes));
        assert_eq!(finished.code(), 1, "{}", finished.report());
        assert!(finished.stderr.contains("No such file"), "{}", finished.report());
    }
}

#[test]
fn a_server_reads_through_an_export() {
    let side = Side::new(true);
    let uri = format!("nbd+unix:///?socket={}", side.path("s").display());
    let _base = side.serve("base.raw", &["--persistent"]);
    let create = format!("qemu-img create new.qcow2 -f qcow2 -F raw -b {uri}");
    let _ = side.run(&create).ok();
    let socket = side.path("served");
    let mut serve = Command::new(env!("CARGO_BIN_EXE_isobath"));
    serve
        .arg("serve")
        .arg("--nbd")
        .arg(format!("unix:{}", socket.display()))
        .arg(side.path("new.qcow2"));
    let server = Server::start(&mut serve, Ready::Socket(&socket));
    let name = format!("nbd:unix:{}", socket.display());
    let read = ["read -P 0x78 2000000 100000", "write -P 1 1M 1M", "read -P 1 1M 900k"];
    let _ = qemu::io(Path::new(&name), "raw", &read).ok();
    let _ = server.stop().ok();
    qemu::assert_clean(&side.path("new.qcow2"));
}
