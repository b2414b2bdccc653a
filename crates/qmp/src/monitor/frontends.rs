//! Frontends to one disk each, vhost-user-blk and FUSE: opened, watched until they close, and ended.

use super::exports::{ExportEntry, Kind};
use super::{Drive, Monitor, Result};
use crate::error::QmpError;
use isobath_disk::LiveDisk;
use isobath_export::{fuse, vhost_user};
use isobath_storage::Host;
use isobath_storage::ring::net::Listener;
use std::future::Future;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;

/// A disk behind a socket of its own.
pub(super) type VhostUser<H> = Arc<vhost_user::Server<LiveDisk<H>>>;
/// A disk as a file.
pub(super) type Fuse<H> = Arc<fuse::Mount<LiveDisk<H>>>;

impl<H: Host + Clone> Monitor<H> {
    /// Serves a disk as vhost-user-blk to who connects to a unix socket, as an export named `id`, until that is deleted or
    /// the monitor [ends](Self::end). The disk's name is its serial number, unless there is another.
    ///
    /// # Errors
    /// If the id is not well-formed or in use, or an option is out of range.
    pub fn serve_vhost_user(
        &self,
        id: &str,
        drive: &Drive<H>,
        listener: Listener,
        mut options: vhost_user::Options,
    ) -> Result<()> {
        self.check_export_id(id)?;
        if options.serial.is_empty() {
            options.serial = serial(&self.name_of(drive));
        }
        let server = vhost_user::Server::new(drive.disk().clone(), options);
        let server = server.map_err(QmpError::new)?;
        let accepting = listener.as_fd().try_clone_to_owned().map_err(QmpError::new)?;
        let (serving, workers) = (server.clone(), self.workers.clone());
        self.open_frontend(id, drive, Kind::VhostUser(server), async move {
            let result = serving.serve(UnixListener::from(accepting), &workers).await;
            // The socket's file goes with it.
            drop(listener);
            result
        });
        Ok(())
    }

    /// Mounts a disk as a file over `mount_point`, as an export named `id`, until that is deleted,
    /// somebody unmounts it, or the monitor [ends](Self::end).
    ///
    /// # Errors
    /// If the id is not well-formed or in use, or the file cannot be mounted on or is one of the images.
    pub fn mount(
        &self,
        id: &str,
        drive: &Drive<H>,
        mount_point: &Path,
        options: fuse::Options,
    ) -> Result<()> {
        self.check_export_id(id)?;
        if let Ok(covered) = mount_point.canonicalize() {
            let layers = drive.disk().layers();
            if layers
                .iter()
                .any(|layer| layer.name().canonicalize().is_ok_and(|name| name == covered))
            {
                return Err(QmpError::new(format_args!(
                    "'{}' is an image of the disk itself, which could not be reopened below the \
                     mount; create an empty file and mount on that",
                    mount_point.display()
                )));
            }
        }
        let mount = fuse::Mount::new(drive.disk().clone(), mount_point, options);
        let mount = mount.map_err(QmpError::new)?;
        let (serving, workers) = (mount.clone(), self.workers.clone());
        self.open_frontend(
            id,
            drive,
            Kind::Fuse(mount),
            async move { serving.serve(&workers).await },
        );
        Ok(())
    }

    /// Adds an export that lasts as long as `serve`.
    fn open_frontend(
        &self,
        id: &str,
        drive: &Drive<H>,
        kind: Kind<H>,
        serve: impl Future<Output = io::Result<()>> + 'static,
    ) {
        self.exports.add(ExportEntry::new(id, kind, drive));
        let name = id.to_owned();
        self.remove_after(id, async move {
            if let Err(error) = serve.await {
                tracing::error!(%error, id = name, "an export failed");
            }
        });
    }

    /// Waits until there is no export but those of the NBD server.
    pub async fn frontends_closed(&self) {
        self.exports.without(|export| !export.is_nbd()).await;
    }

    /// Closes every frontend but the NBD server's.
    pub(super) async fn close_frontends(&self) {
        self.exports.stop_all();
        self.frontends_closed().await;
    }
}

/// What of a name can be a serial number.
fn serial(name: &str) -> String {
    name.chars().filter(char::is_ascii_graphic).take(20).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_gives_a_serial_number() {
        assert_eq!(serial("disk-1"), "disk-1");
        assert_eq!(serial("é a disk of many words, and more"), "adiskofmanywords,and");
    }
}
