//! Disks without contents are described as by QEMU, and `json:` names of backing files mean what they mean to it.

use crate::programs::{isobath, qemu_img};
use isobath_testkit::args;
use isobath_testkit::process::Finished;
use isobath_testkit::qemu;
use serde_json::Value;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

fn json(done: &Finished) -> Value {
    serde_json::from_str(&done.text()).unwrap_or_else(|error| panic!("{error}: {}", done.report()))
}

/// Runs a command in both programs.
fn both(directory: &Path, arguments: &[OsString]) -> (Finished, Finished) {
    (isobath(directory, arguments), qemu_img(directory, arguments))
}

#[test]
fn a_disk_without_contents_is_described_as_by_qemu() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    for name in [
        "null-co://",
        "null-aio://",
        r#"json:{"driver":"null-co"}"#,
        r#"json:{"driver":"null-co","size":65536}"#,
        r#"json:{"driver":"null-aio","size":1024,"read-zeroes":true}"#,
        r#"json:{"driver":"raw","file":{"driver":"null-co","size":65536}}"#,
        r#"json:{"driver":"raw","file":{"driver":"null-co","size":65536,"read-zeroes":true}}"#,
        r#"json:{"driver":"raw","file":{"driver":"null-co"}}"#,
    ] {
        for more in [&[][..], &["--backing-chain"]] {
            let mut arguments = args!["info", "--output=json"];
            arguments.extend(more.iter().map(Into::into));
            arguments.push(name.into());
            let (ours, theirs) = both(directory, &arguments);
            let (mut ours, mut theirs) = (json(&ours.ok()), json(&theirs.ok()));
            for info in [&mut ours, &mut theirs] {
                let info = if info.is_array() { &mut info[0] } else { info };
                let shown = info["filename"].as_str().unwrap_or_default().to_owned();
                // Options are compared, not their order.
                if let Some(options) = shown.strip_prefix("json:") {
                    info["filename"] = serde_json::from_str(options).unwrap();
                }
            }
            assert_eq!(ours, theirs, "{name}");
        }
        for arguments in [args!["map", "--output=json", name], args!["map", name]] {
            let (ours, theirs) = both(directory, &arguments);
            assert_eq!(ours.ok().text(), theirs.ok().text(), "{name}");
        }
        for arguments in [args!["resize", name, "2G"], args!["resize", "--shrink", name, "512"]] {
            let (ours, theirs) = both(directory, &arguments);
            let (ours, theirs) = (ours.exits(1), theirs.exits(1));
            let says = "Image format driver does not support resize";
            assert!(theirs.stderr.contains(says), "{}", theirs.report());
            assert!(ours.stderr.ends_with(&format!("{says}\n")), "{}", ours.report());
            assert!(!ours.stderr.contains("ERROR"), "{}", ours.report());
        }
    }
    let (ours, theirs) = both(directory, &["info".into(), "null-co://".into()]);
    assert_eq!(ours.ok().text(), theirs.ok().text());
    let options = args!["info", "--image-opts", "driver=raw,file.driver=null-co,file.size=64k"];
    let named = isobath(directory, options).ok();
    assert!(!named.text().contains("null\\u"), "{}", named.report());
}

#[test]
fn no_data_file_is_created_that_the_image_could_not_open() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let names = || {
        let mut names: Vec<_> =
            fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    for name in [
        "null-co:x",
        "null-co://",
        "null-aio:x",
        "foo:x",
        "blkdebug::x",
        r#"json:{"driver":"file"}"#,
        "host_device:x",
    ] {
        let option = format!("data_file={name}");
        let create = args!["create", "-f", "qcow2", "-o", option, "image", "1M"];
        let (ours, theirs) = both(directory, &create);
        let (ours, _) = (ours.exits(1), theirs.exits(1));
        assert!(ours.stderr.contains("data file"), "{}", ours.report());
        assert_eq!(names().len(), 0, "{name}: {:?}", names());
    }
    for (option, file) in [("data_file=file:data", "data"), ("data_file=./a:b", "a:b")] {
        let create = args!["create", "-q", "-f", "qcow2", "-o", option, "image", "1M"];
        let _ = isobath(directory, create).ok();
        assert_eq!(names(), [OsString::from(file), "image".into()]);
        assert_eq!(fs::metadata(directory.join(file)).unwrap().len(), 1 << 20);
        let _ = isobath(directory, args!["io", "-c", "write -P 5 0 64k", "image"]).ok();
        let done = isobath(directory, args!["io", "-c", "read -P 5 0 64k", "image"]).ok();
        assert!(!done.text().contains("failed"), "{}", done.report());
        fs::remove_file(directory.join(file)).unwrap();
        fs::remove_file(directory.join("image")).unwrap();
    }
}

#[test]
fn a_disk_without_contents_is_measured_as_by_qemu() {
    let directory = tempfile::tempdir().unwrap();
    for image in [
        "driver=null-co,size=1G",
        "driver=null-co,size=1000,read-zeroes=on",
        "driver=null-aio",
        "driver=raw,file.driver=null-co,file.size=64k",
    ] {
        for new in [
            &["-O", "raw"][..],
            &["-O", "qcow2"],
            &["-O", "qcow2", "--output=json", "-o", "cluster_size=2M,preallocation=metadata"],
            &["-O", "qcow2", "-o", "preallocation=full"],
            &["-O", "qcow2", "-o", "backing_file=base,backing_fmt=raw"],
        ] {
            let mut arguments = args!["measure", "--image-opts", image];
            arguments.extend(new.iter().map(Into::into));
            let (ours, theirs) = both(directory.path(), &arguments);
            assert_eq!(ours.ok().text(), theirs.ok().text(), "{image} {new:?}");
        }
    }
}

#[test]
fn below_an_overlay_a_disk_without_contents_is_mapped_as_by_qemu() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let create =
        args!["create", "-q", "-u", "-f", "qcow2", "-b", "null-co://", "-F", "raw", "over", "256k"];
    let _ = qemu_img(directory, create).ok();
    let _ = qemu::io(&directory.join("over"), "qcow2", &["write -z 0 64k"]);
    let below = "driver=qcow2,file.filename=over,backing.driver=null-co,backing.size=128k";
    for more in ["", ",backing.read-zeroes=on"] {
        let options = format!("{below}{more}");
        for output in ["--output=json", "--output=human"] {
            let arguments = args!["map", output, "--image-opts", &options];
            let (ours, theirs) = both(directory, &arguments);
            assert_eq!(ours.ok().text(), theirs.ok().text(), "{options}");
        }
    }
}

#[test]
fn what_is_not_in_a_format_is_refused_by_that_formats_name() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    fs::write(directory.join("zeroes"), vec![0; 65536]).unwrap();
    let mut esx = b"COWD".to_vec();
    esx.resize(65536, 0);
    fs::write(directory.join("esx"), esx).unwrap();
    let refused = |arguments: Vec<OsString>| isobath(directory, arguments).exits(1).stderr;
    for (format, says) in [
        ("qcow2", "Image is not in qcow2 format"),
        ("qed", "this is not a QED image"),
        ("luks", "it is not a LUKS header"),
        ("vdi", "this is not a VDI image"),
    ] {
        let error = refused(args!["info", "-f", format, "zeroes"]);
        assert!(error.contains(says), "{format}: {error}");
        assert_eq!(error.contains("qcow2"), format == "qcow2", "{format}: {error}");
    }
    for arguments in [args!["info", "esx"], args!["map", "-f", "vmdk", "esx"]] {
        let error = refused(arguments);
        assert!(error.contains("sparse extents of ESX servers are not supported"), "{error}");
    }
}

/// Makes an overlay whose header names its backing file by this.
fn over(directory: &Path, backing: &str, format: &str) {
    let create =
        args!["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", format, "over", "64k"];
    let _ = qemu_img(directory, create).ok();
}

#[test]
fn keys_that_occur_twice_are_refused_as_by_qemu() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    fs::write(directory.join("base"), vec![0; 65536]).unwrap();
    for name in [
        r#"json:{"driver":"qcow2","driver":"raw","file":{"filename":"base"}}"#,
        r#"json:{"driver":"raw","file":{"filename":"no","filename":"base"}}"#,
        r#"json:{"driver":"raw","file":{"filename":"no"},"file":{"filename":"base"}}"#,
    ] {
        over(directory, name, "raw");
        for arguments in [args!["info", "--backing-chain", "over"], args!["info", name]] {
            let (ours, theirs) = both(directory, &arguments);
            for done in [ours.exits(1), theirs.exits(1)] {
                assert!(done.stderr.contains("duplicate key"), "{}", done.report());
            }
        }
    }
}

#[test]
fn a_description_of_a_device_is_of_no_regular_file() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    fs::write(directory.join("base"), vec![7; 65536]).unwrap();
    for (driver, works) in [("host_device", false), ("file", true)] {
        let name =
            format!(r#"json:{{"driver":"raw","file":{{"driver":"{driver}","filename":"base"}}}}"#);
        over(directory, &name, "raw");
        for arguments in [
            args!["info", "--backing-chain", "over"],
            args!["compare", "-f", "qcow2", "-F", "raw", "over", "base"],
        ] {
            let (ours, theirs) = both(directory, &arguments);
            for done in [ours, theirs] {
                assert_eq!(done.code() == 0, works, "{}", done.report());
                let says = "'host_device' driver requires 'base' to be";
                assert!(works || done.stderr.contains(says), "{}", done.report());
            }
        }
    }
}

#[test]
fn a_description_names_the_secret_of_a_backing_file() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    for (name, secret) in [("base", "below"), ("top", "above")] {
        fs::write(directory.join(format!("{name}.key")), secret).unwrap();
    }
    let key = |name: &str| args!["--object", format!("secret,id={name},file={name}.key")];
    let with = |mut arguments: Vec<OsString>, rest: Vec<OsString>| {
        arguments.extend(rest);
        arguments
    };
    let encrypted =
        |name: &str| format!("encrypt.format=luks,encrypt.iter-time=10,encrypt.key-secret={name}");
    let create = with(args!["create", "-q", "-f", "qcow2"], key("base"));
    let create = with(create, args!["-o", encrypted("base"), "base", "64k"]);
    let _ = qemu_img(directory, create).ok();
    let backing = r#"json:{"driver":"qcow2","encrypt.key-secret":"base","file.filename":"base"}"#;
    let create = with(args!["create", "-q", "-u", "-f", "qcow2"], key("top"));
    let rest = args!["-o", encrypted("top"), "-b", backing, "-F", "qcow2", "over", "64k"];
    let _ = qemu_img(directory, with(create, rest)).ok();
    let image = "driver=qcow2,encrypt.key-secret=top,file.filename=over";
    let image = args!["--image-opts", image, "copy"];
    let convert = with(args!["convert", "-O", "raw"], key("top"));
    let both_keys = with(convert.clone(), key("base"));
    for done in <[Finished; 2]>::from(both(directory, &with(both_keys, image.clone()))) {
        let _ = done.ok();
        assert!(fs::read(directory.join("copy")).unwrap().iter().all(|byte| *byte == 0));
    }
    // Without it, the secret above is tried, as for names that say nothing.
    let wrong = isobath(directory, with(convert, image.clone())).exits(1);
    assert!(wrong.stderr.contains("Invalid password"), "{}", wrong.report());
    let plain = args!["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", "qcow2"];
    let _ = qemu_img(directory, with(plain, args!["over", "64k"])).ok();
    let convert = args!["convert", "-O", "raw", "over", "copy"];
    for done in <[Finished; 2]>::from(both(directory, &convert)) {
        let done = done.exits(1);
        assert!(done.stderr.contains("No secret with id 'base'"), "{}", done.report());
    }
    let untrusted = args!["convert", "--untrusted", "--backing-dir", ".", "-O", "raw"];
    let untrusted = with(with(untrusted, key("base")), args!["over", "copy"]);
    let untrusted = isobath(directory, untrusted).exits(1);
    assert!(untrusted.stderr.contains("is required for cipher"), "{}", untrusted.report());
}
