//! A survey as CSV.

use super::format::rfc3339;
use crate::{ChainRow, Survey};
use std::io::{self, Write};

/// A column's name, and how to get its value for a chain.
type Column = (&'static str, fn(&ChainRow) -> String);

const COLUMNS: &[Column] = &[
    ("image", |row| row.image.clone()),
    ("length", |row| row.length.to_string()),
    ("whole", |row| row.whole.to_string()),
    ("disk_bytes", |row| row.disk_bytes.to_string()),
    ("held_bytes", |row| row.held_bytes.to_string()),
    ("own_files", |row| row.own_files.to_string()),
    ("own_bytes", |row| row.own_bytes.to_string()),
    ("hidden_bytes", |row| row.hidden_bytes.map_or_else(String::new, |bytes| bytes.to_string())),
    ("newest", |row| rfc3339(row.newest)),
    ("oldest", |row| rfc3339(row.oldest)),
    ("indexed", |row| row.indexed.to_string()),
    ("qemu_cold_us", |row| row.qemu_cold_us.to_string()),
    ("qemu_warm_us", |row| row.qemu_warm_us.to_string()),
    ("isobath_cold_us", |row| row.isobath_cold_us.to_string()),
    ("indexed_cold_us", |row| row.indexed_cold_us.to_string()),
    ("qemu_memory_bytes", |row| row.qemu_memory_bytes.to_string()),
    ("isobath_memory_bytes", |row| row.isobath_memory_bytes.to_string()),
    ("advice", |row| row.advice.word().to_owned()),
    ("length_after", |row| row.length_after.to_string()),
];

/// One line per chain, after a line of column names.
///
/// # Errors
/// If writing to `out` fails.
pub fn csv(survey: &Survey, out: &mut dyn Write) -> io::Result<()> {
    let mut writer = csv::Writer::from_writer(out);
    writer.write_record(COLUMNS.iter().map(|(name, _)| name))?;
    for row in survey.chains() {
        writer.write_record(COLUMNS.iter().map(|(_, value)| value(&row)))?;
    }
    writer.flush()
}
