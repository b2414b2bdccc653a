//! What became of a chain, and when.

use crate::content::Content;
use crate::guest::{Log, Oracle};
use crate::record::{NEVER, Tick};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What an image that nobody writes to holds.
#[derive(Clone, Debug)]
pub enum Held {
    /// These bytes.
    Bytes(Arc<Content>),
    /// What the disk held when it became a backing file: between these moments.
    Moment(Tick, Tick),
}

/// An image that nobody writes to.
#[derive(Clone, Debug)]
pub struct Frozen {
    /// Its file.
    pub name: PathBuf,
    /// The files that it needs, its own among them.
    pub needs: Vec<PathBuf>,
    /// What it holds.
    pub held: Held,
    /// Until when that is so.
    pub until: Tick,
}

/// Something that was done to the chain.
#[derive(Clone, Debug)]
pub struct Act {
    /// What.
    pub text: String,
    /// When it began.
    pub began: Tick,
    /// When it had ended.
    pub ended: Tick,
}

/// What became of a chain, and when.
#[derive(Clone, Debug, Default)]
pub struct Chronicle {
    /// The layers' files from the active one down, from each of these moments on.
    pub chains: Vec<(Tick, Vec<PathBuf>)>,
    /// Images that nobody writes to.
    pub frozen: Vec<Frozen>,
    /// What was done.
    pub acts: Vec<Act>,
    /// Files into which data of layers above was brought, from when on, and the images above those.
    overwritten: Vec<(Tick, PathBuf, Vec<PathBuf>)>,
}

impl Chronicle {
    /// Of a disk with these layers, from the active one down, and these images below it.
    pub fn new(chain: Vec<PathBuf>, frozen: Vec<Frozen>) -> Self {
        Self { chains: vec![(0, chain)], frozen, ..Self::default() }
    }

    /// The chain just before a moment, from the active layer down.
    pub fn chain_at(&self, now: Tick) -> &[PathBuf] {
        let before = self.chains.iter().rev().find(|(since, _)| *since < now);
        before.or(self.chains.first()).map_or(&[], |(_, chain)| chain)
    }

    /// Something begins to be done. Returns its number.
    pub fn begin(&mut self, text: String, began: Tick) -> usize {
        self.acts.push(Act { text, began, ended: NEVER });
        self.acts.len() - 1
    }

    /// It has ended.
    pub fn end(&mut self, number: usize, ended: Tick, how: &str) {
        if let Some(act) = self.acts.get_mut(number) {
            act.ended = ended;
            act.text.push_str(how);
        }
    }

    /// Data is about to be brought into `base`, on behalf of layers up to `top` of this chain: what needs
    /// that file and is not above them holds something else from now on.
    pub fn overwrite(&mut self, chain: &[PathBuf], top: usize, base: &Path, now: Tick) {
        let above = &chain[..top];
        self.overwritten.push((now, base.to_owned(), above.to_vec()));
        for frozen in &mut self.frozen {
            let needs = frozen.needs.iter().any(|name| name == base);
            if needs && !above.contains(&frozen.name) {
                frozen.until = frozen.until.min(now);
            }
        }
    }

    /// Whether data was brought into one of the files that an image needs, but for its own.
    pub fn is_undermined(&self, image: &Path, needs: &[PathBuf], now: Tick) -> bool {
        self.overwritten.iter().any(|(since, base, above)| {
            let below = base != image && needs.contains(base);
            *since < now && below && above.iter().all(|name| name != image)
        })
    }

    /// What an image that became a backing file may hold after a crash at `now`; `None` of one that was one
    /// from the beginning.
    pub fn oracle_of(&self, frozen: &Frozen, log: &Arc<Log>, now: Tick) -> Option<Oracle> {
        let Held::Moment(began, ended) = frozen.held else { return None };
        let mut log = (**log).clone();
        log.flushed.retain(|(_, flushed)| *flushed < began);
        if ended < now {
            log.flushed.push((began, ended));
        }
        // What comes after the overlay took its place goes there.
        let left = |(since, chain): &&(Tick, Vec<PathBuf>)| {
            *since > began && chain.first() != Some(&frozen.name)
        };
        let switched = self.chains.iter().find(left).map_or(NEVER, |(since, _)| *since);
        let last = switched.min(ended).saturating_add(1);
        Some(Oracle::of_crash(&Arc::new(log), now.min(last)))
    }

    /// The images that nobody wrote to up to a moment, but for the active one of then.
    pub fn frozen_at(&self, now: Tick) -> impl Iterator<Item = &Frozen> {
        let active = self.chain_at(now).first();
        self.frozen.iter().filter(move |frozen| {
            let begun = match frozen.held {
                Held::Bytes(_) => true,
                Held::Moment(began, _) => began < now,
            };
            begun && now <= frozen.until && Some(&frozen.name) != active
        })
    }

    /// Whether something was being done to the chain at a moment.
    pub fn is_amid(&self, now: Tick) -> bool {
        self.acts.iter().any(|act| act.began < now && now <= act.ended)
    }

    /// All of it up to a moment, one line each.
    pub fn tell(&self, now: Tick) -> Vec<String> {
        let shown = |tick: Tick| if tick == NEVER { "never".into() } else { tick.to_string() };
        let acts = self.acts.iter().filter(|act| act.began < now);
        let acts = acts.map(|act| {
            (act.began, format!("{:>6}..{:<6} {}", act.began, shown(act.ended), act.text))
        });
        let chains = self.chains.iter().filter(|(since, _)| *since < now).map(|(since, chain)| {
            let names: Vec<String> =
                chain.iter().take(8).map(|name| name.display().to_string()).collect();
            (*since, format!("{since:>6} the chain is {} ({})", names.join(" <- "), chain.len()))
        });
        let mut lines: Vec<(Tick, String)> = acts.chain(chains).collect();
        lines.sort();
        lines.into_iter().map(|(_, line)| line).collect()
    }
}
