//! A campaign's progress in a small file, so that it can continue where it ended.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// A campaign's progress. Histories have numbers, and may end in any order.
#[derive(Debug, Default)]
pub struct Progress {
    file: Option<PathBuf>,
    /// All histories before this one are done.
    first: u64,
    /// The states of those.
    states: u64,
    /// Histories that were finished out of order, and their states.
    done: BTreeMap<u64, u64>,
}

impl Progress {
    /// A new campaign that is not saved.
    pub fn new() -> Self {
        Self::default()
    }

    /// Continues where an earlier run ended, according to the file.
    ///
    /// # Errors
    /// The file cannot be read, or is not a progress file.
    pub fn resume(file: &Path) -> io::Result<Self> {
        let text = match fs::read_to_string(file) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => "0 0".into(),
            Err(error) => return Err(error),
        };
        let mut numbers = text.split_whitespace().map(str::parse);
        let (Some(Ok(first)), Some(Ok(states)), None) =
            (numbers.next(), numbers.next(), numbers.next())
        else {
            return Err(io::Error::other("it does not hold a number of histories and of states"));
        };
        Ok(Self { file: Some(file.to_owned()), first, states, done: BTreeMap::new() })
    }

    /// The first history that is not known to be done.
    pub fn first(&self) -> u64 {
        self.first
    }

    /// States of earlier runs and of this one.
    pub fn states(&self) -> u64 {
        self.states + self.done.values().sum::<u64>()
    }

    /// Notes that a history is done.
    pub fn end(&mut self, number: u64, states: u64) {
        self.done.insert(number, states);
        while let Some(states) = self.done.remove(&self.first) {
            self.states += states;
            self.first += 1;
        }
    }

    /// Saves it to the file, if it has one.
    ///
    /// # Errors
    /// The file system's.
    pub fn keep(&self) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        let new = file.with_extension("new");
        fs::write(&new, format!("{} {}\n", self.first, self.states))?;
        fs::rename(new, file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_campaign_goes_on_where_it_ended() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("state");
        let mut progress = Progress::resume(&file).unwrap();
        for (number, states) in [(0, 5), (2, 7), (3, 1)] {
            progress.end(number, states);
        }
        assert_eq!((progress.first(), progress.states()), (1, 13));
        progress.keep().unwrap();
        // Histories finished out of order are run again.
        let mut progress = Progress::resume(&file).unwrap();
        assert_eq!((progress.first(), progress.states()), (1, 5));
        progress.end(1, 4);
        progress.keep().unwrap();
        assert_eq!(Progress::resume(&file).unwrap().states(), 9);
        fs::write(&file, "one").unwrap();
        assert!(Progress::resume(&file).is_err());
    }
}
