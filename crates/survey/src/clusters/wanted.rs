//! Sets of a disk's units.

const CHUNK: u64 = 4096;
const WORDS: usize = 64;

enum Chunk {
    All,
    Empty,
    Some(Box<[u64; WORDS]>),
}

/// The units of a disk that images above can see.
pub(super) struct Wanted {
    chunks: Vec<Chunk>,
}

/// Chunk, word and bit of a unit.
fn place(unit: u64) -> (usize, usize, u64) {
    ((unit / CHUNK) as usize, (unit % CHUNK / 64) as usize, 1 << (unit % 64))
}

impl Wanted {
    /// All units below `units`.
    pub(super) fn everything(units: u64) -> Self {
        let mut chunks = Vec::new();
        chunks.resize_with((units / CHUNK) as usize, || Chunk::All);
        if !units.is_multiple_of(CHUNK) {
            chunks.push(Chunk::All);
        }
        let mut all = Self { chunks };
        all.cut(units);
        all
    }

    pub(super) fn has(&self, unit: u64) -> bool {
        let (chunk, word, bit) = place(unit);
        match self.chunks.get(chunk) {
            Some(Chunk::All) => true,
            Some(Chunk::Some(words)) => words.get(word).is_some_and(|word| word & bit != 0),
            Some(Chunk::Empty) | None => false,
        }
    }

    pub(super) fn remove(&mut self, unit: u64) {
        let (chunk, word, bit) = place(unit);
        let Some(chunk) = self.chunks.get_mut(chunk) else { return };
        if matches!(chunk, Chunk::All) {
            *chunk = Chunk::Some(Box::new([u64::MAX; WORDS]));
        }
        if let Chunk::Some(words) = chunk
            && let Some(word) = words.get_mut(word)
        {
            *word &= !bit;
            if *word == 0 && words.iter().all(|&word| word == 0) {
                *chunk = Chunk::Empty;
            }
        }
    }

    /// Removes all units from `units` on.
    pub(super) fn cut(&mut self, units: u64) {
        let chunks = units.div_ceil(CHUNK);
        self.chunks.truncate(usize::try_from(chunks).unwrap_or(usize::MAX));
        if chunks == self.chunks.len() as u64 {
            for unit in units..chunks * CHUNK {
                self.remove(unit);
            }
        }
    }

    /// Adds the units of the other set.
    pub(super) fn unite(&mut self, other: Self) {
        if self.chunks.len() < other.chunks.len() {
            self.chunks.resize_with(other.chunks.len(), || Chunk::Empty);
        }
        for (mine, theirs) in self.chunks.iter_mut().zip(other.chunks) {
            match (&mut *mine, theirs) {
                (Chunk::All, _) | (_, Chunk::Empty) => {}
                (Chunk::Some(mine), Chunk::Some(theirs)) => {
                    for (mine, theirs) in mine.iter_mut().zip(theirs.iter()) {
                        *mine |= theirs;
                    }
                }
                (_, theirs) => *mine = theirs,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn set(wanted: &Wanted) -> BTreeSet<u64> {
        (0..3 * CHUNK).filter(|&unit| wanted.has(unit)).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn behaves_as_a_set_of_numbers(
            sizes in prop::collection::vec(0..3 * CHUNK, 2),
            removed in prop::collection::vec(prop::collection::vec(0..3 * CHUNK, 0..60), 2),
            cut in 0..3 * CHUNK,
        ) {
            let mut both = sizes.iter().zip(&removed).map(|(&size, removed)| {
                let (mut wanted, mut model) = (Wanted::everything(size), (0..size).collect::<BTreeSet<_>>());
                for unit in removed {
                    wanted.remove(*unit);
                    model.remove(unit);
                }
                (wanted, model)
            });
            let (mut one, mut model) = both.next().unwrap();
            let (other, other_model) = both.next().unwrap();
            prop_assert_eq!(&set(&one), &model);
            one.cut(cut);
            model.retain(|&unit| unit < cut);
            prop_assert_eq!(&set(&one), &model);
            one.unite(other);
            model.extend(other_model);
            prop_assert_eq!(set(&one), model);
        }
    }

    #[test]
    fn what_is_emptied_takes_no_memory() {
        let mut wanted = Wanted::everything(CHUNK);
        for unit in 0..CHUNK {
            wanted.remove(unit);
        }
        assert!(matches!(wanted.chunks.as_slice(), [Chunk::Empty]));
    }
}
