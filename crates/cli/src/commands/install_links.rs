//! `isobath install-links`

use crate::failure::{Failure, Outcome};
use crate::program::LINKS;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
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
    let mut links = LINKS.map(|name| args.directory.join(name)).to_vec();
    links.retain(|link| fs::read_link(link).ok().as_ref() != Some(&program));
    // It may be a link to another copy of this program, or QEMU's own file. All are looked at before one is made.
    if !args.force
        && let Some(link) = links.iter().find(|link| fs::symlink_metadata(link).is_ok())
    {
        return Err(exists(link));
    }
    for link in links {
        let made = if args.force { replace(&program, &link) } else { symlink(&program, &link) };
        made.map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => exists(&link),
            _ => Failure::new(format_args!("cannot create the link '{}': {error}", link.display())),
        })?;
        writeln!(out, "{} -> {}", link.display(), program.display())?;
    }
    Ok(0)
}

fn exists(link: &Path) -> Failure {
    Failure::new(format_args!(
        "'{}' already exists; replace it with --force, or choose another directory",
        link.display()
    ))
}

/// Makes a link in place of what is there, which stays if that fails. At each moment one of the two is there.
fn replace(program: &Path, link: &Path) -> io::Result<()> {
    let directory = link.parent().unwrap_or(Path::new("."));
    let made = tempfile::Builder::new()
        .prefix(".isobath-")
        .make_in(directory, |path| symlink(program, path))?;
    made.into_temp_path().persist(link).map_err(|failed| failed.error)
}
