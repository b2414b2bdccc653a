//! How many kills, from which seeds, and what came of them.

use isobath_testkit::evidence::{Evidence, Run};
use isobath_testkit::seed::Seed;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

/// What was done, with which a later run goes on where a file is named for it.
pub(super) struct Campaign {
    kills: u64,
    next: u64,
    first: u64,
    seconds: f64,
    /// Kills by what the server was doing.
    by: BTreeMap<String, u64>,
    goal: u64,
    file: Option<PathBuf>,
    begun: Instant,
    /// Kills of earlier runs.
    before: u64,
    /// The first seed of this run.
    first_now: u64,
    /// Where this run is recorded, if the number of kills was given, as `make kills` does.
    evidence: Option<Evidence>,
}

impl Campaign {
    /// `ISOBATH_KILLS` says how many kills, `ISOBATH_KILLS_STATE` names the file; `ISOBATH_SEED` begins
    /// anew.
    pub(super) fn start(otherwise: u64) -> Self {
        let wanted = env::var("ISOBATH_KILLS").ok();
        let evidence = if wanted.is_some() { Evidence::begin().unwrap() } else { None };
        let goal = wanted.map_or(otherwise, |text| text.parse().unwrap());
        let given = env::var_os("ISOBATH_SEED").is_some();
        let file = env::var_os("ISOBATH_KILLS_STATE").map(PathBuf::from).filter(|_| !given);
        let kept = file.as_ref().and_then(|file| fs::read(file).ok());
        let kept: Value = kept.map_or(Value::Null, |bytes| serde_json::from_slice(&bytes).unwrap());
        let number = |name: &str| kept[name].as_u64();
        let first = number("first").unwrap_or_else(|| Seed::new().value());
        let by = kept["by"].as_object().into_iter().flatten();
        let by = by.map(|(name, count)| (name.clone(), count.as_u64().unwrap())).collect();
        let kills = number("kills").unwrap_or(0);
        let next = number("next").unwrap_or(first);
        Self {
            kills,
            next,
            first,
            seconds: kept["seconds"].as_f64().unwrap_or(0.0),
            by,
            goal,
            file,
            begun: Instant::now(),
            before: kills,
            first_now: next,
            evidence,
        }
    }

    /// The next seed, unless there were enough kills.
    pub(super) fn next(&self) -> Option<u64> {
        (self.kills < self.goal).then_some(self.next)
    }

    /// Counts what a seed's servers were doing when they were killed.
    pub(super) fn passed(&mut self, kills: Vec<String>) {
        self.next = self.next.wrapping_add(1);
        self.kills += kills.len() as u64;
        for name in kills {
            *self.by.entry(name).or_default() += 1;
        }
        let seconds = self.begun.elapsed().as_secs_f64();
        let total = self.seconds + seconds;
        println!(
            "{} kills, nothing lost; {:.2} a second, {total:.0} s in all; from seed {:#x}, next {:#x}; {:?}",
            self.kills,
            (self.kills - self.before) as f64 / seconds,
            self.first,
            self.next,
            self.by
        );
        if let Some(file) = &self.file {
            let state = json!({"kills": self.kills, "next": self.next, "first": self.first,
                "seconds": total, "by": self.by});
            let new = file.with_extension("new");
            fs::write(&new, serde_json::to_vec_pretty(&state).unwrap()).unwrap();
            fs::rename(new, file).unwrap();
        }
    }
}

impl Drop for Campaign {
    /// Records what this run did, also if a kill lost something and the test panics.
    fn drop(&mut self) {
        let failed = thread::panicking();
        let Some(evidence) = self.evidence.as_ref() else { return };
        if self.next == self.first_now && !failed {
            return;
        }
        let seed = self.next;
        let last = if failed { seed } else { seed.wrapping_sub(1) };
        let recorded = evidence.add(&Run {
            campaign: "kills",
            count: self.kills - self.before,
            seeds: format!("{:#x} to {last:#x}", self.first_now),
            failure: failed.then(|| {
                format!("ISOBATH_SEED={seed:#x} ISOBATH_KILLS=10 cargo test what_was_promised")
            }),
            seconds: self.begun.elapsed().as_secs_f64(),
            ..Run::default()
        });
        if let Err(error) = recorded {
            eprintln!("results are not recorded: {error}");
        }
    }
}
