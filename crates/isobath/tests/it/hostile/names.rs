//! Names in headers, and files that are no images.

use super::images::plain;
use super::survive::guarded;
use isobath_disk::{Disk, ImageFormat, OpenOptions, Result, Trust, create};
use isobath_ring::block_on;
use isobath_storage::{IoBuf, Locking};
use isobath_storage_file::FileHost;
use isobath_storage_test::any::ToAny;
use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A directory with an image in it that names this backing file.
pub(super) fn naming(backing: &str, format: Option<&str>) -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image.qcow2");
    overlay(&image, backing, format);
    (directory, image)
}

fn overlay(image: &Path, backing: &str, format: Option<&str>) {
    let new =
        plain().size(1 << 20).backing_file(backing, format.unwrap_or("qcow2")).open_backing(false);
    // Under another name first: an image over itself is not made willingly.
    let made = image.with_extension("new");
    block_on(create(&FileHost.any(), &made, &new)).unwrap();
    fs::rename(&made, image).unwrap();
    if format.is_none() {
        forget_format(image);
    }
}

/// Makes the extension with the backing file's format one that is not known.
fn forget_format(image: &Path) {
    let mut bytes = fs::read(image).unwrap();
    let place = bytes.windows(4).position(|four| four == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
    bytes[place..place + 4].copy_from_slice(b"none");
    fs::write(image, bytes).unwrap();
}

async fn read_first(image: PathBuf, trust: Trust) -> Result<Vec<u8>> {
    let options = OpenOptions::new().trust(trust);
    let disk = Disk::open(FileHost.any(), &image, &options).await?;
    Ok(disk.read(0, IoBuf::zeroed(4096)).await?.to_vec())
}

/// What opening an image and reading from it says.
#[track_caller]
fn refusal(image: &Path, trust: Trust) -> String {
    let path = image.to_owned();
    let result = guarded("open", move || block_on(read_first(path, trust)));
    let message = result.unwrap_err().to_string();
    assert!(message.contains(".qcow2"), "{message}");
    assert!(!message.contains(|c: char| c.is_control()), "{message:?}");
    message
}

pub(super) fn within(directory: &Path) -> Trust {
    Trust::Within(vec![directory.canonicalize().unwrap()])
}

#[test]
fn names_that_are_instructions_are_not_followed() {
    for name in [
        "json:{\"driver\":\"file\",\"filename\":\"/etc/shadow\"}",
        r#"json:{"driver":"nbd","host":"localhost","port":"10809"}"#,
        r#"json:{"driver":"raw","file":{"driver":"nbd","host":"localhost","port":"10809"}}"#,
        r#"json:{"driver":"raw","file":{"driver":"host_cdrom","filename":"/dev/cdrom"}}"#,
        r#"json:{"driver":"raw","file.filename":"nbd:localhost:10809"}"#,
        r#"json:{"driver":"raw","file.filename":"json:{}"}"#,
        r#"json:{"driver":"raw","file":{"driver":"host_device","filename":"base"}}"#,
        "nbd:localhost:10809",
        "nbd+unix:///export?socket=/tmp/s",
        "ssh://root@localhost/etc/shadow",
        "http://localhost/x",
        "fat:rw:/etc",
        "blkdebug:rules:image",
        "file:json:{}",
        "file:nbd:x",
        "a\u{1b}[2J\nb:c",
    ] {
        let (directory, image) = naming(name, Some("raw"));
        for trust in [Trust::Full, within(directory.path())] {
            let message = refusal(&image, trust);
            assert!(message.contains("backing file"), "{message}");
        }
    }
}

#[test]
fn a_name_does_nothing_to_a_terminal() {
    let (_directory, image) = naming("\u{1b}[2J\u{7}evil\nnext", Some("raw"));
    let message = refusal(&image, Trust::Full);
    assert!(message.contains("evil\\nnext"), "{message}");
}

#[test]
fn an_untrusted_image_names_files_of_its_own_directory_only() {
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    fs::write(&secret, [0x5e; 4096]).unwrap();
    let secret = secret.to_str().unwrap();
    for name in ["/etc/shadow", secret, "../../../../../../etc/shadow", "link", "directory/secret"]
    {
        let (directory, image) = naming(name, Some("raw"));
        symlink(secret, directory.path().join("link")).unwrap();
        symlink(outside.path(), directory.path().join("directory")).unwrap();
        let message = refusal(&image, within(directory.path()));
        assert!(message.contains("outside"), "{message}");
    }
    // Through a second image.
    let (directory, image) = naming("middle.qcow2", Some("qcow2"));
    overlay(&directory.path().join("middle.qcow2"), secret, Some("raw"));
    assert!(refusal(&image, within(directory.path())).contains("outside"));
    // No data file, wherever it is: it would be written to.
    let data = outside.path().join("data");
    let image = directory.path().join("data-image.qcow2");
    let new = plain().size(1 << 20).data_file(data.to_str().unwrap());
    block_on(create(&FileHost.any(), &image, &new)).unwrap();
    assert!(refusal(&image, within(outside.path())).contains("does not choose"));
    // What lies inside is read.
    let (directory, image) = naming("base.raw", Some("raw"));
    fs::write(directory.path().join("base.raw"), [7; 4096]).unwrap();
    let bytes = block_on(read_first(image, within(directory.path()))).unwrap();
    assert_eq!(bytes, [7; 4096]);
}

/// A file and its format, as a description of them names it.
fn described(driver: &str, file: &Path) -> String {
    let file = file.to_str().unwrap();
    format!(r#"json:{{"driver":"raw","file":{{"driver":"{driver}","filename":"{file}"}}}}"#)
}

#[test]
fn a_described_file_is_trusted_no_more_than_a_named_one() {
    let outside = tempfile::tempdir().unwrap();
    let secret = outside.path().join("secret");
    fs::write(&secret, [0x5e; 4096]).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    fs::write(path.join("base.raw"), [7; 4096]).unwrap();
    symlink(&secret, path.join("link")).unwrap();
    symlink(outside.path(), path.join("directory")).unwrap();
    symlink("/dev/zero", path.join("device")).unwrap();
    for driver in ["file", "host_device"] {
        for file in [
            &secret,
            &path.join("link"),
            &path.join("directory/secret"),
            &path.join("../../../../../../etc/shadow"),
            &path.join("device"),
        ] {
            let image = path.join("image.qcow2");
            overlay(&image, &described(driver, file), Some("raw"));
            let message = refusal(&image, within(path));
            assert!(message.contains("outside"), "{message}");
        }
    }
    let image = path.join("inside.qcow2");
    overlay(&image, &described("file", &path.join("base.raw")), Some("raw"));
    assert_eq!(block_on(read_first(image.clone(), within(path))).unwrap(), [7; 4096]);
    assert!(refusal(&image, within(outside.path())).contains("outside"));
    // Its format is given with its name or in the header, or else not probed either.
    forget_format(&image);
    assert_eq!(block_on(read_first(image.clone(), within(path))).unwrap(), [7; 4096]);
    let base = path.join("base.raw");
    let bare = format!(r#"json:{{"file.filename":"{}"}}"#, base.display());
    overlay(&image, &bare, None);
    assert!(refusal(&image, within(path)).contains("format"));
}

#[test]
fn an_untrusted_images_backing_file_is_not_probed() {
    let (directory, image) = naming("base", None);
    let inner = directory.path().join("base");
    fs::write(&inner, [7; 4096]).unwrap();
    assert!(refusal(&image, within(directory.path())).contains("format"));
    assert_eq!(block_on(read_first(image, Trust::Full)).unwrap(), [7; 4096]);
}

#[test]
fn chains_that_loop_end_in_an_error() {
    let (directory, image) = naming("image.qcow2", Some("qcow2"));
    assert!(refusal(&image, Trust::Full).contains("its own backing file"));
    // Two of them, and one through links with ever new names.
    let other = directory.path().join("other.qcow2");
    fs::remove_file(&image).unwrap();
    overlay(&image, "other.qcow2", Some("qcow2"));
    overlay(&other, "./image.qcow2", Some("qcow2"));
    assert!(refusal(&image, Trust::Full).contains("its own backing file"));
    let again = directory.path().join("again");
    symlink(directory.path(), &again).unwrap();
    fs::remove_file(&image).unwrap();
    overlay(&image, "again/image.qcow2", Some("qcow2"));
    assert!(refusal(&image, Trust::Full).contains("its own backing file"));
    // A second name of the same file.
    fs::remove_file(&image).unwrap();
    overlay(&image, "hard.qcow2", Some("qcow2"));
    fs::hard_link(&image, directory.path().join("hard.qcow2")).unwrap();
    assert!(refusal(&image, Trust::Full).contains("its own backing file"));
    // For writing, where the first lock stands in the way of the second.
    let options = OpenOptions::new().writable(true);
    let error = guarded("writable loop", move || {
        block_on(Disk::open(FileHost.any(), &image, &options)).err().map(|error| error.to_string())
    });
    assert!(error.unwrap().contains("hard.qcow2"));
}

#[test]
fn an_image_is_not_its_own_data_file() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image.qcow2");
    let other = directory.path().join("other");
    let new = plain().size(1 << 20).data_file(other.to_str().unwrap());
    block_on(create(&FileHost.any(), &image, &new)).unwrap();
    fs::remove_file(&other).unwrap();
    fs::hard_link(&image, &other).unwrap();
    for locking in [Locking::Exclusive, Locking::Unlocked] {
        let options = OpenOptions::new().locking(locking);
        let error =
            block_on(Disk::open(FileHost.any(), &image, &options)).err().unwrap().to_string();
        assert!(error.contains("image.qcow2") && error.contains("data file"), "{error}");
    }
    // The first lock stands in the way of the second.
    let options = OpenOptions::new().writable(true);
    assert!(block_on(Disk::open(FileHost.any(), &image, &options)).is_err());
}

#[test]
fn what_is_no_file_is_no_backing_file() {
    for format in ["raw", "qcow2"] {
        let (directory, image) = naming("thing", Some(format));
        let thing = directory.path().join("thing");
        let path = CString::new(thing.as_os_str().as_bytes()).unwrap();
        // SAFETY: the path is a C string that lives during the call.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
        refusal(&image, Trust::Full);
        fs::remove_file(&thing).unwrap();
        fs::create_dir(&thing).unwrap();
        refusal(&image, Trust::Full);
        fs::remove_dir(&thing).unwrap();
        for device in ["/dev/zero", "/dev/tty", "/dev/random", "/proc/self/mem", "/dev/stdin"] {
            symlink(device, &thing).unwrap();
            refusal(&image, within(directory.path()));
            if device.starts_with("/dev/z") || device.starts_with("/dev/r") {
                refusal(&image, Trust::Full);
            }
            fs::remove_file(&thing).unwrap();
        }
    }
}

#[test]
fn a_raw_image_that_starts_as_a_qcow2_is_raw_where_the_user_says_so() {
    // A guest has written a header that names a file of the host onto its raw disk.
    let (directory, image) = naming("/etc/hostname", Some("raw"));
    let options = OpenOptions::new().format(ImageFormat::Raw);
    let disk = block_on(Disk::open(FileHost.any(), &image, &options)).unwrap();
    assert_eq!(disk.depth(), 1);
    let bytes = block_on(disk.read(0, IoBuf::zeroed(4096))).unwrap();
    assert_eq!(bytes[..4], *b"QFI\xfb");
    // And as a backing file that the overlay calls raw.
    let top = directory.path().join("top.qcow2");
    overlay(&top, "image.qcow2", Some("raw"));
    let bytes = block_on(read_first(top, Trust::Full)).unwrap();
    assert_eq!(bytes[..4], *b"QFI\xfb");
}
