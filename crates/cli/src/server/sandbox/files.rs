//! Which files a confined server may open, by Landlock.

use super::Needs;
use super::held::Held;
use crate::failure::Failure;
use isobath_storage_file::RestartDirectories;
use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};

/// What the kernel is asked to deny unless it is allowed. Older kernels deny what they know of this.
const KNOWN: ABI = ABI::V6;

/// Read by the standard library and the engine: the process's own state, and properties of devices.
const READ: [&str; 2] = ["/proc/self", "/sys"];
/// Read to find the address of an NBD server.
const RESOLVER: [&str; 7] = [
    "/etc/resolv.conf",
    "/etc/hosts",
    "/etc/host.conf",
    "/etc/nsswitch.conf",
    "/etc/gai.conf",
    "/etc/services",
    "/etc/ld.so.cache",
];
/// Where the C library finds its modules for that.
const LIBRARIES: [&str; 4] = ["/lib", "/lib64", "/usr/lib", "/usr/lib64"];

type Rights = BitFlags<AccessFs>;

/// What may be done with a file, or below a directory, each of which is open.
#[derive(Debug, Default)]
struct Rules(Vec<(Held, Rights)>);

impl Rules {
    /// Allows what is there. What is not cannot be opened either.
    fn allow(&mut self, path: &Path, rights: Rights) {
        if let Ok(found) = Held::file(path) {
            self.0.push((found, rights));
        }
    }

    /// Allows a directory that is there, and no other that its owner leads to by a link.
    fn allow_directory(&mut self, path: &Path, rights: Rights) {
        if let Ok(found) = Held::real_directory(path) {
            self.0.push((found, rights));
        }
    }
}

/// What the images of a server and their backing files bring is allowed as it is found: every layer of a chain may lie
/// in a directory of its own, and no descriptor is kept of any.
#[derive(Debug)]
pub(crate) struct ImageRules {
    ruleset: RulesetCreated,
    writes: bool,
}

impl ImageRules {
    /// Allows nothing yet. Images may be written to, and files made beside them, if it `writes`.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub(crate) fn new(writes: bool) -> Result<Self, Failure> {
        Ok(Self { ruleset: create().map_err(|error| unconfined(&error))?, writes })
    }

    /// Allows what an image brings.
    ///
    /// # Errors
    /// The kernel refuses it.
    pub(crate) fn allow(&mut self, image: Held) -> Result<(), Failure> {
        let rights = rights_of_image(&image, self.writes);
        let added = (&mut self.ruleset).add_rule(PathBeneath::new(image, rights));
        added.map(drop).map_err(|error| unconfined(&error))
    }
}

/// What may be done with what an image brings.
fn rights_of_image(image: &Held, writes: bool) -> Rights {
    let rights = if writes { written() } else { read() };
    match image {
        Held::Directory(_) => rights,
        Held::File(_) => rights & AccessFs::from_file(KNOWN),
        Held::Device(_) => (rights | AccessFs::IoctlDev) & AccessFs::from_file(KNOWN),
    }
}

fn unconfined(error: &dyn std::fmt::Display) -> Failure {
    Failure::new(format_args!("cannot confine the server: {error}; --sandbox off does without"))
}

fn read() -> Rights {
    AccessFs::ReadFile | AccessFs::ReadDir
}

fn written() -> Rights {
    let changed = AccessFs::WriteFile | AccessFs::Truncate;
    read() | changed | AccessFs::MakeReg | AccessFs::RemoveFile
}

/// What a server may open besides its images.
fn rules(
    needs: &Needs,
    given: Vec<Held>,
    restart: Option<&RestartDirectories>,
) -> Result<Rules, Failure> {
    let mut rules = Rules::default();
    for path in READ {
        rules.allow(Path::new(path), read());
    }
    rules.allow(Path::new("/dev/null"), AccessFs::ReadFile | AccessFs::WriteFile);
    let sockets = if needs.connects { AccessFs::MakeSock.into() } else { Rights::empty() };
    rules.0.extend(given.into_iter().map(|directory| (directory, written() | sockets)));
    let made = AccessFs::MakeSock | AccessFs::RemoveFile;
    let sockets = needs.sockets.iter().map(|socket| (socket, "socket", made));
    let pid_file = needs.pid_file.iter().map(|file| (file, "PID file", written()));
    for (file, what, rights) in sockets.chain(pid_file) {
        match Held::directory_of(file) {
            Ok(Some(directory)) => rules.0.push((directory, rights)),
            Ok(None) => {
                return Err(Failure::new(format_args!(
                    "the {what} '{}' lies in the root directory, to which a confined server has no rights; choose \
                     another place, or --sandbox off",
                    file.display()
                )));
            }
            // What cannot be made there will be said when it is to be made.
            Err(_) => {}
        }
    }
    if let Some(restart) = restart {
        // This user's own goes in the end. Only an empty directory can be removed, and only by its owner or root.
        rules.allow_directory(&restart.parent, AccessFs::ReadDir | AccessFs::RemoveDir);
        rules.allow_directory(&restart.own, written());
        // An image's log may be its owner's, and is removed once it is applied. The files' permissions decide.
        let rights = if needs.writes { written() } else { read() };
        restart.others.iter().for_each(|other| rules.allow_directory(other, rights));
    }
    for path in &needs.read {
        let found = Held::directory(path).ok().flatten();
        match found {
            Some(directory) => rules.0.push((directory, read())),
            None => rules.allow(path, AccessFs::ReadFile.into()),
        }
    }
    if let Some(cache) = &needs.cache {
        let made = AccessFs::MakeDir | AccessFs::Refer;
        match Held::directory(cache) {
            Ok(Some(directory)) => rules.0.push((directory, written() | made)),
            found => {
                let cause = match found {
                    Err(error) => isobath_storage::cause(&error),
                    Ok(_) => "it is the root directory".to_owned(),
                };
                let text = format!("cannot use the cache directory '{}'", cache.display());
                return Err(Failure::new(cause).context(text));
            }
        }
    }
    if needs.connects {
        for path in RESOLVER {
            rules.allow(Path::new(path), AccessFs::ReadFile.into());
        }
        for path in LIBRARIES {
            rules.allow(Path::new(path), read());
        }
        // A file that is replaced when the network changes.
        let replaced = fs::canonicalize(RESOLVER[0]).ok();
        let replaced = replaced.as_deref().and_then(Path::parent);
        if let Some(directory) = replaced.filter(|directory| directory.starts_with("/run")) {
            rules.allow(directory, read());
        }
    }
    Ok(rules)
}

/// Confines this thread to the images and what else it needs. If it was `asked` for, the kernel must be able to.
pub(super) fn enter(
    images: ImageRules,
    needs: &Needs,
    given: &[PathBuf],
    asked: bool,
) -> Result<Option<RestartDirectories>, Failure> {
    let hold = |directory: &PathBuf| {
        let held = match Held::directory(directory) {
            Ok(Some(held)) => Ok(held),
            Ok(None) => Err("it is the root directory; --sandbox off allows all files".to_owned()),
            Err(error) => Err(isobath_storage::cause(&error)),
        };
        held.map_err(|cause| {
            Failure::new(cause).context(format_args!("--sandbox-dir '{}'", directory.display()))
        })
    };
    let given = given.iter().map(hold).collect::<Result<Vec<_>, _>>()?;
    // Without them there is no restart log, as the images will say.
    let restart = RestartDirectories::keep().ok();
    let rules = rules(needs, given, restart.as_ref())?;
    let ruleset = add(images.ruleset, rules).map_err(|error| unconfined(&error))?;
    let status = ruleset.restrict_self().map_err(|error| unconfined(&error))?.ruleset;
    match status {
        RulesetStatus::NotEnforced if asked => {
            Err(unconfined(&"this kernel has no Landlock (since Linux 5.13), or it is not enabled"))
        }
        RulesetStatus::NotEnforced => {
            tracing::info!("this kernel has no Landlock, so the server may open any file");
            Ok(restart)
        }
        RulesetStatus::FullyEnforced | RulesetStatus::PartiallyEnforced => Ok(restart),
    }
}

/// Lets this thread read all files and write to none, as far as the kernel can.
pub(super) fn only_read() -> Result<(), Failure> {
    let mut rules = Rules::default();
    rules.allow(Path::new("/"), read() | AccessFs::IoctlDev);
    rules.allow(Path::new("/dev/null"), AccessFs::ReadFile | AccessFs::WriteFile);
    let confined = create().and_then(|created| add(created, rules)?.restrict_self());
    confined.map(drop).map_err(|error| Failure::new(error).context("cannot confine the server"))
}

fn create() -> Result<RulesetCreated, landlock::RulesetError> {
    Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))?
        .scope(scopes())?
        .create()
}

/// Other processes get no signals, and their abstract sockets no connections, unless the service manager's is one.
fn scopes() -> BitFlags<Scope> {
    let manager = env::var_os("NOTIFY_SOCKET");
    let is_abstract = manager.is_some_and(|name| name.as_encoded_bytes().starts_with(b"@"));
    if is_abstract { Scope::Signal.into() } else { Scope::from_all(KNOWN) }
}

fn add(
    mut ruleset: RulesetCreated,
    rules: Rules,
) -> Result<RulesetCreated, landlock::RulesetError> {
    for (held, rights) in rules.0 {
        ruleset = ruleset.add_rule(PathBeneath::new(held, rights))?;
    }
    Ok(ruleset)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::{AsFd, AsRawFd};

    /// The rights at a path; `None` without a rule for it.
    fn rights(rules: &Rules, path: &Path) -> Option<Rights> {
        let place = |held: &Held| {
            fs::read_link(format!("/proc/self/fd/{}", held.as_fd().as_raw_fd())).unwrap()
        };
        let path = path.canonicalize().unwrap();
        let found = rules.0.iter().filter(|(held, _)| place(held) == path);
        found.map(|(_, rights)| *rights).reduce(|one, other| one | other)
    }

    #[test]
    fn a_device_and_a_lone_file_bring_rights_of_files_only() {
        let device = Held::Device(fs::File::open("/dev/null").unwrap().into());
        assert_eq!(rights_of_image(&device, false), AccessFs::ReadFile | AccessFs::IoctlDev);
        let file = Held::file(Path::new("/etc/hosts")).unwrap();
        let rights = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
        assert_eq!(rights_of_image(&file, true), rights);
    }

    #[test]
    fn who_connects_may_ask_for_addresses_and_what_is_given_may_be_written() {
        let given = tempfile::tempdir().unwrap();
        let held = || vec![Held::directory(given.path()).unwrap().unwrap()];
        let hosts = Path::new("/etc/hosts");
        let needs = Needs { connects: true, ..Needs::default() };
        let connecting = rules(&needs, held(), None).unwrap();
        assert!(rights(&connecting, hosts).is_some());
        let sockets = written() | AccessFs::MakeSock;
        assert_eq!(rights(&connecting, given.path()), Some(sockets));
        let others = rules(&Needs::default(), held(), None).unwrap();
        assert!(rights(&others, hosts).is_none());
        assert_eq!(rights(&others, given.path()), Some(written()));
    }
}
