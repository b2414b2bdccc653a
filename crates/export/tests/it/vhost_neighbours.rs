//! What a queue does while it has much to do.

use crate::vhost_raw::{DATA, FEATURES, NEXT, Raw, WRITE, descriptor, header};
use crate::vhost_served::VhostServed;
use isobath_disk::{BlockDevice, BlockStatus, Result, ZeroFlags};
use isobath_export::vhost_user::Options;
use isobath_storage::IoBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

const SIZE: u64 = 1 << 20;

/// Answers reads at once, in the order that it notes. Some of them hold up the thread.
struct Noting {
    order: Mutex<Vec<u64>>,
    /// The numbers of these, from 1.
    hold_up: &'static [usize],
    began: Sender<()>,
    go_on: Mutex<Receiver<()>>,
}

impl BlockDevice for Noting {
    fn size(&self) -> u64 {
        SIZE
    }

    fn is_read_only(&self) -> bool {
        true
    }

    fn preferred_block(&self) -> u32 {
        4096
    }

    async fn read(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let number = {
            let mut order = self.order.lock().unwrap();
            order.push(offset);
            order.len()
        };
        if self.hold_up.contains(&number) {
            self.began.send(()).unwrap();
            self.go_on.lock().unwrap().recv().unwrap();
        }
        Ok(buf)
    }

    async fn write(&self, _: u64, buf: IoBuf) -> Result<IoBuf> {
        Ok(buf)
    }

    async fn write_zeroes(&self, _: u64, _: u64, _: ZeroFlags) -> Result<()> {
        Ok(())
    }

    async fn discard(&self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }

    async fn flush(&self) -> Result<()> {
        Ok(())
    }

    async fn block_status(&self, _: u64, length: u64, _: usize) -> Result<Vec<BlockStatus>> {
        let run = BlockStatus {
            length,
            allocated: true,
            zero: false,
            compressed: false,
            depth: 0,
            host: None,
        };
        Ok(vec![run])
    }
}

/// A served device that holds up its thread in these reads, what tells when it does, and what lets it go on.
fn served(hold_up: &'static [usize]) -> (VhostServed<Noting>, Receiver<()>, Sender<()>) {
    let ((began, has_begun), (release, go_on)) = (channel(), channel());
    let order = Mutex::default();
    let device = Noting { order, hold_up, began, go_on: Mutex::new(go_on) };
    let served = VhostServed::new(Arc::new(device), Options::default(), 1);
    (served, has_begun, release)
}

fn describe_read(raw: &Raw, queue: u16) {
    let place = DATA + 0x4000 * u64::from(queue);
    raw.memory.write(place, &header(0, u64::from(queue)));
    raw.describe(queue, 0, descriptor(place, 16, NEXT, 1));
    raw.describe(queue, 1, descriptor(place + 0x1000, 512, NEXT | WRITE, 2));
    raw.describe(queue, 2, descriptor(place + 0x100, 1, WRITE, 0));
}

#[test]
fn a_request_does_not_wait_for_all_those_of_a_flooded_queue() {
    let (served, has_begun, release) = served(&[1]);
    let raw = Raw::start(&served.socket, 2, 128, FEATURES);
    for queue in 0..2 {
        describe_read(&raw, queue);
    }
    for _ in 0..128 {
        raw.offer(0, 0);
    }
    raw.kick(0);
    has_begun.recv().unwrap();
    // The thread is in the first of them. The other queue's only request arrives.
    raw.offer(1, 0);
    raw.kick(1);
    release.send(()).unwrap();
    raw.wait_used(0, 128);
    raw.wait_used(1, 1);
    let order = served.device.order.lock().unwrap().clone();
    let before = order.iter().position(|offset| *offset == 512).unwrap();
    assert!(before <= 16, "{before} requests of the flooded queue came before");
}

#[test]
fn the_first_half_of_a_batch_is_shown_before_the_last_of_it_is_done() {
    let (served, has_begun, release) = served(&[1, 32]);
    let raw = Raw::start(&served.socket, 1, 32, FEATURES);
    describe_read(&raw, 0);
    raw.offer(0, 0);
    raw.kick(0);
    has_begun.recv().unwrap();
    for _ in 1..32 {
        raw.offer(0, 0);
    }
    release.send(()).unwrap();
    has_begun.recv().unwrap();
    let shown = raw.used_index(0);
    release.send(()).unwrap();
    assert!((16..32).contains(&shown), "{shown} of 32 requests");
    raw.wait_used(0, 32);
}
