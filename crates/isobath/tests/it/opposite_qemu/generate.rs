//! Random histories.

use crate::opposite_qemu::history::{
    Base, DataFile, History, ImageOptions, Job, JobKind, Session, Side, Step,
};
use crate::opposite_qemu::op::{Fill, Op};
use isobath_disk::{MetadataMode, Preallocation};
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
    let mut options = ImageOptions::default();
    let mut last = Vec::new();
    for layer in 0..rng.random_range(1..=5) {
        let backed = layer > 0 || base != Base::None;
        // As snapshots are in the field: the same options, and often the same offsets.
        let related = layer > 0 && rng.random_bool(0.5);
        if related && rng.random_bool(0.4) {
            steps.push(Step::Copy);
        } else {
            if !related {
                options = image_options(rng, backed);
            }
            let by = side(rng);
            let given = match rng.random_range(0..10) {
                _ if layer == 0 => Some(size),
                0 => Some(rng.random_range(1..=most / 512) * 512),
                _ => None,
            };
            size = given.unwrap_or(size);
            steps.push(Step::Layer { by, options, size: given });
        }
        for _ in 0..rng.random_range(1..=4) {
            between(rng, &mut steps, &mut size, most, layer);
            stretch(rng, &mut steps, size, options.cluster(), exact, backed, &mut last);
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
        37..41 if layer > 0 => steps.push(Step::Commit { base: rng.random() }),
        41..45 if layer > 0 => steps.push(Step::Rebase { onto: rng.random() }),
        45..48 if layer > 0 => steps.push(Step::Flatten { compressed: rng.random() }),
        _ => {}
    }
}

/// One opening. Some do what the last one did, with other bytes.
fn stretch(
    rng: &mut StdRng,
    steps: &mut Vec<Step>,
    size: u64,
    cluster: u64,
    exact: bool,
    backed: bool,
    last: &mut Vec<Op>,
) {
    let job = rng.random_bool(if backed { 0.45 } else { 0.05 }).then(|| Job {
        kind: match rng.random_range(0..12) {
            0..5 => JobKind::Stream,
            5..10 => JobKind::Commit,
            10 => JobKind::Mirror,
            _ => JobKind::MirrorTop,
        },
        top: if rng.random() { 0 } else { rng.random() },
        base: rng.random(),
        warm: rng.random_bool(0.7),
    });
    let session = Session {
        by: if rng.random_bool(0.6) { Side::Isobath } else { Side::Qemu },
        job,
        metadata: MetadataMode::ALL[rng.random_range(0..MetadataMode::ALL.len())],
        program: rng.random_bool(0.15),
        width: [1, 2, 8, 32][rng.random_range(0..4)],
        map_cache: if rng.random() { 64 << 10 } else { 4 << 20 },
        direct: rng.random_bool(0.2),
        two_threads: rng.random_bool(0.3),
        dropped: rng.random_bool(0.1),
    };
    steps.push(Step::Open(session));
    // Some stretches keep to a place, so that requests meet the traces of others.
    let window = if rng.random() {
        let length = size.min(cluster * rng.random_range(2..40));
        let start = rng.random_range(0..=size - length);
        (start, length)
    } else {
        (0, size)
    };
    let ops: Vec<Op> = if !last.is_empty() && rng.random_bool(0.4) {
        let kept = last.iter().filter(|_| rng.random_bool(0.8)).copied().collect::<Vec<_>>();
        kept.into_iter().map(|op| op.with_fill(fill(rng))).collect()
    } else {
        let (most, large) = match rng.random_range(0..20) {
            0..10 => (90, true),
            10..16 => (300, false),
            _ => (1500, false),
        };
        let count = rng.random_range(1..most);
        (0..count).map(|_| op(rng, window, cluster, exact, large)).collect()
    };
    last.clone_from(&ops);
    steps.extend(ops.into_iter().map(Step::Op));
}

/// A request. Of many in a row only few are `large`, for they take their time.
fn op(rng: &mut StdRng, window: (u64, u64), cluster: u64, exact: bool, large: bool) -> Op {
    let large = large || rng.random_ratio(1, 16);
    let (offset, length) = range(rng, window, cluster, large);
    match rng.random_range(0..100) {
        0..45 => Op::Write { offset, length, fill: fill(rng) },
        45..62 => Op::Zero { offset, length, unmap: rng.random() },
        62..72 if !exact => Op::Discard { offset, length },
        72..80 if large || cluster <= 64 << 10 => {
            let most = if large { ((1 << 20) / cluster).clamp(1, 8) } else { 1 };
            let count = rng.random_range(1..=most);
            Op::Compressed { cluster: offset / cluster, count, fill: fill(rng) }
        }
        80..84 if !exact => {
            let step = if rng.random() { 512 } else { rng.random_range(1..5000) };
            let length = step * rng.random_range(1..5);
            Op::Race { offset, length, step, count: rng.random_range(2..6) }
        }
        84..95 => Op::Read { offset, length },
        95 => Op::Flush,
        _ => Op::Write { offset, length: length.min(1 << 14), fill: fill(rng) },
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
fn range(rng: &mut StdRng, (start, space): (u64, u64), cluster: u64, large: bool) -> (u64, u64) {
    let most = match rng.random_range(0..10) {
        0 if large => 1 << 20,
        1..4 if large => (4 * cluster).min(1 << 20),
        0..4 => (4 * cluster).min(1 << 15),
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
    if rng.random() && (large || unit <= 1 << 16) {
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
