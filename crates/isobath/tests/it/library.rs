//! The library as others use it, by its own names.

use futures_executor::block_on;
use isobath::jobs::{CommitOptions, JobError, JobOptions, StreamOptions};
use isobath::storage::{IoBuf, memory::MemoryHost};
use isobath::{Disk, DiskError, NewDisk, OpenOptions, Overlay, create};

async fn two_layers() -> Disk<MemoryHost> {
    let host = MemoryHost::new();
    create(&host, "base", &NewDisk::new(1 << 20)).await.unwrap();
    let disk = Disk::open(host, "base", &OpenOptions::new().writable(true)).await.unwrap();
    disk.write(0, IoBuf::copy_of(b"base")).await.unwrap();
    disk.snapshot(&Overlay::Create("overlay".into())).await.unwrap();
    disk.write(2, IoBuf::copy_of(b"nd")).await.unwrap();
    disk
}

async fn holds(disk: &Disk<MemoryHost>, layers: usize) {
    assert_eq!(disk.depth(), layers);
    assert_eq!(&*disk.read(0, IoBuf::zeroed(4)).await.unwrap(), b"band");
}

#[test]
fn a_job_says_how_it_ended() {
    block_on(async {
        let disk = two_layers().await;
        let (job, running) =
            disk.stream(StreamOptions::default(), JobOptions::new("cancelled")).unwrap();
        job.cancel(true).unwrap();
        running.await;
        assert!(matches!(job.result(), Err(JobError::Cancelled)) && job.error().is_none());
        holds(&disk, 2).await;

        let (job, running) =
            disk.stream(StreamOptions::default(), JobOptions::new("dropped")).unwrap();
        drop(running);
        assert!(matches!(job.result(), Err(JobError::Abandoned)));
        holds(&disk, 2).await;

        let (job, running) =
            disk.stream(StreamOptions::default(), JobOptions::new("done")).unwrap();
        running.await;
        job.result().unwrap();
        holds(&disk, 1).await;

        let refused =
            disk.commit(CommitOptions::default(), JobOptions::new("refused")).err().unwrap();
        assert!(matches!(refused, DiskError::Refused { .. }), "{refused}");
        disk.close().await.unwrap();
    });
}

#[test]
fn a_snapshot_replaces_no_data() {
    block_on(async {
        let host = MemoryHost::new();
        for name in ["base", "blank", "written"] {
            create(&host, name, &NewDisk::new(1 << 20)).await.unwrap();
        }
        let options = OpenOptions::new().writable(true);
        let written = Disk::open(host.clone(), "written", &options).await.unwrap();
        written.write(0, IoBuf::copy_of(b"precious")).await.unwrap();
        written.close().await.unwrap();
        host.insert("empty", b"");
        host.insert("text", b"precious");
        let disk = Disk::open(host.clone(), "base", &options).await.unwrap();
        for name in ["written", "text"] {
            let before = host.contents(name).unwrap();
            let refused = disk.snapshot(&Overlay::Create(name.into())).await.unwrap_err();
            assert!(refused.to_string().contains("has data"), "{refused}");
            assert_eq!(host.contents(name).unwrap(), before);
        }
        for (depth, name) in (2..).zip(["empty", "blank", "new"]) {
            disk.snapshot(&Overlay::Create(name.into())).await.unwrap();
            assert_eq!(disk.depth(), depth);
        }
        disk.close().await.unwrap();
    });
}

#[test]
fn several_buffers_are_read_and_written_as_one() {
    block_on(async {
        let disk = two_layers().await;
        let at = (1 << 16) - 3;
        let parts = [&b"several"[..], b"", b"parts"].map(IoBuf::copy_of);
        let addresses = parts.each_ref().map(|part| part.as_ptr());
        let parts = disk.write_vectored(at, parts.into()).await.unwrap();
        assert_eq!(parts.iter().map(|part| part.as_ptr()).collect::<Vec<_>>(), addresses);
        let parts = [5, 0, 7].map(IoBuf::zeroed);
        let parts = disk.read_vectored(at, parts.into()).await.unwrap();
        assert_eq!(
            parts.iter().map(|part| &**part).collect::<Vec<_>>(),
            [&b"sever"[..], b"", b"alparts"]
        );
        assert!(disk.read_vectored(at, Vec::new()).await.unwrap().is_empty());

        // Of what does not fit nothing is written.
        let end = disk.size() - 4;
        let refused =
            disk.write_vectored(end, [4, 1].map(|length| vec![1; length].into()).into()).await;
        assert!(matches!(refused, Err(DiskError::OutOfRange { length: 5, .. })));
        assert_eq!(&*disk.read(end, IoBuf::zeroed(4)).await.unwrap(), [0; 4]);
        disk.close().await.unwrap();
    });
}
