//! A survey as one self-contained HTML page.
//!
//! File names are untrusted: all text is escaped, and the page's content security policy allows only its own script,
//! which has a random nonce.

mod chart;
mod charts;
mod tables;

use super::Listing;
use super::format::{bytes, number, time};
use crate::{Advice, Report, Survey, shown};
use isobath_charts::escaped;
use std::collections::hash_map::RandomState;
use std::fmt::Write as _;
use std::hash::{BuildHasher, Hasher};

const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// Renders the page.
pub fn html(survey: &Survey, report: &Report, listing: Listing) -> String {
    let nonce = nonce();
    let mut page = String::new();
    let paths: Vec<String> =
        report.paths.iter().map(|path| escaped(&super::text::for_people(path))).collect();
    // Writing to a string cannot fail, here and below.
    let _ = write!(
        page,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; \
         style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; base-uri 'none'; \
         form-action 'none'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>Chain survey</title>\n<style nonce=\"{nonce}\">\n{STYLE}</style>\n</head>\n<body>\n\
         <header>\n<h1>Chain survey</h1>\n<p class=\"where\">{}</p>\n\
         <p>{}, {:.1} s: {} files in {} directories.</p>\n</header>\n<main>\n",
        paths.join("<br>"),
        time(report.taken_at),
        report.seconds,
        number(report.counts.files),
        number(report.counts.directories),
    );
    if report.interrupted {
        page.push_str(
            "<p class=\"warning\">The survey was interrupted: these are partial results, and \
             chains may be longer.</p>\n",
        );
    }
    tiles(report, &mut page);
    page.push_str("<section class=\"charts\">\n");
    charts::all(report, &mut page);
    page.push_str("</section>\n");
    tables::all(survey, report, listing, &mut page);
    let _ = write!(
        page,
        "</main>\n<div id=\"tip\" hidden></div>\n<script nonce=\"{nonce}\">\n{SCRIPT}</script>\n\
         </body>\n</html>\n"
    );
    page
}

/// An unpredictable number, so that no file name can contain it.
fn nonce() -> String {
    let random = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", random(), random())
}

/// A file's name, escaped for a page.
fn name(bytes: &[u8]) -> String {
    escaped(&shown(bytes))
}

fn tiles(report: &Report, page: &mut String) {
    page.push_str("<section class=\"tiles\">\n");
    let (counts, lengths, held) = (&report.counts, &report.lengths, &report.held);
    let mut tile = |value: &str, label: &str, note: &str| {
        let _ = writeln!(
            page,
            "<div class=\"tile\"><b>{}</b><span>{}</span><small>{}</small></div>",
            escaped(value),
            escaped(label),
            escaped(note),
        );
    };
    tile(
        &number(counts.chains),
        "chains",
        &format!("{} files, {} shared", number(counts.files_in_chains), number(counts.shared)),
    );
    tile(
        &number(lengths.longest.into()),
        "longest chain",
        &format!("median {}, 99th percentile {}", lengths.median, lengths.p99),
    );
    let share = |part: u64, of: u64| if of == 0 { 0.0 } else { part as f64 / of as f64 * 100.0 };
    tile(
        &bytes(held.held_bytes),
        "held",
        &format!("{:.0} % in layers below", share(held.lower_bytes, held.held_bytes)),
    );
    match &report.clusters {
        Some(clusters) => tile(
            &bytes(clusters.hidden_bytes),
            "no disk can see",
            &format!("{:.0} % of clusters", share(clusters.hidden_bytes, clusters.data_bytes)),
        ),
        None => tile("?", "no disk can see", "counted with --bytes"),
    }
    tile(
        &bytes(report.qemu_memory_bytes),
        "memory in QEMU",
        &format!("at most; isobath {}", bytes(report.isobath_memory_bytes)),
    );
    let wanted = report.advice.iter().filter(|(advice, _)| *advice != Advice::Leave);
    let each =
        wanted.clone().map(|(advice, count)| format!("{} {}", advice.word(), number(*count)));
    tile(
        &number(wanted.map(|(_, count)| count).sum()),
        "chains to work on",
        &each.collect::<Vec<_>>().join(", "),
    );
    let problems = report.problems.total();
    tile(
        &number(problems),
        if problems == 1 { "problem" } else { "problems" },
        &format!("{} incomplete chains", number(counts.incomplete)),
    );
    page.push_str("</section>\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_name_is_markup() {
        assert_eq!(
            name(b"<script>'\"&\x1b\xff</script>"),
            "&lt;script&gt;&#39;&quot;&amp;\\u{1b}\\xff&lt;/script&gt;"
        );
        assert_ne!(nonce(), nonce());
    }
}
