//! A served disk whose chain is changed over QMP.

pub(crate) mod clients;
pub(crate) mod load;

use clients::Frontend;
use isobath_qmp::client::{Address, Client, ClientError, Event};
use isobath_testkit::process::{Finished, Ready, Server};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The program under test.
pub(crate) const ISOBATH: &str = env!("CARGO_BIN_EXE_isobath");
/// The device that the disk is.
pub(crate) const DEVICE: &str = "vm";
/// A job that has told nothing for so long hangs.
const PATIENCE: Duration = Duration::from_mins(2);

/// `isobath serve` in a directory, with the sockets `nbd` and `qmp` there.
pub(crate) struct Live {
    pub(crate) server: Server,
    directory: PathBuf,
}

impl Live {
    /// Serves an image of the directory.
    #[track_caller]
    pub(crate) fn start(directory: &Path, image: &str, options: &[&str]) -> Self {
        Self::start_as(directory, image, options, |_| ())
    }

    /// Serves an image of the directory; `change` changes how the program is run.
    #[track_caller]
    pub(crate) fn start_as(
        directory: &Path,
        image: &str,
        options: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Self {
        // So that many descriptors are no more than a program may have by default.
        let mut command = Command::new("sh");
        command.current_dir(directory).args(["-c", "ulimit -n 1024; exec \"$0\" \"$@\"", ISOBATH]);
        command.args(["serve", image, "--export-name", DEVICE]);
        command.args(["--nbd", "unix:nbd", "--qmp", "unix:qmp"]).args(options);
        change(&mut command);
        // The one before may have been killed.
        let server = Server::start_after_kill(&mut command, Ready::Line("-blockdev"));
        Self { server, directory: directory.to_owned() }
    }

    /// The socket of the NBD server.
    pub(crate) fn nbd(&self) -> PathBuf {
        self.directory.join("nbd")
    }

    /// The frontend to the disk that every server has.
    pub(crate) fn frontend(&self) -> Frontend {
        Frontend::Nbd(self.nbd(), DEVICE.into())
    }

    /// The URI of the disk.
    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///{DEVICE}?socket={}", self.nbd().display())
    }

    /// A control session.
    #[track_caller]
    pub(crate) fn control(&self) -> Control {
        Control::connect(&self.directory.join("qmp"))
    }

    /// Ends it by SIGTERM; nothing may have failed.
    #[track_caller]
    pub(crate) fn stop(self) -> Finished {
        let done = self.server.stop().ok();
        assert!(!done.stderr.contains("ERROR"), "{}", done.report());
        done
    }
}

/// What goes wrong where the server may be killed: only its end does.
pub(crate) type Gone<T> = Result<T, ClientError>;

/// A QMP session that changes the disk's chain. A refusal fails the test.
pub(crate) struct Control(Client);

impl Control {
    /// A session at a socket file.
    #[track_caller]
    pub(crate) fn connect(socket: &Path) -> Self {
        Self(Client::connect(&Address::Unix(socket.to_owned())).expect("connect"))
    }

    /// Carries out a command that may be refused.
    pub(crate) fn attempt(&mut self, command: &str, arguments: &Value) -> Gone<Value> {
        self.0.execute(command, arguments.clone())
    }

    /// Carries out a command.
    #[track_caller]
    pub(crate) fn execute(&mut self, command: &str, arguments: &Value) -> Gone<Value> {
        let result = self.attempt(command, arguments);
        if let Err(ClientError::Refused { description, .. }) = &result {
            panic!("{command} {arguments}: {description}");
        }
        result
    }

    /// Puts a new overlay on top.
    #[track_caller]
    pub(crate) fn snapshot(&mut self, file: &str) -> Gone<()> {
        let arguments = json!({"device": DEVICE, "snapshot-file": file, "format": "qcow2"});
        self.execute("blockdev-snapshot-sync", &arguments).map(drop)
    }

    /// Waits for an event of one of the names.
    #[track_caller]
    pub(crate) fn wait_for(&mut self, names: &[&str]) -> Gone<Event> {
        loop {
            let event = self.0.event(PATIENCE)?;
            let Some(event) = event else { panic!("none of {names:?} has come") };
            if names.contains(&event.name.as_str()) {
                return Ok(event);
            }
        }
    }

    /// Waits until the job has ended, well.
    #[track_caller]
    pub(crate) fn completed(&mut self) -> Gone<()> {
        let event = self.wait_for(&["BLOCK_JOB_COMPLETED", "BLOCK_JOB_CANCELLED"])?;
        let well = event.name == "BLOCK_JOB_COMPLETED" && event.data.get("error").is_none();
        assert!(well, "{event:?}");
        Ok(())
    }

    /// Starts a job of the disk.
    #[track_caller]
    pub(crate) fn start(&mut self, command: &str, arguments: &Value) -> Gone<()> {
        let mut all = json!({"device": DEVICE, "pacing": "none"});
        for (key, value) in arguments.as_object().unwrap() {
            all[key] = value.clone();
        }
        self.execute(command, &all).map(drop)
    }

    /// The nodes of the chain, the active image's first: names and files' names.
    #[track_caller]
    pub(crate) fn nodes(&mut self) -> Gone<Vec<(String, String)>> {
        let nodes = self.execute("query-named-block-nodes", &json!({"flat": true}))?;
        let node = |node: &Value| {
            let path = Path::new(node["file"].as_str().unwrap());
            let file = path.file_name().unwrap().to_str().unwrap();
            (node["node-name"].as_str().unwrap().to_owned(), file.to_owned())
        };
        Ok(nodes.as_array().unwrap().iter().map(node).collect())
    }
}
