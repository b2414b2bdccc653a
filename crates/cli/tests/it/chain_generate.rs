//! `isobath chain generate`: what it makes, refuses and leaves behind.

use isobath_testkit::process::{Finished, run, run_program};
use isobath_testkit::{args, qemu, until};
use std::ffi::OsString;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

const ISOBATH: &str = env!("CARGO_BIN_EXE_isobath");

fn generate(directory: &Path, options: &str) -> Finished {
    let mut arguments = args!["chain", "generate", directory];
    arguments.extend(options.split_whitespace().map(OsString::from));
    run_program(ISOBATH, arguments)
}

#[test]
fn a_chain_of_small_relative_names_that_isobath_and_qemu_read_alike() {
    let directory = tempfile::tempdir().unwrap();
    let chain = directory.path().join("chain");
    let options = "--layers 20 --size 10M --fill 50% --distribution zipf --data pattern --seed 5";
    let printed = generate(&chain, options).ok().text();
    let active = chain.join("layer-00019.qcow2");
    assert_eq!(printed.trim_end(), active.to_str().unwrap());
    let info = qemu::info(&active);
    assert_eq!(info["backing-filename"], "layer-00018.qcow2");
    assert_eq!(info["backing-filename-format"], "qcow2");
    assert_eq!(info["virtual-size"], 10 << 20);
    let raw = directory.path().join("raw");
    let _ = run_program(ISOBATH, args!["convert", &active, &raw]).ok();
    let disk = fs::read(&raw).unwrap();
    assert!(disk == qemu::read_disk(&active, "qcow2"));
    let written = disk.chunks(512).filter(|sector| sector.starts_with(b"isobath layer 000"));
    assert_eq!(written.count(), 80 * 128);
}

#[test]
fn a_trace_says_which_layer_wrote_what() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    let options = format!("--layers 2 --size 1M --distribution trace:{}", trace.display());
    let chain = directory.path().join("chain");
    fs::write(&trace, "0 0 0x20000\n1 0x10000 512\n").unwrap();
    let _ = generate(&chain, &options).ok();
    let depths: Vec<_> = qemu::map(&chain.join("layer-00001.qcow2"))
        .as_array()
        .unwrap()
        .iter()
        .filter(|extent| extent["data"] == true)
        .map(|extent| (extent["start"].as_u64().unwrap(), extent["depth"].as_u64().unwrap()))
        .collect();
    assert_eq!(depths, [(0, 1), (0x10000, 0)]);

    fs::write(&trace, "0 0 0x20000\n2 0 512\n").unwrap();
    let refused = generate(&directory.path().join("other"), &options).exits(1);
    let expected = format!("cannot read the trace '{}': line 2: no such layer: 2", trace.display());
    assert!(refused.stderr.contains(&expected), "{}", refused.stderr);
    let refused =
        generate(&directory.path().join("other"), &format!("{options} --fill 1")).exits(1);
    assert!(
        refused.stderr.contains("--fill cannot be combined with --distribution trace"),
        "{}",
        refused.stderr
    );
    assert!(!directory.path().join("other").exists());
}

#[test]
fn a_raw_image_gives_size_and_content() {
    let directory = tempfile::tempdir().unwrap();
    let raw = directory.path().join("raw");
    let disk: Vec<_> = (0..300_032_u32).map(|byte| (byte / 700) as u8).collect();
    fs::write(&raw, &disk).unwrap();
    let chain = directory.path().join("chain");
    let options = format!("--layers 3 --cluster-size 4k --data raw:{}", raw.display());
    let _ = generate(&chain, &options).ok();
    assert!(qemu::read_disk(&chain.join("layer-00002.qcow2"), "qcow2") == disk);
}

#[test]
fn bad_values_are_named() {
    let directory = tempfile::tempdir().unwrap();
    for (options, message) in [
        ("--layers 0", "--layers"),
        ("--layers 1 --fill 120%", "'120%' is not a share of the disk"),
        ("--layers 1 --size 0", "at least one sector"),
        ("--layers 1 --cluster-size 3k", "power of two"),
        ("--layers 1 --distribution normal", "uniform, zipf, sequential"),
        ("--layers 1 --distribution trace:", "uniform, zipf, sequential"),
        ("--layers 1 --distribution trace:/no/such", "the trace '/no/such': No such file"),
        ("--layers 1 --size 1T --cluster-size 512", "too large for this cluster size"),
        ("--layers 1 --data ones", "random, zero, pattern"),
        ("--layers 1 --data raw:/no/such", "cannot read the raw image '/no/such': No such file"),
        ("--layers 1 --data raw:/no/such --fill 50%", "--fill cannot be combined with --data raw"),
        ("--layers 1", "is not empty"),
    ] {
        fs::write(directory.path().join("something"), "").unwrap();
        let refused = generate(directory.path(), options).exits(1);
        assert!(refused.stderr.contains(message), "{options}: {}", refused.stderr);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}

#[test]
fn an_interrupted_chain_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let chain = directory.path().join("chain");
    let mut process = Command::new(ISOBATH)
        // It would take minutes.
        .args(["chain", "generate", "--layers", "10000", "--size", "1G", "--data", "pattern"])
        .arg(&chain)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until("the third layer", || {
        assert!(process.try_wait().unwrap().is_none(), "ended by itself");
        chain.join("layer-00003.qcow2").exists()
    });
    // SAFETY: the process is a child that was not waited for.
    unsafe { libc::kill(process.id() as i32, libc::SIGINT) };
    let done = process.wait_with_output().unwrap();
    assert_eq!(done.status.code(), Some(128 + libc::SIGINT));
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(said, "isobath: interrupted; the images created so far were removed\n");
    assert!(!chain.exists());
}

#[test]
fn a_chain_whose_index_cannot_be_written_is_removed() {
    let directory = tempfile::tempdir().unwrap();
    let trace = directory.path().join("trace");
    fs::write(&trace, "0 0 512\n1 0 0x100000\n").unwrap();
    let options =
        format!("--layers 2 --size 1M --data zero --distribution trace:{}", trace.display());
    let plain = directory.path().join("plain");
    let _ = generate(&plain, &options).ok();
    // The index would make the active layer longer.
    let longest = fs::metadata(plain.join("layer-00001.qcow2")).unwrap().len();
    let chain = directory.path().join("chain");
    let mut command = Command::new(ISOBATH);
    command.args(["chain", "generate", "--indexed"]).arg(&chain).args(options.split_whitespace());
    // SAFETY: both are system calls.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: longest, rlim_max: longest };
            libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
            libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit);
            Ok(())
        });
    }
    let done = command.output().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{said}");
    assert!(said.contains("File too large"), "{said}");
    assert!(!chain.exists());
}

#[test]
fn on_a_terminal_there_is_progress_unless_it_is_not_wanted() {
    let directory = tempfile::tempdir().unwrap();
    let on_a_terminal = |options: &str, chain: &str| {
        let command = format!("'{ISOBATH}' chain generate --layers 2 --size 1M {options} {chain}");
        let mut script = Command::new("script");
        script.current_dir(directory.path()).args(["-qec", &command, "/dev/null"]);
        run(&mut script).ok().text()
    };
    assert!(on_a_terminal("", "a").contains("(100.00/100%)"));
    assert!(!on_a_terminal("-q", "b").contains("/100%"));
    let elsewhere = generate(&directory.path().join("c"), "--layers 2 --size 1M").ok().text();
    assert!(elsewhere.ends_with("/c/layer-00001.qcow2\n") && !elsewhere.contains('%'));
}

#[test]
fn the_index_has_progress_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    for (options, lines) in [("-p", 1), ("-p --indexed", 2), ("--indexed", 0)] {
        let chain = directory.path().join(format!("chain{options}"));
        let said = generate(&chain, &format!("--layers 3 --size 1M {options}")).ok().text();
        assert_eq!(said.matches("(100.00/100%)\r\n").count(), lines, "{options}: {said}");
        let path = chain.join("layer-00002.qcow2");
        assert_eq!(said.lines().last(), path.to_str(), "{options}: {said}");
    }
}
