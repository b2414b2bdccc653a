//! The commands that there are.

use std::fmt::Write as _;

/// How a command is called.
pub(super) struct Command {
    pub(super) name: &'static str,
    /// Another name of it.
    short: &'static str,
    /// The fewest and the most words after the name.
    words: (usize, Option<usize>),
    /// Its option letters; those with a value are followed by a colon.
    pub(super) options: &'static str,
    synopsis: &'static str,
    summary: &'static str,
}

const fn command(
    name: &'static str,
    short: &'static str,
    words: (usize, Option<usize>),
    options: &'static str,
    synopsis: &'static str,
    summary: &'static str,
) -> Command {
    Command { name, short, words, options, synopsis, summary }
}

const COMMANDS: &[Command] = &[
    command("aio_flush", "", (0, Some(0)), "", "", "wait for all asynchronous requests"),
    command(
        "aio_read",
        "",
        (2, None),
        "CP:qv",
        "[-Cqv] [-P pattern] off len [len..]",
        "read without waiting for the end",
    ),
    command(
        "aio_write",
        "",
        (2, None),
        "CfP:quz",
        "[-Cfquz] [-P pattern] off len [len..]",
        "write without waiting for the end",
    ),
    command(
        "alloc",
        "a",
        (1, Some(2)),
        "",
        "off [len]",
        "count the bytes allocated in the image itself",
    ),
    command("discard", "d", (2, None), "Cq", "[-Cq] off len", "discard a range"),
    command("flush", "f", (0, Some(0)), "", "", "make everything written durable"),
    command("help", "?", (0, Some(1)), "", "[command]", "explain one or all commands"),
    command("info", "i", (0, Some(0)), "", "", "describe the image"),
    command("length", "l", (0, Some(0)), "", "", "print the disk's size"),
    command("map", "", (0, Some(0)), "", "", "list what is allocated in the image itself"),
    command("quit", "q", (0, Some(0)), "", "", "end the program"),
    command(
        "read",
        "r",
        (2, None),
        "Cl:pP:qs:v",
        "[-Cqv] [-P pattern [-s off] [-l len]] off len",
        "read a range",
    ),
    command(
        "readv",
        "rv",
        (2, None),
        "CP:qv",
        "[-Cqv] [-P pattern] off len [len..]",
        "read a range into several buffers",
    ),
    command("sleep", "", (1, Some(1)), "", "ms", "wait for some milliseconds"),
    command(
        "truncate",
        "t",
        (1, Some(3)),
        "m:",
        "[-m preallocation] off",
        "change the disk's size",
    ),
    command(
        "write",
        "w",
        (2, None),
        "cCfnpP:qs:uz",
        "[-cCfnquz] [-P pattern | -s file] off len",
        "write a range",
    ),
    command(
        "writev",
        "wv",
        (2, None),
        "CfP:q",
        "[-Cfq] [-P pattern] off len [len..]",
        "write a range from several buffers",
    ),
];

/// What the option letters mean, in every command that has them.
const LETTERS: &[(char, &str)] = &[
    ('c', "write compressed clusters"),
    ('C', "statistics for programs: bytes,requests,time,bytes/s,requests/s"),
    ('f', "make it durable before it counts as done"),
    ('l', "how many bytes to verify (with -P)"),
    ('m', "what to allocate of the new part: off, metadata, falloc or full"),
    ('n', "fail if zeroes would have to be written as data (with -z)"),
    ('P', "the byte to write (205 unless told otherwise) or to verify"),
    ('q', "no statistics"),
    ('s', "write: a file to take the bytes from; read: where to start to verify (with -P)"),
    ('u', "allow unmapping (with -z)"),
    ('v', "dump what was read"),
    ('z', "write zeroes"),
];

impl Command {
    /// The command of that name.
    pub(super) fn find(name: &str) -> Option<&'static Self> {
        COMMANDS.iter().find(|c| c.name == name || (!c.short.is_empty() && c.short == name))
    }

    /// What is wrong with so many words, if anything.
    pub(super) fn refuses(&self, count: usize) -> Option<String> {
        let (fewest, most) = self.words;
        if count >= fewest && most.is_none_or(|most| count <= most) {
            return None;
        }
        let expected = match most {
            None => format!("at least {fewest}"),
            Some(most) if most == fewest => format!("{fewest}"),
            Some(most) => format!("between {fewest} and {most}"),
        };
        Some(format!("bad argument count {count} to {}, expected {expected} arguments", self.name))
    }

    /// One line: how it is called and what it does.
    pub(super) fn usage(&self) -> String {
        let space = if self.synopsis.is_empty() { "" } else { " " };
        format!("{}{space}{} -- {}\n", self.name, self.synopsis, self.summary)
    }

    /// The usage, and the options' meanings.
    pub(super) fn explanation(&self) -> String {
        let mut text = self.usage();
        for (letter, meaning) in LETTERS.iter().filter(|(l, _)| self.options.contains(*l)) {
            let _ = writeln!(text, " -{letter}  {meaning}");
        }
        text
    }

    /// One line for each command.
    pub(super) fn all() -> String {
        let mut text: String = COMMANDS.iter().map(Self::usage).collect();
        text.push_str("\nUse 'help command' for a command's options.\n");
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_is_explained() {
        for command in COMMANDS {
            for letter in command.options.chars().filter(|letter| !":p".contains(*letter)) {
                assert!(LETTERS.iter().any(|(l, _)| *l == letter), "{} -{letter}", command.name);
                assert!(command.synopsis.contains(letter), "{} -{letter}", command.name);
            }
        }
        assert!(Command::find("rv").is_some_and(|c| c.explanation().contains(" -v  dump")));
        assert!(Command::find("").is_none());
    }
}
