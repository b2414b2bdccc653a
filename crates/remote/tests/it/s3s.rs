//! Chains on s3s-fs, a server of S3 that is not ours, in this process.
//!
//! Signatures, conditions, ranges, uploads in parts and lists are its own. But it looks at a condition first and writes
//! later, so that two requests may both find theirs met, and it gives an object its new tag after its new bytes. Here a
//! request that changes something is therefore alone, and ends even if its client goes away.

use crate::proxy::{Proxy, Upstream};
use crate::servers;
use hyper::Method;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use isobath_remote::store::{Outcome, Store, Version};
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use s3s::{Body, HttpError, HttpResponse};
use s3s_fs::FileSystem;
use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use tempfile::TempDir;
use tokio::net::UnixListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::RwLock;

/// The server, on a socket of its directory, and the port through which it is reached, also when it was started again.
struct Server {
    proxy: Proxy,
    running: RefCell<Option<Runtime>>,
    changes: Arc<RwLock<()>>,
    directory: TempDir,
}

impl Server {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir_all(directory.path().join("data/bucket")).unwrap();
        let changes = Arc::default();
        let running = RefCell::new(Some(run(directory.path(), &changes)));
        let proxy = Proxy::start(Upstream::Unix(directory.path().join("socket")));
        Self { proxy, running, changes, directory }
    }

    /// Ends it between two changes: what was asked may be done without an answer.
    fn restart(&self) {
        let between = self.changes.blocking_write();
        drop(self.running.take());
        drop(between);
        *self.running.borrow_mut() = Some(run(self.directory.path(), &self.changes));
    }
}

fn run(directory: &Path, changes: &Arc<RwLock<()>>) -> Runtime {
    let mut builder = S3ServiceBuilder::new(FileSystem::new(directory.join("data")).unwrap());
    builder.set_auth(SimpleAuth::from_single("key", "secret"));
    let (service, changes) = (builder.build(), Arc::clone(changes));
    let socket = directory.join("socket");
    // The one before leaves it.
    let _ = fs::remove_file(&socket);
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let listener = {
        let _inside = runtime.enter();
        UnixListener::bind(&socket).unwrap()
    };
    runtime.spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (service, changes) = (service.clone(), Arc::clone(&changes));
            let serve = service_fn(move |request| {
                let (service, changes) = (service.clone(), Arc::clone(&changes));
                async { tokio::spawn(answer(service, changes, request)).await.unwrap() }
            });
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), serve));
        }
    });
    runtime
}

async fn answer(
    service: S3Service,
    changes: Arc<RwLock<()>>,
    request: hyper::Request<Incoming>,
) -> Result<HttpResponse, HttpError> {
    let is_part = request.uri().query().is_some_and(|query| query.contains("partNumber="));
    if is_part || [Method::GET, Method::HEAD].contains(request.method()) {
        let _together = changes.read().await;
        service.call(request.map(Body::from)).await
    } else {
        let _alone = changes.write().await;
        service.call(request.map(Body::from)).await
    }
}

#[test]
fn chains_are_pushed_listed_verified_pulled_removed_and_collected() {
    servers::chains_live(&Server::start().proxy);
}

#[test]
fn ranges_of_objects_are_read_and_what_is_missing_is_called_missing() {
    servers::ranges_are_read(&Server::start().proxy);
}

#[test]
fn a_list_of_many_pages_is_whole() {
    let server = Server::start();
    let store = servers::open(&server.proxy);
    let directory = server.directory.path().join("data/bucket/some/prefix/layers");
    fs::create_dir_all(&directory).unwrap();
    // A page has 1000.
    let keys: Vec<String> = (0..2500).map(|number| format!("layers/{number:04}")).collect();
    for key in &keys {
        fs::write(directory.join(&key["layers/".len()..]), key).unwrap();
    }
    for near in ["layer", "layers0", "heads/0000"] {
        store.put(near, b"").unwrap();
    }
    let listed = store.list("layers/").unwrap();
    assert!(listed.iter().all(|entry| entry.found.length == 11));
    let mut listed: Vec<String> = listed.into_iter().map(|entry| entry.key).collect();
    listed.sort();
    assert!(listed == keys, "{} keys", listed.len());
    assert_eq!(store.list("").unwrap().len(), 2503);
}

#[test]
fn conditional_puts_keep_their_conditions() {
    servers::conditions_are_kept(&Server::start().proxy);
}

#[test]
fn of_many_conditional_puts_at_once_one_is_done() {
    let server = Server::start();
    let store = servers::open(&server.proxy);
    let put = |was: Option<&Version>, round: u8| {
        let done = thread::scope(|scope| {
            let puts = [0, 1, 2, 3, 4, 5].map(|number| {
                let (store, bytes) = (&store, [round, number]);
                scope.spawn(move || {
                    let outcome = store.put_if("manifests/vm.json", &bytes, was).unwrap();
                    (outcome == Outcome::Done).then_some(bytes)
                })
            });
            puts.map(|put| put.join().unwrap())
        });
        let done: Vec<[u8; 2]> = done.into_iter().flatten().collect();
        let (bytes, version) = store.get("manifests/vm.json", 2).unwrap().unwrap();
        assert_eq!(done, [&bytes[..]], "round {round}");
        version
    };
    let mut version = put(None, 0);
    for round in 1..20 {
        version = put(Some(&version), round);
    }
}

#[test]
fn of_two_pushes_to_a_name_at_once_one_is_told_of_the_other_or_both_follow_each_other() {
    servers::pushes_meet(&Server::start().proxy);
}

#[test]
fn wrong_keys_are_refused_at_once_and_the_message_says_so() {
    servers::wrong_keys_are_refused(&Server::start().proxy);
}

#[test]
fn a_pull_goes_on_when_connections_end() {
    servers::pulls_outlive_connections(&Server::start().proxy);
}

#[test]
fn a_push_goes_on_when_the_server_ends_and_is_started_again() {
    let server = Server::start();
    servers::pushes_outlive_the_server(&server.proxy, &|| server.restart());
}

#[test]
fn a_push_that_was_interrupted_anywhere_is_pushed_again() {
    servers::interrupted_pushes_are_repeated(&Server::start().proxy);
}
