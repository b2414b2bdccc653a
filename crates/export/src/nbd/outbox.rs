//! Replies waiting to be sent, combined into few large sends.

use crate::pool::{Pool, Pooled};
use isobath_storage::IoBuf;
use std::collections::VecDeque;

/// Headers are allocated from blocks of this many bytes.
const HEADER_BLOCK: usize = 16 << 10;
/// A batch is full once it has this many buffers. The reply that fills it still keeps it below the kernel's `IOV_MAX`
/// of 1024.
const FULL_PIECES: usize = 1000;
/// A batch is full once it has this many bytes.
const FULL_BYTES: usize = 1 << 20;

/// Replies in order.
pub(crate) struct Outbox {
    full: VecDeque<Batch>,
    last: Batch,
    /// Empty batches, kept to reuse their memory.
    spare: Vec<Batch>,
    /// The free part of the current header block.
    headers: IoBuf,
    /// Number of bytes waiting to be sent.
    queued: usize,
    /// Whether the last buffer of `last` ends where `headers` begins.
    adjacent: bool,
}

/// Replies for one send.
#[derive(Default)]
pub(crate) struct Batch {
    /// The buffers to send.
    pub(crate) bufs: Vec<IoBuf>,
    /// For each buffer in `bufs` that belongs to the pool: its index, and the rest of its memory.
    pooled: Vec<(usize, IoBuf)>,
    length: usize,
    /// The number of replies.
    pub(crate) replies: usize,
    /// The bytes that were reserved for their requests.
    pub(crate) reserved: usize,
}

impl Outbox {
    pub(crate) fn new() -> Self {
        Self {
            full: VecDeque::new(),
            last: Batch::default(),
            spare: Vec::new(),
            headers: IoBuf::empty(),
            queued: 0,
            adjacent: false,
        }
    }

    /// Adds a reply: a header, and the data that follows it. `reserved` is added to the batch. Without a header, the
    /// data continues the reply before.
    pub(crate) fn push(&mut self, header: &[u8], data: Option<Pooled>, reserved: usize) {
        if !header.is_empty() {
            self.push_header(header);
        }
        if let Some(Pooled { data, spare }) = data {
            self.last.length += data.len();
            self.queued += data.len();
            self.last.pooled.push((self.last.bufs.len(), spare));
            self.last.bufs.push(data);
            self.adjacent = false;
        }
        self.last.replies += 1;
        self.last.reserved += reserved;
        if self.last.length >= FULL_BYTES || self.last.bufs.len() >= FULL_PIECES {
            let next = self.spare.pop().unwrap_or_default();
            self.full.push_back(std::mem::replace(&mut self.last, next));
            self.adjacent = false;
        }
    }

    fn push_header(&mut self, header: &[u8]) {
        self.last.length += header.len();
        self.queued += header.len();
        if self.headers.len() < header.len() {
            self.headers = IoBuf::zeroed(HEADER_BLOCK.max(header.len()));
            self.adjacent = false;
        }
        let mut part = self.headers.split_to(header.len());
        part.copy_from_slice(header);
        match self.last.bufs.last_mut() {
            Some(before) if self.adjacent => before.unsplit(part),
            _ => self.last.bufs.push(part),
        }
        self.adjacent = true;
    }

    /// The next replies to send.
    pub(crate) fn take(&mut self) -> Option<Batch> {
        let batch = if let Some(batch) = self.full.pop_front() {
            batch
        } else if self.last.replies == 0 {
            return None;
        } else {
            self.adjacent = false;
            let next = self.spare.pop().unwrap_or_default();
            std::mem::replace(&mut self.last, next)
        };
        self.queued -= batch.length;
        Some(batch)
    }

    /// Number of bytes waiting to be sent.
    pub(crate) const fn queued(&self) -> usize {
        self.queued
    }

    /// Recycles a batch after the send has returned its buffers.
    pub(crate) fn recycle(&mut self, mut batch: Batch, pool: &Pool) {
        for (index, spare) in batch.pooled.drain(..) {
            if let Some(data) = batch.bufs.get_mut(index) {
                pool.put(Pooled { data: std::mem::replace(data, IoBuf::empty()), spare });
            }
        }
        batch.bufs.clear();
        (batch.length, batch.replies, batch.reserved) = (0, 0, 0);
        if self.spare.len() < 4 {
            self.spare.push(batch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(batch: &Batch) -> Vec<u8> {
        batch.bufs.iter().flat_map(|buf| buf.iter().copied()).collect()
    }

    #[test]
    fn headers_in_a_row_are_one_buffer() {
        let pool = Pool::new(1 << 20);
        let mut outbox = Outbox::new();
        outbox.push(b"a", None, 1);
        outbox.push(b"b", None, 2);
        let mut data = pool.take(2);
        data.data.copy_from_slice(b"..");
        outbox.push(b"c", Some(data), 4);
        outbox.push(b"d", None, 8);
        let batch = outbox.take().unwrap();
        assert_eq!(text(&batch), b"abc..d");
        assert_eq!((batch.bufs.len(), batch.replies, batch.reserved), (3, 4, 15));
        assert!(outbox.take().is_none());
        outbox.recycle(batch, &pool);
        outbox.push(b"e", None, 0);
        let batch = outbox.take().unwrap();
        assert_eq!((text(&batch), batch.replies, batch.reserved), (b"e".to_vec(), 1, 0));
        assert_eq!(pool.take(4096).data[..2], *b"..");
    }

    #[test]
    fn large_and_many_replies_are_split_into_batches_in_order() {
        let pool = Pool::new(0);
        let mut outbox = Outbox::new();
        for number in 0..600_u16 {
            outbox.push(&number.to_be_bytes(), Some(pool.take(8)), 8);
        }
        outbox.push(&vec![0xff; HEADER_BLOCK + 1], Some(pool.take(FULL_BYTES)), 0);
        outbox.push(b"end", None, 0);
        assert_eq!(outbox.queued(), 600 * 10 + HEADER_BLOCK + 1 + FULL_BYTES + 3);
        let batches: Vec<_> = std::iter::from_fn(|| outbox.take()).collect();
        assert_eq!(batches.iter().map(|batch| batch.replies).collect::<Vec<_>>(), [500, 101, 1]);
        assert_eq!(outbox.queued(), 0);
        assert_eq!(batches[1].bufs[0][..], 500_u16.to_be_bytes());
        assert_eq!(text(&batches[2]), b"end");
    }
}
