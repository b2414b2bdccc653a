//! Which chains a survey finds in trees of all kinds, and what it says of those that are not whole.

use crate::fleet::{BEGIN, Fleet, header, problems, row};
use isobath_qcow2::extension::Extension;
use isobath_qcow2::{Header, HostOffset};
use isobath_survey::{Advice, Options, Progress, SortBy, survey};
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::process::Command;

#[test]
fn files_shared_by_chains_count_once() {
    let fleet = Fleet::new();
    fleet.image("base", "");
    fleet.image("golden", "base");
    for clone in ["a", "b", "c"] {
        fleet.image(format!("vm/{clone}-1"), "../golden");
    }
    fleet.image("vm/a-2", "a-1");
    fleet.image("vm/a-3", "./a-2");
    fleet.image("alone", "");
    fs::write(fleet.at("no-image"), "text").unwrap();
    let survey = fleet.survey();
    let report = survey.report();
    assert_eq!(problems(&report, fleet.root()), []);
    let counts = &report.counts;
    assert_eq!((counts.images, counts.chains, counts.shared), (8, 4, 1));
    assert_eq!((counts.files, counts.files_in_chains, counts.incomplete), (9, 8, 0));
    for (name, length, own) in [("a-3", 5, 3), ("b-1", 3, 1), ("c-1", 3, 1), ("alone", 1, 1)] {
        let row = row(&survey, &format!("/{name}"));
        assert_eq!((row.length, row.own_files, row.whole), (length, own, true), "{name}");
    }
    // The base, the golden image and the five of `a` have 5 as their longest; b and c have 3.
    let shares: Vec<_> =
        report.lengths.shares.iter().map(|s| (s.length, s.chains, s.files)).collect();
    assert_eq!(shares, [(1, 1, 1), (3, 2, 2), (5, 1, 5)]);
    assert_eq!(report.held.held_bytes, counts.images * (report.held.held_bytes / 8));
    assert_eq!(report.held.disk_bytes, 4 << 30);
    assert_eq!(report.clones, 3);
}

#[test]
fn bases_that_are_not_qcow2_end_a_chain() {
    let fleet = Fleet::new();
    fs::write(fleet.at("raw"), vec![1; 4096]).unwrap();
    fleet.image_as("on-raw", "raw", Some("raw"));
    fleet.image_as("probed", "file:raw", None);
    fleet.image_as("wrong", "raw", Some("qcow2"));
    // A guest may write what looks like a header to its raw disk.
    fleet.image("base", "");
    fleet.image("looks-like", "base");
    fleet.image_as("on-fake", "looks-like", Some("raw"));
    let survey = fleet.survey();
    let report = survey.report();
    assert_eq!(problems(&report, fleet.root()), [("wrong".into(), "not-qcow2")]);
    let lengths = ["on-raw", "probed", "wrong", "on-fake"]
        .map(|name| row(&survey, &format!("/{name}")).length);
    assert_eq!(lengths, [2, 2, 2, 2]);
    assert_eq!((report.counts.raw_bases, report.counts.chains), (1, 4));
    assert!(!row(&survey, "/wrong").whole);
    assert!(row(&survey, "/on-fake").whole);
}

#[test]
fn what_cannot_be_followed_is_told_and_never_opened() {
    let fleet = Fleet::new();
    let made = Command::new("mkfifo").arg(fleet.at("fifo")).status().unwrap();
    assert!(made.success());
    let _socket = UnixListener::bind(fleet.at("socket")).unwrap();
    fs::create_dir(fleet.at("directory")).unwrap();
    symlink("ring-b", fleet.at("ring-a")).unwrap();
    symlink("ring-a", fleet.at("ring-b")).unwrap();
    let cases = [
        ("fifo", "not-a-file"),
        ("socket", "not-a-file"),
        ("directory", "not-a-file"),
        ("/dev/null", "not-a-file"),
        ("/dev/tty", "not-a-file"),
        ("ring-a", "link-loop"),
        ("gone", "missing"),
        ("gone/gone", "missing"),
        ("fifo/x", "missing"),
        ("nbd:localhost:10809", "protocol"),
        ("nbd://localhost/x", "protocol"),
        ("http://localhost/x", "protocol"),
        ("fat:/etc", "protocol"),
        ("json:{\"driver\":\"file\",\"filename\":\"base\"}", "json"),
        ("file:", "no-file-name"),
    ];
    for (at, (backing, _)) in cases.iter().enumerate() {
        fleet.image_as(format!("case-{at:02}"), backing, Some("raw"));
    }
    let survey = fleet.survey();
    let report = survey.report();
    let expected: Vec<_> =
        cases.iter().enumerate().map(|(at, case)| (format!("case-{at:02}"), case.1)).collect();
    assert_eq!(problems(&report, fleet.root()), expected);
    assert_eq!(report.counts.chains, cases.len() as u64);
    assert_eq!(report.counts.incomplete, cases.len() as u64);
    assert_eq!((report.counts.symbolic_links, report.counts.special_files), (2, 2));
    for row in survey.chains() {
        assert_eq!((row.length, row.whole, row.advice), (1, false, Advice::Repair), "{row:?}");
    }
    let detail = report.problems.list().iter().find(|one| one.trouble.word() == "json").unwrap();
    assert!(detail.detail.starts_with("json:{"), "{}", detail.detail);
}

#[test]
fn images_above_layers_in_a_store_need_no_repair() {
    let fleet = Fleet::new();
    let digest = "0123456789abcdef".repeat(4);
    fleet.image("lower", &format!("s3://bucket/vm@sha256:{digest}"));
    fleet.image("upper", "lower");
    fleet.image("other", &format!("file:///pool/vm@sha256:{digest}"));
    fleet.image("lost", "s3://bucket/vm");
    let survey = fleet.survey();
    let report = survey.report();
    let found = problems(&report, fleet.root());
    let names: Vec<_> = found.iter().map(|(name, word)| (name.as_str(), *word)).collect();
    assert_eq!(names, [("lost", "protocol"), ("lower", "stored"), ("other", "stored")]);
    assert_eq!(report.counts.incomplete, 1);
    let mut rows: Vec<_> =
        survey.chains().map(|row| (row.image, row.length, row.whole, row.advice)).collect();
    rows.sort();
    let path = |name: &str| fleet.at(name).display().to_string();
    assert_eq!(
        rows,
        [
            (path("lost"), 1, false, Advice::Repair),
            (path("other"), 1, false, Advice::Leave),
            (path("upper"), 2, false, Advice::Leave),
        ]
    );
}

#[test]
fn circles_end_and_are_told() {
    let fleet = Fleet::new();
    fleet.image("self", "self");
    fleet.image("one", "three");
    fleet.image("two", "one");
    fleet.image("three", "two");
    fleet.image("above", "two");
    fleet.image("top", "above");
    let survey = fleet.survey();
    let report = survey.report();
    let found = problems(&report, fleet.root());
    let names: Vec<_> = found.iter().map(|(name, word)| (name.as_str(), *word)).collect();
    assert_eq!(names, [("one", "loop"), ("self", "loop"), ("three", "loop"), ("two", "loop")]);
    assert_eq!((report.counts.chains, report.counts.in_loops), (1, 4));
    let top = row(&survey, "/top");
    // Two above the circle, and its three.
    assert_eq!((top.length, top.whole), (5, false));
}

#[test]
fn headers_that_cannot_be_used_break_only_their_own_chains() {
    let fleet = Fleet::new();
    let good = header("", None).encode().unwrap();
    let patched = |at: usize, with: &[u8]| {
        let mut bytes = good.clone();
        bytes.splice(at..at + with.len(), with.iter().copied());
        bytes
    };
    fleet.put("cut", &good[..60]);
    fleet.put("cluster-bits", &patched(20, &[0, 0, 0, 99]));
    fleet.put("backing", &patched(8, &u64::MAX.to_be_bytes()));
    fleet.put("unknown-feature", &patched(72, &(1_u64 << 40).to_be_bytes()));
    fleet.put("l1", &patched(36, &u32::MAX.to_be_bytes()));
    fleet.put("short", &good[..4]);
    fleet.put("empty", b"");
    fleet.image("above", "cut");
    fleet.image("good", "");
    let mut encrypted = header("good", Some("qcow2"));
    encrypted.crypt_method = Header::LUKS;
    let offset = HostOffset::new(0x40000);
    encrypted.extensions.push(Extension::EncryptionHeader { offset, length: 592 });
    fleet.put("encrypted", &encrypted.encode().unwrap());
    let mut former = header("good", Some("qcow2")).encode().unwrap();
    former[35] = 1;
    fleet.put("former", &former);
    let survey = fleet.survey();
    let report = survey.report();
    let expected = ["backing", "cluster-bits", "cut", "l1", "unknown-feature"]
        .map(|name| (name.to_owned(), "bad-header"));
    assert_eq!(problems(&report, fleet.root()), expected);
    assert_eq!((report.counts.broken, report.counts.chains), (5, 3));
    let above = row(&survey, "/above");
    assert_eq!((above.length, above.whole), (2, false));
    for name in ["/encrypted", "/former"] {
        let encrypted = row(&survey, name);
        assert_eq!((encrypted.length, encrypted.whole, report.counts.encrypted), (2, true, 2));
    }
}

#[test]
fn names_lead_out_of_the_surveyed_directory_and_back() {
    let fleet = Fleet::new();
    fleet.image("elsewhere/deep", "");
    fleet.image("elsewhere/base", "deep");
    fleet.image("elsewhere/unseen", "base");
    fs::write(fleet.at("elsewhere/raw"), "raw").unwrap();
    fleet.image("pool/inside", "");
    symlink("elsewhere/base", fleet.at("link")).unwrap();
    // A relative name starts at the directory by which the image was reached.
    let base = fleet.at("elsewhere/base");
    fleet.image("pool/absolute", base.to_str().unwrap());
    fleet.image("pool/relative", "../elsewhere/base");
    fleet.image_as("pool/on-raw", "../elsewhere/raw", Some("raw"));
    fleet.image("pool/back", "../pool/inside");
    let options = Options::default();
    let pool = [fleet.at("pool")];
    let found = survey(&pool, &options, &Progress::default()).unwrap();
    let report = found.report();
    assert_eq!(problems(&report, fleet.root()), []);
    assert_eq!((report.counts.chains, report.counts.outside), (4, 3));
    let lengths = ["absolute", "relative", "on-raw", "back"]
        .map(|name| row(&found, &format!("pool/{name}")).length);
    assert_eq!(lengths, [3, 3, 2, 2]);
    assert_eq!(report.counts.shared, 1);
    // A file can be named, and a link to it.
    for name in ["elsewhere/unseen", "link"] {
        let found = survey(&[fleet.at(name)], &options, &Progress::default()).unwrap();
        let row = found.chains().next().unwrap();
        // From `link`, the name `deep` leads nowhere.
        let expected = if name == "link" { (1, false) } else { (3, true) };
        assert_eq!((row.length, row.whole), expected, "{name}");
    }
    let error = survey(&[fleet.at("gone")], &options, &Progress::default()).unwrap_err();
    assert!(error.to_string().contains("gone': cannot access it"), "{error}");
    let error = survey(&[PathBuf::from("/dev/null")], &options, &Progress::default()).unwrap_err();
    assert!(error.to_string().contains("neither"), "{error}");
}

#[test]
fn a_file_of_several_names_is_one() {
    let fleet = Fleet::new();
    fleet.image("base", "");
    fs::hard_link(fleet.at("base"), fleet.at("also-base")).unwrap();
    symlink("base", fleet.at("linked")).unwrap();
    fleet.image("one", "base");
    fleet.image("two", "also-base");
    fleet.image("three", "linked");
    // The same directory twice, and one inside the other.
    let paths = [fleet.root().to_owned(), fleet.root().to_owned(), fleet.at("one")];
    let found = survey(&paths, &Options::default(), &Progress::default()).unwrap();
    let counts = found.report().counts;
    assert_eq!((counts.images, counts.chains, counts.shared), (4, 3, 1));
    assert_eq!(counts.symbolic_links, 2);
    assert!(found.chains().all(|row| row.length == 2 && row.whole));
}

#[test]
fn names_may_be_any_bytes() {
    let fleet = Fleet::new();
    let odd = OsStr::from_bytes(b"\xff\xfe <b>\n\x1b[31m.qcow2");
    fleet.image(odd, "");
    fleet.image("back\\slash", "plain\nbase");
    fleet.image("plain\nbase", "");
    let directory = OsStr::from_bytes(b"\xf0dir");
    fleet.image(std::path::Path::new(directory).join("inner"), "../plain\nbase");
    let survey = fleet.survey();
    assert_eq!(problems(&survey.report(), fleet.root()), []);
    assert_eq!(row(&survey, "/\\xff\\xfe <b>\n\u{1b}[31m.qcow2").length, 1);
    assert_eq!(row(&survey, "/back\\\\slash").length, 2);
    assert_eq!(row(&survey, "/\\xf0dir/inner").length, 2);
}

#[test]
fn times_tell_how_often_snapshots_are_made() {
    const DAY: u64 = 86_400;
    let fleet = Fleet::new();
    fleet.image("base", "");
    fleet.date("base", 0);
    for day in 1..=9 {
        let below = if day == 1 { "base".to_owned() } else { format!("day-{}", day - 1) };
        fleet.image(format!("day-{day}"), &below);
        fleet.date(format!("day-{day}"), day * DAY);
    }
    // An overlay that is older than its backing file, and a later chain that is shorter.
    fleet.image("young", "");
    fleet.date("young", 20 * DAY);
    fleet.image("old", "young");
    fleet.date("old", 15 * DAY);
    let report = fleet.survey().report();
    let day = u32::try_from(DAY).unwrap();
    let intervals = &report.intervals;
    assert_eq!((intervals.count, intervals.least, intervals.most), (9, day, day));
    assert_eq!(intervals.at_most, [0, 0, 9, 9, 9, 9]);
    assert_eq!((report.out_of_order, report.clones, report.ages.count), (1, 0, 10));
    assert_eq!(report.counts.without_birth, 12);
    let steps: Vec<_> = report.longest.iter().map(|(_, length)| *length).collect();
    assert_eq!(steps, (1..=10).collect::<Vec<_>>());
    assert_eq!(report.longest[9].0, (BEGIN + 9 * DAY) as i64);
    assert_eq!(report.made.bins.iter().map(|bin| bin.count).sum::<u64>(), 10);
    let born = fleet.survey_with(&Options::default()).report();
    assert!(born.counts.without_birth == 12 || born.intervals.most < day, "births are of today");
}

#[test]
fn long_chains_are_listed_first_with_advice() {
    let fleet = Fleet::new();
    let chain = |name: &str, base: &str, length: u32| {
        for at in 0..length {
            let below = if at == 0 { base.to_owned() } else { format!("{name}-{:03}", at - 1) };
            fleet.image(format!("{name}-{at:03}"), &below);
        }
    };
    chain("short", "", 12);
    chain("middle", "", 13);
    chain("long", "", 200);
    // Two clones of a long chain: what is shared cannot be merged.
    chain("golden", "", 40);
    chain("one", "golden-039", 2);
    chain("two", "golden-039", 5);
    let survey = fleet.survey();
    let top = survey.top(3, SortBy::Length);
    let name = |row: &isobath_survey::ChainRow| {
        row.image.rsplit('/').next().unwrap().rsplit_once('-').unwrap().0.to_owned()
    };
    let told: Vec<_> = survey
        .top(10, SortBy::Length)
        .iter()
        .map(|row| (name(row), row.length, row.advice, row.length_after))
        .collect();
    let expected = [
        ("long", 200, Advice::Merge, 1),
        ("two", 45, Advice::Merge, 41),
        ("one", 42, Advice::Index, 42),
        ("middle", 13, Advice::Index, 13),
        ("short", 12, Advice::Leave, 12),
    ]
    .map(|(name, length, advice, after)| (name.to_owned(), length, advice, after));
    assert_eq!(told, expected);
    assert_eq!(top, survey.top(10, SortBy::Length)[..3]);
    assert_eq!(survey.top(1, SortBy::Memory)[0].length, 200);
    let long = &top[0];
    assert!((long.qemu_cold_us - 200.0 * 86.0).abs() < 1.0, "{}", long.qemu_cold_us);
    assert!(long.isobath_cold_us < 1000.0 && long.isobath_cold_us > 86.0);
    // 1 GiB in clusters of 64 KiB: 16,384 entries of 8 bytes.
    assert_eq!(long.qemu_memory_bytes, 200 * ((256 << 10) + 131_072));
    assert_eq!(long.isobath_memory_bytes, 131_072 + 200 * 8192);
}

#[test]
fn what_is_interrupted_says_so() {
    let fleet = Fleet::new();
    fleet.image("base", "");
    fleet.image("top", "base");
    let progress = Progress::default();
    progress.stop();
    let found = survey(&[fleet.root().to_owned()], &Options::default(), &progress).unwrap();
    let report = found.report();
    assert!(found.is_interrupted() && report.interrupted);
    assert_eq!(report.counts.images, 0);
}

#[test]
fn one_thread_finds_what_many_find() {
    let fleet = Fleet::new();
    for number in 0..2000 {
        let backing = if number % 10 == 0 { String::new() } else { format!("{}", number - 1) };
        let path = fleet.at(format!("{}/{number}", number % 7));
        let backing =
            if backing.is_empty() { backing } else { format!("../{}/{backing}", (number - 1) % 7) };
        fleet.image(path, &backing);
    }
    let rows = |threads| {
        let found = fleet.survey_with(&Options { threads, ..Options::default() });
        let mut rows: Vec<_> = found.chains().map(|row| (row.image, row.length)).collect();
        rows.sort();
        rows
    };
    let one = rows(1);
    assert_eq!(one.len(), 200);
    assert!(one.iter().all(|row| row.1 == 10));
    assert_eq!(one, rows(8));
}
