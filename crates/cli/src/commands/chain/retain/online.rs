//! A chain that a server uses: it merges the layers.

use crate::commands::chain::merge::Shared;
use crate::commands::ctl::{ServedLayer, Session};
use crate::failure::Failure;
use std::io::Write;
use std::path::PathBuf;

/// A served chain.
pub(super) struct Served<'a> {
    session: Session<'a>,
    device: String,
    /// The base is the first.
    layers: Vec<ServedLayer>,
}

impl<'a> Served<'a> {
    /// Asks the server at `address` for its only disk or the one called `disk`.
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

    /// The chain's files, the base first.
    pub(super) fn files(&self) -> Vec<PathBuf> {
        self.layers.iter().map(|layer| layer.file().into()).collect()
    }

    pub(super) fn print(&mut self, text: &str) -> Result<(), Failure> {
        Ok(self.session.out.write_all(text.as_bytes())?)
    }

    /// Merges the layers from `first` up to `target` into that.
    pub(super) fn merge(
        &mut self,
        first: usize,
        target: usize,
        args: &Shared,
    ) -> Result<(), Failure> {
        let base = first.checked_sub(1).and_then(|below| self.layers.get(below));
        let node = self.layers.get(target).map(ServedLayer::node);
        // The active image may have got a snapshot meanwhile, and be a node below the device now.
        let device = node.unwrap_or(&self.device);
        self.session.stream(device, base, args.rate, args.change_snapshots)?;
        Ok(())
    }
}
