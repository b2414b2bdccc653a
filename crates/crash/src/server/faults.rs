//! Faults of a server's history.

use super::kind::Kind;
use crate::host::{self, Effect, Faults, FlushFault, Rule};
use crate::record::Files;
use rand::RngExt;
use rand::rngs::SmallRng;

/// Random faults for these files.
pub fn random(kind: Kind, files: &Files, rng: &mut SmallRng) -> Faults {
    let mut faults = Faults::default();
    let often = match kind {
        Kind::Faults => 1.0,
        Kind::Drops => 0.6,
        _ => 0.12,
    };
    if !rng.random_bool(often) {
        return faults;
    }
    for _ in 0..rng.random_range(1..=4) {
        let mut rule = rule(files, rng);
        if kind == Kind::Drops && rng.random() {
            rule.effect = Effect::Panics;
            rule.times = 1;
        }
        faults.rules.push(rule);
    }
    if rng.random_bool(0.15) {
        let longest = files.iter().map(|(_, content)| content.len()).max().unwrap_or(0);
        faults.space = Some(longest + rng.random_range(0..128 << 10));
        faults.space_ends = rng.random_bool(0.7).then(|| rng.random_range(1..10));
    }
    faults
}

/// A number that is mostly small.
fn few(most: u64, rng: &mut SmallRng) -> u64 {
    rng.random_range(0..=most) >> rng.random_range(0..6)
}

fn rule(files: &Files, rng: &mut SmallRng) -> Rule {
    let file = rng.random_bool(0.5).then(|| rng.random_range(0..files.len()));
    let kinds = [
        host::Kind::Write,
        host::Kind::Write,
        host::Kind::Write,
        host::Kind::Read,
        host::Kind::Read,
        host::Kind::Zeroes,
        host::Kind::Flush,
        host::Kind::Discard,
        host::Kind::Length,
        host::Kind::Clone,
    ];
    let kind = kinds[rng.random_range(0..kinds.len())];
    let times = match rng.random_range(0..10) {
        0 => u64::MAX,
        1..4 => rng.random_range(1..=6),
        _ => 1,
    };
    let mut rule =
        Rule { kind, file, range: None, after: few(400, rng), times, effect: Effect::Slow(1) };
    rule.effect = match kind {
        _ if rng.random_bool(0.15) => Effect::Slow(rng.random_range(20..2000)),
        host::Kind::Flush => Effect::Flush(FlushFault::Forgets),
        host::Kind::Read => {
            // Sectors that cannot be read.
            if let Some(file) = file.filter(|_| rng.random_bool(0.3)) {
                let length = files.get(file).map_or(0, |(_, content)| content.len());
                let at = rng.random_range(0..length.max(1)) / 512 * 512;
                rule.range = Some(at..at + 512);
                rule.times = u64::MAX;
            }
            Effect::Fails(libc::EIO)
        }
        host::Kind::Write | host::Kind::Zeroes => {
            let code = if rng.random_bool(0.3) { libc::ENOSPC } else { libc::EIO };
            if rng.random() { Effect::Short(code) } else { Effect::Fails(code) }
        }
        _ => Effect::Fails(if rng.random() { libc::ENOSPC } else { libc::EIO }),
    };
    rule
}
