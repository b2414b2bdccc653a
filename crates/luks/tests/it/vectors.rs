//! Published vectors: those of IEEE 1619-2007, annex B, that have 512 bytes, and those of NIST SP 800-38A for CBC.

use crate::support::{SHORT, secret};
use isobath_luks::{Cipher, CipherAlgorithm, CipherMode, CreateOptions, IvGenerator};
use isobath_testkit::seed::Seed;
use rand::{Rng, RngExt};

fn bytes(hexadecimal: &str) -> Vec<u8> {
    let digits: Vec<_> = hexadecimal.chars().map(|digit| digit.to_digit(16).unwrap()).collect();
    digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect()
}

/// The cipher of a header whose master key is this: it is the first that is asked of the source of random bytes.
fn cipher(mode: CipherMode, iv_generator: IvGenerator, key: &[u8]) -> Cipher {
    let bits = key.len() * 8 / if mode == CipherMode::Xts { 2 } else { 1 };
    let algorithm = match bits {
        128 => CipherAlgorithm::Aes128,
        _ => CipherAlgorithm::Aes256,
    };
    let default = CreateOptions::default();
    let options = CreateOptions { algorithm, mode, iv_generator, iter_time: SHORT, ..default };
    let mut first = true;
    let mut random = |buffer: &mut [u8]| {
        if std::mem::take(&mut first) {
            buffer.copy_from_slice(key);
        }
        Ok(())
    };
    let made = options.create(&secret("s"), &mut random).unwrap();
    made.header.cipher(&made.key).unwrap()
}

/// Vectors 4, 10 and 14: the keys, the sector, the ciphertext. The plaintext is 0x00 to 0xff, twice.
const XTS: [(&str, u64, &str); 3] = [
    (
        "2718281828459045235360287471352631415926535897932384626433832795",
        0,
        "27a7479befa1d476489f308cd4cfa6e2a96e4bbe3208ff25287dd3819616e89cc78cf7f5e543445f8333d8fa7f5600000527\
         9fa5d8b5e4ad40e736ddb4d35412328063fd2aab53e5ea1e0a9f332500a5df9487d07a5c92cc512c8866c7e860ce93fdf166\
         a24912b422976146ae20ce846bb7dc9ba94a767aaef20c0d61ad02655ea92dc4c4e41a8952c651d33174be51a10c421110e6\
         d81588ede82103a252d8a750e8768defffed9122810aaeb99f9172af82b604dc4b8e51bcb08235a6f4341332e4ca60482a4b\
         a1a03b3e65008fc5da76b70bf1690db4eae29c5f1badd03c5ccf2a55d705ddcd86d449511ceb7ec30bf12b1fa35b913f9f74\
         7a8afd1b130e94bff94effd01a91735ca1726acd0b197c4e5b03393697e126826fb6bbde8ecc1e08298516e2c9ed03ff3c1b\
         7860f6de76d4cecd94c8119855ef5297ca67e9f3e7ff72b1e99785ca0a7e7720c5b36dc6d72cac9574c8cbbc2f801e23e56f\
         d344b07f22154beba0f08ce8891e643ed995c94d9a69c9f1b5f499027a78572aeebd74d20cc39881c213ee770b1010e4bea7\
         18846977ae119f7a023ab58cca0ad752afe656bb3c17256a9f6e9bf19fdd5a38fc82bbe872c5539edb609ef4f79c203ebb14\
         0f2e583cb2ad15b4aa5b655016a8449277dbd477ef2c8d6c017db738b18deb4a427d1923ce3ff262735779a418f20a282df9\
         20147beabe421ee5319d0568",
    ),
    (
        "2718281828459045235360287471352662497757247093699959574966967627\
         3141592653589793238462643383279502884197169399375105820974944592",
        0xff,
        "1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b5d31e276f8fe4a8d66b317f9ac683f44680a\
         86ac35adfc3345befecb4bb188fd5776926c49a3095eb108fd1098baec70aaa66999a72a82f27d848b21d4a741b0c5cd4d5f\
         ff9dac89aeba122961d03a757123e9870f8acf1000020887891429ca2a3e7a7d7df7b10355165c8b9a6d0a7de8b062c4500d\
         c4cd120c0f7418dae3d0b5781c34803fa75421c790dfe1de1834f280d7667b327f6c8cd7557e12ac3a0f93ec05c52e0493ef\
         31a12d3d9260f79a289d6a379bc70c50841473d1a8cc81ec583e9645e07b8d9670655ba5bbcfecc6dc3966380ad8fecb17b6\
         ba02469a020a84e18e8f84252070c13e9f1f289be54fbc481457778f616015e1327a02b140f1505eb309326d68378f837459\
         5c849d84f4c333ec4423885143cb47bd71c5edae9be69a2ffeceb1bec9de244fbe15992b11b77c040f12bd8f6a975a44a0f9\
         0c29a9abc3d4d893927284c58754cce294529f8614dcd2aba991925fedc4ae74ffac6e333b93eb4aff0479da9a410e4450e0\
         dd7ae4c6e2910900575da401fc07059f645e8b7e9bfdef33943054ff84011493c27b3429eaedb4ed5376441a77ed43851ad7\
         7f16f541dfd269d50d6a5f14fb0aab1cbb4c1550be97f7ab4066193c4caa773dad38014bd2092fa755c824bb5e54c4f36ffd\
         a9fcea70b9c6e693e148c151",
    ),
    (
        "2718281828459045235360287471352662497757247093699959574966967627\
         3141592653589793238462643383279502884197169399375105820974944592",
        0xff_ffff_ffff,
        "64497e5a831e4a932c09be3e5393376daa599548b816031d224bbf50a818ed2350eae7e96087c8a0db51ad290bd00c1ac162\
         0857635bf246c176ab463be30b808da548081ac847b158e1264be25bb0910bbc92647108089415d45fab1b3d2604e8a8eff1\
         ae4020cfa39936b66827b23f371b92200be90251e6d73c5f86de5fd4a950781933d79a28272b782a2ec313efdfcc0628f43d\
         744c2dc2ff3dcb66999b50c7ca895b0c64791eeaa5f29499fb1c026f84ce5b5c72ba1083cddb5ce45434631665c333b60b11\
         593fb253c5179a2c8db813782a004856a1653011e93fb6d876c18366dd8683f53412c0c180f9c848592d593f8609ca736317\
         d356e13e2bff3a9f59cd9aeb19cd482593d8c46128bb32423b37a9adfb482b99453fbe25a41bf6feb4aa0bef5ed24bf73c76\
         2978025482c13115e4015aac992e5613a3b5c2f685b84795cb6e9b2656d8c88157e52c42f978d8634c43d06fea928f2822e4\
         65aa6576e9bf419384506cc3ce3c54ac1a6f67dc66f3b30191e698380bc999b05abce19dc0c6dcc2dd001ec535ba18deb2df\
         1a101023108318c75dc98611a09dc48a0acdec676fabdf222f07e026f059b672b56e5cbc8e1d21bbd867dd927212054681d7\
         0ea737134cdfce93b6f82ae22423274e58a0821cc5502e2d0ab4585e94de6975be5e0b4efce51cd3e70c25a1fbbbd609d273\
         ad5b0d59631c531f6a0a57b9",
    ),
];

#[test]
fn xts_of_ieee_1619() {
    for (key, sector, expected) in XTS {
        let plain: Vec<u8> = (0..512).map(|at| at as u8).collect();
        let mut data = plain.clone();
        let cipher = cipher(CipherMode::Xts, IvGenerator::Plain64, &bytes(key));
        cipher.encrypt(sector, &mut data);
        assert_eq!(data, bytes(expected));
        cipher.decrypt(sector, &mut data);
        assert_eq!(data, plain);
    }
}

/// Sections F.2.1 and F.2.5. The standard's initialization vector is no sector's number: here it is added to the
/// first block, and so is the sector's.
#[test]
fn cbc_of_nist() {
    let plain = bytes(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51\
         30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710",
    );
    for (key, expected) in [
        (
            "2b7e151628aed2a6abf7158809cf4f3c",
            "7649abac8119b246cee98e9b12e9197d5086cb9b507219ee95db113a917678b2\
             73bed6b8e3c1743b7116e69e222295163ff1caa1681fac09120eca307586e1a7",
        ),
        (
            "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4",
            "f58c4c04d6e5f1ba779eabfb5f7bfbd69cfc4e967edb808d679f777bc6702c7d\
             39f23369a9d9bacfa530e26304231461b2eb05e2c39be9fcda6c19078c6a9d1b",
        ),
    ] {
        let cipher = cipher(CipherMode::Cbc, IvGenerator::Plain64, &bytes(key));
        let mut data = vec![0; 512];
        data[..64].copy_from_slice(&plain);
        for (at, byte) in data[..16].iter_mut().enumerate() {
            *byte ^= at as u8;
        }
        data[0] ^= 5;
        let before = data.clone();
        cipher.encrypt(5, &mut data);
        assert_eq!(data[..64], bytes(expected));
        cipher.decrypt(5, &mut data);
        assert_eq!(data, before);
    }
}

/// However many sectors there are at once, each is encrypted as it is alone.
#[test]
fn sectors_are_independent() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for &mode in CipherMode::ALL {
        for &vectors in IvGenerator::ALL {
            let cipher = cipher(mode, vectors, &bytes(XTS[0].0));
            for sectors in [0, 1, 2, 3, 31, 63, 64, 65, 128, 200] {
                let mut data = vec![0; sectors * 512];
                rng.fill_bytes(&mut data);
                let plain = data.clone();
                let first = rng.random::<u64>() >> rng.random_range(0..64);
                cipher.encrypt(first, &mut data);
                for (at, sector) in data.chunks(512).enumerate() {
                    let mut alone = plain[at * 512..(at + 1) * 512].to_vec();
                    cipher.encrypt(first.wrapping_add(at as u64), &mut alone);
                    assert!(alone == sector, "{mode} {vectors}: {at} of {sectors}");
                    cipher.decrypt(first.wrapping_add(at as u64), &mut alone);
                    assert!(alone == plain[at * 512..(at + 1) * 512], "{mode} {vectors}");
                }
                cipher.clone().decrypt(first, &mut data);
                assert!(data == plain, "{mode} {vectors}: {sectors}");
            }
        }
    }
}

#[test]
#[should_panic(expected = "513 bytes are not whole sectors")]
fn parts_of_sectors_are_a_defect_of_the_caller() {
    cipher(CipherMode::Xts, IvGenerator::Plain, &[7; 64]).encrypt(0, &mut [0; 513]);
}
