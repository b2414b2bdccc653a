//! Options common to several commands, parsed as qemu-img does.

use clap::ValueEnum;
use isobath_disk::{ImageFormat, SnapshotChoice};
use isobath_qcow2::text::Shown;
use isobath_storage::Locking;

/// `--output`: for users or for programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutputFormat {
    /// Text
    #[default]
    Human,
    /// JSON
    Json,
}

/// How to lock an image for reading, with or without `-U` (`--force-share`).
pub(crate) fn locking(force_share: bool) -> Locking {
    if force_share { Locking::Present } else { Locking::Exclusive }
}

/// Parses the value of `-l`: an ID or a name, or `snapshot.id=ID,snapshot.name=NAME`.
pub(crate) fn snapshot(text: &str) -> Result<SnapshotChoice, String> {
    if !text.starts_with("snapshot.") {
        return Ok(SnapshotChoice::IdOrName(text.to_owned()));
    }
    let (mut id, mut name) = (None, None);
    for (option, value) in parse(&[text.to_owned()]) {
        match option.as_str() {
            "snapshot.id" => id = Some(value),
            "snapshot.name" => name = Some(value),
            _ => {
                let program = crate::program::name();
                return Err(format!(
                    "Invalid parameter '{option}'\n{program}: Failed in parsing snapshot param '{text}'"
                ));
            }
        }
    }
    Ok(SnapshotChoice::Exactly { id, name })
}

/// Parses a format by QEMU's name.
pub(crate) fn format(name: &str) -> Result<ImageFormat, String> {
    ImageFormat::from_name(name).ok_or_else(|| {
        format!("Unknown file format '{name}'\nSupported formats: {}", ImageFormat::names())
    })
}

/// A format as it is named. As in QEMU, drivers of files and devices count as formats: raw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NamedFormat {
    pub(crate) format: ImageFormat,
    /// The driver, if it is one of those.
    pub(crate) protocol: Option<&'static str>,
}

impl NamedFormat {
    /// QEMU's name.
    pub(crate) fn name(self) -> &'static str {
        self.protocol.unwrap_or(self.format.name())
    }

    /// The driver, if it is one for devices.
    pub(crate) fn device(self) -> Option<&'static str> {
        self.protocol.filter(|protocol| *protocol != "file")
    }
}

impl From<ImageFormat> for NamedFormat {
    fn from(format: ImageFormat) -> Self {
        Self { format, protocol: None }
    }
}

/// Parses the name of a format, or of a driver in its place.
pub(crate) fn named_format(name: &str) -> Result<NamedFormat, String> {
    match ["file", "host_device", "host_cdrom"].into_iter().find(|driver| *driver == name) {
        Some(driver) => Ok(NamedFormat { format: ImageFormat::Raw, protocol: Some(driver) }),
        None => format(name).map(NamedFormat::from),
    }
}

/// Parses a value of `-o`, which others may follow.
///
/// # Errors
/// If it cannot be joined with others by commas, in QEMU's words.
pub(crate) fn list(text: &str) -> Result<String, String> {
    let commas = text.len() - text.trim_end_matches(',').len();
    if text.is_empty() || text.starts_with(',') || !commas.is_multiple_of(2) {
        return Err(format!("Invalid option list: {text}"));
    }
    Ok(text.to_owned())
}

/// The pairs in the values of `-o`: `NAME=VALUE` separated by commas; `,,` is a literal comma. A name alone means
/// `NAME=on`.
pub(crate) fn parse(values: &[String]) -> Vec<(String, String)> {
    let mut pairs = Vec::new();
    for value in values {
        let mut option = String::new();
        let mut rest = value.chars().peekable();
        loop {
            match rest.next() {
                Some(',') if rest.next_if_eq(&',').is_some() => option.push(','),
                Some(',') => pairs.extend(pair(&std::mem::take(&mut option))),
                Some(c) => option.push(c),
                None => break,
            }
        }
        pairs.extend(pair(&option));
    }
    pairs
}

fn pair(option: &str) -> Option<(String, String)> {
    let (name, value) = option.split_once('=').unwrap_or((option, "on"));
    (!name.is_empty()).then(|| (name.to_owned(), value.to_owned()))
}

/// The value of an option that is on or off, in any of QEMU's spellings.
pub(crate) fn on_off(name: &str, value: &str) -> Result<bool, String> {
    match value {
        "on" | "yes" | "true" | "y" => Ok(true),
        "off" | "no" | "false" | "n" => Ok(false),
        _ => Err(format!("Parameter '{name}' expects 'on' or 'off'")),
    }
}

/// The error of an option that is not among `known`, in QEMU's words; under the program's own name, with the nearest of
/// those.
pub(crate) fn unknown<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let error = format!("Invalid parameter '{name}'");
    match nearest(name, known).filter(|_| !crate::program::is_link()) {
        Some(nearest) => format!("{error}; did you mean '{nearest}'?"),
        None => error,
    }
}

fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// As alike as a command that is suggested for a wrong one.
    const LIKE: f64 = 0.8;
    let rated = known.into_iter().map(|known| (strsim::jaro(name, known), known));
    let rated = rated.filter(|(rate, _)| *rate > LIKE);
    rated.max_by(|(one, _), (other, _)| one.total_cmp(other)).map(|(_, known)| known)
}

/// A name from an image or a file system made safe to print.
pub(crate) fn printable(name: &str) -> String {
    Shown(name).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_option_is_compared_with_those_that_there_are() {
        let known = ["backing_file", "backing_fmt", "cluster_size", "size", "encrypt.key-secret"];
        for (name, expected) in [
            ("clustersize", Some("cluster_size")),
            ("backing-fmt", Some("backing_fmt")),
            ("encrypt.keysecret", Some("encrypt.key-secret")),
            ("bogus", None),
            ("", None),
            ("x", None),
        ] {
            assert_eq!(nearest(name, known), expected, "{name}");
        }
        let says = "Invalid parameter 'siz'; did you mean 'size'?";
        assert_eq!(unknown("siz", known), says);
        assert_eq!(unknown("bogus", known), "Invalid parameter 'bogus'");
    }

    #[test]
    fn options_are_split_as_qemu_img_splits_them() {
        let pairs = parse(&["a=1,b=x,,y,c".to_owned(), String::new(), "d=e=f".to_owned()]);
        let expected = [("a", "1"), ("b", "x,y"), ("c", "on"), ("d", "e=f")];
        let pairs: Vec<_> = pairs.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        assert_eq!(pairs, expected);
    }
}
