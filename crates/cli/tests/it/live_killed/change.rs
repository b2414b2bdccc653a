//! What is done to a chain that is served.

use super::field::{Expected, Field, OTHER, Task, Unsure};
use super::{Doing, SECTORS, SIZE};
use crate::live::clients::Frontend;
use crate::live::load::{Shared, Window, run};
use crate::live::{Control, DEVICE, Gone};
use isobath_testkit::qemu;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;
use std::sync::Mutex;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Duration;

/// Asks for something until the server is gone.
fn wait_for_the_end(control: &mut Control) -> Gone<()> {
    loop {
        let _ = control.nodes()?;
        thread::sleep(Duration::from_millis(1));
    }
}

impl Field {
    /// Changes the chain; somewhere on the way the server's death is on its way.
    pub(super) fn change(
        &mut self,
        doing: Doing,
        control: &mut Control,
        shared: &Shared,
        active: &Mutex<String>,
        armed: Sender<()>,
    ) -> Gone<()> {
        if let Some(task) = self.interrupted.take() {
            self.job(task, control, None, active)?;
        }
        // Enough layers for a job, with something in each.
        while self.chain.len() < 5 {
            thread::sleep(Duration::from_millis(10));
            self.snapshot(control, shared, active)?;
        }
        let layers = self.chain.len();
        let base = self.rng.random_range(0..layers - 3);
        let (command, top) = match doing {
            Doing::Load | Doing::Index => {
                drop(armed);
                return wait_for_the_end(control);
            }
            Doing::Resize => return self.resize(control, armed),
            Doing::Export => return self.export(control, shared, armed),
            Doing::Mirror => return self.mirror(control, active, armed),
            Doing::Snapshots => {
                drop(armed);
                for _ in 0..12 {
                    self.snapshot(control, shared, active)?;
                }
                return Ok(());
            }
            Doing::StreamIntoActive => ("block-stream", layers - 1),
            Doing::CommitActive => ("block-commit", layers - 1),
            Doing::StreamBelow => ("block-stream", self.rng.random_range(base + 2..layers - 1)),
            Doing::CommitBelow => ("block-commit", self.rng.random_range(base + 1..layers - 1)),
        };
        let task = Task { command, top: self.chain[top].clone(), base: self.chain[base].clone() };
        self.job(task, control, Some(armed), active)
    }

    fn snapshot(
        &mut self,
        control: &mut Control,
        shared: &Shared,
        active: &Mutex<String>,
    ) -> Gone<()> {
        let clock = &shared.clock;
        self.files += 1;
        let file = format!("s{}", self.files);
        let from = clock.now();
        self.unsure = Some(Unsure::Snapshot(file.clone(), from));
        control.snapshot(&file)?;
        self.unsure = None;
        let window = Window { from, until: clock.now(), flushed: false };
        self.expected.insert(self.active(), Expected::Written(window));
        active.lock().unwrap().clone_from(&file);
        self.chain.push(file);
        Ok(())
    }

    /// Runs a job to its end. The server is killed some time after `armed` is dropped.
    pub(super) fn job(
        &mut self,
        task: Task,
        control: &mut Control,
        mut armed: Option<Sender<()>>,
        now_active: &Mutex<String>,
    ) -> Gone<()> {
        let at = |file: &str| self.chain.iter().position(|name| name == file).unwrap();
        let (top, base) = (at(&task.top), at(&task.base));
        let active = top == self.chain.len() - 1;
        self.interrupted = Some(task.clone());
        let mut arguments = json!({"job-id": "j", "base": task.base});
        // A job that is slow enough to be killed in, or as fast as it can be.
        if self.rng.random_ratio(1, 2) && armed.is_some() {
            arguments["speed"] = (32_u64 << 20).into();
        }
        let late = active && task.command == "block-commit" && self.rng.random_ratio(1, 2);
        if !late {
            armed.take();
        }
        let removed;
        if task.command == "block-stream" {
            if !active {
                let nodes = control.nodes()?;
                let node = nodes.into_iter().find(|(_, file)| *file == task.top).unwrap();
                arguments["device"] = node.0.into();
            }
            control.start("block-stream", &arguments)?;
            control.completed()?;
            removed = base + 1..top;
        } else {
            // The images from the base on are being written to.
            let committed = self.expected.remove(&task.top);
            for file in &self.chain[base..top] {
                self.expected.remove(file);
            }
            if active {
                control.start("block-commit", &arguments)?;
                let _ = control.wait_for(&["BLOCK_JOB_READY"])?;
                self.unsure = Some(Unsure::Complete(task.base.clone()));
                drop(armed);
                control.execute("block-job-complete", &json!({"device": "j"}))?;
                control.completed()?;
                self.unsure = None;
            } else {
                arguments["top"] = task.top.clone().into();
                control.start("block-commit", &arguments)?;
                control.completed()?;
                if let Some(committed) = committed {
                    self.expected.insert(task.base, committed);
                }
            }
            removed = base + 1..top + 1;
        }
        self.chain.drain(removed);
        self.interrupted = None;
        now_active.lock().unwrap().clone_from(&self.active());
        self.assert_chain(control)
    }

    /// The server's chain is the one that was asked for.
    fn assert_chain(&self, control: &mut Control) -> Gone<()> {
        let nodes = control.nodes()?.into_iter().rev().map(|(_, file)| file);
        let files: Vec<_> = nodes.filter(|file| file != OTHER).collect();
        assert_eq!(files, self.chain);
        Ok(())
    }

    /// The disk grows, again and again.
    fn resize(&mut self, control: &mut Control, armed: Sender<()>) -> Gone<()> {
        drop(armed);
        loop {
            let size = SIZE as u64 + self.rng.random_range(0..8_u64 << 11) * 512;
            let current = self.size;
            let size = size.max(current);
            self.may_be = size;
            control.execute("block_resize", &json!({"device": DEVICE, "size": size}))?;
            self.size = size;
            if size > current {
                thread::sleep(Duration::from_millis(2));
            } else {
                let _ = control.nodes()?;
            }
        }
    }

    /// A virtual machine is given the disk while the server runs.
    fn export(&mut self, control: &mut Control, shared: &Shared, armed: Sender<()>) -> Gone<()> {
        let nodes = control.nodes()?;
        let node = nodes.into_iter().find(|(_, file)| *file == self.active()).unwrap().0;
        let socket = self.path("vhost3");
        let export = json!({
            "type": "vhost-user-blk", "id": "added", "node-name": node, "writable": true,
            "addr": {"type": "unix", "path": socket},
        });
        control.execute("block-export-add", &export)?;
        let mut rng = StdRng::seed_from_u64(self.rng.random());
        let stamp = (self.epoch << 24) + (1 << 23);
        let lasting = self.lasting;
        thread::scope(|scope| {
            let load = scope.spawn(|| {
                let frontend = Frontend::Vhost(socket);
                run(&frontend, 2 * SECTORS / 3..SECTORS, shared, stamp, lasting, &mut rng)
            });
            thread::sleep(Duration::from_millis(10));
            drop(armed);
            let gone = wait_for_the_end(control);
            self.added = Some(load.join().unwrap());
            gone
        })
    }

    /// The disk moves to a new image.
    fn mirror(
        &mut self,
        control: &mut Control,
        active: &Mutex<String>,
        armed: Sender<()>,
    ) -> Gone<()> {
        self.files += 1;
        let file = format!("m{}", self.files);
        let path = self.path(&file);
        qemu::create(&path, "qcow2", self.size, "cluster_size=16k");
        let mut armed = Some(armed);
        let when = self.rng.random_range(0..3);
        if when == 0 {
            armed.take();
        }
        let node = json!({"driver": "qcow2", "node-name": &file,
            "file": {"driver": "file", "filename": &path}});
        control.execute("blockdev-add", &node)?;
        let mirror = json!({"target": &file, "sync": "full", "job-id": "j"});
        control.start("blockdev-mirror", &mirror)?;
        let _ = control.wait_for(&["BLOCK_JOB_READY"])?;
        self.unsure = Some(Unsure::Complete(file.clone()));
        if when == 1 {
            armed.take();
        }
        control.execute("block-job-complete", &json!({"device": "j"}))?;
        control.completed()?;
        self.unsure = None;
        self.chain = vec![file.clone()];
        *active.lock().unwrap() = file;
        drop(armed);
        wait_for_the_end(control)
    }
}
