//! Which files a confined server may open, by Landlock.

use super::Needs;
use crate::failure::Failure;
use crate::host;
use isobath_storage::is_descriptor_set;
use isobath_storage_file::RestartDirectories;
use landlock::{
    ABI, Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, PathFdError,
    Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};
use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
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

/// What may be done below each path.
#[derive(Debug, Default, PartialEq, Eq)]
struct Rules(BTreeMap<PathBuf, Rights>);

impl Rules {
    fn allow(&mut self, path: &Path, rights: Rights) {
        *self.0.entry(path.to_owned()).or_default() |= rights;
    }

    /// Allows the files of an image: those in its directory, or, if it is a device or lies in the root directory, its
    /// own alone.
    fn allow_image(&mut self, image: &Path, writes: bool) {
        let rights = if writes { written() } else { read() };
        let real = fs::canonicalize(image).unwrap_or_else(|_| image.to_owned());
        let kind = fs::metadata(&real).map(|found| found.file_type());
        if kind.is_ok_and(|kind| kind.is_block_device() || kind.is_char_device()) {
            self.allow(&real, (rights | AccessFs::IoctlDev) & AccessFs::from_file(KNOWN));
            return;
        }
        for name in [image, &real] {
            match directory(name) {
                Some(directory) => self.allow(&directory, rights),
                None => self.allow(&real, rights & AccessFs::from_file(KNOWN)),
            }
        }
    }
}

fn read() -> Rights {
    AccessFs::ReadFile | AccessFs::ReadDir
}

fn written() -> Rights {
    let changed = AccessFs::WriteFile | AccessFs::Truncate;
    read() | changed | AccessFs::MakeReg | AccessFs::RemoveFile
}

/// The directory of a file; `None` for the root directory, below which everything lies.
fn directory(file: &Path) -> Option<PathBuf> {
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = fs::canonicalize(parent.unwrap_or(Path::new("."))).ok()?;
    (directory != Path::new("/")).then_some(directory)
}

/// What a server may open.
fn rules(needs: &Needs, given: &[PathBuf], restart: Option<&RestartDirectories>) -> Rules {
    let mut rules = Rules::default();
    for path in READ {
        rules.allow(Path::new(path), read());
    }
    rules.allow(Path::new("/dev/null"), AccessFs::ReadFile | AccessFs::WriteFile);
    let opened = |name: &&PathBuf| host::is_file_name(name) && !is_descriptor_set(name);
    let images = needs.images.iter().filter(opened);
    images.for_each(|image| rules.allow_image(image, needs.writes));
    let sockets = if needs.connects { AccessFs::MakeSock.into() } else { Rights::empty() };
    for directory in given {
        rules.allow(directory, written() | sockets);
    }
    for socket in &needs.sockets {
        if let Some(directory) = directory(socket) {
            rules.allow(&directory, AccessFs::MakeSock | AccessFs::RemoveFile);
        }
    }
    if let Some(directory) = needs.pid_file.as_deref().and_then(directory) {
        rules.allow(&directory, written());
    }
    if let Some(restart) = restart {
        // This user's own goes in the end. Only an empty directory can be removed, and only by its owner or root.
        rules.allow(&restart.parent, AccessFs::ReadDir | AccessFs::RemoveDir);
        rules.allow(&restart.own, written());
        // An image's log may be its owner's, and is removed once it is applied. The files' permissions decide.
        let rights = if needs.writes { written() } else { read() };
        restart.others.iter().for_each(|other| rules.allow(other, rights));
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
    rules
}

/// Confines this thread. If it was `asked` for, the kernel must be able to.
pub(super) fn enter(
    needs: &Needs,
    given: &[PathBuf],
    asked: bool,
) -> Result<Option<RestartDirectories>, Failure> {
    for directory in given {
        let is_directory = fs::metadata(directory).map(|found| found.is_dir());
        let found = match is_directory {
            Ok(true) => Ok(()),
            Ok(false) => Err(io::ErrorKind::NotADirectory.into()),
            Err(error) => Err(error),
        };
        found.map_err(|error| {
            let cause = isobath_storage::cause(&error);
            Failure::new(cause).context(format_args!("--sandbox-dir '{}'", directory.display()))
        })?;
    }
    for (file, what) in needs
        .sockets
        .iter()
        .map(|socket| (socket, "socket"))
        .chain(needs.pid_file.iter().map(|pid_file| (pid_file, "PID file")))
    {
        if directory(file).is_none() && file.parent() == Some(Path::new("/")) {
            return Err(Failure::new(format_args!(
                "the {what} '{}' lies in the root directory, to which a confined server has no rights; choose another \
                 place, or --sandbox off",
                file.display()
            )));
        }
    }
    // Without them there is no restart log, as the images will say.
    let restart = RestartDirectories::keep().ok();
    let rules = rules(needs, given, restart.as_ref());
    let fails = |error: &dyn std::fmt::Display| {
        Failure::new(format_args!("cannot confine the server: {error}; --sandbox off does without"))
    };
    let created = create().map_err(|error| fails(&error))?;
    let ruleset = add(created, &rules).map_err(|error| fails(&error))?;
    let status = ruleset.restrict_self().map_err(|error| fails(&error))?.ruleset;
    match status {
        RulesetStatus::NotEnforced if asked => {
            Err(fails(&"this kernel has no Landlock (since Linux 5.13), or it is not enabled"))
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
    let confined = create().and_then(|created| add(created, &rules)?.restrict_self());
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
    rules: &Rules,
) -> Result<RulesetCreated, landlock::RulesetError> {
    for (path, rights) in &rules.0 {
        let Ok::<_, PathFdError>(path) = PathFd::new(path) else {
            // What is not there cannot be opened either.
            continue;
        };
        ruleset = ruleset.add_rule(PathBeneath::new(path, *rights))?;
    }
    Ok(ruleset)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn an_image_brings_its_directory_and_a_device_only_itself() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().canonicalize().unwrap().join(name);
        fs::create_dir(at("real")).unwrap();
        fs::create_dir(at("names")).unwrap();
        fs::write(at("real/image"), "").unwrap();
        symlink(at("real/image"), at("names/image")).unwrap();
        symlink("/dev/null", at("names/device")).unwrap();
        let of = |name: &str, writes| {
            let mut rules = Rules::default();
            rules.allow_image(&at(name), writes);
            Vec::from_iter(rules.0)
        };
        assert_eq!(of("real/image", false), [(at("real"), read())]);
        assert_eq!(of("names/image", true), [(at("names"), written()), (at("real"), written())]);
        let device = AccessFs::ReadFile | AccessFs::IoctlDev;
        assert_eq!(of("names/device", false), [("/dev/null".into(), device)]);
    }

    #[test]
    fn the_root_directory_is_allowed_to_nobody() {
        assert_eq!(directory(Path::new("/image")), None);
        assert_eq!(
            directory(Path::new("image")),
            std::env::current_dir().unwrap().canonicalize().ok()
        );
        let mut rules = Rules::default();
        rules.allow_image(Path::new("/image"), true);
        let file = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
        assert_eq!(Vec::from_iter(rules.0), [("/image".into(), file)]);
    }

    #[test]
    fn exports_bring_no_directory_and_who_connects_may_ask_for_addresses() {
        let export = "nbd://example.org/export".into();
        let needs = Needs { images: vec![export], connects: true, ..Needs::default() };
        let rules = rules(&needs, &[], None);
        assert!(!rules.0.keys().any(|path| path.to_string_lossy().contains("example")));
        assert!(rules.0.contains_key(Path::new("/etc/hosts")));
        let rules = super::rules(&Needs::default(), &["/given".into()], None);
        assert!(!rules.0.contains_key(Path::new("/etc/hosts")));
        assert_eq!(rules.0.get(Path::new("/given")), Some(&written()));
    }
}
