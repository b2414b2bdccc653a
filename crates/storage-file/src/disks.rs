//! Whether a file is on disks, or on devices that programs of this machine may serve.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Disks, by the prefix of their names.
pub(super) const DISKS: [&str; 5] = ["sd", "vd", "xvd", "nvme", "mmcblk"];

/// How many devices may be stacked.
const DEPTH: u32 = 8;

/// Where the kernel shows block devices by their numbers.
const DEVICES: &str = "/sys/dev/block";

/// Whether a file system's device is made of disks alone; `false` if that is unknown. The kernel cannot wait for a
/// program's answer in a write to one that is.
pub(super) fn is_on_disks(device: u64) -> bool {
    of_device(&numbered(Path::new(DEVICES), device), DEPTH).unwrap_or(false)
}

fn numbered(devices: &Path, device: u64) -> PathBuf {
    devices.join(format!("{}:{}", libc::major(device), libc::minor(device)))
}

/// The same of a device by its directory in sysfs; `None` if it is unknown.
fn of_device(device: &Path, depth: u32) -> Option<bool> {
    let depth = depth.checked_sub(1)?;
    let device = fs::canonicalize(device).ok()?;
    let whole = if device.join("partition").exists() { device.parent()? } else { &device };
    let name = whole.file_name()?.to_str()?;
    if DISKS.iter().any(|prefix| name.starts_with(prefix)) {
        return Some(true);
    }
    if name.starts_with("loop") {
        let file = fs::read_to_string(whole.join("loop/backing_file")).ok()?;
        let found = fs::metadata(file.trim_end_matches('\n')).ok()?;
        return of_device(&numbered(Path::new(DEVICES), found.dev()), depth);
    }
    if name.starts_with("dm-") || name.starts_with("md") {
        let parts: Vec<_> = fs::read_dir(whole.join("slaves")).ok()?.collect();
        let is_disk = |part: &std::io::Result<fs::DirEntry>| {
            part.as_ref().is_ok_and(|part| of_device(&part.path(), depth) == Some(true))
        };
        return Some(!parts.is_empty() && parts.iter().all(is_disk));
    }
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    /// A directory like those of block devices in sysfs.
    struct Sys(TempDir);

    impl Sys {
        fn device(&self, name: &str, parts: &[&str]) {
            let slaves = self.path(name).join("slaves");
            fs::create_dir_all(&slaves).unwrap();
            for part in parts {
                symlink(self.path(part), slaves.join(part)).unwrap();
            }
        }

        fn partition(&self, disk: &str, name: &str) {
            let directory = self.path(disk).join(name);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("partition"), "1\n").unwrap();
            symlink(&directory, self.path(name)).unwrap();
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn is_disk(&self, name: &str) -> bool {
            of_device(&self.path(name), DEPTH) == Some(true)
        }
    }

    #[test]
    fn disks_and_what_is_made_of_them_are_told_from_what_programs_serve() {
        let sys = Sys(tempfile::tempdir().unwrap());
        for name in ["vda", "sdb", "nvme0n1", "nbd0", "ublkb0", "loop0", "drbd1"] {
            sys.device(name, &[]);
        }
        sys.partition("vda", "vda1");
        sys.partition("nbd0", "nbd0p1");
        sys.device("dm-0", &["vda1", "sdb"]);
        sys.device("md0", &["dm-0", "nvme0n1"]);
        for name in ["vda", "sdb", "nvme0n1", "vda1", "dm-0", "md0"] {
            assert!(sys.is_disk(name), "{name}");
        }
        sys.device("dm-1", &["dm-0", "nbd0p1"]);
        sys.device("md1", &["ublkb0"]);
        sys.device("dm-2", &[]);
        // Nothing is known of the file of a loop device that has none.
        for name in ["nbd0", "nbd0p1", "ublkb0", "dm-1", "md1", "dm-2", "loop0", "drbd1", "sdz"] {
            assert!(!sys.is_disk(name), "{name}");
        }
        sys.device("dm-10", &["vda"]);
        for number in 11..30 {
            sys.device(&format!("dm-{number}"), &[&format!("dm-{}", number - 1)]);
        }
        assert!(sys.is_disk("dm-12") && !sys.is_disk("dm-29"), "too many are stacked");
    }

    #[test]
    fn what_is_in_memory_or_made_by_the_kernel_is_on_no_disk() {
        assert!(!is_on_disks(fs::metadata("/proc/self/stat").unwrap().dev()));
        assert!(!is_on_disks(fs::metadata("/dev/shm").unwrap().dev()));
    }
}
