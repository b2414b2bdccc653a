//! Commands on a disk, and commands that print what a server sends.

use super::{ServedLayer, Session, arguments, interrupted};
use crate::commands::push::{Open, Sending, ServedFiles};
use crate::failure::{Failure, Outcome};
use crate::host::is_file_name;
use crate::options::{self, OutputFormat};
use crate::size::{self, NewSize};
use isobath_disk::{ImageFormat, OpenOptions};
use isobath_qmp::client::ClientError;
use isobath_remote::Address;
use isobath_remote::served::Pinned;
use isobath_ring::place::open_regular;
use isobath_storage::{FileId, word};
use isobath_storage_file::{id_at, is_in_use};
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// Take a snapshot: FILE becomes the active image, the former active image its backing file
///
/// FILE is created, unless --existing is given; it must not have data yet. When the command returns, the former
/// active image is complete and no longer written to.
#[derive(clap::Args)]
#[command(allow_missing_positional = true)]
pub(super) struct Snapshot {
    /// The disk's name [default: the only disk]
    disk: Option<String>,
    /// FILE already exists, as an overlay of the active image
    #[arg(long)]
    existing: bool,
    /// A name for the new node
    #[arg(long, value_name = "NAME")]
    node_name: Option<String>,
    /// The new active image
    file: PathBuf,
}

impl Snapshot {
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        let device = session.device(self.disk.as_deref())?;
        let file = self.file.to_str().unwrap_or_default();
        if self.disk.is_none() && session.devices()?.iter().any(|device| device == file) {
            return Err(Failure::usage(format_args!(
                "'{file}' is a disk, and the new active image is missing; to give the image that \
                 name, write './{file}'"
            )));
        }
        let mode = if self.existing { "existing" } else { "absolute-paths" };
        let arguments = arguments([
            ("device", Some(device.into())),
            ("snapshot-file", Some(absolute(&self.file)?)),
            ("snapshot-node-name", self.node_name.clone().map(Value::from)),
            ("mode", Some(mode.into())),
        ]);
        session.ask("blockdev-snapshot-sync", arguments)?;
        Ok(0)
    }
}

/// Take a snapshot, and push what the disk had then to a directory or an object store
///
/// FILE is created and becomes the active image, as with 'snapshot'. The former active image and those below it, to
/// which nobody writes any more, are pushed by this command while the disk is used: layers that the store has already
/// are read, but not sent. The images must be on this machine, under the names that the server knows.
#[derive(clap::Args)]
pub(super) struct Push {
    /// The disk's name [default: the only disk]
    #[arg(long, value_name = "NAME")]
    disk: Option<String>,
    #[command(flatten)]
    sending: Sending,
    /// The new active image
    file: PathBuf,
    #[arg(help = crate::store::CHAIN)]
    remote: String,
}

impl Push {
    /// Takes the snapshot, unless the push could not succeed. What to do next needs no server.
    pub(super) fn begin<'p>(&'p self, session: &mut Session<'_>) -> Result<Former<'p>, Failure> {
        let address = Address::parse(&self.remote)?;
        let device = session.device(self.disk.as_deref())?;
        let layers = session.layers(&device)?;
        let format = layers.first().map(format_of).transpose()?.unwrap_or(ImageFormat::Qcow2);
        let files = files_of(session, &layers)?;
        Sending::check_files(&files, Some(format))?;
        self.sending.check_store(&address)?;
        let Some(active) = files.names.first() else {
            unreachable!("a disk without an image is refused")
        };
        let snapshot = Snapshot {
            disk: self.disk.clone(),
            existing: false,
            node_name: None,
            file: self.file.clone(),
        };
        snapshot.run(session)?;
        let former = self.former(session, &device, address, &files.open);
        former.map_err(|failure| failure.and(self.how_to_continue(format, active)))
    }

    /// What was the active image until the snapshot, and what is below it. Some files may have been `open` only before
    /// that.
    fn former(
        &self,
        session: &mut Session<'_>,
        device: &str,
        address: Address,
        open: &Open,
    ) -> Result<Former<'_>, Failure> {
        // Another client may have changed the chain meanwhile: what the disk had is below the new image.
        let layers = session.layers(device)?;
        let new = absolute(&self.file)?;
        let place = layers.iter().position(|layer| new.as_str() == Some(layer.file()));
        let layers = place.and_then(|place| layers.get(place..)).unwrap_or_default();
        let Some(former) = layers.get(1) else {
            return Err(Failure::new(format_args!(
                "'{}' is no longer a layer of the disk: another client has changed the chain, and nothing was pushed",
                isobath_storage::shown(&self.file)
            )));
        };
        let format = format_of(former)?;
        let mut files = files_of(session, layers)?;
        if let (Open::InServer(now), Open::InServer(before))
        | (Open::Anywhere(now), Open::Anywhere(before)) = (&mut files.open, open)
        {
            now.extend(before);
        }
        // By the new image's header: the server's names may mean something else to this program.
        Sending::check_files(&files, Some(ImageFormat::Qcow2))?;
        files.names.remove(0);
        Ok(Former { push: self, files, format, address })
    }

    /// What to say after an error that follows the snapshot of an image of this format.
    fn how_to_continue(&self, format: ImageFormat, image: &Path) -> String {
        format!(
            "the snapshot '{}' stays; 'isobath push -f {}{} {} {}' continues",
            isobath_storage::shown(&self.file),
            format.name(),
            self.sending.shown(),
            word(image),
            word(&self.remote)
        )
    }
}

/// The format of a layer, of which the server says a name.
fn format_of(layer: &ServedLayer) -> Result<ImageFormat, Failure> {
    ImageFormat::from_name(&layer.format).ok_or_else(|| {
        Failure::new(format_args!(
            "'{}' cannot be pushed: the server says that its format is '{}', which is not known",
            layer.file(),
            options::printable(&layer.format)
        ))
    })
}

/// The files of layers, which must be on this machine and open in the server.
///
/// This command may read files that the server may not: a server that was taken over must not choose what is pushed.
fn files_of(session: &Session<'_>, layers: &[ServedLayer]) -> Result<ServedFiles, Failure> {
    let Some(process) = session.server() else {
        return Err(Failure::new(
            "the images must be on this machine: connect to the server by its socket file, and in its PID namespace",
        ));
    };
    let seen = match open_files(process) {
        Ok(open) => Some(open),
        Err(_) if user_of(process) == Some(rustix::process::geteuid().as_raw()) => None,
        Err(error) => {
            return Err(Failure::new(format_args!(
                "which files the server has open cannot be seen: {}; run the command as root with CAP_SYS_PTRACE, or \
                 as the server's user",
                isobath_storage::cause(&error)
            )));
        }
    };
    let file = |layer: &ServedLayer| {
        let file = layer.file();
        let refused =
            |why: &str| Err(Failure::new(format_args!("'{file}' cannot be pushed: {why}")));
        if Pinned::parse(file).is_some() {
            return refused(
                "it is in a store already, and what is above it refers to it there; 'isobath ctl stream' makes the \
                 disk whole",
            );
        }
        if !is_file_name(Path::new(file)) {
            return refused("it is not a file");
        }
        if Path::new(file).is_absolute() {
            return Ok(PathBuf::from(file));
        }
        // The server may run in another directory.
        match fs::read_link(format!("/proc/{process}/cwd")) {
            Ok(directory) => Ok(directory.join(file)),
            Err(_) => refused(
                "its name is relative to the server's directory, which only root can see; start the server with \
                 absolute names",
            ),
        }
    };
    let names = layers.iter().map(file).collect::<Result<Vec<_>, _>>()?;
    let open = seen.map_or_else(|| Open::Anywhere(in_use(&names)), Open::InServer);
    Ok(ServedFiles { names, open })
}

/// Those of these files that some program has open as images. This one has none of them open.
fn in_use(names: &[PathBuf]) -> HashSet<FileId> {
    let used = |name: &PathBuf| {
        let file = open_regular(name).ok()?;
        let id = id_at(&file.metadata().ok()?);
        is_in_use(&file.into()).is_ok_and(|used| used).then_some(id)
    };
    names.iter().filter_map(used).collect()
}

/// The files that a process has open for reading.
///
/// # Errors
/// They cannot be seen.
fn open_files(process: u32) -> io::Result<HashSet<FileId>> {
    let mut open = HashSet::new();
    for entry in fs::read_dir(format!("/proc/{process}/fd"))? {
        let entry = entry?;
        let number = entry.file_name();
        let info = Path::new("/proc").join(process.to_string()).join("fdinfo").join(number);
        let found = fs::metadata(entry.path()).and_then(|file| Ok((file, is_read(&info)?)));
        match found {
            Ok((file, true)) => drop(open.insert(id_at(&file))),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
            // It was closed meanwhile.
            Ok((_, false)) | Err(_) => {}
        }
    }
    Ok(open)
}

/// The user as whom a process acts, if that can be seen.
fn user_of(process: u32) -> Option<u32> {
    let text = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let users = text.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    users.split_whitespace().nth(1)?.parse().ok()
}

/// Whether a descriptor can be read from, by what `/proc` tells of it: one that only names a file, or is only written
/// to, needs no right to read.
fn is_read(info: &Path) -> io::Result<bool> {
    let text = fs::read_to_string(info)?;
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    Ok(flags.is_some_and(|flags| {
        flags & libc::O_PATH == 0 && flags & libc::O_ACCMODE != libc::O_WRONLY
    }))
}

/// An image that was the active one, and those below it.
pub(super) struct Former<'p> {
    push: &'p Push,
    files: ServedFiles,
    format: ImageFormat,
    address: Address,
}

impl Former<'_> {
    /// Pushes them.
    pub(super) fn send(self, out: &mut dyn Write) -> Outcome {
        let Self { push, files, format, address } = self;
        let Some(image) = files.names.first() else {
            unreachable!("there is a layer below the new one")
        };
        let options = OpenOptions::new().format(Some(format));
        let pushed = push.sending.send(image, options, Some(&files), &address);
        let pushed = pushed.map_err(|failure| failure.and(push.how_to_continue(format, image)))?;
        push.sending.say(&pushed, &address, out)
    }
}

/// The name of a layer: that of layers of a chain in a store as it is, and any other as an absolute path.
pub(super) fn layer(name: &Path) -> Result<Value, Failure> {
    match name.to_str().filter(|name| Pinned::parse(name).is_some()) {
        Some(pinned) => Ok(pinned.into()),
        None => absolute(name),
    }
}

/// The absolute path, since the server may run in another directory.
pub(super) fn absolute(path: &Path) -> Result<Value, Failure> {
    let path = std::path::absolute(path)
        .map_err(|error| Failure::new(error).context(format_args!("'{}'", path.display())))?;
    let name = path.to_str().ok_or_else(|| {
        let path = path.display();
        Failure::new(format_args!("cannot send '{path}' as JSON: the path is not valid UTF-8"))
    })?;
    Ok(name.into())
}

/// Change a disk's size
#[derive(clap::Args)]
#[command(allow_missing_positional = true)]
pub(super) struct Resize {
    /// The disk's name [default: the only disk]
    disk: Option<String>,
    /// Allow the disk to shrink, which deletes all data past its new end
    #[arg(long)]
    shrink: bool,
    /// The new size, such as 20G; with + or - in front, relative to the current size (write -- before -4G)
    #[arg(value_parser = NewSize::parse)]
    size: NewSize,
}

impl Resize {
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        let device = session.device(self.disk.as_deref())?;
        // The server adds what is relative, so that of two such changes at once none is lost.
        let (size, sign) = match self.size {
            NewSize::To(size) => (size, None),
            NewSize::More(bytes) => (bytes, Some(1)),
            NewSize::Less(bytes) => (bytes, Some(-1)),
        };
        let signed = i64::try_from(size).map(|size| size * sign.unwrap_or(1));
        let size = signed.map_err(|_| Failure::new("New image size must be less than 2^63"))?;
        let arguments = arguments([
            ("device", Some(device.into())),
            ("size", Some(size.into())),
            ("relative", sign.map(|_| true.into())),
            ("shrink", self.shrink.then(|| true.into())),
        ]);
        session.ask("block_resize", arguments)?;
        Ok(0)
    }
}

/// Show a disk's layers, the active layer first
#[derive(clap::Args)]
pub(super) struct Chain {
    /// The disk's name [default: the only disk]
    disk: Option<String>,
    /// Output format
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: OutputFormat,
}

impl Chain {
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        let device = session.device(self.disk.as_deref())?;
        if self.output == OutputFormat::Json {
            let layers = session.layers(&device)?;
            let layers = layers.iter().map(|layer| {
                json!({"node": layer.node, "format": layer.format, "actual-size": layer.allocated,
                       "file": layer.file})
            });
            let layers = Value::Array(layers.collect());
            session.print(&layers)?;
            return Ok(0);
        }
        let mut rows = vec![["NODE", "FORMAT", "ON DISK", "FILE"].map(String::from).to_vec()];
        for layer in session.layers(&device)? {
            rows.push(vec![layer.node, layer.format, size::human(layer.allocated), layer.file]);
        }
        session.out.write_all(super::table(&rows).as_bytes())?;
        Ok(0)
    }
}

/// Print events as JSON, one per line, until Ctrl-C
#[derive(clap::Args)]
pub(super) struct Events {}

impl Events {
    #[allow(clippy::unused_self, reason = "as every command")]
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        let stop = interrupted()?;
        while !stop.load(Ordering::Relaxed) {
            match session.client.event(Duration::from_millis(200)) {
                Ok(Some(event)) => {
                    let event = json!({"event": event.name, "data": event.data});
                    writeln!(session.out, "{event}")?;
                    session.out.flush()?;
                }
                Ok(None) => {}
                Err(ClientError::Closed) => return Ok(0),
                Err(error) => return Err(Failure::new(error)),
            }
        }
        Ok(0)
    }
}

/// Run any QMP command and print its result
#[derive(clap::Args)]
#[command(after_help = "Examples:\n  query query-block\n  query block-job-set-speed device=vm \
                  speed=1048576\n  query blockdev-add '{\"driver\": \"qcow2\", ...}'")]
pub(super) struct Query {
    /// The command's name
    command: String,
    /// Arguments: NAME=VALUE, where VALUE is JSON or a plain string, or a JSON object
    #[arg(value_name = "NAME=VALUE|JSON")]
    arguments: Vec<String>,
}

impl Query {
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        let arguments = parse(&self.arguments).map_err(Failure::new)?;
        let result = session.ask(&self.command, arguments)?;
        session.print(&result)?;
        Ok(0)
    }
}

fn parse(given: &[String]) -> Result<Value, String> {
    let mut arguments = Map::new();
    for word in given {
        if word.starts_with('{') {
            match serde_json::from_str(word) {
                Ok(Value::Object(object)) => arguments.extend(object),
                Ok(_) => return Err(format!("'{word}' is not a JSON object")),
                Err(error) => return Err(format!("'{word}' is not a JSON object: {error}")),
            }
            continue;
        }
        let Some((name, value)) = word.split_once('=') else {
            return Err(format!("'{word}' is neither NAME=VALUE nor a JSON object"));
        };
        let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
        arguments.insert(name.to_owned(), value);
    }
    Ok(Value::Object(arguments))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn arguments_are_words_or_json() {
        let words = ["device=vm", "speed=10", "flat=true", "x=\"1\"", r#"{"a": [1]}"#, "y=a=b"];
        let words = words.map(String::from);
        let expected =
            json!({"device": "vm", "speed": 10, "flat": true, "x": "1", "a": [1], "y": "a=b"});
        assert_eq!(parse(&words), Ok(expected));
        assert!(parse(&["word".into()]).is_err() && parse(&["{".into()]).is_err());
    }

    #[test]
    fn only_files_that_a_process_can_read_from_count_as_open() {
        let directory = tempfile::tempdir().unwrap();
        let opened = |name: &str, options: &mut fs::OpenOptions| {
            let path = directory.path().join(name);
            fs::write(&path, "").unwrap();
            let file = options.open(&path).unwrap();
            (id_at(&fs::metadata(path).unwrap()), file)
        };
        let options = fs::File::options;
        let (read, _read) = opened("read", options().read(true));
        let (both, _both) = opened("both", options().read(true).write(true));
        let (written, _written) = opened("written", options().write(true));
        let (named, _named) = opened("named", options().read(true).custom_flags(libc::O_PATH));
        let open = open_files(std::process::id()).unwrap();
        assert!(open.contains(&read) && open.contains(&both));
        assert!(!open.contains(&written) && !open.contains(&named));
        assert_eq!(user_of(std::process::id()), Some(rustix::process::geteuid().as_raw()));
    }
}
