//! What a confined server can still do. Calls are made inside it, on each of its threads, by a debugger's means.

use crate::serving::ISOBATH;
use crate::vhost_raw::{FEATURES, Raw};
use isobath_qmp::client::{Address, Client};
use isobath_testkit::process::{Ready, Server, run, run_program};
use isobath_testkit::{args, qemu};
use serde_json::{Value, json};
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

/// A directory with an image `vm.qcow2` on `base.qcow2`, which lies in another.
fn directory() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    for name in ["images", "bases", "elsewhere"] {
        fs::create_dir(at(name)).unwrap();
    }
    qemu::create(&at("bases/base.qcow2"), "qcow2", MIB, "");
    qemu::create_overlay(&at("images/vm.qcow2"), &at("bases/base.qcow2"), "qcow2", "");
    for file in ["elsewhere/secret", "bases/other"] {
        fs::write(at(file), [7; 512]).unwrap();
    }
    directory
}

/// Whether the kernel can confine a server. Where it cannot, `--sandbox strict` says so.
fn kernel_can(directory: &Path) -> bool {
    // SAFETY: no memory is involved: the call asks for the version.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) };
    if version <= 0 {
        let mut command = Command::new(ISOBATH);
        command.current_dir(directory).args(["serve", "images/vm.qcow2", "--sandbox", "strict"]);
        let refused = run(command.args(["--nbd", "unix:n"])).exits(1);
        assert!(refused.stderr.contains("Landlock"), "{}", refused.report());
    }
    version > 0
}

fn serve(directory: &Path, options: &[&str]) -> Server {
    let mut command = Command::new(ISOBATH);
    command.current_dir(directory).env("XDG_RUNTIME_DIR", directory);
    command.args(["serve", "images/vm.qcow2", "--threads", "2"]).args(options);
    Server::start(&mut command, Ready::Line("-blockdev"))
}

#[test]
fn a_server_that_cannot_be_confined_to_an_images_directory_names_the_image() {
    let directory = directory();
    if !kernel_can(directory.path()) {
        return;
    }
    let mut command = Command::new("sh");
    let script = "exec 7<>images/vm.qcow2 && rm images/vm.qcow2 && exec \"$@\"";
    command.current_dir(directory.path()).args(["-c", script, "sh", ISOBATH]);
    command.args(["serve", "/proc/self/fd/7", "--format", "qcow2", "--nbd", "unix:n"]);
    let refused = run(&mut command).exits(1);
    for part in ["'/proc/self/fd/7'", "has no name", "--sandbox off"] {
        assert!(refused.stderr.contains(part), "{}", refused.report());
    }
}

#[test]
fn a_chain_may_have_more_directories_than_a_confined_server_has_descriptors() {
    let directory = tempfile::tempdir().unwrap();
    if !kernel_can(self::directory().path()) {
        return;
    }
    let mut below = None;
    let mut image = directory.path().to_owned();
    for number in 0..100 {
        let own = directory.path().join(number.to_string());
        fs::create_dir(&own).unwrap();
        image = own.join("image");
        let mut create = args!["create", "-q", "-f", "qcow2"];
        match &below {
            Some(below) => create.extend(args!["-u", "-F", "qcow2", "-b", below, &image, "1M"]),
            None => create.extend(args![&image, "1M"]),
        }
        let _ = run_program(ISOBATH, create).ok();
        below = Some(image.clone());
    }
    let mut command = Command::new("sh");
    command.current_dir(directory.path()).env("XDG_RUNTIME_DIR", directory.path());
    command.args(["-c", "ulimit -n 80; exec \"$0\" \"$@\"", ISOBATH, "serve"]).arg(&image);
    command.args(["--nbd", "unix:n", "--sandbox", "strict", "--threads", "1"]);
    let server = Server::start(&mut command, Ready::Line("-blockdev"));
    let uri = format!("nbd+unix:///?socket={}", directory.path().join("n").display());
    let read = args!["io", "-f", "raw", "-c", "read -P 0 0 1M", uri];
    let _ = run_program(ISOBATH, read).ok();
    let _ = server.stop().ok();
}

/// A thread of another process, stopped for as long as this lives.
struct Thread {
    number: libc::pid_t,
    registers: libc::user_regs_struct,
    /// The address of an instruction that makes a call.
    instruction: u64,
}

/// The address of a system call's instruction in a process: in the C library.
fn instruction(process: u32) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    let library = maps.lines().find(|line| line.contains(" r-xp ") && line.contains("/libc"));
    let (range, _) = library.expect("the C library").split_once(' ').unwrap();
    let (start, end) = range.split_once('-').unwrap();
    let [start, end] = [start, end].map(|text| u64::from_str_radix(text, 16).unwrap());
    let mut code = vec![0; (end - start) as usize];
    let memory = fs::File::open(format!("/proc/{process}/mem")).unwrap();
    memory.read_exact_at(&mut code, start).unwrap();
    let place = code.windows(2).position(|bytes| *bytes == [0x0f, 0x05]).expect("a call");
    start + place as u64
}

fn done(result: libc::c_long) -> libc::c_long {
    assert!(result >= 0, "{}", io::Error::last_os_error());
    result
}

impl Thread {
    fn stop(number: libc::pid_t, instruction: u64) -> Self {
        // SAFETY: no memory of this process is involved.
        unsafe {
            done(libc::ptrace(libc::PTRACE_SEIZE, number, 0, 0));
            done(libc::ptrace(libc::PTRACE_INTERRUPT, number, 0, 0));
        }
        Self::wait(number);
        Self { number, registers: Self::registers(number), instruction }
    }

    fn wait(number: libc::pid_t) {
        let mut status = 0;
        // SAFETY: `status` is a live value.
        let waited = unsafe { libc::waitpid(number, &raw mut status, libc::__WALL) };
        assert_eq!(waited, number, "{}", io::Error::last_os_error());
        assert!(libc::WIFSTOPPED(status), "{status:#x}");
    }

    fn registers(number: libc::pid_t) -> libc::user_regs_struct {
        // SAFETY: the registers are numbers, and the call fills them.
        unsafe {
            let mut registers: libc::user_regs_struct = std::mem::zeroed();
            done(libc::ptrace(libc::PTRACE_GETREGS, number, 0, &raw mut registers));
            registers
        }
    }

    /// Makes a call on this thread; gives its result, or the error's number.
    fn call(&self, call: libc::c_long, arguments: [u64; 4]) -> Result<u64, i32> {
        let mut registers = self.registers;
        registers.rip = self.instruction;
        // If the thread waits in a call, that is not to be restarted now.
        registers.rax = call as u64;
        registers.orig_rax = u64::MAX;
        [registers.rdi, registers.rsi, registers.rdx, registers.r10] = arguments;
        // SAFETY: the thread is stopped; it executes one instruction, after which it is as before.
        unsafe {
            done(libc::ptrace(libc::PTRACE_SETREGS, self.number, 0, &raw const registers));
            done(libc::ptrace(libc::PTRACE_SINGLESTEP, self.number, 0, 0));
        }
        Self::wait(self.number);
        let result = Self::registers(self.number).rax;
        let restored = &raw const self.registers;
        // SAFETY: as above.
        unsafe { done(libc::ptrace(libc::PTRACE_SETREGS, self.number, 0, restored)) };
        i32::try_from(result.cast_signed()).map_or(Ok(result), |number| match number {
            ..0 => Err(-number),
            _ => Ok(result),
        })
    }

    /// The same for a call with a path, which is put where the thread's stack is free.
    fn call_with(
        &self,
        call: libc::c_long,
        path: &str,
        place: usize,
        rest: &[u64],
    ) -> Result<u64, i32> {
        let at = (self.registers.rsp - 4096) & !7;
        let mut bytes = path.as_bytes().to_vec();
        bytes.push(0);
        for (number, word) in bytes.chunks(8).enumerate() {
            let mut eight = [0; 8];
            eight[..word.len()].copy_from_slice(word);
            let (to, word) = (at + 8 * number as u64, u64::from_ne_bytes(eight));
            // SAFETY: the memory is the thread's stack, beyond what it uses.
            unsafe { done(libc::ptrace(libc::PTRACE_POKEDATA, self.number, to, word)) };
        }
        let mut arguments = [0; 4];
        arguments[place] = at;
        for (number, value) in rest.iter().enumerate() {
            let number = if number < place { number } else { number + 1 };
            arguments[number] = *value;
        }
        self.call(call, arguments)
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        // SAFETY: no memory of this process is involved.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.number, 0, 0) };
    }
}

/// Each thread of a process, one after the other.
fn each_thread(process: u32, check: impl Fn(&str, &Thread)) -> usize {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let instruction = instruction(process);
    let mut count = 0;
    for thread in threads {
        let thread = thread.unwrap();
        let number = thread.file_name().to_str().unwrap().parse().unwrap();
        let name = fs::read_to_string(thread.path().join("comm")).unwrap();
        // A ring's own threads execute no instructions of the program.
        if name.starts_with("iou-") {
            continue;
        }
        let stopped = Thread::stop(number, instruction);
        check(name.trim(), &stopped);
        count += 1;
    }
    count
}

const CWD: u64 = libc::AT_FDCWD as u64;

/// Opens a file; the descriptor stays open in the server.
fn open(thread: &Thread, path: &Path, flags: i32) -> Result<u64, i32> {
    let path = path.to_str().unwrap();
    thread.call_with(libc::SYS_openat, path, 1, &[CWD, flags as u64, 0o600])
}

#[test]
fn code_in_a_confined_server_reads_no_other_file_executes_nothing_and_connects_to_nobody() {
    let place = directory();
    if !kernel_can(place.path()) {
        return;
    }
    let at = |name: &str| place.path().join(name);
    let server = serve(place.path(), &["--nbd", "unix:n"]);
    let threads = each_thread(server.pid(), |name, thread| {
        assert_eq!(thread.call(libc::SYS_getpid, [0; 4]), Ok(server.pid().into()), "{name}");
        for allowed in ["images/vm.qcow2", "bases/base.qcow2"] {
            open(thread, &at(allowed), libc::O_RDWR).expect(name);
        }
        for denied in ["/etc/shadow", "/etc/passwd", at("elsewhere/secret").to_str().unwrap()] {
            assert_eq!(
                open(thread, Path::new(denied), libc::O_RDONLY),
                Err(libc::EACCES),
                "{name}"
            );
        }
        let new = open(thread, &at("elsewhere/new"), libc::O_RDWR | libc::O_CREAT);
        assert_eq!(new, Err(libc::EACCES), "{name}");
        let program = thread.call_with(libc::SYS_execve, "/bin/true", 0, &[0, 0]);
        assert_eq!(program, Err(libc::EPERM), "{name}");
        for domain in [libc::AF_INET, libc::AF_INET6, libc::AF_UNIX, libc::AF_NETLINK] {
            let kind = libc::SOCK_STREAM as u64;
            let socket = thread.call(libc::SYS_socket, [domain as u64, kind, 0, 0]);
            assert_eq!(socket, Err(libc::EPERM), "{name}");
        }
        for (call, arguments, error) in [
            (libc::SYS_io_uring_setup, [1, 0, 0, 0], libc::EPERM),
            (libc::SYS_fork, [0; 4], libc::EPERM),
            (libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0, 0], libc::EPERM),
            (libc::SYS_clone3, [0; 4], libc::ENOSYS),
            (libc::SYS_ptrace, [libc::PTRACE_ATTACH as u64, 1, 0, 0], libc::EPERM),
            (libc::SYS_kill, [u64::from(std::process::id()), 0, 0, 0], libc::EPERM),
            (libc::SYS_setuid, [0; 4], libc::EPERM),
            (libc::SYS_ioctl, [0, libc::TIOCSTI, 0, 0], libc::EPERM),
            (libc::SYS_splice, [0, 0, 1, 0], libc::EPERM),
            (libc::SYS_timerfd_create, [libc::CLOCK_MONOTONIC as u64, 0, 0, 0], libc::EPERM),
            (libc::SYS_fsetxattr, [0, 0, 0, 0], libc::EPERM),
            (libc::SYS_linkat, [CWD, 0, CWD, 0], libc::EPERM),
        ] {
            assert_eq!(thread.call(call, arguments), Err(error), "{name}: {call}");
        }
    });
    assert!(threads >= 3, "the main thread and two workers: {threads}");
    let uri = format!("nbd+unix:///vm?socket={}", at("n").display());
    let _ = qemu::io(Path::new(&uri), "raw", &["write -P 7 0 1M", "read -P 7 0 1M"]).ok();
    let _ = server.stop().ok();
    assert!(!at("n").exists());
}

#[test]
fn with_the_sandbox_off_it_can() {
    let place = directory();
    let server = serve(place.path(), &["--nbd", "unix:n", "--sandbox", "off"]);
    each_thread(server.pid(), |name, thread| {
        open(thread, &place.path().join("elsewhere/secret"), libc::O_RDONLY).expect(name);
        let socket = [libc::AF_UNIX as u64, libc::SOCK_STREAM as u64, 0, 0];
        thread.call(libc::SYS_socket, socket).expect(name);
    });
    let _ = server.stop().ok();
}

#[test]
fn a_read_only_server_cannot_write_to_its_images() {
    let place = directory();
    if !kernel_can(place.path()) {
        return;
    }
    let server = serve(place.path(), &["--nbd", "unix:n", "--read-only"]);
    each_thread(server.pid(), |name, thread| {
        let image = place.path().join("images/vm.qcow2");
        open(thread, &image, libc::O_RDONLY).expect(name);
        assert_eq!(open(thread, &image, libc::O_RDWR), Err(libc::EACCES), "{name}");
    });
    let _ = server.stop().ok();
}

/// What a QMP client asks of a confined server.
fn ask(directory: &Path, command: &str, arguments: Value) -> Result<(), String> {
    let mut client = Client::connect(&Address::Unix(directory.join("q"))).unwrap();
    client.execute(command, arguments).map(drop).map_err(|error| error.to_string())
}

#[test]
fn qmp_clients_reach_the_images_directories_and_those_that_are_given() {
    let place = directory();
    if !kernel_can(place.path()) {
        return;
    }
    let at = |name: &str| place.path().join(name);
    let raw = |path: &Path, node: &str| {
        let file = json!({"driver": "file", "filename": path});
        json!({"driver": "raw", "node-name": node, "read-only": true, "file": file})
    };
    let export = json!({"type": "nbd", "id": "e", "node-name": "own"});
    for given in [false, true] {
        let elsewhere = ["--sandbox-dir", "elsewhere"];
        let options = if given { elsewhere.as_slice() } else { &[] };
        let server =
            serve(place.path(), &[&["--nbd", "unix:n", "--qmp", "unix:q"], options].concat());
        let ask = |command, arguments| ask(place.path(), command, arguments);
        let secret = ask("blockdev-add", raw(&at("elsewhere/secret"), "s"));
        let shadow = ask("blockdev-add", raw(Path::new("/etc/shadow"), "t")).unwrap_err();
        assert!(shadow.contains("--sandbox-dir"), "{shadow}");
        assert_eq!(secret.is_ok(), given, "{secret:?}");
        let name = format!("images/new-{given}.qcow2");
        let snapshot = json!({"device": "vm", "snapshot-file": at(&name)});
        ask("blockdev-snapshot-sync", snapshot).unwrap();
        let snapshot = json!({"device": "vm", "snapshot-file": at("elsewhere/new.qcow2")});
        assert_eq!(ask("blockdev-snapshot-sync", snapshot).is_ok(), given);
        ask("blockdev-add", raw(&at("bases/other"), "own")).unwrap();
        ask("block-export-add", export.clone()).unwrap();
        let socket = json!({"type": "unix", "path": at("images/v")});
        let vhost =
            json!({"type": "vhost-user-blk", "id": "v", "node-name": "own", "addr": socket});
        ask("block-export-add", vhost).unwrap();
        let fuse =
            json!({"type": "fuse", "id": "f", "node-name": "own", "mountpoint": at("images/file")});
        fs::write(at("images/file"), "").unwrap();
        let refused = ask("block-export-add", fuse).unwrap_err();
        assert!(refused.contains("the server is confined"), "{refused}");
        let _ = server.stop().ok();
    }
}

#[test]
fn a_server_becomes_another_user() {
    // The directory is root's: the tests run as root. The other user has all that is below it.
    let place = directory();
    let user = 3_999_999_999_u32;
    let _ = run_program("chown", args!["-R", format!("{user}:{user}"), place.path()]).ok();
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let other = user.to_string();
    let mut command = Command::new(ISOBATH);
    command.current_dir(place.path()).args(["serve", "images/vm.qcow2", "--user", &other]);
    let refused = run(command.args(["--nbd", "unix:n"])).exits(1);
    assert!(refused.stderr.contains("--group"), "{}", refused.report());
    let options = ["--nbd", "unix:n", "--user", &other, "--group", &other];
    let server = serve(place.path(), &options);
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    for line in ["Uid", "Gid"] {
        let all = format!("{line}:\t{user}\t{user}\t{user}\t{user}");
        assert!(status.contains(&all), "{status}");
    }
    assert!(status.contains(&format!("Groups:\t{user} \n")), "{status}");
    assert!(status.contains("CapEff:\t0000000000000000"), "{status}");
    let uri = format!("nbd+unix:///vm?socket={}", place.path().join("n").display());
    let _ = qemu::io(Path::new(&uri), "raw", &["write -P 7 0 1M", "read -P 7 0 1M"]).ok();
    let _ = server.stop().ok();
}

#[test]
fn the_last_server_of_a_user_leaves_no_directory_for_restart_logs() {
    let place = directory();
    let user = "3999999998";
    let _ = run_program("chown", args!["-R", format!("{user}:{user}"), place.path()]).ok();
    let logs = Path::new("/dev/shm").join(format!("isobath-{user}"));
    let own = ["--user", user, "--group", user];
    let first = serve(place.path(), &[&own[..], &["--read-only", "--nbd", "unix:n"]].concat());
    let other = serve(place.path(), &[&own[..], &["--read-only", "--nbd", "unix:m"]].concat());
    assert!(logs.exists());
    let _ = first.stop().ok();
    assert!(logs.exists(), "the other server keeps it");
    let _ = other.stop().ok();
    assert!(!logs.exists());
}

#[test]
fn a_confined_server_recovers_what_another_users_server_left() {
    let place = directory();
    let user = "3999999999";
    let _ = run_program("chown", args!["-R", format!("{user}:{user}"), place.path()]).ok();
    let options = ["--nbd", "unix:n", "--vhost-user-blk", "unix:v", "--metadata", "journal"];
    let own = ["--user", user, "--group", user];
    let server = serve(place.path(), &[&options[..], &own].concat());
    let uri = format!("nbd+unix:///vm?socket={}", place.path().join("n").display());
    let _ =
        qemu::io(Path::new(&uri), "raw", &["write -P 7 0 64k", "flush", "write -P 8 64k 64k"]).ok();
    let _ = server.kill();
    let mut command = Command::new(ISOBATH);
    command.current_dir(place.path()).args(["serve", "images/vm.qcow2"]).args(options);
    let server = Server::start_after_kill(&mut command, Ready::Line("-blockdev"));
    let _ = qemu::io(Path::new(&uri), "raw", &["read -P 7 0 64k", "read -P 8 64k 64k"]).ok();
    let _ = server.stop().ok();
    qemu::assert_clean(&place.path().join("images/vm.qcow2"));
}

#[test]
fn a_confined_server_serves_guests_whatever_its_executors_use() {
    for io in ["io_uring", "threads"] {
        let place = directory();
        let mut command = Command::new(ISOBATH);
        command.current_dir(place.path()).env("ISOBATH_IO", io);
        command.args(["serve", "images/vm.qcow2", "--vhost-user-blk", "unix:v"]);
        let server = Server::start(&mut command, Ready::Line("vhost-user-blk-pci"));
        let guest = Raw::start(&place.path().join("v"), 1, 8, FEATURES);
        guest.assert_works(0);
        drop(guest);
        let done = server.stop().ok();
        assert!(done.stderr.is_empty(), "{io}: {}", done.report());
    }
}
