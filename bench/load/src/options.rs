//! What a load is: the options that drivers of devices and of files have in common.

use clap::{Args, ValueEnum};
use std::time::Duration;

/// What is done, and in which order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    Read,
    Write,
    Randread,
    Randwrite,
}

impl Kind {
    pub(crate) fn writes(self) -> bool {
        matches!(self, Self::Write | Self::Randwrite)
    }

    pub(crate) fn random(self) -> bool {
        matches!(self, Self::Randread | Self::Randwrite)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Randread => "randread",
            Self::Randwrite => "randwrite",
        }
    }
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Load {
    /// What to do
    #[arg(long, value_enum, default_value = "randread")]
    pub(crate) rw: Kind,
    /// Bytes of a request
    #[arg(long, value_parser = size, default_value = "4k")]
    pub(crate) bs: u64,
    /// Requests in flight, in each queue
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub(crate) qd: u16,
    /// Queues, each with a thread of its own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub(crate) queues: u16,
    /// How long to go on
    #[arg(long, value_parser = seconds, default_value = "5")]
    pub(crate) seconds: Duration,
    /// The first byte of the range that is used
    #[arg(long, value_parser = size, default_value = "0")]
    pub(crate) offset: u64,
    /// Bytes of the range that is used; to the end unless given
    #[arg(long, value_parser = size)]
    pub(crate) size: Option<u64>,
    /// Requests begin at multiples of this from the start of the range; as --bs unless given
    #[arg(long, value_parser = size)]
    pub(crate) stride: Option<u64>,
    /// Each place is used once, and the run ends early when all were
    #[arg(long)]
    pub(crate) once: bool,
    /// Look for completions all the time instead of sleeping until there are some
    #[arg(long)]
    pub(crate) poll: bool,
    /// Where the order of places and the bytes that are written come from
    #[arg(long, default_value_t = 1)]
    pub(crate) seed: u64,
}

/// Bytes: a number with k, m, g or t behind it, of powers of 1,024.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let shift = match text.chars().last().map(|unit| unit.to_ascii_lowercase()) {
        Some('k') => 10,
        Some('m') => 20,
        Some('g') => 30,
        Some('t') => 40,
        _ => 0,
    };
    let digits = if shift == 0 { text } else { &text[..text.len() - 1] };
    let number: u64 = digits.parse().map_err(|error| format!("{error}"))?;
    number.checked_mul(1 << shift).ok_or_else(|| "too large".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|error| format!("{error}"))?;
    Duration::try_from_secs_f64(seconds).map_err(|error| format!("{error}"))
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_have_units() {
        assert_eq!(size("512"), Ok(512));
        assert_eq!(size("4k"), Ok(4096));
        assert_eq!(size("2G"), Ok(2 << 30));
        assert!(size("k").is_err());
        assert!(size("").is_err());
        assert!(size("99999999999t").is_err());
    }
}
