//! The index of the first overlay of a chain that has none: if the layers have many tables it is left to later overlays
//! to complete it, and reads are right all the time.

use crate::heads::{Reads, name};
use futures_executor::block_on;
use isobath_disk::{Disk, NewDisk, OpenOptions, create, create_held};
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::ToAny;
use isobath_storage_test::pass_through::PassThrough;

const SIZE: u64 = 8 << 30;
/// What a table of 64 KiB covers.
const SPAN: u64 = 512 << 20;
/// Layers without an index: together they have 5 MiB of tables.
const PLAIN: usize = 5;

fn overlay(layer: usize, indexed: bool) -> NewDisk {
    let new = NewDisk::new(SIZE).index(indexed);
    match layer.checked_sub(1) {
        Some(below) => new.backing_file(name(below).to_str().unwrap(), "qcow2"),
        None => new,
    }
}

/// Writes a sector in each span of a layer, except in some.
async fn fill(host: &MemoryHost, layer: usize, spans: impl Iterator<Item = u64>) {
    let options = OpenOptions::new().writable(true);
    let disk = Disk::open(host.any(), &name(layer), &options).await.unwrap();
    for span in spans {
        let at = span * SPAN + (layer as u64 % 7) * (64 << 10);
        disk.write(at, IoBuf::copy_of(&[layer as u8 + 1; 512])).await.unwrap();
    }
    disk.close().await.unwrap();
}

async fn plain_chain() -> MemoryHost {
    let host = MemoryHost::new();
    for layer in 0..PLAIN {
        create(&host.any(), &name(layer), &overlay(layer, false)).await.unwrap();
        fill(&host, layer, 0..SIZE / SPAN).await;
    }
    host
}

/// The index is that of all layers below the active one, and says what they say.
async fn assert_indexed(host: &MemoryHost, active: usize) {
    let disk = Disk::open(host.any(), &name(active), &OpenOptions::new()).await.unwrap();
    assert_eq!(disk.indexed_layers(), active);
    assert_eq!(disk.verify_index(|_| {}).await.unwrap(), Ok(Vec::new()));
}

#[test]
fn the_first_overlay_reads_no_tables_and_has_a_valid_index() {
    block_on(async {
        let memory = plain_chain().await;
        let reads = Reads::default();
        let host = PassThrough::around(memory.clone(), reads.clone()).any();
        let created = create_held(&host, &name(PLAIN), &overlay(PLAIN, true)).await.unwrap();
        assert!(created.is_index_left());
        drop(created);
        let counted = reads.0.lock().clone();
        let most = (0..PLAIN).filter_map(|layer| counted.get(&name(layer))).max();
        // A layer has 16 tables.
        assert!(most.is_some_and(|most| *most <= 4), "{counted:?}");
        assert_indexed(&memory, PLAIN).await;
    });
}

#[test]
fn later_overlays_complete_the_index() {
    block_on(async {
        let host = plain_chain().await;
        let any = host.any();
        for layer in PLAIN..PLAIN + 40 {
            let created = create_held(&any, &name(layer), &overlay(layer, true)).await.unwrap();
            assert_eq!(created.is_index_left(), layer == PLAIN);
            drop(created);
            if layer % 8 == 0 {
                assert_indexed(&host, layer).await;
            }
            fill(&host, layer, std::iter::once(layer as u64 % 16)).await;
        }
        let last = PLAIN + 39;
        assert_indexed(&host, last).await;
        // The digests are there, so that a copy has an index, too: its files' stamps say nothing.
        let copy = MemoryHost::new();
        for file in host.names() {
            copy.insert(&file, &[0]);
            copy.insert(&file, &host.contents(&file).unwrap());
        }
        assert_indexed(&copy, last).await;
    });
}

/// A few tables are read at once, as for every overlay.
#[test]
fn the_first_overlay_of_a_small_chain_has_a_whole_index() {
    block_on(async {
        let host = MemoryHost::new();
        for layer in 0..PLAIN {
            create(&host.any(), &name(layer), &overlay(layer, false)).await.unwrap();
            fill(&host, layer, 0..8).await;
        }
        let any = host.any();
        let created = create_held(&any, &name(PLAIN), &overlay(PLAIN, true)).await.unwrap();
        assert!(!created.is_index_left());
        drop(created);
        assert_indexed(&host, PLAIN).await;
    });
}
