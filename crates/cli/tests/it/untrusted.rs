//! `--untrusted`: an image reads no file outside the directories allowed to it, and chooses none that is written to.

use crate::serving::{QemuIo, Served};
use isobath_qmp::client::{Address, Client};
use isobath_testkit::process::{Finished, run};
use isobath_testkit::{args, qemu};
use serde_json::json;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;

const ISOBATH: &str = env!("CARGO_BIN_EXE_isobath");

fn isobath(directory: &Path, arguments: impl AsRef<[OsString]>) -> Finished {
    run(Command::new(ISOBATH).args(arguments.as_ref()).current_dir(directory))
}

/// A directory for the images, and beside it a secret of raw bytes and one in qcow2.
fn laid_out(work: &Path) {
    fs::create_dir(work.join("own")).unwrap();
    fs::write(work.join("secret"), vec![0x5e; 65536]).unwrap();
    let own = work.join("own");
    let img = |arguments: Vec<OsString>| {
        let _ = run(Command::new(qemu::program("qemu-img")).args(arguments).current_dir(&own)).ok();
    };
    img(args!["create", "-q", "-f", "qcow2", "-u", "-b", "../secret", "-F", "raw", "over", "64k"]);
    let data = ["-o", "data_file=neighbour", "data", "64k"];
    img([&args!["create", "-q", "-f", "qcow2"][..], &data.map(OsString::from)].concat());
    fs::write(own.join("neighbour"), vec![0x6e; 65536]).unwrap();
    fs::write(own.join("base"), vec![0x7e; 65536]).unwrap();
    img(args!["create", "-q", "-f", "qcow2", "-b", "base", "-F", "raw", "inside", "64k"]);
    img(args!["create", "-q", "-f", "raw", "plain", "64k"]);
}

/// Commands that open the image and what it names.
fn commands(image: &str) -> Vec<Vec<OsString>> {
    vec![
        args!["info", "--untrusted", "--backing-chain", image],
        args!["map", "--untrusted", image],
        args!["measure", "--untrusted", "-O", "raw", image],
        args!["compare", "--untrusted", image, "plain"],
        args!["convert", "--untrusted", "-O", "raw", image, "copy"],
        args!["dd", "--untrusted", format!("if={image}"), "of=copy"],
        args!["bench", "--untrusted", "-c", "1", image],
        args!["io", "--untrusted", "-r", "-c", "read 0 512", image],
        args!["io", "--untrusted", "-c", "write 0 512", image],
        args!["rebase", "--untrusted", "-b", "", image],
    ]
}

/// A command for an untrusted image that may name files in the working directory.
fn with_own(mut command: Vec<OsString>) -> Vec<OsString> {
    command.splice(1..1, args!["--untrusted", "--backing-dir", "."]);
    command
}

#[test]
fn no_command_follows_an_untrusted_image_out_of_what_is_allowed() {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path();
    laid_out(work);
    let own = work.join("own");
    // The second names a neighbour in its own directory.
    for name in ["over", "inside"] {
        let image = fs::read(own.join(name)).unwrap();
        let allowing = args!["--backing-dir", &own];
        let given = if name == "over" { vec![Vec::new(), allowing] } else { vec![Vec::new()] };
        for (allowed, mut command) in given
            .into_iter()
            .flat_map(|allowed| commands(name).into_iter().map(move |one| (allowed.clone(), one)))
        {
            let way_out = if allowed.is_empty() { "(--backing-dir)" } else { "untrusted image" };
            command.splice(1..1, allowed);
            let done = isobath(&own, &command);
            assert!(done.code() != 0, "{command:?}: {}", done.report());
            let told = done.stderr.contains("outside the directories");
            assert!(told && done.stderr.contains(way_out), "{command:?}: {}", done.report());
            assert!(!own.join("copy").exists(), "{command:?}");
            assert!(fs::read(own.join(name)).unwrap() == image, "{command:?}");
        }
    }
    // Whether there is a file is not told.
    for (image, backing) in [("missing", "no-such-file"), ("there", "base")] {
        let named = ["create", "-q", "-f", "qcow2", "-u", "-b", backing, "-F", "raw", image, "64k"];
        let _ = run(Command::new(qemu::program("qemu-img")).args(named).current_dir(&own)).ok();
    }
    fs::create_dir(work.join("allowed")).unwrap();
    let told = |options: &[&str], image: &str, backing: &str| {
        let options = options.iter().map(Into::into).collect();
        let done = isobath(&own, [args!["map", "--untrusted"], options, args![image]].concat());
        done.exits(1).stderr.replace(image, "IMAGE").replace(backing, "BACKING")
    };
    for options in [&[][..], &["--backing-dir", "../allowed"]] {
        let missing = told(options, "missing", "no-such-file");
        assert!(missing.contains("outside the directories"), "{missing}");
        assert_eq!(missing, told(options, "there", "base"));
    }
    let looked_for = told(&["--backing-dir", "."], "missing", "no-such-file");
    assert!(looked_for.contains("No such file"), "{looked_for}");
    // Where the operator allows it, it is read.
    let allowed =
        args!["convert", "--untrusted", "--backing-dir", work, "-O", "raw", "over", "copy"];
    let _ = isobath(&own, &allowed).ok();
    assert!(fs::read(own.join("copy")).unwrap() == vec![0x5e; 65536]);
}

#[test]
fn no_command_opens_a_data_file_that_an_untrusted_image_names() {
    let directory = tempfile::tempdir().unwrap();
    laid_out(directory.path());
    let own = directory.path().join("own");
    let commands = commands("data").into_iter().filter(|command| command[0] != "info");
    let others = [
        args!["snapshot", "--untrusted", "-c", "one", "data"],
        args!["resize", "--untrusted", "data", "128k"],
        args!["amend", "--untrusted", "-f", "qcow2", "-o", "lazy_refcounts=on", "data"],
        args!["bitmap", "--untrusted", "--add", "data", "one"],
    ];
    for command in commands.chain(others) {
        let done = isobath(&own, &command);
        assert!(done.code() != 0, "{command:?}: {}", done.report());
        assert!(done.stderr.contains("does not choose"), "{command:?}: {}", done.report());
        assert!(fs::read(own.join("neighbour")).unwrap() == vec![0x6e; 65536], "{command:?}");
    }
    let given = args!["convert", "--untrusted", "--data-file", "base", "-O", "raw", "data", "copy"];
    let _ = isobath(&own, &given).ok();
    assert!(fs::read(own.join("neighbour")).unwrap() == vec![0x6e; 65536]);
}

#[test]
fn an_untrusted_image_is_taken_in_with_what_the_operator_allows() {
    let directory = tempfile::tempdir().unwrap();
    laid_out(directory.path());
    let own = directory.path().join("own");
    let _ = isobath(&own, with_own(args!["convert", "-O", "raw", "inside", "copy"])).ok();
    assert!(fs::read(own.join("copy")).unwrap() == vec![0x7e; 65536]);
    let alone = args!["convert", "--untrusted", "--no-backing", "-O", "raw", "inside", "alone"];
    let _ = isobath(&own, &alone).ok();
    assert!(fs::read(own.join("alone")).unwrap() == vec![0; 65536]);
    // What is below is not changed on an untrusted image's word.
    let done = isobath(&own, args!["commit", "--untrusted", "inside"]);
    assert!(done.code() != 0 && done.stderr.contains("--untrusted"), "{}", done.report());
    assert!(fs::read(own.join("base")).unwrap() == vec![0x7e; 65536]);
    for written in [
        args!["io", "--no-backing", "-c", "write 0 512", "inside"],
        args!["io", "--no-backing", "-c", "open -o cache.direct=off inside", "-c", "write 0 512"],
    ] {
        let done = isobath(&own, &written);
        assert!(done.code() != 0, "{}", done.report());
    }
    let chain = args!["info", "--no-backing", "--backing-chain", "inside"];
    assert_eq!(isobath(&own, &chain).text().matches("image: ").count(), 1);
}

#[test]
fn a_data_file_is_given_for_one_image() {
    let directory = tempfile::tempdir().unwrap();
    laid_out(directory.path());
    let own = directory.path().join("own");
    for command in [
        args!["compare", "--data-file", "base", "data", "data"],
        args!["convert", "--data-file", "base", "-O", "raw", "data", "data", "copy"],
    ] {
        let done = isobath(&own, &command);
        assert!(done.stderr.contains("for one image"), "{}", done.report());
        assert!(!own.join("copy").exists());
    }
}

#[test]
fn a_server_writes_to_the_data_file_that_the_operator_names_for_an_image() {
    let directory = tempfile::tempdir().unwrap();
    laid_out(directory.path());
    let own = directory.path().join("own");
    fs::copy(own.join("neighbour"), directory.path().join("moved")).unwrap();
    let moved = directory.path().join("moved").display().to_string();
    let images = [own.join("inside"), own.join("data")];
    let allowed = own.display().to_string();
    let options =
        ["--untrusted", "--backing-dir", &allowed, "--data-file", "", "--data-file", &moved];
    let served = Served::start(&images, &options);
    let mut client = QemuIo::open("raw", served.uri("data"));
    client.ok("write -P 0x11 0 64k");
    drop(client);
    let _ = served.stop();
    assert!(fs::read(own.join("neighbour")).unwrap() == vec![0x6e; 65536]);
    assert!(fs::read(&moved).unwrap() == vec![0x11; 65536]);
}

#[test]
fn a_server_refuses_data_files_that_no_image_has_use_for() {
    let directory = tempfile::tempdir().unwrap();
    laid_out(directory.path());
    let own = directory.path().join("own");
    for (options, told) in [
        (args!["--data-file", "base", "--data-file", "base", "data"], "2 times for 1 images"),
        (args!["--data-file", "base", "inside"], "for images with an external data file"),
        (args!["--data-file", "", "data"], "does not choose"),
        (args!["data"], "serve' take the file's name as --data-file"),
    ] {
        let serve = [with_own(args!["serve", "--nbd", "unix:socket"]), options].concat();
        let done = isobath(&own, &serve).exits(1);
        assert!(done.stderr.contains(told), "{}", done.report());
    }
    assert!(fs::read(own.join("base")).unwrap() == vec![0x7e; 65536]);
}

#[test]
fn an_untrusted_images_chain_is_not_guessed() {
    let directory = tempfile::tempdir().unwrap();
    laid_out(directory.path());
    let own = directory.path().join("own");
    let create = ["create", "-q", "-f", "qcow2", "-u", "-b", "inside", "-F", "qcow2", "top", "64k"];
    let img = |arguments: &[&str]| {
        let mut command = Command::new(qemu::program("qemu-img"));
        let _ = run(command.args(arguments).current_dir(&own)).ok();
    };
    img(&create);
    // Programs before QEMU 6.1 named no format.
    let mut bytes = fs::read(own.join("inside")).unwrap();
    let place = bytes.windows(4).position(|four| four == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
    bytes[place..place + 4].copy_from_slice(b"none");
    fs::write(own.join("inside"), bytes).unwrap();
    let done = isobath(&own, with_own(args!["info", "--backing-chain", "top"]));
    assert!(done.code() != 0 && done.stderr.contains("not probed"), "{}", done.report());
}

#[test]
fn an_image_added_to_an_untrusted_server_is_untrusted_itself() {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path();
    laid_out(work);
    fs::create_dir(work.join("tenant")).unwrap();
    fs::write(work.join("tenant/base"), vec![0x8e; 65536]).unwrap();
    for (image, backing) in [("tenant/inside", "base"), ("tenant/over", "../own/base")] {
        let create = args!["create", "-q", "-f", "qcow2", "-b", backing, "-F", "raw", image, "64k"];
        let _ = run(Command::new(qemu::program("qemu-img")).args(create).current_dir(work)).ok();
    }
    let add = |socket: &Path, image: &str| {
        let mut client = Client::connect(&Address::Unix(socket.to_owned())).unwrap();
        let file = json!({"driver": "file", "filename": work.join(image)});
        client.execute(
            "blockdev-add",
            json!({"driver": "qcow2", "node-name": "added", "read-only": true, "file": file}),
        )
    };
    let own = work.join("own/single");
    for alone in [&own, &work.join("tenant/alone")] {
        qemu::create(alone, "qcow2", 65536, "");
    }
    let qmp = work.join("qmp");
    let listen = format!("unix:{}", qmp.display());
    let own_directory = work.join("own").display().to_string();
    let tenants = work.join("tenant").display().to_string();
    // Otherwise the server is confined to the directory of its first image.
    let directory = work.display().to_string();
    let sandbox = ["--sandbox-dir", &directory];
    for (options, image, allowed) in [
        (&[][..], "tenant/alone", true),
        (&[], "tenant/inside", false),
        (&["--backing-dir", &own_directory], "tenant/over", true),
        (&["--backing-dir", &own_directory], "tenant/inside", false),
        (&["--backing-dir", &tenants], "tenant/inside", true),
        (&["--backing-dir", &tenants], "tenant/over", false),
    ] {
        let served = Served::start(
            &[&own],
            &[&["--untrusted", "--qmp", &listen][..], &sandbox, options].concat(),
        );
        let added = add(&qmp, image);
        assert_eq!(added.is_ok(), allowed, "{options:?} {image}: {added:?}");
        if let Err(error) = added {
            assert!(error.to_string().contains("outside the directories"), "{error}");
        }
        let _ = served.server.stop().ok();
    }
}

#[test]
fn a_description_of_a_backing_file_is_judged_as_the_name_in_it() {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path();
    laid_out(work);
    let own = work.join("own");
    let described = |file: &Path, more: &str| {
        format!(
            r#"json:{{"driver":"raw","file":{{"driver":"file","filename":"{}"}}{more}}}"#,
            file.display()
        )
    };
    let overlay = |name: &str, backing: &str| {
        let made =
            args!["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", "raw", name, "64k"];
        let _ = run(Command::new(qemu::program("qemu-img")).args(made).current_dir(&own)).ok();
    };
    overlay("near", &described(&own.join("base"), ""));
    overlay("relative", &described(Path::new("base"), ""));
    for image in ["near", "relative"] {
        let _ = isobath(&own, with_own(args!["convert", "-O", "raw", image, "copy"])).ok();
        assert!(fs::read(own.join("copy")).unwrap() == vec![0x7e; 65536], "{image}");
        fs::remove_file(own.join("copy")).unwrap();
        assert!(
            qemu::map(&own.join("near"))
                == isobath(&own, args!["map", "--output=json", "near"]).json()
        );
    }
    // To QEMU it depends on where it runs.
    let elsewhere = isobath(work, args!["info", "--backing-chain", "own/relative"]).exits(1);
    assert!(elsewhere.stderr.contains("a relative name"), "{}", elsewhere.report());
    overlay("far", &described(&work.join("secret"), ""));
    let _ = isobath(&own, args!["convert", "-O", "raw", "far", "copy"]).ok();
    fs::remove_file(own.join("copy")).unwrap();
    for command in commands("far") {
        let done = isobath(&own, &command);
        assert!(done.code() != 0, "{command:?}: {}", done.report());
        assert!(done.stderr.contains("outside the directories"), "{command:?}: {}", done.report());
        assert!(!own.join("copy").exists(), "{command:?}");
    }
    overlay("part", &described(&own.join("base"), r#","offset":"512""#));
    let part = isobath(&own, args!["convert", "-O", "raw", "part", "copy"]).exits(1);
    assert!(part.stderr.contains("'offset' is not supported"), "{}", part.report());
    let other = args!["rebase", "-F", "qcow2", "-b", described(&own.join("base"), ""), "near"];
    let other = isobath(&own, &other).exits(1);
    assert!(other.stderr.contains("another format"), "{}", other.report());
    let same = args!["rebase", "-F", "raw", "-b", described(&own.join("base"), ""), "inside"];
    let _ = isobath(&own, &same).ok();
    let new = args![
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "raw",
        "-b",
        described(&own.join("base"), ""),
        "new"
    ];
    let _ = isobath(&own, &new).ok();
    qemu::assert_identical(&own.join("new"), "qcow2", &own.join("base"), "raw");
    qemu::assert_identical(&own.join("inside"), "qcow2", &own.join("base"), "raw");
}
