//! `isobath completions`

use crate::failure::Outcome;
use crate::{Cli, screen};
use clap::builder::PossibleValuesParser;
use clap::{Arg, Command, CommandFactory};
use clap_complete::Shell;
use isobath_disk::MetadataMode;
use isobath_formats::Format;
use std::io::Write;

/// Print a shell completion script
///
/// For bash: `isobath completions bash > /etc/bash_completion.d/isobath`
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The shell to generate the script for
    shell: Shell,
}

pub(crate) fn run(args: &Args, _out: &mut dyn Write) -> Outcome {
    let script = script(args.shell);
    // A shell reads it.
    screen::raw().write_all(&script)?;
    Ok(0)
}

fn script(shell: Shell) -> Vec<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut with_values(Cli::command()), "isobath", &mut script);
    script
}

/// The command with the values of options of which there are only a few, also where the command itself parses them, to
/// refuse others in QEMU's words.
fn with_values(command: Command) -> Command {
    let name = command.get_name().to_owned();
    let command = command.mut_args(|argument| match values(&name, &argument) {
        Some(values) => argument.value_parser(PossibleValuesParser::new(values)),
        None => argument,
    });
    command.mut_subcommands(with_values)
}

/// The values of an option, if they are of a kind that has only a few.
fn values(command: &str, argument: &Arg) -> Option<Vec<&'static str>> {
    const CACHE: [&str; 5] = ["none", "writeback", "writethrough", "directsync", "unsafe"];
    const PREALLOCATION: [&str; 4] = ["off", "metadata", "falloc", "full"];
    if !argument.get_possible_values().is_empty() || !argument.get_action().takes_values() {
        return None;
    }
    let values: &[&str] = match (command, argument.get_long()?) {
        (_, name) if name == "format" || name.ends_with("-format") => {
            let foreign = Format::ALL.into_iter().map(Format::name);
            return Some(["qcow2", "raw", "luks"].into_iter().chain(foreign).collect());
        }
        (_, "metadata") => return Some(MetadataMode::ALL.map(MetadataMode::name).to_vec()),
        (_, "cache" | "source-cache" | "target-cache" | "backing-cache") => &CACHE,
        (_, "preallocation") => &PREALLOCATION,
        ("check", "repair") => &["leaks", "all"],
        (_, "aio") => &["threads", "native", "io_uring"],
        (_, "discard") => &["ignore", "off", "unmap", "on"],
        (_, "detect-zeroes") => &["off", "on", "unmap"],
        _ => return None,
    };
    Some(values.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_disk::ImageFormat;

    #[test]
    fn options_with_few_values_are_completed() {
        let command = with_values(Cli::command());
        let of = |command: &Command, name: &str| -> Vec<String> {
            let found = command.get_arguments().find(|argument| argument.get_long() == Some(name));
            let values = found.unwrap().get_possible_values();
            values.iter().map(|value| value.get_name().to_owned()).collect()
        };
        let command = |name: &str| command.find_subcommand(name).unwrap();
        for (name, option) in [
            ("info", "format"),
            ("create", "backing-format"),
            ("convert", "target-format"),
            ("compare", "b-format"),
        ] {
            let formats = of(command(name), option);
            assert!(
                formats.iter().any(|format| format == "qcow2"),
                "{name} --{option}: {formats:?}"
            );
            assert_eq!(formats.join(", "), ImageFormat::names());
        }
        assert_eq!(of(command("check"), "repair"), ["leaks", "all"]);
        assert_eq!(of(command("resize"), "preallocation").len(), 4);
        assert!(of(command("serve"), "metadata").contains(&"journal".to_owned()));
        assert!(of(command("convert"), "source-cache").contains(&"none".to_owned()));
        // An image's name is completed as a file.
        assert!(of(command("rebase"), "backing").is_empty());
    }

    #[test]
    fn what_is_completed_is_accepted() {
        for command in Cli::command().get_subcommands() {
            for argument in command.get_arguments() {
                for value in values(command.get_name(), argument).unwrap_or_default() {
                    let long = argument.get_long().unwrap();
                    let line = ["isobath", command.get_name(), &format!("--{long}={value}")];
                    let parsed = Cli::command().try_get_matches_from(line.map(String::from));
                    let wrong = parsed.err().is_some_and(|error| {
                        let kind = error.kind();
                        kind == clap::error::ErrorKind::ValueValidation
                            || kind == clap::error::ErrorKind::InvalidValue
                    });
                    assert!(!wrong, "{line:?}");
                }
            }
        }
    }

    #[test]
    fn a_script_has_the_values() {
        let script = String::from_utf8(script(Shell::Bash)).unwrap();
        assert!(script.contains("off metadata falloc full"), "{script}");
    }
}
