//! FUSE as a [`Frontend`]: a mount for each export.

use super::mount::Mount;
use super::options::{AllowOther, Options};
use crate::command_line::{absolute, quoted};
use crate::frontend::{
    CommandLineOption, Export, ExportControl, ExportedDisk, Frontend, FrontendError, Parameter,
    Place, Presence, Protocol, RemoveError, RemoveMode, Settings, Shown, Start, Takes,
};
use isobath_disk::BlockDevice;
use isobath_ring::Handle;
use std::path::PathBuf;
use std::sync::Arc;

/// The FUSE protocol and its parameters.
pub const PROTOCOL: Protocol = Protocol {
    name: "fuse",
    shared: false,
    clients_outlive: false,
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
}

impl<D: BlockDevice> Frontend<D> for FuseFrontend {
    fn start(start: Start) -> Result<Self, FrontendError> {
        Ok(Self { workers: start.workers })
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
        let options = Options {
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
        let serving = async move { mount.serve(&workers).await };
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
