//! Clients of a disk that pauses, over NBD.

use crate::client::Client;
use crate::memory_disk::MemoryDisk;
use crate::script::{flags, option as option_bytes, request};
use crate::served::{Served, export};
use isobath_disk::pausing::{OnFailure, Policies};
use isobath_disk::throttle::Direction;
use isobath_export::nbd::wire::{command, option};
use isobath_testkit::until;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

/// A disk that pauses, and on which writes fail.
fn failing() -> Served {
    let disk = MemoryDisk::new(1 << 20);
    disk.pausing.set_policies(Policies { reads: OnFailure::Report, writes: OnFailure::Enospc });
    *disk.failing.lock() = Some((Direction::Write, libc::ENOSPC));
    Served::new(vec![export("", disk)])
}

fn write() -> Vec<u8> {
    request(command::WRITE, 0, 7, (0, 512), &[9; 512])
}

fn until_held(served: &Served, count: usize) {
    let held = || served.disk(0).pausing.state().waiting;
    until(&format!("{count} requests to be held"), || held() == count);
}

/// The storage is well again, and the disk goes on. What was held once does not come back.
fn go_on_without_it(served: &Served) {
    *served.disk(0).failing.lock() = None;
    served.disk(0).pausing.resume();
    let mut client = Client::ready(served);
    client.write(4096, &[1; 512]);
    assert_eq!(client.read(0, 512), [0; 512]);
    client.disconnect();
}

#[test]
fn what_a_client_has_sent_does_not_wait_after_its_end() {
    for asks in [false, true] {
        let served = failing();
        let mut client = TcpStream::connect(served.tcp).unwrap();
        client.write_all(&[flags(), option_bytes(option::EXPORT_NAME, b"")].concat()).unwrap();
        client.read_exact(&mut [0; 28]).unwrap();
        client.write_all(&write()).unwrap();
        until_held(&served, 1);
        if asks {
            client.write_all(&request(command::DISC, 0, 0, (0, 0), &[])).unwrap();
        } else {
            // Over TCP that looks like a client that has only closed its side.
            drop(client);
        }
        until_held(&served, 0);
        go_on_without_it(&served);
    }
}

#[test]
fn nor_do_more_requests_than_the_server_has_received() {
    let served = failing();
    served.disk(0).pausing.stop();
    let mut client = TcpStream::connect(served.tcp).unwrap();
    client.write_all(&[flags(), option_bytes(option::EXPORT_NAME, b"")].concat()).unwrap();
    client.read_exact(&mut [0; 28]).unwrap();
    for _ in 0..150 {
        client.write_all(&write()).unwrap();
    }
    until_held(&served, 128);
    drop(client);
    until("the client's session to end", || served.server.connections() == 0);
    assert_eq!(served.disk(0).pausing.state().waiting, 0);
    go_on_without_it(&served);
}

#[test]
fn a_client_that_sends_no_more_gets_an_error_for_what_a_paused_disk_holds() {
    let served = failing();
    let mut client = Client::ready(&served);
    client.send(&write());
    until_held(&served, 1);
    client.0.shutdown(Shutdown::Write).unwrap();
    assert_eq!(client.reply(), (libc::ENOSPC as u32, 7));
    assert_eq!(client.rest(), b"");
    go_on_without_it(&served);
}
