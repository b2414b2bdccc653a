//! The command lines in the documentation: what its code blocks tell the reader to type.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The names under which the program is run.
const PROGRAMS: [&str; 5] = ["isobath", "qemu-img", "qemu-io", "qemu-nbd", "qemu-storage-daemon"];

/// Lines that look like command lines: where they are, how they begin, and what they are. No others are left out.
const NO_COMMANDS: [(&str, &str, &str); 1] = [(
    "docs/commands/chain-generate.md",
    "isobath layer 00042 offset",
    "the pattern in a generated disk's sectors",
)];

/// A command line of the program.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct CommandLine {
    /// The page, from the repository's root.
    pub(crate) page: String,
    /// The number of its first line.
    pub(crate) number: usize,
    /// The program's name and its arguments, with values for placeholders.
    pub(crate) words: Vec<String>,
}

impl fmt::Display for CommandLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.page, self.number, self.words.join(" "))
    }
}

/// The command lines of every page.
pub(crate) fn command_lines() -> Vec<CommandLine> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![root.join("README.md")];
    add_pages(&root.join("docs"), &mut pages);
    let mut found = Vec::new();
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        let name = page.strip_prefix(&root).unwrap().to_str().unwrap();
        found.extend(in_page(name, &text));
    }
    found
}

fn add_pages(directory: &Path, pages: &mut Vec<PathBuf>) {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        if path.is_dir() {
            add_pages(&path, pages);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            pages.push(path);
        }
    }
}

/// The command lines in a page's code blocks, whether they are fenced or indented.
pub(crate) fn in_page(page: &str, text: &str) -> Vec<CommandLine> {
    let mut found = Vec::new();
    for block in blocks(text) {
        // Where commands have a prompt, lines without one are output.
        let prompt = block.iter().any(|(_, line)| line.starts_with("$ "));
        let mut lines = block.into_iter();
        while let Some((number, line)) = lines.next() {
            let typed = if prompt { line.strip_prefix("$ ") } else { Some(line) };
            let Some(typed) = typed.filter(|typed| !is_no_command(page, typed)) else { continue };
            let mut whole = typed.to_owned();
            while whole.ends_with('\\') {
                whole.pop();
                let (_, rest) = lines.next().expect("a line goes on after its last backslash");
                whole.push_str(rest);
            }
            let commands = shell_commands(&whole).into_iter().filter_map(arguments);
            found.extend(commands.map(|words| CommandLine { page: page.into(), number, words }));
        }
    }
    found
}

fn is_no_command(page: &str, line: &str) -> bool {
    NO_COMMANDS.iter().any(|(on, begin, _)| *on == page && line.starts_with(begin))
}

/// The code blocks of a page: their lines without the indentation, with their numbers.
fn blocks(text: &str) -> Vec<Vec<(usize, &str)>> {
    let mut blocks: Vec<Vec<(usize, &str)>> = Vec::new();
    let mut fenced = false;
    let mut indented = false;
    let mut after_blank = true;
    for (index, line) in text.lines().enumerate() {
        let inner = line.strip_prefix("    ");
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            indented = false;
            blocks.extend(fenced.then(Vec::new));
        } else if fenced {
            blocks.last_mut().unwrap().push((index + 1, line));
        } else if let Some(inner) = inner.filter(|_| indented || after_blank) {
            if !indented {
                blocks.push(Vec::new());
            }
            indented = true;
            blocks.last_mut().unwrap().push((index + 1, inner));
        } else {
            // An indented line that goes on with a paragraph is none of a block.
            indented = false;
        }
        after_blank = line.trim().is_empty();
    }
    blocks
}

/// The words of each command in a line of shell, without redirections and comments.
fn shell_commands(line: &str) -> Vec<Vec<String>> {
    let mut commands = vec![Vec::new()];
    let mut word: Option<String> = None;
    let mut redirected = false;
    let mut chars = line.chars().peekable();
    let mut end = |word: &mut Option<String>, commands: &mut Vec<Vec<String>>, to: bool| {
        // The file of a redirection is no word of the command.
        if let Some(word) = word.take()
            && !std::mem::replace(&mut redirected, false)
        {
            commands.last_mut().unwrap().push(word);
        }
        redirected |= to;
    };
    let mut quoted = false;
    while let Some(c) = chars.next() {
        let next = chars.peek().copied().unwrap_or(' ');
        match c {
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            '\\' => word.get_or_insert_default().extend(chars.next()),
            '$' if next.is_alphabetic() || next == '{' => {
                let mut name = String::new();
                while let Some(c) = chars.next_if(|c| c.is_alphanumeric() || "_{}".contains(*c)) {
                    name.push(c);
                }
                word.get_or_insert_default().push_str(&stand_in(name.trim_matches(['{', '}'])));
            }
            c if quoted => word.get_or_insert_default().push(c),
            '\'' => word.get_or_insert_default().extend(chars.by_ref().take_while(|c| *c != '\'')),
            '#' if word.is_none() => break,
            // A placeholder: <FILE>.
            '<' if next.is_alphabetic() => {
                let name: String = chars.by_ref().take_while(|c| *c != '>').collect();
                word.get_or_insert_default().push_str(&stand_in(&name.to_uppercase()));
            }
            '<' | '>' => {
                // A descriptor's number belongs to the redirection.
                word = word.filter(|number| number.parse::<u32>().is_err());
                end(&mut word, &mut commands, true);
            }
            '|' | '&' | ';' | '(' | ')' => {
                end(&mut word, &mut commands, false);
                commands.push(Vec::new());
            }
            c if c.is_whitespace() => end(&mut word, &mut commands, false),
            c => word.get_or_insert_default().push(c),
        }
    }
    end(&mut word, &mut commands, false);
    commands
}

/// The command line of the program in one of the shell: without what is in front of the program's name, and with values
/// for placeholders.
fn arguments(words: Vec<String>) -> Option<Vec<String>> {
    let wrapper = |word: &String| {
        let assignment = word.split_once('=').is_some_and(|(name, _)| is_capital(name));
        assignment || ["sudo", "env", "exec", "time"].contains(&word.as_str())
    };
    let mut words: Vec<String> = words.into_iter().skip_while(wrapper).collect();
    let program = Path::new(words.first()?).file_name()?.to_str()?;
    if !PROGRAMS.contains(&program) {
        return None;
    }
    for word in words.iter_mut().filter(|word| is_capital(word)) {
        *word = stand_in(word);
    }
    Some(words)
}

fn is_capital(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_uppercase())
        && word.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
}

/// A value for a placeholder or a variable of this name.
fn stand_in(name: &str) -> String {
    let value = match name {
        "N" | "COUNT" | "PID" => "1",
        "SIZE" | "LENGTH" | "OFFSET" | "BYTES" => "1M",
        "FMT" | "FORMAT" => "qcow2",
        "DIR" | "DIRECTORY" => "directory",
        _ => "file.qcow2",
    };
    value.to_owned()
}
