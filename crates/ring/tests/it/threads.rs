//! What an executor without a ring does of its own.

use isobath_buf::IoBuf;
use isobath_ring::net::{Listener, Stream};
use isobath_ring::{Config, Executor, Io, Lease, current, ops, spawn, yield_now};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::fs::File;
use std::future::poll_fn;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

fn executor() -> Executor {
    Executor::new(&Config { io: Io::Threads, ..Config::default() }).unwrap()
}

fn pair() -> (Stream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Stream::from(OwnedFd::from(ours)), theirs)
}

/// Polls a future once; it must wait.
async fn begin<F: Future>(future: std::pin::Pin<&mut F>) {
    let mut future = future;
    poll_fn(|context| {
        assert!(future.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
}

/// A file to operate on, with what operations in flight hold.
fn temporary() -> (Arc<OwnedFd>, Lease) {
    let file: Arc<OwnedFd> = Arc::new(tempfile::tempfile().unwrap().into());
    let lease: Lease = file.clone();
    (file, lease)
}

#[test]
fn a_socket_that_is_idle_keeps_no_thread() {
    executor().block_on(async {
        // More than there are threads.
        let (mut tasks, mut peers) = (Vec::new(), Vec::new());
        for _ in 0..100 {
            let (stream, peer) = pair();
            tasks.push(spawn(async move { stream.recv(IoBuf::zeroed(4)).await.0.unwrap() }));
            peers.push(peer);
        }
        yield_now().await;
        let (file, lease) = temporary();
        let local = current().unwrap();
        let (written, _) = ops::write(&local, &file, &lease, 0, IoBuf::copy_of(&[7; 512]), 0).await;
        assert_eq!(written.unwrap(), 512);
        ops::fdatasync(&local, &file).await.unwrap();
        for peer in &mut peers {
            peer.write_all(b"here").unwrap();
        }
        for task in tasks {
            assert_eq!(task.await.unwrap(), 4);
        }
    });
}

#[test]
fn a_write_that_nobody_waits_for_is_carried_out_before_block_on_ends() {
    let (file, lease) = temporary();
    let executor = executor();
    executor.block_on(async {
        let local = current().unwrap();
        for block in 0..64 {
            let buf = IoBuf::copy_of(&[block as u8; 512]);
            let mut write = pin!(ops::write(&local, &file, &lease, block * 512, buf, 0));
            begin(write.as_mut()).await;
        }
    });
    assert_eq!(Arc::strong_count(&file), 2, "an operation still holds the file");
    let mut found = Vec::new();
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::open(path).unwrap().read_to_end(&mut found).unwrap();
    let expected: Vec<u8> = (0..64 * 512).map(|at| (at / 512) as u8).collect();
    assert!(found == expected);
}

#[test]
fn an_executor_leaves_nothing_in_flight_behind() {
    let (file, lease) = temporary();
    let executor = executor();
    executor.block_on(async {
        let local = current().unwrap();
        let tasks: Vec<_> = (0..200)
            .map(|at| {
                let (local, file, lease) = (local.clone(), file.clone(), lease.clone());
                spawn(async move {
                    let buf = IoBuf::zeroed(4096);
                    ops::write(&local, &file, &lease, at * 4096, buf, 0).await.0.unwrap()
                })
            })
            .collect();
        for task in tasks {
            assert_eq!(task.await.unwrap(), 4096);
        }
    });
    drop(executor);
    assert_eq!(Arc::strong_count(&file), 2);
}

#[test]
fn a_number_that_another_file_gets_is_watched_anew() {
    executor().block_on(async {
        let mut copies = Vec::new();
        for round in 0..50_u8 {
            // Each round uses the numbers of the one before, whose receive was given up.
            let (stream, mut peer) = pair();
            {
                let mut hung_up = pin!(stream.hung_up());
                begin(hung_up.as_mut()).await;
                yield_now().await;
                // The socket that had the number before has hung up. Who still watched it would take that for this
                // one's.
                begin(hung_up).await;
            }
            begin(pin!(stream.recv(IoBuf::zeroed(1)))).await;
            let other = stream.clone();
            let received = spawn(async move { other.recv(IoBuf::zeroed(1)).await });
            yield_now().await;
            peer.write_all(&[round]).unwrap();
            let (result, buf) = received.await.unwrap();
            assert_eq!((result.unwrap(), buf[0]), (1, round));
            begin(pin!(stream.recv(IoBuf::zeroed(1)))).await;
            // A copy keeps the socket open, and epoll's watch of it unless that was removed.
            copies.push(stream.as_fd().try_clone_to_owned().unwrap());
            drop((stream, peer));
            yield_now().await;
        }
    });
}

/// Set for a process that runs out of descriptors.
const SHORT: &str = "ISOBATH_TEST_SHORT";

#[test]
fn who_is_out_of_descriptors_gets_an_error() {
    if std::env::var_os(SHORT).is_none() {
        // A process of its own: other tests need descriptors.
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "threads::who_is_out_of_descriptors_gets_an_error"]);
        let ended = child.env(SHORT, "1").output().unwrap();
        let text = String::from_utf8_lossy(&ended.stdout);
        assert!(ended.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let limit = Rlimit { current: Some(40), maximum: Some(40) };
    setrlimit(Resource::Nofile, limit).unwrap();
    for io in [Io::Any, Io::Threads] {
        let mut held: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
        let mut refused = 0;
        while let Err(error) = Executor::new(&Config { io, ..Config::default() }) {
            assert!(error.to_string().contains("Too many open files"), "{error}");
            refused += 1;
            drop(held.pop().expect("it is made once there are descriptors"));
        }
        assert!(refused > 1, "{refused}");
    }
}

#[test]
fn both_directions_of_a_socket_are_awaited_at_once() {
    executor().block_on(async {
        let (stream, mut peer) = pair();
        let sender = stream.clone();
        let length = 8 << 20;
        let sent = spawn(async move { sender.send_all(IoBuf::zeroed(length)).await.0 });
        let receiver = stream.clone();
        let received = spawn(async move { receiver.recv_exact(IoBuf::zeroed(3)).await });
        let watched = stream.clone();
        let hung_up = spawn(async move { watched.hung_up().await });
        for _ in 0..3 {
            yield_now().await;
        }
        peer.write_all(b"yes").unwrap();
        let (result, buf) = received.await.unwrap();
        result.unwrap();
        assert_eq!(&*buf, b"yes");
        let reading = std::thread::spawn(move || {
            let mut all = vec![0; length];
            peer.read_exact(&mut all).unwrap();
            peer
        });
        sent.await.unwrap().unwrap();
        assert!(!hung_up.is_finished());
        drop(reading.join().unwrap());
        hung_up.await.unwrap().unwrap();
    });
}

#[test]
fn more_connect_than_a_listener_has_room_for_and_all_are_served() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    executor().block_on(async {
        let listener = Rc::new(Listener::bind_unix(&path).unwrap());
        // SAFETY: a plain system call on a socket that listens already: only its room changes.
        let narrowed = unsafe { libc::listen(listener.as_fd().as_raw_fd(), 1) };
        assert_eq!(narrowed, 0);
        let clients: Vec<_> = (0..10)
            .map(|_| {
                let path = path.clone();
                spawn(async move {
                    let stream = Stream::connect_unix(&path).await.unwrap();
                    stream.recv_exact(IoBuf::zeroed(1)).await.0.unwrap();
                })
            })
            .collect();
        for _ in 0..5 {
            yield_now().await;
        }
        for _ in 0..10 {
            let stream = listener.accept().await.unwrap();
            stream.send_all(IoBuf::copy_of(b"x")).await.0.unwrap();
        }
        for client in clients {
            client.await.unwrap();
        }
    });
}

#[test]
fn a_connection_that_is_refused_is_an_error() {
    executor().block_on(async {
        // As long as it is held, no other program gets the port at another of this host's addresses by chance.
        let held = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = ([127, 0, 0, 2], held.local_addr().unwrap().port()).into();
        let error = Stream::connect_tcp(address).await.unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    });
}
