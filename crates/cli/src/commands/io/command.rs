//! The table of commands.

use std::fmt::Write as _;

/// A command.
#[derive(Clone, Copy)]
pub(super) struct Command {
    pub(super) name: &'static str,
    /// Its alias.
    short: &'static str,
    /// The minimum and maximum number of words after the name.
    words: (usize, Option<usize>),
    /// Whether it needs an open image.
    pub(super) needs_image: bool,
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
    Command { name, short, words, needs_image: true, options, synopsis, summary }
}

/// A command that needs no open image.
const fn anytime(command: Command) -> Command {
    Command { needs_image: false, ..command }
}

const COMMANDS: &[Command] = &[
    anytime(command("abort", "", (0, Some(0)), "", "", "end the process, as in a crash")),
    command("aio_flush", "", (0, Some(0)), "", "", "wait for all asynchronous requests"),
    command(
        "aio_read",
        "",
        (2, None),
        "CiP:qv",
        "[-Ciqv] [-P pattern] off len [len..]",
        "read asynchronously",
    ),
    command(
        "aio_write",
        "",
        (2, None),
        "CfiP:quz",
        "[-Cfiquz] [-P pattern] off len [len..]",
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
    command(
        "break",
        "",
        (2, Some(2)),
        "",
        "event tag",
        "stop requests at an event (only with QEMU's blkdebug)",
    ),
    command("close", "c", (0, Some(0)), "", "", "close the image"),
    command("discard", "d", (2, None), "Cq", "[-Cq] off len", "discard a range"),
    command("flush", "f", (0, Some(0)), "", "", "flush: make all writes durable"),
    anytime(command("help", "?", (0, Some(1)), "", "[command]", "explain one or all commands")),
    command("info", "i", (0, Some(0)), "", "", "show the image's format and cluster size"),
    command("length", "l", (0, Some(0)), "", "", "print the disk's size"),
    command("map", "", (0, Some(0)), "", "", "list the ranges allocated in the image itself"),
    anytime(command(
        "open",
        "o",
        (1, None),
        "Cd:i:kno:rst:U",
        "[-rsCnkU] [-t cache] [-d discard] [-i aio] [-o options] [path]",
        "open an image",
    )),
    anytime(command("quit", "q", (0, Some(0)), "", "", "exit")),
    command(
        "read",
        "r",
        (2, None),
        "bCl:pP:qs:v",
        "[-bCqv] [-P pattern [-s off] [-l len]] off len",
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
    command(
        "remove_break",
        "",
        (1, Some(1)),
        "",
        "tag",
        "remove a breakpoint (only with QEMU's blkdebug)",
    ),
    command(
        "reopen",
        "",
        (0, None),
        "c:o:rw",
        "[(-r|-w)] [-c cache] [-o options]",
        "change how the image is opened",
    ),
    command(
        "resume",
        "",
        (1, Some(1)),
        "",
        "tag",
        "resume a stopped request (only with QEMU's blkdebug)",
    ),
    anytime(command("sigraise", "", (1, Some(1)), "", "signal", "send the process a signal")),
    anytime(command("sleep", "", (1, Some(1)), "", "ms", "sleep for a number of milliseconds")),
    command(
        "truncate",
        "t",
        (1, Some(3)),
        "m:",
        "[-m preallocation] off",
        "change the disk's size",
    ),
    command(
        "wait_break",
        "",
        (1, Some(1)),
        "",
        "tag",
        "wait for a request to stop (only with QEMU's blkdebug)",
    ),
    command(
        "write",
        "w",
        (2, None),
        "bcCfnpP:qs:uz",
        "[-bcCfnquz] [-P pattern | -s file] off len",
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
    ('l', "number of bytes to verify (with -P)"),
    ('m', "preallocation of the added space: off, metadata, falloc or full"),
    ('b', "use the virtual machine's state, not the disk"),
    ('i', "only count the request as invalid"),
    ('n', "do not fall back to writing zeroes as data (with -z)"),
    ('P', "the byte to write (205 by default) or to verify"),
    ('q', "do not print statistics"),
    ('s', "write: file to take the data from; read: offset at which to start verifying (with -P)"),
    ('u', "allow unmapping (with -z)"),
    ('v', "dump the data read"),
    ('z', "write zeroes"),
];

/// The meaning of the option letters of `open`.
const OF_OPEN: &[(char, &str)] = &[
    ('C', "copy what is read from backing files into the image"),
    ('d', "discards: ignore (off) or unmap (on)"),
    ('i', "accepted for compatibility: threads, native or io_uring"),
    ('k', "accepted for compatibility; short for -i native"),
    ('n', "bypass the page cache; short for -t none"),
    ('o', "QEMU's options for the image, such as driver=raw"),
    ('r', "open the image read-only"),
    ('s', "write to a temporary overlay instead of the image"),
    ('t', "cache mode: none, writeback, writethrough, directsync or unsafe"),
    ('U', "read the image even while another program writes to it; requires -r"),
];

/// The meaning of the option letters of `reopen`.
const OF_REOPEN: &[(char, &str)] = &[
    ('c', "the new cache mode"),
    ('o', "QEMU's options for the image"),
    ('r', "make the image read-only"),
    ('w', "make the image writable"),
];

impl Command {
    /// The meaning of its option letters.
    fn letters(&self) -> &'static [(char, &'static str)] {
        match self.name {
            "open" => OF_OPEN,
            "reopen" => OF_REOPEN,
            _ => LETTERS,
        }
    }

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
        for (letter, meaning) in self.letters().iter().filter(|(l, _)| self.options.contains(*l)) {
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
                assert!(
                    command.letters().iter().any(|(l, _)| *l == letter),
                    "{} -{letter}",
                    command.name
                );
                assert!(command.synopsis.contains(letter), "{} -{letter}", command.name);
            }
        }
        assert!(Command::find("rv").is_some_and(|c| c.explanation().contains(" -v  dump")));
        assert!(Command::find("").is_none());
    }
}
