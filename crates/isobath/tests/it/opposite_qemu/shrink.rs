//! From a history that fails to a small one that fails in the same way.

use crate::opposite_qemu::history::{Base, History, ImageOptions, Job, Session, Step};
use crate::opposite_qemu::op::{Fill, Op};
use isobath_disk::MetadataMode;

/// Leaves out of the history what is not needed for `fails` to hold, and simplifies the rest.
/// `fails` is asked at most `budget` times.
pub(crate) fn shrink(
    history: &History,
    budget: usize,
    fails: impl FnMut(&History) -> bool,
) -> History {
    let mut search = Search { best: history.clone(), left: budget, fails };
    loop {
        let before = search.best.clone();
        search.without_parts();
        search.simpler();
        if search.left == 0
            || (before.steps == search.best.steps && before.base == search.best.base)
        {
            return search.best;
        }
    }
}

struct Search<F> {
    best: History,
    left: usize,
    fails: F,
}

impl<F: FnMut(&History) -> bool> Search<F> {
    fn offer(&mut self, candidate: History) -> bool {
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        let fails = (self.fails)(&candidate);
        if fails {
            self.best = candidate;
        }
        fails
    }

    /// Leaves out runs of steps, long ones first.
    fn without_parts(&mut self) {
        let mut length = self.best.steps.len().div_ceil(2);
        loop {
            // From the end: what follows the failure goes first.
            let mut end = self.best.steps.len();
            while end > 0 {
                let start = end.saturating_sub(length);
                let mut candidate = self.best.clone();
                candidate.steps.drain(start..end);
                self.offer(candidate);
                end = start.min(self.best.steps.len());
            }
            if length <= 1 {
                break;
            }
            length = length.div_ceil(2);
        }
    }

    fn simpler(&mut self) {
        if self.best.twin {
            let candidate = History { twin: false, ..self.best.clone() };
            self.offer(candidate);
        }
        let bases = match &self.best.base {
            Base::None => vec![],
            Base::Raw(length) => vec![Base::None, Base::Raw(length.next_multiple_of(1 << 16))],
            Base::Converted(_, size, compressed) => {
                let plain =
                    |compressed| Base::Converted(ImageOptions::default(), *size, compressed);
                vec![Base::None, Base::Raw(*size), plain(false), plain(*compressed)]
            }
        };
        for base in bases {
            if base != self.best.base {
                let candidate = History { base, ..self.best.clone() };
                if self.offer(candidate) {
                    break;
                }
            }
        }
        for index in 0..self.best.steps.len() {
            while self.simpler_step(index) {}
        }
    }

    fn simpler_step(&mut self, index: usize) -> bool {
        for step in simpler_steps(&self.best.steps[index]) {
            if step != self.best.steps[index] {
                let mut candidate = self.best.clone();
                candidate.steps[index] = step;
                if self.offer(candidate) {
                    return true;
                }
            }
        }
        false
    }
}

/// Variants of a step, each nearer to the plainest one.
fn simpler_steps(step: &Step) -> Vec<Step> {
    match step.clone() {
        Step::Layer { by, options, size } => {
            let plain = ImageOptions::default();
            [
                plain,
                ImageOptions { refcount_order: plain.refcount_order, ..options },
                ImageOptions { zstd: false, ..options },
                ImageOptions { lazy: false, ..options },
                ImageOptions { preallocation: plain.preallocation, ..options },
                ImageOptions { data_file: plain.data_file, ..options },
                ImageOptions { extended_l2: false, ..options },
                ImageOptions { cluster_bits: 16, ..options },
                ImageOptions { v2: false, ..options },
            ]
            .into_iter()
            .map(|options| Step::Layer { by, options, size })
            .collect()
        }
        Step::Open(session) => [
            Session { width: 1, ..session },
            Session { dropped: false, ..session },
            Session { direct: false, ..session },
            Session { two_threads: false, ..session },
            Session { job: None, ..session },
            Session { job: session.job.map(|job| Job { warm: false, ..job }), ..session },
            Session { metadata: MetadataMode::Ordered, ..session },
        ]
        .map(Step::Open)
        .to_vec(),
        Step::Op(op) => simpler_ops(op).into_iter().map(Step::Op).collect(),
        _ => Vec::new(),
    }
}

fn simpler_ops(op: Op) -> Vec<Op> {
    // Never longer, nor further on: so this comes to an end.
    let ranges = |offset: u64, length: u64| {
        let round = |unit: u64| {
            let down = length / unit * unit;
            (offset / unit * unit, if down == 0 { length } else { down })
        };
        [round(1 << 16), (offset, length.div_ceil(2)), round(4096), round(512)]
    };
    match op {
        Op::Write { offset, length, fill } => {
            let mut ops: Vec<Op> = ranges(offset, length)
                .into_iter()
                .map(|(offset, length)| Op::Write { offset, length, fill })
                .collect();
            ops.push(Op::Write { offset, length, fill: Fill::Byte(1) });
            ops
        }
        Op::Zero { offset, length, unmap } => ranges(offset, length)
            .into_iter()
            .map(|(offset, length)| Op::Zero { offset, length, unmap })
            .collect(),
        Op::Discard { offset, length } => ranges(offset, length)
            .into_iter()
            .map(|(offset, length)| Op::Discard { offset, length })
            .collect(),
        Op::Compressed { cluster, count, fill } => vec![
            Op::Compressed { cluster, count: count.div_ceil(2), fill },
            Op::Compressed { cluster, count, fill: Fill::Byte(1) },
        ],
        Op::Read { .. } | Op::Race { .. } | Op::Flush => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::opposite_qemu::generate;
    use crate::opposite_qemu::history::Side;
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    #[test]
    fn two_steps_of_many_are_left() {
        let rng = &mut StdRng::seed_from_u64(7);
        let resize = |size| Step::Resize { by: Side::Qemu, size };
        let mut history = generate::history(rng);
        history.steps.insert(3, resize(111));
        history.steps.push(resize(222));
        let small = shrink(&history, 10_000, |h| {
            let at = |size| h.steps.iter().position(|step| *step == resize(size));
            matches!((at(111), at(222)), (Some(a), Some(b)) if a < b)
        });
        assert_eq!(small.steps, [resize(111), resize(222)]);
        assert!(!small.twin && small.base == Base::None);
    }
}
