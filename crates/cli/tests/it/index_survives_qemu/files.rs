//! What other programs do to an image's file.

use super::chains::{Chain, Flavour, LAYERS, TOP, name};
use super::judge::Effect::{Changes, Damages, Keeps};
use super::judge::{holds, on_each_layer, read_both, verify};
use isobath_testkit::process::run_program;
use std::fs::{self, File, FileTimes};

#[test]
fn moves_and_copies() {
    on_each_layer("mv away and back", Keeps, 0..LAYERS, |chain, layer| {
        let away = chain.directory().join("away");
        fs::rename(chain.path(layer), &away).unwrap();
        assert!(read_both(chain.directory()).is_none(), "a layer is missing");
        fs::rename(&away, chain.path(layer)).unwrap();
        true
    });
    on_each_layer("cp and back", Keeps, 0..LAYERS, |chain, layer| {
        let copy = chain.directory().join("copy");
        fs::copy(chain.path(layer), &copy).unwrap();
        fs::rename(&copy, chain.path(layer)).unwrap();
        true
    });
    on_each_layer("cp, a write, and back", Keeps, 0..TOP, |chain, layer| {
        let copy = chain.directory().join("copy");
        fs::copy(chain.path(layer), &copy).unwrap();
        assert!(chain.qemu_io(layer, &["write -P 205 150k 200k"]));
        fs::copy(&copy, chain.path(layer)).unwrap();
        true
    });
    on_each_layer("an old copy over", Changes, 0..LAYERS, |chain, layer| {
        let copy = chain.directory().join("copy");
        assert!(chain.qemu_io(layer, &["write -P 206 170k 100k", "discard 300k 64k"]));
        fs::copy(chain.path(layer), &copy).unwrap();
        assert!(chain.qemu_io(layer, &["write -P 207 300000 100k"]));
        fs::copy(&copy, chain.path(layer)).unwrap();
        true
    });
    on_each_layer("the layer below copied over", Changes, 2..TOP, |chain, layer| {
        fs::copy(chain.path(layer - 1), chain.path(layer)).unwrap();
        chain.is_qcow2(layer - 1)
    });
    on_each_layer("another image moved over", Changes, 0..TOP, |chain, layer| {
        let other = Chain::new(0, Flavour::Grown);
        assert!(other.qemu_io(layer, &["write -P 208 500k 100k"]));
        fs::rename(other.path(layer), chain.path(layer)).unwrap();
        chain.is_qcow2(layer)
    });
}

#[test]
fn a_copy_of_the_whole_chain_is_as_good() {
    for (kind, flavour) in [(0, Flavour::Grown), (1, Flavour::Indexed), (2, Flavour::Indexed)] {
        let chain = Chain::new(kind, flavour);
        for how in ["--reflink=never", "-a", "--preserve=timestamps"] {
            let copy = tempfile::tempdir().unwrap();
            for layer in 0..LAYERS {
                let _ = run_program(
                    "cp",
                    [how.as_ref(), chain.path(layer).as_os_str(), copy.path().as_os_str()],
                )
                .ok();
            }
            assert!(verify(copy.path()));
            assert_eq!(holds(copy.path()), Some(true));
            assert_eq!(read_both(copy.path()).unwrap(), read_both(chain.directory()).unwrap());
            // The copy's layers are its own.
            let written = isobath_testkit::qemu::io(
                &copy.path().join(name(2)),
                "qcow2",
                &["write -z 128k 256k"],
            );
            let _ = written.ok();
            assert_eq!(holds(copy.path()), Some(false));
            let (bytes, messages) = read_both(copy.path()).unwrap();
            assert!(messages.len() <= 2 && messages[0].contains("'l4'"), "{messages:#?}");
            assert!(bytes != read_both(chain.directory()).unwrap().0, "nothing could go wrong");
        }
    }
}

#[test]
fn times_and_permissions() {
    on_each_layer("touch", Keeps, 0..LAYERS, |chain, layer| {
        let _ = run_program("touch", [chain.path(layer)]).ok();
        true
    });
    on_each_layer("chmod", Keeps, 0..LAYERS, |chain, layer| {
        let _ = run_program("chmod", ["600".as_ref(), chain.path(layer).as_os_str()]).ok();
        true
    });
    for command in ["write -z 128k 300k", "write -P 209 200k 100k", "discard 128k 300k"] {
        let what = format!("{command}, and the old times");
        on_each_layer(&what, Changes, 0..LAYERS, |chain, layer| {
            let before = chain.path(layer).metadata().unwrap();
            assert!(chain.qemu_io(layer, &[command]));
            // Nor does its length tell.
            let file = File::options().write(true).open(chain.path(layer)).unwrap();
            if file.metadata().unwrap().len() < before.len() {
                file.set_len(before.len()).unwrap();
            }
            let times = FileTimes::new()
                .set_modified(before.modified().unwrap())
                .set_accessed(before.accessed().unwrap());
            file.set_times(times).unwrap();
            assert_eq!(file.metadata().unwrap().modified().unwrap(), before.modified().unwrap());
            true
        });
    }
}

#[test]
fn lengths() {
    for by in [-100_000, -4096, -1, 1, 4096, 100_000] {
        on_each_layer(&format!("truncate {by:+}"), Damages, 0..LAYERS, |chain, layer| {
            let file = File::options().write(true).open(chain.path(layer)).unwrap();
            let length = file.metadata().unwrap().len().checked_add_signed(by).unwrap();
            file.set_len(length).unwrap();
            true
        });
    }
}
