//! The pieces in which a disk is written.

/// Guest bytes of a piece: a disk is written in pieces of this size, whose places are multiples of it. The last one
/// may be shorter.
pub const PIECE: usize = 64 << 10;

/// A piece that is ready to be written.
#[derive(Debug)]
pub struct Piece {
    pub(crate) at: u64,
    pub(crate) bytes: Vec<u8>,
}
