//! What a running QEMU does to a chain: block jobs, and layers reopened for writing.

use super::chains::{Chain, LAYERS, TOP, name};
use super::judge::Effect::Changes;
use super::judge::on_each_layer;
use isobath_testkit::process::{Ready, Server, run};
use isobath_testkit::qemu;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// How long QEMU may keep silent.
const PATIENCE: Duration = Duration::from_mins(2);

/// A storage daemon with a chain open: a node n0 to n4 for each layer, over f0 to f4 for the files.
struct Daemon {
    server: Server,
    lines: BufReader<UnixStream>,
    nbd: PathBuf,
}

impl Daemon {
    #[track_caller]
    fn start(chain: &Chain) -> Self {
        let socket = chain.directory().join("qmp");
        // The daemon connects to the test before it starts the monitor: QEMU's race for those who connect while it does
        // is in `testkit::daemon`.
        let listener = UnixListener::bind(&socket).unwrap();
        listener.set_nonblocking(true).unwrap();
        let program = qemu::program("qemu-storage-daemon");
        let mut command = Command::new(program);
        command
            .current_dir(chain.directory())
            .arg("--chardev")
            .arg(format!("socket,id=c,path={},server=off", socket.display()))
            .args(["--monitor", "chardev=c"]);
        for layer in 0..LAYERS {
            let file = json!({
                "driver": "file",
                "node-name": format!("f{layer}"),
                "filename": name(layer),
                "auto-read-only": true,
            });
            command.arg("--blockdev").arg(file.to_string());
            let node = node(chain, layer, layer < TOP);
            command.arg("--blockdev").arg(node.to_string());
        }
        let pid = chain.directory().join("pid");
        command.arg("--pidfile").arg(&pid);
        let server = Server::start(&mut command, Ready::File(&pid));
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let nbd = chain.directory().join("nbd");
        let mut daemon = Self { server, lines: BufReader::new(stream), nbd };
        assert!(daemon.line()["QMP"].is_object());
        daemon.ask("qmp_capabilities", &json!({}));
        daemon
    }

    #[track_caller]
    fn line(&mut self) -> Value {
        let mut line = String::new();
        let read = self.lines.read_line(&mut line).unwrap();
        assert!(read > 0, "the daemon ended: {}", self.server.log());
        serde_json::from_str(&line).unwrap()
    }

    /// Carries out a command; events before its answer are lost.
    #[track_caller]
    fn ask(&mut self, command: &str, arguments: &Value) {
        let text = json!({ "execute": command, "arguments": arguments }).to_string();
        self.lines.get_mut().write_all(text.as_bytes()).unwrap();
        loop {
            let answer = self.line();
            if answer["return"].is_object() {
                return;
            }
            assert!(answer["error"].is_null(), "{text}: {answer}");
        }
    }

    /// Waits for an event.
    #[track_caller]
    fn wait(&mut self, event: &str) -> Value {
        loop {
            let line = self.line();
            if line["event"] == event {
                return line["data"].clone();
            }
            let failed = line["event"] == "BLOCK_JOB_ERROR";
            assert!(!failed && line["error"].is_null(), "{line}");
        }
    }

    /// Runs a block job to its end.
    #[track_caller]
    fn job(mut self, command: &str, mut arguments: Value, ends_itself: bool) -> bool {
        arguments["job-id"] = "job".into();
        // Its end may come before the answer, which has no events of its own.
        let text = json!({ "execute": command, "arguments": arguments }).to_string();
        self.lines.get_mut().write_all(text.as_bytes()).unwrap();
        if !ends_itself {
            let _ = self.wait("BLOCK_JOB_READY");
            let text = json!({ "execute": "block-job-complete", "arguments": { "device": "job" } });
            self.lines.get_mut().write_all(text.to_string().as_bytes()).unwrap();
        }
        let end = self.wait("BLOCK_JOB_COMPLETED");
        assert!(end["error"].is_null(), "{end}");
        self.stop();
        true
    }

    #[track_caller]
    fn stop(self) {
        drop(self.lines);
        let _ = self.server.stop_qemu().ok();
    }
}

/// The options of a layer's node.
fn node(chain: &Chain, layer: usize, read_only: bool) -> Value {
    let mut node = json!({
        "driver": chain.format(layer),
        "node-name": format!("n{layer}"),
        "file": format!("f{layer}"),
        "read-only": read_only,
        "discard": "unmap",
    });
    if layer > 0 {
        node["backing"] = format!("n{}", layer - 1).into();
    }
    node
}

#[test]
fn block_commit() {
    on_each_layer("block-commit into the one below", Changes, 1..LAYERS, |chain, layer| {
        let arguments = json!({
            "device": "n4",
            "top-node": format!("n{layer}"),
            "base-node": format!("n{}", layer - 1),
        });
        Daemon::start(chain).job("block-commit", arguments, layer < TOP)
    });
    on_each_layer("block-commit into the base", Changes, 2..LAYERS, |chain, layer| {
        let arguments =
            json!({ "device": "n4", "top-node": format!("n{layer}"), "base-node": "n0" });
        Daemon::start(chain).job("block-commit", arguments, layer < TOP)
    });
}

#[test]
fn block_stream() {
    on_each_layer("block-stream of all below", Changes, 1..LAYERS, |chain, layer| {
        let arguments = json!({ "device": format!("n{layer}") });
        Daemon::start(chain).job("block-stream", arguments, true)
    });
    on_each_layer("block-stream of one", Changes, 2..LAYERS, |chain, layer| {
        let arguments =
            json!({ "device": format!("n{layer}"), "base-node": format!("n{}", layer - 2) });
        Daemon::start(chain).job("block-stream", arguments, true)
    });
}

#[test]
fn blockdev_reopen_and_writes_to_a_layer() {
    for command in ["write -P 210 120k 150k", "write -z 120k 150k", "discard 120k 150k"] {
        let what = format!("{command} after blockdev-reopen");
        on_each_layer(&what, Changes, 0..TOP, |chain, layer| {
            let mut daemon = Daemon::start(chain);
            let options = json!({ "options": [node(chain, layer, false)] });
            daemon.ask("blockdev-reopen", &options);
            let path = daemon.nbd.to_str().unwrap().to_owned();
            let address = json!({ "type": "unix", "data": { "path": path } });
            daemon.ask("nbd-server-start", &json!({ "addr": address }));
            let export = json!({
                "type": "nbd",
                "id": "export",
                "node-name": format!("n{layer}"),
                "writable": true,
            });
            daemon.ask("block-export-add", &export);
            let target = format!("nbd+unix:///n{layer}?socket={path}");
            let mut io = Command::new(qemu::program("qemu-io"));
            let _ = run(io.args(["-d", "unmap", "-f", "raw", "-c", command, &target])).ok();
            daemon.stop();
            true
        });
    }
}
