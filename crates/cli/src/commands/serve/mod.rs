//! `isobath serve`

mod announce;
mod args;
mod confine;
mod control;
mod disks;
mod frontends;
mod pausing;
mod record;
#[cfg(feature = "slow-disk")]
mod slow;
mod throttle;

pub(crate) use args::Args;

use crate::failure::{Failure, Outcome};
use crate::host::{self, images};
use crate::server::add_fd::AddFd;
use crate::server::daemon::{Daemon, WhenReady};
use crate::server::sandbox::Confined;
use crate::server::signals::{self, either};
use crate::server::tls::Tls;
use crate::server::{handed_in, listen, log_file, pid_file, service_manager, threads};
use crate::{cores, messages, runtime};
use announce::announce;
use frontends::Keepers;
use isobath_disk::encryption::Secrets;
use isobath_disk::{LiveDisk, MemoryLimit};
use isobath_export::registry::Frontends;
use isobath_qmp::monitor::{Closing, Drive, Monitor};
use isobath_qmp::server::{self as qmp, Events};
use isobath_ring::{Handle, JoinHandle, spawn};
use isobath_storage::Host;
#[cfg(feature = "slow-disk")]
use isobath_storage_test::slow::SlowHost;
use record::Record;
use std::fs::File;
use std::future;
use std::io::{self, Write};
use std::rc::Rc;
use std::sync::Arc;

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    args.find_layers()?;
    let names = args.export_names()?;
    handed_in::check(args.handed_in())?;
    args.add_fd.iter().try_for_each(AddFd::add)?;
    args.frontends.check(args.images().len())?;
    args.frontends.check_recovery(!args.qmp.is_empty(), args.snapshot.is_some())?;
    args.check_files()?;
    throttle::check(&args.throttle, &names)?;
    pausing::check(&args.werror, &args.rerror, args.images().len(), !args.qmp.is_empty())?;
    args.frontends.check_exports(&names, !args.qmp.is_empty())?;
    args.tls.check_qmp(&args.qmp, args.insecure)?;
    args.tls.check(args.frontends.addresses().chain(&args.qmp))?;
    let log =
        args.log.as_deref().map(|log| log_file::open(log, args.sandbox.becomes())).transpose()?;
    let record = Record::create(args)?;
    let secrets = args.secret_file.secrets()?;
    let tls = args.tls.read()?;
    let confines = args.sandbox.is_on(args.frontends.mounts())?;
    let daemon = match args.daemonize.then(Daemon::start) {
        None => None,
        Some(Ok(daemon)) => Some(daemon),
        Some(Err(error)) => {
            return Err(Failure::new(error).context("cannot run in the background"));
        }
    };
    let keepers = args.frontends.start_keepers()?;
    args.sandbox.become_user()?;
    cores::withhold();
    host::map_reads(args.map_reads);
    host::write_at_once();
    let memory = args.memory_limit.map(MemoryLimit::new);
    let confined =
        if confines { Some(confine::enter(args, &secrets, memory.as_ref())?) } else { None };
    messages::detach();
    let order = Order { args, names, tls, secrets, memory, keepers, confined, record, log };
    runtime::block_on(async || {
        if let Some(why) = runtime::why_no_ring() {
            messages::complain(format_args!("{why}; threads do its work, more slowly"));
        }
        #[cfg(feature = "slow-disk")]
        if let Some(disk) = args.slow_disk {
            let host = SlowHost::new(images().clone(), disk);
            return Box::pin(run_on(host, order, out, daemon)).await;
        }
        Box::pin(run_on(images().clone(), order, out, daemon)).await
    })
}

/// What is to be served, and how.
struct Order<'a> {
    args: &'a Args,
    /// The exports' names.
    names: Vec<String>,
    tls: Tls,
    /// The secrets of encrypted images.
    secrets: Secrets,
    /// What all disks and frontends share.
    memory: Option<Arc<MemoryLimit>>,
    /// Those that add block devices and remove them.
    keepers: Keepers,
    confined: Option<Confined>,
    /// What notes the reads of a chain in a store.
    record: Option<Record>,
    /// Where messages go from the time that clients can connect.
    log: Option<File>,
}

/// Serves images stored on `host`.
async fn run_on<H: Host + Clone>(
    host: H,
    mut order: Order<'_>,
    out: &mut dyn Write,
    daemon: Option<Daemon>,
) -> Outcome {
    let (mut confined, record) = (order.confined.take(), order.record.take());
    let end = signals::Order::receive()?;
    let opening = disks::open(&host, &order);
    let disks = match end.unless_given(opening).await {
        Some(disks) => disks?,
        None => return Err(interrupted()),
    };
    let mut added = Closing::default();
    let places = (out, daemon, record.as_ref());
    let served = serve(host, order, confined.as_mut(), &disks, &end, &mut added, places).await;
    end.closes();
    let closed = disks::close(&disks).await;
    added.ended().await;
    drop(confined);
    // What was served until now is recorded even if that ended by a failure.
    let recorded = record.map_or(Ok(()), Record::end);
    served.and(closed).and(recorded).map(|()| 0)
}

/// Serves the disks until a signal arrives, or until clients can no longer reach them. Those that clients have added
/// may then still be closed.
async fn serve<H: Host + Clone>(
    host: H,
    order: Order<'_>,
    confined: Option<&mut Confined>,
    disks: &[Arc<LiveDisk<H>>],
    end: &signals::Order,
    added: &mut Closing,
    (out, daemon, record): (&mut dyn Write, Option<Daemon>, Option<&Record>),
) -> Result<(), Failure> {
    let Order { args, names, tls, secrets, memory, keepers, confined: _, record: _, log } = order;
    let access = args.access();
    let listeners = args.frontends.listen(access, &tls)?;
    let controls = tls.listen(&args.qmp, "--qmp", access)?;
    let scraped = listen::listen(&args.metrics, "--metrics", access)?;
    let workers = threads::start(args.threads)?;
    let handles: Vec<Handle> = workers.iter().map(|worker| worker.handle().clone()).collect();
    let frontends = Frontends::start_within(&handles, listeners, memory.as_ref());
    let frontends = frontends.map_err(Failure::new)?;

    let drives = names.into_iter().zip(disks).map(|(name, disk)| Drive::new(name, disk.clone()));
    let events = Events::default();
    let opening = disks::opening_of_added(args, &secrets, memory.as_ref());
    let monitor = Monitor::new(host, opening, drives.collect(), frontends.clone(), events.clone());
    let control = qmp::Server::new(monitor, events, args.qmp_limits());
    let monitor = control.service();
    *added = monitor.closing();
    pausing::apply(&args.werror, &args.rerror, monitor);
    let limited = throttle::apply(&args.throttle, monitor);
    let exported =
        limited.and_then(|()| args.frontends.export(monitor, &frontends, access, keepers));
    let started = match exported {
        Ok(()) => started(monitor, end).await,
        Err(failure) => Err(failure),
    };
    if let Err(failure) = started {
        monitor.end().await;
        return Err(failure);
    }

    let pid_file = match args.pid_file.as_deref().map(pid_file::create).transpose() {
        Ok(pid_file) => pid_file,
        Err(failure) => {
            monitor.end().await;
            return Err(failure);
        }
    };
    if let Err(failure) = confined.map_or(Ok(()), Confined::close) {
        monitor.end().await;
        return Err(failure);
    }
    // Clients are served even if the announcement cannot be printed.
    if let Err(error) = announce(out, monitor) {
        tracing::warn!(%error, "cannot print the exports' addresses");
    }
    if let Err(failure) = (WhenReady { daemon, log }).ready() {
        monitor.end().await;
        return Err(failure);
    }
    notify("READY=1");

    let is_controlled = !controls.is_empty();
    let controlling = control::serve_control(&control, controls);
    control::serve_metrics(&control, scraped);
    let stopped = stop_when_asked(end.clone(), control.clone(), frontends.clone());
    disks::look_after(disks);
    disks::follow_traces(args, record);
    let result = until_ended(monitor, frontends.serve(), stopped, is_controlled).await;
    control.stop();
    for ended in controlling {
        if let Err(panicked) = ended.await {
            panicked.resume();
        }
    }
    let failed = monitor.failed_export();
    drop(workers);
    drop(pid_file);
    match failed {
        Some(id) => result.and(Err(Failure::new(format_args!("the export '{id}' has failed")))),
        None => result,
    }
}

/// Waits until clients can use all exports.
async fn started<H: Host + Clone>(
    monitor: &Monitor<H>,
    end: &signals::Order,
) -> Result<(), Failure> {
    match end.unless_given(monitor.exports_started()).await {
        Some(started) => {
            started.map_err(|error| Failure::new(error).context("cannot start an export"))
        }
        None => Err(interrupted()),
    }
}

fn interrupted() -> Failure {
    Failure::new("interrupted by a signal during startup")
}

/// Stops everything once a signal or a client requests it.
fn stop_when_asked<H: Host + Clone>(
    end: signals::Order,
    control: Rc<qmp::Server<Monitor<H>>>,
    frontends: Frontends<LiveDisk<H>>,
) -> JoinHandle<()> {
    spawn(async move {
        let quit = control.service().quit_requested();
        either(end.given(), quit).await;
        tracing::info!("stopping");
        notify("STOPPING=1");
        if control.service().has_exports_in_use() {
            end.ends("programs and file systems that use a block device");
            control.service().exports_unused().await;
        }
        end.ends("requests in flight, and clients that have not received their replies");
        control.service().end().await;
        frontends.stop();
        control.stop();
    })
}

/// Waits for all listeners of shared servers, and for `stopped` if they were told to end. Without any, waits for that,
/// or for the last export to close if QMP clients cannot add one.
async fn until_ended<H: Host + Clone>(
    monitor: &Monitor<H>,
    listening: Vec<JoinHandle<io::Result<()>>>,
    stopped: JoinHandle<()>,
    is_controlled: bool,
) -> Result<(), Failure> {
    let stopped = async {
        if let Err(panicked) = stopped.await {
            panicked.resume();
        }
    };
    if listening.is_empty() {
        let closed = async {
            if is_controlled {
                future::pending::<()>().await;
            }
            monitor.exports_closed().await;
        };
        either(stopped, closed).await;
        return Ok(());
    }
    let mut result = Ok(());
    for ended in listening {
        match ended.await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => result = Err(Failure::new(error).context("a listener failed")),
            Err(panicked) => panicked.resume(),
        }
    }
    // Jobs and commands use the images until they have ended.
    if monitor.is_ending() {
        stopped.await;
    } else {
        monitor.end().await;
    }
    result
}

/// Notifies a service manager that waits for it.
fn notify(state: &str) {
    if let Err(error) = service_manager::tell(state) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}
