//! Backing chains created by any mixture of programs, with a model of their contents.

use crate::args;
use crate::model::Model;
use crate::ops::Op;
use crate::process::run_program;
use crate::qemu;
use std::ffi::OsString;
use std::fmt::Debug;
use std::path::{Path, PathBuf};

/// A program that creates images and writes to them.
pub trait Writer: Debug {
    /// Its name, for messages and pictures.
    fn name(&self) -> &str;

    /// Creates a qcow2 image of `size` bytes over a backing file of the given format, if any; `options` as for
    /// `qemu-img create -o`, or empty.
    fn create(&self, image: &Path, size: u64, backing: Option<(&Path, &str)>, options: &str);

    /// Opens the qcow2 image, executes the operations in order, and closes it.
    fn apply(&self, image: &Path, ops: &[Op]);
}

/// A [`Writer`] that runs commands with the syntax of `qemu-img create`, `qemu-img resize` and `qemu-io -c`.
#[derive(Clone, Debug)]
pub struct Commands {
    name: String,
    img: Vec<OsString>,
    io: Vec<OsString>,
}

impl Commands {
    /// The installed QEMU.
    #[track_caller]
    pub fn qemu() -> Self {
        Self {
            name: "qemu".into(),
            img: args![qemu::program("qemu-img")],
            io: args![qemu::program("qemu-io"), "-f", "qcow2"],
        }
    }

    /// The `isobath` program at this path: `isobath create`, `isobath resize`, `isobath io`.
    pub fn isobath(program: &Path) -> Self {
        Self {
            name: "isobath".into(),
            img: args![program],
            io: args![program, "io", "-f", "qcow2"],
        }
    }
}

impl Writer for Commands {
    fn name(&self) -> &str {
        &self.name
    }

    #[track_caller]
    fn create(&self, image: &Path, size: u64, backing: Option<(&Path, &str)>, options: &str) {
        let mut arguments = self.img[1..].to_vec();
        arguments.extend(args!["create", "-q", "-f", "qcow2"]);
        if let Some((backing, format)) = backing {
            arguments.extend(args!["-b", backing, "-F", format]);
        }
        if !options.is_empty() {
            arguments.extend(args!["-o", options]);
        }
        arguments.extend(args![image, size.to_string()]);
        let _ = run_program(&self.img[0], arguments).ok();
    }

    #[track_caller]
    fn apply(&self, image: &Path, ops: &[Op]) {
        // A resize ends a run of commands, and the length of a command line is limited.
        for part in ops.split_inclusive(|op| op.io_command().is_none()) {
            for commands in part.chunks(1000) {
                let mut arguments = self.io[1..].to_vec();
                let commands: Vec<_> = commands.iter().filter_map(Op::io_command).collect();
                if commands.is_empty() {
                    continue;
                }
                for command in commands {
                    arguments.extend(args!["-c", command]);
                }
                arguments.push(image.into());
                let _ = run_program(&self.io[0], arguments).ok();
            }
            if let Some(Op::Resize { size }) = part.last() {
                let mut arguments = self.img[1..].to_vec();
                let size = size.to_string();
                arguments.extend(args!["resize", "-q", "--shrink", "-f", "qcow2", image, size]);
                let _ = run_program(&self.img[0], arguments).ok();
            }
        }
    }
}

/// A backing chain that grows.
#[derive(Debug)]
pub struct Chain {
    directory: PathBuf,
    layers: Vec<Layer>,
    model: Model,
}

/// One image of a [`Chain`].
#[derive(Clone, Debug)]
pub struct Layer {
    /// Its file.
    pub path: PathBuf,
    /// Its format, `qcow2` or `raw`.
    pub format: String,
    /// The name of the writer that created it.
    pub writer: String,
}

impl Chain {
    /// A chain without layers for a disk of `size` bytes, whose files will be in `directory`.
    pub fn new(directory: &Path, size: u64) -> Self {
        let directory = directory.to_owned();
        Self { directory, layers: Vec::new(), model: Model::new(size) }
    }

    /// A chain with an existing base, which is read in full.
    #[track_caller]
    pub fn on(directory: &Path, base: &Path, format: &str) -> Self {
        let model = Model::from_bytes(&qemu::read_disk(base, format));
        let base = Layer { path: base.into(), format: format.into(), writer: "base".into() };
        Self { directory: directory.to_owned(), layers: vec![base], model }
    }

    /// Adds a layer: `writer` creates it over the active layer and executes `ops` on it.
    #[track_caller]
    pub fn add(&mut self, writer: &dyn Writer, options: &str, ops: &[Op]) {
        let path = self.directory.join(format!("layer{}.qcow2", self.layers.len()));
        let backing = self.layers.last().map(|below| (below.path.as_path(), below.format.as_str()));
        writer.create(&path, self.model.size(), backing, options);
        let writer_name = writer.name().to_owned();
        self.layers.push(Layer { path, format: "qcow2".into(), writer: writer_name });
        self.apply(writer, ops);
    }

    /// Adds `count` layers, created by the writers in turn; `plan` returns, for each layer number, its options and the
    /// operations to execute on it.
    #[track_caller]
    pub fn alternate(
        &mut self,
        writers: &[&dyn Writer],
        count: usize,
        mut plan: impl FnMut(usize) -> (String, Vec<Op>),
    ) {
        for writer in writers.iter().cycle().take(count) {
            let (options, ops) = plan(self.layers.len());
            self.add(*writer, &options, &ops);
        }
    }

    /// Executes operations on the active layer.
    #[track_caller]
    pub fn apply(&mut self, writer: &dyn Writer, ops: &[Op]) {
        if ops.is_empty() {
            return;
        }
        writer.apply(self.active(), ops);
        for op in ops {
            self.model.apply(op);
        }
    }

    /// The layers, the base first.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The file of the active layer.
    #[track_caller]
    pub fn active(&self) -> &Path {
        &self.layers.last().expect("a chain with a layer").path
    }

    /// The model of the disk's contents.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The model, for recording changes made by other means.
    pub fn model_mut(&mut self) -> &mut Model {
        &mut self.model
    }

    /// Fails the test unless QEMU finds every qcow2 layer clean, and the disk matches the model; from then on, the
    /// contents of discarded ranges must not change.
    #[track_caller]
    pub fn verify(&mut self) {
        self.assert_clean();
        let active = self.layers.last().expect("a chain with a layer").clone();
        let bytes = qemu::read_disk(&active.path, &active.format);
        if let Err(mismatch) = self.model.adopt(&bytes) {
            panic!("{}: {mismatch}\n{}", active.path.display(), self.picture());
        }
    }

    /// Fails the test unless `qemu-img check` finds every qcow2 layer clean.
    #[track_caller]
    pub fn assert_clean(&self) {
        for layer in self.layers.iter().filter(|layer| layer.format == "qcow2") {
            qemu::assert_clean(&layer.path);
        }
    }

    /// The chain as lines of text, the base first.
    pub fn picture(&self) -> String {
        let line = |layer: &Layer| {
            let file = layer.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let allocated = layer.path.metadata().map_or(0, |data| data.len() >> 10);
            format!("  {file:<16} {:<8} {allocated:>8} KiB\n", layer.writer)
        };
        self.layers.iter().map(line).collect()
    }
}
