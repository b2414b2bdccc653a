//! The main job, shown on the terminal: a chain of ten layers by QEMU and Isobath, served by
//! `isobath serve`, with a Linux guest that boots from it, and then from a store. `make demo` runs it.

#![allow(clippy::expect_used, reason = "the demo fails by a panic")]

use isobath_testkit::chain::Commands;
use isobath_testkit::guest::Guest;
use isobath_testkit::process::{Ready, Server, run};
use isobath_testkit::scenario::RootChain;
use isobath_testkit::seed::Seed;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

const LAYERS: usize = 10;

fn main() {
    let Some(isobath) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("usage: demo PATH-OF-ISOBATH");
        std::process::exit(2);
    };
    // Removed at the end, and when something panics.
    let directory = tempfile::Builder::new().prefix("isobath-demo").tempdir().expect("a directory");
    let seed = Seed::new();

    step("A chain of ten layers, by qemu-img and isobath in turn");
    let (qemu, own) = (Commands::qemu(), Commands::isobath(&isobath));
    let root = RootChain::make(directory.path(), LAYERS, &[&own, &qemu], &seed);
    println!(
        "  Each is the backing file of the next; # marks what the guest sees of its part of a file."
    );
    print!("{}", root.picture(56));

    step("isobath serves the active layer");
    let socket = directory.path().join("nbd.sock");
    let mut command = Command::new(&isobath);
    let address = format!("unix:{}", socket.display());
    command.arg("serve").arg(root.chain.active()).args(["--nbd", &address]);
    let server = Server::start(&mut command, Ready::Line("nbd.sock"));
    print!("{}", indented(&server.output()));

    step("A Linux guest boots from it, checks what the layers hold, writes with fsync, powers off");
    let start = Instant::now();
    let done = Guest::new().nbd(&socket, "").root().run(RootChain::workload());
    print!("{}", indented(&done.output));
    println!("  powered off after {:.1} s", start.elapsed().as_secs_f32());

    step("isobath is stopped, and QEMU and e2fsck judge what is left");
    let stopped = server.stop();
    assert!(stopped.status.success(), "{}", stopped.report());
    for line in root.check(&done) {
        println!("  ok: {line}");
    }

    step("The chain is pushed to a store, here a directory, and served from there with an overlay");
    let store = directory.path().join("store");
    std::fs::create_dir(&store).expect("a directory");
    let chain = format!("file://{}/vm", store.display());
    let mut push = Command::new(&isobath);
    print!("{}", indented(&run(push.arg("push").arg(root.chain.active()).arg(&chain)).ok().text()));
    let mut command = Command::new(&isobath);
    command.args(["serve", &chain, "--nbd", &address, "--overlay"]);
    command.arg(directory.path().join("overlay.qcow2"));
    command.arg("--cache-dir").arg(directory.path().join("cache"));
    let server = Server::start(&mut command, Ready::Line("nbd.sock"));
    print!("{}", indented(&server.output()));

    step("A guest boots from the store, and does the same once more");
    let start = Instant::now();
    let again = Guest::new().nbd(&socket, "").root().run(RootChain::workload());
    print!("{}", indented(&again.output));
    println!("  powered off after {:.1} s", start.elapsed().as_secs_f32());
    let stopped = server.stop();
    assert!(stopped.status.success(), "{}", stopped.report());
    assert_eq!(again.values("field"), done.values("field"), "what the layers hold");
    let mut verify = Command::new(&isobath);
    let verified = run(verify.args(["remote", "verify", &chain])).ok().text();
    println!("  ok: the guest read what the layers hold\n  ok: {}", verified.trim());
}

fn step(title: &str) {
    println!("\n== {title}");
}

fn indented(text: &str) -> String {
    let lines: Vec<_> = text.lines().filter(|line| !line.is_empty()).collect();
    format!("  | {}\n", lines.join("\n  | "))
}
