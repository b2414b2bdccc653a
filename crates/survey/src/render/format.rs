//! Numbers, sizes and times for users.

use chrono::{DateTime, Utc};

/// A whole number, with its digits in groups of three.
pub(super) fn number(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A size, in powers of 1024.
pub(super) fn bytes(value: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if value < 1024 {
        return format!("{value} B");
    }
    let mut size = value as f64;
    let mut unit = "B";
    for next in UNITS {
        if size < 1023.95 {
            break;
        }
        size /= 1024.0;
        unit = next;
    }
    if size < 10.0 { format!("{size:.2} {unit}") } else { format!("{size:.1} {unit}") }
}

/// A span of time, given in seconds.
pub(super) fn span(seconds: u32) -> String {
    let days = f64::from(seconds) / 86_400.0;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..5400 => format!("{:.0} min", f64::from(seconds) / 60.0),
        5400..129_600 => format!("{:.1} h", f64::from(seconds) / 3600.0),
        129_600..63_072_000 => format!("{days:.0} days"),
        _ => format!("{:.1} years", days / 365.0),
    }
}

/// A span of time, given in microseconds.
pub(super) fn microseconds(value: f64) -> String {
    if value < 1000.0 { format!("{value:.1} µs") } else { format!("{:.2} ms", value / 1000.0) }
}

/// A share (0 to 1) as a percentage.
pub(super) fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// A time as a date, in UTC.
pub(super) fn date(seconds: i64) -> String {
    moment(seconds, "%Y-%m-%d")
}

/// A time, in UTC.
pub(super) fn time(seconds: i64) -> String {
    moment(seconds, "%Y-%m-%d %H:%M UTC")
}

/// A time in RFC 3339 format.
pub(super) fn rfc3339(seconds: i64) -> String {
    moment(seconds, "%Y-%m-%dT%H:%M:%SZ")
}

fn moment(seconds: i64, format: &str) -> String {
    DateTime::<Utc>::from_timestamp(seconds, 0)
        .map_or_else(|| seconds.to_string(), |time| time.format(format).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_can_read_it() {
        assert_eq!([0, 999, 1000, 1_234_567].map(number), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(
            [0, 1023, 1024, 1_073_741_823, 10 << 30, u64::MAX].map(bytes),
            ["0 B", "1023 B", "1.00 KiB", "1.00 GiB", "10.0 GiB", "16.0 EiB"]
        );
        assert_eq!(
            [0, 59, 90, 7200, 86_400 * 3, 86_400 * 730].map(span),
            ["0 s", "59 s", "2 min", "2.0 h", "3 days", "2.0 years"]
        );
        assert_eq!(time(1_600_000_000), "2020-09-13 12:26 UTC");
        assert_eq!(rfc3339(-1), "1969-12-31T23:59:59Z");
        assert_eq!(date(i64::MAX), i64::MAX.to_string());
    }
}
