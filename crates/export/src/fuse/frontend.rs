//! FUSE as a [`Frontend`]: a mount for each export.

use super::mount::Mount;
use super::options::{AllowOther, MOST_REQUESTS, Options};
use crate::command_line::{absolute, quoted};
use crate::frontend::{
    CommandLineOption, Export, ExportControl, ExportedDisk, Frontend, FrontendError, Outlive,
    Parameter, Place, Presence, Protocol, RemoveError, RemoveMode, Settings, Shown, Start, Takes,
    requests_within,
};
use isobath_disk::memory::{OutOfMemory, Reserved};
use isobath_disk::{BlockDevice, MemoryLimit};
use isobath_ring::Handle;
use std::path::PathBuf;
use std::sync::Arc;

/// The FUSE protocol and its parameters.
pub const PROTOCOL: Protocol = Protocol {
    name: "fuse",
    shared: false,
    clients_outlive: Outlive::Never,
    ends_unused: false,
    location: Parameter {
        name: "mountpoint",
        takes: Takes::Path,
        qmp: Presence::Required,
        option: Some(CommandLineOption {
            flag: "fuse",
            value_name: "PATH",
            help: "Export the image as a raw file by mounting it over this existing file (FUSE). \
                   With several images, repeat the option, one per image in order",
            default: None,
        }),
    },
    parameters: &[
        Parameter {
            name: "growable",
            takes: Takes::Flag,
            qmp: Presence::Optional,
            option: Some(CommandLineOption {
                flag: "growable",
                value_name: "",
                help: "With --fuse: allow writes and truncation past the end to grow the disk",
                default: None,
            }),
        },
        Parameter {
            name: "allow-other",
            takes: Takes::Choice(&["off", "on", "auto"]),
            qmp: Presence::Optional,
            option: Some(CommandLineOption {
                flag: "allow-other",
                value_name: "off|on|auto",
                help: "With --fuse: whether other users may access the file: off, on, or auto (on if \
                   the host allows it)",
                default: Some("auto"),
            }),
        },
    ],
};

/// Exports disks as files.
pub struct FuseFrontend {
    workers: Vec<Handle>,
    memory: Option<Arc<MemoryLimit>>,
}

impl FuseFrontend {
    /// How many requests an export may have in flight on each thread, and what it takes of a memory limit.
    fn requests(&self) -> Result<(usize, Option<Reserved>), OutOfMemory> {
        self.requests_on(self.workers.len().max(1))
    }

    fn requests_on(&self, threads: usize) -> Result<(usize, Option<Reserved>), OutOfMemory> {
        let memory = self.memory.as_ref();
        requests_within(memory, "a FUSE export", threads, MOST_REQUESTS, Options::memory)
    }
}

impl<D: BlockDevice> Frontend<D> for FuseFrontend {
    fn start(start: Start) -> Result<Self, FrontendError> {
        Ok(Self { workers: start.workers, memory: start.memory })
    }

    fn protocol(&self) -> &'static Protocol {
        &PROTOCOL
    }

    fn export(
        &self,
        disk: ExportedDisk<D>,
        mut settings: Settings,
    ) -> Result<Export, FrontendError> {
        let path = settings.take_path("mountpoint")?;
        if let Ok(covered) = path.canonicalize()
            && disk
                .images
                .iter()
                .any(|image| image.canonicalize().is_ok_and(|image| image == covered))
        {
            return Err(format!(
                "'{}' is an image of the disk itself, which could not be reopened under the mount; \
                 create an empty file and mount on that instead",
                path.display()
            )
            .into());
        }
        let (requests, reserved) = self.requests()?;
        let options = Options {
            requests,
            writable: disk.writable,
            growable: settings.flag("growable"),
            allow_other: match settings.text("allow-other") {
                Some("on") => AllowOther::On,
                Some("off") => AllowOther::Off,
                _ => AllowOther::Auto,
            },
        };
        let mount = Mount::new(disk.device, &path, options)?;
        let control = Control { mount: Arc::clone(&mount), path };
        let workers = self.workers.clone();
        let serving = async move {
            let served = mount.serve(&workers).await;
            drop(reserved);
            served
        };
        Ok(Export { control: Box::new(control), serving: Box::pin(serving) })
    }
}

struct Control<D: BlockDevice> {
    mount: Arc<Mount<D>>,
    path: PathBuf,
}

impl<D: BlockDevice> ExportControl for Control<D> {
    fn clients(&self) -> Option<usize> {
        None
    }

    /// In either mode, unmounts the file even if it is in use, as in QEMU: who has it open is unknown.
    fn remove(&self, _: RemoveMode) -> Result<(), RemoveError> {
        self.mount.stop();
        Ok(())
    }

    fn places(&self, shown: Shown) -> Vec<Place> {
        let path = absolute(&self.path).to_string_lossy().into_owned();
        let path = quoted(&path);
        let read_only = if shown.read_only { " --read-only" } else { "" };
        let device = format!("losetup --find --show --direct-io=on{read_only} {path}");
        vec![Place { name: path.into_owned(), uses: vec![device] }]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exports_have_their_part_of_a_memory_limit() {
        let frontend = |memory| FuseFrontend { workers: Vec::new(), memory };
        assert_eq!(frontend(None).requests().unwrap().0, MOST_REQUESTS);
        let memory = MemoryLimit::new(256 << 20);
        let frontend = frontend(Some(Arc::clone(&memory)));
        let exports: Vec<_> = std::iter::from_fn(|| frontend.requests().ok()).collect();
        assert!(exports.len() >= 16, "{}", exports.len());
        assert!(exports.iter().all(|(requests, _)| *requests == 5));
        let refused = frontend.requests_on(1).unwrap_err().to_string();
        assert!(refused.contains("a FUSE export may take"), "{refused}");
        drop(exports);
        assert_eq!(memory.reserved(), 0);
        // On many threads, one each, but four in all.
        for (threads, each) in [(2, 2), (3, 2), (8, 1)] {
            let (requests, _reserved) = frontend.requests_on(threads).unwrap();
            assert_eq!(requests, each, "{threads} threads");
            assert_eq!(memory.reserved(), (threads * Options::memory(each)) as u64);
        }
    }
}
