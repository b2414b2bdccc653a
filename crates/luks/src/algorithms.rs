//! The names of ciphers, modes, initialization vectors and hashes, in headers and in QEMU's options.

use crate::error::{Error, Result};
use std::fmt;
use std::str::FromStr;

/// The length of a sector in bytes. Each sector has its own initialization vector.
pub const SECTOR: usize = 512;

/// Defines an enum of names with `FromStr` and `Display`.
macro_rules! named {
    ($(#[$doc:meta])* $name:ident, $option:literal, {
        $($(#[$variant_doc:meta])* $variant:ident = $text:literal),* $(,)?
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant),*
        }

        impl $name {
            /// All values.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// QEMU's name.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $text),* }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }

        impl FromStr for $name {
            type Err = Error;

            /// The value of QEMU's option.
            fn from_str(text: &str) -> Result<Self> {
                let found = Self::ALL.iter().find(|value| value.name() == text);
                let names: Vec<_> = Self::ALL.iter().map(|value| value.name()).collect();
                found.copied().ok_or_else(|| {
                    Error::unsupported($option, text, format!("supported are {}", names.join(", ")))
                })
            }
        }
    };
}

named! {
    /// A block cipher and its key size: QEMU's `cipher-alg`.
    CipherAlgorithm, "cipher-alg", {
        /// AES with keys of 128 bits.
        Aes128 = "aes-128",
        /// AES with keys of 256 bits.
        Aes256 = "aes-256",
    }
}

named! {
    /// A mode of operation: QEMU's `cipher-mode`.
    CipherMode, "cipher-mode", {
        /// XTS (IEEE 1619), with two keys.
        Xts = "xts",
        /// Cipher block chaining within a sector.
        Cbc = "cbc",
    }
}

named! {
    /// How a sector's number becomes its initialization vector: QEMU's `ivgen-alg`.
    IvGenerator, "ivgen-alg", {
        /// The low 32 bits of the number, little-endian. The vectors repeat every 2 TiB.
        Plain = "plain",
        /// The number, 64 bits, little-endian.
        Plain64 = "plain64",
        /// The number as for plain64, encrypted with the SHA-256 of the master key.
        Essiv = "essiv",
    }
}

named! {
    /// A hash function, for PBKDF2 and the anti-forensic splitter: QEMU's `hash-alg`.
    Hash, "hash-alg", {
        /// SHA-1.
        Sha1 = "sha1",
        /// SHA-224.
        Sha224 = "sha224",
        /// SHA-256.
        Sha256 = "sha256",
        /// SHA-384.
        Sha384 = "sha384",
        /// SHA-512.
        Sha512 = "sha512",
        /// RIPEMD-160.
        Ripemd160 = "ripemd160",
    }
}

impl IvGenerator {
    /// Parses QEMU's options `ivgen-alg` and `ivgen-hash-alg`. As in QEMU, the latter is ignored without ESSIV.
    ///
    /// # Errors
    /// If the generator, or its combination with this hash, is not supported.
    pub fn from_options(algorithm: &str, hash: Option<&str>) -> Result<Self> {
        let generator = algorithm.parse()?;
        match (generator, hash) {
            (Self::Essiv, Some(hash)) if hash != "sha256" => {
                Err(Error::unsupported("ivgen-hash-alg", hash, "supported is sha256"))
            }
            _ => Ok(generator),
        }
    }

    /// The hash used for ESSIV: QEMU's `ivgen-hash-alg`.
    pub fn hash(self) -> Option<Hash> {
        (self == Self::Essiv).then_some(Hash::Sha256)
    }
}

impl Hash {
    /// The length of its result in bytes.
    pub(crate) fn length(self) -> usize {
        match self {
            Self::Sha1 | Self::Ripemd160 => 20,
            Self::Sha224 => 28,
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }
}

/// The cipher of a header, with its mode and its initialization vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CipherSpec {
    pub(crate) algorithm: CipherAlgorithm,
    pub(crate) mode: CipherMode,
    pub(crate) iv: IvGenerator,
}

const SUPPORTED: &str = "supported are xts and cbc with plain64, plain and essiv:sha256";

impl CipherSpec {
    /// Parses a header's fields cipher-name, cipher-mode and key-bytes (the specification's section 2.1).
    pub(crate) fn parse(name: &str, mode: &str, key_bytes: u32) -> Result<Self> {
        if name != "aes" {
            return Err(Error::unsupported("cipher-name", name, "supported is aes"));
        }
        let refused = || Error::unsupported("cipher-mode", mode, SUPPORTED);
        let (operation, vectors) = mode.split_once('-').ok_or_else(refused)?;
        let operation = operation.parse().map_err(|_| refused())?;
        let iv = match vectors {
            "plain" => IvGenerator::Plain,
            "plain64" => IvGenerator::Plain64,
            "essiv:sha256" => IvGenerator::Essiv,
            _ => return Err(refused()),
        };
        let keys = if operation == CipherMode::Xts { 2 } else { 1 };
        let algorithm = match key_bytes.checked_div(keys) {
            Some(16) if key_bytes == 16 * keys => CipherAlgorithm::Aes128,
            Some(32) if key_bytes == 32 * keys => CipherAlgorithm::Aes256,
            _ => {
                let supported = format!(
                    "supported with {operation} are {} (aes-128) and {} (aes-256)",
                    16 * keys,
                    32 * keys
                );
                return Err(Error::unsupported("key-bytes", key_bytes, supported));
            }
        };
        Ok(Self { algorithm, mode: operation, iv })
    }

    /// The value of a header's field cipher-mode.
    pub(crate) fn mode_text(self) -> String {
        match self.iv.hash() {
            Some(hash) => format!("{}-{}:{hash}", self.mode, self.iv),
            None => format!("{}-{}", self.mode, self.iv),
        }
    }

    /// The length of the master key in bytes.
    pub(crate) fn key_bytes(self) -> usize {
        let one = match self.algorithm {
            CipherAlgorithm::Aes128 => 16,
            CipherAlgorithm::Aes256 => 32,
        };
        if self.mode == CipherMode::Xts { 2 * one } else { one }
    }
}
