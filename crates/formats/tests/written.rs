//! What is written is read again: every kind of image, with data in random places.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by a panic")]

use futures_executor::block_on;
use isobath_formats::{
    Error, Format, Image, PIECE, QedOptions, RunKind, VdiOptions, VhdxOptions, VmdkOptions,
    VmdkSubformat, VpcOptions, Writer,
};
use isobath_storage::memory::{MemoryFile, MemoryHost};
use isobath_storage::{Host, IoBuf, OpenMode};
use isobath_testkit::seed::Seed;
use rand::RngExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const NAME: &str = "image.x";

#[derive(Clone, Debug)]
enum Kind {
    Vmdk(VmdkOptions),
    Vhdx(VhdxOptions),
    Vpc(VpcOptions),
    Vdi(VdiOptions),
    Qed(QedOptions),
}

fn kinds() -> Vec<(Format, Kind)> {
    let mut kinds = Vec::new();
    for subformat in VmdkSubformat::ALL {
        let zeroed_grains = !subformat.is_flat();
        let options = VmdkOptions {
            subformat,
            content_id: 0x1234_5678,
            adapter: "ide",
            hardware_version: "4".into(),
            tools_version: "1".into(),
            zeroed_grains,
        };
        kinds.push((Format::Vmdk, Kind::Vmdk(options)));
    }
    for fixed in [false, true] {
        let (block_size, ids) = (Some(2 << 20), [1, 2, 3]);
        let options =
            VhdxOptions { block_size, log_size: 3 << 20, fixed, zero_blocks: !fixed, ids };
        kinds.push((Format::Vhdx, Kind::Vhdx(options)));
        kinds.push((Format::Vdi, Kind::Vdi(VdiOptions { fixed, ids: [1, 2] })));
        for force_size in [false, true] {
            let options = VpcOptions { fixed, force_size, id: 1, created: 2 };
            kinds.push((Format::Vpc, Kind::Vpc(options)));
        }
    }
    for (cluster_size, table_size) in [(4096, 4), (65536, 4), (1 << 20, 2)] {
        kinds.push((Format::Qed, Kind::Qed(QedOptions { cluster_size, table_size })));
    }
    kinds
}

async fn create(host: &MemoryHost, name: &Path) -> Arc<MemoryFile> {
    Arc::new(host.create(name, OpenMode { writable: true, ..OpenMode::default() }).await.unwrap())
}

async fn writer(host: &MemoryHost, kind: Kind, size: u64) -> Writer<MemoryFile> {
    let name = Path::new(NAME);
    let file = create(host, name).await;
    let writer = match kind {
        Kind::Vmdk(options) => {
            let mut extents = Vec::new();
            for extent in options.extents(name, size).unwrap() {
                extents.push(create(host, &extent).await);
            }
            Writer::vmdk(file, extents, size, &options)
        }
        Kind::Vhdx(options) => Writer::vhdx(file, size, options),
        Kind::Vpc(options) => Writer::vpc(file, size, options),
        Kind::Vdi(options) => Writer::vdi(file, size, options),
        Kind::Qed(options) => Writer::qed(file, size, options),
    };
    writer.unwrap()
}

async fn opened(host: &MemoryHost, format: Format) -> Result<Image<MemoryFile>, Error> {
    let open = async |name: &Path| host.open(name, OpenMode::default()).await.map(Arc::new);
    Image::open(format, Path::new(NAME), open(Path::new(NAME)).await?, async |extent: &str| {
        let path = PathBuf::from(extent);
        let file = open(&path).await?;
        Ok::<_, Error>((path, file))
    })
    .await
}

#[test]
fn what_is_written_is_read_again() {
    let mut rng = Seed::new().rng();
    for (format, kind) in kinds() {
        println!("{kind:?}");
        // Beyond the first extent of 2 GiB.
        let size = rng.random_range((5_u64 << 20)..6 << 20) * 512;
        let host = MemoryHost::default();
        block_on(async {
            let mut writer = writer(&host, kind.clone(), size).await;
            let mut pieces: Vec<u64> =
                (0..40).map(|_| rng.random_range(0..size) / PIECE as u64).collect();
            // The last one, which may be short.
            pieces.push((size - 1) / PIECE as u64);
            pieces.sort_unstable();
            pieces.dedup();
            let mut written = Vec::new();
            for at in pieces.into_iter().map(|piece| piece * PIECE as u64) {
                let mut bytes = vec![0; (size - at).min(PIECE as u64) as usize];
                rng.fill(&mut bytes[..]);
                writer.write(vec![writer.prepare(at, &bytes).unwrap()]).await.unwrap();
                written.push((at, bytes));
            }
            assert!(writer.prepare(0, &vec![0; PIECE]).is_none());
            assert!(opened(&host, format).await.is_err(), "it is an image before its end");
            let new_size = writer.size();
            writer.finish().await.unwrap();

            let image = opened(&host, format).await.unwrap();
            assert_eq!(image.size(), new_size);
            assert!(new_size >= size && (new_size == size || format == Format::Vpc));
            let mut end = 0;
            for (at, bytes) in &written {
                let found = image.read(*at, IoBuf::zeroed(bytes.len())).await.unwrap();
                assert!(found[..] == bytes[..], "{kind:?} at {at}");
                while end < *at {
                    // Between them there is nothing, or zeroes.
                    let run = image.run(end, *at - end).await.unwrap();
                    if let RunKind::Data { .. } | RunKind::Deflated { .. } = run.kind {
                        let length = run.length.min(1 << 20);
                        let found = image.read(end, IoBuf::zeroed(length as usize)).await.unwrap();
                        assert!(found.iter().all(|byte| *byte == 0), "{kind:?} at {end}");
                    }
                    end += run.length;
                }
                end = at + bytes.len() as u64;
            }
        });
    }
}
