//! Finding zeroes in data.

/// The granularity at which zeroes are detected, unless shorter runs are requested.
const GRAIN: usize = 4096;

/// Whether all bytes are zero.
pub fn is_zero(bytes: &[u8]) -> bool {
    // The first bytes decide in most cases; the rest is combined in a way that compilers vectorise.
    let (head, rest) = bytes.split_at(bytes.len().min(16));
    head.iter().all(|byte| *byte == 0)
        && rest.chunks(1024).all(|chunk| chunk.iter().fold(0, |sum, byte| sum | byte) == 0)
}

/// Splits the bytes at `offset` of a disk into runs: whether a run is zero, and its length. Only runs of at least
/// `least` zero bytes, a multiple of 512, count.
pub(super) fn runs(bytes: &[u8], offset: u64, least: u64) -> Vec<(bool, usize)> {
    let grain = if least.is_multiple_of(GRAIN as u64) { GRAIN } else { 512 };
    let mut runs: Vec<(bool, usize)> = Vec::new();
    let mut rest = bytes;
    // Grains are aligned on the disk.
    let mut length = grain - (offset % grain as u64) as usize;
    while !rest.is_empty() {
        let (part, after) = rest.split_at(length.min(rest.len()));
        let zero = is_zero(part);
        match runs.last_mut() {
            Some((last, total)) if *last == zero => *total += part.len(),
            _ => runs.push((zero, part.len())),
        }
        rest = after;
        length = grain;
    }
    let mut merged: Vec<(bool, usize)> = Vec::with_capacity(runs.len());
    let count = runs.len();
    for (index, (zero, length)) in runs.into_iter().enumerate() {
        // At an edge the run may continue outside this buffer.
        let inner = index > 0 && index + 1 < count;
        let zero = zero && (length as u64 >= least || !inner);
        match merged.last_mut() {
            Some((last, total)) if *last == zero => *total += length,
            _ => merged.push((zero, length)),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_are_found_from_the_least_length_on() {
        let mut bytes = vec![0; 64 << 10];
        assert_eq!(runs(&bytes, 0, 4096), [(true, 64 << 10)]);
        bytes[5000] = 1;
        bytes[20_000] = 1;
        let expected = [(true, 4096), (false, 4096), (true, 8192), (false, 4096), (true, 45_056)];
        assert_eq!(runs(&bytes, 0, 4096), expected);
        assert_eq!(runs(&bytes, 0, 12_288), [(true, 4096), (false, 16_384), (true, 45_056)]);
        assert_eq!(runs(&bytes, 0, 512)[..3], [(true, 4608), (false, 512), (true, 14_848)]);
        // Grains are aligned on the disk, not in the buffer.
        assert_eq!(runs(&bytes, 512, 4096)[..2], [(true, 3584), (false, 4096)]);
        assert!(runs(&[], 0, 4096).is_empty());
    }

    #[test]
    fn a_byte_anywhere_counts() {
        for at in [0, 15, 16, 1039, 1040, 4095] {
            let mut bytes = vec![0; 4096];
            assert!(is_zero(&bytes));
            bytes[at] = 1;
            assert!(!is_zero(&bytes), "{at}");
        }
    }
}
