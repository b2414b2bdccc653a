//! `isobath ctl`

mod disk;
mod follow;
mod job;
mod list;
mod pace;
mod pauses;
mod plot;
mod start;
mod stats;

use crate::failure::{Failure, Outcome};
use crate::{cores, json, options, screen, size};
use disk::{Chain, Events, Push, Query, Resize, Snapshot};
use isobath_qmp::client::{Address, Client, ClientError};
use isobath_tls::ClientCredentials;
use job::{Verb, VerbOfJob};
use list::Jobs;
use pauses::Status;
use serde_json::{Map, Value, json};
use start::{Commit, Mirror, Stream};
use stats::Stats;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Control a running server: snapshots, jobs, statistics
///
/// Speaks QMP to 'isobath serve --qmp SOCKET', or to QEMU for commands that both have. If the server has several disks,
/// DISK selects one.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The server's QMP address: a socket file, or HOST:PORT
    #[arg(value_name = "SOCKET")]
    address: String,
    #[command(flatten)]
    tls: TlsArgs,
    #[command(subcommand)]
    command: Command,
}

/// How the connection is encrypted.
#[derive(clap::Args, Default)]
struct TlsArgs {
    /// Connect by TLS, with the certificates in this directory, under QEMU's names: ca-cert.pem, and client-cert.pem
    /// and client-key.pem if the server asks for them
    #[arg(long, value_name = "DIR")]
    tls_creds: Option<PathBuf>,
    /// The name that the server's certificate is for [default: HOST]
    #[arg(long, value_name = "NAME", requires = "tls_creds")]
    tls_hostname: Option<String>,
}

#[derive(clap::Subcommand)]
enum Command {
    Snapshot(Snapshot),
    Push(Push),
    Stream(Stream),
    Commit(Commit),
    Mirror(Mirror),
    Resize(Resize),
    Jobs(Jobs),
    /// Pause a job
    Pause(VerbOfJob),
    /// Resume a paused job, or restart one interrupted when an earlier server ended
    Resume(VerbOfJob),
    /// Cancel a job, leaving the chain unchanged
    Cancel(VerbOfJob),
    /// Complete a ready job, which changes the chain
    Complete(VerbOfJob),
    /// Finalize a pending job, which changes the chain
    Finalize(VerbOfJob),
    /// Dismiss a job that has ended or was interrupted
    Dismiss(VerbOfJob),
    Speed(job::Speed),
    Follow(job::Follow),
    Chain(Chain),
    Stats(Stats),
    Status(Status),
    /// Stop all disks: requests in flight are waited for, what was acknowledged is made durable, and no request of a
    /// client is carried out until 'cont'
    Stop,
    /// Let all disks go on: those that 'stop' has stopped, and those that a failure has paused (serve --werror); the
    /// requests that wait are carried out, those that failed once more
    Cont,
    Events(Events),
    Query(Query),
    /// Shut the server down
    Quit,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let mut session = Session::connect_by(&args.address, &args.tls, out)?;
    match &args.command {
        Command::Snapshot(args) => args.run(&mut session),
        Command::Push(args) => {
            let former = args.begin(&mut session)?;
            // The connection ends: what the server says meanwhile would have to be read.
            drop(session);
            former.send(out)
        }
        Command::Stream(args) => args.run(&mut session),
        Command::Commit(args) => args.run(&mut session),
        Command::Mirror(args) => args.run(&mut session),
        Command::Resize(args) => args.run(&mut session),
        Command::Jobs(args) => args.run(&mut session),
        Command::Pause(args) => args.run(Verb::Pause, &mut session),
        Command::Resume(args) => args.run(Verb::Resume, &mut session),
        Command::Cancel(args) => args.run(Verb::Cancel, &mut session),
        Command::Complete(args) => args.run(Verb::Complete, &mut session),
        Command::Finalize(args) => args.run(Verb::Finalize, &mut session),
        Command::Dismiss(args) => args.run(Verb::Dismiss, &mut session),
        Command::Speed(args) => args.run(&mut session),
        Command::Follow(args) => args.run(&mut session),
        Command::Chain(args) => args.run(&mut session),
        Command::Stats(args) => args.run(&mut session),
        Command::Status(args) => args.run(&mut session),
        Command::Stop => pauses::stop(&mut session),
        Command::Cont => pauses::resume(&mut session),
        Command::Events(args) => args.run(&mut session),
        Command::Query(args) => args.run(&mut session),
        Command::Quit => session.ask("quit", json!({})).map(|_| 0),
    }
}

/// The connection, and the output for results.
pub(super) struct Session<'a> {
    client: Client,
    address: String,
    pub(super) out: &'a mut dyn Write,
}

/// A layer of a served chain.
pub(super) struct ServedLayer {
    node: String,
    format: String,
    allocated: u64,
    file: String,
}

impl ServedLayer {
    pub(super) fn node(&self) -> &str {
        &self.node
    }

    pub(super) fn file(&self) -> &str {
        &self.file
    }
}

impl<'a> Session<'a> {
    /// Connects to the server: at a socket file, or HOST:PORT.
    pub(super) fn connect(address: &str, out: &'a mut dyn Write) -> Result<Self, Failure> {
        Self::connect_by(address, &TlsArgs::default(), out)
    }

    fn connect_by(address: &str, tls: &TlsArgs, out: &'a mut dyn Write) -> Result<Self, Failure> {
        let parsed = Address::parse(address);
        let client = match &tls.tls_creds {
            None => Client::connect(&parsed),
            Some(directory) => {
                cores::withhold();
                let credentials = ClientCredentials::read(directory)
                    .map_err(|error| Failure::new(error).context("--tls-creds"))?;
                let Some(host) = tls.tls_hostname.as_deref().or(parsed.host()) else {
                    return Err(Failure::usage(
                        "a socket file has no host name; give the name in the server's certificate \
                         by --tls-hostname",
                    ));
                };
                Client::connect_secured(&parsed, &credentials, host)
            }
        };
        let client = client.map_err(Failure::new)?;
        Ok(Self { client, address: address.to_owned(), out })
    }
}

impl Session<'_> {
    /// The server's process ID, if it is on this machine.
    pub(super) fn server(&self) -> Option<u32> {
        self.client.server()
    }

    /// The layers of a disk, the active one first.
    pub(super) fn layers(&mut self, device: &str) -> Result<Vec<ServedLayer>, Failure> {
        let blocks = self.ask("query-block", json!({}))?;
        let block = entries(&blocks).find(|block| text(block, "device") == device);
        let root = block.and_then(|block| block.get("inserted"));
        let root = root.ok_or_else(|| Failure::new(format_args!("no such disk: '{device}'")))?;
        let nodes = self.ask("query-named-block-nodes", json!({"flat": true}))?;
        let from = text(root, "node-name");
        let depth = number(root, "backing_file_depth") as usize;
        let layers = entries(&nodes).skip_while(|node| text(node, "node-name") != from);
        let layer = |node: &Value| ServedLayer {
            node: text(node, "node-name").to_owned(),
            format: text(node, "drv").to_owned(),
            allocated: number(node.get("image").unwrap_or(&Value::Null), "actual-size"),
            file: text(node, "file").to_owned(),
        };
        Ok(layers.take(depth + 1).map(layer).collect())
    }

    /// Merges the layers above `base` into the layer of the node `device`, and shows the progress.
    pub(super) fn stream(
        &mut self,
        device: &str,
        base: Option<&ServedLayer>,
        speed: Option<u64>,
        change_snapshots: bool,
    ) -> Outcome {
        let id = "retain";
        let all = arguments([
            ("job-id", Some(id.into())),
            ("device", Some(device.into())),
            ("base-node", base.map(|base| base.node.clone().into())),
            ("speed", speed.map(Value::from)),
            ("change-snapshots", change_snapshots.then_some(Value::Bool(true))),
        ]);
        self.ask("block-stream", all)?;
        follow::follow(self, id, follow::Readiness::Never)
    }

    /// Runs a command.
    fn ask(&mut self, command: &str, arguments: Value) -> Result<Value, Failure> {
        self.client.execute(command, arguments).map_err(Failure::new)
    }

    /// Like [`ask`](Self::ask), but returns `None` if the server, such as QEMU, does not have the command.
    fn ask_isobath(&mut self, command: &str, arguments: Value) -> Result<Option<Value>, Failure> {
        match self.client.execute(command, arguments) {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_of("CommandNotFound") => Ok(None),
            Err(error) => Err(Failure::new(error)),
        }
    }

    /// The name of the requested disk, or of the only disk.
    pub(super) fn device(&mut self, wanted: Option<&str>) -> Result<String, Failure> {
        if let Some(wanted) = wanted {
            return Ok(wanted.to_owned());
        }
        let names = self.devices()?;
        match &names[..] {
            [only] => Ok(only.clone()),
            [] => Err(Failure::new("the server has no named disk; name a node instead")),
            _ => Err(Failure::new(format_args!(
                "the server has several disks; name one of: {}",
                names.join(", ")
            ))),
        }
    }

    /// The names of all disks.
    fn devices(&mut self) -> Result<Vec<String>, Failure> {
        let blocks = self.ask("query-block", json!({}))?;
        Ok(entries(&blocks).map(|block| text(block, "device").to_owned()).collect())
    }

    /// Prints a value as JSON.
    fn print(&mut self, value: &Value) -> Result<(), Failure> {
        Ok(json::print(self.out, value)?)
    }
}

/// A string member, or the empty string.
fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value.get(name).and_then(Value::as_str).unwrap_or("")
}

/// A number member, or 0.
fn number(value: &Value, name: &str) -> u64 {
    value.get(name).and_then(Value::as_u64).unwrap_or(0)
}

/// An array's entries.
fn entries(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().map(Vec::as_slice).unwrap_or_default().iter()
}

/// An object of the arguments that are present.
fn arguments<const N: usize>(pairs: [(&str, Option<Value>); N]) -> Value {
    let pairs = pairs.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    Value::Object(pairs.collect::<Map<_, _>>())
}

/// Becomes true on SIGINT, SIGTERM or SIGHUP.
fn interrupted() -> Result<Arc<AtomicBool>, Failure> {
    let flag = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        signal_hook::flag::register(signal, flag.clone())
            .map_err(|error| Failure::new(error).context("cannot set up signal handlers"))?;
    }
    Ok(flag)
}

/// Refuses to repeat what is printed as JSON, which is one value.
fn refuse_watch(watch: bool) -> Result<(), Failure> {
    if watch {
        return Err(Failure::usage("--watch shows text; run --output=json once for each look"));
    }
    Ok(())
}

/// Shows something repeatedly until Ctrl-C: in place on a terminal, elsewhere only what differs from the last time.
fn watch(
    session: &mut Session<'_>,
    every: std::time::Duration,
    mut show: impl FnMut(&mut Session<'_>) -> Result<String, Failure>,
) -> Outcome {
    use std::io::IsTerminal;
    let stop = interrupted()?;
    let terminal = std::io::stdout().is_terminal();
    let mut last = None;
    while !stop.load(Ordering::Relaxed) {
        let shown = show(session)?;
        if terminal {
            session.out.flush()?;
            write!(screen::raw(), "\x1b[H\x1b[2J")?;
            write!(session.out, "{shown}")?;
        } else if last.as_ref() != Some(&shown) {
            writeln!(session.out, "{shown}")?;
            last = Some(shown);
        }
        session.out.flush()?;
        let until = std::time::Instant::now() + every;
        while std::time::Instant::now() < until && !stop.load(Ordering::Relaxed) {
            // Nothing may be left to write that would tell.
            if !terminal && screen::is_abandoned() {
                return Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe).into());
            }
            // Events are ignored here, but must be read.
            match session.client.event(std::time::Duration::from_millis(100)) {
                Ok(_) => {}
                Err(ClientError::Closed) => {
                    return Err(Failure::new("the server closed the connection"));
                }
                Err(error) => return Err(Failure::new(error)),
            }
        }
    }
    Ok(0)
}

/// Formats rows as an aligned table. Cells may hold names from images.
fn table(rows: &[Vec<String>]) -> String {
    let printable = |row: &Vec<String>| row.iter().map(|cell| options::printable(cell)).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(printable).collect();
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Parses a speed: bytes per second, with the same suffixes as sizes.
fn speed(text: &str) -> Result<u64, String> {
    size::parse(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [["a", "bcd", ""], ["é", "x", "y"]].map(|row| row.map(String::from).to_vec());
        assert_eq!(table(&rows), "a  bcd\né  x    y\n");
        assert_eq!(table(&[]), "");
        assert_eq!(table(&[vec!["\u{202e}a".to_owned()]]), "\\u{202e}a\n");
    }
}
