//! File systems of this host's kernel on loop devices over the file.

use crate::fuse_mount::{FIXED, Image, unmount};
use isobath_disk::OpenOptions;
use isobath_testkit::loop_device::LoopDevice;
use isobath_testkit::process::run;
use isobath_testkit::tools;
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

const SIZE: u64 = 400 << 20;
/// Programs that use the file system at a time.
const PROGRAMS: usize = 4;

/// A mounted file system; unmounted when dropped.
struct Tree(TempDir);

impl Tree {
    fn new(device: &Path, kind: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let [from, to] = [device, directory.path()]
            .map(|path| CString::new(path.as_os_str().as_bytes()).unwrap());
        let kind = CString::new(kind).unwrap();
        // SAFETY: the strings end in zeroes.
        let result = unsafe {
            let none = std::ptr::null();
            libc::mount(from.as_ptr(), to.as_ptr(), kind.as_ptr(), libc::MS_NOATIME, none)
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        Self(directory)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// A sum over the names and contents of all files.
    fn sum(&self) -> String {
        let script = "find . -type f | LC_ALL=C sort | xargs sha256sum | sha256sum";
        run(Command::new("sh").args(["-c", script]).current_dir(self.path())).ok().text()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let done = unmount(self.path(), 0);
        if let Err(error) = done {
            let _ = unmount(self.path(), libc::MNT_DETACH);
            assert!(std::thread::panicking(), "umount: {error}");
        }
    }
}

/// What one program does: files of all sizes are made, overwritten in part, renamed, cut, linked, synced
/// and removed.
const WORK: &str = r#"
set -e
mkdir "p$1"; cd "p$1"
i=0
while [ $i -lt 60 ]; do
    blocks=$(( (i * 7 + $1) % 23 * (i % 5) + 1 ))
    dd if=/dev/urandom of=new bs=3001 count=$blocks status=none
    mv new "f$i"
    case $(( i % 6 )) in
        0) dd if=/dev/urandom of="f$i" bs=4096 count=3 seek=2 conv=notrunc,fsync status=none ;;
        1) truncate -s $(( blocks * 1500 )) "f$i" ;;
        2) ln "f$i" "l$i" ;;
        3) dd if=/dev/urandom of="f$i" bs=1M count=1 oflag=direct conv=fsync status=none ;;
        4) cp "f$i" "c$i"; rm "f$i" ;;
        5) fallocate -p -o 4096 -l 8192 "f$i"; mkdir "d$i"; mv "f$i" "d$i/f" ;;
    esac
    if [ $i -gt 20 ]; then rm -rf "f$(( i - 20 ))" "d$(( i - 20 ))"; fi
    i=$(( i + 1 ))
done
"#;

fn stress(tree: &Path) {
    let start = |number: usize| {
        let number = number.to_string();
        let mut shell = Command::new("sh");
        shell.args(["-c", WORK, "sh", &number]).current_dir(tree).spawn().unwrap()
    };
    let programs: Vec<_> = (0..PROGRAMS).map(start).collect();
    for mut program in programs {
        assert!(program.wait().unwrap().success());
    }
}

fn judge(device: &Path, kind: &str) {
    let mut command = match kind {
        "ext4" => Command::new(tools::require("e2fsck")),
        _ => Command::new("xfs_repair"),
    };
    let force: &[&str] = if kind == "ext4" { &["-f", "-n"] } else { &["-n"] };
    let _ = run(command.args(force).arg(device)).ok();
}

/// Makes, uses, unmounts, mounts again and checks a file system.
fn use_file_system(image: &Image, direct: bool, kind: &str) {
    let attach = |direct| {
        if direct { LoopDevice::direct(&image.path) } else { LoopDevice::new(&image.path) }
    };
    let device = attach(direct);
    assert_eq!(device.is_direct(), direct);
    let force = if kind == "ext4" { "-F" } else { "-f" };
    let mkfs = tools::require(&format!("mkfs.{kind}"));
    let _ = run(Command::new(mkfs).args(["-q", force]).arg(device.path())).ok();
    let sum = {
        let tree = Tree::new(device.path(), kind);
        stress(tree.path());
        tree.sum()
    };
    // What the device has in its cache is dropped with it.
    drop(device);
    let device = attach(!direct);
    let again = {
        let tree = Tree::new(device.path(), kind);
        let again = tree.sum();
        let _ = run(Command::new("fstrim").arg(tree.path())).ok();
        again
    };
    assert_eq!(sum, again);
    judge(device.path(), kind);
}

#[test]
fn file_systems_live_on_it() {
    let image = Image::new(SIZE, &OpenOptions::default(), FIXED, 2);
    use_file_system(&image, false, "ext4");
    use_file_system(&image, false, "xfs");
    image.finish();
}

#[test]
fn file_systems_live_on_it_with_direct_access() {
    let image = Image::new(SIZE, &OpenOptions::default(), FIXED, 0);
    use_file_system(&image, true, "ext4");
    use_file_system(&image, true, "xfs");
    image.finish();
}

#[test]
fn file_systems_live_on_it_with_direct_access_all_the_way_down() {
    let open = OpenOptions::new().direct(true);
    let image = Image::new(SIZE, &open, FIXED, 1);
    use_file_system(&image, true, "ext4");
    image.finish();
}

#[test]
fn a_loop_device_takes_a_new_size() {
    let image = Image::new(1 << 20, &OpenOptions::default(), FIXED, 0);
    let device = LoopDevice::direct(&image.path);
    let size = 3 << 20;
    let resize = image.device.resize(size, isobath_disk::Preallocation::Off, false);
    isobath_ring::block_on(resize).unwrap();
    let _ = run(Command::new("losetup").arg("-c").arg(device.path())).ok();
    let mut dd = Command::new("dd");
    let (to, seek) = (format!("of={}", device.path().display()), "seek=2");
    let arguments = ["if=/dev/zero", "bs=1M", seek, "oflag=direct", "status=none", &to];
    let written = run(dd.args(arguments));
    assert_eq!(written.code(), 1, "it ends at the new end\n{}", written.report());
    let mut bytes = Command::new("blockdev");
    let told = run(bytes.arg("--getsize64").arg(device.path())).ok().text();
    assert_eq!(told.trim(), size.to_string());
    drop(device);
    assert_eq!(image.finish().len() as u64, size);
}
