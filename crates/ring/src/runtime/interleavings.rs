//! Executors that other threads wake, in every possible interleaving. Each has a real kernel ring; only the wait for it
//! is loom's.

use super::join_error::JoinError;
use super::remote::Handle;
use super::{Config, Executor, oneshot, spawn};
use isobath_sync::{Cell, Mutex, explore, wait};
use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

fn executor() -> Executor {
    Executor::new(&Config { entries: 2, batch: 1, ..Config::default() }).unwrap()
}

/// A value for another thread, and the data that it protects.
struct Sent<T> {
    sender: Mutex<Option<oneshot::Sender<T>>>,
    receiver: Mutex<Option<oneshot::Receiver<T>>>,
    data: Cell<u8>,
}

fn sent<T>() -> Sent<T> {
    let (sender, receiver) = oneshot::channel();
    Sent {
        sender: Mutex::new(Some(sender)),
        receiver: Mutex::new(Some(receiver)),
        data: Cell::new(0),
    }
}

impl<T> Sent<T> {
    fn send(&self, value: T) {
        self.data.set(1);
        self.sender.lock().take().unwrap().send(value);
    }

    async fn receive(&self) -> Option<T> {
        let mut receiver = self.receiver.lock().take().unwrap();
        let value = poll_fn(|context| receiver.poll(context)).await;
        assert_eq!(self.data.get(), 1);
        value
    }
}

#[test]
fn a_value_arrives_with_what_was_written_before_it() {
    let tasks: &[fn(&Sent<u8>)] =
        &[|sent| assert_eq!(wait(sent.receive()), Some(7)), |sent| sent.send(7)];
    explore("oneshot, a value", 5, sent, tasks, |_| ());
}

#[test]
fn a_sender_that_is_dropped_ends_the_wait() {
    let tasks: &[fn(&Sent<u8>)] = &[
        |sent| assert_eq!(wait(sent.receive()), None),
        |sent| {
            sent.data.set(1);
            drop(sent.sender.lock().take());
        },
    ];
    explore("oneshot, a sender that is dropped", 5, sent, tasks, |_| ());
}

#[test]
fn what_waits_in_an_executor_is_woken_by_another_thread() {
    let tasks: &[fn(&Sent<u8>)] =
        &[|sent| sent.send(7), |sent| assert_eq!(executor().block_on(sent.receive()), Some(7))];
    explore("Executor, a wake-up of its future", 3, sent, tasks, |_| ());
}

#[test]
fn a_task_is_woken_by_two_threads() {
    let two: fn() -> [Arc<Sent<u8>>; 2] = || [Arc::new(sent()), Arc::new(sent())];
    let tasks: &[fn(&[Arc<Sent<u8>>; 2])] = &[
        |both| both[0].send(7),
        |both| both[1].send(8),
        |both| {
            let both = both.clone();
            let task = async move { (both[0].receive().await, both[1].receive().await) };
            let received = executor().block_on(async { spawn(task).await });
            assert_eq!(received.unwrap(), (Some(7), Some(8)));
        },
    ];
    explore("Executor, a task woken by two threads", 2, two, tasks, |_| ());
}

/// An executor's handle, and the value that ends its future.
struct Served {
    handle: Sent<Handle>,
    end: Sent<u8>,
}

fn served() -> Served {
    Served { handle: sent(), end: sent() }
}

fn serve(served: &Served) {
    let executor = executor();
    served.handle.send(executor.handle());
    executor.block_on(served.end.receive());
}

#[test]
fn work_from_another_thread_is_done_and_its_result_comes_back() {
    let tasks: &[fn(&Served)] = &[
        |served| {
            let handle = wait(served.handle.receive()).unwrap();
            assert_eq!(wait(handle.spawn_with(|| async { 5 })).unwrap(), 5);
            served.end.send(0);
        },
        serve,
    ];
    explore("Executor, work from another thread", 3, served, tasks, |_| ());
}

#[test]
fn work_for_an_executor_that_ends_is_done_or_given_up() {
    let tasks: &[fn(&Served)] = &[
        |served| {
            let handle = wait(served.handle.receive()).unwrap();
            served.end.send(0);
            let result: Result<u8, JoinError> = wait(handle.spawn_with(|| async {
                poll_fn(|_| Poll::<()>::Pending).await;
                5
            }));
            assert!(!result.unwrap_err().is_panic());
        },
        serve,
    ];
    explore("Executor, work for one that ends", 3, served, tasks, |_| ());
}
