//! Exports under a memory limit.

use crate::memory_disk::MemoryDisk;
use isobath_disk::MemoryLimit;
use isobath_export::frontend::{ExportedDisk, Parameter, Setting, Settings};
use isobath_export::registry::{Frontends, Listeners};
use isobath_ring::block_on;
use isobath_ring::net::Listener;
use std::sync::Arc;

#[test]
fn a_vhost_user_export_with_options_that_are_refused_keeps_nothing_of_a_memory_limit() {
    let memory = MemoryLimit::new(256 << 20);
    let directory = tempfile::tempdir().unwrap();
    block_on(async {
        let frontends = Frontends::start_within(&[], Listeners::new(), Some(&memory)).unwrap();
        let frontend = frontends.of("vhost-user-blk").unwrap();
        let protocol = frontend.protocol();
        let parameter = |name: &str| -> &Parameter {
            let mut all = [&protocol.location].into_iter().chain(protocol.parameters);
            all.find(|parameter| parameter.name == name).unwrap()
        };
        let export = |name: &str, queues: u64| {
            let listener = Listener::bind_unix(&directory.path().join(name)).unwrap();
            let mut settings = Settings::default();
            settings.set(parameter("addr"), Setting::Listener(listener));
            settings.set(parameter("num-queues"), Setting::Number(queues));
            let disk = ExportedDisk {
                device: Arc::new(MemoryDisk::new(1 << 20)),
                name: name.into(),
                chosen_by: name.into(),
                writable: true,
                images: Vec::new(),
                files: Vec::new(),
                below: Vec::new(),
            };
            frontend.export(disk, settings)
        };
        for queues in [0, 257, 1 << 16] {
            assert!(export("refused", queues).is_err());
            assert_eq!(memory.reserved(), 0);
        }
        let started = export("started", 1).map_err(|error| error.to_string());
        let taken = memory.reserved();
        assert!(started.is_ok() && taken == 25 << 20, "{taken}");
        drop(started);
        assert_eq!(memory.reserved(), 24 << 20, "what all share stays");
    });
}
