//! A chain whose layers are of different kinds: the active one in real files, those below it in memory.

use futures_executor::block_on;
use isobath_disk::{BlockDevice, Disk, LiveDisk, NewDisk, OpenOptions, Overlay, create};
use isobath_storage::IoBuf;
use isobath_storage::either::{EitherHost, Side};
use isobath_storage::memory::MemoryHost;
use isobath_storage_file::FileHost;
use isobath_storage_test::any::ToAny;
use std::path::Path;

const SIZE: u64 = 8 << 20;
const CLUSTER: u64 = 64 << 10;

/// What a cluster holds under so many layers, the lowest of which is 1: each writes to those that its number divides.
fn byte(cluster: u64, layers: u64) -> u8 {
    (1..=layers).rev().find(|layer| cluster.is_multiple_of(*layer)).unwrap_or(0) as u8
}

async fn fill(disk: &impl BlockDevice, layer: u64) {
    for cluster in (0..SIZE / CLUSTER).filter(|cluster| cluster % layer == 0) {
        let mut data = IoBuf::zeroed(CLUSTER as usize);
        data.fill(layer as u8);
        disk.write(cluster * CLUSTER, data).await.unwrap();
    }
    disk.flush().await.unwrap();
}

async fn assert_holds(disk: &impl BlockDevice, layers: u64) {
    for cluster in 0..SIZE / CLUSTER {
        let read = disk.read(cluster * CLUSTER, IoBuf::zeroed(CLUSTER as usize)).await.unwrap();
        let wanted = byte(cluster, layers);
        assert!(read.iter().all(|byte| *byte == wanted), "cluster {cluster}, {layers} layers");
    }
}

#[test]
fn an_active_layer_in_files_lies_over_layers_in_memory() {
    let directory = tempfile::tempdir().unwrap();
    let memory = MemoryHost::new();
    let rule = |name: &Path| if name.starts_with("/memory") { Side::Second } else { Side::First };
    let host = EitherHost::new(FileHost, memory.clone(), rule);
    let (active, newest) = (directory.path().join("active"), directory.path().join("newest"));
    let options = OpenOptions::new().writable(true);
    block_on(async {
        let layers = [
            (Path::new("/memory/base"), None),
            (Path::new("/memory/middle"), Some("base".to_owned())),
            (&active, Some("/memory/middle".to_owned())),
        ];
        for (name, backing_file) in layers.clone() {
            let mut new = NewDisk::new(SIZE);
            if let Some(below) = backing_file {
                new = new.backing_file(below, "qcow2");
            }
            create(&host.any(), name, &new).await.unwrap();
        }
        for (layer, (name, _)) in (1..).zip(layers) {
            let disk = Disk::open(host.any(), name, &options).await.unwrap();
            fill(&disk, layer).await;
            assert_holds(&disk, layer).await;
            disk.close().await.unwrap();
        }
        assert_eq!(memory.names(), [Path::new("/memory/base"), Path::new("/memory/middle")]);

        let contents = || ["/memory/base", "/memory/middle"].map(|name| memory.contents(name));
        let below = contents();
        let live = LiveDisk::open(host.any(), &active, &options).await.unwrap();
        assert_holds(&*live, 3).await;
        live.snapshot(&Overlay::Create(newest.clone())).await.unwrap();
        fill(&*live, 4).await;
        assert_holds(&*live, 4).await;
        live.close().await.unwrap();
        drop(live);

        let disk = Disk::open(host.any(), &newest, &options).await.unwrap();
        assert_holds(&disk, 4).await;
        disk.close().await.unwrap();
        drop(disk);
        let disk = Disk::open(host.any(), &active, &OpenOptions::default()).await.unwrap();
        assert_holds(&disk, 3).await;
        assert!(below == contents(), "only the active layer changes");
    });
}
