//! `isobath check` finds what `qemu-img check` finds, and repairs so that QEMU finds nothing more
//! and the guest sees what it saw before.

use crate::damage::{Damage, OPTIONS, inflict, make};
use isobath_testkit::process::{Finished, run_program};
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu};
use serde_json::Value;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

const ISOBATH: &str = env!("CARGO_BIN_EXE_isobath");

fn check(image: &Path, options: &[&str]) -> Finished {
    let mut arguments = args!["check", "--output=json"];
    arguments.extend(options.iter().map(OsString::from));
    arguments.push(image.into());
    run_program(ISOBATH, arguments)
}

fn number(report: &Value, key: &str) -> u64 {
    report[key].as_u64().unwrap_or(0)
}

/// The disk's bytes as QEMU reads them; `None` where it refuses.
fn content(image: &Path) -> Option<Vec<u8>> {
    let raw = image.with_extension("raw");
    let read = qemu::img(args!["convert", "-f", "qcow2", "-O", "raw", image, &raw]);
    (read.code() == 0).then(|| fs::read(&raw).unwrap())
}

#[test]
fn sound_images_of_every_kind_are_clean() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    let directory = tempfile::tempdir().unwrap();
    for options in OPTIONS {
        let image = directory.path().join("image.qcow2");
        make(&image, options, &mut rng);
        let report = check(&image, &[]).ok();
        assert_eq!(report.json(), qemu::check(&image).ok().json(), "{options}");
        let before = fs::read(&image).unwrap();
        let _ = check(&image, &["-r", "all"]).ok();
        assert!(before == fs::read(&image).unwrap(), "{options}: a sound image is left alone");
    }
}

#[test]
fn an_external_data_file_is_not_counted() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image.qcow2");
    let options = format!("data_file={}", directory.path().join("data").display());
    qemu::create(&image, "qcow2", 1 << 20, &options);
    let _ = qemu::io(&image, "qcow2", &["write -P 1 0 300k"]).ok();
    assert_eq!(check(&image, &[]).ok().json(), qemu::check(&image).ok().json());
}

#[test]
fn damage_is_found_and_repaired() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let mut inflicted = 0;
    for (round, damage) in Damage::ALL.iter().cycle().take(Damage::ALL.len() * 4).enumerate() {
        let options = OPTIONS[(round * 7 + round / 9) % OPTIONS.len()];
        let image = path("damaged.qcow2");
        make(&image, options, &mut rng);
        if damage == &Damage::EntryElsewhere && options.contains("refcount_bits=1") {
            // A second reference cannot be counted.
            continue;
        }
        if !inflict(&image, *damage, &mut rng) {
            continue;
        }
        inflicted += 1;
        let what = format!("round {round}: {damage} with '{options}'");

        let theirs = qemu::check(&image);
        let ours = check(&image, &[]);
        assert!((1..=3).contains(&ours.code()), "{what}\n{}", ours.report());
        if damage.is_counted_alike() {
            assert_eq!(ours.json(), theirs.json(), "{what}\n{}{}", ours.report(), theirs.report());
            assert_eq!(ours.code(), theirs.code(), "{what}");
        }

        let before = content(&image);
        let mended = path("mended.qcow2");
        fs::copy(&image, &mended).unwrap();
        let ours = check(&mended, &["-r", "all"]);
        if damage.is_repairable() {
            assert_eq!(ours.code(), 0, "{what}\n{}", ours.report());
            qemu::assert_clean(&mended);
        }
        if let Some(before) = &before {
            let after = content(&mended).unwrap_or_else(|| panic!("{what}: unreadable"));
            assert!(*before == after, "{what}: the repair changed the disk");
        }

        let freed = path("freed.qcow2");
        fs::copy(&image, &freed).unwrap();
        let report = check(&freed, &["-r", "leaks"]).json();
        if damage.is_repairable() {
            assert_eq!(number(&report, "leaks"), 0, "{what}");
        }
        if let Some(before) = &before {
            let after = content(&freed).unwrap_or_else(|| panic!("{what}: unreadable"));
            assert!(*before == after, "{what}: freeing leaks changed the disk");
        }
    }
    assert!(inflicted > Damage::ALL.len());
}

#[test]
fn the_dirty_and_corrupt_bits_go_when_the_image_is_sound() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image.qcow2");
    qemu::create(&image, "qcow2", 1 << 20, "");
    let mut bytes = fs::read(&image).unwrap();
    bytes[79] = 3;
    fs::write(&image, bytes).unwrap();
    let info = qemu::info(&image);
    assert_eq!(
        (&info["dirty-flag"], &info["format-specific"]["data"]["corrupt"]),
        (&true.into(), &true.into())
    );
    let _ = check(&image, &[]).ok();
    let _ = check(&image, &["-r", "all"]).ok();
    let info = qemu::info(&image);
    assert_eq!(
        (&info["dirty-flag"], &info["format-specific"]["data"]["corrupt"]),
        (&false.into(), &false.into())
    );
}

#[test]
fn text_and_exit_codes_are_qemu_imgs() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image.qcow2");
    qemu::create(&image, "qcow2", 1 << 20, "refcount_bits=16");
    let _ = qemu::io(&image, "qcow2", &["write 0 512k"]).ok();
    let same = |options: &[&str]| {
        let copies = [directory.path().join("one"), directory.path().join("two")];
        for copy in &copies {
            fs::copy(&image, copy).unwrap();
        }
        let run = |program: &Path, copy: &Path| {
            let mut arguments = args!["check"];
            arguments.extend(options.iter().map(OsString::from));
            arguments.push(copy.into());
            run_program(program, arguments)
        };
        let theirs = run(&qemu::program("qemu-img"), &copies[0]);
        let ours = run(Path::new(ISOBATH), &copies[1]);
        assert_eq!(ours.text(), theirs.text());
        assert_eq!(ours.stderr, theirs.stderr);
        assert_eq!(ours.code(), theirs.code());
        ours.code()
    };
    assert_eq!(same(&[]), 0);
    // Cluster 20 gets a reference that nothing holds.
    let mut bytes = fs::read(&image).unwrap();
    bytes.resize(21 << 16, 0);
    bytes[(2 << 16) + 2 * 20 + 1] = 1;
    fs::write(&image, &bytes).unwrap();
    assert_eq!(same(&[]), 3);
    assert_eq!(same(&["-q"]), 3);
    assert_eq!(same(&["-r", "leaks"]), 0);
    // A data cluster gets a reference too many, the other way.
    bytes[(2 << 16) + 2 * 6 + 1] = 2;
    bytes[(2 << 16) + 2 * 7 + 1] = 3;
    fs::write(&image, &bytes).unwrap();
    assert_eq!(same(&[]), 2);
    assert_eq!(same(&["-r", "all"]), 0);

    let raw = directory.path().join("raw");
    fs::write(&raw, [0; 4096]).unwrap();
    let ours = run_program(ISOBATH, args!["check", &raw]).exits(63);
    assert_eq!(ours.stderr, "isobath: This image format does not support checks\n");
    let _ = run_program(ISOBATH, args!["check", directory.path().join("missing")]).exits(1);
    let _ = run_program(ISOBATH, args!["check", "--nonsense"]).exits(1);
}
