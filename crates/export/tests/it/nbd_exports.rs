//! Exports that come and go while the server serves.

use crate::client::Client;
use crate::memory_disk::MemoryDisk;
use crate::script::{contexts, flags, go, option as option_bytes, request};
use crate::served::{Served, export, run};
use isobath_export::frontend::RemoveMode;
use isobath_export::nbd::wire::{command, option, option_reply};
use isobath_export::nbd::{Export, ExportError, Gone, Limits, RemoveError, Server, SessionError};
use isobath_ring::net::Stream;
use isobath_ring::{Config, Executor, block_on};
use isobath_testkit::process::PATIENCE;
use isobath_testkit::{until, until_some};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Instant;

const SIZE: usize = 1 << 20;

fn none() -> Served {
    Served::with(Vec::new(), Limits::default(), 2)
}

/// An export whose disk has a byte all over, and that disk.
fn filled(name: &str, byte: u8) -> (Export<MemoryDisk>, Arc<MemoryDisk>) {
    let export = export(name, MemoryDisk::new(SIZE).with(0, SIZE, byte, 1));
    let disk = export.device.clone();
    (export, disk)
}

fn is_gone(gone: &mut Gone) -> bool {
    let mut cx = Context::from_waker(Waker::noop());
    std::pin::Pin::new(gone).poll(&mut cx) == Poll::Ready(())
}

/// The reply to one option: its type and data.
fn answer(client: &mut Client) -> (u32, Vec<u8>) {
    let header: [u8; 20] = client.take();
    let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
    let mut data = vec![0; number(16) as usize];
    client.0.read_exact(&mut data).unwrap();
    (number(12), data)
}

/// A client that has been greeted.
fn greeted(served: &Served) -> Client {
    greeted_at(&served.socket)
}

fn greeted_at(socket: &Path) -> Client {
    let mut client = Client::connect_to(socket);
    client.send(&flags());
    client.take::<18>();
    client
}

/// The outcome of `GO`: an error, or the transmission phase.
fn choose(client: &mut Client, name: &str) -> Result<(), u32> {
    client.send(&go(name));
    loop {
        match answer(client).0 {
            option_reply::ACK => return Ok(()),
            option_reply::INFO => {}
            error => return Err(error),
        }
    }
}

fn names(client: &mut Client) -> Vec<String> {
    client.send(&option_bytes(option::LIST, &[]));
    let mut names = Vec::new();
    loop {
        match answer(client) {
            (option_reply::SERVER, data) => {
                let length = u32::from_be_bytes(data[..4].try_into().unwrap()) as usize;
                names.push(String::from_utf8(data[4..4 + length].to_vec()).unwrap());
            }
            (option_reply::ACK, _) => return names,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_server_without_exports_lists_none_until_one_is_added() {
    let served = none();
    let mut early = greeted(&served);
    assert_eq!(names(&mut early), [""; 0]);
    for name in ["", "disk"] {
        assert_eq!(choose(&mut early, name), Err(option_reply::ERR_UNKNOWN));
    }
    let (disk, _) = filled("disk", 7);
    served.server.add(disk).unwrap();
    // The same handshake goes on.
    assert_eq!(names(&mut early), ["disk"]);
    assert_eq!(served.server.exports()[0].clients, 0);
    assert_eq!(choose(&mut early, "disk"), Ok(()));
    assert_eq!(early.read(5, 2), [7, 7]);
    let state = &served.server.exports()[0];
    assert_eq!(
        (state.info.name.as_str(), state.info.size, state.clients),
        ("disk", SIZE as u64, 1)
    );
    assert_eq!(served.server.connections(), 1);
    early.disconnect();
    let mut late = greeted(&served);
    assert_eq!(choose(&mut late, ""), Ok(()), "the first answers to the empty name");
}

#[test]
fn removal_in_safe_mode_waits_for_no_client() {
    let served = none();
    let (export, disk) = filled("disk", 1);
    let mut added = served.server.add(export).unwrap();
    let mut client = greeted(&served);
    choose(&mut client, "disk").unwrap();
    let mut browsing = greeted(&served);
    assert_eq!(names(&mut browsing), ["disk"]);
    let refused = served.server.remove("disk", RemoveMode::Safe).err();
    let in_use = RemoveError::InUse { name: "disk".into(), clients: 1 };
    assert!(in_use.to_string().contains("mode 'hard'"));
    assert_eq!(refused, Some(in_use));
    assert_eq!(client.read(0, 1), [1], "nothing has happened to it");
    client.disconnect();
    // The server learns of a client's end a little later than the client.
    let removed =
        until_some("the client's leave", || match served.server.remove("disk", RemoveMode::Safe) {
            Err(RemoveError::InUse { .. }) => None,
            removed => Some(removed.unwrap()),
        });
    block_on(removed);
    assert!(is_gone(&mut added));
    assert_eq!(Arc::strong_count(&disk), 1, "the server has let go of it");
    assert_eq!(names(&mut browsing), [""; 0]);
    assert_eq!(choose(&mut browsing, "disk"), Err(option_reply::ERR_UNKNOWN));
    for mode in [RemoveMode::Safe, RemoveMode::Hard] {
        let error = served.server.remove("disk", mode).err();
        assert_eq!(error, Some(RemoveError::NotFound("disk".into())));
    }
}

#[test]
fn removal_in_hard_mode_answers_what_was_begun() {
    let served = none();
    let slow = export("slow", MemoryDisk::new(SIZE));
    *slow.device.held.lock() = Some(Vec::new());
    let slow_disk = slow.device.clone();
    let (other, _) = filled("other", 2);
    let mut added = served.server.add(slow).unwrap();
    let mut other_gone = served.server.add(other).unwrap();
    let mut clients: Vec<Client> = (0..3)
        .map(|_| {
            let mut client = greeted(&served);
            choose(&mut client, "slow").unwrap();
            client
        })
        .collect();
    let mut bystander = greeted(&served);
    choose(&mut bystander, "other").unwrap();
    for (client, at) in clients.iter_mut().zip(0..) {
        client.send(&request(command::WRITE, 0, at, (at, 1), b"x"));
    }
    until("three writes at once", || slow_disk.running.load(Ordering::Relaxed) == 3);
    assert!(!is_gone(&mut added));
    let removed = served.server.remove("slow", RemoveMode::Hard).unwrap();
    let mut late = greeted(&served);
    assert_eq!(choose(&mut late, "slow"), Err(option_reply::ERR_UNKNOWN));
    assert_eq!(choose(&mut late, ""), Ok(()), "the next one is the first now");
    assert_eq!(slow_disk.running.load(Ordering::Relaxed), 3);
    slow_disk.release();
    for (mut client, cookie) in clients.into_iter().zip(0..) {
        assert_eq!(client.reply(), (0, cookie));
        assert_eq!(client.rest(), b"");
    }
    block_on(removed);
    assert!(is_gone(&mut added));
    assert_eq!(Arc::strong_count(&slow_disk), 1);
    assert_eq!(slow_disk.bytes(0, 3), b"xxx");
    assert_eq!(bystander.read(0, 1), [2]);
    assert_eq!(late.read(0, 1), [2]);
    assert!(!is_gone(&mut other_gone));
    assert_eq!(served.server.connections(), 2);
}

#[test]
fn names_are_free_again_once_removed() {
    let served = none();
    let (first, first_disk) = filled("disk", 1);
    served.server.add(first).unwrap();
    let (second, _) = filled("disk", 2);
    let taken = served.server.add(second.clone()).err();
    assert_eq!(taken, Some(ExportError::DuplicateName("disk".into())));
    let (long, _) = filled(&"n".repeat(4097), 3);
    assert!(matches!(served.server.add(long).err(), Some(ExportError::TooLong { .. })));
    let mut old = greeted(&served);
    choose(&mut old, "disk").unwrap();
    let removed = served.server.remove("disk", RemoveMode::Hard).unwrap();
    served.server.add(second).unwrap();
    assert_eq!(old.rest(), b"");
    block_on(removed);
    assert_eq!(Arc::strong_count(&first_disk), 1);
    let mut new = greeted(&served);
    choose(&mut new, "disk").unwrap();
    assert_eq!(new.read(0, 1), [2]);
    assert_eq!(served.server.exports()[0].clients, 1);
}

#[test]
fn a_writable_disk_may_be_exported_read_only() {
    let served = none();
    let (writable, disk) = filled("writable", 4);
    let read_only = Export { name: "read-only".into(), read_only: true, ..writable.clone() };
    served.server.add(writable).unwrap();
    served.server.add(read_only).unwrap();
    let states = served.server.exports();
    assert_eq!([false, true], [0, 1].map(|index: usize| states[index].info.read_only));
    let info = run("nbdinfo", [served.uri("read-only")]).ok();
    assert!(info.text().contains("is_read_only: true"), "{}", info.text());
    let info = run("nbdinfo", [served.uri("writable")]).ok();
    assert!(info.text().contains("is_read_only: false"), "{}", info.text());
    // A client that does not care is told again.
    let mut client = greeted(&served);
    choose(&mut client, "read-only").unwrap();
    for kind in [command::WRITE, command::WRITE_ZEROES, command::TRIM] {
        let data: &[u8] = if kind == command::WRITE { b"x" } else { b"" };
        client.send(&request(kind, 0, 3, (0, 1), data));
        assert_eq!(client.reply(), (libc::EPERM as u32, 3));
    }
    assert_eq!(disk.bytes(0, 1), [4]);
    let mut client = greeted(&served);
    choose(&mut client, "writable").unwrap();
    client.write(0, b"y");
    assert_eq!(disk.bytes(0, 1), b"y");
}

#[test]
fn stopping_removes_every_export() {
    let mut served = none();
    let (used, used_disk) = filled("used", 1);
    let (idle, idle_disk) = filled("idle", 2);
    let gone = [served.server.add(used).unwrap(), served.server.add(idle).unwrap()];
    let mut client = greeted(&served);
    choose(&mut client, "used").unwrap();
    served.server.stop();
    assert_eq!(client.rest(), b"");
    for gone in gone {
        block_on(gone);
    }
    assert_eq!([used_disk, idle_disk].map(|disk| Arc::strong_count(&disk)), [1, 1]);
    assert!(served.server.exports().is_empty());
    let (late, _) = filled("late", 3);
    assert_eq!(served.server.add(late).err(), Some(ExportError::Stopping));
    served.stop();
}

/// The outcome of `SET_META_CONTEXT` for an export.
fn contexts_of(client: &mut Client, name: &str) -> u32 {
    client.send(&option_bytes(option::STRUCTURED_REPLY, &[]));
    assert_eq!(answer(client).0, option_reply::ACK);
    client.send(&contexts(name, &["base:allocation"]));
    loop {
        match answer(client).0 {
            option_reply::META_CONTEXT => {}
            outcome => return outcome,
        }
    }
}

#[test]
fn a_listener_offers_only_the_exports_that_it_names() {
    let mut served = none();
    let socket = served.offer(&["c", "a"]);
    for (name, byte) in [("a", 1), ("b", 2), ("c", 3)] {
        drop(served.server.add(filled(name, byte).0).unwrap());
    }
    let mut client = greeted_at(&socket);
    assert_eq!(names(&mut client), ["c", "a"]);
    for name in ["b", "d"] {
        assert_eq!(contexts_of(&mut client, name), option_reply::ERR_UNKNOWN);
        client.send(&option_bytes(
            option::INFO,
            &[&[0, 0, 0, 1][..], name.as_bytes(), &[0; 2]].concat(),
        ));
        assert_eq!(answer(&mut client).0, option_reply::ERR_UNKNOWN);
        assert_eq!(choose(&mut client, name), Err(option_reply::ERR_UNKNOWN));
        // An old client hears nothing.
        let mut old = greeted_at(&socket);
        old.send(&option_bytes(option::EXPORT_NAME, name.as_bytes()));
        assert_eq!(old.rest(), b"");
    }
    assert_eq!(contexts_of(&mut client, "a"), option_reply::ACK);
    for (name, byte) in [("a", 1), ("c", 3), ("", 3)] {
        let mut client = greeted_at(&socket);
        choose(&mut client, name).unwrap();
        assert_eq!(client.read(9, 1), [byte], "'{name}'");
        client.disconnect();
        let mut old = greeted_at(&socket);
        old.send(&option_bytes(option::EXPORT_NAME, name.as_bytes()));
        old.take::<10>();
        assert_eq!(old.read(9, 1), [byte], "'{name}'");
        old.disconnect();
    }
    // The other listener offers all.
    let mut client = greeted(&served);
    assert_eq!(names(&mut client), ["a", "b", "c"]);
    choose(&mut client, "b").unwrap();
    client.disconnect();
}

#[test]
fn an_export_added_later_is_offered_where_it_is_named() {
    let mut served = none();
    let [named, other] = [&["late"][..], &["early"]].map(|names| served.offer(names));
    drop(served.server.add(filled("early", 1).0).unwrap());
    let mut waiting = greeted_at(&named);
    assert_eq!(names(&mut waiting), [""; 0]);
    assert_eq!(choose(&mut waiting, ""), Err(option_reply::ERR_UNKNOWN), "not another's default");
    drop(served.server.add(filled("late", 2).0).unwrap());
    assert_eq!(names(&mut waiting), ["late"]);
    assert_eq!(names(&mut greeted_at(&other)), ["early"]);
    assert_eq!(choose(&mut waiting, ""), Ok(()));
    assert_eq!(waiting.read(0, 1), [2]);
    waiting.disconnect();
}

/// Whoever gets an export gets the disk that had its name then, and never one that is gone.
#[test]
fn clients_and_removals_race() {
    let served = none();
    let server = served.server.clone();
    let changes = thread::spawn(move || {
        for round in 0..150_u32 {
            let (export, disk) = filled("disk", round as u8);
            let added = server.add(export).unwrap();
            let removed = server.remove("disk", RemoveMode::Hard).unwrap();
            block_on(removed);
            block_on(added);
            assert_eq!(Arc::strong_count(&disk), 1);
        }
    });
    let mut chosen = 0;
    let deadline = Instant::now() + PATIENCE;
    while !changes.is_finished() {
        assert!(Instant::now() < deadline, "the exports do not come and go");
        let mut client = greeted(&served);
        if choose(&mut client, "disk").is_ok() {
            chosen += 1;
            client.rest();
        }
    }
    changes.join().unwrap();
    assert!(served.server.exports().is_empty(), "{chosen} clients had it for a moment");
}

#[test]
fn an_attached_client_counts_at_once_and_is_served_from_its_first_request_on() {
    let (export, disk) = filled("disk", 7);
    let limits = Limits { connections: 1, ..Limits::default() };
    let server = Server::new(vec![export], limits).unwrap();
    let attach = |name: &str| {
        let (near, far) = UnixStream::pair().unwrap();
        server.attach(Stream::from(OwnedFd::from(near)), name).map(|attached| (attached, far))
    };
    let counts = || (server.connections(), server.clients("disk"));
    assert!(
        matches!(attach("nosuch").err(), Some(SessionError::NoExport(name)) if name == "nosuch")
    );
    assert_eq!(counts(), (0, Some(0)), "it has left its place to others");
    let (attached, mut far) = attach("disk").unwrap();
    assert_eq!((attached.info().size, attached.info().read_only), (SIZE as u64, false));
    assert_eq!(counts(), (1, Some(1)));
    assert!(matches!(attach("disk").err(), Some(SessionError::NotAdmitted(_))));

    far.write_all(&request(command::WRITE, 0, 1, (512, 512), &[9; 512])).unwrap();
    far.write_all(&request(command::READ, 0, 2, (0, 512), &[])).unwrap();
    far.write_all(&request(command::DISC, 0, 3, (0, 0), &[])).unwrap();
    let executor = Executor::new(&Config::default()).unwrap();
    executor.block_on(server.serve_attached(attached)).unwrap();
    let mut replies = Vec::new();
    far.read_to_end(&mut replies).unwrap();
    // Simple replies: a magic number, the error and the cookie.
    let reply =
        |cookie: u8| [&[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0][..], &[0; 7], &[cookie]].concat();
    assert_eq!(replies.len(), 16 + 16 + 512);
    let at = |part: &[u8]| replies.windows(part.len()).any(|window| window == part);
    assert!(at(&reply(1)) && at(&[reply(2), vec![7; 512]].concat()));
    assert_eq!(disk.bytes(512, 512), [9; 512]);
    assert_eq!(counts(), (0, Some(0)));
    assert!(attach("disk").is_ok());
}
