//! `isobath ctl SOCKET status`, `stop` and `cont`

use super::{Session, entries, number, table, text};
use crate::failure::Outcome;
use crate::options::OutputFormat;
use isobath_storage::word;
use serde_json::{Value, json};

/// Show whether the disks are running, and why those that are not have paused
#[derive(clap::Args)]
pub(super) struct Status {
    /// Output format
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: OutputFormat,
}

impl Status {
    pub(super) fn run(&self, session: &mut Session<'_>) -> Outcome {
        let disks = session.ask("x-isobath-query-disks", json!({}))?;
        let disks = disks.get("disks").cloned().unwrap_or_default();
        if self.output == OutputFormat::Json {
            let shown = entries(&disks).map(as_json).collect();
            session.print(&shown)?;
            return Ok(0);
        }
        let address = session.address.clone();
        session.out.write_all(shown(&disks, &address).as_bytes())?;
        Ok(0)
    }
}

/// Stops all disks: no client's request is carried out until `cont`.
pub(super) fn stop(session: &mut Session<'_>) -> Outcome {
    session.ask("stop", json!({})).map(|_| 0)
}

/// Lets all disks go on.
pub(super) fn resume(session: &mut Session<'_>) -> Outcome {
    session.ask("cont", json!({})).map(|_| 0)
}

fn name(disk: &Value) -> &str {
    match text(disk, "device") {
        "" => text(disk, "node-name"),
        device => device,
    }
}

fn failures(disk: &Value) -> impl Iterator<Item = &Value> {
    disk.get("failures").into_iter().flat_map(entries)
}

fn state(disk: &Value) -> &'static str {
    if failures(disk).next().is_some() {
        return "paused";
    }
    if disk.get("stopped") == Some(&Value::Bool(true)) { "stopped" } else { "running" }
}

fn as_json(disk: &Value) -> Value {
    json!({
        "disk": name(disk),
        "state": state(disk),
        "waiting": number(disk, "held"),
        "werror": text(disk, "werror"),
        "rerror": text(disk, "rerror"),
        "failures": failures(disk).collect::<Vec<_>>(),
        "paused-seconds": disk.get("paused-seconds"),
    })
}

/// A table of the disks, and below it what has failed and how to go on.
fn shown(disks: &Value, address: &str) -> String {
    let head = ["DISK", "STATE", "FOR", "WAITING", "WERROR", "RERROR", "FAILURE"];
    let mut rows = vec![head.map(String::from).to_vec()];
    for disk in entries(disks) {
        let time = disk.get("paused-seconds").and_then(Value::as_u64);
        let reasons = failures(disk)
            .map(|failure| format!("{}: {}", text(failure, "operation"), text(failure, "reason")));
        rows.push(vec![
            name(disk).to_owned(),
            state(disk).to_owned(),
            time.map_or_else(|| "-".into(), |seconds| format!("{seconds} s")),
            number(disk, "held").to_string(),
            text(disk, "werror").to_owned(),
            text(disk, "rerror").to_owned(),
            reasons.collect::<Vec<_>>().join("; "),
        ]);
    }
    let mut shown = table(&rows);
    let is_in = |wanted| entries(disks).any(|disk| state(disk) == wanted);
    let go_on = format!("'isobath ctl {} cont'", word(address));
    if is_in("paused") {
        shown.push_str("Remove the cause of the failure, then let the disks go on: ");
        shown.push_str(&(go_on + "\n"));
    } else if is_in("stopped") {
        shown.push_str("To let the disks go on: ");
        shown.push_str(&(go_on + "\n"));
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_paused_disk_is_shown_with_its_failure_and_the_way_out() {
        let disks = json!([
            {"device": "a", "werror": "stop", "rerror": "report", "held": 2, "stopped": false,
             "failures": [{"operation": "write", "nospace": true, "reason": "no space"}],
             "paused-seconds": 7},
            {"device": "", "node-name": "n", "werror": "report", "rerror": "report", "held": 0,
             "stopped": false, "failures": []},
        ]);
        let text = shown(&disks, "sock");
        let lines: Vec<_> = text.lines().collect();
        for word in ["a ", "paused", "7 s", "2", "stop", "write: no space"] {
            assert!(lines[1].contains(word), "{word}: {text}");
        }
        assert!(lines[2].starts_with('n') && lines[2].contains("running"), "{text}");
        assert!(lines[3].contains("'isobath ctl sock cont'"), "{text}");
        assert_eq!(as_json(&disks[0])["state"], "paused");
        let stopped = json!([{"device": "a", "stopped": true, "failures": []}]);
        assert!(shown(&stopped, "sock").ends_with("go on: 'isobath ctl sock cont'\n"));
        let running = json!([{"device": "a", "stopped": false, "failures": []}]);
        assert_eq!(shown(&running, "sock").lines().count(), 2);
    }
}
