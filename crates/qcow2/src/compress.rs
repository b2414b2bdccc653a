//! Compressed clusters: raw deflate ("zlib") and zstd.
//!
//! The length of a compressed cluster is known only in sectors, and bytes of other clusters may follow the data;
//! decompression stops when it has a whole cluster.

use crate::error::FormatError;
use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};
use std::cell::RefCell;
use std::fmt;
use zstd::zstd_safe::{self, CCtx, DCtx};

/// Base-2 logarithm of the deflate window: the largest that QEMU reads.
const DEFLATE_WINDOW_BITS: u8 = 12;

/// The compression of an image's compressed clusters (header field `compression_type`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CompressionType {
    /// Deflate without a zlib header; QEMU's "zlib" and the default.
    #[default]
    Zlib,
    /// Zstandard; only in version 3 images.
    Zstd,
}

impl CompressionType {
    /// The value of the header's field.
    pub const fn byte(self) -> u8 {
        match self {
            Self::Zlib => 0,
            Self::Zstd => 1,
        }
    }

    /// QEMU's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Zlib => "zlib",
            Self::Zstd => "zstd",
        }
    }

    /// The type with this value in the header; `None` if it is unknown.
    pub const fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            0 => Some(Self::Zlib),
            1 => Some(Self::Zstd),
            _ => None,
        }
    }
}

impl fmt::Display for CompressionType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

thread_local! {
    static INFLATE: RefCell<Decompress> = RefCell::new(Decompress::new(false));
    static UNZSTD: RefCell<Option<DCtx<'static>>> = RefCell::new(DCtx::try_create());
    static DEFLATE: RefCell<Compress> = RefCell::new(deflate());
    static ZSTD: RefCell<Option<CCtx<'static>>> = RefCell::new(CCtx::try_create());
}

fn deflate() -> Compress {
    Compress::new_with_window_bits(Compression::default(), false, DEFLATE_WINDOW_BITS)
}

/// Decompresses a cluster: fills `output`, whose length is the cluster size, from the start of `input`, and ignores
/// anything after the data in `input`. Memory use does not depend on the input. On error `output` holds arbitrary
/// bytes.
///
/// # Errors
/// If the data is damaged or decompresses to less than `output`, or, for a zstd frame, to more.
pub fn decompress(
    compression: CompressionType,
    input: &[u8],
    output: &mut [u8],
) -> Result<(), FormatError> {
    let fault = |reason| {
        FormatError::invalid(
            "compressed cluster",
            format!("{} bytes of {compression} data", input.len()),
            reason,
        )
    };
    match compression {
        CompressionType::Zlib => {
            INFLATE.with_borrow_mut(|inflate| inflate_into(inflate, input, output)).map_err(fault)
        }
        CompressionType::Zstd => UNZSTD
            .with_borrow_mut(|context| match context {
                Some(context) => unzstd_into(context, input, output),
                None => Err("no memory for the decompressor".into()),
            })
            .map_err(fault),
    }
}

fn inflate_into(inflate: &mut Decompress, input: &[u8], output: &mut [u8]) -> Result<(), String> {
    inflate.reset(false);
    let status = inflate
        .decompress(input, output, FlushDecompress::Finish)
        .map_err(|error| format!("is damaged: {error}"))?;
    match status {
        _ if inflate.total_out() == output.len() as u64 => Ok(()),
        Status::StreamEnd => Err(short(inflate.total_out(), output.len())),
        Status::Ok | Status::BufError => Err("is truncated".into()),
    }
}

fn unzstd_into(context: &mut DCtx, input: &[u8], output: &mut [u8]) -> Result<(), String> {
    let damaged = |code| format!("is damaged: {}", zstd_safe::get_error_name(code));
    let (mut input, mut output) = (input, output);
    let whole = output.len();
    while !output.is_empty() {
        if input.is_empty() {
            return Err(short((whole - output.len()) as u64, whole));
        }
        // Exactly one frame at a time, straight into the output: no separate window is needed, and nothing after the
        // last frame is read.
        let length = zstd_safe::find_frame_compressed_size(input).map_err(damaged)?;
        let (frame, rest) = input.split_at_checked(length).ok_or("is truncated")?;
        let produced = context.decompress(output, frame).map_err(damaged)?;
        output = output.get_mut(produced..).unwrap_or_default();
        input = rest;
    }
    Ok(())
}

fn short(got: u64, wanted: usize) -> String {
    format!("decompresses to {got} of a cluster's {wanted} bytes")
}

/// Compresses a cluster so that QEMU can read it; `None` if that makes it no smaller.
pub fn compress(compression: CompressionType, input: &[u8]) -> Option<Vec<u8>> {
    let mut output = vec![0; input.len().checked_sub(1)?];
    let length = match compression {
        CompressionType::Zlib => DEFLATE.with_borrow_mut(|deflate| {
            deflate.reset();
            let status = deflate.compress(input, &mut output, FlushCompress::Finish);
            if matches!(status, Ok(Status::StreamEnd)) {
                return Some(deflate.total_out() as usize);
            }
            // A reset does not free the space of pending output (zlib-rs 0.6.8): there might not be enough for the next
            // cluster.
            *deflate = self::deflate();
            None
        })?,
        CompressionType::Zstd => ZSTD.with_borrow_mut(|context| {
            let level = zstd::DEFAULT_COMPRESSION_LEVEL;
            context.as_mut()?.compress(&mut output[..], input, level).ok()
        })?,
    };
    output.truncate(length);
    Some(output)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BOTH: [CompressionType; 2] = [CompressionType::Zlib, CompressionType::Zstd];

    /// `length` bytes that compress to about a half.
    fn text(length: usize) -> Vec<u8> {
        (0..length).map(|i| ((i * i / 7) as u8 & 0x0f) + b'a').collect()
    }

    #[test]
    fn round_trip_at_every_cluster_size_with_strangers_after_it() {
        for kind in BOTH {
            for bits in 9..=21 {
                let cluster = text(1 << bits);
                let mut packed = compress(kind, &cluster).unwrap();
                assert!(packed.len() < cluster.len());
                packed.extend([0xa5; 300]);
                let mut back = vec![0; cluster.len()];
                decompress(kind, &packed, &mut back).unwrap();
                assert_eq!(back, cluster, "{kind} {bits}");
            }
        }
    }

    #[test]
    fn what_does_not_compress_is_left() {
        let mut state = 1u64;
        let noise: Vec<u8> = (0..65536)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            })
            .collect();
        for kind in BOTH {
            assert_eq!(compress(kind, &noise), None);
            assert_eq!(compress(kind, &[]), None);
        }
    }

    #[test]
    fn too_little_data_is_refused() {
        for kind in BOTH {
            let packed = compress(kind, &text(4096)).unwrap();
            let mut output = vec![0; 4097];
            let error = decompress(kind, &packed, &mut output).unwrap_err();
            assert!(error.to_string().contains("4096 of a cluster's 4097"), "{error}");
            let mut output = vec![0; 4096];
            assert!(decompress(kind, &packed[..packed.len() / 2], &mut output).is_err());
            assert!(decompress(kind, &[], &mut output).is_err());
        }
    }

    #[test]
    fn a_bomb_is_bounded_by_the_cluster() {
        let zeroes = vec![0; 64 << 20];
        let packed = compress(CompressionType::Zstd, &zeroes).unwrap();
        let mut output = vec![1; 65536];
        assert!(decompress(CompressionType::Zstd, &packed, &mut output).is_err());
        // QEMU accepts the first cluster of a longer deflate stream.
        let packed = compress(CompressionType::Zlib, &zeroes).unwrap();
        decompress(CompressionType::Zlib, &packed, &mut output).unwrap();
        assert!(output.iter().all(|&b| b == 0));
    }

    #[test]
    fn several_zstd_frames_make_one_cluster() {
        let cluster = text(65536);
        let mut packed = compress(CompressionType::Zstd, &cluster[..1000]).unwrap();
        packed.extend([0x50, 0x2a, 0x4d, 0x18, 3, 0, 0, 0, 1, 2, 3]); // a skippable frame
        packed.extend(compress(CompressionType::Zstd, &cluster[1000..]).unwrap());
        packed.extend([7; 77]);
        let mut output = vec![0; 65536];
        decompress(CompressionType::Zstd, &packed, &mut output).unwrap();
        assert_eq!(output, cluster);
    }

    #[test]
    fn an_error_leaves_the_next_cluster_unharmed() {
        for kind in BOTH {
            let cluster = text(4096);
            let packed = compress(kind, &cluster).unwrap();
            let mut output = vec![0; 4096];
            assert!(decompress(kind, &[0xff; 64], &mut output).is_err());
            decompress(kind, &packed, &mut output).unwrap();
            assert_eq!(output, cluster);
        }
    }

    #[test]
    fn deflate_reaches_back_no_further_than_qemu_allows() {
        // The only match is 8 KiB back: beyond the window of 4 KiB, so it must not be used.
        let mut cluster = vec![0u8; 65536];
        let mut state = 7u64;
        for byte in &mut cluster[..8192] {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *byte = (state >> 56) as u8;
        }
        cluster.copy_within(..8192, 8192);
        let packed = compress(CompressionType::Zlib, &cluster).unwrap();
        let mut small = Decompress::new_with_window_bits(false, DEFLATE_WINDOW_BITS);
        // In pieces, so that the decompressor must use its own window.
        let (mut at, mut output) = (0, Vec::<u8>::new());
        let mut piece = [0; 100];
        while output.len() < cluster.len() {
            let (before_in, before_out) = (small.total_in(), small.total_out());
            small.decompress(&packed[at..], &mut piece, FlushDecompress::None).unwrap();
            at += (small.total_in() - before_in) as usize;
            output.extend(&piece[..(small.total_out() - before_out) as usize]);
        }
        assert_eq!(output, cluster);
    }

    proptest! {
        #[test]
        fn any_bytes_fill_the_output_or_fail(
            input in prop::collection::vec(any::<u8>(), 0..600), zstd: bool,
        ) {
            let kind = if zstd { CompressionType::Zstd } else { CompressionType::Zlib };
            let mut output = vec![0; 512];
            let _ = decompress(kind, &input, &mut output);
        }

        #[test]
        fn round_trip(input in prop::collection::vec(0u8..4, 2..5000), zstd: bool) {
            let kind = if zstd { CompressionType::Zstd } else { CompressionType::Zlib };
            if let Some(packed) = compress(kind, &input) {
                prop_assert!(packed.len() < input.len());
                let mut output = vec![0; input.len()];
                decompress(kind, &packed, &mut output).unwrap();
                prop_assert_eq!(output, input);
            }
        }
    }

    #[test]
    fn clusters_that_do_not_compress_leave_nothing_behind() {
        let mut state = 1_u32;
        let noisy: Vec<u8> = (0..1 << 14)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8
            })
            .collect();
        let cluster = text(1 << 14);
        for compression in BOTH {
            for _ in 0..8 {
                assert_eq!(compress(compression, &noisy), None);
            }
            let packed = compress(compression, &cluster).unwrap();
            let mut unpacked = vec![0; cluster.len()];
            decompress(compression, &packed, &mut unpacked).unwrap();
            assert!(unpacked == cluster);
        }
    }
}
