//! The `isobath` command: argument parsing and printing, nothing else.
//!
//! A command is a file under `commands/` with an `Args` and a `run`, and a line in
//! [`commands::Command`].

mod block_job;
mod cache;
mod calendar;
mod chain_files;
mod commands;
mod compressed;
mod cores;
mod descriptors;
mod failure;
mod full;
mod help;
mod host;
mod image_name;
mod json;
mod layers;
mod messages;
mod nbd_options;
mod null;
mod options;
mod overlays;
mod program;
mod runtime;
mod screen;
mod server;
mod size;
mod store;
mod stored;
mod temporary;
mod tls_objects;
mod trust;
mod workers;

#[cfg(test)]
#[path = "../tests/it/documented_commands/documented.rs"]
mod documented;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches, Parser};
use failure::{Failure, Outcome};
use isobath_image::sabotage::Sabotage;
use screen::Screen;
use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// A virtual-disk engine for qcow2 images with long snapshot chains
#[derive(Parser)]
#[command(name = "isobath", version, arg_required_else_help = true, args_override_self = true)]
#[command(after_help = help::AFTER)]
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
    if let Some(code) = server::keeper::keep() {
        return code;
    }
    if let Err(failure) = server::handed_in::receive() {
        return ended(Err(failure));
    }
    // A write beyond the limit on the size of files fails, and ends nothing.
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    // Tests inject defects into this program, to verify that they detect them.
    if cfg!(debug_assertions)
        && let Ok(defect) = std::env::var("ISOBATH_DEFECT")
        && let Some(defect) = Sabotage::from_name(&defect)
    {
        defect.begin_everywhere();
    }
    messages::take_over(
        EnvFilter::try_from_env("ISOBATH_LOG").unwrap_or_else(|_| EnvFilter::new("warn")),
    );
    let line = program::command_line(std::env::args_os());
    if let Some(version) = program::version(&line) {
        return ended(writeln!(io::stdout(), "{version}").map_err(Failure::from).map(|()| 0));
    }
    if let Some(help) = program::help(&line, &Cli::command()) {
        return ended(writeln!(io::stdout(), "{help}").map_err(Failure::from).map(|()| 0));
    }
    program::note_command(&line, &Cli::command());
    let (cli, sharing) = match parse(&line) {
        Ok(parsed) => parsed,
        Err(error)
            if error.use_stderr()
                && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand =>
        {
            messages::complain(program::usage(&error, &line));
            if program::points_to_help(&error) {
                messages::tell(program::help_pointer());
            }
            // qemu-img's code for a wrong command line is 1, clap's would be 2.
            return ExitCode::FAILURE;
        }
        // Requested help and versions go to stdout, unrequested help to stderr.
        Err(error) => match error.print() {
            _ if error.use_stderr() => return ExitCode::FAILURE,
            printed => return ended(printed.map_err(Failure::from).map(|()| 0)),
        },
    };
    let mut out = Screen::new(screen::raw());
    let result = cli.command.run(&mut out);
    let result = result.and_then(|code| Ok(out.flush().map(|()| code)?));
    ended(result.map_err(|failure| if sharing { failure.with_force_share() } else { failure }))
}

/// Parses a command line, and says whether `-U` would let the command read an image that others write. QEMU's programs
/// accept a long option's beginning, if no other option begins so.
fn parse(line: &[OsString]) -> Result<(Cli, bool), clap::Error> {
    let command = help::grouped(Cli::command()).infer_long_args(program::is_link());
    let matches = command.try_get_matches_from(line)?;
    let sharing = matches.subcommand().is_some_and(|(name, given)| {
        let flag = |name| given.try_get_one::<bool>(name).ok().flatten().copied();
        let is_given = |name| flag(name) == Some(true);
        let reads = match name {
            "bench" => !is_given("write"),
            "check" => !matches!(given.try_contains_id("repair"), Ok(true)),
            "index" => is_given("verify"),
            "io" => is_given("read_only") || is_given("snapshot"),
            "rebase" => false,
            _ => true,
        };
        flag("force_share") == Some(false) && reads
    });
    Ok((Cli::from_arg_matches(&matches)?, sharing))
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
    use clap::Arg;

    /// Parses a command line as the program does before it runs the command.
    fn parse_words(words: &[String]) -> Result<Cli, clap::Error> {
        parse(&program::command_line(words.iter().map(OsString::from))).map(|(cli, _)| cli)
    }

    #[test]
    fn every_command_line_in_the_documentation_is_accepted() {
        let mut documented = documented::command_lines();
        // The name under which the program runs is set once, by the first link.
        documented.sort_by_key(|line| line.words.first().is_none_or(|name| name != "isobath"));
        let wrong: Vec<String> = documented
            .iter()
            .filter_map(|line| Some(format!("{line}\n{}", parse_words(&line.words).err()?)))
            .collect();
        assert!(wrong.is_empty(), "{} wrong command lines:\n{}", wrong.len(), wrong.join("\n"));
        assert!(documented.len() > 60, "{} command lines", documented.len());
    }

    #[test]
    fn the_readme_lists_every_command() {
        let readme = include_str!("../../../README.md");
        for command in Cli::command().get_subcommands() {
            let name = command.get_name();
            let rows = [format!("| [`{name}"), format!("| `{name}")];
            assert!(rows.iter().any(|row| readme.contains(row)), "{name}");
        }
    }

    #[test]
    fn the_help_begins_with_what_is_used_most() {
        let command = Cli::command();
        let listed = command.get_subcommands().filter(|command| !command.is_hide_set());
        let listed: Vec<&str> = listed.map(clap::Command::get_name).collect();
        assert_eq!(listed[..4], ["create", "info", "check", "convert"]);
        let place = |name| listed.iter().position(|other| *other == name).unwrap();
        for (first, next) in [("serve", "ctl"), ("commit", "rebase"), ("chain", "index")] {
            assert_eq!(place(first) + 1, place(next));
        }
        assert_eq!(listed.last(), Some(&"completions"));
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
