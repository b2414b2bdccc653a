//! Bytes changed at random, in the tables.

use super::images::{Image, kinds};
use super::survive::survive;
use isobath_testkit::seed::Seed;
use rand::rngs::StdRng;
use rand::{Rng, RngExt};

/// Numbers at which checks are made.
const EDGES: [u64; 12] = [
    0,
    1,
    0x1000,
    0x3000,
    1 << 31,
    1 << 32,
    (1 << 56) - 512,
    1 << 62,
    1 << 63,
    1 << 63 | 0x4000,
    0x3fff_ffff_ffff_ffff,
    u64::MAX,
];

fn damage(image: &mut Image, rng: &mut StdRng) {
    for _ in 0..rng.random_range(1..5) {
        let range = image.tables[rng.random_range(0..image.tables.len())].clone();
        if range.len() < 16 {
            continue;
        }
        // The start of a table is what is used.
        let space = if rng.random() { range.len().min(128) } else { range.len() };
        let place = range.start + rng.random_range(0..space - 8);
        match rng.random_range(0..4) {
            0 => image.bytes[place] ^= 1 << rng.random_range(0..8),
            1 => image.bytes[place] = rng.random(),
            2 => {
                let place = place / 8 * 8;
                image.put64(place, EDGES[rng.random_range(0..EDGES.len())]);
            }
            // An entry from elsewhere: tables that overlap.
            _ => {
                let from = image.tables[rng.random_range(0..image.tables.len())].clone();
                let from =
                    from.start / 8 * 8 + 8 * rng.random_range(0..(from.len() / 8).clamp(1, 16));
                if from + 8 <= image.bytes.len() {
                    let entry = image.get64(from);
                    image.put64(place / 8 * 8, entry);
                }
            }
        }
    }
    if rng.random_bool(0.1) {
        let length = rng.random_range(0..image.bytes.len());
        image.bytes.truncate(length);
    }
}

#[test]
fn images_damaged_at_random_are_survived() {
    let seed = Seed::new();
    let kinds = futures_executor::block_on(kinds());
    let count: u64 =
        std::env::var("ISOBATH_HOSTILE_IMAGES").map_or(400, |text| text.parse().unwrap());
    for number in 0..count {
        let value = seed.value().wrapping_add(number);
        let mut rng = Seed::from(value).rng();
        let mut image = kinds[rng.random_range(0..kinds.len())].clone();
        damage(&mut image, &mut rng);
        survive(&format!("image of ISOBATH_SEED={value:#x}"), &image.bytes);
    }
    let mut rng = seed.rng();
    for _ in 0..50 {
        let mut noise = vec![0; rng.random_range(0..5000)];
        rng.fill_bytes(&mut noise);
        if noise.len() > 8 {
            noise[..8].copy_from_slice(b"QFI\xfb\0\0\0\x03");
        }
        survive("noise", &noise);
    }
}
