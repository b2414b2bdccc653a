//! Records what a campaign did as a line of the file that `ISOBATH_EVIDENCE` names. `scripts/evidence` writes the line,
//! and generates `docs/campaigns.md` from all lines.

use crate::tools::workspace;
use std::env;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// The start of a run that is to be recorded.
#[derive(Clone, Debug)]
pub struct Evidence {
    file: PathBuf,
    begun: String,
}

/// What a run did.
#[derive(Clone, Debug, Default)]
pub struct Run<'a> {
    /// The campaign's make target.
    pub campaign: &'a str,
    /// What it was restricted to, or empty.
    pub kind: &'a str,
    /// The metadata mode, or empty.
    pub mode: &'a str,
    /// How much passed, in the campaign's unit.
    pub count: u64,
    /// Additional numbers, each with what it counts.
    pub also: &'a [(&'a str, u64)],
    /// A description of the seeds.
    pub seeds: String,
    /// The reason if the run failed; only its first line is recorded.
    pub failure: Option<String>,
    /// How long the run took.
    pub seconds: f64,
    /// How many threads it used, where that matters.
    pub threads: Option<usize>,
}

impl Evidence {
    /// Records which sources a run starts with, if `ISOBATH_EVIDENCE` is set.
    ///
    /// # Errors
    /// The script cannot be run, or fails.
    pub fn begin() -> io::Result<Option<Self>> {
        let named = env::var_os("ISOBATH_EVIDENCE").filter(|file| !file.is_empty());
        named.map(|file| Self::begin_in(file.into())).transpose()
    }

    /// As [`Evidence::begin`], for this file.
    ///
    /// # Errors
    /// The script cannot be run, or fails.
    pub fn begin_in(file: PathBuf) -> io::Result<Self> {
        let evidence = Self { file, begun: String::new() };
        Ok(Self { begun: evidence.script(&["begin"])?, ..evidence })
    }

    /// Adds a line for a run that has ended.
    ///
    /// # Errors
    /// The script cannot be run, or fails, for example because it does not know the campaign.
    pub fn add(&self, run: &Run<'_>) -> io::Result<()> {
        let mut fields = vec![
            format!("campaign={}", run.campaign),
            format!("kind={}", run.kind),
            format!("mode={}", run.mode),
            format!("count={}", run.count),
            format!("seeds={}", run.seeds),
            format!("seconds={:.1}", run.seconds),
        ];
        fields.extend(run.also.iter().map(|(what, number)| format!("also.{what}={number}")));
        let reason = run.failure.as_ref().map(|text| text.lines().next().unwrap_or_default());
        fields.extend(reason.map(|reason| format!("failure={reason}")));
        fields.extend(run.threads.map(|threads| format!("threads={threads}")));
        let fields = fields.iter().map(String::as_str);
        let words: Vec<&str> = ["add", self.begun.trim()].into_iter().chain(fields).collect();
        self.script(&words).map(drop)
    }

    /// Runs the script, and returns what it prints.
    fn script(&self, words: &[&str]) -> io::Result<String> {
        let script = workspace().join("scripts/evidence");
        let mut command = Command::new(&script);
        command.args(words).env("ISOBATH_EVIDENCE", &self.file).stderr(Stdio::inherit());
        let done = command.output()?;
        if !done.status.success() {
            return Err(io::Error::other(format!(
                "{} {}: {}",
                script.display(),
                words[0],
                done.status
            )));
        }
        String::from_utf8(done.stdout).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::fs;

    #[test]
    fn a_run_adds_a_line() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("lines");
        let evidence = Evidence::begin_in(file.clone()).unwrap();
        let run = Run { campaign: "soak", count: 7, seconds: 0.25, ..Run::default() };
        evidence.add(&run).unwrap();
        let run = Run {
            campaign: "crash",
            kind: "disk",
            mode: "journal",
            also: &[("histories", 2), ("judged by QEMU", 0)],
            seeds: "7, histories 0 to 1".into(),
            failure: Some("sector 5 = 'x'\nand more".into()),
            threads: Some(3),
            ..run
        };
        evidence.add(&run).unwrap();
        let text = fs::read_to_string(&file).unwrap();
        let lines: Vec<Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert_eq!(lines[0]["campaign"], "soak");
        assert_eq!((&lines[0]["count"], &lines[0]["unit"]), (&json!(7), &json!("operations")));
        assert_eq!((&lines[0]["result"], &lines[0]["seconds"]), (&json!("passed"), &json!(0.2)));
        assert_eq!((lines[0].get("kind"), lines[0].get("seeds")), (None, None));
        assert_eq!(lines[1]["also"], json!({"histories": 2, "judged by QEMU": 0}));
        assert_eq!(lines[1]["result"], "failed");
        assert_eq!(lines[1]["reason"], "sector 5 = 'x'");
        assert_eq!((&lines[1]["mode"], &lines[1]["threads"]), (&json!("journal"), &json!(3)));
        assert_eq!(lines[0]["sources"], lines[1]["sources"]);
    }

    #[test]
    fn an_unknown_campaign_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("lines");
        let evidence = Evidence::begin_in(file.clone()).unwrap();
        assert!(evidence.add(&Run { campaign: "walks", ..Run::default() }).is_err());
        assert!(!file.exists());
    }
}
