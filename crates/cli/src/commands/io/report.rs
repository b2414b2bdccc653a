//! The output of commands, in qemu-io's forms.

use std::fmt::Write as _;
use std::time::Duration;

/// A completed request, as reported by the two lines of statistics.
pub(super) struct Done {
    /// `read`, `wrote` or `discard`.
    pub(super) verb: &'static str,
    /// Where, in bytes.
    pub(super) offset: u64,
    /// How much, in bytes.
    pub(super) bytes: u64,
    /// How long it took.
    pub(super) time: Duration,
}

impl Done {
    /// Two lines for users.
    pub(super) fn for_people(&self) -> String {
        let Self { verb, offset, bytes, time } = self;
        let rates = self.rates();
        format!(
            "{verb} {bytes}/{bytes} bytes at offset {offset}\n\
             {}, 1 ops; {} ({}/sec and {:.4} ops/sec)\n",
            amount(*bytes as f64),
            duration(*time, false),
            amount(rates.0),
            rates.1
        )
    }

    /// One line for programs (`-C`): bytes, requests, time, bytes per second, requests per second.
    pub(super) fn for_programs(&self) -> String {
        let (bytes, requests) = self.rates();
        format!("{},1,{},{bytes:.3},{requests:.3}\n", self.bytes, duration(self.time, true))
    }

    /// Bytes and requests per second.
    fn rates(&self) -> (f64, f64) {
        let seconds = self.time.max(Duration::from_nanos(1)).as_secs_f64();
        (self.bytes as f64 / seconds, 1.0 / seconds)
    }
}

/// An amount of bytes with a binary unit: `64 KiB`, `1.500 KiB`, `512 bytes`.
pub(super) fn amount(bytes: f64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = (0..UNITS.len()).rev().find(|unit| bytes >= 1024_f64.powi(*unit as i32 + 1));
    let (number, unit) = match unit {
        Some(unit) => (format!("{:.3}", bytes / 1024_f64.powi(unit as i32 + 1)), UNITS[unit]),
        None => (format!("{bytes:.6}"), "bytes"),
    };
    let whole = number.split_once('.').filter(|(_, part)| part.bytes().all(|digit| digit == b'0'));
    format!("{} {unit}", whole.map_or(number.as_str(), |(whole, _)| whole))
}

/// Formats a time: `00.01 sec`; from one minute, or if `full`, `0:01:00.01`.
fn duration(time: Duration, full: bool) -> String {
    let seconds = time.as_secs();
    let hundredths = time.subsec_millis() / 10;
    if full || seconds >= 60 {
        let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
        format!("{hours}:{minutes:02}:{:02}.{hundredths:02}", seconds % 60)
    } else {
        format!("{seconds:02}.{hundredths:02} sec")
    }
}

/// The bytes in hexadecimal and ASCII, 16 per line; `offset` is that of the first byte.
pub(super) fn dump(offset: u64, bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() * 5);
    for (line, at) in bytes.chunks(16).zip((offset..).step_by(16)) {
        let _ = write!(text, "{at:08x}:  ");
        for byte in line {
            let _ = write!(text, "{byte:02x} ");
        }
        text.push(' ');
        for byte in line {
            text.push(if byte.is_ascii_alphanumeric() { char::from(*byte) } else { '.' });
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_have_three_decimals_or_none() {
        for (bytes, text) in [
            (0.0, "0 bytes"),
            (512.0, "512 bytes"),
            (413.862_130_4, "413.862130 bytes"),
            (1023.0, "1023 bytes"),
            (1024.0, "1 KiB"),
            (1536.0, "1.500 KiB"),
            (999_990.0, "976.553 KiB"),
            (1_048_576.0, "1 MiB"),
            (3e19, "26.021 EiB"),
        ] {
            assert_eq!(amount(bytes), text);
        }
    }

    #[test]
    fn times_grow_a_clock() {
        assert_eq!(duration(Duration::from_millis(12), false), "00.01 sec");
        assert_eq!(duration(Duration::from_millis(12), true), "0:00:00.01");
        assert_eq!(duration(Duration::from_millis(3_725_120), false), "1:02:05.12");
    }

    #[test]
    fn statistics_for_people_and_for_programs() {
        let done = Done { verb: "wrote", offset: 7, bytes: 1024, time: Duration::from_millis(500) };
        assert_eq!(
            done.for_people(),
            "wrote 1024/1024 bytes at offset 7\n1 KiB, 1 ops; 00.50 sec (2 KiB/sec and 2.0000 ops/sec)\n"
        );
        assert_eq!(done.for_programs(), "1024,1,0:00:00.50,2048.000,2.000\n");
    }
}
