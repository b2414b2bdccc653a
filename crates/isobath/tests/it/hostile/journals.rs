//! Journals that would fill the storage.

use isobath_disk::{Disk, MetadataMode, NewDisk, OpenOptions, create};
use isobath_qcow2::journal::{Operation, Record};
use isobath_qcow2::{Header, HostOffset};
use isobath_ring::block_on;
use isobath_storage::IoBuf;
use isobath_storage_file::FileHost;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// An image of a small disk that was not closed, and whose journal has one record with these operations.
fn left_with(image: &Path, operations: Vec<Operation>) {
    block_on(async {
        create(&FileHost, image, &NewDisk::new(1 << 20)).await.unwrap();
        let options = OpenOptions::new().writable(true).metadata(MetadataMode::Journal);
        let disk = Disk::open(FileHost, image, &options).await.unwrap();
        disk.write(0, IoBuf::copy_of(&[7; 512])).await.unwrap();
        disk.flush().await.unwrap();
    });
    let mut bytes = fs::read(image).unwrap();
    let journal = *Header::parse(&bytes).unwrap().journal().unwrap();
    let start = journal.area_offset.get() as usize;
    let area = &mut bytes[start..start + journal.area_length as usize];
    area.fill(0);
    let previous = journal.first_lsn;
    let lsn = previous.next();
    let record = Record { lsn, previous, tail: lsn, data_from: lsn, operations };
    let record = record.encode(journal.id).unwrap();
    area[..record.len()].copy_from_slice(&record);
    fs::write(image, bytes).unwrap();
}

fn zeroes(count: u64, length: u32, apart: u64) -> Vec<Operation> {
    let at = |n| HostOffset::new((1 << 30) + n * apart);
    (0..count).map(|n| Operation::Zero { offset: at(n), length }).collect()
}

#[test]
fn a_journal_takes_no_more_space_than_its_disk_has_tables_for() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image.qcow2");
    let writable = OpenOptions::new().writable(true);
    let open = |options: &OpenOptions| block_on(Disk::open(FileHost, &image, options)).map(drop);
    let space = || {
        // Until it is written back, space may be counted that the file does not take in the end.
        fs::File::open(&image).unwrap().sync_all().unwrap();
        let found = fs::metadata(&image).unwrap();
        (found.len(), found.blocks() * 512)
    };
    for much in [zeroes(1, 0xffff_0000, 0), zeroes(1000, 1 << 20, 1 << 21)] {
        left_with(&image, much);
        let before = fs::read(&image).unwrap();
        let error = open(&writable).unwrap_err().to_string();
        assert!(error.contains("its journal zeroes"), "{error}");
        assert!(fs::read(&image).unwrap() == before);
        // Who only reads it is not harmed.
        open(&OpenOptions::new()).unwrap();
        fs::remove_file(&image).unwrap();
    }
    // What is allowed takes no space.
    left_with(&image, zeroes(4, 4 << 20, 8 << 20));
    let (_, before) = space();
    open(&writable).unwrap();
    let (length, after) = space();
    assert!(length > 1 << 30 && after <= before, "{length} bytes: {before} became {after}");
}
