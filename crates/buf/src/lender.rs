//! A buffer for several attempts at one operation.

use crate::IoBuf;
use std::sync::Arc;

/// Keeps a buffer while operations use its memory, so that one that failed, and gave nothing back, can be tried again.
#[derive(Debug)]
pub struct Lender {
    /// Nothing touches the memory through it.
    buf: Arc<IoBuf>,
}

impl Lender {
    /// Keeps this buffer.
    pub fn new(buf: IoBuf) -> Self {
        Self { buf: Arc::new(buf) }
    }

    /// The memory for an operation that only reads it. It counts as [shared](IoBuf::is_shared), so that nobody changes
    /// it in place.
    pub fn to_be_read(&self) -> IoBuf {
        let IoBuf { start, length, .. } = *self.buf;
        let owner = Arc::clone(&self.buf);
        IoBuf { start, length, shared: true, read_only: true, owner: Some(owner) }
    }

    /// The memory for an operation that fills it; `None` while an earlier one still has it.
    pub fn to_be_filled(&mut self) -> Option<IoBuf> {
        let IoBuf { start, length, shared, read_only, .. } = *Arc::get_mut(&mut self.buf)?;
        let owner = Arc::clone(&self.buf);
        Some(IoBuf { start, length, shared, read_only, owner: Some(owner) })
    }

    /// The buffer, in exchange for what the operation that succeeded gave back: a copy if another still has the memory.
    /// What has another length is not this buffer, and is returned as it is.
    pub fn take_back(self, lent: IoBuf) -> IoBuf {
        if lent.len() != self.buf.len() {
            return lent;
        }
        drop(lent);
        Arc::try_unwrap(self.buf).unwrap_or_else(|buf| {
            let mut copy = IoBuf::zeroed(buf.len());
            buf.copy_to(&mut copy);
            copy
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_lent_again_after_a_failure_and_comes_back() {
        let buf = IoBuf::copy_of(b"data");
        let address = buf.as_ptr();
        let lender = Lender::new(buf);
        drop(lender.to_be_read());
        let lent = lender.to_be_read();
        assert!(lent.is_shared() && lent.as_ptr() == address);
        let mut back = lender.take_back(lent);
        back.fill(1);
        assert_eq!((&*back, back.as_ptr(), back.is_shared()), (&[1; 4][..], address, false));
    }

    #[test]
    fn memory_is_filled_by_one_operation_at_a_time() {
        let mut lender = Lender::new(IoBuf::zeroed(4));
        let first = lender.to_be_filled().unwrap();
        assert!(lender.to_be_filled().is_none());
        drop(first);
        let mut second = lender.to_be_filled().unwrap();
        second.fill(7);
        assert_eq!(&*lender.take_back(second), [7; 4]);
    }

    #[test]
    fn what_another_still_reads_is_copied() {
        let lender = Lender::new(IoBuf::copy_of(b"data"));
        let (late, lent) = (lender.to_be_read(), lender.to_be_read());
        let back = lender.take_back(lent);
        assert_eq!(&*back, b"data");
        assert_ne!(back.as_ptr(), late.as_ptr());
        let shorter = IoBuf::zeroed(3);
        assert_eq!(Lender::new(IoBuf::zeroed(4)).take_back(shorter).len(), 3);
    }
}
