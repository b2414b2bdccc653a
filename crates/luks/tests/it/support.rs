//! Encrypted images by QEMU, and their header areas.

use isobath_luks::{Cipher, CreateOptions, Created, Header, MasterKey, Secret, system_random};
use isobath_testkit::args;
use isobath_testkit::process::Finished;
use isobath_testkit::qemu;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

/// What a test's key derivation takes.
pub(crate) const SHORT: Duration = Duration::from_millis(1);

/// The guest data of a test.
pub(crate) const SIZE: u64 = 1 << 20;

pub(crate) fn secret(text: &str) -> Secret {
    Secret::new(text.into()).unwrap()
}

pub(crate) fn create(options: &CreateOptions, password: &str) -> Created {
    let options = CreateOptions { iter_time: SHORT, ..*options };
    options.create(&secret(password), &mut system_random).unwrap()
}

/// An encrypted image, with passphrases in files beside it.
pub(crate) struct Image {
    directory: TempDir,
}

impl Image {
    /// An image by QEMU. `options` are those of LUKS, without `encrypt.`, separated by commas.
    #[track_caller]
    pub(crate) fn new(password: &str, options: &str) -> Self {
        let image = Self { directory: tempfile::tempdir().unwrap() };
        let mut all = "encrypt.format=luks,encrypt.key-secret=key,encrypt.iter-time=1".to_owned();
        for option in options.split(',').filter(|option| !option.is_empty()) {
            all = format!("{all},encrypt.{option}");
        }
        let mut arguments = args!["create", "-q", "-f", "qcow2"];
        arguments.extend(image.key("key", password));
        arguments.extend(args!["-o", all, image.path(), SIZE.to_string()]);
        let _ = qemu("qemu-img", &arguments).ok();
        image
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("image")
    }

    /// Arguments that make a secret known to QEMU.
    pub(crate) fn key(&self, id: &str, password: impl AsRef<[u8]>) -> Vec<OsString> {
        let file = self.directory.path().join(id);
        fs::write(&file, password).unwrap();
        args!["--object", format!("secret,id={id},file={}", file.display())]
    }

    fn opened(&self) -> Vec<OsString> {
        let image = self.path();
        let node = format!("driver=qcow2,file.filename={},encrypt.key-secret=key", image.display());
        args!["--image-opts", node]
    }

    /// Runs commands of qemu-io.
    #[track_caller]
    pub(crate) fn io(&self, password: impl AsRef<[u8]>, commands: &[&str]) -> Finished {
        let mut arguments = self.key("key", password);
        arguments.extend(self.opened());
        for command in commands {
            arguments.extend(args!["-c", *command]);
        }
        qemu("qemu-io", &arguments)
    }

    /// Runs `qemu-img amend`, with `new` and `old` as the secrets of these names. `options` are without `encrypt.`.
    #[track_caller]
    pub(crate) fn amend(
        &self,
        password: &str,
        secrets: [&str; 2],
        options: &str,
        force: bool,
    ) -> Finished {
        let mut arguments = args!["amend"];
        if force {
            arguments.push("--force".into());
        }
        for (id, password) in [("key", password), ("new", secrets[0]), ("old", secrets[1])] {
            arguments.extend(self.key(id, password));
        }
        let options: Vec<_> =
            options.split(',').map(|option| format!("encrypt.{option}")).collect();
        arguments.extend(self.opened());
        arguments.extend(args!["-o", options.join(",")]);
        qemu("qemu-img", &arguments)
    }

    /// The header area's place in the image file, by the header extension 0x0537be77.
    #[track_caller]
    pub(crate) fn place(&self) -> (usize, usize) {
        let bytes = fs::read(self.path()).unwrap();
        let be32 = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap());
        let be64 = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        let mut at = be32(100) as usize;
        while be32(at) != 0x0537_be77 {
            assert_ne!(be32(at), 0, "the image is not encrypted");
            at += 8 + be32(at + 4).next_multiple_of(8) as usize;
        }
        (be64(at + 8), be64(at + 16))
    }

    #[track_caller]
    pub(crate) fn area(&self) -> Vec<u8> {
        let (offset, length) = self.place();
        fs::read(self.path()).unwrap()[offset..offset + length].to_vec()
    }

    /// Replaces bytes of the header area.
    #[track_caller]
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        let (area, length) = self.place();
        assert!(offset + bytes.len() <= length);
        let mut file = fs::read(self.path()).unwrap();
        file[area + offset..area + offset + bytes.len()].copy_from_slice(bytes);
        fs::write(self.path(), file).unwrap();
    }

    #[track_caller]
    pub(crate) fn header(&self) -> Header {
        let area = self.area();
        Header::parse(&area, area.len() as u64).unwrap()
    }

    #[track_caller]
    pub(crate) fn unlock(&self, password: &str) -> (usize, MasterKey) {
        self.header().unlock(&self.area(), &secret(password)).unwrap()
    }

    #[track_caller]
    pub(crate) fn cipher(&self, password: &str) -> Cipher {
        self.header().cipher(&self.unlock(password).1).unwrap()
    }

    /// Where the image file has the L2 entry of the guest's first cluster, and that cluster.
    #[track_caller]
    pub(crate) fn cluster(&self) -> (usize, usize) {
        let file = fs::read(self.path()).unwrap();
        let be64 = |at: usize| u64::from_be_bytes(file[at..at + 8].try_into().unwrap());
        let entry = |at: usize| (be64(at) & 0x00ff_ffff_ffff_fe00) as usize;
        let table = entry(be64(40) as usize);
        assert_ne!(table, 0, "nothing is written");
        (table, entry(table))
    }
}

/// Runs a program of QEMU.
#[track_caller]
pub(crate) fn qemu(name: &str, arguments: &[OsString]) -> Finished {
    qemu::run(Command::new(qemu::program(name)).args(arguments))
}

/// What qemu-img says of an image's encryption.
#[track_caller]
pub(crate) fn info(image: &Path) -> serde_json::Value {
    let done = qemu("qemu-img", &args!["info", "--output=json", image][..]).ok();
    done.json()["format-specific"]["data"]["encrypt"].clone()
}
