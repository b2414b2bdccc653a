//! The size of a file's device's atomic writes.
//!
//! Linux guarantees one atomic unit for every write: a device's physical block. If a disk could tear one, the kernel
//! reports a smaller size (an `NVMe` disk's is no larger than its atomic write unit), and file systems rely on it.
//! Larger units that `statx` reports apply only to writes marked `RWF_ATOMIC`.

use super::disks::DISKS;
use super::sys;
use isobath_storage::SECTOR;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::Path;

/// The largest value reported: a page, which the page cache writes at once.
const PAGE: u64 = 4096;

/// File systems whose blocks are on the device that `stat` names, aligned to their size, and are overwritten in place,
/// by their numbers in `statfs(2)`.
const IN_PLACE: [u64; 2] = [sys::EXT, sys::XFS];

/// How many device-mapper devices may be stacked.
const DEPTH: u32 = 8;

/// The atomic write size of the device below an open file or block device; 512 if unknown.
pub(super) fn of_file(file: &OwnedFd) -> u64 {
    let Ok(stat) = sys::stat(file) else { return SECTOR };
    let device = if stat.st_mode & libc::S_IFMT == libc::S_IFBLK {
        stat.st_rdev
    } else {
        let known = sys::file_system(file).is_ok_and(|number| IN_PLACE.contains(&number))
            && sys::block_size(file).is_ok_and(|size| size.is_multiple_of(PAGE))
            && !sys::is_realtime(file).unwrap_or(false);
        if !known {
            return SECTOR;
        }
        stat.st_dev
    };
    let name = format!("{}:{}", libc::major(device), libc::minor(device));
    of_device(&Path::new("/sys/dev/block").join(name), DEPTH)
}

/// The atomic write size of a device, by its directory in sysfs.
fn of_device(device: &Path, depth: u32) -> u64 {
    if depth > 0 && writes_pages(device, depth).unwrap_or(false) { PAGE } else { SECTOR }
}

/// Whether a device writes each page atomically; `None` if it is unknown.
fn writes_pages(device: &Path, depth: u32) -> Option<bool> {
    let device = fs::canonicalize(device).ok()?;
    let partition = device.join("partition").exists();
    let disk = if partition { device.parent()? } else { &device };
    let start = if partition { number(&device.join("start"))? } else { 0 };
    let aligned = start.is_multiple_of(PAGE / SECTOR)
        && number(&device.join("alignment_offset"))? == 0
        && number(&disk.join("alignment_offset"))? == 0;
    if !aligned || number(&disk.join("queue/physical_block_size"))? < PAGE {
        return Some(false);
    }
    let name = disk.file_name()?.to_str()?;
    if !name.starts_with("dm-") {
        // Other devices give no such guarantee (persistent memory writes 8 bytes atomically, whatever it reports), or
        // the device below is unknown (loop devices, arrays, the network).
        return Some(DISKS.iter().any(|prefix| name.starts_with(prefix)));
    }
    // It reports the largest block size of its parts.
    let parts: Vec<_> = fs::read_dir(disk.join("slaves")).ok()?.collect();
    let whole = |part: &std::io::Result<fs::DirEntry>| {
        part.as_ref().is_ok_and(|part| of_device(&part.path(), depth - 1) >= PAGE)
    };
    Some(!parts.is_empty() && parts.iter().all(whole))
}

fn number(file: &Path) -> Option<u64> {
    fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;
    use tempfile::TempDir;

    /// A fake sysfs with devices.
    struct Sys(TempDir);

    impl Sys {
        fn new() -> Self {
            let sys = Self(tempfile::tempdir().unwrap());
            fs::create_dir(sys.path("dev")).unwrap();
            sys
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn put(&self, name: &str, value: &str) {
            let path = self.path(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{value}\n")).unwrap();
        }

        fn disk(&self, name: &str, block: u64) {
            self.put(&format!("devices/{name}/queue/physical_block_size"), &block.to_string());
            self.put(&format!("devices/{name}/alignment_offset"), "0");
            self.link(name, name);
        }

        fn partition(&self, disk: &str, name: &str, start: u64) {
            let directory = format!("devices/{disk}/{name}");
            self.put(&format!("{directory}/partition"), "1");
            self.put(&format!("{directory}/start"), &start.to_string());
            self.put(&format!("{directory}/alignment_offset"), "0");
            self.link(&format!("{disk}/{name}"), name);
        }

        fn mapped(&self, name: &str, parts: &[&str]) {
            self.disk(name, 4096);
            for part in parts {
                let slaves = self.path(&format!("devices/{name}/slaves"));
                fs::create_dir_all(&slaves).unwrap();
                let target = fs::canonicalize(self.path(&format!("dev/{part}"))).unwrap();
                symlink(target, slaves.join(part)).unwrap();
            }
        }

        fn link(&self, directory: &str, name: &str) {
            let target = self.path(&format!("devices/{directory}"));
            symlink(target, self.path(&format!("dev/{name}"))).unwrap();
        }

        fn atomic(&self, name: &str) -> u64 {
            of_device(&self.path(&format!("dev/{name}")), DEPTH)
        }
    }

    #[test]
    fn a_disk_with_large_blocks_writes_them_whole() {
        let sys = Sys::new();
        for (name, block, atomic) in [
            ("sda", 512, 512),
            ("sdb", 4096, 4096),
            ("nvme0n1", 16384, 4096),
            ("vda", 2048, 512),
            ("pmem0", 4096, 512),
            ("loop0", 4096, 512),
            ("md0", 4096, 512),
            ("nbd0", 4096, 512),
        ] {
            sys.disk(name, block);
            assert_eq!(sys.atomic(name), atomic, "{name}");
        }
        assert_eq!(sys.atomic("sdz"), 512, "nothing is known of it");
        sys.put("devices/sdb/queue/physical_block_size", "many");
        assert_eq!(sys.atomic("sdb"), 512);
    }

    #[test]
    fn a_partition_counts_where_it_begins_with_a_block() {
        let sys = Sys::new();
        sys.disk("sda", 4096);
        sys.disk("sdb", 512);
        sys.partition("sda", "sda1", 2048);
        sys.partition("sda", "sda2", 63);
        sys.partition("sdb", "sdb1", 2048);
        assert_eq!(["sda1", "sda2", "sdb1"].map(|name| sys.atomic(name)), [4096, 512, 512]);
        sys.put("devices/sda/sda1/alignment_offset", "-1");
        assert_eq!((sys.atomic("sda1"), sys.atomic("sda")), (512, 4096));
        sys.put("devices/sda/sda1/alignment_offset", "0");
        sys.put("devices/sda/alignment_offset", "3584");
        assert_eq!((sys.atomic("sda1"), sys.atomic("sda")), (512, 512));
    }

    #[test]
    fn what_is_mapped_is_as_good_as_the_worst_below() {
        let sys = Sys::new();
        sys.disk("sda", 4096);
        sys.disk("sdb", 512);
        sys.partition("sda", "sda1", 2048);
        sys.mapped("dm-0", &["sda1"]);
        sys.mapped("dm-1", &["dm-0", "sda"]);
        sys.mapped("dm-2", &["sda", "sdb"]);
        sys.mapped("dm-3", &["dm-2"]);
        sys.mapped("dm-4", &[]);
        let sizes = ["dm-0", "dm-1", "dm-2", "dm-3", "dm-4"].map(|name| sys.atomic(name));
        assert_eq!(sizes, [4096, 4096, 512, 512, 512]);
        sys.mapped("dm-10", &["sda"]);
        for number in 11..30 {
            sys.mapped(&format!("dm-{number}"), &[&format!("dm-{}", number - 1)]);
        }
        assert_eq!((sys.atomic("dm-16"), sys.atomic("dm-17")), (4096, 512), "one too many");
    }

    #[test]
    fn a_file_in_memory_is_as_good_as_unknown() {
        let file: OwnedFd = fs::File::open("/proc/self/stat").unwrap().into();
        assert_eq!(of_file(&file), 512);
        let file: OwnedFd = fs::File::open("/dev/null").unwrap().into();
        assert_eq!(of_file(&file), 512);
    }
}
