//! The page's tables.

use super::name;
use crate::chain::{INDEX_ABOVE, MERGE_GAIN};
use crate::render::Listing;
use crate::render::format::{bytes, date, microseconds, number};
use crate::render::text::for_people;
use crate::statistics::SPANS;
use crate::{Advice, ChainRow, Report, SortBy, Survey, cost};
use isobath_charts::escaped;
use std::fmt::Write as _;

/// The number of problems that are listed individually.
const PROBLEMS: usize = 1000;

/// All tables of a survey.
pub(super) fn all(survey: &Survey, report: &Report, listing: Listing, page: &mut String) {
    advice(report, page);
    chains(survey, listing, page);
    intervals(report, page);
    problems(report, page);
    model(page);
}

/// Begins a table that can be sorted by any column. A column is given by its heading and whether it is numeric.
fn begin(page: &mut String, id: &str, columns: &[(&str, bool)]) {
    let _ = write!(page, "<div class=\"scroll\"><table id=\"{id}\"><thead><tr>");
    for (column, numbers) in columns {
        let class = if *numbers { " class=\"n\"" } else { "" };
        let _ = write!(page, "<th scope=\"col\"{class}><button>{}</button></th>", escaped(column));
    }
    page.push_str("</tr></thead><tbody>\n");
}

fn end(page: &mut String) {
    page.push_str("</tbody></table></div>\n");
}

/// A numeric cell with the text to display.
fn cell(page: &mut String, value: f64, text: &str) {
    let _ = write!(page, "<td class=\"n\" data-value=\"{value}\">{}</td>", escaped(text));
}

fn chains(survey: &Survey, listing: Listing, page: &mut String) {
    let mut rows = survey.top(listing.count, listing.sort);
    // The costliest chains are included too, whatever the sort key.
    for sort in [SortBy::Length, SortBy::Memory, SortBy::Held, SortBy::Hidden] {
        let more: Vec<ChainRow> = survey.top(listing.count, sort);
        let known: std::collections::HashSet<String> =
            rows.iter().map(|row| row.image.clone()).collect();
        let worth = |row: &ChainRow| sort != SortBy::Hidden || row.hidden_bytes > Some(0);
        rows.extend(more.into_iter().filter(|row| worth(row) && !known.contains(&row.image)));
    }
    let shown = rows.len() as u64;
    let _ = write!(
        page,
        "<section>\n<h2>Chains</h2>\n<p>The {} longest and costliest of {}.</p>\n",
        number(shown),
        number(survey.chain_count() as u64),
    );
    let columns = [
        ("active image", false),
        ("advice", false),
        ("length", true),
        ("own files", true),
        ("disk", true),
        ("held", true),
        ("hidden", true),
        ("oldest", true),
        ("newest", true),
        ("cold, QEMU", true),
        ("cold, isobath", true),
        ("memory, QEMU", true),
        ("memory, isobath", true),
    ];
    begin(page, "chains", &columns);
    for row in &rows {
        let _ = write!(page, "<tr><td class=\"name\">{}</td>", escaped(&for_people(&row.image)));
        let advice = match row.advice {
            Advice::Merge => format!("merge to {}", row.length_after),
            other => other.word().to_owned(),
        };
        let (word, advice) = (row.advice.word(), escaped(&advice));
        let _ = write!(page, "<td><span class=\"advice {word}\">{advice}</span></td>");
        let plus = if row.whole { "" } else { "+" };
        cell(page, row.length.into(), &format!("{}{plus}", number(row.length.into())));
        cell(page, row.own_files.into(), &number(row.own_files.into()));
        cell(page, row.disk_bytes as f64, &bytes(row.disk_bytes));
        cell(page, row.held_bytes as f64, &bytes(row.held_bytes));
        match row.hidden_bytes {
            Some(hidden) => cell(page, hidden as f64, &bytes(hidden)),
            None => cell(page, -1.0, "–"),
        }
        cell(page, row.oldest as f64, &date(row.oldest));
        cell(page, row.newest as f64, &date(row.newest));
        cell(page, row.qemu_cold_us, &microseconds(row.qemu_cold_us));
        let cold = if row.indexed { row.indexed_cold_us } else { row.isobath_cold_us };
        cell(page, cold, &microseconds(cold));
        cell(page, row.qemu_memory_bytes as f64, &bytes(row.qemu_memory_bytes));
        cell(page, row.isobath_memory_bytes as f64, &bytes(row.isobath_memory_bytes));
        page.push_str("</tr>\n");
    }
    end(page);
    page.push_str("</section>\n");
}

fn advice(report: &Report, page: &mut String) {
    page.push_str("<section>\n<h2>Advice</h2>\n");
    begin(page, "advice", &[("advice", false), ("chains", true), ("rule", false)]);
    for (advice, count) in &report.advice {
        let rule = match advice {
            Advice::Repair => {
                "The chain is incomplete: a backing file is missing, cannot be read, is not \
                 followed, or forms a loop."
                    .to_owned()
            }
            Advice::Merge => format!(
                "{} files or more, or at least {} and a quarter of its lower layers hidden; and \
                 three files or more that no other chain uses. Merge only snapshots that nobody needs to revert to.",
                report.merge_at,
                bytes(MERGE_GAIN)
            ),
            Advice::Index => format!(
                "More than {INDEX_ABOVE} files, which take three rounds of reads or more, no index, \
                 and too few layers of its own to be merged."
            ),
            Advice::Leave => {
                "None of these, or its lower layers are in an object store.".to_owned()
            }
        };
        let word = advice.word();
        let _ = write!(page, "<tr><td><span class=\"advice {word}\">{word}</span></td>");
        cell(page, *count as f64, &number(*count));
        let _ = writeln!(page, "<td>{}</td></tr>", escaped(&rule));
    }
    end(page);
    let _ = write!(
        page,
        "<p>Merging would remove {} files.</p>\n</section>\n",
        number(report.files_merged)
    );
}

fn intervals(report: &Report, page: &mut String) {
    page.push_str("<section>\n<h2>How often snapshots are taken</h2>\n");
    let columns =
        [("within", true), ("layers", true), ("share", true), ("backing files of that age", true)];
    begin(page, "spans", &columns);
    let (intervals, ages) = (&report.intervals, &report.ages);
    for (at, (seconds, label)) in SPANS.iter().enumerate() {
        let of = |counts: &[u64; 6]| counts.get(at).copied().unwrap_or(0);
        let layers = of(&intervals.at_most);
        let share = if intervals.count == 0 { 0.0 } else { layers as f64 / intervals.count as f64 };
        page.push_str("<tr>");
        cell(page, f64::from(*seconds), label);
        cell(page, layers as f64, &number(layers));
        cell(page, share, &crate::render::format::percent(share));
        cell(page, of(&ages.at_most) as f64, &number(of(&ages.at_most)));
        page.push_str("</tr>\n");
    }
    end(page);
    let _ = write!(
        page,
        "<p>{} layers were created on top of another one. Not included: {} overlays of shared \
         files, {} layers older than the one below. {} files are dated by their last write.</p>\n\
         </section>\n",
        number(intervals.count),
        number(report.clones),
        number(report.out_of_order),
        number(report.counts.without_birth),
    );
}

fn problems(report: &Report, page: &mut String) {
    let total = report.problems.total();
    page.push_str("<section>\n<h2>Problems</h2>\n");
    if total == 0 {
        page.push_str("<p>None.</p>\n</section>\n");
        return;
    }
    let list = report.problems.list();
    let told = list.len().min(PROBLEMS) as u64;
    if told < total {
        let _ = writeln!(page, "<p>The first {} of {}.</p>", number(told), number(total));
    }
    begin(page, "problems", &[("file", false), ("problem", false), ("detail", false)]);
    for problem in list.iter().take(PROBLEMS) {
        let _ = writeln!(
            page,
            "<tr><td class=\"name\">{}</td><td>{}</td><td class=\"name\">{}</td></tr>",
            name(&problem.image),
            escaped(problem.trouble.text()),
            escaped(&for_people(&problem.detail)),
        );
    }
    end(page);
    page.push_str("</section>\n");
}

fn model(page: &mut String) {
    let microseconds = |nanoseconds: f64| microseconds(nanoseconds / 1000.0);
    let _ = write!(
        page,
        "<section>\n<h2>The cost model</h2>\n\
         <p>QEMU, by equation (1) of <cite>SVD: A Scalable Virtual Disk</cite>: \
         <i>Y</i> = [Hit × T<sub>M</sub> + Miss × (T<sub>D</sub> + T<sub>L</sub> + T<sub>F</sub>) + \
         UnAl × T<sub>F</sub>] × <i>N</i>, with T<sub>M</sub> = {}, T<sub>D</sub> = {}, \
         T<sub>L</sub> = {}, T<sub>F</sub> = {} and a chain of <i>N</i> files. Cold: a miss in every \
         file. Warm: an unallocated entry in all but the last.</p>\n\
         <p>Isobath: a slice touched for the first time is merged over all layers that have an L2 \
         table there, read in batches of 4, 8, … 128 at once; a batch costs \
         T<sub>D</sub> + T<sub>L</sub> + T<sub>F</sub>, a table T<sub>F</sub>. Through an index it is \
         one read. Warm: T<sub>M</sub> at any depth.</p>\n\
         <p>Maximum memory: QEMU {} per layer, and its L2 entries up to {}; isobath 8 bytes per \
         cluster of the disk, and {} per layer.</p>\n</section>\n",
        microseconds(cost::T_M),
        microseconds(cost::T_D),
        microseconds(cost::T_L),
        microseconds(cost::T_F),
        bytes(cost::QEMU_LAYER),
        bytes(cost::QEMU_L2_CACHE),
        bytes(cost::OUR_LAYER),
    );
}
