//! Ownership from a trace of writes.
//!
//! A trace is text with one write per line: `LAYER GUEST_OFFSET LENGTH`, separated by spaces or tabs. Layers are
//! numbered from 0, the base. Offsets and lengths are in bytes, in decimal, or in hexadecimal with `0x`. The layer gets
//! every cluster that the write touches, and a cluster may be written in several layers. Blank lines, and everything
//! after a `#`, are ignored.

use crate::error::GenerateError;
use crate::ownership::Ownership;
use crate::shape::Chain;
use isobath_qcow2::{ClusterIndex, GuestOffset};
use std::io::BufRead;

/// The longest line that is read, in bytes.
const MAX_LINE: usize = 4096;

/// Reads a trace for a chain.
///
/// # Errors
/// If a line is not a write, names a layer that the chain does not have, or extends past the end of the disk; the error
/// has the line's number. If the trace cannot be read, or does not fit in memory.
pub fn read(chain: &Chain, trace: impl BufRead) -> Result<Ownership, GenerateError> {
    let geometry = chain.geometry()?;
    let mut pairs = Vec::new();
    let mut lines = trace.take(u64::MAX);
    let mut bytes = Vec::new();
    for line in 1.. {
        let bad = |reason: String| GenerateError::Trace { line, reason };
        bytes.clear();
        lines.set_limit(MAX_LINE as u64);
        let length = lines.read_until(b'\n', &mut bytes).map_err(|e| bad(e.to_string()))?;
        if length == 0 {
            break;
        }
        if length == MAX_LINE && bytes.last() != Some(&b'\n') {
            return Err(bad(format!("longer than {MAX_LINE} bytes")));
        }
        let text = std::str::from_utf8(&bytes).map_err(|_| bad("not valid UTF-8".into()))?;
        let Some((layer, offset, length)) = parse(text).map_err(bad)? else { continue };
        if layer >= chain.layers.into() {
            let last = chain.layers - 1;
            return Err(bad(format!("no such layer: {layer}; layers are 0 to {last}")));
        }
        let Some(end) = offset.checked_add(length).filter(|end| *end <= chain.size) else {
            return Err(bad(format!(
                "{length} bytes at {offset} extend past the end of the disk at {}",
                chain.size
            )));
        };
        let first = geometry.cluster_of(GuestOffset::new(offset)).get();
        let after = geometry.clusters_for(end);
        let count = pairs.len() as u64 + (after - first);
        pairs.try_reserve((after - first) as usize).map_err(|_| GenerateError::Memory(count))?;
        pairs.extend((first..after).map(|c| (layer as u32, ClusterIndex::new(c))));
    }
    Ownership::from_pairs(chain.layers, pairs)
}

/// The layer, offset and length of a line; `None` if it is blank or a comment.
fn parse(line: &str) -> Result<Option<(u64, u64, u64)>, String> {
    let line = line.split_once('#').map_or(line, |(before, _)| before);
    let words: Vec<_> = line.split_ascii_whitespace().collect();
    match words.as_slice() {
        [] => Ok(None),
        [layer, offset, length] => {
            let length = number("length", length)?;
            if length == 0 {
                return Err("the length is 0".into());
            }
            Ok(Some((number("layer", layer)?, number("guest offset", offset)?, length)))
        }
        words => {
            Err(format!("expected LAYER GUEST_OFFSET LENGTH, but found {} words", words.len()))
        }
    }
}

fn number(what: &str, word: &str) -> Result<u64, String> {
    let parsed = match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => word.parse(),
    };
    parsed.map_err(|_| format!("the {what} '{}' is not a number", word.escape_debug()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Data;

    fn chain() -> Chain {
        Chain { layers: 3, size: 1 << 20, cluster_bits: 16, data: Data::Zero, seed: 0 }
    }

    fn clusters(trace: &str) -> Vec<Vec<u64>> {
        let ownership = read(&chain(), trace.as_bytes()).unwrap();
        let of = |layer| ownership.clusters_of(layer).iter().map(|c| c.get()).collect();
        (0..3).map(of).collect()
    }

    #[test]
    fn a_write_gives_its_layer_every_cluster_it_touches() {
        let trace =
            "# a comment\n\n0 0 1048576\n2\t65535 2 # two clusters\n 1 0x20000 0x10000\n2 0 1";
        let all = (0..16).collect::<Vec<_>>();
        assert_eq!(clusters(trace), [all, vec![2], vec![0, 1]]);
        assert_eq!(clusters(""), [vec![], vec![], vec![0; 0]]);
    }

    #[test]
    fn bad_lines_are_named_by_number() {
        for (line, reason) in [
            ("0 0", "2 words"),
            ("0 0 1 1", "4 words"),
            ("x 0 1", "layer 'x'"),
            ("0 -1 1", "guest offset '-1'"),
            ("0 0 0x", "length '0x'"),
            ("0 0 0", "length is 0"),
            ("3 0 1", "layers are 0 to 2"),
            ("0 1048576 1", "the end of the disk at 1048576"),
            ("0 18446744073709551615 2", "the end of the disk"),
            ("0 \u{1b}[2J 2", "'\\u{1b}[2J'"),
            (&" ".repeat(5000), "longer than 4096 bytes"),
        ] {
            let trace = format!("0 0 1\n\n{line}\n0 0 1\n");
            let error = read(&chain(), trace.as_bytes()).unwrap_err().to_string();
            assert!(error.starts_with("line 3: ") && error.contains(reason), "{line}: {error}");
        }
        assert!(read(&chain(), &b"0 0 1\n\xff\n"[..]).unwrap_err().to_string().contains("line 2"));
    }
}
