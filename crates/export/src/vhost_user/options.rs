//! Options of a server.

use super::ring;
use std::time::Duration;

/// Maximum number of queues: the protocol has one byte for a queue's index.
pub const MAX_QUEUES: u16 = 256;

/// How a disk is presented to guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The disk's serial number for the guest: up to 20 bytes of ASCII.
    pub serial: String,
    /// Whether writes are accepted, unless the device itself is read-only.
    pub writable: bool,
    /// Whether writes are durable when they complete, even for guests that flush by themselves. With any image, no
    /// completed write is then lost if the server is killed; every write costs a flush.
    pub write_through: bool,
    /// How many queues a guest may use, 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// Maximum number of descriptors in a queue, a power of two from 2 to 1024.
    pub queue_size: u16,
    /// The block size that the guest sees, in bytes: a power of two from 512 to 4096.
    pub logical_block_size: u32,
    /// The longest time for which an idle queue polls for requests before it sleeps. The actual time adapts to the
    /// guest, and is 0 for a guest with few requests. Polling keeps a thread busy.
    pub poll: Duration,
}

impl Default for Options {
    /// Writable, not write-through, no serial number, 4 queues of up to 1024 descriptors, blocks of 512 bytes, 32 µs.
    fn default() -> Self {
        Self {
            serial: String::new(),
            writable: true,
            write_through: false,
            queues: 4,
            queue_size: ring::MAX_SIZE,
            logical_block_size: 512,
            poll: Duration::from_micros(32),
        }
    }
}

/// An error in [`Options`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionsError {
    /// The serial number is too long, or not printable ASCII.
    #[error("the serial number {0:?} is not at most 20 printable ASCII characters")]
    Serial(String),
    /// The number of queues is out of range.
    #[error("the number of queues is {0}; it must be from 1 to {MAX_QUEUES}")]
    Queues(u16),
    /// The size of queues is invalid.
    #[error("the queue size {0} is not a power of two from 2 to 1024")]
    QueueSize(u16),
    /// The block size is invalid.
    #[error("the block size {0} is not a power of two from 512 to 4096")]
    BlockSize(u32),
}

impl Options {
    /// Checks the options.
    pub(crate) fn check(&self) -> Result<(), OptionsError> {
        let printable = |byte: u8| byte.is_ascii_graphic() || byte == b' ';
        if self.serial.len() > 20 || !self.serial.bytes().all(printable) {
            return Err(OptionsError::Serial(self.serial.clone()));
        }
        if self.queues == 0 || self.queues > MAX_QUEUES {
            return Err(OptionsError::Queues(self.queues));
        }
        if !self.queue_size.is_power_of_two() || !(2..=ring::MAX_SIZE).contains(&self.queue_size) {
            return Err(OptionsError::QueueSize(self.queue_size));
        }
        let block = self.logical_block_size;
        if !block.is_power_of_two() || !(512..=4096).contains(&block) {
            return Err(OptionsError::BlockSize(block));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_can_be_offered_is_accepted() {
        let good = Options::default();
        assert_eq!(good.check(), Ok(()));
        for bad in [
            Options { serial: "a".repeat(21), ..good.clone() },
            Options { serial: "tab\t".into(), ..good.clone() },
            Options { queues: 0, ..good.clone() },
            Options { queues: 257, ..good.clone() },
            Options { queue_size: 0, ..good.clone() },
            Options { queue_size: 48, ..good.clone() },
            Options { queue_size: 2048, ..good.clone() },
            Options { logical_block_size: 256, ..good.clone() },
            Options { logical_block_size: 1000, ..good },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }
}
