//! What a keeper is for: it is started with that, and no order of its server changes it.

use std::ffi::OsString;

/// In place of a number, for any that is free.
const ANY: &str = "auto";

/// The task of a keeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Task {
    /// The number of its device; `None` for any that is free.
    pub(super) number: Option<u32>,
    /// For how many seconds the device waits for another server if its own is killed.
    pub(super) outlives: Option<u32>,
}

impl Task {
    /// # Errors
    /// A device of any number is to wait, which nobody could find: for users.
    pub(super) fn new(number: Option<u32>, outlives: Option<u32>) -> Result<Self, String> {
        if number.is_none() && outlives.is_some() {
            return Err("a device that outlives its server needs a number".into());
        }
        Ok(Self { number, outlives })
    }

    /// The arguments of the program that has this task.
    pub(super) fn arguments(self) -> Vec<String> {
        let number = self.number.map_or_else(|| ANY.into(), |number| number.to_string());
        [number].into_iter().chain(self.outlives.map(|seconds| seconds.to_string())).collect()
    }

    /// The task that a program was started with.
    ///
    /// # Errors
    /// It was started by somebody else.
    pub(super) fn parse(arguments: impl Iterator<Item = OsString>) -> Result<Self, String> {
        let invalid = || String::from("a keeper is started by its server");
        let words: Vec<_> = arguments
            .map(OsString::into_string)
            .collect::<Result<_, _>>()
            .map_err(|_| invalid())?;
        let number = |text: &str| text.parse::<u32>().map_err(|_| invalid());
        let (of, outlives) = match words.as_slice() {
            [of] => (of, None),
            [of, seconds] => (of, Some(number(seconds)?)),
            _ => return Err(invalid()),
        };
        Self::new(if of == ANY { None } else { Some(number(of)?) }, outlives)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_has_the_task_that_it_was_started_with() {
        for (number, outlives) in [(None, None), (Some(0), None), (Some(7), Some(86_400))] {
            let task = Task::new(number, outlives).unwrap();
            assert_eq!(task, Task { number, outlives });
            let arguments = task.arguments().into_iter().map(OsString::from);
            assert_eq!(Task::parse(arguments), Ok(task));
        }
        assert!(Task::new(None, Some(5)).unwrap_err().contains("needs a number"));
        for words in [&[][..], &["auto", "5"], &["x"], &["1", "x"], &["1", "2", "3"], &["-1"]] {
            assert!(Task::parse(words.iter().map(OsString::from)).is_err(), "{words:?}");
        }
    }
}
