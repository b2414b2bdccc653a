//! Sizes as qemu-img reads and prints them.

/// Parses a size such as `512`, `10G`, `1.5M` or `0x10000`: bytes, or with a suffix in powers of
/// 1024 (`k`, `M`, `G`, `T`, `P`, `E`; `b` for bytes), case ignored. Like QEMU, it accepts spaces and a plus sign
/// before the number, a fraction of zero bytes (`512.0`), and a suffix after a hexadecimal number.
///
/// # Errors
/// If it is not a size, or exceeds 2^63 - 1 bytes.
pub(crate) fn parse(text: &str) -> Result<u64, String> {
    const MOST: u64 = i64::MAX as u64;
    let invalid = || explained("image size") + &hint(text).unwrap_or_default();
    let too_large = || format!("Image size '{text}' must be less than 8 EiB!");
    let number = text.trim_start();
    let number = number.strip_prefix('+').unwrap_or(number);
    if let Some(number) = number.strip_prefix("0x").or_else(|| number.strip_prefix("0X")) {
        let digits = number.find(|c: char| !c.is_ascii_hexdigit()).unwrap_or(number.len());
        let (digits, suffix) = number.split_at(digits);
        let size = u128::from_str_radix(digits, 16).map_err(|_| invalid())?;
        let size = size.checked_mul(1 << shift(suffix).ok_or_else(invalid)?);
        return match size.map(u64::try_from) {
            Some(Ok(size)) if size <= MOST => Ok(size),
            _ => Err(too_large()),
        };
    }
    let digits = number.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(number.len());
    let (number, suffix) = number.split_at(digits);
    let shift = shift(suffix).ok_or_else(invalid)?;
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let parts = shift == 0 && fraction.bytes().any(|digit| digit != b'0');
    if whole.is_empty() || parts || !fraction.bytes().all(|digit| digit.is_ascii_digit()) {
        return Err(invalid());
    }
    let whole: u128 = whole.parse().map_err(|_| too_large())?;
    // More than nineteen digits may exceed a u64.
    let fraction = &fraction[..fraction.len().min(19)];
    let part = if fraction.is_empty() {
        0
    } else {
        let scale = 10u128.pow(fraction.len() as u32);
        // At most 10^19 * 2^60: no overflow.
        ((fraction.parse::<u128>().map_err(|_| invalid())? << shift) + scale / 2) / scale
    };
    let bytes = whole.checked_mul(1 << shift).and_then(|bytes| bytes.checked_add(part));
    match bytes.map(u64::try_from) {
        Some(Ok(size)) if size <= MOST => Ok(size),
        _ => Err(too_large()),
    }
}

/// Parses the size that an option has, as [`parse`] does.
///
/// # Errors
/// In QEMU's words, which differ from those for a size on its own.
pub(crate) fn parameter(option: &str, text: &str) -> Result<u64, String> {
    let wrong = |error: String| {
        if error.starts_with("Image size") {
            return error;
        }
        let hint = hint(text).unwrap_or_default();
        format!(
            "Parameter '{option}' expects a non-negative number below 2^64\nOptional suffix k, M, G, T, P or E \
             means kilo-, mega-, giga-, tera-, peta-\nand exabytes, respectively.{hint}"
        )
    };
    parse(text).map_err(wrong)
}

/// A disk's new size as the user gives it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NewSize {
    /// This many bytes.
    To(u64),
    /// This many bytes more.
    More(u64),
    /// This many bytes less.
    Less(u64),
}

impl NewSize {
    /// Parses a size, as [`parse`] does, with `+` or `-` in front if it is relative.
    ///
    /// # Errors
    /// In QEMU's words, if it is not a size.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (kind, number): (fn(u64) -> Self, _) = match text.split_at_checked(1) {
            Some(("+", number)) => (Self::More, number),
            Some(("-", number)) => (Self::Less, number),
            _ => (Self::To, text),
        };
        parse(number).map(kind).map_err(|_| {
            "Parameter 'size' expects a non-negative number below 2^64\nOptional suffix k, M, G, T, P \
             or E means kilo-, mega-, giga-, tera-, peta-\nand exabytes, respectively."
                .to_owned()
        })
    }

    /// The new size in bytes of a disk of `old` bytes; `None` if it would be out of range or 0.
    pub(crate) fn of(self, old: u64) -> Option<u64> {
        let new = match self {
            Self::To(size) => Some(size),
            Self::More(bytes) => old.checked_add(bytes),
            Self::Less(bytes) => old.checked_sub(bytes),
        };
        new.filter(|new| *new > 0)
    }
}

/// QEMU's message for text that is not a number.
pub(crate) fn explained(what: &str) -> String {
    let program = crate::program::name();
    format!(
        "Invalid {what} specified. You may use k, M, G, T, P or E suffixes for\n{program}: kilobytes, \
         megabytes, gigabytes, terabytes, petabytes and exabytes."
    )
}

/// A hint for a size with a unit of several letters, such as 10GiB; QEMU's programs have none.
fn hint(text: &str) -> Option<String> {
    let short = with_one_letter(text).filter(|_| !crate::program::is_link())?;
    Some(format!(
        "\n{}: '{text}': write {short}, which counts in powers of 1024",
        crate::program::name()
    ))
}

/// A size whose suffix is a letter with `B` or `iB` behind it, with the letter alone.
fn with_one_letter(text: &str) -> Option<&str> {
    let short = text.strip_suffix(['B', 'b'])?;
    let short = short.strip_suffix('i').unwrap_or(short);
    let number = short.trim_start_matches(['+', '-']);
    let number =
        number.strip_suffix(['k', 'K', 'm', 'M', 'g', 'G', 't', 'T', 'p', 'P', 'e', 'E'])?;
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    (is_number && !number.is_empty()).then_some(short)
}

/// The base-2 logarithm of a suffix's factor.
fn shift(suffix: &str) -> Option<u32> {
    match suffix {
        "" | "b" | "B" => Some(0),
        "k" | "K" => Some(10),
        "m" | "M" => Some(20),
        "g" | "G" => Some(30),
        "t" | "T" => Some(40),
        "p" | "P" => Some(50),
        "e" | "E" => Some(60),
        _ => None,
    }
}

/// A size as QEMU prints it: three significant digits and a binary unit, `10 GiB`, `196 KiB`, `1.5 TiB`, `0 B`.
pub(crate) fn human(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
    // The unit changes at 1000 of the smaller one, so that three digits always suffice.
    let mut unit = 0;
    let mut value = bytes as f64;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{} {}B", three_digits(value), UNITS[unit])
}

/// `printf("%0.3g")` of a number below 1024.
fn three_digits(value: f64) -> String {
    let mut decimals = match value {
        v if v < 1.0 => 3,
        v if v < 10.0 => 2,
        v if v < 100.0 => 1,
        _ => 0,
    };
    let mut text = format!("{value:.decimals$}");
    // Rounding may have carried into another digit before the point.
    if decimals > 0 && text.find('.').unwrap_or(text.len()) > 3 - decimals.min(2) {
        decimals -= 1;
        text = format!("{value:.decimals$}");
    }
    if text.contains('.') {
        text.truncate(text.trim_end_matches('0').trim_end_matches('.').len());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_qemu_img_reads_them() {
        for (text, size) in [
            ("0", 0),
            ("512", 512),
            ("10G", 10 << 30),
            ("1.5M", 3 << 19),
            ("0.1k", 102),
            ("64k", 65536),
            ("7b", 7),
            ("0x1000", 4096),
            ("7E", 7 << 60),
            ("1024.0", 1024),
            ("512.", 512),
            ("1.k", 1024),
            (" +5K", 5120),
            ("0x10k", 16384),
        ] {
            assert_eq!(parse(text), Ok(size), "{text}");
        }
        for text in [
            "",
            "x",
            "1x",
            "-1",
            "1.5",
            ".5M",
            "1.2.3M",
            "8E",
            "99999999999999999E",
            "0xffffP",
            "1kk",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_size_with_a_unit_of_several_letters_is_answered_with_one_letter() {
        for (text, short) in [
            ("10GiB", Some("10G")),
            ("10GB", Some("10G")),
            ("+1.5mib", Some("+1.5m")),
            ("-4kB", Some("-4k")),
            ("10B", None),
            ("GiB", None),
            ("10iB", None),
            ("xGB", None),
            ("10G", None),
        ] {
            assert_eq!(with_one_letter(text), short, "{text}");
            let said = parse(text).is_err_and(|error| error.contains(": write "));
            assert_eq!(said, short.is_some(), "{text}");
        }
        assert!(parameter("size", "1GiB").unwrap_err().ends_with("powers of 1024"));
    }

    #[test]
    fn sizes_are_printed_as_qemu_img_prints_them() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (999, "999 B"),
            (1000, "0.977 KiB"),
            (1023, "0.999 KiB"),
            (1024, "1 KiB"),
            (200_704, "196 KiB"),
            (1_000_448, "977 KiB"),
            (10 << 20, "10 MiB"),
            (3 << 29, "1.5 GiB"),
            (1 << 30, "1 GiB"),
            (1000 << 30, "0.977 TiB"),
            (10_695_475, "10.2 MiB"),
        ] {
            assert_eq!(human(bytes), text, "{bytes}");
        }
    }
}
