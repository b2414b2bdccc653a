//! The name under which the program was started, and what follows from it.
//!
//! Started under a name in [`LINKS`], it takes the command line of that QEMU program, so that a link can replace the
//! program in scripts.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, ArgMatches, Command, FromArgMatches};
use isobath_disk::ImageFormat;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::ops::Deref;
use std::path::Path;
use std::sync::OnceLock;

/// The link names that are recognized.
pub(crate) const LINKS: [&str; 4] = ["qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];

static NAME: OnceLock<&'static str> = OnceLock::new();

/// The program's name, for messages.
pub(crate) fn name() -> &'static str {
    NAME.get().copied().unwrap_or("isobath")
}

/// Whether it was started under a QEMU program's name.
pub(crate) fn is_link() -> bool {
    NAME.get().is_some()
}

/// Options that no link has: QEMU's programs accept the beginning of a long option's name, so that one more option
/// makes command lines ambiguous that they accept.
#[derive(Clone, Debug, Default)]
pub(crate) struct NotUnderLinks<T>(pub(crate) T);

impl<T> Deref for NotUnderLinks<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: clap::Args + Default> clap::Args for NotUnderLinks<T> {
    fn augment_args(command: Command) -> Command {
        if is_link() { command } else { T::augment_args(command) }
    }

    fn augment_args_for_update(command: Command) -> Command {
        if is_link() { command } else { T::augment_args_for_update(command) }
    }
}

impl<T: FromArgMatches + Default> FromArgMatches for NotUnderLinks<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        if is_link() { Ok(Self::default()) } else { T::from_arg_matches(matches).map(Self) }
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        if is_link() { Ok(()) } else { self.0.update_from_arg_matches(matches) }
    }
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

/// Whether the program was started under a QEMU program's name, and the first argument is one of these.
fn begins_with(line: &[OsString], options: [&str; 2]) -> Option<&'static str> {
    let place = if name() == "qemu-img" { 1 } else { 2 };
    let asked = line.get(place).is_some_and(|first| options.iter().any(|option| first == option));
    Some(name()).filter(|name| LINKS.contains(name) && asked)
}

/// The output of `--version`, if given, under a QEMU program's name: callers take the first number for QEMU's version.
pub(crate) fn version(line: &[OsString]) -> Option<String> {
    begins_with(line, ["-V", "--version"]).map(version_of)
}

fn version_of(program: &str) -> String {
    // As in QEMU, which omits the word for qemu-nbd alone.
    let word = if program == "qemu-nbd" { "" } else { " version" };
    format!("{program}{word} 7.2.0 (isobath {})", env!("CARGO_PKG_VERSION"))
}

/// The output of `--help`, if given, under the name of qemu-img: callers search it for options and formats. `isobath`
/// is the command line of this program.
pub(crate) fn help(line: &[OsString], isobath: &Command) -> Option<String> {
    let program = begins_with(line, ["-h", "--help"]).filter(|program| *program == "qemu-img")?;
    let mut text = format!(
        "{}\nusage: qemu-img [standard options] command [command options]\n\
         Work with disk images\n\n    \
         '-h', '--help'       print this help, or with a command its options\n    \
         '-V', '--version'    print the version\n    \
         '-T', '--trace'      accepted for compatibility\n\n\
         Command syntax:\n",
        version_of(program)
    );
    for command in QEMU_IMG.iter().filter_map(|name| isobath.find_subcommand(name)) {
        let arguments = command.get_arguments().filter(|argument| !argument.is_hide_set());
        let syntax: String = arguments.map(syntax).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(text, "  {}{syntax}", command.get_name());
    }
    let formats = ImageFormat::names().replace(',', "");
    let _ = write!(text, "\nSupported formats: {formats} file host_device");
    Some(text)
}

/// The commands of qemu-img.
const QEMU_IMG: [&str; 15] = [
    "amend", "bench", "bitmap", "check", "commit", "compare", "convert", "create", "dd", "info",
    "map", "measure", "snapshot", "rebase", "resize",
];

/// An argument in a command's syntax.
fn syntax(argument: &Arg) -> String {
    let values = argument.get_value_names().unwrap_or_default();
    let value = values.first().filter(|_| argument.get_action().takes_values());
    let value = value.map(|value| value.to_lowercase()).unwrap_or_default();
    let shown = match (argument.get_short(), argument.get_long()) {
        (Some(short), _) if value.is_empty() => format!("-{short}"),
        (Some(short), _) => format!("-{short} {value}"),
        (None, Some(long)) if value.is_empty() => format!("--{long}"),
        (None, Some(long)) => format!("--{long}={value}"),
        (None, None) => return format!(" {value}"),
    };
    if argument.is_required_set() { format!(" {shown}") } else { format!(" [{shown}]") }
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
            let suggested = context(ContextKind::SuggestedArg).filter(|_| !is_link());
            let similar = suggested.map(|similar| format!("; did you mean '{similar}'?"));
            let hint = instead(argument).or(similar).unwrap_or_default();
            format!("unrecognized option '{argument}'{hint}")
        }
        ErrorKind::UnknownArgument => match COMMAND.get() {
            Some(command) if command.has_commands => format!("Command not found: {argument}"),
            Some(Named { words, .. }) if words == "qemu-nbd" => {
                "Invalid number of arguments".into()
            }
            Some(Named { words, .. }) if !QEMU_IMG.contains(&words.as_str()) && words != "io" => {
                format!("unexpected argument '{argument}'")
            }
            Some(Named { words, .. }) if words == "create" => {
                format!("Unexpected argument: {argument}")
            }
            _ => "Expecting one image file name".into(),
        },
        ErrorKind::InvalidSubcommand => {
            let command = context(ContextKind::InvalidSubcommand).unwrap_or_default();
            match command {
                "stream" | "mirror" if !is_link() => format!(
                    "Command not found: {command}; a running server does that: 'isobath ctl SOCKET {command}'"
                ),
                command => {
                    let similar = context(ContextKind::SuggestedSubcommand).filter(|_| !is_link());
                    let hint = similar.map(|similar| format!("; did you mean '{similar}'?"));
                    format!("Command not found: {command}{}", hint.unwrap_or_default())
                }
            }
        }
        ErrorKind::InvalidValue if value.is_empty() && argument.starts_with(['<', '[']) => {
            let argument = argument.trim_matches(['<', '>', '[', ']', '.']);
            format!("{argument} is an empty name")
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

/// What to write instead of an option of qemu-nbd.
fn instead(option: &str) -> Option<String> {
    if COMMAND.get()?.words != "serve" {
        return None;
    }
    let ours = match option.split('=').next()? {
        "-p" | "--port" | "-b" | "--bind" => "--nbd [HOST:]PORT",
        "-k" | "--socket" => "--nbd unix:PATH",
        _ => return None,
    };
    Some(format!("; use {ours}, or 'isobath qemu-nbd', which has qemu-nbd's options"))
}

/// The command that a command line names, for messages.
struct Named {
    /// Its name, behind that of the command that it belongs to.
    words: String,
    /// Whether it has commands itself.
    has_commands: bool,
}

static COMMAND: OnceLock<Named> = OnceLock::new();

/// Finds the command that the command line names. `isobath` is the command line of this program.
pub(crate) fn note_command(line: &[OsString], isobath: &Command) {
    // Set once, at the start.
    let _ = COMMAND.set(named(line, isobath));
}

fn named(line: &[OsString], isobath: &Command) -> Named {
    let (mut command, mut words) = (isobath, Vec::new());
    for word in line.iter().skip(1).filter_map(|word| word.to_str()) {
        // A command with arguments of its own, such as a socket, comes before its commands.
        match command.find_subcommand(word) {
            Some(found) => {
                words.push(found.get_name());
                command = found;
            }
            None if words.is_empty() => break,
            None => {}
        }
    }
    Named { words: words.join(" "), has_commands: command.has_subcommands() }
}

/// The line that points to the help.
pub(crate) fn help_pointer() -> String {
    match COMMAND.get() {
        Some(Named { words, .. }) if !words.is_empty() && !is_link() => {
            format!(
                "Try 'isobath {} --help' for more information",
                words.replacen("ctl ", "ctl SOCKET ", 1)
            )
        }
        _ => format!("Try '{} --help' for more information", name()),
    }
}

/// Whether `--help` is recommended after the message.
pub(crate) fn points_to_help(error: &clap::Error) -> bool {
    !matches!(error.kind(), ErrorKind::ValueValidation)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ArgAction;

    #[test]
    fn an_arguments_syntax_is_as_qemu_img_shows_it() {
        let flag = Arg::new("quiet").short('q').long("quiet").action(ArgAction::SetTrue);
        let format = Arg::new("format").short('f').long("format").value_name("FMT");
        let output = Arg::new("output").long("output").value_name("OFMT");
        let backing = Arg::new("backing").short('b').value_name("FILE").required(true);
        let image = Arg::new("image").value_name("IMAGE").required(true);
        let shown: Vec<_> = [flag, format, output, backing, image].iter().map(syntax).collect();
        assert_eq!(shown, [" [-q]", " [-f fmt]", " [--output=ofmt]", " -b file", " image"]);
    }

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
