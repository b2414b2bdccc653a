//! What clients of the control socket say, and what jobs leave beside images: to a monitor of a live disk
//! whose files are in memory.

use crate::take;
use isobath_disk::{LiveDisk, MetadataMode, NewDisk, OpenOptions, Trust, create};
use isobath_export::frontend::Settings;
use isobath_export::registry::{Frontends, Listeners};
use isobath_qmp::json::{self, Limits as JsonLimits, Splitter};
use isobath_qmp::monitor::{Drive, Monitor};
use isobath_qmp::server::{ClientFiles, Events, Limits, Server};
use isobath_ring::net::Listener;
use isobath_ring::{Config, Executor, yield_now};
use isobath_storage::memory::MemoryHost;
use serde_json::{Value, json};
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::rc::Rc;

type Served = Rc<Server<Monitor<MemoryHost>>>;

const SIZE: u64 = 64 << 10;
/// Turns of the executor between requests: a job gets somewhere.
const TURNS: u8 = 8;

thread_local! {
    static EXECUTOR: Executor = Executor::new(&Config::default()).expect("a ring");
    static NOWHERE: Files = Files::new(Path::new("/nowhere/of/isobath"));
    static KEPT: Files = {
        // SAFETY: the call cannot fail.
        let thread = unsafe { libc::gettid() };
        let directory = std::env::temp_dir().join(format!("isobath-fuzz-{thread}"));
        fs::create_dir_all(&directory).expect("a directory for temporary files");
        Files::new(&directory)
    };
}

/// A chain of two images, in memory under a directory's name.
struct Files {
    host: MemoryHost,
    top: PathBuf,
    job: PathBuf,
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.job);
        let _ = self.top.parent().map(fs::remove_dir);
    }
}

impl Files {
    fn new(directory: &Path) -> Self {
        let host = MemoryHost::new();
        let (base, top) = (directory.join("base"), directory.join("top"));
        isobath_ring::block_on(async {
            let new = NewDisk::new(SIZE).cluster_size(4096);
            create(&host, &base, &new).await.expect("a valid image");
            let new = new.backing_file(base.to_str().expect("plain"), "qcow2");
            create(&host, &top, &new).await.expect("a valid image");
        });
        let mut job = top.clone().into_os_string();
        job.push(".isobath-job.json");
        Self { host, top, job: job.into() }
    }

    fn options() -> OpenOptions {
        OpenOptions::new()
            .writable(true)
            .trust(Trust::Full)
            .metadata(MetadataMode::Ordered)
            .map_cache(1 << 16)
    }
}

/// Serves the files anew, has `talk` with the server, and ends it.
fn serve(files: &Files, talk: impl AsyncFnOnce(&Served)) {
    EXECUTOR.with(|executor| {
        executor.block_on(async {
            let host = files.host.deep_copy();
            let disk = LiveDisk::open(host.clone(), &files.top, &Files::options()).await;
            let disk = disk.expect("a valid image");
            // Nobody accepts its clients.
            let listener = Listener::bind_tcp((Ipv4Addr::LOCALHOST, 0).into()).expect("a port");
            let listeners = Listeners::from([("nbd", vec![listener.into()])]);
            let frontends = Frontends::start(&[], listeners).expect("frontends");
            let drives = vec![Drive::new("disk", disk.clone())];
            let events = Events::default();
            let monitor =
                Monitor::new(host, Files::options(), drives, frontends.clone(), events.clone());
            let nbd = frontends.of("nbd").expect("it is in the table");
            for drive in monitor.drives() {
                let exported = monitor.export(nbd, "disk", &drive, Settings::default());
                exported.expect("one export");
            }
            let server = Server::new(monitor, events, Limits::default());
            talk(&server).await;
            server.service().end().await;
            frontends.stop();
            let _ = disk.close().await;
        });
    });
}

async fn turns(count: u8) {
    for _ in 0..count {
        yield_now().await;
    }
}

/// A conversation: every request gets one reply, an object with a result or an error.
pub fn qmp(mut input: &[u8]) {
    let [mode, depth] = take(&mut input);
    let limits = JsonLimits { bytes: 4096, depth: usize::from(depth % 120) + 1 };
    NOWHERE.with(|files| {
        serve(files, async |server| {
            let mut splitter = Splitter::new(limits);
            let mut negotiated = mode & 1 != 0;
            while let Some(text) = splitter.next(&mut input) {
                let Ok(text) = text else { continue };
                if json::parse(&text).is_ok_and(|request| reaches_out(&request)) {
                    continue;
                }
                let reply = server.answer(&mut negotiated, &ClientFiles::default(), &text).await;
                let reply = reply.as_object().expect("an object");
                assert!(reply.contains_key("return") != reply.contains_key("error"), "{reply:?}");
                turns(mode >> 1 & 7).await;
            }
        });
    });
}

/// Whether a request would change this machine: frontends other than NBD's are files, and what is beside the
/// image of a job is one as well.
fn reaches_out(value: &Value) -> bool {
    match value {
        Value::Object(members) => members.iter().any(|(name, value)| match (&**name, value) {
            ("type", Value::String(kind)) => kind == "fuse" || kind == "vhost-user-blk",
            ("snapshot-file", Value::String(name)) => !name.starts_with("/nowhere/of/isobath/"),
            (_, value) => reaches_out(value),
        }),
        Value::Array(values) => values.iter().any(reaches_out),
        _ => false,
    }
}

/// What a killed server left beside an image: it is told of and started again, or refused.
pub fn job_file(input: &[u8]) {
    KEPT.with(|files| {
        fs::write(&files.job, input).expect("room for a small file");
        serve(files, async |server| {
            let mut negotiated = true;
            let mut ask = async |request: Value| {
                server
                    .answer(
                        &mut negotiated,
                        &ClientFiles::default(),
                        request.to_string().as_bytes(),
                    )
                    .await
            };
            let jobs = ask(json!({"execute": "x-isobath-query-jobs"})).await;
            let jobs = jobs["return"].as_array().expect("a list").clone();
            assert!(jobs.len() <= 1, "{jobs:?}");
            for job in jobs {
                assert_eq!(job["interrupted"], true);
                let id = &job["id"];
                let arguments = json!({"id": id});
                ask(json!({"execute": "x-isobath-restart-job", "arguments": arguments})).await;
                turns(TURNS).await;
                ask(json!({"execute": "query-block-jobs"})).await;
                ask(json!({"execute": "x-isobath-forget-job", "arguments": arguments})).await;
            }
        });
    });
}

/// Conversations that get somewhere.
pub(crate) fn conversations() -> Vec<Vec<u8>> {
    let greeting = json!({"execute": "qmp_capabilities", "id": 1});
    let ask = |name: &str, arguments: Value| json!({"execute": name, "arguments": arguments});
    let snapshot = |name: &str| {
        let file = format!("/nowhere/of/isobath/{name}");
        json!({"device": "disk", "snapshot-file": file, "snapshot-node-name": name})
    };
    let file =
        |name: &str| json!({"driver": "file", "filename": format!("/nowhere/of/isobath/{name}")});
    let queries = [
        "query-block",
        "query-named-block-nodes",
        "query-blockstats",
        "query-jobs",
        "query-block-jobs",
        "query-block-exports",
        "x-isobath-query-disks",
        "x-isobath-query-jobs",
        "x-isobath-query-job-records",
        "query-commands",
        "query-version",
        "quit",
    ];
    let queries: Vec<_> = queries.iter().map(|name| ask(name, json!({}))).collect();
    let jobs = vec![
        ask("blockdev-snapshot-sync", snapshot("s1")),
        ask(
            "block-stream",
            json!({"job-id": "j", "device": "disk", "speed": 1, "auto-dismiss": false}),
        ),
        ask("block-job-set-speed", json!({"device": "j", "speed": 0})),
        ask("block-job-pause", json!({"device": "j"})),
        ask("block-job-resume", json!({"device": "j"})),
        ask("job-cancel", json!({"id": "j"})),
        ask("job-dismiss", json!({"id": "j"})),
        ask("block-commit", json!({"job-id": "c", "device": "disk"})),
        ask("job-complete", json!({"id": "c"})),
        ask("query-jobs", json!({})),
    ];
    let nodes = vec![
        ask("blockdev-add", json!({"driver": "qcow2", "node-name": "n", "file": file("base")})),
        ask("blockdev-add", json!({"driver": "qcow2", "node-name": "m", "file": file("none")})),
        ask("block-export-add", json!({"type": "nbd", "id": "e", "node-name": "n", "name": "n"})),
        ask("query-block-exports", json!({})),
        ask("block-export-del", json!({"id": "e", "mode": "hard"})),
        ask("block_resize", json!({"device": "disk", "size": 131_072})),
        ask(
            "blockdev-mirror",
            json!({"job-id": "m", "device": "disk", "target": "n", "sync": "full"}),
        ),
        ask("blockdev-del", json!({"node-name": "n"})),
        ask(
            "transaction",
            json!({"actions": [
                {"type": "blockdev-snapshot-sync", "data": snapshot("s2")},
            ]}),
        ),
    ];
    let text = |mode: u8, requests: &[Value]| {
        let lines: Vec<_> = requests.iter().flat_map(json::to_line).collect();
        [&[mode, 99][..], &lines].concat()
    };
    let greeted = [&[greeting][..], &queries].concat();
    let each = jobs
        .iter()
        .chain(&nodes)
        .chain(&queries)
        .map(|request| text(3, std::slice::from_ref(request)));
    let mut seeds: Vec<_> = each.collect();
    seeds.extend([
        text(0, &greeted),
        text(5, &jobs),
        text(3, &nodes),
        text(15, &[jobs, nodes].concat()),
    ]);
    seeds.push([&[1, 3][..], b"[[[[{}]]]] 'x' \xff {\"execute\":\"quit\",}"].concat());
    seeds
}

/// Files as jobs leave them.
pub(crate) fn job_files() -> Vec<Vec<u8>> {
    KEPT.with(|files| {
        let base = files.top.with_file_name("base");
        let file = |command: &str, base: Option<&Path>, arguments: Value| {
            let top = &files.top;
            let content = json!({"command": command, "id": "j", "device": "disk", "top": top,
                "base": base, "arguments": arguments});
            json::to_line(&content)
        };
        vec![
            file("block-stream", None, json!({"speed": 1})),
            file("block-stream", Some(&base), json!({"auto-finalize": false})),
            file("block-commit", Some(&base), json!({})),
            file("block-commit", None, json!({"speed": 0, "on-error": "stop"})),
        ]
    })
}
