//! Creating headers.

use crate::algorithms::{CipherAlgorithm, CipherMode, CipherSpec, Hash, IvGenerator};
use crate::amend::Change;
use crate::error::Result;
use crate::header::{Header, SLOTS, area_length};
use crate::kdf::{self, DEFAULT_ITER_TIME};
use crate::secret::{MasterKey, Random, Secret, random_secret};
use std::time::Duration;

/// Options of a new header. The defaults are QEMU's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// `encrypt.cipher-alg`: aes-256 by default.
    pub algorithm: CipherAlgorithm,
    /// `encrypt.cipher-mode`: XTS by default.
    pub mode: CipherMode,
    /// `encrypt.ivgen-alg`: plain64 by default.
    pub iv_generator: IvGenerator,
    /// `encrypt.hash-alg`: SHA-256 by default.
    pub hash: Hash,
    /// `encrypt.iter-time`: how long trying a secret on a key slot takes on this machine. Two seconds by default.
    pub iter_time: Duration,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            algorithm: CipherAlgorithm::Aes256,
            mode: CipherMode::Xts,
            iv_generator: IvGenerator::Plain64,
            hash: Hash::Sha256,
            iter_time: DEFAULT_ITER_TIME,
        }
    }
}

/// A new header.
#[derive(Debug)]
pub struct Created {
    /// The header; the secret opens key slot 0.
    pub header: Header,
    /// The whole header area, to be written to the image.
    pub area: Vec<u8>,
    /// The new master key.
    pub key: MasterKey,
}

impl CreateOptions {
    fn spec(&self) -> CipherSpec {
        CipherSpec { algorithm: self.algorithm, mode: self.mode, iv: self.iv_generator }
    }

    /// The length of the header area in bytes, the same as QEMU's.
    pub fn area_length(&self) -> u64 {
        area_length(self.spec().key_bytes(), SLOTS)
    }

    /// Creates a header with a new master key, which the secret opens. This takes slightly longer than `iter_time`.
    ///
    /// # Errors
    /// If there are no random bytes, or `iter_time` is so long that [`Header::parse`] would refuse the header.
    pub fn create(&self, secret: &Secret, random: &mut Random<'_>) -> Result<Created> {
        let spec = self.spec();
        let key = MasterKey::new(random_secret(spec.key_bytes(), random)?);
        let iterations = kdf::iterations(self.hash, spec.key_bytes(), self.iter_time)?;
        let digest_iterations = kdf::digest_iterations(self.hash, self.iter_time)?;
        let header = Header::new(spec, self.hash, digest_iterations, &key, random)?;
        let mut area = vec![0; self.area_length() as usize];
        let encoded = header.encode();
        area[..encoded.len()].copy_from_slice(&encoded);
        let mut change = Change::new(&header);
        change.fill(0, iterations, &key, secret, random)?;
        for write in &change.writes {
            let start = write.offset as usize;
            area[start..start + write.bytes.len()].copy_from_slice(&write.bytes);
        }
        Ok(Created { header: change.header, area, key })
    }
}
