//! What a queue does while it has much to do.

use crate::vhost_raw::{DATA, FEATURES, NEXT, PATIENCE, Raw, WRITE, descriptor, header};
use crate::vhost_served::VhostServed;
use isobath_disk::{BlockDevice, BlockStatus, Result, ZeroFlags};
use isobath_export::vhost_user::Options;
use isobath_ring::yield_now;
use isobath_storage::IoBuf;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

const SIZE: u64 = 1 << 20;

/// A read of this sector has to wait once.
const SLOW: u64 = 8;

/// Answers reads at once, in the order that it notes.
struct Noting {
    order: Mutex<Vec<u64>>,
    /// How many had begun when the slow one ended.
    before_slow: OnceLock<usize>,
    /// What a read does on the queue's thread, given its number, from 1.
    on_read: Box<dyn Fn(usize) + Send + Sync>,
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
        let sector = offset / 512;
        let number = {
            let mut order = self.order.lock().unwrap();
            order.push(sector);
            order.len()
        };
        (self.on_read)(number);
        if sector == SLOW {
            yield_now().await;
            self.before_slow.set(self.order.lock().unwrap().len()).unwrap();
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

fn served(on_read: impl Fn(usize) + Send + Sync + 'static) -> VhostServed<Noting> {
    let (order, before_slow) = (Mutex::default(), OnceLock::new());
    let device = Noting { order, before_slow, on_read: Box::new(on_read) };
    VhostServed::new(Arc::new(device), Options::default(), 1)
}

/// A served device that holds up its thread in these reads, what tells when it does, and what lets it go on.
fn holding_up(reads: &'static [usize]) -> (VhostServed<Noting>, Receiver<()>, Sender<()>) {
    let ((began, has_begun), (release, go_on)) = (channel(), channel());
    let go_on = Mutex::new(go_on);
    let served = served(move |number| {
        if reads.contains(&number) {
            began.send(()).unwrap();
            go_on.lock().unwrap().recv().unwrap();
        }
    });
    (served, has_begun, release)
}

/// Puts a read of a sector into a queue's descriptors from `first` on.
fn describe_read(raw: &Raw, queue: u16, first: u16, sector: u64) {
    let place = DATA + 0x4000 * u64::from(queue) + 0x2000 * u64::from(first / 3);
    raw.memory.write(place, &header(0, sector));
    raw.describe(queue, first, descriptor(place, 16, NEXT, first + 1));
    raw.describe(queue, first + 1, descriptor(place + 0x1000, 512, NEXT | WRITE, first + 2));
    raw.describe(queue, first + 2, descriptor(place + 0x100, 1, WRITE, 0));
}

#[test]
fn a_request_does_not_wait_for_all_those_of_a_flooded_queue() {
    let (served, has_begun, release) = holding_up(&[3]);
    let raw = Raw::start(&served.socket, 2, 128, FEATURES);
    for queue in 0..2 {
        describe_read(&raw, queue, 0, u64::from(queue));
        // The server starts queues after the messages have been sent.
        raw.offer(queue, 0);
        raw.kick(queue);
        raw.wait_used(queue, 1);
    }
    served.wait_idle();
    for _ in 0..128 {
        raw.offer(0, 0);
    }
    raw.kick(0);
    has_begun.recv().unwrap();
    // The thread is in the first of them. The other queue's only request arrives.
    raw.offer(1, 0);
    raw.kick(1);
    release.send(()).unwrap();
    raw.wait_used(0, 129);
    raw.wait_used(1, 2);
    let order = served.device.order.lock().unwrap()[2..].to_vec();
    let before = order.iter().position(|sector| *sector == 1).unwrap();
    assert!(before <= 16, "{before} requests of the flooded queue came before");
}

#[test]
fn the_first_half_of_a_batch_is_shown_before_the_last_of_it_is_done() {
    let (served, has_begun, release) = holding_up(&[1, 32]);
    let raw = Raw::start(&served.socket, 1, 32, FEATURES);
    describe_read(&raw, 0, 0, 0);
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

#[test]
fn a_queue_that_is_refilled_all_the_time_still_ends_what_had_to_wait() {
    const READS: usize = 4000;
    let driver = Arc::new(Mutex::new(None::<Raw>));
    let refill = driver.clone();
    // On the queue's own thread, so that the ring is never empty.
    let served = served(move |number| {
        if number <= READS {
            refill.lock().unwrap().as_ref().unwrap().offer(0, 3);
        }
    });
    let raw = Raw::start(&served.socket, 1, 32, FEATURES);
    describe_read(&raw, 0, 0, SLOW);
    describe_read(&raw, 0, 3, 0);
    {
        // The queue may begin at once; its reads then wait here.
        let mut driver = driver.lock().unwrap();
        raw.offer(0, 0);
        for _ in 0..8 {
            raw.offer(0, 3);
        }
        raw.kick(0);
        *driver = Some(raw);
    }
    let all = (READS + 9) as u16;
    let used = || driver.lock().unwrap().as_ref().unwrap().used_index(0);
    let deadline = Instant::now() + PATIENCE;
    while used() != all {
        assert!(Instant::now() < deadline, "{} of {all} requests have ended", used());
        std::thread::sleep(Duration::from_micros(50));
    }
    let before = *served.device.before_slow.get().unwrap();
    assert!(before < 200, "{before} requests began before its end");
}
