//! A peer that sends records as no implementation does.

use rustls::crypto::cipher::{
    AeadKey, Iv, KeyBlockShape, MessageDecrypter, MessageEncrypter, OutboundChunks,
    OutboundOpaqueMessage, OutboundPlainMessage, Tls12AeadAlgorithm, Tls13AeadAlgorithm,
    UnsupportedOperationError,
};
use rustls::{
    CipherSuiteCommon, ConnectionTrafficSecrets, ContentType, Error, SupportedCipherSuite,
    Tls12CipherSuite, Tls13CipherSuite,
};
use std::cell::RefCell;
use std::collections::VecDeque;

/// A record's type and what it contains.
type Record = (ContentType, Vec<u8>);

thread_local! {
    /// The next records of this type are encrypted as those in the list, in order.
    static INSTEAD: RefCell<(ContentType, VecDeque<Record>)> =
        const { RefCell::new((ContentType::ApplicationData, VecDeque::new())) };
}

/// Does what would send records of this type, with suites that are [forging](changed); these are sent in their place,
/// as far as there are any.
pub(crate) fn instead_of<T>(
    replaced: ContentType,
    records: impl IntoIterator<Item = Record>,
    send: impl FnOnce() -> T,
) -> T {
    INSTEAD.set((replaced, records.into_iter().collect()));
    let result = send();
    INSTEAD.with_borrow_mut(|(_, records)| records.clear());
    result
}

/// A suite as this one, whose keys encrypt so many records, and whose records can be replaced if it is `forging`. It
/// stays in memory.
pub(crate) fn changed(
    suite: SupportedCipherSuite,
    limit: u64,
    forging: bool,
) -> SupportedCipherSuite {
    let common = |common: &CipherSuiteCommon| CipherSuiteCommon {
        suite: common.suite,
        hash_provider: common.hash_provider,
        confidentiality_limit: limit,
    };
    match suite {
        SupportedCipherSuite::Tls12(suite) => {
            let common = common(&suite.common);
            let &Tls12CipherSuite { prf_provider, kx, sign, aead_alg, .. } = suite;
            let aead_alg: &dyn Tls12AeadAlgorithm =
                if forging { Box::leak(Box::new(Forging12(aead_alg))) } else { aead_alg };
            let suite = Tls12CipherSuite { common, prf_provider, kx, sign, aead_alg };
            SupportedCipherSuite::Tls12(Box::leak(Box::new(suite)))
        }
        SupportedCipherSuite::Tls13(suite) => {
            let common = common(&suite.common);
            let &Tls13CipherSuite { hkdf_provider, aead_alg, quic, .. } = suite;
            let aead_alg: &dyn Tls13AeadAlgorithm =
                if forging { Box::leak(Box::new(Forging13(aead_alg))) } else { aead_alg };
            let suite = Tls13CipherSuite { common, hkdf_provider, aead_alg, quic };
            SupportedCipherSuite::Tls13(Box::leak(Box::new(suite)))
        }
    }
}

struct Forging(Box<dyn MessageEncrypter>);
struct Forging12(&'static dyn Tls12AeadAlgorithm);
struct Forging13(&'static dyn Tls13AeadAlgorithm);

impl MessageEncrypter for Forging {
    fn encrypt(
        &mut self,
        message: OutboundPlainMessage<'_>,
        seq: u64,
    ) -> Result<OutboundOpaqueMessage, Error> {
        let instead = INSTEAD.with_borrow_mut(|(replaced, records)| {
            if *replaced == message.typ { records.pop_front() } else { None }
        });
        let Some((typ, content)) = instead else { return self.0.encrypt(message, seq) };
        let payload = OutboundChunks::Single(&content);
        self.0.encrypt(OutboundPlainMessage { typ, version: message.version, payload }, seq)
    }

    fn encrypted_payload_len(&self, payload_len: usize) -> usize {
        self.0.encrypted_payload_len(payload_len)
    }
}

impl Tls12AeadAlgorithm for Forging12 {
    fn encrypter(&self, key: AeadKey, iv: &[u8], extra: &[u8]) -> Box<dyn MessageEncrypter> {
        Box::new(Forging(self.0.encrypter(key, iv, extra)))
    }

    fn decrypter(&self, key: AeadKey, iv: &[u8]) -> Box<dyn MessageDecrypter> {
        self.0.decrypter(key, iv)
    }

    fn key_block_shape(&self) -> KeyBlockShape {
        self.0.key_block_shape()
    }

    fn extract_keys(
        &self,
        key: AeadKey,
        iv: &[u8],
        explicit: &[u8],
    ) -> Result<ConnectionTrafficSecrets, UnsupportedOperationError> {
        self.0.extract_keys(key, iv, explicit)
    }
}

impl Tls13AeadAlgorithm for Forging13 {
    fn encrypter(&self, key: AeadKey, iv: Iv) -> Box<dyn MessageEncrypter> {
        Box::new(Forging(self.0.encrypter(key, iv)))
    }

    fn decrypter(&self, key: AeadKey, iv: Iv) -> Box<dyn MessageDecrypter> {
        self.0.decrypter(key, iv)
    }

    fn key_len(&self) -> usize {
        self.0.key_len()
    }

    fn extract_keys(
        &self,
        key: AeadKey,
        iv: Iv,
    ) -> Result<ConnectionTrafficSecrets, UnsupportedOperationError> {
        self.0.extract_keys(key, iv)
    }
}
