//! The table of commands.

use std::fmt::Write as _;

/// A command's name.
pub(super) struct Command {
    pub(super) name: &'static str,
    /// Its alias.
    short: &'static str,
    /// The minimum and maximum number of words after the name.
    words: (usize, Option<usize>),
    /// Its option letters; those that take a value are followed by a colon.
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
        "read asynchronously",
    ),
    command(
        "aio_write",
        "",
        (2, None),
        "CfP:quz",
        "[-Cfquz] [-P pattern] off len [len..]",
        "write asynchronously",
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
    command("flush", "f", (0, Some(0)), "", "", "flush: make all writes durable"),
    command("help", "?", (0, Some(1)), "", "[command]", "explain one or all commands"),
    command("info", "i", (0, Some(0)), "", "", "show the image's format and cluster size"),
    command("length", "l", (0, Some(0)), "", "", "print the disk's size"),
    command("map", "", (0, Some(0)), "", "", "list the ranges allocated in the image itself"),
    command("quit", "q", (0, Some(0)), "", "", "exit"),
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
    command("sleep", "", (1, Some(1)), "", "ms", "sleep for a number of milliseconds"),
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

/// The meaning of the option letters, the same in every command that has them.
const LETTERS: &[(char, &str)] = &[
    ('c', "write compressed clusters"),
    ('C', "machine-readable statistics: bytes,requests,time,bytes/s,requests/s"),
    ('f', "make the write durable before it completes (FUA)"),
    ('l', "how many bytes to verify (with -P)"),
    ('m', "preallocation of the new part: off, metadata, falloc or full"),
    ('n', "do not fall back to writing zeroes as data (with -z)"),
    ('P', "the byte to write (205 by default) or to verify"),
    ('q', "no statistics"),
    (
        's',
        "write: a file to take the bytes from; read: offset at which to start verifying (with -P)",
    ),
    ('u', "allow unmapping (with -z)"),
    ('v', "dump the data read"),
    ('z', "write zeroes"),
];

impl Command {
    /// The command of that name.
    pub(super) fn find(name: &str) -> Option<&'static Self> {
        COMMANDS.iter().find(|c| c.name == name || (!c.short.is_empty() && c.short == name))
    }

    /// The error for a wrong number of words, if any.
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

    /// One line: the usage and the purpose.
    pub(super) fn usage(&self) -> String {
        let space = if self.synopsis.is_empty() { "" } else { " " };
        format!("{}{space}{} -- {}\n", self.name, self.synopsis, self.summary)
    }

    /// The usage and the meaning of each option.
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
