//! A job's arguments for pacing and errors.

use super::Result;
use super::arguments::{Arguments, flag, number, optional_text};
use crate::error::QmpError;
use isobath_jobs::OnError;
use isobath_jobs::pace::Pacing;
use std::time::Duration;

/// The longest time that may be requested, in seconds: some 300 years.
const LONGEST_TIME: f64 = 1e10;

/// How a job is throttled in favour of guest I/O.
pub(super) fn pacing(arguments: &Arguments) -> Result<Pacing> {
    let refuse = |text: &str| Err(QmpError::new(text));
    let positive = |name: &str, most: f64| match number(arguments, name) {
        Some(value) if !value.is_finite() || value <= 0.0 || value > most => Err(QmpError::new(
            format_args!("Parameter '{name}' expects a number above 0 and up to {most}"),
        )),
        value => Ok(value),
    };
    let deadline = positive("deadline", LONGEST_TIME)?.map(Duration::from_secs_f64);
    let max_impact = positive("max-impact", 100.0)?;
    let threshold = positive("adaptive-threshold", 1e18)?;
    let pause_time = positive("pause-time", LONGEST_TIME)?.map(Duration::from_secs_f64);
    let mode = match (optional_text(arguments, "pacing"), flag(arguments, "adaptive-stream")) {
        (Some("adaptive" | "none"), Some(true)) => {
            return refuse("'adaptive-stream' requires 'pacing': 'threshold'");
        }
        (None, Some(true)) => "threshold",
        (Some(mode), _) => mode,
        (None, _) => "adaptive",
    };
    if mode != "threshold" && (threshold.is_some() || pause_time.is_some()) {
        return refuse("'adaptive-threshold' and 'pause-time' require 'pacing': 'threshold'");
    }
    if mode != "adaptive" && (deadline.is_some() || max_impact.is_some()) {
        return refuse("'deadline' and 'max-impact' require 'pacing': 'adaptive'");
    }
    Ok(match (mode, Pacing::threshold()) {
        ("none", _) => Pacing::None,
        ("threshold", Pacing::Threshold { threshold: usual, pause_time: pause }) => {
            Pacing::Threshold {
                threshold: threshold.unwrap_or(usual),
                pause_time: pause_time.unwrap_or(pause),
            }
        }
        _ => Pacing::Adaptive { deadline, max_impact },
    })
}

/// How a job handles errors. A mirror has two arguments for this, but only one behaviour.
pub(super) fn on_error(arguments: &Arguments) -> Result<OnError> {
    let named = |name: &str| optional_text(arguments, name);
    let (source, target) = (named("on-source-error"), named("on-target-error"));
    let chosen = match (named("on-error"), source, target) {
        (Some(chosen), _, _) => chosen,
        (None, Some(source), Some(target)) if source == target => source,
        // Only writes can run out of space.
        (None, None | Some("report"), Some(target @ ("enospc" | "auto" | "report"))) => target,
        (None, Some(source @ "report"), None) => source,
        (None, None, None) => "report",
        _ => {
            return Err(QmpError::new("'on-source-error' and 'on-target-error' must be the same"));
        }
    };
    Ok(match chosen {
        "ignore" => OnError::Ignore,
        "stop" => OnError::Stop,
        "enospc" | "auto" => OnError::Enospc,
        _ => OnError::Report,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn paced(arguments: &serde_json::Value) -> Result<Pacing> {
        pacing(arguments.as_object().unwrap())
    }

    #[test]
    fn pacing_is_adaptive_unless_told_otherwise() {
        let second = Duration::from_secs(1);
        for (arguments, expected) in [
            (json!({}), Pacing::default()),
            (json!({"adaptive-stream": false}), Pacing::default()),
            (json!({"pacing": "none"}), Pacing::None),
            (json!({"adaptive-stream": true}), Pacing::threshold()),
            (
                json!({"pacing": "threshold", "adaptive-threshold": 5000, "pause-time": 2}),
                Pacing::Threshold { threshold: 5000.0, pause_time: 2 * second },
            ),
            (
                json!({"deadline": 0.5, "max-impact": 5}),
                Pacing::Adaptive { deadline: Some(second / 2), max_impact: Some(5.0) },
            ),
        ] {
            assert_eq!(paced(&arguments).unwrap(), expected, "{arguments}");
        }
        for arguments in [
            json!({"pacing": "none", "adaptive-stream": true}),
            json!({"pacing": "none", "deadline": 1}),
            json!({"pause-time": 1}),
            json!({"adaptive-stream": true, "max-impact": 1}),
            json!({"deadline": 0}),
            json!({"deadline": -1}),
            json!({"deadline": 1e300}),
            json!({"max-impact": 101}),
        ] {
            assert!(paced(&arguments).is_err(), "{arguments}");
        }
    }

    #[test]
    fn a_mirror_has_one_way_with_errors() {
        let on = |value: &serde_json::Value| on_error(value.as_object().unwrap());
        assert_eq!(on(&json!({})), Ok(OnError::Report));
        assert_eq!(on(&json!({"on-error": "auto"})), Ok(OnError::Enospc));
        let both = json!({"on-source-error": "stop", "on-target-error": "stop"});
        assert_eq!(on(&both), Ok(OnError::Stop));
        assert_eq!(on(&json!({"on-target-error": "enospc"})), Ok(OnError::Enospc));
        assert!(on(&json!({"on-source-error": "ignore"})).is_err());
        assert!(on(&json!({"on-target-error": "stop"})).is_err());
    }
}
