//! Which snapshots a policy keeps.

use crate::calendar::Period;
use std::str::FromStr;

/// How many snapshots of an age are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frequency {
    All,
    /// The last one of each period.
    Each(Period),
}

/// How many of the snapshots up to an age are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    /// The rule as it was typed.
    text: String,
    /// In seconds.
    age: i64,
    frequency: Frequency,
}

/// `--keep`: rules in order of increasing age. Snapshots older than the last age are not kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Policy(Vec<Rule>);

impl FromStr for Policy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut rules: Vec<Rule> = Vec::new();
        for rule in text.split(',') {
            let (age, frequency) = rule.split_once(':').ok_or_else(|| {
                format!("'{rule}' is not AGE:FREQUENCY, such as 24h:all or 30d:daily")
            })?;
            let frequency = match frequency {
                "all" => Frequency::All,
                "hourly" => Frequency::Each(Period::Hour),
                "daily" => Frequency::Each(Period::Day),
                "weekly" => Frequency::Each(Period::Week),
                "monthly" => Frequency::Each(Period::Month),
                "yearly" => Frequency::Each(Period::Year),
                _ => {
                    return Err(format!(
                        "'{frequency}' is not a frequency; expected all, hourly, daily, weekly, \
                         monthly or yearly"
                    ));
                }
            };
            let age = seconds(age)?;
            if rules.last().is_some_and(|last| last.age >= age) {
                return Err(format!("'{rule}' must have a greater age than the rule before it"));
            }
            rules.push(Rule { text: rule.to_owned(), age, frequency });
        }
        Ok(Self(rules))
    }
}

/// Parses an age: a number of hours, days, weeks, months (of 31 days) or years (of 366), or `forever`.
fn seconds(text: &str) -> Result<i64, String> {
    if text == "forever" {
        return Ok(i64::MAX);
    }
    let bad = || format!("'{text}' is not an age, such as 24h, 30d, 8w, 12m, 5y or forever");
    let unit = text.chars().next_back().ok_or_else(bad)?;
    let seconds = match unit {
        'h' => 3600,
        'd' => 86400,
        'w' => 7 * 86400,
        'm' => 31 * 86400,
        'y' => 366 * 86400,
        _ => return Err(bad()),
    };
    let number: u32 = text[..text.len() - unit.len_utf8()].parse().map_err(|_| bad())?;
    Ok(i64::from(number) * seconds)
}

impl Policy {
    /// The rule that keeps each snapshot, or `None`. `taken` are their times in seconds, the oldest first. The last
    /// `newest` ones are always kept.
    pub(super) fn keeps(&self, taken: &[i64], now: i64, newest: usize) -> Vec<Option<String>> {
        let rule_of = |moment: i64| {
            // A snapshot dated in the future, because the clock was set back, has age 0.
            let age = now.saturating_sub(moment).max(0);
            self.0.iter().find(|rule| age <= rule.age)
        };
        let mut last: Option<(i64, i64)> = None;
        let mut kept: Vec<Option<String>> = Vec::new();
        for (later, moment) in taken.iter().rev().enumerate() {
            if later < newest {
                kept.push(Some(format!("the last {newest}")));
                continue;
            }
            let Some(rule) = rule_of(*moment) else {
                kept.push(None);
                continue;
            };
            let keep = match rule.frequency {
                Frequency::All => true,
                Frequency::Each(period) => {
                    let this = Some((rule.age, period.of(*moment)));
                    std::mem::replace(&mut last, this) != this
                }
            };
            kept.push(keep.then(|| rule.text.clone()));
        }
        kept.reverse();
        kept
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3600;
    const DAY: i64 = 24 * HOUR;
    /// 2026-01-01 00:30 UTC
    const NOW: i64 = 1_767_227_400;

    fn kept(policy: &str, ages: &[i64], newest: usize) -> Vec<usize> {
        let taken: Vec<i64> = ages.iter().map(|age| NOW - age).collect();
        let policy: Policy = policy.parse().unwrap();
        let keeps = policy.keeps(&taken, NOW, newest);
        keeps.iter().enumerate().filter(|(_, keep)| keep.is_some()).map(|(n, _)| n).collect()
    }

    #[test]
    fn the_last_of_each_period_is_kept() {
        // A snapshot every 6 hours over 10 days, the oldest first.
        let ages: Vec<i64> = (0..40).rev().map(|n| n * 6 * HOUR).collect();
        assert_eq!(kept("24h:all", &ages, 0), [35, 36, 37, 38, 39]);
        let daily = kept("24h:all,30d:daily", &ages, 0);
        assert!((13..=15).contains(&daily.len()), "{daily:?}");
        assert!(daily.ends_with(&[35, 36, 37, 38, 39]), "{daily:?}");
        // One snapshot for each older day; they are 24 hours apart.
        assert!(daily[1..daily.len() - 6].windows(2).all(|two| two[1] - two[0] == 4), "{daily:?}");
        assert_eq!(kept("forever:all", &ages, 0).len(), 40);
        assert_eq!(kept("1h:all", &ages, 0), [39]);
        assert_eq!(kept("1h:all", &ages, 3), [37, 38, 39]);
        assert!(kept("forever:monthly", &ages, 0).len() <= 2);
        assert!(kept("forever:yearly", &ages, 0).len() <= 2);
        assert!((2..=3).contains(&kept("forever:weekly", &ages, 0).len()));
        assert!(kept("1y:hourly", &ages, 0).len() == 40);
        assert_eq!(kept("1d:all", &[3 * DAY, -DAY], 0), [1]);
    }

    #[test]
    fn what_is_no_policy_is_refused() {
        for (text, reason) in [
            ("", "is not AGE:FREQUENCY"),
            ("24h", "is not AGE:FREQUENCY"),
            ("24h:often", "is not a frequency"),
            ("24:all", "is not an age"),
            ("-1h:all", "is not an age"),
            (":all", "is not an age"),
            ("1d:all,24h:daily", "must have a greater age"),
        ] {
            let error = text.parse::<Policy>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }
}
