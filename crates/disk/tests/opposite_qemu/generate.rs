//! Random histories.

use crate::history::{Base, DataFile, Fill, History, ImageOptions, Op, Session, Side, Step};
use isobath_disk::Preallocation;
use rand::rngs::StdRng;
use rand::{Rng, RngExt};

/// Numbers of [`Fill::Noise`].
pub(crate) const NOISES: u8 = 8;

/// A history of one to five layers.
pub(crate) fn history(rng: &mut StdRng) -> History {
    let twin = rng.random_bool(0.25);
    // Without discards and races both sides must end with the same bytes.
    let exact = twin && rng.random_bool(0.6);
    let small = rng.random_range(0..100);
    let most: u64 = match small {
        0..60 => 2 << 20,
        60..92 => 8 << 20,
        _ => 64 << 20,
    };
    let mut size = rng.random_range(1..=most / 512) * 512;
    let base = match rng.random_range(0..10) {
        0..5 => Base::None,
        5..7 => Base::Raw(rng.random_range(1..=size)),
        _ => {
            let mut options = image_options(rng, false);
            options.data_file = DataFile::Inside;
            options.preallocation = Preallocation::Off;
            let size = rng.random_range(1..=size / 512) * 512;
            Base::Converted(options, size, rng.random_bool(0.7))
        }
    };
    let mut steps = Vec::new();
    for layer in 0..rng.random_range(1..=4) {
        let backed = layer > 0 || base != Base::None;
        let options = image_options(rng, backed);
        let by = side(rng);
        let given = match rng.random_range(0..10) {
            _ if layer == 0 => Some(size),
            0 => Some(rng.random_range(1..=most / 512) * 512),
            _ => None,
        };
        size = given.unwrap_or(size);
        steps.push(Step::Layer { by, options, size: given });
        for _ in 0..rng.random_range(1..=4) {
            between(rng, &mut steps, &mut size, most, layer);
            stretch(rng, &mut steps, size, options.cluster(), exact);
        }
    }
    History { twin, base, steps }
}

fn side(rng: &mut StdRng) -> Side {
    if rng.random() { Side::Isobath } else { Side::Qemu }
}

fn image_options(rng: &mut StdRng, backed: bool) -> ImageOptions {
    let mut options = ImageOptions { v2: rng.random_bool(0.15), ..ImageOptions::default() };
    options.cluster_bits = match rng.random_range(0..10) {
        0..3 => 16,
        3..6 => rng.random_range(9..=12),
        _ => rng.random_range(9..=21),
    };
    if options.v2 {
        return options;
    }
    if rng.random_bool(0.5) {
        options.refcount_order = rng.random_range(0..=6);
    }
    options.extended_l2 = rng.random_bool(0.35);
    if options.extended_l2 {
        options.cluster_bits = options.cluster_bits.max(rng.random_range(14..=17));
    }
    options.zstd = rng.random_bool(0.4);
    options.lazy = rng.random_bool(0.2);
    options.data_file = match rng.random_range(0..10) {
        0 => DataFile::External,
        1 if !backed => DataFile::Raw,
        _ => DataFile::Inside,
    };
    let may_preallocate = !backed || options.extended_l2;
    if may_preallocate && rng.random_bool(0.2) {
        use Preallocation::{Falloc, Full, Metadata};
        let kinds: &[_] = if backed { &[Metadata] } else { &[Metadata, Falloc, Full] };
        options.preallocation = kinds[rng.random_range(0..kinds.len())];
    }
    options
}

/// What may happen between two openings.
fn between(rng: &mut StdRng, steps: &mut Vec<Step>, size: &mut u64, most: u64, layer: u64) {
    match rng.random_range(0..100) {
        0..10 => {
            *size = match rng.random_range(0..4) {
                0 => rng.random_range(1..=most / 512) * 512,
                1 => *size + rng.random_range(0..200) * 512,
                2 => (*size).saturating_sub(rng.random_range(0..200) * 512).max(512),
                _ => size.next_multiple_of(1 << rng.random_range(12..=20)),
            };
            steps.push(Step::Resize { by: side(rng), size: *size });
        }
        10..22 => steps.push(Step::Snapshot),
        22..26 => steps.push(Step::Apply),
        26..29 => steps.push(Step::Delete),
        29..37 => steps.push(Step::Bitmap(1 << rng.random_range(12..=17))),
        37..41 if layer > 0 => steps.push(Step::Commit),
        _ => {}
    }
}

fn stretch(rng: &mut StdRng, steps: &mut Vec<Step>, size: u64, cluster: u64, exact: bool) {
    let by = if rng.random_bool(0.6) { Side::Isobath } else { Side::Qemu };
    let width = [1, 2, 8, 32][rng.random_range(0..4)];
    let map_cache = if rng.random() { 64 << 10 } else { 4 << 20 };
    let dropped = rng.random_bool(0.1);
    let direct = rng.random_bool(0.2);
    let two_threads = rng.random_bool(0.3);
    steps.push(Step::Open(Session { by, width, map_cache, direct, two_threads, dropped }));
    // Some stretches keep to a place, so that requests meet the traces of others.
    let window = if rng.random() {
        let length = size.min(cluster * rng.random_range(2..40));
        let start = rng.random_range(0..=size - length);
        (start, length)
    } else {
        (0, size)
    };
    for _ in 0..rng.random_range(1..90) {
        steps.push(Step::Op(op(rng, window, cluster, exact)));
    }
}

fn op(rng: &mut StdRng, window: (u64, u64), cluster: u64, exact: bool) -> Op {
    let (offset, length) = range(rng, window, cluster);
    match rng.random_range(0..100) {
        0..45 => Op::Write { offset, length, fill: fill(rng) },
        45..62 => Op::Zero { offset, length, unmap: rng.random() },
        62..72 if !exact => Op::Discard { offset, length },
        72..80 => {
            let count = rng.random_range(1..=((1 << 20) / cluster).clamp(1, 8));
            Op::Compressed { cluster: offset / cluster, count, fill: fill(rng) }
        }
        80..84 if !exact => {
            let step = if rng.random() { 512 } else { rng.random_range(1..5000) };
            let length = step * rng.random_range(1..5);
            Op::Race { offset, length, step, count: rng.random_range(2..6) }
        }
        84..95 => Op::Read { offset, length },
        _ => Op::Flush,
    }
}

fn fill(rng: &mut StdRng) -> Fill {
    match rng.random_range(0..10) {
        0 => Fill::Byte(0),
        1..4 => Fill::Byte(rng.random()),
        _ => Fill::Noise(rng.random_range(0..NOISES)),
    }
}

/// A range of a few bytes or of many clusters, aligned or not, anywhere or at the end.
fn range(rng: &mut StdRng, (start, space): (u64, u64), cluster: u64) -> (u64, u64) {
    let most = match rng.random_range(0..10) {
        0 => 1 << 20,
        1..4 => (4 * cluster).min(1 << 20),
        _ => 1 << 14,
    };
    let end = start + space;
    let mut offset = start + rng.random_range(0..space);
    let mut length = rng.random_range(1..=most);
    let unit = match rng.random_range(0..8) {
        0..3 => cluster,
        3 => 512,
        4 => 4096,
        5 => cluster / 32,
        _ => 1,
    }
    .max(1);
    if rng.random() {
        offset = offset / unit * unit;
    }
    if rng.random() {
        length = length.next_multiple_of(unit);
    }
    if rng.random_bool(0.05) {
        offset = end.saturating_sub(length);
    }
    (offset, length.min(end - offset).max(1))
}

/// Random bytes, of an odd number so that a shift shows.
pub(crate) fn noise(rng: &mut impl Rng) -> Vec<u8> {
    let mut bytes = vec![0; 4099];
    rng.fill_bytes(&mut bytes);
    bytes
}
