//! `qemu-storage-daemon`: nodes and exports, with that program's command line.

mod chardev;

use crate::failure::{Failure, Outcome};
use crate::host::{self, ImageHost, images};
use crate::image_name::Objects;
use crate::options;
use crate::server::daemon::{Daemon, WhenReady};
use crate::server::signals::{self, either};
use crate::server::{log_file, pid_file, threads};
use crate::{cores, messages, runtime};
use chardev::{Chardev, Controlling, Monitors};
use isobath_disk::{MetadataMode, OpenOptions};
use isobath_export::registry::{Frontends, Listeners};
use isobath_qmp::monitor::Monitor;
use isobath_qmp::schema::{Object, check, from_text};
use isobath_qmp::server::{self as qmp, ClientFiles, Events, Service};
use isobath_ring::net::Access;
use isobath_ring::{Handle, spawn};
use serde_json::{Map, Value};
use std::io::Write;
use std::path::PathBuf;
use std::rc::Rc;

type Daemons = qmp::Server<Monitor<ImageHost>>;

/// Serve images with qemu-storage-daemon's options
///
/// Runs until a signal arrives or a QMP client sends 'quit'; then the exports are shut down, and the images are flushed
/// and closed. Connections are neither authenticated nor encrypted.
#[derive(clap::Args)]
#[allow(clippy::doc_markdown)]
pub(crate) struct Args {
    /// Add a node: the arguments of QMP's blockdev-add, as JSON or NAME=VALUE,...; can be repeated
    #[arg(long, value_name = "[driver=]DRIVER,node-name=NAME,...")]
    blockdev: Vec<String>,
    /// Define a channel for --monitor: a socket to listen on, or standard input and output
    #[arg(long, value_name = "socket,id=ID,path=PATH,server=on|stdio,id=ID")]
    chardev: Vec<String>,
    /// Serve QMP on a channel; can be repeated
    #[arg(long, value_name = "[chardev=]ID")]
    monitor: Vec<String>,
    /// Serve NBD at this address
    #[arg(
        long,
        value_name = "addr.type=unix,addr.path=PATH|addr.type=inet,addr.host=HOST,addr.port=PORT"
    )]
    nbd_server: Option<String>,
    /// Add an export: the arguments of QMP's block-export-add, as JSON or NAME=VALUE,...; can be repeated
    #[arg(long, value_name = "[type=]nbd|vhost-user-blk|fuse,id=ID,node-name=NAME,...")]
    export: Vec<String>,
    /// Write the process ID to this file once clients can connect
    #[arg(long, value_name = "PATH")]
    pidfile: Option<PathBuf>,
    /// Run in the background; the command returns once clients can connect
    #[arg(long)]
    daemonize: bool,
    /// Accepted for compatibility; has no effect
    #[arg(short = 'T', long, value_name = "EVENTS")]
    trace: Vec<String>,
    #[command(flatten)]
    objects: Objects,
}

/// Splits an option's value into pairs; `implied` is the name of a first value without one.
fn pairs(text: &str, implied: &str) -> Vec<(String, String)> {
    let first = text.split(',').next().unwrap_or_default();
    let text = if implied.is_empty() || first.contains('=') {
        text.to_owned()
    } else {
        format!("{implied}={text}")
    };
    options::parse(&[text])
}

/// Parses an option's value as the arguments of a QMP command.
fn arguments(object: &Object, text: &str, implied: &str) -> Result<Map<String, Value>, String> {
    let map = if text.starts_with('{') {
        serde_json::from_str(text).map_err(|error| format!("JSON parse error, {error}"))?
    } else {
        from_text(object, &pairs(text, implied)).map_err(|error| error.to_string())?
    };
    check(object, &map).map_err(|error| error.to_string())?;
    Ok(map)
}

pub(crate) fn run(args: &Args, _: &mut dyn Write) -> Outcome {
    let chardevs = args.chardev.iter().map(|text| Chardev::parse(&pairs(text, "backend")));
    let chardevs: Vec<Chardev> = chardevs.collect::<Result<_, _>>()?;
    let nbd = args.nbd_server.as_deref();
    let objects = args.objects.tls();
    let nbd = nbd.map(|text| chardev::nbd_address(text, &objects)).transpose()?;
    let log = log_file::of_environment()?;
    let daemon = match args.daemonize.then(Daemon::start) {
        None => None,
        Some(Ok(daemon)) => Some(daemon),
        Some(Err(error)) => {
            return Err(Failure::new(error).context("cannot run in the background"));
        }
    };
    messages::detach();
    cores::withhold();
    host::map_reads(None);
    host::write_at_once();
    let ready = WhenReady { daemon, log };
    runtime::block_on(async || {
        // Before any socket exists, since a program that sees one may send a signal.
        let end = signals::Order::receive()?;
        let mut listeners = Listeners::new();
        if let Some((endpoint, tls)) = &nbd {
            let endpoints = std::slice::from_ref(endpoint);
            listeners.insert("nbd", tls.listen(endpoints, "--nbd-server", Access::default())?);
        }
        let monitors = args.monitor.iter().map(|text| pairs(text, "chardev"));
        let monitors = Monitors::bind(monitors, &chardevs)?;
        Box::pin(args.serve(listeners, monitors, ready, end)).await
    })?;
    Ok(0)
}

impl Args {
    async fn serve(
        &self,
        listeners: Listeners,
        monitors: Monitors,
        ready: WhenReady,
        end: signals::Order,
    ) -> Result<(), Failure> {
        let workers = threads::start(None)?;
        let handles: Vec<Handle> = workers.iter().map(|worker| worker.handle().clone()).collect();
        let frontends = Frontends::start(&handles, listeners).map_err(Failure::new)?;
        let events = Events::default();
        let opening = OpenOptions::new().writable(true).metadata(MetadataMode::Ordered);
        let monitor =
            Monitor::new(images().clone(), opening, Vec::new(), frontends.clone(), events.clone());
        // As in QEMU, whoever the socket's permissions let connect.
        let limits = qmp::Limits { users: None, ..qmp::Limits::default() };
        let control = qmp::Server::new(monitor, events, limits);
        let listening = frontends.serve();
        let mut controlling = None;
        let mut result = match end.unless_given(Box::pin(self.begin(&control))).await {
            Some(Ok(())) => self.run(&control, monitors, ready, &end, &mut controlling).await,
            Some(failed) => failed,
            // Whoever saw the sockets may end it, which is no failure; QEMU's ends once it has started. To the program
            // that waits for a daemon it is one.
            None if self.daemonize => Err(Failure::new("interrupted by a signal during startup")),
            None => Ok(()),
        };
        end.ends("requests in flight, and clients that have not received their replies");
        control.service().let_pass();
        frontends.stop();
        for ended in listening {
            match ended.await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    result = result.and(Err(Failure::new(error).context("a listener failed")));
                }
                Err(panicked) => panicked.resume(),
            }
        }
        // No client that could write is left.
        end.closes();
        control.service().end().await;
        control.stop();
        if let Some(controlling) = controlling {
            controlling.ended(&control).await;
        }
        control.service().closing().ended().await;
        drop(workers);
        result
    }

    /// Adds the nodes and the exports.
    async fn begin(&self, control: &Daemons) -> Result<(), Failure> {
        for object in self.objects.for_qmp() {
            let failed = |reason: String| {
                Failure::new(format_args!("--object {}: {reason}", options::printable(object)))
            };
            let arguments = Objects::arguments(object).map_err(failed)?;
            let done = Box::pin(control.service().execute(
                "object-add",
                arguments,
                &ClientFiles::default(),
            ))
            .await;
            done.map_err(|error| failed(error.to_string()))?;
        }
        let all = [
            ("--blockdev", "blockdev-add", &self.blockdev, "driver"),
            ("--export", "block-export-add", &self.export, "type"),
        ];
        for (option, command, given, implied) in all {
            let monitor = control.service();
            let Some(command) = monitor.schema().command(command) else {
                return Err(Failure::new(format_args!("{option} is not supported")));
            };
            for text in given {
                let failed = |reason: String| {
                    Failure::new(format_args!("{option} {}: {reason}", options::printable(text)))
                };
                let arguments = arguments(command.arguments, text, implied).map_err(failed)?;
                let done =
                    Box::pin(monitor.execute(command.name, arguments, &ClientFiles::default()))
                        .await;
                done.map_err(|error| failed(error.to_string()))?;
            }
        }
        Ok(())
    }

    /// Serves until a signal or a client ends it.
    async fn run(
        &self,
        control: &Rc<Daemons>,
        monitors: Monitors,
        ready: WhenReady,
        end: &signals::Order,
        controlling: &mut Option<Controlling>,
    ) -> Result<(), Failure> {
        let _pid_file = self.pidfile.as_deref().map(pid_file::create).transpose()?;
        let stays = ready.daemon.is_none();
        ready.ready()?;
        let watching = Rc::clone(control);
        spawn(async move { watching.service().watch().await });
        *controlling = Some(monitors.serve(control, stays)?);
        let quit = control.service().quit_requested();
        either(end.given(), quit).await;
        tracing::info!("stopping");
        Ok(())
    }
}
