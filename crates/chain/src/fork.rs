//! Many overlays of one base.

use crate::create::{Created, NewDisk, Prepared, prepare, unwritten};
use futures_util::stream::{self, StreamExt};
use isobath_image::{DiskError, Result};
use isobath_storage::Host;
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

/// What became of images that were to be made together.
pub enum Forked<'a, H: Host> {
    /// They are there.
    All(Forks<'a, H>),
    /// They are not wanted any more, and those that were made were removed, except for so many that could not be.
    Stopped(usize),
}

/// Creates an image for each name, durably: all of them, or none. None replaces a file. The backing chain is read
/// once, and its direct-access index computed once.
///
/// `go_on` is told before the first image and after each one how many there are, and returns whether to continue; if it
/// does not, those that were made are removed. Dropped before `go_on` is called, this has made none; dropped later, it
/// leaves those that it has made.
///
/// # Errors
/// As [`create`](crate::create::create); if another program writes to a file of the backing chain; if there is a file
/// of one of the names; if the images are to be encrypted or to have data files, of which each would need its own; and
/// if the names are in several directories and the backing file's name is a relative one.
pub async fn fork<'a, H: Host>(
    host: &'a H,
    names: &[PathBuf],
    new: &NewDisk,
    go_on: &dyn Fn(usize) -> bool,
) -> Result<Forked<'a, H>> {
    let Some(first) = names.first() else {
        return Ok(Forked::All(Forks { size: 0, index_left: false, made: Vec::new() }));
    };
    check(host, first, names, new)?;
    // A disk that is being written is no base: what the overlays show would change.
    let _unwritten = unwritten(host, first, new).await?;
    let prepared = prepare(host, first, new).await?;
    if !go_on(0) {
        return Ok(Forked::Stopped(0));
    }
    let mut made = Vec::new();
    match write_all(host, names, &prepared, go_on, &mut made).await {
        Ok(true) => {
            let (size, index_left) = (prepared.size(), prepared.is_index_left());
            Ok(Forked::All(Forks { size, index_left, made }))
        }
        stopped => {
            let mut left = 0;
            for created in made {
                left += usize::from(!created.remove().await);
            }
            stopped.map(|_| Forked::Stopped(left))
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
        let other = |name: &&PathBuf| {
            let path = host.resolve(name, backing);
            path != of_first
                && match (host.find(&path), host.find(&of_first)) {
                    (Ok(Some(one)), Ok(Some(other))) => one != other,
                    _ => true,
                }
        };
        if let Some(name) = names.iter().find(other) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use futures_executor::block_on;
    use isobath_storage::memory::MemoryHost;
    use isobath_storage_test::careless::{CarelessHost, Slip};

    #[test]
    fn a_host_that_empties_a_file_for_a_fork_is_noticed() {
        let (host, name) = (CarelessHost::around(MemoryHost::new()), PathBuf::from("image"));
        block_on(crate::create::create(&host, &name, &NewDisk::new(1 << 20))).unwrap();
        host.slips().set(Slip::SparesNone);
        match block_on(fork(&host, &[name], &NewDisk::new(1 << 20), &|_| true)) {
            Err(DiskError::Internal { violated, .. }) => {
                assert_eq!(violated, "a file that was there is not taken for a new one");
            }
            Err(other) => panic!("{other:?}"),
            Ok(_) => panic!("the file is taken"),
        }
    }

    #[test]
    fn what_is_not_wanted_before_the_first_image_makes_none() {
        let (host, name) = (MemoryHost::new(), PathBuf::from("image"));
        let forked = block_on(fork(&host, &[name], &NewDisk::new(1 << 20), &|_| false));
        assert!(matches!(forked, Ok(Forked::Stopped(0))));
        assert_eq!(host.names(), [] as [PathBuf; 0]);
    }
}
