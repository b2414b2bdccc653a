//! Operations and jobs through a `qemu-storage-daemon` that stays, over NBD.

use crate::opposite_qemu::chain::Task;
use crate::opposite_qemu::history::JobKind;
use crate::opposite_qemu::isobath_side::{apply, bytes};
use crate::opposite_qemu::op::Op;
use crate::opposite_qemu::qemu_side;
use crate::opposite_qemu::world::Noises;
use isobath_testkit::daemon::Daemon;
use isobath_testkit::model::Model;
use isobath_testkit::nbd::{Nbd, Request, Run};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// The node of an opened image, its export, and the node of a mirror's target.
const DISK: &str = "disk";
const TARGET: &str = "target";
/// The filter that compresses what is written through it.
const COMPRESS: &str = "compress";

/// An image as the daemon has it open, or not.
struct Frontend<'a> {
    daemon: &'a mut Daemon,
    image: &'a Path,
    client: Option<Nbd>,
}

impl Frontend<'_> {
    fn client(&mut self) -> &mut Nbd {
        if self.client.is_none() {
            self.daemon.open_image(DISK, self.image, "qcow2", true);
            self.daemon.export(DISK, true, &[]);
        }
        let daemon = &self.daemon;
        self.client.get_or_insert_with(|| daemon.connect(DISK))
    }

    fn close(&mut self) {
        if self.client.take().is_some() {
            self.daemon.unexport(DISK);
            self.daemon.close(DISK);
        }
    }

    fn submit(&mut self, op: impl std::fmt::Display, requests: &[Request<'_>]) -> Vec<Vec<u8>> {
        let answers = self.client().submit(requests);
        answers.unwrap_or_else(|error| panic!("qemu: {op}: {error}\n{}", self.daemon.log()))
    }

    /// Writes whole clusters compressed, in an opening of its own: where QEMU 7.2 has freed the host
    /// cluster in which it packed compressed data, and used it anew, it still packs more there.
    fn compress(&mut self, offset: u64, data: &[u8]) {
        self.close();
        // QEMU compresses into unallocated clusters only.
        let discard = Request::Discard { offset, length: data.len() as u32 };
        let _ = self.submit("discard", &[discard]);
        self.daemon.open(COMPRESS, json!({"driver": "compress", "file": DISK}));
        self.daemon.export(COMPRESS, true, &[]);
        let mut client = self.daemon.connect(COMPRESS);
        let written = client.write(offset, data);
        written.unwrap_or_else(|error| panic!("qemu: write -c at {offset}: {error}"));
        drop(client);
        self.daemon.unexport(COMPRESS);
        self.daemon.close(COMPRESS);
        self.close();
    }
}

/// Opens the image, carries out the batches one after another, each all at once, beside a job if there
/// is one, and closes it. The model tells what reads must give, and takes the changes.
pub(crate) fn session(
    daemon: &mut Daemon,
    image: &Path,
    noises: &Noises,
    batches: &[Vec<Op>],
    cluster: u64,
    model: &mut Model,
    task: Option<&Task>,
) {
    let size = model.size();
    let mut frontend = Frontend { daemon, image, client: None };
    assert_eq!(frontend.client().size(), size, "qemu: the size");
    if let Some(task) = task {
        begin(&mut frontend, model, task);
    }
    for batch in batches {
        carry_out(&mut frontend, noises, batch, cluster, model);
        for op in batch {
            apply(model, *op, size, cluster, &noises.blocks);
        }
    }
    if let Some(task) = task {
        end(&mut frontend, model, task);
    } else {
        frontend.close();
    }
}

fn carry_out(
    frontend: &mut Frontend<'_>,
    noises: &Noises,
    batch: &[Op],
    cluster: u64,
    model: &Model,
) {
    let size = model.size();
    let data: Vec<Vec<u8>> = batch
        .iter()
        .map(|op| match op {
            Op::Write { fill, .. } | Op::Compressed { fill, .. } => {
                bytes(*fill, &noises.blocks, op.range(size, cluster).1)
            }
            _ => Vec::new(),
        })
        .collect();
    let mut together = Vec::new();
    let mut reads = Vec::new();
    for (op, data) in batch.iter().zip(&data) {
        let (offset, length) = op.range(size, cluster);
        let length = length as u32;
        together.push(match *op {
            Op::Write { .. } => Request::Write { offset, data, fua: false },
            Op::Zero { unmap, .. } => Request::Zero { offset, length, unmap },
            Op::Discard { .. } => Request::Discard { offset, length },
            Op::Read { .. } => {
                reads.push((together.len(), *op));
                Request::Read { offset, length }
            }
            Op::Flush => Request::Flush,
            Op::Compressed { .. } | Op::Race { .. } => continue,
        });
    }
    if !together.is_empty() {
        let answers = frontend.submit("requests", &together);
        for (at, op) in reads {
            let offset = op.range(size, cluster).0;
            let checked = model.check_range(offset, &answers[at]);
            checked.unwrap_or_else(|mismatch| panic!("qemu: {op}: {mismatch}"));
        }
    }
    for (op, data) in batch.iter().zip(&data) {
        let offset = op.range(size, cluster).0;
        match op {
            Op::Race { .. } => {
                for (offset, length, byte) in op.racers() {
                    let data = vec![byte; length as usize];
                    let write = Request::Write { offset, data: &data, fua: false };
                    let _ = frontend.submit(op, &[write]);
                }
            }
            Op::Compressed { .. } if size.is_multiple_of(cluster) => {
                frontend.compress(offset, data);
            }
            Op::Compressed { .. } => {
                // The filter takes no disk that ends within a cluster.
                frontend.close();
                let one = [vec![*op]];
                qemu_side::session(frontend.image, &noises.directory, &one, size, cluster, false);
            }
            _ => {}
        }
    }
}

fn begin(frontend: &mut Frontend<'_>, model: &Model, task: &Task) {
    if task.warm {
        let bytes = frontend.client().read_all().unwrap();
        model.check(&bytes).unwrap_or_else(|mismatch| panic!("qemu: before the job: {mismatch}"));
    }
    let nodes = frontend.daemon.nodes();
    let node = |number: usize| {
        let path = fs::canonicalize(&task.files[number]).unwrap();
        let found = nodes.iter().find(|(_, file)| *file == path);
        found.unwrap_or_else(|| panic!("{} is not in {nodes:?}", path.display())).0.clone()
    };
    let mut arguments = json!({"job-id": "job", "device": DISK});
    let command = match task.kind {
        JobKind::Stream => {
            arguments["device"] = node(task.top).into();
            if let Some(base) = task.base {
                arguments["base-node"] = node(base).into();
            }
            "block-stream"
        }
        JobKind::Commit => {
            arguments["top-node"] = node(task.top).into();
            arguments["base-node"] = task.base.map(node).into();
            "block-commit"
        }
        JobKind::Mirror | JobKind::MirrorTop => {
            let target = task.target.as_ref().expect("a mirror has a target");
            frontend.daemon.open_image(TARGET, target, "qcow2", true);
            arguments["target"] = TARGET.into();
            let whole = task.kind == JobKind::Mirror;
            arguments["sync"] = if whole { "full" } else { "top" }.into();
            "blockdev-mirror"
        }
    };
    let _ = frontend.daemon.ok(command, &arguments);
}

fn end(frontend: &mut Frontend<'_>, model: &mut Model, task: &Task) {
    let of_job = |event: &Value, name: &str| {
        event["event"] == name && event["data"]["device"].as_str() == Some("job")
    };
    let event = frontend
        .daemon
        .wait(|event| of_job(event, "BLOCK_JOB_READY") || of_job(event, "BLOCK_JOB_COMPLETED"));
    let ended = if of_job(&event, "BLOCK_JOB_READY") {
        let _ = frontend.daemon.ok("block-job-complete", &json!({"device": "job"}));
        frontend.daemon.wait(|event| of_job(event, "BLOCK_JOB_COMPLETED"))
    } else {
        event
    };
    assert!(ended["data"].get("error").is_none(), "qemu: {:?} failed: {ended}", task.kind);
    let _ = frontend
        .daemon
        .wait(|event| event["event"] == "JOB_STATUS_CHANGE" && event["data"]["status"] == "null");
    let bytes = frontend.client().read_all().unwrap();
    model.adopt(&bytes).unwrap_or_else(|mismatch| panic!("qemu: after the job: {mismatch}"));
    frontend.client = None;
    frontend.daemon.unexport(DISK);
    if task.target.is_some() {
        frontend.daemon.close(TARGET);
    }
    frontend.daemon.close(DISK);
}

/// Every byte of a disk as QEMU reads it, and its bitmaps that QEMU takes for consistent.
pub(crate) fn show(
    daemon: &mut Daemon,
    image: &Path,
    format: &str,
    bitmaps: bool,
) -> (Vec<u8>, Vec<(String, Vec<Run>)>) {
    daemon.open_image(DISK, image, format, false);
    let bitmaps = if bitmaps { daemon.bitmaps(DISK) } else { Vec::new() };
    daemon.export(DISK, false, &bitmaps);
    let bytes = daemon.connect(DISK).read_all().unwrap();
    let mut told = Vec::new();
    if !bitmaps.is_empty() {
        let contexts: Vec<_> =
            bitmaps.iter().map(|name| format!("qemu:dirty-bitmap:{name}")).collect();
        let runs = Nbd::connect_with(&daemon.socket(), DISK, &contexts).unwrap().status().unwrap();
        told = bitmaps.into_iter().zip(runs).collect();
    }
    daemon.unexport(DISK);
    daemon.close(DISK);
    (bytes, told)
}
