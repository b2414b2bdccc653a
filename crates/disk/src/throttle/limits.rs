//! The limits of a group, as users give them.

/// The greatest limit: QEMU's.
const MOST: u64 = 1_000_000_000_000_000;

/// What a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitKind {
    /// Bytes of reads and writes.
    BpsTotal,
    /// Bytes of reads.
    BpsRead,
    /// Bytes of writes.
    BpsWrite,
    /// Reads and writes.
    IopsTotal,
    /// Reads.
    IopsRead,
    /// Writes.
    IopsWrite,
}

impl LimitKind {
    /// All kinds. Each stands at the place that its number names.
    pub const ALL: [Self; 6] = [
        Self::BpsTotal,
        Self::BpsRead,
        Self::BpsWrite,
        Self::IopsTotal,
        Self::IopsRead,
        Self::IopsWrite,
    ];

    /// Its name in QEMU's `ThrottleLimits`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BpsTotal => "bps-total",
            Self::BpsRead => "bps-read",
            Self::BpsWrite => "bps-write",
            Self::IopsTotal => "iops-total",
            Self::IopsRead => "iops-read",
            Self::IopsWrite => "iops-write",
        }
    }

    pub(super) const fn counts_bytes(self) -> bool {
        matches!(self, Self::BpsTotal | Self::BpsRead | Self::BpsWrite)
    }
}

/// A limit, in units per second: bytes or requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The rate in the long run; 0: no limit.
    pub average: u64,
    /// The rate during a burst; 0: no bursts beyond a tenth of a second's worth.
    pub burst: u64,
    /// The longest burst at that rate, in seconds.
    pub burst_length: u64,
}

impl Default for Limit {
    fn default() -> Self {
        Self { average: 0, burst: 0, burst_length: 1 }
    }
}

/// All limits of a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    kinds: [Limit; 6],
    /// A request of more bytes counts as several: its bytes divided by this. 0: each counts as one.
    pub iops_size: u64,
}

/// Why limits cannot be set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitsError {
    /// There is a limit on all requests, and one on some of them.
    #[error(
        "limits on reads and writes together and on each of them exclude each other, but both \
         '{total}' and '{part}' are set; leave one of them out"
    )]
    Conflict {
        /// The limit on all requests.
        total: String,
        /// The limit on some of them.
        part: String,
    },
    /// A limit is greater than the greatest one.
    #[error("'{name}' is {value}; it must be between 0 and {MOST}")]
    TooGreat {
        /// The limit.
        name: String,
        /// Its value.
        value: u64,
    },
    /// A burst's rate is less than the average rate.
    #[error(
        "'{kind}-max' is {burst}, less than the {average} of '{kind}'; a burst must not be slower"
    )]
    SlowBurst {
        /// What the limit counts.
        kind: &'static str,
        /// The burst's rate.
        burst: u64,
        /// The average rate.
        average: u64,
    },
    /// A burst's rate without an average rate.
    #[error("'{kind}-max' is {burst}, but '{kind}' is not set; set it too")]
    NoAverage {
        /// What the limit counts.
        kind: &'static str,
        /// The burst's rate.
        burst: u64,
    },
    /// A burst of length 0.
    #[error("'{kind}-max-length' is 0; it must be at least 1 second")]
    NoLength {
        /// What the limit counts.
        kind: &'static str,
    },
    /// A burst's length without its rate.
    #[error("'{kind}-max-length' is {length}, but '{kind}-max' is not set; set it too")]
    NoBurst {
        /// What the limit counts.
        kind: &'static str,
        /// The burst's length.
        length: u64,
    },
    /// A burst of too many bytes or requests.
    #[error(
        "a burst of {length} seconds ('{kind}-max-length') at a rate of {burst} ('{kind}-max') is \
         too long; it may have at most {MOST} bytes or requests"
    )]
    LongBurst {
        /// What the limit counts.
        kind: &'static str,
        /// The burst's length.
        length: u64,
        /// The burst's rate.
        burst: u64,
    },
    /// A size of requests without a limit on their number.
    #[error("'iops-size' is {0}, but there is no limit on iops; set one, or leave it out")]
    NoIops(u64),
}

impl Limits {
    /// One limit.
    pub const fn get(&self, kind: LimitKind) -> Limit {
        self.kinds[kind as usize]
    }

    /// Sets one limit.
    pub const fn set(&mut self, kind: LimitKind, limit: Limit) {
        self.kinds[kind as usize] = limit;
    }

    /// Sets the value that QEMU's `ThrottleLimits` calls `name`, such as `iops-total-max`. Returns whether there is
    /// one.
    pub fn set_by_name(&mut self, name: &str, value: u64) -> bool {
        if name == "iops-size" {
            self.iops_size = value;
            return true;
        }
        for kind in LimitKind::ALL {
            let Some(rest) = name.strip_prefix(kind.name()) else { continue };
            let limit = &mut self.kinds[kind as usize];
            let place = match rest {
                "" => &mut limit.average,
                "-max" => &mut limit.burst,
                "-max-length" => &mut limit.burst_length,
                _ => return false,
            };
            *place = value;
            return true;
        }
        false
    }

    /// Whether anything is limited.
    pub fn is_enabled(&self) -> bool {
        self.kinds.iter().any(|limit| limit.average > 0)
    }

    /// Checks that they make sense together, as QEMU does.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check(&self) -> Result<(), LimitsError> {
        for [total, read, write] in [
            [LimitKind::BpsTotal, LimitKind::BpsRead, LimitKind::BpsWrite],
            [LimitKind::IopsTotal, LimitKind::IopsRead, LimitKind::IopsWrite],
        ] {
            self.check_conflict(total, read)?;
            self.check_conflict(total, write)?;
        }
        let iops = LimitKind::ALL.into_iter().filter(|kind| !kind.counts_bytes());
        if self.iops_size > 0 && iops.clone().all(|kind| self.get(kind).average == 0) {
            return Err(LimitsError::NoIops(self.iops_size));
        }
        LimitKind::ALL.into_iter().try_for_each(|kind| self.get(kind).check(kind.name()))
    }

    fn check_conflict(&self, total: LimitKind, part: LimitKind) -> Result<(), LimitsError> {
        let (all, some) = (self.get(total), self.get(part));
        let (total, part) = (total.name(), part.name());
        if all.average > 0 && some.average > 0 {
            return Err(LimitsError::Conflict { total: total.into(), part: part.into() });
        }
        if all.burst > 0 && some.burst > 0 {
            let (total, part) = (format!("{total}-max"), format!("{part}-max"));
            return Err(LimitsError::Conflict { total, part });
        }
        Ok(())
    }
}

impl Limit {
    fn check(self, kind: &'static str) -> Result<(), LimitsError> {
        let Self { average, burst, burst_length: length } = self;
        for (suffix, value) in [("", average), ("-max", burst)] {
            if value > MOST {
                return Err(LimitsError::TooGreat { name: format!("{kind}{suffix}"), value });
            }
        }
        if length == 0 {
            return Err(LimitsError::NoLength { kind });
        }
        if burst == 0 {
            return if length > 1 { Err(LimitsError::NoBurst { kind, length }) } else { Ok(()) };
        }
        if burst.saturating_mul(length) > MOST {
            return Err(LimitsError::LongBurst { kind, length, burst });
        }
        if average == 0 {
            return Err(LimitsError::NoAverage { kind, burst });
        }
        if burst < average {
            return Err(LimitsError::SlowBurst { kind, burst, average });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(values: &[(&str, u64)]) -> Limits {
        let mut limits = Limits::default();
        for (name, value) in values {
            assert!(limits.set_by_name(name, *value), "{name}");
        }
        limits
    }

    #[test]
    fn each_kind_stands_at_its_number() {
        for (number, kind) in LimitKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, number);
        }
    }

    #[test]
    fn values_have_qemus_names() {
        let set = limits(&[("bps-read", 5), ("bps-read-max", 50), ("bps-read-max-length", 7)]);
        let expected = Limit { average: 5, burst: 50, burst_length: 7 };
        assert_eq!(set.get(LimitKind::BpsRead), expected);
        assert!(set.is_enabled() && !Limits::default().is_enabled());
        for name in ["", "bps", "iops-size-max", "bps-read-min", "iops-total-max-lengths"] {
            assert!(!Limits::default().set_by_name(name, 1), "{name}");
        }
    }

    #[test]
    fn limits_that_contradict_each_other_are_refused_and_named() {
        let good: [&[(&str, u64)]; 4] = [
            &[],
            &[("iops-total", 100), ("iops-total-max", 2000), ("iops-total-max-length", 60)],
            &[("iops-read", 1), ("iops-write", 2), ("bps-total", 3), ("iops-size", 4096)],
            &[("bps-total", MOST), ("bps-total-max", MOST)],
        ];
        for values in good {
            assert_eq!(limits(values).check(), Ok(()), "{values:?}");
        }
        let bad: [(&[(&str, u64)], &str); 9] = [
            (&[("bps-total", 1), ("bps-write", 1)], "both 'bps-total' and 'bps-write'"),
            (&[("iops-total-max", 1), ("iops-read-max", 1)], "'iops-read-max'"),
            (&[("bps-total", MOST + 1)], "'bps-total' is 1000000000000001"),
            (&[("bps-total", 9), ("bps-total-max", 8)], "'bps-total-max' is 8, less than the 9"),
            (&[("iops-read-max", 8)], "'iops-read' is not set"),
            (&[("iops-read", 8), ("iops-read-max-length", 0)], "'iops-read-max-length' is 0"),
            (&[("iops-read", 8), ("iops-read-max-length", 2)], "'iops-read-max' is not set"),
            (
                &[("bps-read", 8), ("bps-read-max", MOST / 2), ("bps-read-max-length", 3)],
                "a burst of 3 seconds",
            ),
            (&[("bps-total", 8), ("iops-size", 512)], "'iops-size' is 512"),
        ];
        for (values, told) in bad {
            let error = limits(values).check().unwrap_err().to_string();
            assert!(error.contains(told), "{values:?}: {error}");
        }
    }
}
