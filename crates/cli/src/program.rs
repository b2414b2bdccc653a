//! The name under which the program was started, and what follows from it.
//!
//! Started under a name in [`LINKS`], it takes the command line of that QEMU program, so that a link can replace the
//! program in scripts.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;
use std::path::Path;
use std::sync::OnceLock;

/// The link names that are recognized.
pub(crate) const LINKS: [&str; 4] = ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];

static NAME: OnceLock<&'static str> = OnceLock::new();

/// The program's name, for messages.
pub(crate) fn name() -> &'static str {
    NAME.get().copied().unwrap_or("isobath")
}

/// The command line to parse, from the one that was given.
pub(crate) fn command_line(given: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut line: Vec<OsString> = given.collect();
    let first = line.first().map(Path::new).and_then(Path::file_name);
    let link = LINKS.into_iter().find(|link| first.is_some_and(|first| first == *link));
    let Some(link) = link else { return line };
    // Set once, at the start.
    let _ = NAME.set(link);
    match link {
        "qemu-io" => line.splice(..1, ["isobath".into(), "io".into()]).for_each(drop),
        "qemu-nbd" | "qemu-storage-daemon" => {
            line.splice(..1, ["isobath".into(), link.into()]).for_each(drop);
        }
        _ => {
            // QEMU's tracing options.
            while line.get(1).is_some_and(|option| option == "-T" || option == "--trace") {
                line.drain(1..line.len().min(3));
            }
        }
    }
    line
}

/// What `--version` prints, if given, under a QEMU program's name: callers take the first number for QEMU's version.
pub(crate) fn version(line: &[OsString]) -> Option<String> {
    let place = if name() == "qemu-img" { 1 } else { 2 };
    let asked = line.get(place).is_some_and(|option| option == "-V" || option == "--version");
    let program = Some(name()).filter(|name| LINKS.contains(name) && asked)?;
    Some(format!("{program} version 7.2.0 (isobath {})", env!("CARGO_PKG_VERSION")))
}

/// Describes a wrong command line in one line, as qemu-img does.
pub(crate) fn usage(error: &clap::Error, line: &[OsString]) -> String {
    let context = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        Some(ContextValue::Strings(texts)) => texts.first().map(String::as_str),
        _ => None,
    };
    let argument = context(ContextKind::InvalidArg).unwrap_or_default();
    // As typed, or else without the name of its value.
    let last = line.last().and_then(|last| last.to_str()).filter(|last| last.starts_with('-'));
    let option = argument.split([' ', '=']).next().unwrap_or_default();
    let value = context(ContextKind::InvalidValue).unwrap_or_default();
    match error.kind() {
        ErrorKind::UnknownArgument if argument.starts_with('-') => {
            format!("unrecognized option '{argument}'")
        }
        ErrorKind::UnknownArgument => "Expecting one image file name".into(),
        ErrorKind::InvalidSubcommand => {
            let command = context(ContextKind::InvalidSubcommand).unwrap_or_default();
            format!("Command not found: {command}")
        }
        ErrorKind::InvalidValue if value.is_empty() => {
            format!("missing argument for option '{}'", last.unwrap_or(option))
        }
        ErrorKind::InvalidValue if option == "--output" => {
            "--output must be used with human or json as argument.".into()
        }
        ErrorKind::ValueValidation => match std::error::Error::source(error) {
            // QEMU's messages name what is wrong; those of number parsers do not.
            Some(reason) => match reason.to_string() {
                reason if reason.starts_with(|c: char| c.is_uppercase() || c == '\'') => reason,
                reason => format!("invalid value '{value}' for '{option}': {reason}"),
            },
            None => format!("invalid value '{value}' for '{option}'"),
        },
        ErrorKind::InvalidValue => {
            let mut text = format!("invalid value '{value}' for '{option}'");
            if let Some(ContextValue::Strings(known)) = error.get(ContextKind::ValidValue) {
                text = format!("{text}; expected {}", known.join(", "));
            }
            text
        }
        ErrorKind::MissingRequiredArgument => match error.get(ContextKind::InvalidArg) {
            Some(ContextValue::Strings(missing)) if missing.iter().all(|one| one == "<IMAGE>") => {
                "Expecting one image file name".into()
            }
            Some(ContextValue::Strings(missing)) if missing.iter().all(|m| m.starts_with('-')) => {
                format!("the given options also require {}", missing.join(", "))
            }
            Some(ContextValue::Strings(missing)) => {
                format!("missing argument {}", missing.join(", "))
            }
            _ => "missing argument".into(),
        },
        // Its first line, without the prefix.
        _ => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default();
            first.strip_prefix("error: ").unwrap_or(first).to_owned()
        }
    }
}

/// Whether `--help` is recommended after the message.
pub(crate) fn points_to_help(error: &clap::Error) -> bool {
    !matches!(error.kind(), ErrorKind::ValueValidation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_takes_the_command_line_of_the_program_it_replaces() {
        let line = |words: &[&str]| {
            command_line(words.iter().map(OsString::from)).join(&OsString::from(" "))
        };
        assert_eq!(line(&["/usr/bin/isobath", "info", "a"]), "/usr/bin/isobath info a");
        assert_eq!(line(&["/opt/qemu-io", "-c", "help", "a"]), "isobath io -c help a");
        assert_eq!(line(&["qemu-nbd", "-t", "a"]), "isobath qemu-nbd -t a");
        assert_eq!(line(&["qemu-storage-daemon"]), "isobath qemu-storage-daemon");
        assert_eq!(line(&["qemu-img", "-T", "x", "info", "a"]), "qemu-img info a");
        assert_eq!(line(&[]), "");
    }
}
