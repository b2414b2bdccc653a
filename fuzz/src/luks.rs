//! LUKS headers, and secrets tried on them.

use crate::take;
use isobath_luks::{
    Amend, CreateOptions, Created, HEADER_LENGTH, Header, SECTOR, Secret, SlotState,
};
use std::sync::LazyLock;
use std::time::Duration;

/// Iterations that are tried: more take longer, and reach nothing else.
const MAX_ITERATIONS: u32 = 2000;

static MADE: LazyLock<Created> = LazyLock::new(|| {
    let options = CreateOptions { iter_time: Duration::ZERO, ..CreateOptions::default() };
    options.create(&secret(), &mut fill).expect("valid options")
});

fn secret() -> Secret {
    Secret::new(b"secret".to_vec()).expect("it is a text")
}

/// Bytes that repeat: an input does the same again.
#[allow(clippy::unnecessary_wraps, reason = "the signature of a source of random bytes")]
fn fill(buffer: &mut [u8]) -> isobath_luks::Result<()> {
    for (at, byte) in buffer.iter_mut().enumerate() {
        *byte = at as u8;
    }
    Ok(())
}

/// The input is the header area's length, a number of a slot, and the header before the key material of a valid one.
/// It is refused, or what it says is within bounds: its slots can be tried, erased and filled, and what that leaves
/// is a valid header.
pub fn luks(mut input: &[u8]) {
    let [high, low, slot] = take(&mut input);
    let mut area = MADE.area.clone();
    area.truncate(usize::from(u16::from_be_bytes([high, low])) * SECTOR);
    let length = input.len().min(HEADER_LENGTH).min(area.len());
    area[..length].copy_from_slice(&input[..length]);
    let Ok(header) = Header::parse(&area, area.len() as u64) else { return };
    let info = header.info();
    for slot in info.slots {
        assert!(slot.key_offset >= HEADER_LENGTH as u64 && slot.key_offset < area.len() as u64);
    }
    let active = info.slots.iter().filter(|slot| slot.active);
    let most = active.clone().map(|slot| slot.iterations).max().unwrap_or(0);
    if most.max(info.master_key_iterations) > MAX_ITERATIONS || active.count() > 1 {
        return;
    }
    let Ok((_, key)) = header.unlock(&area, &secret()) else { return };
    let cipher = header.cipher(&key).expect("its own key");
    let mut data = vec![slot; 2 * SECTOR];
    cipher.encrypt(u64::from(slot), &mut data);
    cipher.decrypt(u64::from(slot), &mut data);
    assert!(data.iter().all(|byte| *byte == slot));

    let (secret, force) = (secret(), slot & 0x80 != 0);
    for state in [SlotState::Active, SlotState::Inactive] {
        let change = Amend {
            state,
            slot: Some(i64::from(slot % 16)),
            new_secret: (state == SlotState::Active).then_some(&secret),
            old_secret: None,
            iter_time: (state == SlotState::Active).then_some(Duration::ZERO),
            force,
        };
        let Ok(change) = header.amend(&area, &key, &change, &mut fill) else { continue };
        let mut area = area.clone();
        for write in &change.writes {
            let start = write.offset as usize;
            area[start..start + write.bytes.len()].copy_from_slice(&write.bytes);
            Header::parse(&area, area.len() as u64).expect("valid after every write");
        }
        assert_eq!(Header::parse(&area, area.len() as u64).expect("valid"), change.header);
        let opens = change.header.unlock(&area, &secret).is_ok();
        assert_eq!(opens, change.header.info().slots.iter().any(|slot| slot.active));
    }
}

/// The header, with a slot to fill, to overwrite or to erase.
pub(crate) fn valid_inputs() -> Vec<Vec<u8>> {
    let header = &MADE.area[..HEADER_LENGTH];
    let sectors = ((MADE.area.len() / SECTOR) as u16).to_be_bytes();
    [1, 0, 0x80, 0x86].map(|slot| [&sectors[..], &[slot], header].concat()).to_vec()
}
