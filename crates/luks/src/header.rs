//! The header and its key slots (the specification's section 2).

use crate::af::{self, STRIPES};
use crate::algorithms::{CipherAlgorithm, CipherMode, CipherSpec, Hash, IvGenerator, SECTOR};
use crate::ciphers::{Cipher, Zeroizing, derive};
use crate::error::{Error, Result};
use crate::kdf::{self, DIGEST, MAX_STEPS};
use crate::secret::{MasterKey, Random, Secret};

/// The length in bytes of a header with its key slots, but without their key material.
pub const HEADER_LENGTH: usize = 592;

/// The number of key slots in every header.
pub const SLOTS: usize = 8;

const MAGIC: [u8; 6] = *b"LUKS\xba\xbe";
const ACTIVE: u32 = 0x00ac_71f3;
const INACTIVE: u32 = 0xdead;

/// The length of a salt in bytes.
pub(crate) const SALT: usize = 32;

const NAME: usize = 32;
const UUID: usize = 40;
const FIRST_SLOT: usize = 208;
const SLOT_LENGTH: usize = 48;

/// In headers created here: the offset of the first key material, and the alignment of all of it.
const ALIGNMENT: u64 = 4096;

/// A checked header. It is the start of the header area, which also contains the key material of its slots.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub(crate) spec: CipherSpec,
    pub(crate) hash: Hash,
    /// In sectors: where the data of a LUKS device begins. In a qcow2 image this only bounds the key material.
    payload_offset: u32,
    digest: [u8; DIGEST],
    digest_salt: [u8; SALT],
    digest_iterations: u32,
    /// Text that ends with a NUL byte or fills the field. Nothing depends on it, and QEMU does not check it.
    uuid: [u8; UUID],
    pub(crate) slots: [Slot; SLOTS],
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) active: bool,
    pub(crate) iterations: u32,
    pub(crate) salt: [u8; SALT],
    /// The offset of its key material in the header area, in sectors.
    pub(crate) sector: u32,
}

/// The information on a header that `qemu-img info` shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// `ivgen-alg`.
    pub iv_generator: IvGenerator,
    /// `ivgen-hash-alg`: only with ESSIV.
    pub iv_hash: Option<Hash>,
    /// `hash-alg`.
    pub hash: Hash,
    /// `cipher-alg`.
    pub algorithm: CipherAlgorithm,
    /// `cipher-mode`.
    pub mode: CipherMode,
    /// `uuid`. Invalid UTF-8 in a damaged header is replaced.
    pub uuid: String,
    /// `slots`.
    pub slots: [SlotInfo; SLOTS],
    /// `payload-offset`, in bytes.
    pub payload_offset: u64,
    /// `master-key-iters`.
    pub master_key_iterations: u32,
}

/// A key slot as `qemu-img info` shows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotInfo {
    /// Whether it holds the master key.
    pub active: bool,
    /// `iters`, shown only for an active slot.
    pub iterations: u32,
    /// `stripes`, shown only for an active slot.
    pub stripes: u32,
    /// `key-offset`: the offset of its key material in the header area, in bytes.
    pub key_offset: u64,
}

impl Header {
    /// Checks a header. `bytes` is the start of the header area, at least [`HEADER_LENGTH`] bytes; `area_length` is the
    /// length of the whole area in bytes, which a qcow2 image stores in a header extension.
    ///
    /// # Errors
    /// If the header is damaged or truncated, or its version or algorithms are not supported; if key slots lie outside
    /// the area or overlap, or trying them all would take more than [`MAX_STEPS`].
    pub fn parse(bytes: &[u8], area_length: u64) -> Result<Self> {
        let Some(bytes) = bytes.first_chunk::<HEADER_LENGTH>() else {
            let reason = format!("a LUKS header has {HEADER_LENGTH} bytes");
            return Err(Error::invalid("the header's length", bytes.len(), reason));
        };
        if area_length < HEADER_LENGTH as u64 {
            let reason = format!("a LUKS header has {HEADER_LENGTH} bytes");
            return Err(Error::invalid("the header area's length", area_length, reason));
        }
        if bytes[..6] != MAGIC {
            let value = format!("0x{:012x}", u64::from_be_bytes(array(bytes, 0)) >> 16);
            return Err(Error::invalid("magic", value, "it is not a LUKS header"));
        }
        let version = u16::from_be_bytes(array(bytes, 6));
        if version != 1 {
            return Err(Error::unsupported("version", version, "supported is 1, as in QEMU"));
        }
        let name = text(bytes, "cipher-name", 8)?;
        let mode = text(bytes, "cipher-mode", 40)?;
        let hash_name = text(bytes, "hash-spec", 72)?;
        let hash = hash_name.parse().map_err(|error| match error {
            Error::Unsupported { value, supported, .. } => {
                Error::unsupported("hash-spec", value, supported)
            }
            error => error,
        })?;
        let spec = CipherSpec::parse(&name, &mode, be32(bytes, 108))?;
        let mut slots = [const { Slot::empty(0) }; SLOTS];
        for (number, slot) in slots.iter_mut().enumerate() {
            *slot = Slot::parse(number, &array(bytes, FIRST_SLOT + number * SLOT_LENGTH))?;
        }
        let header = Self {
            spec,
            hash,
            payload_offset: be32(bytes, 104),
            digest: array(bytes, 112),
            digest_salt: array(bytes, 132),
            digest_iterations: be32(bytes, 164),
            uuid: array(bytes, 168),
            slots,
        };
        header.check_places(area_length)?;
        header.check_iterations()?;
        Ok(header)
    }

    /// Checks the locations of key material: in the area, after the header, before the payload, and without overlaps.
    fn check_places(&self, area_length: u64) -> Result<()> {
        let area_length = area_length.min(u64::from(self.payload_offset) * SECTOR as u64);
        let mut places: Vec<_> = (0..SLOTS).map(|number| (self.place(number), number)).collect();
        for ((start, end), number) in &places {
            let field = format!("key slot {number}'s key-material-offset");
            let value = self.slots[*number].sector;
            if *start < HEADER_LENGTH as u64 {
                return Err(Error::invalid(field, value, "it is in the header itself"));
            }
            if *end > area_length {
                let reason =
                    format!("its key material is past the area's end ({area_length} bytes)");
                return Err(Error::invalid(field, value, reason));
            }
        }
        places.sort_unstable();
        for pair in places.windows(2) {
            let (((_, end), one), ((start, _), other)) = (pair[0], pair[1]);
            if start < end {
                let field = format!("key slot {other}'s key-material-offset");
                let reason = format!("it overlaps the key material of key slot {one}");
                return Err(Error::invalid(field, self.slots[other].sector, reason));
            }
        }
        Ok(())
    }

    fn check_iterations(&self) -> Result<()> {
        if self.digest_iterations == 0 {
            return Err(Error::invalid("mk-digest-iter", 0, "it must be at least 1"));
        }
        let mut steps = 0;
        for (number, slot) in self.slots.iter().enumerate().filter(|(_, slot)| slot.active) {
            let field = format!("key slot {number}'s iterations");
            if slot.iterations == 0 {
                return Err(Error::invalid(field, 0, "it must be at least 1"));
            }
            steps += u64::from(slot.iterations)
                * kdf::steps_per_iteration(self.hash, self.spec.key_bytes())
                + u64::from(self.digest_iterations) * kdf::steps_per_iteration(self.hash, DIGEST);
            if steps > MAX_STEPS {
                let reason = format!(
                    "with mk-digest-iter {} and the key slots before it, to try a secret takes {steps} steps of \
                     PBKDF2, and at most {MAX_STEPS} are supported; give the image a key slot with a smaller \
                     iter-time, or a new master key with qemu-img convert",
                    self.digest_iterations
                );
                return Err(Error::invalid(field, slot.iterations, reason));
            }
        }
        Ok(())
    }

    /// Returns the master key, and the number of the key slot that contained it.
    ///
    /// `area` is the whole header area. This runs PBKDF2 for each active slot, usually for seconds: call it on a thread
    /// that may block.
    ///
    /// # Errors
    /// If the secret opens no active slot ([`Error::WrongSecret`]), or the area is truncated.
    pub fn unlock(&self, area: &[u8], secret: &Secret) -> Result<(usize, MasterKey)> {
        for number in self.active() {
            if let Some(key) = self.try_slot(number, area, secret)? {
                return Ok((number, key));
            }
        }
        Err(Error::WrongSecret)
    }

    /// The cipher of the disk's data.
    ///
    /// # Errors
    /// If the master key's length is not that of this header's cipher.
    pub fn cipher(&self, key: &MasterKey) -> Result<Cipher> {
        Cipher::new(self.spec, key.bytes())
    }

    /// Where the last key slot's key material ends, in bytes: as much of the header area as [`unlock`](Self::unlock)
    /// and [`amend`](Self::amend) need. It can be up to 2 TiB in a hostile header.
    pub fn used_length(&self) -> u64 {
        (0..SLOTS).map(|number| self.place(number).1).max().unwrap_or(0)
    }

    /// Where the data begins in a LUKS device, in bytes from the header's beginning.
    pub fn payload_offset(&self) -> u64 {
        u64::from(self.payload_offset) * SECTOR as u64
    }

    /// The information that `qemu-img info` shows.
    pub fn info(&self) -> Info {
        let slot = |slot: &Slot| SlotInfo {
            active: slot.active,
            iterations: slot.iterations,
            stripes: STRIPES as u32,
            key_offset: u64::from(slot.sector) * SECTOR as u64,
        };
        let uuid = self.uuid.split(|byte| *byte == 0).next().unwrap_or_default();
        Info {
            iv_generator: self.spec.iv,
            iv_hash: self.spec.iv.hash(),
            hash: self.hash,
            algorithm: self.spec.algorithm,
            mode: self.spec.mode,
            uuid: String::from_utf8_lossy(uuid).into_owned(),
            slots: self.slots.each_ref().map(slot),
            payload_offset: self.payload_offset(),
            master_key_iterations: self.digest_iterations,
        }
    }

    /// A header whose slots are all inactive, with QEMU's layout: the key material of each slot is aligned to 4096
    /// bytes.
    pub(crate) fn new(
        spec: CipherSpec,
        hash: Hash,
        digest_iterations: u32,
        key: &MasterKey,
        random: &mut Random<'_>,
    ) -> Result<Self> {
        let (mut digest_salt, mut number, mut uuid) = ([0; SALT], [0; 16], [0; UUID]);
        random(&mut digest_salt)?;
        random(&mut number)?;
        let text = uuid_text(number);
        uuid[..text.len()].copy_from_slice(text.as_bytes());
        let start = |number| (area_length(spec.key_bytes(), number) / SECTOR as u64) as u32;
        let mut header = Self {
            spec,
            hash,
            payload_offset: start(SLOTS),
            digest: [0; DIGEST],
            digest_salt,
            digest_iterations,
            uuid,
            slots: std::array::from_fn(|number| Slot::empty(start(number))),
        };
        header.digest = array(&header.digest_of(key.bytes())?, 0);
        Ok(header)
    }

    /// The header's bytes in an image.
    pub(crate) fn encode(&self) -> [u8; HEADER_LENGTH] {
        let mut bytes = [0; HEADER_LENGTH];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, &MAGIC);
        put(6, &1_u16.to_be_bytes());
        put(8, b"aes");
        put(40, self.spec.mode_text().as_bytes());
        put(72, self.hash.name().as_bytes());
        put(104, &self.payload_offset.to_be_bytes());
        put(108, &(self.spec.key_bytes() as u32).to_be_bytes());
        put(112, &self.digest);
        put(132, &self.digest_salt);
        put(164, &self.digest_iterations.to_be_bytes());
        put(168, &self.uuid);
        for (number, slot) in self.slots.iter().enumerate() {
            put(slot_offset(number), &slot.encode());
        }
        bytes
    }

    /// The numbers of the active slots.
    pub(crate) fn active(&self) -> impl Iterator<Item = usize> {
        (0..SLOTS).filter(|number| self.slots[*number].active)
    }

    /// The master key from one slot, if the secret opens it.
    pub(crate) fn try_slot(
        &self,
        number: usize,
        area: &[u8],
        secret: &Secret,
    ) -> Result<Option<MasterKey>> {
        let (start, end) = self.place(number);
        let Some(material) = area.get(start as usize..end as usize) else {
            let reason = format!("the key material of key slot {number} ends at {end}");
            return Err(Error::invalid("the header area's length", area.len(), reason));
        };
        let mut stripes = Zeroizing::new(material.to_vec());
        let cipher = self.slot_cipher(&self.slots[number], secret)?;
        cipher.decrypt(0, &mut stripes);
        let key = af::merge(self.hash, &stripes, self.spec.key_bytes())?;
        let right = *self.digest_of(&key)? == self.digest;
        Ok(right.then(|| MasterKey::new(key)))
    }

    /// The master key as key material: split, and encrypted with a key derived from the secret and the slot's salt.
    pub(crate) fn material(
        &self,
        slot: &Slot,
        key: &MasterKey,
        secret: &Secret,
        random: &mut Random<'_>,
    ) -> Result<Vec<u8>> {
        let mut stripes = af::split(self.hash, key.bytes(), random)?;
        self.slot_cipher(slot, secret)?.encrypt(0, &mut stripes);
        Ok(std::mem::take(&mut *stripes))
    }

    fn slot_cipher(&self, slot: &Slot, secret: &Secret) -> Result<Cipher> {
        let length = self.spec.key_bytes();
        let key = derive(self.hash, secret.bytes(), &slot.salt, slot.iterations, length)?;
        Cipher::new(self.spec, &key)
    }

    fn digest_of(&self, key: &[u8]) -> Result<Zeroizing<Vec<u8>>> {
        derive(self.hash, key, &self.digest_salt, self.digest_iterations, DIGEST)
    }

    /// Where a slot's key material begins and ends in the header area, in bytes.
    pub(crate) fn place(&self, number: usize) -> (u64, u64) {
        let start = u64::from(self.slots[number].sector) * SECTOR as u64;
        (start, start + (self.spec.key_bytes() * STRIPES) as u64)
    }
}

impl Slot {
    const fn empty(sector: u32) -> Self {
        Self { active: false, iterations: 0, salt: [0; SALT], sector }
    }

    fn parse(number: usize, bytes: &[u8; SLOT_LENGTH]) -> Result<Self> {
        let active = match be32(bytes, 0) {
            ACTIVE => true,
            INACTIVE => false,
            other => {
                let reason = format!("it must be 0x{ACTIVE:08x} or 0x{INACTIVE:08x}");
                let field = format!("key slot {number}'s state");
                return Err(Error::invalid(field, format_args!("0x{other:08x}"), reason));
            }
        };
        let stripes = be32(bytes, 44);
        if stripes as usize != STRIPES {
            let reason = format!("it must be {STRIPES}");
            return Err(Error::invalid(format!("key slot {number}'s stripes"), stripes, reason));
        }
        Ok(Self {
            active,
            iterations: be32(bytes, 4),
            salt: array(bytes, 8),
            sector: be32(bytes, 40),
        })
    }

    pub(crate) fn encode(&self) -> [u8; SLOT_LENGTH] {
        let mut bytes = [0; SLOT_LENGTH];
        bytes[..4].copy_from_slice(&Self::state(self.active));
        bytes[4..8].copy_from_slice(&self.iterations.to_be_bytes());
        bytes[8..40].copy_from_slice(&self.salt);
        bytes[40..44].copy_from_slice(&self.sector.to_be_bytes());
        bytes[44..].copy_from_slice(&(STRIPES as u32).to_be_bytes());
        bytes
    }

    /// The state of a slot, its first field.
    pub(crate) fn state(active: bool) -> [u8; 4] {
        (if active { ACTIVE } else { INACTIVE }).to_be_bytes()
    }
}

/// The offset of a slot's entry in the header, in bytes.
pub(crate) fn slot_offset(number: usize) -> usize {
    FIRST_SLOT + number * SLOT_LENGTH
}

/// The length of a header area with the key material of `slots`, in bytes.
pub(crate) fn area_length(key_bytes: usize, slots: usize) -> u64 {
    ALIGNMENT + slots as u64 * ((key_bytes * STRIPES) as u64).next_multiple_of(ALIGNMENT)
}

/// A random UUID (RFC 9562, version 4) as text.
fn uuid_text(random: [u8; 16]) -> String {
    let number = u128::from_be_bytes(random) & !(0xf << 76) & !(0b11 << 62) | 4 << 76 | 0b10 << 62;
    let digits = format!("{number:032x}");
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}

/// A name: ASCII, terminated by a NUL byte.
fn text(bytes: &[u8], field: &str, at: usize) -> Result<String> {
    let bytes = &bytes[at..at + NAME];
    let refused =
        |reason| Error::invalid(field, format_args!("'{}'", bytes.escape_ascii()), reason);
    let end = bytes.iter().position(|byte| *byte == 0);
    let name = &bytes[..end.ok_or_else(|| refused("it does not end with a NUL byte"))?];
    if !name.iter().all(u8::is_ascii_graphic) {
        return Err(refused("it is not a name in ASCII"));
    }
    Ok(name.iter().map(|byte| char::from(*byte)).collect())
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(array(bytes, at))
}

/// Bytes of a structure whose length was already checked.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}
