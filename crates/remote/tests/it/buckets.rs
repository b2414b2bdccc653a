//! An object store, and everything that goes wrong on the way to it.

use crate::chains::{Chain, fetch, gc, is_whole, send};
use crate::s3::{Fault, Server};
use crate::servers::{bucket, patient};
use isobath_remote::store::{Bucket, Limits, Outcome, Store};
use isobath_remote::{
    Collection, Error, Manifest, Progress, Replace, Trace, collect, list, may_push, push, remove,
    set_trace,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

const FAULTS: [Fault; 5] =
    [Fault::Status(429), Fault::Status(500), Fault::Reset, Fault::AnswerLost, Fault::Truncated];

fn open(server: &Server, limits: Limits) -> Bucket {
    open_with(server, limits, &Arc::default())
}

fn open_with(server: &Server, limits: Limits, progress: &Arc<Progress>) -> Bucket {
    bucket(&server.endpoint, "secret", limits, progress)
}

#[test]
fn a_chain_goes_through_an_object_store() {
    let (server, mut chain) = (Server::start(), Chain::new());
    let store = open(&server, patient());
    let pushed = send(&store, "vm", &chain).unwrap();
    assert_eq!((pushed.layers, pushed.sent), (3, 3));
    assert!(
        server.requests().iter().all(|request| !request.contains("list-type")),
        "no list for a push"
    );
    assert!(server.requests().iter().any(|request| request.contains("partNumber")));
    assert!(server.objects().keys().all(|key| key.starts_with("some/prefix/")));
    is_whole(&store, "vm");
    let directory = tempfile::tempdir().unwrap();
    server.fail([]);
    let pulled = fetch(&store, "vm", directory.path()).unwrap();
    assert!(
        server.requests().iter().all(|request| !request.contains("list-type")),
        "no list for a pull"
    );
    chain.is_part(directory.path(), true);
    chain.reads_as(&pulled.image);
    chain.grow("next.qcow2");
    assert_eq!(send(&store, "other", &chain).unwrap().sent, 1);
    assert_eq!(list(&store).unwrap().len(), 2);
    remove(&store, "other").unwrap();
    assert_eq!(gc(&store, Duration::ZERO, false).unwrap().objects, 4);
    is_whole(&store, "vm");
}

#[test]
fn a_request_that_fails_once_is_repeated_whichever_it_is() {
    let (server, chain) = (Server::start(), Chain::new());
    let store = open(&server, patient());
    for fault in FAULTS {
        for number in 0.. {
            server.set_objects(BTreeMap::default());
            server.fail([(number, fault)]);
            send(&store, "vm", &chain)
                .unwrap_or_else(|error| panic!("{fault:?} {number}: {error}"));
            let reached = server.requests().len() > number;
            is_whole(&store, "vm");
            if !reached {
                assert!(number > 15, "{number} requests");
                break;
            }
        }
    }
}

#[test]
fn a_pull_gets_what_was_pushed_whatever_one_answer_is() {
    let (server, chain) = (Server::start(), Chain::new());
    let store = open(&server, patient());
    send(&store, "vm", &chain).unwrap();
    for fault in FAULTS.into_iter().chain([Fault::WrongByte]) {
        for number in 0.. {
            let directory = tempfile::tempdir().unwrap();
            server.fail([(number, fault)]);
            match fetch(&store, "vm", directory.path()) {
                Ok(_) => chain.is_part(directory.path(), true),
                // A manifest or a table that differs is an error.
                Err(error) => {
                    assert_eq!(fault, Fault::WrongByte, "{number}: {error}");
                    chain.is_part(directory.path(), false);
                }
            }
            if server.requests().len() <= number {
                assert!(number > 8, "{number} requests");
                break;
            }
        }
    }
}

#[test]
fn a_wrong_byte_of_a_layer_is_fetched_again() {
    let (server, chain) = (Server::start(), Chain::new());
    let store = open(&server, patient());
    send(&store, "vm", &chain).unwrap();
    server.fail([]);
    let directory = tempfile::tempdir().unwrap();
    fetch(&store, "vm", directory.path()).unwrap();
    let layers = |request: &&String| request.starts_with("GET") && request.contains("/layers/");
    assert!(server.requests().iter().filter(layers).count() >= 5);
    // One at a time, the order of requests is the same: the last one is that of the top layer.
    let last = server.requests().iter().rposition(|request| layers(&request)).unwrap();
    server.fail([(last, Fault::WrongByte)]);
    let directory = tempfile::tempdir().unwrap();
    fetch(&store, "vm", directory.path()).unwrap();
    chain.is_part(directory.path(), true);
    assert_eq!(server.requests().iter().filter(layers).count(), 6);
}

#[test]
fn an_attempt_without_an_answer_ends_and_so_does_the_operation() {
    let (server, chain) = (Server::start(), Chain::small("disk.qcow2", 1));
    // Nothing on this machine takes that long by itself.
    let limits = Limits { attempt: Duration::from_secs(2), ..patient() };
    let store = open(&server, limits);
    for number in [0, 3, 6] {
        server.fail([(number, Fault::Silence)]);
        send(&store, "vm", &chain).unwrap();
        is_whole(&store, "vm");
        server.set_objects(BTreeMap::default());
    }
    let hurried = Limits {
        overall: Duration::from_millis(50),
        attempt: Duration::from_millis(20),
        ..patient()
    };
    let store = open(&server, hurried);
    server.fail((0..10_000).map(|number| (number, Fault::Silence)));
    let error = send(&store, "vm", &chain).unwrap_err().to_string();
    assert!(error.contains("given up") && error.contains("manifests/vm.json"), "{error}");
}

/// A store that is usually fast, of which no limit ends a request before the test's own time is over. So many reads are
/// the first after which one may be asked for a second time.
fn usually_fast(server: &Server) -> Bucket {
    let day = Duration::from_hours(24);
    let pause = Duration::from_millis(1);
    let store = open(server, Limits { attempt: day, pause, ..Limits::of_reads(day) });
    store.put("x", b"some bytes").unwrap();
    for _ in 0..10 {
        assert_eq!(store.read("x", 5, 5).unwrap(), b"bytes");
        assert_eq!(store.get("x", 100).unwrap().unwrap().0, b"some bytes");
    }
    store
}

#[test]
fn a_read_that_is_answered_far_later_than_others_is_asked_for_twice() {
    let server = Server::start();
    for fault in [Fault::Silence, Fault::Unanswered] {
        let store = usually_fast(&server);
        server.fail([(0, fault)]);
        assert_eq!(store.read("x", 0, 4).unwrap(), b"some");
        assert_eq!(server.requests().len(), 2);
        let store = usually_fast(&server);
        server.fail([(0, fault)]);
        assert_eq!(store.get("x", 100).unwrap().unwrap().0, b"some bytes");
        assert_eq!(server.requests().len(), 2);
    }
}

#[test]
fn where_the_second_request_fails_the_first_one_counts() {
    let server = Server::start();
    for fault in [Fault::Status(503), Fault::Reset] {
        let store = usually_fast(&server);
        server.fail([(0, Fault::Silence), (1, fault)]);
        std::thread::scope(|scope| {
            let read = scope.spawn(|| store.read("x", 0, 4));
            isobath_testkit::until("it is asked for twice", || {
                server.requests().len() == 2 && server.unanswered() == 1
            });
            server.hang_up();
            assert_eq!(read.join().unwrap().unwrap(), b"some");
        });
        assert_eq!(server.requests().len(), 3);
    }
}

#[test]
fn a_store_that_answers_drop_by_drop_does_not_keep_anybody_busy_for_ever() {
    let server = Server::start();
    let store = open(&server, patient());
    store.put("layers/a", &vec![1; 1 << 20]).unwrap();
    let second = Duration::from_secs(1);
    let store = open(&server, Limits { attempt: second, overall: second, ..patient() });
    server.fail((0..10_000).map(|number| (number, Fault::Drops)));
    let error = store.read("layers/a", 0, 1 << 20).unwrap_err().to_string();
    assert!(error.contains("given up"), "{error}");
    let error = store.get("layers/a", 1 << 20).unwrap_err().to_string();
    assert!(error.contains("given up"), "{error}");
    let error = store.list("layers/").unwrap_err().to_string();
    assert!(error.contains("given up"), "{error}");
}

#[test]
fn no_test_asks_a_proxy_of_the_environment() {
    let test = "buckets::a_store_without_conditional_puts_needs_the_word_of_the_user";
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test]);
    for variable in ["http_proxy", "HTTP_PROXY", "ALL_PROXY"] {
        // Nobody is there.
        command.env(variable, "http://127.0.0.1:1");
    }
    for variable in ["no_proxy", "NO_PROXY"] {
        command.env_remove(variable);
    }
    let text = isobath_testkit::process::run(&mut command).ok().text();
    assert!(text.contains("1 passed"), "{text}");
}

#[test]
fn a_conditional_put_is_settled_whatever_is_answered() {
    for fault in FAULTS.into_iter().chain([Fault::Status(409), Fault::Status(412)]) {
        let server = Server::start();
        let store = open(&server, patient());
        server.fail([(0, fault)]);
        assert_eq!(
            store.put_if("manifests/vm.json", b"one", None).unwrap(),
            Outcome::Done,
            "{fault:?}"
        );
        let (_, version) = store.get("manifests/vm.json", 100).unwrap().unwrap();
        server.fail([(0, fault)]);
        assert_eq!(
            store.put_if("manifests/vm.json", b"two", Some(&version)).unwrap(),
            Outcome::Done,
            "{fault:?}"
        );
        for contents in [&b"three"[..], b"3"] {
            server.fail([(0, fault)]);
            let put = store.put_if("manifests/vm.json", contents, Some(&version)).unwrap();
            assert_eq!(put, Outcome::Changed, "{fault:?}");
            assert_eq!(
                store.put_if("manifests/vm.json", contents, None).unwrap(),
                Outcome::Changed,
                "{fault:?}"
            );
        }
        assert_eq!(store.get("manifests/vm.json", 100).unwrap().unwrap().0, b"two");
    }
}

#[test]
fn a_store_without_conditional_puts_needs_the_word_of_the_user() {
    let (server, chain) = (Server::start(), Chain::small("disk.qcow2", 1));
    let store = open(&server, patient());
    may_push(&store, "vm", Replace::Unchanged).unwrap();
    server.refuse_conditions();
    let error = send(&store, "vm", &chain).unwrap_err().to_string();
    assert!(error.contains("--overwrite"), "{error}");
    assert!(!server.objects().contains_key("some/prefix/manifests/vm.json"));
    let before = server.objects();
    let same = may_push(&store, "vm", Replace::Unchanged).unwrap_err().to_string();
    assert_eq!(same, error);
    may_push(&store, "vm", Replace::Any).unwrap();
    assert!(server.objects() == before, "nothing is left of what was tried");
    push(&store, "vm", &chain.layers(), Some(&chain.index()), Replace::Any, &Progress::default())
        .unwrap();
    is_whole(&store, "vm");
    let error = gc(&store, Duration::ZERO, false).unwrap_err().to_string();
    assert!(error.contains("--break-lock"), "{error}");
    // A trace of the first block of the base.
    let manifest = || {
        let bytes = server.objects()["some/prefix/manifests/vm.json"].clone();
        Manifest::decode("vm", &bytes).unwrap()
    };
    let mut trace = [&b"ITRC"[..], &[0, 0, 0, 1], &[0, 0, 0, 1], &[0, 0, 0, 1]].concat();
    let digest = manifest().layers[0].digest.to_string();
    trace.extend((0..64).step_by(2).map(|at| u8::from_str_radix(&digest[at..at + 2], 16).unwrap()));
    trace.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
    let trace = Trace::decode(&trace).unwrap();
    let set = |replace| set_trace(&store, "vm", Some(&trace), replace, &Progress::default());
    let error = set(Replace::Unchanged).unwrap_err().to_string();
    assert!(error.contains("--overwrite") && manifest().trace.is_none(), "{error}");
    assert_eq!(set(Replace::Any).unwrap(), 1);
    assert!(manifest().trace.is_some());
    is_whole(&store, "vm");
}

#[test]
fn a_store_is_asked_whether_it_takes_a_push_without_leaving_anything_there() {
    let (server, chain) = (Server::start(), Chain::small("disk.qcow2", 1));
    let store = open(&server, patient());
    send(&store, "old", &chain).unwrap();
    let before = server.objects();
    for (name, replace) in
        [("new", Replace::Unchanged), ("old", Replace::Unchanged), ("old", Replace::Any)]
    {
        for number in 0.. {
            // What became of the request is unknown then, and stays so.
            server.fail([(number, Fault::AnswerLost), (number + 1, Fault::Status(403))]);
            let asked = may_push(&store, name, replace);
            assert!(server.objects() == before, "{name} {replace:?} {number}: {asked:?}");
            if server.requests().len() <= number {
                asked.unwrap();
                assert!(number > 3, "{number} requests");
                break;
            }
        }
    }
}

#[test]
fn what_is_refused_for_good_is_not_repeated() {
    let (server, chain) = (Server::start(), Chain::small("disk.qcow2", 1));
    let store = open(&server, patient());
    for status in [400, 401, 403] {
        server.fail((0..10_000).map(|number| (number, Fault::Status(status))));
        assert!(matches!(send(&store, "vm", &chain), Err(Error::Store(_))));
        assert_eq!(server.requests().len(), 1, "{status}");
    }
}

/// The error of an operation, if it has one.
type Operation<'a> = Box<dyn Fn() -> Option<Error> + 'a>;

#[test]
fn a_store_that_sends_requests_on_is_not_followed() {
    let (server, other) = (Server::start(), Server::start());
    let store = open(&server, patient());
    send(&store, "vm", &Chain::new()).unwrap();
    server.redirect_to(&other);
    let key = "manifests/vm.json";
    let operations: [(&str, Operation<'_>); 6] = [
        ("look", Box::new(|| store.head(key).err())),
        ("get", Box::new(|| store.get(key, 1 << 20).err())),
        ("read", Box::new(|| store.read(key, 0, 10).err())),
        ("put", Box::new(|| store.put(key, b"x").err())),
        ("list", Box::new(|| store.list("manifests/").err())),
        ("delete", Box::new(|| store.delete(key).err())),
    ];
    for (what, operation) in operations {
        server.fail([]);
        let error = operation().unwrap().to_string();
        assert!(error.contains("it redirects to 'http://127.0.0.1:"), "{what}: {error}");
        assert_eq!(server.requests().len(), 1, "{what} is not repeated");
    }
    assert_eq!(other.requests(), [""; 0]);
}

#[test]
fn a_push_that_is_cancelled_ends() {
    let (server, chain) = (Server::start(), Chain::small("disk.qcow2", 1));
    let progress = Arc::new(Progress::default());
    let store = open_with(&server, patient(), &progress);
    server.fail((3..10_000).map(|number| (number, Fault::Status(503))));
    std::thread::scope(|scope| {
        let pushing = scope.spawn(|| {
            push(&store, "vm", &chain.layers(), Some(&chain.index()), Replace::Unchanged, &progress)
        });
        isobath_testkit::until("a request fails", || server.requests().len() > 5);
        server.fail([]);
        progress.cancel();
        match pushing.join().unwrap() {
            Err(Error::Interrupted) => {
                assert!(!server.objects().contains_key("some/prefix/manifests/vm.json"));
            }
            pushed => drop(pushed.unwrap()),
        }
    });
    assert!(server.objects().keys().all(|key| !key.starts_with("some/prefix/pushes/")));
}

/// How a request without an answer ends after an interruption.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// By the limit for it.
    Hurried,
    /// The server closes the connection.
    HungUp,
}

/// Calls `work` with a store that does so with these requests, and interrupts it when one of them is without an answer.
fn interrupted<T: Send>(
    server: &Server,
    faults: &[(usize, Fault)],
    ends: Ends,
    work: impl FnOnce(&Bucket, &Progress) -> T + Send,
) -> T {
    let long = Duration::from_hours(24);
    let hurried = if ends == Ends::Hurried { Duration::from_millis(50) } else { long };
    let limits = Limits { overall: long, attempt: long, hurried, ..patient() };
    let progress = Arc::new(Progress::default());
    let store = open_with(server, limits, &progress);
    server.fail(faults.iter().copied());
    std::thread::scope(|scope| {
        let working = scope.spawn(|| work(&store, &progress));
        isobath_testkit::until("silence", || server.unanswered() > 0);
        progress.cancel();
        if ends == Ends::HungUp {
            server.hang_up();
        }
        working.join().unwrap()
    })
}

/// All requests from this one on.
fn silent(first: usize) -> impl Iterator<Item = (usize, Fault)> {
    (first..100).map(|number| (number, Fault::Silence))
}

#[test]
fn a_conditional_put_is_cut_short_by_an_interruption_and_says_what_it_has_done() {
    let put = |store: &Bucket, _: &Progress| store.put_if("gc.lock", b"text", None);
    let server = Server::start();
    // It was done, as the object shows.
    let done = interrupted(&server, &[(0, Fault::Unanswered)], Ends::HungUp, put);
    assert_eq!(done.unwrap(), Outcome::Done);
    // The object is that of another.
    let (key, other) = ("some/prefix/gc.lock".to_owned(), b"another".to_vec());
    server.set_objects(BTreeMap::from([(key, other)]));
    let done = interrupted(&server, &[(0, Fault::Unanswered)], Ends::HungUp, put);
    assert_eq!(done.unwrap(), Outcome::Changed);
    // The request may still be on its way; then the object cannot be read either.
    server.set_objects(BTreeMap::default());
    for faults in [vec![(0, Fault::Silence)], silent(0).collect()] {
        let done = interrupted(&server, &faults, Ends::Hurried, put);
        assert!(
            matches!(&done, Err(Error::Unsettled(text)) if text.contains("gc.lock")),
            "{done:?}"
        );
    }
    let progress = Arc::new(Progress::default());
    progress.cancel();
    server.fail([]);
    let store = open_with(&server, patient(), &progress);
    assert!(matches!(store.put_if("gc.lock", b"text", None), Err(Error::Interrupted)));
    assert!(server.requests().is_empty() && server.objects().is_empty());
}

#[test]
fn a_collection_that_is_interrupted_removes_its_lock_or_says_that_it_may_stay() {
    let collect = |store: &Bucket, progress: &Progress| {
        let how = Collection { grace: Duration::ZERO, dry_run: false, break_lock: false };
        collect(store, &how, progress)
    };
    let server = Server::start();
    let collected = interrupted(&server, &[(0, Fault::Unanswered)], Ends::HungUp, collect);
    assert!(matches!(collected, Err(Error::Interrupted)), "{collected:?}");
    assert!(server.objects().is_empty(), "the lock is left");
    // Whether it was put cannot be found out; it was, and cannot be removed.
    let unknown = silent(1).chain([(0, Fault::Unanswered)]).collect();
    for faults in [unknown, silent(1).collect::<Vec<_>>()] {
        server.set_objects(BTreeMap::default());
        let collected = interrupted(&server, &faults, Ends::Hurried, collect);
        let message = collected.unwrap_err().to_string();
        assert!(message.contains("interrupted") && message.contains("--break-lock"), "{message}");
        assert!(server.objects().contains_key("some/prefix/gc.lock"));
    }
}

#[test]
fn a_collection_that_fails_closes_the_store_only_if_a_removal_is_in_doubt() {
    let (server, chain) = (Server::start(), Chain::small("disk.qcow2", 1));
    let store = open(&server, patient());
    send(&store, "vm", &chain).unwrap();
    send(&store, "gone", &Chain::small("disk.qcow2", 2)).unwrap();
    remove(&store, "gone").unwrap();
    let objects = server.objects();
    let is_locked = || server.objects().contains_key("some/prefix/gc.lock");
    for dry_run in [true, false] {
        let (mut closed, mut open, mut repeated) = (0, 0, 0);
        for number in 1.. {
            server.set_objects(objects.clone());
            server.fail([(number, Fault::Status(403))]);
            let how = Collection { grace: Duration::ZERO, dry_run, break_lock: false };
            let collected = collect(&store, &how, &Progress::default());
            let requests = server.requests();
            let Some(failed) = requests.get(number) else {
                collected.unwrap();
                break;
            };
            let removal = failed.contains("delete") || failed.starts_with("DELETE");
            let message = collected.unwrap_err().to_string();
            assert_eq!(message.contains("--break-lock"), removal, "{failed}: {message}");
            assert_eq!(is_locked(), removal, "{failed}");
            *(if removal { &mut closed } else { &mut open }) += 1;
            if removal && !dry_run {
                // Only what repeats the removal opens it.
                server.fail([]);
                let broken = |grace, dry_run| {
                    let how = Collection { grace, dry_run, break_lock: true };
                    collect(&store, &how, &Progress::default())
                };
                let left = broken(Duration::ZERO, true).unwrap();
                assert!(is_locked(), "{failed}");
                // If all were removed, the removal of the lock has failed.
                if left.objects > 0 {
                    broken(Duration::from_hours(24), false).unwrap_err();
                    assert!(is_locked(), "{failed}");
                    repeated += 1;
                }
                broken(Duration::ZERO, false).unwrap();
                assert!(!is_locked(), "{failed}");
            }
        }
        // With no removal but that of the lock, nothing else is in doubt.
        assert!(open > 4 && if dry_run { closed == 1 } else { closed > 1 }, "{open} {closed}");
        assert_eq!(repeated, if dry_run { 0 } else { closed - 1 });
    }
    // The one whose lock is broken may have left a removal that is on its way.
    server.set_objects(objects);
    server.fail([]);
    let how = Collection { grace: Duration::ZERO, dry_run: false, break_lock: true };
    store.put("gc.lock", b"another").unwrap();
    server.fail([(2, Fault::Status(403))]);
    collect(&store, &how, &Progress::default()).unwrap_err();
    assert!(is_locked());
    server.fail([]);
    collect(&store, &how, &Progress::default()).unwrap();
    assert!(!is_locked());
}

/// Nothing is tried again.
fn once() -> Limits {
    Limits { pause: Duration::from_hours(24), ..Limits::default() }
}

#[test]
fn no_more_of_an_answer_is_held_than_it_may_have() {
    let server = Server::start();
    let store = open(&server, once());
    let ended = |what: &str| {
        isobath_testkit::until("the answer ends", || !server.endless().is_empty());
        let sent = server.endless();
        assert!(sent.len() == 1 && sent[0] < 64 << 20, "{what}: {sent:?}");
    };
    for status in [400, 403, 404, 412, 500] {
        type Asks<'a> = (&'a str, &'a dyn Fn() -> Option<Error>);
        let asks: [Asks<'_>; 5] = [
            ("get", &|| store.get("layers/a", 100).err()),
            ("list", &|| store.list("layers/").err()),
            ("put", &|| store.put("layers/a", b"a").err()),
            ("begin", &|| store.begin("layers/a", 100).err()),
            ("delete", &|| store.delete("layers/a").err()),
        ];
        for (what, ask) in asks {
            server.fail([(0, Fault::Endless(status))]);
            let error = ask().map(|error| error.to_string());
            ended(what);
            // The status is what counts.
            if status != 404 {
                let error = error.unwrap();
                assert!(error.contains(&status.to_string()), "{what}: {error}");
            }
        }
    }
    server.fail([(0, Fault::Endless(200))]);
    let error = store.list("layers/").unwrap_err().to_string();
    assert!(error.contains("bytes"), "{error}");
    ended("list");
    server.fail([(0, Fault::Endless(200))]);
    store.begin("layers/a", 100).err().unwrap();
    ended("begin");
    server.fail([(0, Fault::Endless(200))]);
    store.get("layers/a", 100).unwrap_err();
    ended("get");
}

#[test]
fn a_conditional_put_that_a_proxy_did_not_answer_for_is_not_known_to_be_undone() {
    let server = Server::start();
    let long = Duration::from_hours(24);
    for (status, unknown) in [(429, false), (500, true), (502, true), (503, true), (504, true)] {
        let limits = Limits { overall: long * 9, pause: long, hurried: long, ..Limits::default() };
        let progress = Arc::new(Progress::default());
        let store = open_with(&server, limits, &progress);
        server.fail([(0, Fault::Status(status))]);
        let put = std::thread::scope(|scope| {
            let putting = scope.spawn(|| store.put_if("gc.lock", b"text", None));
            isobath_testkit::until("the object is read", || server.requests().len() == 2);
            progress.cancel();
            putting.join().unwrap()
        });
        match put {
            Err(Error::Unsettled(text)) if unknown => assert!(text.contains("gc.lock"), "{text}"),
            Err(Error::Interrupted) if !unknown => {}
            put => panic!("{status}: {put:?}"),
        }
    }
}

#[test]
fn a_conditional_put_that_is_refused_after_one_that_was_given_up_may_have_been_done() {
    let server = Server::start();
    let store = open(&server, patient());
    let put = || store.put_if("gc.lock", b"text", None);
    let faults = [(0, Fault::Reset), (2, Fault::Status(403))];
    server.fail(faults);
    let error = put().unwrap_err();
    assert!(matches!(&error, Error::Unknown(_)), "{error}");
    let message = error.to_string();
    assert!(message.contains("403") && message.contains("unknown"), "{message}");
    // What it was written by then is read.
    server.fail([(0, Fault::AnswerLost), (1, Fault::Reset), (3, Fault::Status(403))]);
    assert_eq!(put().unwrap(), Outcome::Done);
    server.set_objects(BTreeMap::default());
    server.fail([(0, Fault::Status(403))]);
    assert!(matches!(put(), Err(Error::Store(_))));
    // So a collection says whether its lock may be there.
    for (faults, told) in [(&faults[..], true), (&[(0, Fault::Status(403))], false)] {
        server.fail(faults.iter().copied());
        let message = gc(&store, Duration::ZERO, false).unwrap_err().to_string();
        assert_eq!(message.contains("--break-lock"), told, "{message}");
    }
}

#[test]
fn a_push_whose_manifest_cannot_be_read_back_says_what_is_unknown() {
    let (server, chain) = (Server::start(), Chain::small("disk.qcow2", 1));
    let store = open(&server, patient());
    send(&store, "vm", &chain).unwrap();
    let is_put = |request: &String| request.starts_with("PUT") && request.contains("manifests/");
    let number = server.requests().iter().position(is_put).unwrap();
    for replace in [Replace::Unchanged, Replace::Any] {
        server.set_objects(BTreeMap::default());
        let refused = (number + 1..100).map(|number| (number, Fault::Status(403)));
        server.fail(refused.chain([(number, Fault::AnswerLost)]));
        let pushed = push(
            &store,
            "vm",
            &chain.layers(),
            Some(&chain.index()),
            replace,
            &Progress::default(),
        );
        let message = pushed.unwrap_err().to_string();
        assert!(message.contains("the old one or the new one"), "{message}");
        assert!(message.contains("403"), "{message}");
    }
    // Where nothing was put it does not say so.
    server.set_objects(BTreeMap::default());
    server.fail((number..100).map(|number| (number, Fault::Status(403))));
    let message = send(&store, "vm", &chain).unwrap_err().to_string();
    assert!(!message.contains("the new one"), "{message}");
}

#[test]
fn an_object_whose_parts_were_joined_without_an_answer_is_found() {
    let server = Server::start();
    // Nothing on this machine takes that long by itself.
    let store = open(&server, Limits { attempt: Duration::from_secs(2), ..once() });
    let parts = store.begin("layers/a", 100).unwrap();
    parts.put(0, vec![1; 100]).unwrap();
    server.fail([(0, Fault::Unanswered)]);
    parts.finish().unwrap();
    assert!(server.objects().contains_key("some/prefix/layers/a"));
    let parts = store.begin("layers/b", 100).unwrap();
    parts.put(0, vec![1; 100]).unwrap();
    server.fail([(0, Fault::Silence)]);
    let message = parts.finish().unwrap_err().to_string();
    assert!(message.contains("layers/b") && message.contains("no answer"), "{message}");
}
