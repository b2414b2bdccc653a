//! New headers.

use crate::support::{SHORT, create, secret};
use isobath_luks::{
    CipherAlgorithm, CipherMode, CreateOptions, Error, Header, IvGenerator, system_random,
};
use std::time::Duration;

#[test]
fn a_new_header_is_unlocked_by_its_secret_only() {
    let made = create(&CreateOptions::default(), "right");
    assert_eq!(made.area.len(), 2_068_480);
    let header = Header::parse(&made.area, made.area.len() as u64).unwrap();
    assert_eq!(header, made.header);
    let (slot, key) = header.unlock(&made.area, &secret("right")).unwrap();
    assert_eq!(slot, 0);
    let mut data = vec![7; 1024];
    made.header.cipher(&made.key).unwrap().encrypt(9, &mut data);
    header.cipher(&key).unwrap().decrypt(9, &mut data);
    assert!(data.iter().all(|byte| *byte == 7));
    let error = header.unlock(&made.area, &secret("wrong")).unwrap_err();
    assert!(matches!(error, Error::WrongSecret));
}

#[test]
fn headers_differ_in_everything_random() {
    let [one, other] = [(), ()].map(|()| create(&CreateOptions::default(), "the same"));
    for (name, range) in
        [("digest", 112..132), ("salt", 132..164), ("uuid", 168..204), ("slot's salt", 216..248)]
    {
        assert_ne!(one.area[range.clone()], other.area[range], "{name}");
    }
    let different = one.area[4096..260_096].iter().zip(&other.area[4096..260_096]);
    assert!(different.filter(|(one, other)| one != other).count() > 250_000);
    // The rest of the area is empty, as QEMU's is.
    assert!(one.area[592..4096].iter().chain(&one.area[260_096..]).all(|byte| *byte == 0));
    let uuid = one.header.info().uuid;
    assert_eq!((uuid.len(), &uuid[14..15]), (36, "4"), "{uuid}");
}

#[test]
fn a_failing_source_of_random_bytes_fails_the_header() {
    let options = CreateOptions { iter_time: SHORT, ..CreateOptions::default() };
    for fails_at in 0..6 {
        let mut calls = 0;
        let mut random = |buffer: &mut [u8]| {
            calls += 1;
            if calls > fails_at { Err(Error::WrongSecret) } else { system_random(buffer) }
        };
        let made = options.create(&secret("s"), &mut random);
        // The master key, its salt, the UUID, the slot's salt, the stripes.
        assert_eq!(made.is_ok(), fails_at >= 5, "{fails_at}");
    }
}

#[test]
fn a_key_of_another_header_is_refused() {
    let long = create(&CreateOptions::default(), "s");
    let options = CreateOptions { algorithm: CipherAlgorithm::Aes128, ..CreateOptions::default() };
    let short = create(&options, "s");
    assert!(long.header.cipher(&short.key).is_err());
    assert!(short.header.cipher(&long.key).is_err());
}

#[test]
fn iterations_have_bounds() {
    let options = CreateOptions { iter_time: Duration::ZERO, ..CreateOptions::default() };
    let made = options.create(&secret("s"), &mut system_random).unwrap();
    let info = made.header.info();
    assert_eq!((info.slots[0].iterations, info.master_key_iterations), (1000, 1000));
    let options = CreateOptions { iter_time: Duration::from_secs(100_000), ..options };
    let error = options.create(&secret("s"), &mut system_random).unwrap_err().to_string();
    assert!(error.contains("iter-time '100000000 ms' is not supported"), "{error}");
}

#[test]
fn names_are_those_of_qemu() {
    assert_eq!("aes-128".parse::<CipherAlgorithm>().unwrap(), CipherAlgorithm::Aes128);
    assert_eq!("cbc".parse::<CipherMode>().unwrap(), CipherMode::Cbc);
    let error = "serpent-256".parse::<CipherAlgorithm>().unwrap_err().to_string();
    assert_eq!(
        error,
        "LUKS: cipher-alg 'serpent-256' is not supported; supported are aes-128, aes-256"
    );
    assert_eq!(IvGenerator::from_options("essiv", None).unwrap(), IvGenerator::Essiv);
    assert_eq!(IvGenerator::from_options("plain", Some("md5")).unwrap(), IvGenerator::Plain);
    let error = IvGenerator::from_options("essiv", Some("md5")).unwrap_err().to_string();
    assert_eq!(error, "LUKS: ivgen-hash-alg 'md5' is not supported; supported is sha256");
}

#[test]
fn nothing_secret_is_shown() {
    let made = create(&CreateOptions::default(), "secret");
    let cipher = made.header.cipher(&made.key).unwrap();
    let shown = format!("{:?} {:?} {cipher:?}", secret("hidden"), made.key);
    assert_eq!(shown, "Secret MasterKey Cipher");
}
