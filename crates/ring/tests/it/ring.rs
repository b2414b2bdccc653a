//! The executor: tasks, wake-ups, timers, threads, signals and sockets.

use isobath_buf::IoBuf;
use isobath_ring::net::{Access, Address, Listener, Stream, own_user};
use isobath_ring::{
    Config, Elapsed, Executor, Io, Readiness, Signals, Worker, others_wait, sleep, sleep_until,
    spawn, timeout, yield_now,
};
use isobath_testkit::descriptors;
use std::cell::{Cell, RefCell};
use std::future::{pending, poll_fn};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpStream};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::task::Poll;
use std::time::{Duration, Instant};

fn executor() -> Executor {
    Executor::new(&Config::default()).unwrap()
}

/// A ring so small that its queues are always full.
fn tiny() -> Executor {
    Executor::new(&Config { entries: 2, batch: 1, ..Config::default() }).unwrap()
}

/// A ring, whatever the environment says.
fn with_ring() -> Executor {
    Executor::new(&Config { io: Io::Ring, ..Config::default() }).unwrap()
}

fn pair() -> (Stream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Stream::from(OwnedFd::from(ours)), theirs)
}

#[test]
fn an_accepted_socket_has_room_for_a_large_reply() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let room = executor().block_on(async {
        let listener = Listener::bind_unix(&path).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        let accepted = listener.accept().await.unwrap();
        socket2::SockRef::from(&accepted).send_buffer_size().unwrap()
    });
    let most = std::fs::read_to_string("/proc/sys/net/core/wmem_max").unwrap();
    let most: usize = most.trim().parse().unwrap();
    // The kernel counts twice what was asked for.
    assert_eq!(room, 2 * most.min(1 << 20));
}

#[test]
fn descriptors_beyond_those_asked_for_are_not_lost_silently() {
    let (ours, theirs) = pair();
    let file = std::fs::File::open("/dev/null").unwrap();
    for (sent, most) in [(0, 3), (3, 3), (4, 3), (253, 3), (4, 4), (5, 4), (1, 1), (2, 1), (2, 0)] {
        let files = vec![file.as_fd(); sent];
        descriptors::send(&theirs, b"word", &files);
        let (arrival, buf) = executor().block_on(ours.recv_with_files(IoBuf::zeroed(9), most));
        let arrival = arrival.unwrap();
        assert_eq!(buf[..arrival.count], *b"word");
        assert_eq!((arrival.files.len(), arrival.lost), (sent.min(most), sent > most));
        for arrived in &arrival.files {
            let flags = rustix::io::fcntl_getfd(arrived).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
    }
}

#[test]
fn tasks_run_in_turn_and_give_results() {
    let log = Rc::new(RefCell::new(Vec::new()));
    executor().block_on(async {
        let tasks: Vec<_> = (0..3)
            .map(|id| {
                let log = log.clone();
                spawn(async move {
                    for step in 0..2 {
                        log.borrow_mut().push((step, id));
                        yield_now().await;
                    }
                    id * 10
                })
            })
            .collect();
        for (id, task) in tasks.into_iter().enumerate() {
            assert_eq!(task.await.unwrap(), id * 10);
        }
    });
    assert_eq!(*log.borrow(), [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
}

#[test]
fn a_task_learns_that_another_is_ready() {
    executor().block_on(async {
        let (ours, mut theirs) = pair();
        let other = spawn(async move { drop(ours.recv(IoBuf::zeroed(1)).await) });
        yield_now().await;
        // It waits now. This one is not woken by what happens to the other.
        let look = poll_fn(move |cx| {
            assert!(!others_wait(cx.waker()));
            cx.waker().wake_by_ref();
            assert!(!others_wait(cx.waker()), "it is this one itself");
            theirs.write_all(b"x").unwrap();
            while !others_wait(cx.waker()) {
                std::thread::yield_now();
            }
            Poll::Ready(())
        });
        spawn(look).await.unwrap();
        other.await.unwrap();
    });
    assert!(!others_wait(std::task::Waker::noop()));
}

#[test]
fn tasks_left_over_go_on_in_the_next_block_on_and_are_dropped_with_the_executor() {
    struct Count(Rc<Cell<u32>>);
    impl Drop for Count {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }
    let (steps, drops) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let executor = executor();
    let (counter, guard) = (steps.clone(), Count(drops.clone()));
    let task = executor.spawn(async move {
        let _guard = guard;
        loop {
            counter.set(counter.get() + 1);
            yield_now().await;
        }
    });
    executor.block_on(yield_now());
    let first = steps.get();
    executor.block_on(async {
        for _ in 0..5 {
            yield_now().await;
        }
    });
    assert!(steps.get() >= first + 4);
    assert_eq!(drops.get(), 0);
    assert!(!task.is_finished());
    drop(executor);
    assert_eq!(drops.get(), 1);
    assert!(task.is_finished());
}

#[test]
fn a_panic_ends_its_task_alone() {
    executor().block_on(async {
        let (stream, mut peer) = pair();
        let failing = spawn(async move {
            let received = spawn(async move { stream.recv(IoBuf::zeroed(8)).await });
            yield_now().await;
            drop(received);
            panic!("on purpose");
        });
        let error = failing.await.unwrap_err();
        assert!(error.is_panic());
        assert_eq!(error.to_string(), "the task panicked: on purpose");
        peer.write_all(b"on").unwrap();
        assert_eq!(spawn(async { 5 }).await.unwrap(), 5);
    });
    let unwound = std::panic::catch_unwind(|| {
        executor().block_on(async {
            let (stream, _peer) = pair();
            let _waiting = spawn(async move { stream.recv(IoBuf::zeroed(8)).await.0.is_ok() });
            yield_now().await;
            panic!("of the main future");
        })
    });
    assert!(unwound.is_err());
    assert_eq!(executor().block_on(async { 1 }), 1, "the thread can have another executor");
}

#[test]
fn an_aborted_task_drops_its_future() {
    executor().block_on(async {
        let (stream, mut peer) = pair();
        let task = spawn(async move { stream.recv(IoBuf::zeroed(8)).await.0.is_ok() });
        yield_now().await;
        task.abort();
        assert!(!task.await.unwrap_err().is_panic());
        // The stream went with the future once the receive was cancelled: the peer reads its end.
        peer.set_read_timeout(Some(Duration::from_mins(1))).unwrap();
        sleep(Duration::from_millis(1)).await;
        assert_eq!(peer.read(&mut [0]).unwrap(), 0);
    });
}

#[test]
fn timers_end_in_order_and_can_be_dropped() {
    executor().block_on(async {
        // The order is that of the deadlines if each timer waits before the first has ended.
        let order = loop {
            let order = Rc::new(RefCell::new(Vec::new()));
            let begun = Instant::now();
            let tasks = [30, 10, 20].map(|time| {
                let order = order.clone();
                spawn(async move {
                    sleep_until(begun + Duration::from_millis(time)).await;
                    order.borrow_mut().push(time);
                })
            });
            yield_now().await;
            let all_wait = begun.elapsed() < Duration::from_millis(10);
            for task in tasks {
                task.await.unwrap();
            }
            if all_wait {
                break order.take();
            }
        };
        assert_eq!(order, [10, 20, 30]);
        let start = Instant::now();
        drop(sleep(Duration::from_hours(1)));
        assert_eq!(timeout(Duration::from_millis(5), pending::<()>()).await, Err(Elapsed));
        assert!(start.elapsed() >= Duration::from_millis(5));
        assert_eq!(timeout(Duration::MAX, async { 3 }).await, Ok(3));
    });
}

#[test]
fn threads_wake_each_other() {
    let worker = Worker::start("peer", &Config::default()).unwrap();
    executor().block_on(async {
        // Values travel between two threads; each step is a wake-up across threads.
        let counter = Arc::new(AtomicUsize::new(0));
        for round in 0..200 {
            let counter = counter.clone();
            let value = worker.handle().spawn_with(move || async move {
                let local = Rc::new(counter);
                yield_now().await;
                local.fetch_add(1, Ordering::Relaxed)
            });
            assert_eq!(value.await.unwrap(), round);
        }
        let here = isobath_ring::handle();
        let back = worker.handle().spawn_with(move || async move {
            here.spawn_with(|| async { std::thread::current().id() }).await.unwrap()
        });
        assert_eq!(back.await.unwrap(), std::thread::current().id());
        let failed = worker.handle().spawn_with(|| async { panic!("over there") });
        assert!(failed.await.unwrap_err().is_panic());
    });
}

#[test]
fn wakers_work_from_threads_without_a_ring_and_after_the_end() {
    let executor = executor();
    let (sender, receiver) = std::sync::mpsc::channel();
    let other = std::thread::spawn(move || {
        let mut wakers = Vec::new();
        while let Ok((waker, flag)) = receiver.recv() {
            let (waker, flag): (std::task::Waker, Arc<AtomicUsize>) = (waker, flag);
            flag.store(1, Ordering::Release);
            waker.wake_by_ref();
            wakers.push(waker);
        }
        wakers
    });
    let kept = sender.clone();
    executor.block_on(async {
        for _ in 0..300 {
            let flag = Arc::new(AtomicUsize::new(0));
            let mut sent = false;
            let sender = sender.clone();
            spawn(poll_fn(move |context| {
                if flag.load(Ordering::Acquire) == 1 {
                    return Poll::Ready(());
                }
                if !std::mem::replace(&mut sent, true) {
                    sender.send((context.waker().clone(), flag.clone())).unwrap();
                }
                Poll::Pending
            }))
            .await
            .unwrap();
        }
    });
    let waiting = executor.spawn(poll_fn(move |context| {
        kept.send((context.waker().clone(), Arc::default())).unwrap();
        Poll::<()>::Pending
    }));
    executor.block_on(yield_now());
    drop((executor, sender));
    assert!(waiting.is_finished());
    for waker in other.join().unwrap() {
        waker.wake();
    }
}

#[test]
fn a_handle_outlives_its_executor() {
    let worker = Worker::start("short", &Config::default()).unwrap();
    let handle = worker.handle().clone();
    let forever = handle.spawn_with(pending::<()>);
    drop(worker);
    assert!(!forever.wait().unwrap_err().is_panic());
    assert!(!handle.spawn_with(|| async { 1 }).wait().unwrap_err().is_panic());
}

#[test]
fn nested_executors_are_refused() {
    let outer = executor();
    let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        outer.block_on(async { executor().block_on(async {}) });
    }));
    assert!(unwound.is_err());
}

#[test]
fn signals_arrive() {
    executor().block_on(async {
        let mut signals = Signals::new(&[libc::SIGUSR1, libc::SIGUSR2]).unwrap();
        assert_eq!(Signals::new(&[libc::SIGHUP]).err().unwrap().raw_os_error(), Some(libc::EBUSY));
        let waiting = timeout(Duration::from_millis(1), signals.recv()).await;
        assert!(waiting.is_err());
        let send = |signal| {
            // SAFETY: the signal is caught.
            assert_eq!(unsafe { libc::kill(libc::getpid(), signal) }, 0);
        };
        let task = spawn(async move {
            let first = signals.recv().await.unwrap();
            // The kernel may deliver two that are pending in another order.
            send(libc::SIGUSR1);
            [first, signals.recv().await.unwrap()]
        });
        yield_now().await;
        send(libc::SIGUSR2);
        assert_eq!(task.await.unwrap(), [libc::SIGUSR2, libc::SIGUSR1]);
        assert!(Signals::new(&[libc::SIGKILL]).is_err());
        drop(Signals::new(&[libc::SIGUSR1]).unwrap());
    });
}

/// The result of a future that need not wait.
async fn at_once<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(output),
        Poll::Pending => panic!("it waits"),
    })
    .await
}

#[test]
fn what_need_not_wait_is_sent_and_received_at_once() {
    let (stream, mut theirs) = pair();
    with_ring().block_on(async {
        theirs.write_all(b"word").unwrap();
        let (received, buf) = at_once(stream.recv(IoBuf::zeroed(9))).await;
        assert_eq!((received.unwrap(), &buf[..4]), (4, &b"word"[..]));
        at_once(stream.send_all(IoBuf::copy_of(b"a"))).await.0.unwrap();
        let parts = vec![IoBuf::copy_of(b"b"), IoBuf::empty(), IoBuf::copy_of(b"cd")];
        let (sent, parts) = at_once(stream.send_vectored(parts)).await;
        sent.unwrap();
        assert_eq!(parts.len(), 3);
        let mut back = [0; 4];
        theirs.read_exact(&mut back).unwrap();
        assert_eq!(back, *b"abcd");
        drop(theirs);
        assert_eq!(at_once(stream.recv(IoBuf::zeroed(9))).await.0.unwrap(), 0);
        let gone = at_once(stream.send_all(IoBuf::copy_of(b"e"))).await.0.unwrap_err();
        assert_eq!(gone.raw_os_error(), Some(libc::EPIPE));
    });
}

#[test]
fn whatever_attempts_were_in_vain_all_arrives() {
    let (stream, mut theirs) = pair();
    with_ring().block_on(async {
        for round in 0..200_u8 {
            let receiver = stream.clone();
            let received = spawn(async move { receiver.recv(IoBuf::zeroed(9)).await });
            // Now it waits, most of the time.
            if round % 7 > 0 {
                yield_now().await;
            }
            theirs.write_all(&[round]).unwrap();
            let (count, buf) = received.await.unwrap();
            assert_eq!((count.unwrap(), buf[0]), (1, round));
        }
    });
}

#[test]
fn a_task_that_never_has_to_wait_leaves_others_their_turn() {
    let (ours, theirs) = pair();
    let theirs = Stream::from(OwnedFd::from(theirs));
    with_ring().block_on(async {
        let turns = Rc::new(Cell::new(0));
        let taken = turns.clone();
        let other = spawn(async move {
            loop {
                taken.set(taken.get() + 1);
                yield_now().await;
            }
        });
        let mut buf = IoBuf::zeroed(1);
        for _ in 0..10_000 {
            let (sent, back) = ours.send_all(buf).await;
            sent.unwrap();
            let (received, back) = theirs.recv(back).await;
            assert_eq!(received.unwrap(), 1);
            buf = back;
        }
        assert!(turns.get() > 10, "{} turns", turns.get());
        other.abort();
    });
}

#[test]
fn a_task_that_always_receives_with_files_leaves_others_their_turn() {
    let (ours, mut theirs) = pair();
    with_ring().block_on(async {
        let turns = Rc::new(Cell::new(0));
        let taken = turns.clone();
        let other = spawn(async move {
            loop {
                taken.set(taken.get() + 1);
                yield_now().await;
            }
        });
        let mut buf = IoBuf::zeroed(1);
        for _ in 0..10_000 {
            theirs.write_all(b" ").unwrap();
            let (received, back) = ours.recv_with_files(buf, 1).await;
            assert_eq!(received.unwrap().count, 1);
            buf = back;
        }
        assert!(turns.get() > 10, "{} turns", turns.get());
        other.abort();
    });
}

#[test]
fn what_was_begun_before_a_receive_at_once_reaches_the_kernel_first() {
    let (sender, mut taker) = pair();
    let (receiver, mut giver) = pair();
    taker.set_nonblocking(true).unwrap();
    giver.write_all(b"word").unwrap();
    with_ring().block_on(async {
        // More than is sent at once, so that the ring has it.
        let mut sending = Box::pin(sender.send_all(IoBuf::zeroed(300 << 10)));
        let arrived = poll_fn(|context| {
            assert!(sending.as_mut().poll(context).is_pending());
            let receiving = pin!(receiver.recv(IoBuf::zeroed(9)));
            assert!(receiving.poll(context).is_ready());
            Poll::Ready(taker.read(&mut [0; 9]))
        })
        .await;
        assert_eq!(arrived.unwrap(), 9);
        drop(taker);
    });
}

/// Sends back what arrives until the peer ends its side.
async fn echo(stream: Stream) -> u64 {
    let mut total = 0;
    let mut buf = IoBuf::zeroed(60_000);
    loop {
        let (received, mut back) = stream.recv(buf).await;
        let count = received.unwrap();
        if count == 0 {
            return total;
        }
        total += count as u64;
        let (sent, first) = stream.send_all(back.split_to(count)).await;
        sent.unwrap();
        buf = first;
        buf.unsplit(back);
    }
}

async fn echo_clients(executor_of: &str, listener: Rc<Listener>, clients: u8) {
    let server = listener.clone();
    let server = spawn(async move {
        let mut tasks = Vec::new();
        for _ in 0..clients {
            tasks.push(spawn(echo(server.accept().await.unwrap())));
        }
        let mut total = 0;
        for task in tasks {
            total += task.await.unwrap();
        }
        total
    });
    let clients: Vec<_> = (0..clients)
        .map(|id| {
            let address = listener.address().clone();
            spawn(async move {
                let stream = match address {
                    Address::Unix(path) => Stream::connect_unix(&path).await.unwrap(),
                    Address::Tcp(address) => Stream::connect_tcp(address).await.unwrap(),
                };
                let sender = stream.clone();
                let sending = spawn(async move {
                    // More buffers, and more bytes, than one call takes.
                    let parts =
                        (0..2500_u32).map(|n| vec![id ^ n as u8; 1 + n as usize % 997].into());
                    let (result, parts) = sender.send_vectored(parts.collect()).await;
                    result.unwrap();
                    sender.send_all(IoBuf::copy_of(b"end")).await.0.unwrap();
                    sender.shutdown(Shutdown::Write).unwrap();
                    parts
                });
                let length: usize = (0..2500).map(|n| 1 + n % 997).sum();
                let (result, got) = stream.recv_exact(IoBuf::zeroed(length + 3)).await;
                result.unwrap();
                let sent: Vec<u8> =
                    sending.await.unwrap().iter().flat_map(|part| part.to_vec()).collect();
                assert!(got[..length] == sent[..] && &got[length..] == b"end");
                let (result, _) = stream.recv_exact(IoBuf::zeroed(1)).await;
                assert_eq!(result.unwrap_err().kind(), std::io::ErrorKind::UnexpectedEof);
                got.len() as u64
            })
        })
        .collect();
    let mut total = 0;
    for client in clients {
        total += client.await.unwrap();
    }
    assert_eq!(server.await.unwrap(), total, "{executor_of}");
}

#[test]
fn sockets_echo() {
    let directory = tempfile::tempdir().unwrap();
    for (name, executor) in [("default", executor()), ("tiny", tiny())] {
        executor.block_on(async {
            let path = directory.path().join("socket");
            let unix = Rc::new(Listener::bind_unix(&path).unwrap());
            echo_clients(name, unix.clone(), 4).await;
            drop(unix);
            assert!(!path.exists());
            let tcp = Listener::bind_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
            echo_clients(name, Rc::new(tcp), 2).await;
        });
    }
}

#[test]
fn a_socket_file_left_over_is_replaced_and_other_files_are_not() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let listener = Listener::bind_unix(&path).unwrap();
    let taken = Listener::bind_unix(&path).unwrap_err();
    assert_eq!(taken.kind(), std::io::ErrorKind::AddrInUse);
    drop(listener);
    std::fs::write(&path, "precious").unwrap();
    assert!(Listener::bind_unix(&path).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
}

#[test]
fn of_servers_that_start_at_once_where_a_socket_was_left_one_listens() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    for _ in 0..100 {
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let start = Barrier::new(4);
        let bound: Vec<_> = std::thread::scope(|scope| {
            let bind = || {
                start.wait();
                Listener::bind_unix(&path)
            };
            let servers = [(); 4].map(|()| scope.spawn(bind));
            servers.map(|server| server.join().unwrap()).into_iter().collect()
        });
        UnixStream::connect(&path).unwrap();
        assert_eq!(bound.iter().filter(|bound| bound.is_ok()).count(), 1, "{bound:?}");
    }
}

#[test]
fn a_socket_file_has_the_permissions_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let mode = || path.metadata().unwrap().permissions().mode() & 0o7777;
    let own = Listener::bind_unix(&path).unwrap();
    assert_eq!(mode(), 0o600);
    drop(own);
    let group = directory.path().metadata().unwrap().gid();
    for access in [0o666, 0o660, 0o400].map(|mode| Access { mode, group: Some(group) }) {
        let _listener = Listener::bind_unix_for(&path, access).unwrap();
        assert_eq!((mode(), path.metadata().unwrap().gid()), (access.mode, group));
    }
    assert!(!path.exists());
}

#[test]
fn a_peer_that_shuts_down_its_side_only_has_not_hung_up() {
    for io in [Io::Any, Io::Threads] {
        let executor = Executor::new(&Config { io, ..Config::default() }).unwrap();
        executor.block_on(async {
            let (stream, mut peer) = pair();
            peer.write_all(b"left").unwrap();
            let watched = stream.clone();
            let ended = spawn(async move { watched.sends_no_more().await });
            for _ in 0..10 {
                yield_now().await;
            }
            assert!(!ended.is_finished());
            peer.shutdown(Shutdown::Write).unwrap();
            ended.await.unwrap().unwrap();
            assert_eq!(stream.recv(IoBuf::zeroed(8)).await.0.unwrap(), 4);
            assert_goes_on(&stream, || drop(peer)).await;

            let listener = Listener::bind_tcp((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
            let Address::Tcp(address) = listener.address() else { panic!("it is one") };
            let peer = TcpStream::connect(address).unwrap();
            let stream = listener.accept().await.unwrap();
            peer.shutdown(Shutdown::Write).unwrap();
            // It resets the connection, since it has not received everything.
            assert_goes_on(&stream, || drop(peer)).await;
        });
    }
}

/// Checks that a connection whose peer has shut down its side hangs up when it is closed, and not before.
async fn assert_goes_on(stream: &Stream, close: impl FnOnce()) {
    assert_eq!(stream.recv(IoBuf::zeroed(4)).await.0.unwrap(), 0);
    let watched = stream.clone();
    let hung_up = spawn(async move { watched.hung_up().await });
    for _ in 0..10 {
        yield_now().await;
    }
    assert!(!hung_up.is_finished());
    stream.send_all(IoBuf::copy_of(b"more")).await.0.unwrap();
    close();
    hung_up.await.unwrap().unwrap();
}

#[test]
fn a_client_of_a_socket_file_has_a_user() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    executor().block_on(async {
        let listener = Listener::bind_unix(&path).unwrap();
        let (accepted, connected) =
            futures_pair(listener.accept(), Stream::connect_unix(&path)).await;
        assert_eq!(accepted.unwrap().peer_user().unwrap(), Some(own_user()));
        let tcp = Listener::bind_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        let Address::Tcp(address) = *tcp.address() else { unreachable!() };
        let (accepted, other) = futures_pair(tcp.accept(), Stream::connect_tcp(address)).await;
        assert_eq!(accepted.unwrap().peer_user().unwrap(), None);
        drop((connected, other));
    });
}

#[test]
fn dropped_waits_are_cancelled() {
    for executor in [executor(), tiny()] {
        executor.block_on(async {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("socket");
            let listener = Listener::bind_unix(&path).unwrap();
            for _ in 0..20 {
                assert!(timeout(Duration::from_micros(100), listener.accept()).await.is_err());
            }
            let (accepted, connected) =
                futures_pair(listener.accept(), Stream::connect_unix(&path)).await;
            let (stream, peer) = (accepted.unwrap(), connected.unwrap());

            // A receive dropped in flight gives its memory back once the kernel is done with it.
            let memory = Arc::new(());
            for _ in 0..50 {
                let mut bytes = vec![0_u8; 64].into_boxed_slice();
                let start = std::ptr::NonNull::new(bytes.as_mut_ptr()).unwrap();
                let owner = Arc::new((std::sync::Mutex::new(bytes), memory.clone()));
                // SAFETY: the box lives in the owner and nobody else touches it.
                let buf = unsafe { IoBuf::from_owner(start, 64, owner) };
                assert!(timeout(Duration::ZERO, stream.recv(buf)).await.is_err());
            }
            while Arc::strong_count(&memory) > 1 {
                yield_now().await;
            }

            // A sender whose peer does not read can be dropped as well.
            let big = IoBuf::zeroed(16 << 20);
            assert!(timeout(Duration::from_millis(1), peer.send_all(big)).await.is_err());
        });
    }
}

async fn futures_pair<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (mut a, mut b) = (std::pin::pin!(a), std::pin::pin!(b));
    let (mut first, mut second) = (None, None);
    poll_fn(move |context| {
        if first.is_none()
            && let Poll::Ready(value) = a.as_mut().poll(context)
        {
            first = Some(value);
        }
        if second.is_none()
            && let Poll::Ready(value) = b.as_mut().poll(context)
        {
            second = Some(value);
        }
        if first.is_some() && second.is_some() {
            return Poll::Ready((first.take().unwrap(), second.take().unwrap()));
        }
        Poll::Pending
    })
    .await
}

#[test]
fn a_sent_error_is_an_error_and_no_signal() {
    executor().block_on(async {
        let (stream, peer) = pair();
        drop(peer);
        let (result, back) = stream.send_all(IoBuf::copy_of(b"anyone?")).await;
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EPIPE));
        assert_eq!(&*back, b"anyone?");
    });
}

#[test]
fn more_operations_than_the_queues_hold_all_complete() {
    for executor in [executor(), tiny()] {
        executor.block_on(async {
            // Waits that all end at once, when the one event that they wait for happens.
            // SAFETY: a plain system call; the descriptor is new.
            let event = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC)) };
            let event = Readiness::from(event);
            let tasks: Vec<_> = (0..12_000)
                .map(|_| {
                    let event = event.clone();
                    spawn(async move { event.ready(libc::POLLIN).await.unwrap() })
                })
                .collect();
            yield_now().await;
            yield_now().await;
            // SAFETY: eight bytes of a live value.
            let written = unsafe { libc::write(event.number(), (&raw const ONE).cast(), 8) };
            assert_eq!(written, 8);
            for task in tasks {
                assert_eq!(task.await.unwrap(), libc::POLLIN);
            }
        });
    }
}

static ONE: u64 = 1;
