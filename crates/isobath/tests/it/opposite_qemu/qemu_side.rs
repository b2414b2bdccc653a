//! Operations through one `qemu-io`.

use crate::opposite_qemu::op::{Fill, Op};
use isobath_testkit::{args, process::run_program, qemu};
use std::ffi::OsString;
use std::path::Path;

/// Commands on one command line.
const COMMANDS: usize = 500;

/// Opens the image, carries out the batches one after another, closes it, or flushes and is
/// killed. What is in a batch goes on together, as far as `qemu-io` can.
///
/// Compressed writes have an opening of their own: where QEMU 7.2 has freed the host cluster in which
/// it packed compressed data, and used it anew, it still packs more there.
pub(crate) fn session(
    image: &Path,
    noises: &Path,
    batches: &[Vec<Op>],
    size: u64,
    cluster: u64,
    killed: bool,
) {
    let mut commands = Vec::new();
    for batch in batches {
        let (alone, together): (Vec<Op>, Vec<Op>) =
            batch.iter().partition(|op| matches!(op, Op::Compressed { .. }));
        let many = together.len() > 1;
        for op in together {
            add(&mut commands, op, many, noises, size, cluster);
        }
        if many {
            commands.push("aio_flush".to_owned());
        }
        for op in alone {
            run(image, &std::mem::take(&mut commands));
            add(&mut commands, op, false, noises, size, cluster);
            run(image, &std::mem::take(&mut commands));
        }
    }
    if killed {
        commands.extend(["flush".to_owned(), format!("sigraise {}", libc::SIGKILL)]);
    }
    run(image, &commands);
}

/// Runs commands, of which the last may kill the program.
fn run(image: &Path, commands: &[String]) {
    for part in commands.chunks(COMMANDS) {
        let mut arguments = args!["-f", "qcow2", "-t", "unsafe", "-d", "unmap"];
        for command in part {
            arguments.extend([OsString::from("-c"), command.into()]);
        }
        arguments.push(image.into());
        let done = run_program(qemu::program("qemu-io"), arguments);
        let killed = part.last().is_some_and(|last| last.starts_with("sigraise"));
        let expected = if killed { -1 } else { 0 };
        assert!(done.code() == expected, "qemu-io failed\n{}", done.report());
        assert!(!done.text().contains("failed"), "qemu-io failed\n{}", done.report());
    }
}

fn add(commands: &mut Vec<String>, op: Op, many: bool, noises: &Path, size: u64, cluster: u64) {
    let aio = if many { "aio_" } else { "" };
    let source = |fill: Fill| match fill {
        Fill::Byte(byte) => format!("-P {byte}"),
        Fill::Noise(number) => format!("-s {}/noise{number}", noises.display()),
    };
    let (offset, length) = op.range(size, cluster);
    match op {
        Op::Write { fill: Fill::Byte(byte), .. } => {
            commands.push(format!("{aio}write -P {byte} {offset} {length}"));
        }
        Op::Write { fill, .. } => {
            commands.push(format!("write {} {offset} {length}", source(fill)));
        }
        Op::Zero { unmap, .. } => {
            let unmap = if unmap { "-u " } else { "" };
            commands.push(format!("{aio}write -z {unmap}{offset} {length}"));
        }
        Op::Discard { .. } => commands.push(format!("discard {offset} {length}")),
        Op::Compressed { fill, .. } => {
            // QEMU compresses into unallocated clusters only.
            commands.push(format!("discard {offset} {length}"));
            commands.push(format!("write -c {} {offset} {length}", source(fill)));
        }
        Op::Read { .. } => commands.push(format!("{aio}read {offset} {length}")),
        Op::Race { .. } => {
            for (offset, length, byte) in op.racers() {
                commands.push(format!("write -P {byte} {offset} {length}"));
            }
        }
        Op::Flush => commands.push("flush".into()),
    }
}
