//! A Linux guest under `qemu-system-x86_64`: boots a kernel on the disks of a test, runs a shell script there, and
//! returns the result.
//!
//! The kernel and its modules are in `target/guest`, or in `target/guest-ublk` those of one that has ublk devices; that
//! is where `scripts/setup` puts them. The guest runs from an initramfs with busybox, or with [`Guest::root`] from one
//! of its disks. It needs no network and no acceleration, and boots in about three seconds.
//!
//! ```no_run
//! use isobath_testkit::guest::Guest;
//! let done = Guest::new()
//!     .nbd("/tmp/disk.sock".as_ref(), "")
//!     .run("mount -t ext4 /dev/vda /mnt; echo hello >/mnt/file; sync; umount /mnt");
//! println!("{}", done.output);
//! ```
//!
//! The script is busybox's `sh`, with `set -eu`, which does not end it where a command behind `!` succeeds: such lines
//! are refused. It has `/proc`, `/sys`, `/dev`, an empty `/mnt`, and
//! a `/tmp` in memory; the disks are `/dev/vda`, `/dev/vdb` and so on, in the order given. Its output is
//! [`Done::output`]; its exit status is the guest's.

mod initramfs;
mod vhost_user;

use crate::process::{Running, run_program};
use crate::qemu;
use crate::tools;
use initramfs::Initramfs;
use serde_json::json;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use tempfile::NamedTempFile;

/// The line after which the script's output starts.
const BEGIN: &str = "GUEST-BEGIN";
/// The line that ends it, with the script's exit status.
const EXIT: &str = "GUEST-EXIT ";

/// How long a guest may take. Whoever runs the tests ends one that hangs two minutes later, without what the guest has
/// said.
const MOST_OF_A_GUEST: Duration = Duration::from_mins(18);

/// A guest to boot.
#[derive(Debug)]
pub struct Guest {
    kernel: PathBuf,
    arguments: Vec<OsString>,
    disks: usize,
    memory: u32,
    processors: u32,
    /// Whether the memory is a file that other processes may map.
    shared_memory: bool,
    root: bool,
    patience: Duration,
    files: Initramfs,
}

/// The result of a guest that has powered off.
#[derive(Clone, Debug)]
pub struct Done {
    /// The exit status of the script.
    pub status: i32,
    /// What the script wrote, without carriage returns.
    pub output: String,
    /// All console output, including the kernel's messages.
    pub console: String,
}

impl Done {
    /// The values of the output's `NAME=VALUE` lines, in order.
    pub fn values(&self, name: &str) -> Vec<&str> {
        let value = |line| str::strip_prefix(line, name)?.strip_prefix('=');
        self.output.lines().filter_map(value).collect()
    }
}

impl Default for Guest {
    fn default() -> Self {
        Self::new()
    }
}

impl Guest {
    /// A guest without disks, with 256 MiB of memory and five minutes to finish.
    #[track_caller]
    pub fn new() -> Self {
        Self::of_kernel(kernel_directory("ISOBATH_GUEST_DIR", "target/guest"))
    }

    /// As [`new`](Self::new), with a kernel that has ublk and loop devices.
    #[track_caller]
    pub fn with_ublk() -> Self {
        Self::of_kernel(kernel_directory("ISOBATH_GUEST_UBLK_DIR", "target/guest-ublk"))
    }

    #[track_caller]
    fn of_kernel(kernel: PathBuf) -> Self {
        let mut files = Initramfs::default();
        for directory in ["bin", "dev", "mnt", "newroot", "proc", "run", "sys", "tmp"] {
            files.directory(directory);
        }
        files.character_device("dev/console", 5, 1);
        add_file(&mut files, &tools::require("busybox"), "/bin/busybox", 0o755);
        let list = kernel.join("modules.list");
        for module in fs::read_to_string(&list).expect("read modules.list").lines() {
            let name = format!("modules/{module}.ko");
            add_file(&mut files, &kernel.join(&name), &format!("/{name}"), 0o644);
        }
        add_file(&mut files, &list, "/modules.list", 0o644);
        Self {
            kernel,
            arguments: Vec::new(),
            disks: 0,
            memory: 256,
            processors: 1,
            shared_memory: false,
            root: false,
            patience: MOST_OF_A_GUEST,
            files,
        }
    }

    /// Gives the guest a disk with QEMU's `-drive`; `spec` is without `if` and `id`, such as
    /// `file=disk.img,format=raw`.
    #[must_use]
    pub fn drive(mut self, spec: &str) -> Self {
        let id = format!("disk{}", self.disks);
        self.arguments.extend(crate::args!["-drive", format!("{spec},if=none,id={id}")]);
        self.virtio_disk(&id)
    }

    /// Gives the guest a disk with QEMU's `-blockdev`; the node's name is set here.
    #[must_use]
    pub fn blockdev(mut self, mut node: serde_json::Value) -> Self {
        let id = format!("disk{}", self.disks);
        node["node-name"] = id.clone().into();
        self.arguments.extend(crate::args!["-blockdev", node.to_string()]);
        self.virtio_disk(&id)
    }

    /// Gives the guest a disk on an NBD server's unix socket. Discards and zero-writes are passed on.
    #[must_use]
    pub fn nbd(self, socket: &Path, export: &str) -> Self {
        self.blockdev(json!({
            "driver": "nbd",
            "server": {"type": "unix", "path": socket},
            "export": export,
            "discard": "unmap",
        }))
    }

    /// Adds arguments for QEMU, such as the `-chardev` and `-device` of a vhost-user disk.
    #[must_use]
    pub fn arguments<I: IntoIterator<Item: Into<OsString>>>(mut self, arguments: I) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets the guest's memory in MiB.
    #[must_use]
    pub fn memory(mut self, mebibytes: u32) -> Self {
        self.memory = mebibytes;
        self
    }

    /// Sets the number of the guest's processors.
    #[must_use]
    pub fn processors(mut self, processors: u32) -> Self {
        self.processors = processors;
        self
    }

    /// Runs the script with the first disk, an ext4 file system as made by [`fs::make_root`](crate::fs::make_root), as
    /// the root file system. It is remounted read-only at the end.
    #[must_use]
    pub fn root(mut self) -> Self {
        self.root = true;
        self
    }

    /// Sets how long the guest may take before it is killed and the test fails.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Adds a file to the initramfs. Not visible with [`Guest::root`].
    #[must_use]
    pub fn file(mut self, path: &str, content: &[u8]) -> Self {
        self.files.file(Path::new(path), content, 0o644);
        self
    }

    /// Adds a program of the host, such as `fio`, with the libraries it needs, to the initramfs as
    /// `/bin/NAME`. Not visible with [`Guest::root`].
    #[must_use]
    #[track_caller]
    pub fn program(self, name: &str) -> Self {
        self.program_at(&tools::require(name))
    }

    /// As [`program`](Self::program), for a program anywhere on the host.
    #[must_use]
    #[track_caller]
    pub fn program_at(mut self, path: &Path) -> Self {
        let file_name = path.file_name().expect("a program has a name").to_string_lossy();
        add_file(&mut self.files, path, &format!("/bin/{file_name}"), 0o755);
        let libraries = run_program(tools::require("ldd"), [path]).ok().text();
        for library in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
            add_file(&mut self.files, Path::new(library), library, 0o755);
        }
        self
    }

    /// Boots the guest, runs the script, and waits until it has powered off. Fails the test, with the console output,
    /// unless the script exits with 0.
    #[track_caller]
    pub fn run(self, script: &str) -> Done {
        let done = self.spawn(script).wait();
        assert!(
            done.status == 0,
            "the script in the guest exited with {}\n{}",
            done.status,
            done.console
        );
        done
    }

    /// Boots the guest and runs the script concurrently with the test.
    #[track_caller]
    pub fn spawn(mut self, script: &str) -> RunningGuest {
        let goes_on = |line: &&str| line.trim_start().starts_with("! ");
        if let Some(line) = script.lines().find(goes_on) {
            panic!("a script goes on whatever comes of a command behind '!': {line}");
        }
        self.files.file(Path::new("/init"), init(self.root).as_bytes(), 0o755);
        self.files.file(Path::new("/script"), format!("set -eu\n{script}\n").as_bytes(), 0o755);
        let mut initrd = NamedTempFile::new().expect("a temporary file");
        initrd.write_all(&self.files.finish()).expect("write the initramfs");

        // With a thread for each processor, one may run into code that another is just changing.
        let accelerator =
            env::var("ISOBATH_GUEST_ACCEL").unwrap_or_else(|_| "tcg,thread=single".into());
        let mut command = Command::new(qemu::program("qemu-system-x86_64"));
        command
            .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"])
            .args(["-machine", "pc", "-accel", &accelerator, "-cpu", "max", "-serial", "stdio"])
            .args(["-m", &self.memory.to_string(), "-smp", &self.processors.to_string()])
            .arg("-kernel")
            .arg(self.kernel.join("vmlinuz"))
            .arg("-initrd")
            .arg(initrd.path())
            .arg("-append")
            // The kernel panics if it sees no interrupts of its timer while others keep the machine's processors busy.
            .arg(
                "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic mitigations=off no_timer_check",
            )
            .args(&self.arguments);
        let qemu = Running::start_with_input(&mut command, Stdio::piped());
        RunningGuest { qemu, patience: self.patience, _initrd: initrd }
    }

    fn virtio_disk(mut self, id: &str) -> Self {
        self.disks += 1;
        let device = format!("virtio-blk-pci,drive={id},id=virtio-{id}");
        self.arguments.extend(crate::args!["-device", device]);
        self
    }
}

/// Script lines that print "go" and repeat a command until a line [is typed](RunningGuest::type_line): it runs for as
/// long as the test needs.
pub fn until_a_line(command: &str) -> String {
    format!(
        "exec 3<&0
         (read line <&3; touch /typed) &
         echo go
         while [ ! -e /typed ]; do
             {command}
         done"
    )
}

/// A guest that runs concurrently with a test, and is killed when dropped.
#[derive(Debug)]
pub struct RunningGuest {
    qemu: Running,
    patience: Duration,
    _initrd: NamedTempFile,
}

impl RunningGuest {
    /// The console output so far.
    pub fn console(&self) -> String {
        self.qemu.output().replace('\r', "")
    }

    /// Whether the script has ended.
    pub fn has_exited(&self) -> bool {
        self.console().lines().any(|line| line.starts_with(EXIT))
    }

    /// Waits until the script has written a line with this text.
    #[track_caller]
    pub fn wait_for(&mut self, text: &str) {
        self.wait_until(text, |console| {
            script_output(console).lines().any(|line| line.contains(text))
        });
    }

    /// Types a line on the console once the script is running; the script receives it with `read`.
    #[track_caller]
    pub fn type_line(&mut self, line: &str) {
        // Input before the kernel's console driver is up is lost.
        self.wait_until(BEGIN, |console| console.lines().any(|line| line == BEGIN));
        let console = self.qemu.child.stdin.as_mut().expect("the console's input");
        console.write_all(format!("{line}\n").as_bytes()).expect("type on the console");
    }

    #[track_caller]
    fn wait_until(&mut self, what: &str, is_there: impl Fn(&str) -> bool) {
        let deadline = Instant::now() + self.patience;
        loop {
            let ended = self.qemu.wait_for(Duration::ZERO).is_some();
            if is_there(&self.console()) {
                return;
            }
            assert!(
                !ended && Instant::now() < deadline,
                "the guest did not write {what:?}\n{}\n{}",
                self.console(),
                self.qemu.log()
            );
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Kills the guest's machine, as a power failure would, and returns the console output.
    pub fn kill(mut self) -> String {
        self.qemu.end();
        self.console()
    }

    /// Waits until the guest has powered off. Fails the test if that takes too long, or if the machine ends before the
    /// script does.
    #[track_caller]
    pub fn wait(mut self) -> Done {
        let status = self.qemu.wait(self.patience);
        let console = self.console();
        let exit = console.lines().find_map(|line| line.strip_prefix(EXIT)?.parse().ok());
        let Some(exit) = exit.filter(|_| status.success()) else {
            panic!("the guest did not power off by itself\n{}", self.qemu.finished(status).report())
        };
        Done { status: exit, output: script_output(&console), console }
    }
}

/// The directory of the kernel and its modules.
#[track_caller]
fn kernel_directory(variable: &str, usual: &str) -> PathBuf {
    let directory =
        env::var_os(variable).map_or_else(|| tools::workspace().join(usual), PathBuf::from);
    assert!(
        directory.join("modules.list").exists(),
        "no kernel for the guest in {}: run scripts/setup",
        directory.display()
    );
    directory
}

#[track_caller]
fn add_file(files: &mut Initramfs, from: &Path, to: &str, mode: u32) {
    let content = fs::read(from).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    files.file(Path::new(to), &content, mode);
}

fn script_output(console: &str) -> String {
    let lines = console.lines().skip_while(|line| *line != BEGIN).skip(1);
    lines.take_while(|line| !line.starts_with(EXIT)).flat_map(|line| [line, "\n"]).collect()
}

/// The guest's init script.
fn init(root: bool) -> String {
    let run =
        format!("echo; echo {BEGIN}; sh /run/script; status=$?; echo; echo \"{EXIT}$status\"");
    let script = if root {
        format!(
            "mount -t ext4 /dev/vda /newroot\n\
             for directory in dev proc sys run tmp; do mount --move /$directory /newroot/$directory; done\n\
             printf '%s\\n' '{run}' 'mount -o remount,ro /' 'poweroff -f' >/newroot/run/init\n\
             exec switch_root /newroot /bin/sh /run/init\n"
        )
    } else {
        format!("{run}\npoweroff -f\n")
    };
    format!(
        "#!/bin/busybox sh\n\
         /bin/busybox --install -s /bin\n\
         export PATH=/bin HOME=/\n\
         mount -t devtmpfs dev /dev\n\
         mount -t proc proc /proc\n\
         mount -t sysfs sys /sys\n\
         mount -t tmpfs run /run\n\
         mount -t tmpfs tmp /tmp\n\
         while read -r module; do insmod /modules/$module.ko; done </modules.list\n\
         cp /script /run/script\n\
         {script}"
    )
}
