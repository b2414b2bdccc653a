//! The `isobath` command: argument parsing and printing, nothing else.
//!
//! A command is a file under `commands/` with an `Args` and a `run`, and a line in
//! [`commands::Command`].

mod block_job;
mod cache;
mod calendar;
mod chain_files;
mod commands;
mod descriptors;
mod failure;
mod image_name;
mod json;
mod messages;
mod options;
mod program;
mod runtime;
mod server;
mod size;
mod temporary;
mod workers;

use clap::Parser;
use clap::error::ErrorKind;
use failure::{Failure, Outcome};
use std::io::{self, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// A virtual-disk engine for qcow2 images with long snapshot chains
#[derive(Parser)]
#[command(name = "isobath", version, arg_required_else_help = true, args_override_self = true)]
#[command(
    after_help = "ISOBATH_LOG sets the log level on stderr (error, warn, info, debug, trace)."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: commands::Command,
}

fn main() -> ExitCode {
    let code = run();
    messages::settle();
    code
}

fn run() -> ExitCode {
    messages::take_over(
        EnvFilter::try_from_env("ISOBATH_LOG").unwrap_or_else(|_| EnvFilter::new("warn")),
    );
    let line = program::command_line(std::env::args_os());
    if let Some(version) = program::version(&line) {
        return ended(writeln!(io::stdout(), "{version}").map_err(Failure::from).map(|()| 0));
    }
    let cli = match Cli::try_parse_from(&line) {
        Ok(cli) => cli,
        Err(error)
            if error.use_stderr()
                && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand =>
        {
            messages::complain(program::usage(&error, &line));
            if program::points_to_help(&error) {
                let name = program::name();
                messages::tell(format_args!("Try '{name} --help' for more information"));
            }
            // qemu-img's code for a wrong command line is 1, clap's would be 2.
            return ExitCode::FAILURE;
        }
        // Help and version, which were asked for, go to stdout; help that was not asked for to stderr.
        Err(error) => match error.print() {
            _ if error.use_stderr() => return ExitCode::FAILURE,
            printed => return ended(printed.map_err(Failure::from).map(|()| 0)),
        },
    };
    let mut out = io::stdout().lock();
    let result = cli.command.run(&mut out);
    ended(result.and_then(|code| Ok(out.flush().map(|()| code)?)))
}

/// Returns the exit code and prints the error, if any.
fn ended(result: Outcome) -> ExitCode {
    match result {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            if let Some(message) = &failure.message {
                messages::complain(message);
            }
            ExitCode::from(failure.code)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{Arg, CommandFactory};
    use std::path::Path;

    /// The lines in the fenced blocks of a page.
    fn fenced(text: &str) -> Vec<&str> {
        let mut inside = false;
        let mut lines = Vec::new();
        for line in text.lines() {
            if line.starts_with("```") {
                inside = !inside;
            } else if inside {
                lines.push(line.trim_start_matches("$ "));
            }
        }
        lines
    }

    #[test]
    fn every_command_line_in_the_documentation_can_be_used() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut pages = vec![root.join("README.md")];
        let commands = std::fs::read_dir(root.join("docs/commands")).unwrap();
        pages.extend(commands.map(|entry| entry.unwrap().path()));
        let mut seen = 0;
        for page in pages {
            let text = std::fs::read_to_string(&page).unwrap();
            for line in fenced(&text).into_iter().filter(|line| line.starts_with("isobath ")) {
                // Enough of a shell for what the pages show.
                let command = line.split(" #").next().unwrap_or(line).replace('\\', "");
                let mut words = Vec::new();
                for (number, part) in command.split('\'').enumerate() {
                    if number % 2 == 1 {
                        words.push(part.to_owned());
                    } else {
                        words.extend(part.split_whitespace().map(str::to_owned));
                    }
                }
                assert_eq!(words.iter().filter(|word| *word == "isobath").count(), 1, "{line}");
                if let Err(error) = Cli::try_parse_from(&words) {
                    assert!(line.contains("layer 00042"), "{}: {line}\n{error}", page.display());
                }
                seen += 1;
            }
        }
        assert!(seen > 40, "{seen} command lines");
    }

    #[test]
    fn the_commands_have_the_options_of_qemus() {
        let isobath = Cli::command();
        let options = include_str!("../tests/qemu_img_options.txt");
        for line in options.lines().filter(|line| !line.starts_with('#')) {
            let (command, forms) = line.split_once(' ').unwrap();
            let command = if command == "qemu-io" { "io" } else { command };
            let command = isobath.find_subcommand(command).unwrap();
            let has = |arg: &Arg, form: &str| match form.strip_prefix("--") {
                Some(long) => {
                    arg.get_long() == Some(long)
                        || arg.get_all_aliases().is_some_and(|all| all.contains(&long))
                }
                None => arg.get_short() == form.chars().nth(1),
            };
            let found =
                command.get_arguments().any(|arg| forms.split(' ').all(|form| has(arg, form)));
            assert!(found, "{line}");
        }
    }
}
