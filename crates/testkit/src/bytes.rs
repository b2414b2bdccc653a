//! Fast comparisons of whole disks: in tests compiled without optimisation, a loop over single bytes is slow.

/// The position of the first difference; the length of the shorter one if it is a prefix of the other.
pub fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    if one == other {
        return None;
    }
    let differ = one.iter().zip(other).position(|(one, other)| one != other);
    Some(differ.unwrap_or(one.len().min(other.len())))
}

/// The position of the first byte that is not `byte`.
pub fn first_other_than(byte: u8, bytes: &[u8]) -> Option<usize> {
    const PART: usize = 4096;
    let expected = [byte; PART];
    let same = |part: &&[u8]| **part == expected[..part.len()];
    let start = PART * bytes.chunks(PART).take_while(same).count();
    let at = bytes.get(start..)?.iter().position(|other| *other != byte)?;
    Some(start + at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_found_wherever_it_is() {
        let disk = vec![7; 10_000];
        assert_eq!((first_difference(&disk, &disk), first_other_than(7, &disk)), (None, None));
        assert_eq!((first_difference(&[], &[]), first_other_than(7, &[])), (None, None));
        for at in [0, 1, 4095, 4096, 8191, 9999] {
            let mut other = disk.clone();
            other[at] = 8;
            assert_eq!(first_difference(&disk, &other), Some(at));
            assert_eq!(first_other_than(7, &other), Some(at));
            assert_eq!(first_difference(&disk, &disk[..at]), Some(at));
        }
    }
}
