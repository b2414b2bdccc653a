//! Frontends to one disk each: vhost-user-blk and FUSE.

use super::announce::Frontend;
use super::bind;
use super::endpoint::Endpoint;
use crate::failure::Failure;
use isobath_disk::BlockDevice;
use isobath_export::{fuse, vhost_user};
use isobath_qmp::monitor::{Drive, Monitor};
use isobath_storage::Host;
use std::path::PathBuf;
use std::rc::Rc;
use std::str::FromStr;
use std::time::Duration;

/// Queues offered: machines take one for each of their processors, and none is started before.
const QUEUES: u16 = 64;

/// `unix:PATH`
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SocketFile(PathBuf);

impl FromStr for SocketFile {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some("") => Err("the socket's path is missing after 'unix:'".into()),
            Some(path) => Ok(Self(path.into())),
            None => Err("a socket file is written as unix:PATH".into()),
        }
    }
}

#[derive(clap::Args)]
pub(super) struct FrontendArgs {
    /// Export the image over vhost-user-blk on this socket file; the virtual machine must share its memory. With
    /// several images, repeat the option, one per image in order
    #[arg(long, value_name = "unix:PATH")]
    vhost_user_blk: Vec<SocketFile>,
    /// Export the image as a raw file by mounting it over this existing file (FUSE). With several images, repeat the
    /// option, one per image in order
    #[arg(long, value_name = "PATH")]
    fuse: Vec<PathBuf>,
    /// With --vhost-user-blk: maximum number of queues [default: 64]
    #[arg(long, value_name = "N", requires = "vhost_user_blk")]
    queues: Option<u16>,
    /// With --vhost-user-blk: after a request, poll for more for up to this many microseconds before sleeping; the time
    /// adapts to the load. 0 disables polling
    #[arg(long, value_name = "MICROSECONDS", requires = "vhost_user_blk")]
    poll: Option<u64>,
    /// With --fuse: allow writes and truncation past the end to grow the disk
    #[arg(long, requires = "fuse")]
    growable: bool,
    /// With --fuse: whether other users may access the file: off, on, or auto (on if the host allows it)
    #[arg(long, value_name = "off|on|auto", requires = "fuse", default_value = "auto", value_parser = allow_other)]
    allow_other: fuse::AllowOther,
}

fn allow_other(text: &str) -> Result<fuse::AllowOther, String> {
    match text {
        "off" => Ok(fuse::AllowOther::Off),
        "on" => Ok(fuse::AllowOther::On),
        "auto" => Ok(fuse::AllowOther::Auto),
        _ => Err("expected off, on or auto".into()),
    }
}

impl FrontendArgs {
    /// Whether any is asked for.
    pub(super) fn any(&self) -> bool {
        !self.vhost_user_blk.is_empty() || !self.fuse.is_empty()
    }

    /// Whether the client of the image with this number continues when this server is killed and restarted.
    pub(super) fn outlives(&self, image: usize) -> bool {
        image < self.vhost_user_blk.len()
    }

    /// Refuses more frontends than there are images.
    pub(super) fn check(&self, images: usize) -> Result<(), Failure> {
        for (what, count) in
            [("--vhost-user-blk", self.vhost_user_blk.len()), ("--fuse", self.fuse.len())]
        {
            if count > images {
                return Err(Failure::new(format_args!(
                    "{what} is given {count} times for {images} images; give it at most once per \
                     image"
                )));
            }
        }
        Ok(())
    }

    /// Opens the frontends to `drives`; each comes with the number of its drive.
    pub(super) fn open<H: Host + Clone>(
        &self,
        monitor: &Monitor<H>,
        drives: &[Rc<Drive<H>>],
    ) -> Result<Vec<(usize, Frontend)>, Failure> {
        let mut frontends = Vec::new();
        for (number, (drive, SocketFile(path))) in
            drives.iter().zip(&self.vhost_user_blk).enumerate()
        {
            let default = vhost_user::Options::default();
            let options = vhost_user::Options {
                writable: !drive.disk().is_read_only(),
                queues: self.queues.unwrap_or(QUEUES),
                poll: self.poll.map_or(default.poll, Duration::from_micros),
                ..default
            };
            let id = format!("vhost-user-blk-{number}");
            let endpoint = Endpoint::Unix(path.clone());
            let listener = bind(&endpoint, "--vhost-user-blk")?;
            let opened = monitor.serve_vhost_user(&id, drive, listener, options);
            opened.map_err(|error| Failure::new(error).context("--vhost-user-blk"))?;
            frontends.push((number, Frontend::VhostUserBlk(path.clone())));
        }
        for (number, (drive, path)) in drives.iter().zip(&self.fuse).enumerate() {
            let options = fuse::Options {
                writable: !drive.disk().is_read_only(),
                growable: self.growable,
                allow_other: self.allow_other,
            };
            let opened = monitor.mount(&format!("fuse-{number}"), drive, path, options);
            opened.map_err(|error| Failure::new(error).context("--fuse"))?;
            frontends.push((number, Frontend::File(path.clone())));
        }
        Ok(frontends)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_file_is_written_with_its_kind() {
        assert_eq!("unix:/run/a".parse(), Ok(SocketFile("/run/a".into())));
        assert!("unix:".parse::<SocketFile>().is_err());
        assert!("/run/a".parse::<SocketFile>().is_err());
    }
}
