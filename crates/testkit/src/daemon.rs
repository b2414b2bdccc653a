//! A `qemu-storage-daemon` that a test keeps running for any number of images, one after another.

use crate::nbd::Nbd;
use crate::process::{Ready, Server};
use crate::qemu;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

/// The maximum time to wait for a reply or an event.
const PATIENCE: Duration = Duration::from_mins(2);

/// The daemon, with a QMP session.
#[derive(Debug)]
pub struct Daemon {
    server: Server,
    session: BufReader<UnixStream>,
    /// Commands sent so far.
    sent: u64,
    events: VecDeque<Value>,
    directory: TempDir,
}

impl Default for Daemon {
    fn default() -> Self {
        Self::start()
    }
}

impl Daemon {
    /// Starts a daemon with an NBD server.
    #[track_caller]
    pub fn start() -> Self {
        Self::start_in(Path::new("."))
    }

    /// Starts a daemon with this working directory: relative names of images and of their data files start there.
    #[track_caller]
    pub fn start_in(work: &Path) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let qmp = directory.path().join("qmp");
        // Let the daemon connect to the test, which it does before it starts the monitor. A client that connects while
        // the monitor starts runs into a race in QEMU: the greeting arrives twice, or never.
        let listener = UnixListener::bind(&qmp).expect("listen for the storage daemon");
        let chardev = format!("socket,path={},server=off,id=qmp", qmp.display());
        let nbd = format!("addr.type=unix,addr.path={}", directory.path().join("nbd").display());
        let mut command = Command::new(qemu::program("qemu-storage-daemon"));
        command.current_dir(work);
        command.args(["--chardev", &chardev, "--monitor", "chardev=qmp", "--nbd-server", &nbd]);
        let server = Server::start(&mut command, Ready::Socket(&directory.path().join("nbd")));
        listener.set_nonblocking(true).expect("set a socket's mode");
        let (stream, _) = listener.accept().expect("the storage daemon has connected");
        stream.set_read_timeout(Some(PATIENCE)).expect("set a timeout");
        let session = BufReader::new(stream);
        let mut daemon = Self { server, session, sent: 0, events: VecDeque::new(), directory };
        let greeting = daemon.line();
        assert!(greeting.get("QMP").is_some(), "the storage daemon greets with {greeting}");
        daemon.ok("qmp_capabilities", &json!({}));
        daemon
    }

    /// Its error output.
    pub fn log(&self) -> String {
        // If the daemon has just died, its output may not be complete yet.
        thread::sleep(Duration::from_millis(100));
        self.server.log()
    }

    /// The socket of its NBD server.
    pub fn socket(&self) -> PathBuf {
        self.directory.path().join("nbd")
    }

    #[track_caller]
    fn line(&mut self) -> Value {
        let mut line = String::new();
        match self.session.read_line(&mut line) {
            Ok(0) => panic!("the storage daemon has closed its monitor\n{}", self.server.log()),
            Ok(_) => {}
            Err(error) => {
                panic!("the storage daemon does not reply: {error}\n{}", self.server.log())
            }
        }
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("not JSON: {error}: {line}"))
    }

    /// Executes a command.
    ///
    /// # Errors
    /// The daemon's message if it rejects the command.
    #[track_caller]
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, String> {
        self.sent += 1;
        let id = self.sent;
        let line = json!({"execute": command, "arguments": arguments, "id": id});
        let sent = writeln!(self.session.get_mut(), "{line}");
        assert!(sent.is_ok(), "the storage daemon accepts no commands\n{}", self.server.log());
        loop {
            let mut answer = self.line();
            if answer.get("event").is_some() {
                self.events.push_back(answer);
                continue;
            }
            assert_eq!(answer["id"], id, "{command}: the storage daemon answers {answer}");
            if let Some(error) = answer.get("error") {
                return Err(format!("qemu: {command} {arguments}: {}", error["desc"]));
            }
            return Ok(answer["return"].take());
        }
    }

    /// Executes a command that must succeed.
    #[track_caller]
    pub fn ok(&mut self, command: &str, arguments: &Value) -> Value {
        self.execute(command, arguments).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Waits for an event for which `wanted` returns true, and discards those before it.
    #[track_caller]
    pub fn wait(&mut self, wanted: impl Fn(&Value) -> bool) -> Value {
        loop {
            let event = match self.events.pop_front() {
                Some(event) => event,
                None => self.line(),
            };
            if wanted(&event) {
                return event;
            }
        }
    }

    /// Opens a node with the given options under this name.
    #[track_caller]
    pub fn open(&mut self, node: &str, mut options: Value) {
        options["node-name"] = node.into();
        let _ = self.ok("blockdev-add", &options);
    }

    /// Opens an image with its backing files.
    #[track_caller]
    pub fn open_image(&mut self, node: &str, image: &Path, format: &str, writable: bool) {
        let file = json!({"driver": "file", "filename": image, "discard": "unmap"});
        // The tests kill programs, not machines.
        let cache = json!({"no-flush": true});
        let image = json!({"driver": format, "read-only": !writable, "discard": "unmap",
            "cache": cache, "file": file});
        self.open(node, image);
    }

    /// Closes a node.
    #[track_caller]
    pub fn close(&mut self, node: &str) {
        let _ = self.ok("blockdev-del", &json!({"node-name": node}));
    }

    /// Exports a node under its own name, with bitmaps of its chain.
    #[track_caller]
    pub fn export(&mut self, node: &str, writable: bool, bitmaps: &[String]) {
        let mut export = json!({"type": "nbd", "id": node, "node-name": node, "name": node,
            "writable": writable});
        if !bitmaps.is_empty() {
            export["bitmaps"] = bitmaps.into();
        }
        let _ = self.ok("block-export-add", &export);
    }

    /// Ends an export.
    #[track_caller]
    pub fn unexport(&mut self, node: &str) {
        let _ = self.ok("block-export-del", &json!({"id": node, "mode": "hard"}));
        let gone =
            |event: &Value| event["event"] == "BLOCK_EXPORT_DELETED" && event["data"]["id"] == node;
        let _ = self.wait(gone);
    }

    /// Connects to an export.
    #[track_caller]
    pub fn connect(&self, node: &str) -> Nbd {
        Nbd::connect(&self.socket(), node).unwrap_or_else(|error| panic!("{node}: {error}"))
    }

    /// The name and file of each image node.
    #[track_caller]
    pub fn nodes(&mut self) -> Vec<(String, PathBuf)> {
        let nodes = self.ok("query-named-block-nodes", &json!({"flat": true}));
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let images = nodes.as_array().into_iter().flatten().filter(|node| node["drv"] != "file");
        let named =
            images.map(|node| (text(&node["node-name"]), PathBuf::from(text(&node["file"]))));
        named.map(|(name, file)| (name, fs::canonicalize(&file).unwrap_or(file))).collect()
    }

    /// The persistent bitmaps of a node that it considers consistent.
    #[track_caller]
    pub fn bitmaps(&mut self, node: &str) -> Vec<String> {
        let nodes = self.ok("query-named-block-nodes", &json!({"flat": true}));
        let nodes = nodes.as_array().into_iter().flatten();
        let bitmaps = nodes.filter(|found| found["node-name"] == node);
        let bitmaps = bitmaps.filter_map(|node| node["dirty-bitmaps"].as_array()).flatten();
        bitmaps
            .filter(|bitmap| bitmap["inconsistent"] != true)
            .filter_map(|bitmap| bitmap["name"].as_str().map(str::to_owned))
            .collect()
    }

    /// Checks that all its exports and images were closed.
    #[track_caller]
    pub fn assert_idle(&mut self) {
        let nodes = self.nodes();
        assert!(nodes.is_empty(), "the storage daemon still has {nodes:?}");
        self.events.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args;
    use crate::nbd::Request;

    #[test]
    fn what_a_client_writes_is_read_and_told_by_a_bitmap() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        qemu::create(&image, "qcow2", 1 << 20, "");
        let _ = qemu::img(args!["bitmap", "--add", "-g", "65536", &image, "b"]).ok();
        let mut daemon = Daemon::start();
        daemon.open_image("n", &image, "qcow2", true);
        daemon.export("n", true, &[]);
        let mut client = daemon.connect("n");
        let data = vec![7; 200_000];
        let answers = client
            .submit(&[
                Request::Write { offset: 65_000, data: &data, fua: true },
                Request::Zero { offset: 0, length: 100, unmap: true },
                Request::Discard { offset: 1 << 19, length: 1 << 16 },
                Request::Flush,
                Request::Read { offset: 900_000, length: 20 },
            ])
            .unwrap();
        assert_eq!(answers[4], [0; 20]);
        let bytes = client.read_all().unwrap();
        assert!(bytes[65_000..265_000] == data && bytes.len() == 1 << 20);
        drop(client);
        daemon.unexport("n");
        daemon.close("n");
        daemon.open_image("n", &image, "qcow2", false);
        let bitmaps = daemon.bitmaps("n");
        assert_eq!(bitmaps, ["b"]);
        daemon.export("n", false, &bitmaps);
        let context = ["qemu:dirty-bitmap:b".to_owned()];
        let mut client = Nbd::connect_with(&daemon.socket(), "n", &context).unwrap();
        let runs = client.status().unwrap();
        let dirty = [(5 << 16, 1), (3 << 16, 0), (1 << 16, 1), (7 << 16, 0)];
        assert_eq!(runs, [dirty]);
        drop(client);
        daemon.unexport("n");
        daemon.close("n");
        daemon.assert_idle();
        qemu::assert_clean(&image);
    }
}
