//! How far a campaign has come, in a small file, so that it can go on where it ended.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// How far a campaign has come. Histories have numbers, and may end in any order.
#[derive(Debug, Default)]
pub struct Progress {
    file: Option<PathBuf>,
    /// All histories before this one are done.
    first: u64,
    /// The states of those.
    states: u64,
    /// Histories that are done, out of turn, and their states.
    done: BTreeMap<u64, u64>,
}

impl Progress {
    /// From the beginning, kept nowhere.
    pub fn new() -> Self {
        Self::default()
    }

    /// From where the file says an earlier run has ended.
    ///
    /// # Errors
    /// The file cannot be read, or is none of these.
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

    /// A history is done.
    pub fn end(&mut self, number: u64, states: u64) {
        self.done.insert(number, states);
        while let Some(states) = self.done.remove(&self.first) {
            self.states += states;
            self.first += 1;
        }
    }

    /// Puts it into the file, if it has one.
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
        // What was done out of turn is done again.
        let mut progress = Progress::resume(&file).unwrap();
        assert_eq!((progress.first(), progress.states()), (1, 5));
        progress.end(1, 4);
        progress.keep().unwrap();
        assert_eq!(Progress::resume(&file).unwrap().states(), 9);
        fs::write(&file, "one").unwrap();
        assert!(Progress::resume(&file).is_err());
    }
}
