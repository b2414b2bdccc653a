//! `isobath install-links`

use crate::failure::{Failure, Outcome};
use crate::program::LINKS;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::{env, fs, io};

/// Create links named qemu-img, qemu-io, qemu-nbd and qemu-storage-daemon to this program
///
/// Started through such a link, it accepts that program's command line. Put the directory first in PATH to use Isobath
/// in scripts written for QEMU's programs.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Replace existing files with these names
    #[arg(long)]
    force: bool,
    /// The directory to create the links in
    directory: PathBuf,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let program = env::current_exe().map_err(|error| {
        Failure::new(format_args!("cannot find this program's executable: {error}"))
    })?;
    for name in LINKS {
        let link = args.directory.join(name);
        let failed = |error: &io::Error| {
            Failure::new(format_args!("cannot create the link '{}': {error}", link.display()))
        };
        let present = fs::read_link(&link).ok();
        if present.as_ref() == Some(&program) {
            continue;
        }
        // It may be a link to another copy of this program, or QEMU's own file.
        if args.force {
            match fs::remove_file(&link) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    return Err(failed(&error));
                }
                _ => {}
            }
        }
        match symlink(&program, &link) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                return Err(Failure::new(format_args!(
                    "'{}' already exists; replace it with --force, or choose another directory",
                    link.display()
                )));
            }
            Err(error) => return Err(failed(&error)),
            Ok(()) => writeln!(out, "{} -> {}", link.display(), program.display())?,
        }
    }
    Ok(0)
}
