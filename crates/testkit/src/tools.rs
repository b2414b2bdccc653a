//! Finding the programs that tests run.

use std::env;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Programs and the Debian or Ubuntu packages that contain them, as in `scripts/setup`.
const PACKAGES: &[(&str, &str)] = &[
    ("qemu-img", "qemu-utils"),
    ("qemu-io", "qemu-utils"),
    ("qemu-nbd", "qemu-utils"),
    ("qemu-storage-daemon", "qemu-system-common qemu-utils"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("fio", "fio"),
    ("nbdinfo", "libnbd-bin"),
    ("nbdcopy", "libnbd-bin"),
    ("nbdkit", "nbdkit"),
    ("mkfs.ext4", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("debugfs", "e2fsprogs"),
    ("mkfs.xfs", "xfsprogs"),
    ("busybox", "busybox-static"),
    ("chromium-headless-shell", "chromium-headless-shell"),
    ("ldd", "libc-bin"),
    ("openssl", "openssl"),
];

/// The path of a program, from `PATH` and the system's own directories.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain(["/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
        .map(|directory| directory.join(name))
        .find(|file| is_executable(file))
}

/// The path of a program; if it is missing, panics with the package to install.
#[track_caller]
pub fn require(name: &str) -> PathBuf {
    find(name).unwrap_or_else(|| panic!("{}", missing(name)))
}

/// The root of the workspace, where `target/guest` and `scripts/` are.
pub fn workspace() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn missing(name: &str) -> String {
    let package = PACKAGES.iter().find(|(program, _)| *program == name).map(|(_, package)| package);
    match package {
        Some(package) => format!(
            "{name} is not installed: run scripts/setup, or 'apt-get install {package}' as root"
        ),
        None => format!("{name} is not installed"),
    }
}

fn is_executable(file: &Path) -> bool {
    file.metadata().is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_names_its_package() {
        assert!(missing("qemu-io").contains("apt-get install qemu-utils"));
        assert_eq!(missing("no-such-program"), "no-such-program is not installed");
        assert_eq!(find("no-such-program"), None);
    }

    #[test]
    fn setup_installs_every_package_named_here() {
        let setup = std::fs::read_to_string(workspace().join("scripts/setup")).unwrap();
        for (program, packages) in PACKAGES.iter().filter(|(program, _)| *program != "ldd") {
            let line = setup
                .lines()
                .find(|line| line.split_whitespace().next() == Some(program))
                .unwrap_or_else(|| panic!("scripts/setup does not know {program}"));
            assert!(line.ends_with(packages), "scripts/setup: {line}");
        }
    }
}
