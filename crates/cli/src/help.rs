//! The help of the program itself: its commands by what they are for, and examples.

use clap::Command;
use std::fmt::Write as _;

/// What follows the options.
pub(crate) const AFTER: &str = "\
Examples:
  isobath create -f qcow2 -b base.qcow2 -F qcow2 vm.qcow2
  isobath info --backing-chain vm.qcow2
  isobath serve vm.qcow2 --nbd unix:/run/vm.sock --qmp unix:/run/vm.qmp
  isobath ctl /run/vm.qmp snapshot monday.qcow2

'isobath COMMAND --help' describes a command; its manual page, isobath-COMMAND(1), has more.

ISOBATH_LOG sets the log level on stderr (error, warn, info, debug, trace). ISOBATH_IO=threads does without io_uring.
ISOBATH_CORE_DUMPS=on lets servers, and commands that read secrets, leave core dumps and be traced.";

/// The commands of each group, in the order of the help.
const GROUPS: [(&str, &[&str]); 6] = [
    (
        "Images",
        &[
            "create", "info", "check", "convert", "resize", "snapshot", "commit", "rebase", "fork",
            "measure", "amend", "bitmap", "seal",
        ],
    ),
    ("Long chains", &["chain", "index"]),
    ("Stores", &["push", "pull", "remote"]),
    ("Servers", &["serve", "ctl"]),
    ("Contents", &["io", "map", "compare", "dd", "bench"]),
    ("The program", &["install-links", "completions", "help"]),
];

/// The longest line.
const WIDTH: usize = 100;

/// What `help` says of itself, as clap describes it.
const HELP: &str = "Print this message or the help of the given subcommand(s)";

/// The program with its commands in groups, which clap does not have.
pub(crate) fn grouped(isobath: Command) -> Command {
    let heading = *isobath.get_styles().get_header();
    let mut text = String::from("{about-with-newline}\n{usage-heading} {usage}\n");
    for (title, names) in GROUPS {
        // Writing to a string does not fail.
        let _ = writeln!(text, "\n{heading}{title}:{heading:#}");
        for name in names {
            let about = match isobath.find_subcommand(name).and_then(Command::get_about) {
                Some(about) => about.to_string(),
                None => HELP.to_owned(),
            };
            entry(&mut text, name, &about, *isobath.get_styles().get_literal());
        }
    }
    let _ = write!(text, "\n{heading}Options:{heading:#}\n{{options}}{{after-help}}");
    isobath.help_template(text)
}

/// A command and what it does, in columns.
fn entry(text: &mut String, name: &str, about: &str, literal: clap::builder::styling::Style) {
    let names = GROUPS.iter().flat_map(|(_, names)| *names).map(|name| name.len());
    let column = names.max().unwrap_or_default() + 4;
    let _ = write!(text, "  {literal}{name}{literal:#}{:1$}", "", column - 2 - name.len());
    let mut at = column;
    for word in about.split(' ') {
        if at > column && at + word.len() > WIDTH {
            let _ = write!(text, "\n{:column$}", "");
            at = column;
        }
        let space = if at > column { " " } else { "" };
        let _ = write!(text, "{space}{word}");
        at += space.len() + word.len();
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cli;
    use clap::CommandFactory;

    #[test]
    fn each_command_is_in_one_group_with_what_it_does() {
        let isobath = Cli::command();
        let mut grouped_names: Vec<&str> =
            GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        let listed = isobath.get_subcommands().filter(|command| !command.is_hide_set());
        let mut names: Vec<&str> = listed.map(Command::get_name).chain(["help"]).collect();
        grouped_names.sort_unstable();
        names.sort_unstable();
        assert_eq!(grouped_names, names);
        let help = grouped(Cli::command()).render_long_help().to_string();
        for command in isobath.get_subcommands().filter(|command| !command.is_hide_set()) {
            let about = command.get_about().unwrap().to_string();
            let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(words(&help).contains(&format!("{} {about}", command.get_name())), "{help}");
        }
        assert!(help.lines().all(|line| line.chars().count() <= WIDTH), "{help}");
        assert!(!help.contains('{'), "{help}");
    }

    #[test]
    fn what_the_help_says_of_itself_is_what_clap_says() {
        let mut isobath = Cli::command();
        isobath.build();
        let help = isobath.find_subcommand("help").and_then(Command::get_about);
        assert_eq!(help.unwrap().to_string(), HELP);
    }
}
