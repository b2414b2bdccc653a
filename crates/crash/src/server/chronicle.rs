//! The history of a chain.

use crate::content::Content;
use crate::guest::{Log, Oracle};
use crate::record::{NEVER, Tick};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The contents of a frozen image.
#[derive(Clone, Debug)]
pub enum FrozenContent {
    /// These bytes.
    Bytes(Arc<Content>),
    /// The disk's contents when it became a backing file, between these moments.
    Moment(Tick, Tick),
}

/// A frozen image, which is no longer written to.
#[derive(Clone, Debug)]
pub struct Frozen {
    /// Its file.
    pub name: PathBuf,
    /// The files that it needs, its own among them.
    pub needs: Vec<PathBuf>,
    /// Its contents.
    pub held: FrozenContent,
    /// The end of the time for which this applies.
    pub until: Tick,
}

/// A change of the chain.
#[derive(Clone, Debug)]
pub struct Act {
    /// What.
    pub text: String,
    /// When it began.
    pub began: Tick,
    /// When it had ended.
    pub ended: Tick,
}

/// The history of a chain.
#[derive(Clone, Debug, Default)]
pub struct Chronicle {
    /// The layers' files from the active one down, from each of these moments on.
    pub chains: Vec<(Tick, Vec<PathBuf>)>,
    /// Frozen images.
    pub frozen: Vec<Frozen>,
    /// What was done.
    pub acts: Vec<Act>,
    /// Files that received data of layers above, since when, and the images above those.
    overwritten: Vec<(Tick, PathBuf, Vec<PathBuf>)>,
}

impl Chronicle {
    /// The chronicle of a disk with these layers, from the active one down, and these images below it.
    pub fn new(chain: Vec<PathBuf>, frozen: Vec<Frozen>) -> Self {
        Self { chains: vec![(0, chain)], frozen, ..Self::default() }
    }

    /// The chain just before a moment, from the active layer down.
    pub fn chain_at(&self, now: Tick) -> &[PathBuf] {
        let before = self.chains.iter().rev().find(|(since, _)| *since < now);
        before.or(self.chains.first()).map_or(&[], |(_, chain)| chain)
    }

    /// Notes the start of a change. Returns its number.
    pub fn begin(&mut self, text: String, began: Tick) -> usize {
        self.acts.push(Act { text, began, ended: NEVER });
        self.acts.len() - 1
    }

    /// Notes its end.
    pub fn end(&mut self, number: usize, ended: Tick, how: &str) {
        if let Some(act) = self.acts.get_mut(number) {
            act.ended = ended;
            act.text.push_str(how);
        }
    }

    /// Notes that data of layers up to `top` of this chain is about to be written to `base`: images that need that file
    /// and are not above those layers have other contents from now on.
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

    /// Whether data was written to one of the files that an image needs, except its own.
    pub fn is_undermined(&self, image: &Path, needs: &[PathBuf], now: Tick) -> bool {
        self.overwritten.iter().any(|(since, base, above)| {
            let below = base != image && needs.contains(base);
            *since < now && below && above.iter().all(|name| name != image)
        })
    }

    /// Whether layers below an image were committed, or are being committed: it must show what it showed.
    pub fn is_above_commit(&self, image: &Path, now: Tick) -> bool {
        let above = |above: &[PathBuf]| above.iter().any(|name| name == image);
        self.overwritten.iter().any(|(since, _, names)| *since < now && above(names))
    }

    /// The contents that an image that became a backing file may have after a crash at `now`; `None` for one that was a
    /// backing file from the beginning.
    pub fn oracle_of(&self, frozen: &Frozen, log: &Arc<Log>, now: Tick) -> Option<Oracle> {
        let FrozenContent::Moment(began, ended) = frozen.held else { return None };
        let mut log = (**log).clone();
        log.flushed.retain(|(_, flushed)| *flushed < began);
        if ended < now {
            log.flushed.push((began, ended));
        }
        // Later changes go to the overlay that replaced it.
        let left = |(since, chain): &&(Tick, Vec<PathBuf>)| {
            *since > began && chain.first() != Some(&frozen.name)
        };
        let switched = self.chains.iter().find(left).map_or(NEVER, |(since, _)| *since);
        let last = switched.min(ended).saturating_add(1);
        Some(Oracle::of_crash(&Arc::new(log), now.min(last)))
    }

    /// The images frozen at a moment, except the active one at that time.
    pub fn frozen_at(&self, now: Tick) -> impl Iterator<Item = &Frozen> {
        let active = self.chain_at(now).first();
        self.frozen.iter().filter(move |frozen| {
            let begun = match frozen.held {
                FrozenContent::Bytes(_) => true,
                FrozenContent::Moment(began, _) => began < now,
            };
            begun && now <= frozen.until && Some(&frozen.name) != active
        })
    }

    /// Whether the chain was being changed at a moment.
    pub fn is_amid(&self, now: Tick) -> bool {
        self.acts.iter().any(|act| act.began < now && now <= act.ended)
    }

    /// Everything up to a moment, one event per line.
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
