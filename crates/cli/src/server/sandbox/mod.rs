//! Confining a server: it then opens no files, executes no programs and makes no connections but those that it needs.
//!
//! See `docs/decisions/0040-a-server-confines-itself.md`.

mod calls;
mod files;
mod held;
mod user;

use crate::failure::Failure;
use crate::server::group;
use calls::{Kept, Stage};
pub(crate) use files::ImageRules;
pub(crate) use held::Held;
use std::env;
use std::path::PathBuf;
use user::User;

/// Which rights a server keeps.
#[derive(clap::Args)]
pub(crate) struct SandboxArgs {
    /// Confine the server before it opens the images: it can then open files only in their directories and in those of
    /// --sandbox-dir, and neither execute programs nor, without --qmp and NBD backing files, make connections
    /// [default: strict where the kernel can, off with --fuse]
    #[arg(long, value_name = "strict|off", value_parser = choice)]
    sandbox: Option<Choice>,
    /// A directory in which the server may open, create and remove files, for snapshots, jobs and images that QMP
    /// clients add; can be repeated
    #[arg(long, value_name = "DIR")]
    sandbox_dir: Vec<PathBuf>,
    /// Run as this user, by name or number, in its groups; the images and the directories of socket files must be
    /// accessible to it
    #[arg(long, value_name = "USER", value_parser = user::parse)]
    user: Option<User>,
    /// Run in this group only, by name or number
    #[arg(long, value_name = "GROUP", value_parser = group::parse)]
    group: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Strict,
    Off,
}

fn choice(text: &str) -> Result<Choice, String> {
    match text {
        "strict" => Ok(Choice::Strict),
        "off" => Ok(Choice::Off),
        _ => Err("expected strict or off".into()),
    }
}

/// What a server needs once it is confined, besides its images.
#[derive(Debug, Default)]
pub(crate) struct Needs {
    /// Whether the images are written to, and files are made beside them.
    pub(crate) writes: bool,
    /// The socket files that it listens on.
    pub(crate) sockets: Vec<PathBuf>,
    pub(crate) pid_file: Option<PathBuf>,
    /// Whether it makes connections, or listens at further addresses.
    pub(crate) connects: bool,
    /// The directories and files from which chains in stores are read.
    pub(crate) read: Vec<PathBuf>,
    /// The directory of their cache.
    pub(crate) cache: Option<PathBuf>,
}

impl SandboxArgs {
    /// The number of the user that the server becomes.
    pub(crate) fn becomes(&self) -> Option<u32> {
        self.user.as_ref().map(User::number)
    }

    /// Gives up the rights of the user who started the server. Call it while there is only one thread.
    ///
    /// # Errors
    /// The process may not become that user.
    pub(crate) fn become_user(&self) -> Result<(), Failure> {
        user::become_one(self.user.as_ref(), self.group)
    }

    /// Whether the server is to be confined. A file system mounted by a server that `mounts` could not be unmounted.
    ///
    /// # Errors
    /// Both are asked for.
    pub(crate) fn is_on(&self, mounts: bool) -> Result<bool, Failure> {
        match (self.sandbox, mounts) {
            (Some(Choice::Strict), true) => Err(Failure::new(
                "--sandbox strict does not go with --fuse: a confined server could not unmount its file",
            )),
            (None, true) if !self.sandbox_dir.is_empty() => Err(Failure::new(
                "--sandbox-dir has no effect with --fuse, which is served without the sandbox",
            )),
            (Some(Choice::Off), _) if !self.sandbox_dir.is_empty() => {
                Err(Failure::new("--sandbox-dir has no effect with --sandbox off"))
            }
            (choice, mounts) => Ok(choice != Some(Choice::Off) && !mounts),
        }
    }

    /// Lets this thread, and those that it starts from now on, write to no file, where the kernel can.
    pub(crate) fn only_read() -> Result<(), Failure> {
        files::only_read()
    }

    /// Confines this thread, and those that it starts from now on.
    ///
    /// # Errors
    /// A directory cannot be opened, or `--sandbox strict` was given and the kernel cannot confine the server.
    pub(crate) fn enter(&self, images: ImageRules, needs: &Needs) -> Result<Confined, Failure> {
        let given = self.sandbox.is_some() || !self.sandbox_dir.is_empty();
        let kept =
            Kept { sockets: needs.connects, notifies: env::var_os("NOTIFY_SOCKET").is_some() };
        let restart = files::enter(images, needs, &self.sandbox_dir, given)?;
        let kept = match calls::restrict(Stage::Starting, kept) {
            Ok(()) => Some(kept),
            Err(error) if given => return Err(no_filter(error)),
            Err(error) => {
                tracing::info!("the server's system calls are not restricted: {error}");
                None
            }
        };
        isobath_storage::note_confinement(
            "the server is confined to the directories of its images and of --sandbox-dir",
        );
        Ok(Confined { kept, _restart: restart })
    }
}

fn no_filter(error: String) -> Failure {
    Failure::new(error).context("cannot restrict the server's system calls")
}

/// A confined server, which can still listen and start threads that need it, until it is [closed](Self::close).
pub(crate) struct Confined {
    /// What is to be kept of the system calls, if these are restricted.
    kept: Option<Kept>,
    /// Its directory of restart logs stays for as long as this does: until the disks are closed.
    _restart: Option<isobath_storage_file::RestartDirectories>,
}

impl Confined {
    /// Gives up what only the start needs, on all threads.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub(crate) fn close(&mut self) -> Result<(), Failure> {
        match self.kept.take() {
            Some(kept) => calls::restrict(Stage::Serving, kept).map_err(no_filter),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_go_together_is_refused() {
        let args = |sandbox, directories: &[&str]| SandboxArgs {
            sandbox,
            sandbox_dir: directories.iter().map(PathBuf::from).collect(),
            user: None,
            group: None,
        };
        let is_on = |args: &SandboxArgs, mounts| args.is_on(mounts).ok();
        assert_eq!(is_on(&args(None, &[]), false), Some(true));
        assert_eq!(is_on(&args(None, &["/a"]), false), Some(true));
        assert_eq!(is_on(&args(None, &[]), true), Some(false));
        assert_eq!(is_on(&args(None, &["/a"]), true), None);
        assert_eq!(is_on(&args(Some(Choice::Strict), &[]), true), None);
        assert_eq!(is_on(&args(Some(Choice::Off), &[]), false), Some(false));
        assert_eq!(is_on(&args(Some(Choice::Off), &["/a"]), false), None);
        assert!(choice("maybe").is_err());
    }
}
