//! The NBD server's parsers.

use crate::take;
use isobath_export::nbd::ExportedBitmap;
use isobath_export::nbd::context::{Context, Contexts};
use isobath_export::nbd::handshake::{ExportInfo, Handshake, MAX_OPTION, Outcome};
use isobath_export::nbd::request::{Command, Request, Terms};
use std::sync::Arc;

/// The handshake: whatever a client sends, in pieces of any size, it makes progress and its replies
/// stay bounded.
pub fn nbd_handshake(mut input: &[u8]) {
    let [piece] = take(&mut input);
    let piece = usize::from(piece) + 1;
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
    let exports = [export("disk", false), export("", true)];
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
