//! The pieces in which a disk is written.

/// The size of a piece in guest bytes: a disk is written in pieces of this size and alignment. The last one may be
/// shorter.
pub const PIECE: usize = 64 << 10;

/// A piece that is ready to be written.
#[derive(Debug)]
pub struct Piece {
    pub(crate) at: u64,
    pub(crate) bytes: Vec<u8>,
}
