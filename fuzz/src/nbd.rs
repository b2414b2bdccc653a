//! The NBD server's parsers.

use crate::take;
use isobath_export::nbd::ExportedBitmap;
use isobath_export::nbd::context::{Context, Contexts};
use isobath_export::nbd::handshake::{Encryption, ExportInfo, Handshake, MAX_OPTION, Outcome};
use isobath_export::nbd::request::{Command, Request, Terms};
use isobath_export::nbd::wire::{OPTION_REPLY_MAGIC, option, option_reply};
use std::sync::Arc;

fn exports() -> [ExportInfo; 2] {
    let export = |name: &str, read_only| ExportInfo {
        name: name.into(),
        description: "a disk".into(),
        size: 1 << 30,
        read_only,
        preferred_block: 65536,
        allocation_depth: true,
        multi_conn: true,
        bitmaps: Arc::new([ExportedBitmap::new("b", [])]),
    };
    [export("disk", false), export("", true)]
}

/// The handshake up to `STARTTLS` and after it: where encryption is required a client learns nothing before it, and
/// what was agreed on before it does not count, however the input is cut.
pub fn nbd_starttls(mut input: &[u8]) {
    let [piece, required] = take(&mut input);
    let piece = usize::from(piece) + 1;
    let required = required & 1 != 0;
    let encryption = if required { Encryption::Required } else { Encryption::Optional };
    let exports = exports();
    let mut handshake = Handshake::new(encryption);
    // The same from `STARTTLS` on, by a client that has sent nothing before but its flags.
    let mut fresh: Option<Handshake> = None;
    let mut flags: Option<[u8; 4]> = None;
    let mut unread = Vec::new();
    for part in input.chunks(piece) {
        unread.extend_from_slice(part);
        flags = flags.or_else(|| unread.first_chunk().copied());
        loop {
            let mut output = Vec::new();
            let result = handshake.advance(&exports, &unread, &mut output);
            if let Some(fresh) = &mut fresh {
                let mut other = Vec::new();
                assert_eq!(result, fresh.advance(&exports, &unread, &mut other));
                assert_eq!(output, other, "something was remembered from before STARTTLS");
            }
            let Ok(step) = result else { return };
            if required && fresh.is_none() {
                only_refusals(&output);
            }
            unread.drain(..step.consumed);
            match step.outcome {
                Outcome::More if step.consumed > 0 && !unread.is_empty() => {}
                Outcome::More => break,
                Outcome::Aborted => return,
                Outcome::StartTls => {
                    assert!(unread.is_empty(), "plain bytes are left behind STARTTLS");
                    assert!(fresh.is_none(), "STARTTLS was accepted twice");
                    let mut other = Handshake::new(Encryption::Established);
                    let greeting = flags.unwrap_or_default();
                    other.advance(&exports, &greeting, &mut Vec::new()).unwrap();
                    fresh = Some(other);
                    break;
                }
                Outcome::Transmission(_) => {
                    assert!(!required || fresh.is_some(), "an export was chosen without TLS");
                    return;
                }
            }
        }
    }
}

/// Checks that replies only refuse, or acknowledge `STARTTLS` or `ABORT`.
fn only_refusals(mut output: &[u8]) {
    while !output.is_empty() {
        assert_eq!(take::<8>(&mut output), OPTION_REPLY_MAGIC.to_be_bytes());
        let kind = u32::from_be_bytes(take(&mut output));
        let reply = u32::from_be_bytes(take(&mut output));
        let length = u32::from_be_bytes(take(&mut output)) as usize;
        let acknowledged =
            reply == option_reply::ACK && matches!(kind, option::STARTTLS | option::ABORT);
        assert!(acknowledged || reply & option_reply::ERROR != 0, "option {kind} was answered");
        output = &output[length..];
    }
}

/// The handshake: whatever a client sends, in pieces of any size, it makes progress and its replies
/// stay bounded.
pub fn nbd_handshake(mut input: &[u8]) {
    let [piece] = take(&mut input);
    let piece = usize::from(piece) + 1;
    let exports = exports();
    let mut handshake = Handshake::default();
    let mut unread = Vec::new();
    for part in input.chunks(piece) {
        unread.extend_from_slice(part);
        loop {
            let mut output = Vec::new();
            let Ok(step) = handshake.advance(&exports, &unread, &mut output) else { return };
            assert!(step.consumed <= unread.len() && output.len() < 4 * MAX_OPTION);
            unread.drain(..step.consumed);
            match step.outcome {
                Outcome::More if step.consumed > 0 && !unread.is_empty() => {}
                Outcome::More => break,
                Outcome::Aborted => return,
                Outcome::StartTls => panic!("no TLS was offered"),
                Outcome::Transmission(agreement) => {
                    assert!(agreement.export < exports.len());
                    return;
                }
            }
        }
        assert!(unread.len() <= MAX_OPTION + 16 + piece, "input is kept without an end");
    }
}

/// A request: what is accepted lies within the export.
pub fn nbd_request(mut input: &[u8]) {
    let [flags] = take(&mut input);
    let size = u64::from_be_bytes(take(&mut input));
    let mut contexts = Contexts::default();
    if flags & 4 != 0 {
        contexts.insert(Context::Allocation);
    }
    let structured = flags & 2 != 0;
    let terms = Terms { size, read_only: flags & 1 != 0, structured, contexts };
    let header: [u8; Request::SIZE] = take(&mut input);
    let Ok(request) = Request::parse(&header) else { return };
    assert_eq!(request.encode(), header);
    let (offset, length) = match request.check(&terms) {
        Err(_) | Ok(Command::Disconnect | Command::Flush) => return,
        Ok(
            Command::Write { offset, length, .. }
            | Command::Trim { offset, length, .. }
            | Command::WriteZeroes { offset, length, .. },
        ) => {
            assert!(!terms.read_only);
            (offset, length)
        }
        Ok(
            Command::Read { offset, length }
            | Command::Cache { offset, length }
            | Command::BlockStatus { offset, length, .. },
        ) => (offset, length),
    };
    assert!(offset.checked_add(u64::from(length)).is_some_and(|end| end <= size));
}
