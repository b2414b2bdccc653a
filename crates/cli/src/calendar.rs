//! Times in the local time zone.

use std::mem::MaybeUninit;

/// The calendar fields of a time; `None` if its year is out of range.
fn parts(seconds: i64) -> Option<libc::tm> {
    let seconds = seconds as libc::time_t;
    let mut parts = MaybeUninit::<libc::tm>::uninit();
    // SAFETY: both pointers are valid; the function fills the second, or returns null.
    unsafe {
        let filled = !libc::localtime_r(&raw const seconds, parts.as_mut_ptr()).is_null();
        filled.then(|| parts.assume_init())
    }
}

/// Formats a time, in seconds since 1970, as `2026-01-31 23:59:59`.
pub(crate) fn shown(seconds: i64) -> String {
    let Some(parts) = parts(seconds) else { return seconds.to_string() };
    format!(
        "{:04}-{:02}-{:02} {:02}:{:02}:{:02}",
        parts.tm_year + 1900,
        parts.tm_mon + 1,
        parts.tm_mday,
        parts.tm_hour,
        parts.tm_min,
        parts.tm_sec
    )
}

/// A calendar period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Period {
    Hour,
    Day,
    /// Starts on Monday.
    Week,
    Month,
    Year,
}

impl Period {
    /// The number of the period that contains this time; later periods have higher numbers.
    pub(crate) fn of(self, seconds: i64) -> i64 {
        let Some(parts) = parts(seconds) else { return seconds };
        // Local time in seconds since 1970, which began on a Thursday.
        let local = seconds + parts.tm_gmtoff;
        let years = i64::from(parts.tm_year);
        match self {
            Self::Hour => local.div_euclid(3600),
            Self::Day => local.div_euclid(86400),
            Self::Week => (local.div_euclid(86400) + 3).div_euclid(7),
            Self::Month => years * 12 + i64::from(parts.tm_mon),
            Self::Year => years,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weeks_begin_on_mondays() {
        // Local noon of Sunday 2026-11-22 and of the Monday after it, in whatever time zone this runs.
        let noon = |days: i64| {
            let utc = days * 86400 + 43200;
            utc - parts(utc).unwrap().tm_gmtoff
        };
        let sunday = noon(20_779);
        assert!(shown(sunday).starts_with("2026-11-22"), "{}", shown(sunday));
        let monday = noon(20_780);
        for (period, differs) in [
            (Period::Hour, true),
            (Period::Day, true),
            (Period::Week, true),
            (Period::Month, false),
            (Period::Year, false),
        ] {
            assert_eq!(period.of(sunday) != period.of(monday), differs, "{period:?}");
            assert!(period.of(sunday) <= period.of(monday));
        }
        assert_eq!(Period::Week.of(monday), Period::Week.of(noon(20_786)));
    }
}
