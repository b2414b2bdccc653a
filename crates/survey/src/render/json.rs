//! A survey as JSON.

use super::Listing;
use super::format::rfc3339;
use crate::{Report, Survey, cost, exact};
use serde_json::{Map, Value, json};

/// The summary, the first chains and the problems. Times are in seconds since 1970, except `taken-at`, which is in RFC
/// 3339 format.
pub fn json(survey: &Survey, report: &Report, listing: Listing) -> Value {
    let counts_of_problems: Map<String, Value> = report
        .problems
        .counts()
        .map(|(trouble, count)| (trouble.word().to_owned(), count.into()))
        .collect();
    let advice: Map<String, Value> =
        report.advice.iter().map(|(one, count)| (one.word().to_owned(), (*count).into())).collect();
    let problems: Vec<Value> = report
        .problems
        .list()
        .iter()
        .map(|problem| {
            json!({
                "image": exact(&problem.image),
                "problem": problem.trouble,
                "detail": problem.detail,
            })
        })
        .collect();
    json!({
        "paths": report.paths,
        "taken-at": rfc3339(report.taken_at),
        "seconds": report.seconds,
        "interrupted": report.interrupted,
        "counts": report.counts,
        "lengths": report.lengths,
        "longest-over-time": report.longest,
        "intervals": report.intervals,
        "intervals-out-of-order": report.out_of_order,
        "clones": report.clones,
        "ages": report.ages,
        "overlays-made": report.made,
        "bytes": report.held,
        "clusters": report.clusters,
        "cost-model": {
            "t-m-ns": cost::T_M,
            "t-d-ns": cost::T_D,
            "t-l-ns": cost::T_L,
            "t-f-ns": cost::T_F,
        },
        "qemu-memory-bytes": report.qemu_memory_bytes,
        "isobath-memory-bytes": report.isobath_memory_bytes,
        "merge-at": report.merge_at,
        "advice": advice,
        "files-merged": report.files_merged,
        "chains": survey.top(listing.count, listing.sort),
        "problem-counts": counts_of_problems,
        "problems": problems,
    })
}
