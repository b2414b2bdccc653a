//! Images by QEMU, read and written here, and headers from here in images by QEMU.

use crate::support::{Image, create, info, secret};
use isobath_luks::{
    CipherAlgorithm, CipherMode, CreateOptions, Error, Hash, Info, IvGenerator, Secret, SlotInfo,
};
use serde_json::{Value, json};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;

/// Every cipher with every mode and sort of initialization vector, and whether QEMU makes an image of its own with
/// them, which takes it seconds: it does with half of them, so that any two values meet in one. Each hash is once in
/// both halves, so that it divides keys of different lengths.
fn combinations() -> Vec<(CreateOptions, bool)> {
    let mut all = Vec::new();
    let mut count = [0, 3];
    for (a, &algorithm) in CipherAlgorithm::ALL.iter().enumerate() {
        for (m, &mode) in CipherMode::ALL.iter().enumerate() {
            for (v, &iv_generator) in IvGenerator::ALL.iter().enumerate() {
                let half = (a + m + v) % 2;
                let hash = Hash::ALL[count[half] % Hash::ALL.len()];
                count[half] += 1;
                let default = CreateOptions::default();
                all.push((
                    CreateOptions { algorithm, mode, iv_generator, hash, ..default },
                    half == 0,
                ));
            }
        }
    }
    all
}

/// What QEMU takes for a password.
fn password(number: usize) -> String {
    ["theirs", "", "ü with spaces\n", &"long ".repeat(1000)][number % 4].to_owned()
}

fn qemu_options(options: &CreateOptions) -> String {
    format!(
        "cipher-alg={},cipher-mode={},ivgen-alg={},hash-alg={}",
        options.algorithm, options.mode, options.iv_generator, options.hash
    )
}

#[test]
fn qemu_and_isobath_read_each_other() {
    let (theirs, others): (Vec<_>, Vec<_>) = combinations().into_iter().partition(|(_, own)| *own);
    let mut images = Vec::new();
    for (number, (options, _)) in theirs.into_iter().enumerate() {
        let text = qemu_options(&options);
        let password = password(number);
        let image = Image::new(&password, &text);
        qemu_header(&image, &password, &text);
        own_header(&image, &options, &text);
        images.push((options.area_length(), image));
    }
    for (options, _) in others {
        let (_, image) = images.iter().find(|(area, _)| *area == options.area_length()).unwrap();
        own_header(image, &options, &qemu_options(&options));
    }
}

/// What QEMU writes is decrypted here, and what is encrypted here is read by QEMU.
fn qemu_header(image: &Image, password: &str, text: &str) {
    assert_eq!(described(&image.header().info()), qemu_described(image), "{text}");
    let _ = image.io(password, &["write -P 0x5a 0 64k", "write -P 0xa5 4096 512"]).ok();
    let (_, cluster) = image.cluster();
    let mut file = fs::read(image.path()).unwrap();
    let cipher = image.cipher(password);
    let data = &mut file[cluster..cluster + (64 << 10)];
    let encrypted = data.to_vec();
    cipher.decrypt(cluster as u64 / 512, data);
    let mut expected = vec![0x5a; 64 << 10];
    expected[4096..4608].fill(0xa5);
    assert!(data == expected, "{text}");
    cipher.encrypt(cluster as u64 / 512, data);
    assert!(data == encrypted, "{text}");

    data.fill(0x3c);
    cipher.encrypt(cluster as u64 / 512, data);
    fs::write(image.path(), file).unwrap();
    let _ = image.io(password, &["read -P 0x3c 0 64k"]).ok();
}

/// A header from here takes the place of QEMU's, of the same length and layout.
fn own_header(image: &Image, options: &CreateOptions, text: &str) {
    let ours = create(options, "ours");
    assert_eq!(image.place().1, ours.area.len(), "{text}");
    assert_eq!(options.area_length(), ours.area.len() as u64, "{text}");
    let (one, other) = (image.header().info(), ours.header.info());
    for number in 0..8 {
        assert_eq!(one.slots[number].key_offset, other.slots[number].key_offset, "{text}");
        assert_eq!(one.slots[number].active, other.slots[number].active, "{text}");
    }
    image.write(0, &ours.area);
    let _ = image.io("ours", &["write -P 0x77 0 64k", "read -P 0x77 0 64k"]).ok();
    let (_, cluster) = image.cluster();
    let mut file = fs::read(image.path()).unwrap();
    let data = &mut file[cluster..cluster + (64 << 10)];
    ours.header.cipher(&ours.key).unwrap().decrypt(cluster as u64 / 512, data);
    assert!(data.iter().all(|byte| *byte == 0x77), "{text}");
    assert_eq!(described(&ours.header.info()), qemu_described(image), "{text}");
    let failed = image.io("theirs", &["read 0 512"]).exits(1);
    assert!(failed.stderr.contains(&Error::WrongSecret.to_string()), "{}", failed.stderr);
}

/// What qemu-img says; QEMU 9 and later say that the header is not detached, which it never is in a qcow2 image.
fn qemu_described(image: &Image) -> Value {
    let mut info = info(&image.path());
    if let Some(detached) = info.as_object_mut().unwrap().shift_remove("detached-header") {
        assert_eq!(detached, false);
    }
    info
}

fn described(info: &Info) -> Value {
    let slot = |slot: &SlotInfo| {
        let mut described = json!({ "active": slot.active, "key-offset": slot.key_offset });
        if slot.active {
            described["iters"] = json!(slot.iterations);
            described["stripes"] = json!(slot.stripes);
        }
        described
    };
    let mut all = json!({
        "format": "luks",
        "ivgen-alg": info.iv_generator.name(),
        "hash-alg": info.hash.name(),
        "cipher-alg": info.algorithm.name(),
        "cipher-mode": info.mode.name(),
        "uuid": info.uuid,
        "slots": info.slots.iter().map(slot).collect::<Vec<_>>(),
        "payload-offset": info.payload_offset,
        "master-key-iters": info.master_key_iterations,
    });
    if let Some(hash) = info.iv_hash {
        all["ivgen-hash-alg"] = json!(hash.name());
    }
    all
}

#[test]
fn a_wrong_secret_is_refused_as_in_qemu() {
    let image = Image::new("a password", "");
    let error = image.header().unlock(&image.area(), &secret("another")).unwrap_err();
    let failed = image.io("another", &["read 0 512"]).exits(1);
    assert!(failed.stderr.contains(&error.to_string()), "{}", failed.stderr);
    // A newline at the end belongs to it, for both.
    assert!(image.header().unlock(&image.area(), &secret("a password\n")).is_err());
    let _ = image.io("a password\n", &["read 0 512"]).exits(1);
}

/// Beyond 2 TiB of a file, a sector's number has more than 32 bits.
#[test]
fn distant_sectors_are_those_of_qemu() {
    let image = Image::new("a password", "");
    let empty = fs::read(image.path()).unwrap();
    for &iv_generator in IvGenerator::ALL {
        let options = CreateOptions { iv_generator, ..CreateOptions::default() };
        fs::write(image.path(), &empty).unwrap();
        image.write(0, &create(&options, "a password").area);
        let _ = image.io("a password", &["write -P 1 0 64k"]).ok();
        let (entry, _) = image.cluster();
        let cipher = image.cipher("a password");
        // The first and the last sectors are on both sides of 2 TiB.
        let cluster = 2_u64 << 40;
        let file = File::options().read(true).write(true).open(image.path()).unwrap();
        let mut data = vec![0x3c; 64 << 10];
        cipher.encrypt(cluster / 512, &mut data);
        file.write_all_at(&data, cluster).unwrap();
        file.write_all_at(&(cluster | 1 << 63).to_be_bytes(), entry as u64).unwrap();
        let _ = image.io("a password", &["read -P 0x3c 0 64k"]).ok();
    }
}

/// What other secrets QEMU takes, and which it does not.
#[test]
fn secrets_are_those_of_qemu() {
    let image = Image::new("a password", "");
    for password in (0..4).map(password) {
        image.write(0, &create(&CreateOptions::default(), &password).area);
        let _ = image.io(&password, &["read 0 512"]).ok();
    }
    for refused in [b"a\0b", b"a\xffb"] {
        assert!(Secret::new(refused.to_vec()).is_err());
        let failed = image.io(refused, &["read 0 512"]).exits(1);
        assert!(failed.stderr.contains("is not valid UTF-8"), "{}", failed.stderr);
    }
    assert!(Secret::new(vec![b'a'; 64 << 10]).is_ok());
    assert!(Secret::new(vec![b'a'; (64 << 10) + 1]).is_err());
}
