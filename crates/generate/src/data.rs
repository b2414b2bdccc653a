//! What the clusters contain.

use isobath_qcow2::GuestOffset;
use rand::rngs::Xoshiro256PlusPlus;
use rand::{Rng, SeedableRng};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// What the clusters contain.
#[derive(Clone, Debug)]
pub enum Data {
    /// Random bytes.
    Random,
    /// Zeroes in allocated clusters, which are holes in the file.
    Zero,
    /// Each sector of 512 bytes says which layer wrote it and where; see [`pattern`].
    Pattern,
    /// The bytes of a raw disk image at the same offset; zeroes past its end.
    Raw(Arc<File>),
}

/// The size of a sector of [`Data::Pattern`] in bytes.
pub const PATTERN_BYTES: usize = 512;

const LINE: usize = 64;
const DIGITS: usize = 16;

/// The sector of [`Data::Pattern`] that `layer` has at a guest offset: eight times the line
/// `isobath layer LAYER offset 0xOFFSET`, padded with spaces to 63 bytes and followed by a newline. The layer is in
/// decimal with at least five digits, the offset in hexadecimal with sixteen.
pub fn pattern(layer: u32, offset: GuestOffset) -> [u8; PATTERN_BYTES] {
    let line = line(layer, offset);
    let mut sector = [0; PATTERN_BYTES];
    for place in sector.chunks_exact_mut(LINE) {
        place.copy_from_slice(&line);
    }
    sector
}

fn line(layer: u32, offset: GuestOffset) -> [u8; LINE] {
    let mut line = [b' '; LINE];
    let text = format!("isobath layer {layer:05} offset 0x{:016x}", offset.get());
    // At most 14 + 10 + 8 + 2 + 16 bytes.
    for (place, byte) in line.iter_mut().zip(text.bytes()) {
        *place = byte;
    }
    line[LINE - 1] = b'\n';
    line
}

/// Generates the contents of one layer's clusters, in ascending order of guest offset.
pub(crate) struct Filler {
    data: Data,
    random: Xoshiro256PlusPlus,
    /// The layer's line at offset 0, and where its digits are.
    line: [u8; LINE],
    digits: usize,
}

impl Filler {
    pub(crate) fn new(data: Data, seed: u64, layer: u32) -> Self {
        // The layer is added to the seed's first number, not to the seed: otherwise, adjacent seeds would share layers.
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed);
        let salt = random.next_u64();
        let random = Xoshiro256PlusPlus::seed_from_u64(salt.wrapping_add(layer.into()));
        let line = line(layer, GuestOffset::new(0));
        let end = line.trim_ascii_end().len();
        Self { data, random, line, digits: end - DIGITS }
    }

    /// Fills a cluster, or the part of the last one before the disk's end: a multiple of 512 bytes.
    pub(crate) fn fill(&mut self, offset: GuestOffset, bytes: &mut [u8]) -> io::Result<()> {
        match &self.data {
            Data::Zero => bytes.fill(0),
            Data::Random => self.random.fill_bytes(bytes),
            Data::Raw(file) => return read(file, offset.get(), bytes),
            Data::Pattern => {
                for (number, sector) in bytes.chunks_mut(PATTERN_BYTES).enumerate() {
                    let mut at = offset.get() + (number * PATTERN_BYTES) as u64;
                    for digit in self.line[self.digits..self.digits + DIGITS].iter_mut().rev() {
                        *digit = b"0123456789abcdef"[(at & 15) as usize];
                        at >>= 4;
                    }
                    for place in sector.chunks_mut(LINE) {
                        place.copy_from_slice(&self.line[..place.len()]);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Fills `bytes` with the file's bytes from `offset` on, and with zeroes past its end.
fn read(file: &File, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], offset + done as u64) {
            Ok(0) => {
                bytes[done..].fill(0);
                break;
            }
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sector_is_eight_lines_of_text() {
        let sector = pattern(42, GuestOffset::new(0x1_2345_6600));
        let text = std::str::from_utf8(&sector).unwrap();
        let lines: Vec<_> = text.lines().map(str::trim_end).collect();
        assert_eq!(lines, ["isobath layer 00042 offset 0x0000000123456600"; 8]);
        assert_eq!(text.len(), 512);
    }

    #[test]
    fn clusters_are_filled_with_the_pattern_of_their_sectors() {
        for layer in [0, 99_999, 100_000, u32::MAX] {
            let mut bytes = [0; 4096];
            let start = 0xffff_ffff_f000;
            Filler::new(Data::Pattern, 0, layer).fill(GuestOffset::new(start), &mut bytes).unwrap();
            for (number, sector) in (0..).zip(bytes.chunks(512)) {
                assert_eq!(sector, pattern(layer, GuestOffset::new(start + 512 * number)));
            }
        }
    }

    #[test]
    fn random_layers_differ_and_repeat() {
        let cluster = |seed, layer| {
            let mut bytes = [0; 512];
            Filler::new(Data::Random, seed, layer).fill(GuestOffset::new(0), &mut bytes).unwrap();
            bytes
        };
        assert_eq!(cluster(1, 1), cluster(1, 1));
        assert_ne!(cluster(1, 1), cluster(1, 2));
        assert_ne!(cluster(1, 1), cluster(2, 1));
        // Neighbouring seeds and layers do not coincide.
        assert_ne!(cluster(1, 2), cluster(2, 1));
    }
}
