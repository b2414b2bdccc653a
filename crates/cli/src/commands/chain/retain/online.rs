//! A chain in use by a server, which merges the layers.

use crate::commands::chain::merge::Shared;
use crate::commands::chain::users::{Users, identity};
use crate::commands::ctl::{ServedLayer, Session};
use crate::failure::Failure;
use crate::host::images;
use crate::runtime;
use isobath_storage::{Host, Locking, OpenMode};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::{env, fs};

/// A served chain.
pub(super) struct Served<'a> {
    session: Session<'a>,
    device: String,
    /// The base comes first.
    layers: Vec<ServedLayer>,
}

impl<'a> Served<'a> {
    /// Queries the server at `address` for the disk called `disk`, or for its only disk.
    pub(super) fn find(
        address: &str,
        disk: Option<&str>,
        out: &'a mut dyn Write,
    ) -> Result<Self, Failure> {
        let mut session = Session::connect(address, out)?;
        let device = session.device(disk)?;
        let mut layers = session.layers(&device)?;
        layers.reverse();
        Ok(Self { session, device, layers })
    }

    /// The chain's files, the base first, as this program names them.
    ///
    /// # Errors
    /// If a name cannot be resolved, or the files are not the server's.
    pub(super) fn files(&self) -> Result<Vec<PathBuf>, Failure> {
        let files = self.layers.iter().map(|layer| self.named_here(layer.file()));
        let files = files.collect::<Result<Vec<_>, Failure>>()?;
        let others = |file: &Path, why: &dyn std::fmt::Display| {
            Failure::new(format_args!(
                "'{}' is not the file that the server uses: {why}",
                file.display()
            ))
        };
        for (below, image) in files.iter().zip(files.iter().skip(1)) {
            let id = identity(below).map_err(|error| others(below, &error))?;
            if !Users::is(image, id)? {
                return Err(others(below, &format_args!("'{}' does not name it", image.display())));
            }
        }
        if let Some(active) = files.last() {
            let look = OpenMode { locking: Locking::Immediate, ..OpenMode::default() };
            let found = runtime::block_on(async || Ok(images().open(active, look).await))?;
            match found {
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {}
                Err(error) => return Err(others(active, &error)),
                Ok(_) => return Err(others(active, &"no program writes to it")),
            }
        }
        Ok(files)
    }

    /// Resolves the server's name of a file, which may be relative to the server's working directory.
    fn named_here(&self, file: &str) -> Result<PathBuf, Failure> {
        let path = PathBuf::from(file);
        if path.is_absolute() {
            return Ok(path);
        }
        let server = self.session.server();
        let there = server.and_then(|id| fs::read_link(format!("/proc/{id}/cwd")).ok());
        let Some(there) = there else {
            return Err(Failure::new(format_args!(
                "the server names '{file}' relative to its working directory, which cannot be determined from here; \
                 run this command as the server's user on its machine over its socket file, or start the server with \
                 an absolute path"
            )));
        };
        let here = env::current_dir().is_ok_and(|here| here == there);
        Ok(if here { path } else { there.join(path) })
    }

    pub(super) fn print(&mut self, text: &str) -> Result<(), Failure> {
        Ok(self.session.out.write_all(text.as_bytes())?)
    }

    /// Merges the layers from `first` to `target` into `target`.
    pub(super) fn merge(
        &mut self,
        first: usize,
        target: usize,
        args: &Shared,
    ) -> Result<(), Failure> {
        let base = first.checked_sub(1).and_then(|below| self.layers.get(below));
        let node = self.layers.get(target).map(ServedLayer::node);
        // After a snapshot taken meanwhile, the former active image is a node below the device.
        let device = node.unwrap_or(&self.device);
        self.session.stream(device, base, args.rate, args.change_snapshots)?;
        Ok(())
    }
}
