//! Changes of a handle's role while it is open: a writer becomes a reader, and a reader admits a writer of the same
//! process.
//!
//! Operations take the descriptor at their start and keep it until their end, so it can be exchanged meanwhile: the old
//! one's locks are released, and it is closed, when the last of them has ended.

use super::descriptor_sets;
use super::flush::Syncing;
use super::named::Named;
use super::open::{self, Failure, Kind, Opened, Taking};
use super::pause::pause;
use super::role::{Changed, ENDED, ENDING};
use super::source::Source;
use super::storage::FileStorage;
use super::transfer::Target;
use super::users;
use isobath_storage::error::{Operation, StorageError};
use isobath_storage::{Locking, OpenMode, Result, is_descriptor_set};
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// The interval at which the end of operations is checked.
const STEP: Duration = Duration::from_micros(200);

/// Waits until only the caller has the descriptor, and no operation uses it.
async fn last_use(target: &Arc<Target>) {
    // Only a holder of the target can add users of its lease.
    while Arc::strong_count(target) > 1 || Arc::strong_count(&target.lease) > 1 {
        pause(STEP).await;
    }
}

impl FileStorage {
    pub(super) async fn end_writing(&self) -> Result<()> {
        let mut roles = self.roles().lock().await;
        if !self.writing.has_ended() {
            let old = self.kept().map_err(|error| self.error(Operation::Retire, error))?;
            let (reader, nameless) = self.open_reader(&old).await?;
            roles.nameless = nameless;
            self.writing.set(ENDING);
            self.source.store(Arc::new(Source::Kept(Arc::new(reader), None)));
            self.forget_mappings();
            roles.writer = Some(old);
        }
        let Some(old) = &roles.writer else { return Ok(()) };
        last_use(old).await;
        let flushed = self.durability().flush(&old.file, Syncing::Data).await;
        roles.writer = None;
        self.writing.set(ENDED);
        if !roles.admits {
            self.let_share(&roles);
        }
        flushed.map_err(|error| self.error(Operation::Flush, error))
    }

    /// A descriptor for reading besides the writer's, with a reader's locks; and whether it could not be opened by the
    /// file's name, which then cannot identify the file.
    async fn open_reader(&self, writer: &Target) -> Result<(Target, bool)> {
        let mode = OpenMode { writable: false, ..self.file.mode };
        let open = async |path: PathBuf| {
            let (name, pool) = (&self.file.name, &self.file.pool);
            open::descriptor(&path, name, mode, Taking::BesideWriter, pool).await
        };
        if let Ok(Opened { target, id, .. }) = open(self.file.path.to_path_buf()).await
            && id == self.file.id
        {
            return Ok((target, false));
        }
        if is_descriptor_set(&self.file.path) {
            return Ok((self.copy_of(writer, mode).await?, true));
        }
        let opened = open(format!("/proc/self/fd/{}", writer.file.as_raw_fd()).into()).await?;
        Ok((opened.target, true))
    }

    /// A copy of the writer's descriptor, with a reader's locks: the set has lost those that it had, and the right to
    /// open the file anew may be missing.
    async fn copy_of(&self, writer: &Target, mode: OpenMode) -> Result<Target> {
        let Named { name, path, pool, .. } = &self.file;
        let copied = async {
            let permit = pool.admit().await;
            let (file, in_use) = pool.open(|| descriptor_sets::copy(path, &writer.file)).await?;
            let taking = Taking::BesideWriter;
            open::attach(file, Some(in_use), name, mode, taking, permit, pool).await
        };
        let opened = copied.await.map_err(|error: Failure| error.named(Operation::Open, name))?;
        Ok(opened.target)
    }

    /// Allows the descriptor of a file that is not changed to be given up, like those of other files.
    fn let_share(&self, roles: &Changed) {
        let handed_in = is_descriptor_set(&self.file.path);
        if self.kind != Kind::Regular || roles.nameless || handed_in {
            return;
        }
        let target = match &**self.source.load() {
            Source::Kept(target, None) => target.clone(),
            Source::Kept(_, Some(_)) | Source::Shared(_) => return,
        };
        // Without the file's times the descriptor is kept.
        if let Ok(source) = Source::of_reader(&self.file, target) {
            self.source.store(Arc::new(source));
            self.forget_mappings();
        }
    }

    /// Unmaps what was mapped by the descriptor before, which stays open as long.
    fn forget_mappings(&self) {
        if let Some(mapped) = self.mapped() {
            mapped.forget();
        }
    }

    pub(super) async fn set_admitting(&self, admit: bool) -> Result<()> {
        let mut roles = self.roles().lock().await;
        if !self.writing.has_ended() {
            let text = "it is already open for writing";
            let source = io::Error::new(io::ErrorKind::InvalidInput, text);
            return Err(StorageError::new(Operation::Lock, &self.file.name, source));
        }
        if roles.admits == admit {
            return Ok(());
        }
        if admit { self.admit(&mut roles).await } else { self.deny(&mut roles).await }
    }

    async fn admit(&self, roles: &mut Changed) -> Result<()> {
        let target = self.target().await?;
        if self.file.mode.locking.denies_writing() {
            let besides = self.file.pool.besides();
            roles.admission = Some(besides.admit(self.file.id, &target.file, &self.file.name));
        }
        roles.admits = true;
        let shared = match &**self.source.load() {
            Source::Kept(..) => return Ok(()),
            Source::Shared(shared) => shared.clone(),
        };
        self.source.store(Arc::new(Source::Kept(target, None)));
        // A reopen through it would deny writing, and treat a change as an error.
        while Arc::strong_count(&shared) > 1 {
            pause(STEP).await;
        }
        Ok(())
    }

    async fn deny(&self, roles: &mut Changed) -> Result<()> {
        if let Some(admission) = &roles.admission {
            let deny = || self.file.pool.besides().deny(admission, &self.file.name);
            let waits = self.file.mode.locking != Locking::Immediate;
            let denied = if waits { open::wait_for(|| Ok(()), deny).await } else { deny() };
            if let Err(error) = denied {
                let target = self.kept().map_err(|error| self.error(Operation::Lock, error))?;
                return Err(users::named(error, &target.file));
            }
        }
        roles.admission = None;
        roles.admits = false;
        self.let_share(roles);
        Ok(())
    }
}
