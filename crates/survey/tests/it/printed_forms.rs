//! Text, JSON, CSV and Parquet tell the same, whatever the names are.

use crate::fleet::Fleet;
use isobath_survey::render::{self, Listing};
use isobath_survey::{ChainRow, SortBy, Survey};
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::{Row, RowAccessor};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

const LISTING: Listing = Listing { count: 20, sort: SortBy::Length };

fn fleet() -> (Fleet, Survey) {
    let fleet = Fleet::new();
    fleet.image("base", "");
    fleet.image("a, \"b\"\nc", "base");
    fleet.image(OsStr::from_bytes(b"\xff\x1b[31m\\"), "base");
    fleet.image("lost", "gone\u{202e}");
    let survey = fleet.survey();
    (fleet, survey)
}

fn rows(survey: &Survey) -> Vec<ChainRow> {
    let rows: Vec<_> = survey.chains().collect();
    assert_eq!(rows.len(), 3);
    rows
}

#[test]
fn text_obeys_nobody() {
    let (_fleet, survey) = fleet();
    let mut out = Vec::new();
    render::text(&survey, &survey.report(), LISTING, &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    assert!(!text.contains(['\x1b', '\u{202e}']), "{text:?}");
    assert!(text.contains("/a, \"b\"\\u{a}c\n"), "{text}");
    assert!(text.contains("/\\xff\\u{1b}[31m\\\\\n"), "{text}");
    assert!(text.contains("its backing file is missing (gone\\u{202e})"), "{text}");
    assert!(text.contains("4 qcow2 images form 3 chains, 4 files in all\n"), "{text}");
    assert!(text.contains("<= 2    100.0 %    100.0 %"), "{text}");
}

#[test]
fn an_empty_fleet_is_no_error() {
    let fleet = Fleet::new();
    let survey = fleet.survey();
    let report = survey.report();
    let mut out = Vec::new();
    render::text(&survey, &report, LISTING, &mut out).unwrap();
    assert!(String::from_utf8(out).unwrap().contains("0 qcow2 images form 0 chains"));
    assert!(render::html(&survey, &report, LISTING).contains("Nothing to show."));
    let mut out = Vec::new();
    render::parquet(&survey, &mut out).unwrap();
    let reader = SerializedFileReader::new(bytes::Bytes::from(out)).unwrap();
    assert_eq!(reader.metadata().file_metadata().num_rows(), 0);
}

#[test]
fn json_has_the_exact_names() {
    let (fleet, survey) = fleet();
    let json = render::json(&survey, &survey.report(), LISTING);
    let again: serde_json::Value = serde_json::from_str(&json.to_string()).unwrap();
    let root = fleet.root().display();
    let mut names: Vec<_> = again["chains"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["image"].as_str().unwrap())
        .collect();
    names.sort_unstable();
    let expected =
        ["\\xff\u{1b}[31m\\\\", "a, \"b\"\nc", "lost"].map(|name| format!("{root}/{name}"));
    assert_eq!(names, expected);
    assert_eq!(again["counts"]["chains"], 3);
    assert_eq!(again["lengths"]["longest"], 2);
    assert_eq!(again["problem-counts"]["missing"], 1);
    assert_eq!(again["problems"][0]["detail"], "gone\u{202e}");
    assert_eq!(again["advice"]["repair"], 1);
    assert_eq!(again["clusters"], serde_json::Value::Null);
}

#[test]
fn csv_has_every_chain() {
    let (_fleet, survey) = fleet();
    let mut out = Vec::new();
    render::csv(&survey, &mut out).unwrap();
    let mut reader = csv::Reader::from_reader(out.as_slice());
    let headers = reader.headers().unwrap().clone();
    let records: Vec<csv::StringRecord> = reader.records().collect::<Result<_, _>>().unwrap();
    let rows = rows(&survey);
    assert_eq!(records.len(), rows.len());
    for (record, row) in records.iter().zip(rows) {
        let get = |name| record.get(headers.iter().position(|one| one == name).unwrap()).unwrap();
        assert_eq!(get("image"), row.image);
        assert_eq!(get("length"), row.length.to_string());
        assert_eq!(get("qemu_cold_us").parse(), Ok(row.qemu_cold_us));
        assert_eq!(
            (get("whole"), get("advice")),
            (row.whole.to_string().as_str(), row.advice.word())
        );
        assert_eq!(get("hidden_bytes"), "");
        assert!(get("newest").ends_with('Z'));
    }
}

#[test]
fn parquet_can_be_read_back() {
    let (_fleet, survey) = fleet();
    let mut out = Vec::new();
    render::parquet(&survey, &mut out).unwrap();
    let reader = SerializedFileReader::new(bytes::Bytes::from(out)).unwrap();
    let records: Vec<Row> = reader.get_row_iter(None).unwrap().collect::<Result<_, _>>().unwrap();
    let rows = rows(&survey);
    assert_eq!(records.len(), rows.len());
    for (record, row) in records.iter().zip(rows) {
        assert_eq!(record.get_string(0).unwrap(), &row.image);
        assert_eq!(record.get_long(1).unwrap(), i64::from(row.length));
        assert_eq!(record.get_bool(2).unwrap(), row.whole);
        assert!(record.get_long(7).is_err(), "hidden bytes were not counted");
        assert_eq!(record.get_timestamp_millis(8).unwrap(), row.newest * 1000);
        assert!((record.get_double(11).unwrap() - row.qemu_cold_us).abs() < 1e-9);
        assert_eq!(record.get_string(17).unwrap(), row.advice.word());
    }
}
