//! Changing key slots, as with `qemu-img amend -o encrypt.state=...`.

use crate::error::{Error, Result};
use crate::header::{Header, SALT, SLOTS, Slot, slot_offset};
use crate::kdf::{self, DEFAULT_ITER_TIME};
use crate::secret::{MasterKey, Random, Secret};
use std::time::Duration;

/// What to do with a key slot: `encrypt.state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    /// Give the new secret to a key slot.
    Active,
    /// Erase key slots.
    Inactive,
}

/// The options of `qemu-img amend` for key slots.
#[derive(Clone, Copy, Debug)]
pub struct Amend<'a> {
    /// `encrypt.state`.
    pub state: SlotState,
    /// `encrypt.keyslot`. Without it, the first inactive slot is activated, or all slots with `old_secret` are erased.
    pub slot: Option<i64>,
    /// `encrypt.new-secret`, to activate a slot.
    pub new_secret: Option<&'a Secret>,
    /// `encrypt.old-secret`, to erase slots.
    pub old_secret: Option<&'a Secret>,
    /// `encrypt.iter-time`, to activate a slot; [`DEFAULT_ITER_TIME`] by default.
    pub iter_time: Option<Duration>,
    /// `--force`: allow overwriting an active slot, erasing the last active one, and erasing an inactive one.
    pub force: bool,
}

/// A changed header, and the writes that store it in the image.
#[derive(Clone, Debug)]
pub struct Change {
    /// The header after the change.
    pub header: Header,
    /// The writes, in order. Each must be durable before the next begins. Then a crash at any point leaves a valid
    /// header with at least one slot that holds the master key, unless `force` erases the last one.
    ///
    /// A new slot gets its key material first, then its salt and iterations, and is then marked as active. A slot to be
    /// erased is first marked as inactive; in the opposite order a crash could leave an active slot without a key, and
    /// the only slot with a key would no longer count as the last one. Then its salt is removed, without which the key
    /// material is worthless, and random bytes replace the key material. A slot's state is 4 bytes within a sector, so
    /// its write cannot be torn.
    pub writes: Vec<Write>,
}

/// A write to the header area.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// Where to write, in bytes from the start of the header area.
    pub offset: u64,
    /// The bytes; none of them are secret.
    pub bytes: Vec<u8>,
}

impl Header {
    /// Adds or erases key slots. `area` is the whole header area, `key` the master key.
    ///
    /// An active slot that is overwritten by `force` is inactive in the meantime; if another slot is free, it holds the
    /// new secret until then.
    ///
    /// # Errors
    /// With QEMU's messages: if options are missing or contradictory, if there is no such slot or none is free, and,
    /// without `force`, if an active slot would be overwritten or the last one erased. With others: if there are no
    /// random bytes, the area is truncated, or `iter_time` is so long that [`parse`](Self::parse) would refuse the
    /// header.
    pub fn amend(
        &self,
        area: &[u8],
        key: &MasterKey,
        amend: &Amend<'_>,
        random: &mut Random<'_>,
    ) -> Result<Change> {
        match amend.state {
            SlotState::Active => self.add(key, amend, random),
            SlotState::Inactive => self.erase(area, amend, random),
        }
    }

    fn add(&self, key: &MasterKey, amend: &Amend<'_>, random: &mut Random<'_>) -> Result<Change> {
        let Some(secret) = amend.new_secret else {
            return refused("'new-secret' is required to activate a keyslot");
        };
        if amend.old_secret.is_some() {
            return refused("'old-secret' must not be given when activating keyslots");
        }
        let free = |header: &Self| (0..SLOTS).find(|number| !header.slots[*number].active);
        let slot = match amend.slot {
            Some(slot) => number(slot)?,
            None => match free(self) {
                Some(slot) => slot,
                None => return refused("Can't add a keyslot - all keyslots are in use"),
            },
        };
        if self.slots[slot].active && !amend.force {
            return refused(format!(
                "Refusing to overwrite active keyslot {slot} - please erase it first"
            ));
        }
        let time = amend.iter_time.unwrap_or(DEFAULT_ITER_TIME);
        let iterations = kdf::iterations(self.hash, self.spec.key_bytes(), time)?;
        let mut change = Change::new(self);
        let meanwhile = if self.slots[slot].active { free(self) } else { None };
        if let Some(other) = meanwhile {
            change.fill(other, iterations, key, secret, random)?;
        }
        if self.slots[slot].active {
            change.deactivate(slot);
        }
        change.fill(slot, iterations, key, secret, random)?;
        if let Some(other) = meanwhile {
            change.deactivate(other);
            change.wipe(other, random)?;
        }
        // Do not write a header that cannot be opened again.
        Self::parse(&change.header.encode(), u64::MAX)?;
        Ok(change)
    }

    fn erase(&self, area: &[u8], amend: &Amend<'_>, random: &mut Random<'_>) -> Result<Change> {
        if amend.new_secret.is_some() {
            return refused("'new-secret' must not be given when erasing keyslots");
        }
        if amend.iter_time.is_some() {
            return refused("'iter-time' must not be given when erasing keyslots");
        }
        let belongs = |slot: usize, secret| -> Result<bool> {
            Ok(self.slots[slot].active && self.try_slot(slot, area, secret)?.is_some())
        };
        let active = self.active().count();
        let slots = match (amend.slot, amend.old_secret) {
            (Some(slot), secret) => {
                let slot = number(slot)?;
                if let Some(secret) = secret
                    && !belongs(slot, secret)?
                {
                    return refused(format!(
                        "Given keyslot {slot} doesn't contain the given old password for erase operation"
                    ));
                }
                if !amend.force && !self.slots[slot].active {
                    return refused(format!("Given keyslot {slot} is already erased (inactive) "));
                }
                if !amend.force && active == 1 {
                    return refused(format!(
                        "Attempt to erase the only active keyslot {slot} which will erase all the data in the image \
                         irreversibly - refusing operation"
                    ));
                }
                vec![slot]
            }
            (None, Some(secret)) => {
                let mut slots = Vec::new();
                for slot in self.active() {
                    if belongs(slot, secret)? {
                        slots.push(slot);
                    }
                }
                if slots.is_empty() {
                    return refused("No keyslots match given (old) password for erase operation");
                }
                if !amend.force && slots.len() == active {
                    return refused(
                        "All the active keyslots match the (old) password that was given and erasing them will erase \
                         all the data in the image irreversibly - refusing operation",
                    );
                }
                slots
            }
            (None, None) => {
                return refused(
                    "To erase keyslot(s), either explicit keyslot index or the password currently contained in them \
                     must be given",
                );
            }
        };
        let mut change = Change::new(self);
        for slot in slots {
            change.deactivate(slot);
            change.wipe(slot, random)?;
        }
        Ok(change)
    }
}

impl Change {
    /// An empty change.
    pub(crate) fn new(header: &Header) -> Self {
        Self { header: header.clone(), writes: Vec::new() }
    }

    /// Stores a copy of the key in an inactive slot.
    pub(crate) fn fill(
        &mut self,
        number: usize,
        iterations: u32,
        key: &MasterKey,
        secret: &Secret,
        random: &mut Random<'_>,
    ) -> Result<()> {
        let mut slot = Slot { iterations, ..self.header.slots[number].clone() };
        random(&mut slot.salt)?;
        let bytes = self.header.material(&slot, key, secret, random)?;
        self.writes.push(Write { offset: self.header.place(number).0, bytes });
        self.set(number, slot.clone());
        slot.active = true;
        self.set(number, slot);
        Ok(())
    }

    /// Marks a slot as inactive, and removes its salt and iterations.
    fn deactivate(&mut self, number: usize) {
        let mut slot = self.header.slots[number].clone();
        slot.active = false;
        self.set(number, slot.clone());
        (slot.iterations, slot.salt) = (0, [0; SALT]);
        self.set(number, slot);
    }

    /// Replaces an inactive slot's key material with random bytes. Once is enough: storage that keeps old data when it
    /// is overwritten does so no matter how often.
    fn wipe(&mut self, number: usize, random: &mut Random<'_>) -> Result<()> {
        let (offset, end) = self.header.place(number);
        let mut bytes = vec![0; (end - offset) as usize];
        random(&mut bytes)?;
        self.writes.push(Write { offset, bytes });
        Ok(())
    }

    /// Writes a slot's entry: either its state or the rest.
    fn set(&mut self, number: usize, slot: Slot) {
        let before = &self.header.slots[number];
        let offset = slot_offset(number) as u64;
        if before.active != slot.active {
            self.writes.push(Write { offset, bytes: Slot::state(slot.active).to_vec() });
        } else if *before != slot {
            self.writes.push(Write { offset: offset + 4, bytes: slot.encode()[4..].to_vec() });
        }
        self.header.slots[number] = slot;
    }
}

/// Checks the number of a slot.
fn number(slot: i64) -> Result<usize> {
    match usize::try_from(slot) {
        Ok(number) if number < SLOTS => Ok(number),
        _ => refused(format!(
            "Invalid keyslot {slot} specified, must be between 0 and {}",
            SLOTS - 1
        )),
    }
}

fn refused<T>(message: impl Into<String>) -> Result<T> {
    Err(Error::KeySlot(message.into()))
}
