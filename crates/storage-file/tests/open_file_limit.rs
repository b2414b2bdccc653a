//! The process's limit on open files. One test alone, since the limit is the whole process's.

#![allow(clippy::unwrap_used)]

use isobath_ring::block_on;
use isobath_storage::{Host, IoBuf, OpenMode, Storage};
use isobath_storage_file::FileHost;
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

fn set_limit(soft: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is a live value.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit), 0);
        limit.rlim_cur = soft;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit), 0);
    }
}

fn all_are_read<H: Host>(host: &H, paths: &[PathBuf]) {
    block_on(async {
        let mut files = Vec::new();
        for path in paths {
            files.push(host.open(path, OpenMode::default()).await.unwrap());
        }
        for _ in 0..2 {
            for (file, index) in files.iter().zip(0_u32..) {
                let buf = file.read_at(0, IoBuf::zeroed(4)).await.unwrap();
                assert_eq!(*buf, index.to_be_bytes());
            }
        }
    });
}

#[test]
fn a_chain_may_have_more_files_than_the_process() {
    let directory = TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let paths: Vec<_> = (0..600_u32)
        .map(|index| {
            let path = directory.path().join(index.to_string());
            fs::write(&path, index.to_be_bytes()).unwrap();
            path
        })
        .collect();
    set_limit(256);
    all_are_read(&FileHost, &paths);
    // Where other parts of the process have taken descriptors, the system's refusal is heeded.
    let host = FileHost::with_descriptors(280);
    all_are_read(&host, &paths);
    // Nothing can be given up by those who keep theirs.
    let host = FileHost::with_descriptors(2000);
    block_on(async {
        let mut files = Vec::new();
        let error = loop {
            match host.open(&paths[files.len()], OpenMode::default()).await {
                Ok(file) => files.push(file),
                Err(error) => break error,
            }
        };
        assert_eq!(error.errno(), libc::EMFILE, "{error}");
        assert!(files.len() > 200);
    });
}
