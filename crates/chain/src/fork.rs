//! Many overlays of one base.

use crate::create::{Created, NewDisk, Prepared, prepare};
use futures_util::stream::{self, StreamExt};
use isobath_image::name::name_in_header;
use isobath_image::options::Trust;
use isobath_image::{DiskError, Result};
use isobath_storage::{Host, OpenMode};
use std::path::{Path, PathBuf};

/// Overlays that are written at once: enough for a file system to make many durable together.
const AT_ONCE: usize = 64;

/// New overlays, whose files are kept: nobody else can write to them, or delete them by a command that looks at locks.
pub struct Forks<'a, H: Host> {
    size: u64,
    index_left: bool,
    made: Vec<Created<'a, H>>,
}

impl<H: Host> Forks<'_, H> {
    /// The size of each disk in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.made.len()
    }

    /// As [`Created::is_index_left`], of each.
    pub fn is_index_left(&self) -> bool {
        self.index_left
    }
}

/// Creates an image for each name, durably: all of them, or none. None replaces a file. The backing chain is opened once,
/// and its direct-access index computed once.
///
/// `go_on` is told after each image how many there are, and returns whether to continue; if it does not, those that were
/// made are removed and the result is `None`. Dropped before it ends, it leaves those that it has made.
///
/// # Errors
/// As [`create`](crate::create::create); if another program writes to the backing file; if there is a file of one of the
/// names; if the images are to be encrypted or to
/// have data files, of which each would need its own; and if the names are in several directories and the
/// backing file's name is a relative one.
pub async fn fork<'a, H: Host>(
    host: &'a H,
    names: &[PathBuf],
    new: &NewDisk,
    go_on: &dyn Fn(usize) -> bool,
) -> Result<Option<Forks<'a, H>>> {
    let Some(first) = names.first() else {
        return Ok(Some(Forks { size: 0, index_left: false, made: Vec::new() }));
    };
    check(host, first, names, new)?;
    // A disk that is being written is no base: what the overlays show would change.
    let _unwritten = match &new.backing_file {
        Some(backing) => {
            let path = name_in_header(host, first, "backing file", backing, &Trust::Full)?;
            Some(host.open(&host.resolve(first, &path), OpenMode::default()).await?)
        }
        None => None,
    };
    let prepared = prepare(host, first, new).await?;
    let mut made = Vec::new();
    match write_all(host, names, &prepared, go_on, &mut made).await {
        Ok(true) => {
            let (size, index_left) = (prepared.size(), prepared.is_index_left());
            Ok(Some(Forks { size, index_left, made }))
        }
        stopped => {
            for created in made {
                created.remove().await;
            }
            stopped.map(|_| None)
        }
    }
}

/// Writes the images, and returns whether `go_on` has let it finish.
async fn write_all<'a, H: Host>(
    host: &'a H,
    names: &[PathBuf],
    prepared: &Prepared<H::File>,
    go_on: &dyn Fn(usize) -> bool,
    made: &mut Vec<Created<'a, H>>,
) -> Result<bool> {
    let write = |name: &'_ PathBuf| {
        let name = name.clone();
        async move { prepared.write(host, &name, &[], &[], true).await }
    };
    let mut left = names.iter();
    let mut result = Ok(true);
    let mut writing = stream::FuturesUnordered::new();
    loop {
        while writing.len() < AT_ONCE && matches!(result, Ok(true)) {
            let Some(name) = left.next() else { break };
            writing.push(write(name));
        }
        match writing.next().await {
            None => return result,
            Some(Ok(created)) => {
                made.push(created);
                if matches!(result, Ok(true)) && !go_on(made.len()) {
                    result = Ok(false);
                }
            }
            // What is being written ends first, so that it can be removed.
            Some(Err(error)) => result = result.and(Err(error)),
        }
    }
}

/// Refuses what images cannot have in common.
fn check<H: Host>(host: &H, first: &Path, names: &[PathBuf], new: &NewDisk) -> Result<()> {
    let refused = |name: &Path, reason: &str| {
        Err(DiskError::Refused { image: name.to_owned(), reason: reason.to_owned() })
    };
    if new.data_file.is_some() {
        return refused(first, "images that are made together cannot have data files");
    }
    if new.encryption.is_some() {
        return refused(
            first,
            "images that are made together cannot be encrypted: each has a key of its own",
        );
    }
    if let Some(backing) = &new.backing_file {
        let of_first = host.resolve(first, backing);
        if let Some(name) = names.iter().find(|name| host.resolve(name, backing) != of_first) {
            let reason = format!(
                "it is in another directory than '{}', so that the backing file's name '{}' is another's there; give \
                 its absolute path",
                isobath_storage::shown(first),
                backing.escape_debug()
            );
            return refused(name, &reason);
        }
    }
    Ok(())
}
