//! Images of other programs, opened and read.

use crate::take;
use futures_executor::block_on;
use isobath_formats::{Error, Format, Image, VhdxOptions, VmdkOptions, VmdkSubformat, Writer};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, OpenMode, Storage, StorageExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

type File = <MemoryHost as Host>::File;

const IMAGE: &str = "image";

/// A file at most; larger ones are not needed to reach anything.
const MAX_FILE: u64 = 64 << 20;

/// Runs that are looked at.
const MAX_RUNS: usize = 1000;

/// The input is a format, whether checksums are made right, the file's length, and pieces of the file with their
/// places. The image opens and can be read, or is refused; runs are in order and not empty; a read gives what an
/// earlier one gave.
pub fn formats(mut input: &[u8]) {
    let [kind, seal] = take(&mut input);
    let format = Format::ALL[usize::from(kind) % Format::ALL.len()];
    block_on(async {
        let host = MemoryHost::new();
        host.insert(IMAGE, &[]);
        host.insert("extent", &[0x5a; 10_000]);
        let (file, length) = fill(&host, input).await;
        if seal & 1 == 0 {
            checksums(&file, format, length).await;
        }
        let Some(image) = open(&host, format, Arc::new(file)).await else { return };
        let size = image.size();
        assert!(size.is_multiple_of(512));
        let mut at = 0;
        for _ in 0..MAX_RUNS {
            if at == size {
                break;
            }
            let Ok(run) = image.run(at, size - at).await else { break };
            assert!(run.length > 0 && run.length <= size - at, "{run:?} at {at} of {size}");
            at += run.length;
        }
        for offset in [0, size / 2, size.saturating_sub(70_000)] {
            let length = 70_000.min(size - offset) as usize;
            let first = image.read(offset, IoBuf::zeroed(length)).await;
            let second = image.read(offset, IoBuf::zeroed(length)).await;
            assert_eq!(first.is_ok(), second.is_ok());
            if let (Ok(first), Ok(second)) = (first, second) {
                assert!(first.len() == length && *first == *second, "two reads differ");
            }
        }
    });
}

/// The file that the rest of an input describes, and its length.
async fn fill(host: &MemoryHost, mut input: &[u8]) -> (File, u64) {
    let mode = OpenMode { writable: true, ..OpenMode::default() };
    let file = host.open(Path::new(IMAGE), mode).await.expect("it is there");
    let length = u64::from(u32::from_le_bytes(take(&mut input))).min(MAX_FILE);
    file.set_len(length).await.expect("in memory");
    while !input.is_empty() {
        let at = u64::from(u32::from_le_bytes(take(&mut input)));
        let count = usize::from(u16::from_le_bytes(take(&mut input))).min(input.len());
        let (bytes, rest) = input.split_at(count);
        input = rest;
        if at + count as u64 <= length {
            file.write_at(at, IoBuf::copy_of(bytes)).await.expect("in memory");
        }
    }
    (file, length)
}

async fn open(host: &MemoryHost, format: Format, file: Arc<File>) -> Option<Image<File>> {
    let open = async |_: &str| {
        let path = PathBuf::from("extent");
        let file = host.open(&path, OpenMode::default()).await?;
        Ok::<_, Error>((path, Arc::new(file)))
    };
    Image::open(format, Path::new(IMAGE), file, open).await.ok()
}

/// Puts the right checksums where a format has them.
async fn checksums(file: &File, format: Format, length: u64) {
    let places: &[(u64, usize, usize)] = match format {
        Format::Vhdx => &[
            (64 << 10, 4096, 4),
            (128 << 10, 4096, 4),
            (192 << 10, 65536, 4),
            (256 << 10, 65536, 4),
        ],
        Format::Vpc => &[(0, 512, 64), (512, 1024, 36), (length.saturating_sub(512), 512, 64)],
        _ => return,
    };
    for (at, count, field) in places.iter().copied() {
        if at + count as u64 > length {
            continue;
        }
        let mut bytes = file.read_at(at, IoBuf::zeroed(count)).await.expect("in memory");
        if format == Format::Vpc && !bytes.starts_with(b"c") {
            continue;
        }
        bytes[field..field + 4].fill(0);
        let sum = if format == Format::Vhdx {
            isobath_qcow2::Crc32c::of(&bytes).to_le_bytes()
        } else {
            (!bytes.iter().fold(0_u32, |sum, byte| sum + u32::from(*byte))).to_be_bytes()
        };
        bytes[field..field + 4].copy_from_slice(&sum);
        file.write_at(at, bytes).await.expect("in memory");
    }
}

/// An input for a file with these contents.
fn input(format: Format, bytes: &[u8]) -> Vec<u8> {
    let number = Format::ALL.iter().position(|one| *one == format).unwrap_or_default();
    let mut input = vec![number as u8, 0];
    input.extend((bytes.len() as u32).to_le_bytes());
    for (number, piece) in bytes.chunks(64).enumerate() {
        if piece.iter().any(|byte| *byte != 0) {
            input.extend((number as u32 * 64).to_le_bytes());
            input.extend((piece.len() as u16).to_le_bytes());
            input.extend(piece);
        }
    }
    input
}

/// A file with these bytes at these places.
fn file(length: usize, parts: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; length];
    for (at, part) in parts {
        bytes[*at..at + part.len()].copy_from_slice(part);
    }
    bytes
}

/// An image of each format.
pub(crate) fn valid_inputs() -> Vec<Vec<u8>> {
    let le = u32::to_le_bytes;
    let be = u32::to_be_bytes;
    let vdi = file(
        (2 << 20) + 1024,
        &[
            (64, &le(0xbeda_107f)),
            (68, &le(0x1_0001)),
            (72, &le(0x190)),
            (76, &le(1)),
            (340, &le(512)),
            (344, &le(1024)),
            (360, &le(512)),
            (368, &(3_u64 << 20).to_le_bytes()),
            (376, &le(1 << 20)),
            (384, &le(3)),
            (388, &le(2)),
            (512, &[le(1), le(0xffff_ffff), le(0)].concat()),
            (1024, b"data"),
        ],
    );
    let vpc = file(
        8192,
        &[
            (0, b"conectix"),
            (16, &512_u64.to_be_bytes()),
            (28, b"win "),
            (48, &12288_u64.to_be_bytes()),
            (60, &be(3)),
            (512, b"cxsparse"),
            (512 + 16, &1536_u64.to_be_bytes()),
            (512 + 28, &be(3)),
            (512 + 32, &be(4096)),
            (1536, &[be(4), be(u32::MAX), be(u32::MAX)].concat()),
            (2048 + 512, b"data"),
        ],
    );
    let fixed = file(
        2048,
        &[
            (1536, b"conectix"),
            (1536 + 28, b"win "),
            (1536 + 48, &1536_u64.to_be_bytes()),
            (1536 + 60, &be(2)),
        ],
    );
    let qed = file(
        5 * 4096,
        &[
            (0, b"QED\0"),
            (4, &le(4096)),
            (8, &le(1)),
            (12, &le(1)),
            (40, &4096_u64.to_le_bytes()),
            (48, &(1_u64 << 20).to_le_bytes()),
            (4096, &8192_u64.to_le_bytes()),
            (8192, &[12288_u64.to_le_bytes(), 1_u64.to_le_bytes()].concat()),
            (12288, b"data"),
        ],
    );
    let descriptor = b"# Disk DescriptorFile\nversion=1\nCID=1\nparentCID=ffffffff\n\
        createType=\"twoGbMaxExtentFlat\"\nRW 8 FLAT \"extent\" 0\nRW 4 FLAT \"extent\" 2\n";
    vec![
        input(Format::Vdi, &vdi),
        input(Format::Vpc, &vpc),
        input(Format::Vpc, &fixed),
        input(Format::Qed, &qed),
        input(Format::Vmdk, descriptor),
        input(Format::Vmdk, &written(Format::Vmdk, VmdkSubformat::MonolithicSparse)),
        input(Format::Vmdk, &written(Format::Vmdk, VmdkSubformat::StreamOptimized)),
        input(Format::Vhdx, &written(Format::Vhdx, VmdkSubformat::default())),
    ]
}

/// An image made by the writer.
fn written(format: Format, subformat: VmdkSubformat) -> Vec<u8> {
    let host = MemoryHost::new();
    block_on(async {
        let file =
            host.create(Path::new(IMAGE), OpenMode { writable: true, ..OpenMode::default() });
        let file = Arc::new(file.await.expect("in memory"));
        let size = 3 << 20;
        let mut writer = if format == Format::Vmdk {
            let options = VmdkOptions {
                subformat,
                content_id: 1,
                adapter: "ide",
                hardware_version: "4".into(),
                tools_version: "1".into(),
                zeroed_grains: false,
            };
            Writer::vmdk(file, Vec::new(), size, &options).expect("a valid size")
        } else {
            let (block_size, log_size) = (Some(1 << 20), 1 << 20);
            let (fixed, zero_blocks) = (false, true);
            let options = VhdxOptions { block_size, log_size, fixed, zero_blocks, ids: [1, 2, 3] };
            Writer::vhdx(file, size, options).expect("a valid size")
        };
        for at in [0, 1 << 20] {
            let piece = writer.prepare(at, &[0x5a; 512]).expect("not zero");
            writer.write(vec![piece]).await.expect("in memory");
        }
        writer.finish().await.expect("in memory");
    });
    host.contents(IMAGE).expect("it was created")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seeds_are_images() {
        for input in valid_inputs() {
            let format = Format::ALL[usize::from(input[0])];
            block_on(async {
                let host = MemoryHost::new();
                host.insert("extent", &[0x5a; 10_000]);
                host.insert(IMAGE, &[]);
                let file = fill(&host, &input[2..]).await;
                checksums(&file.0, format, file.1).await;
                assert!(open(&host, format, Arc::new(file.0)).await.is_some(), "{format:?}");
            });
        }
    }
}
