//! What a file is, by how it begins.

use crate::bytes;
use crate::header::is_qcow2;
use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Bytes from a file's start that decide.
pub const PROBE_BYTES: usize = 512;

/// What a file is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probed {
    /// A qcow2 image.
    Qcow2,
    /// A disk, byte by byte: nothing else is known to begin so.
    Raw,
    /// An image in a format that is not handled here. Its bytes are not a disk's.
    Foreign(Foreign),
}

macro_rules! formats {
    ($($(#[$doc:meta])* $name:ident = $word:literal, $text:literal;)*) => {
        /// An image format other than qcow2 and raw.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Foreign {
            $($(#[$doc])* $name,)*
        }

        impl Foreign {
            /// Every one.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// QEMU's name of it.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }

            fn text(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

formats! {
    /// The first version of qcow.
    Qcow = "qcow", "a qcow image, version 1";
    /// QEMU's enhanced disk.
    Qed = "qed", "a QED image";
    /// A virtual machine's disk by `VMware`: a sparse extent or a descriptor.
    Vmdk = "vmdk", "a VMDK image";
    /// The disk of `VirtualBox`.
    Vdi = "vdi", "a VDI image";
    /// Hyper-V's disk.
    Vhdx = "vhdx", "a VHDX image";
    /// Virtual PC's disk, but for fixed ones, which begin with the disk itself.
    Vpc = "vpc", "a VHD image";
    /// Linux unified key setup.
    Luks = "luks", "a LUKS container";
    /// The disk of Parallels.
    Parallels = "parallels", "a Parallels image";
    /// The disk of Bochs.
    Bochs = "bochs", "a Bochs image";
    /// A compressed loop image.
    Cloop = "cloop", "a cloop image";
    /// Apple's disk image.
    Dmg = "dmg", "an Apple disk image";
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.text(), self.name())
    }
}

/// What a file of this name is, of which `start` are the first [`PROBE_BYTES`] bytes, or all. The name
/// decides nothing but whether it is an Apple disk image, which has its mark at its end only.
pub fn probe(start: &[u8], name: &Path) -> Probed {
    let start = start.get(..PROBE_BYTES).unwrap_or(start);
    if is_qcow2(start) {
        return Probed::Qcow2;
    }
    let foreign = Foreign::ALL.iter().find(|format| format.begins(start, name.as_os_str()));
    foreign.map_or(Probed::Raw, |format| Probed::Foreign(*format))
}

impl Foreign {
    fn begins(self, start: &[u8], name: &OsStr) -> bool {
        let at = |offset: usize, magic: &[u8]| {
            start.get(offset..).is_some_and(|rest| rest.starts_with(magic))
        };
        let le32 = |offset| bytes::be32(start, offset).map(u32::swap_bytes);
        match self {
            Self::Qcow => at(0, b"QFI\xfb\0\0\0\x01"),
            Self::Qed => at(0, b"QED\0"),
            Self::Vmdk => at(0, b"KDMV") || at(0, b"COWD") || is_vmdk_descriptor(start),
            Self::Vdi => le32(64) == Some(0xbeda_107f),
            Self::Vhdx => at(0, b"vhdxfile"),
            Self::Vpc => at(0, b"conectix"),
            Self::Luks => at(0, b"LUKS\xba\xbe\0\x01"),
            Self::Parallels => {
                (at(0, b"WithoutFreeSpace") || at(0, b"WithouFreSpacExt")) && le32(16) == Some(2)
            }
            Self::Bochs => {
                at(0, b"Bochs Virtual HD Image\0")
                    && at(32, b"Redolog\0")
                    && at(48, b"Growing\0")
                    && matches!(le32(64), Some(0x1_0000 | 0x2_0000))
            }
            Self::Cloop => at(
                0,
                b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n",
            ),
            Self::Dmg => name.as_bytes().strip_suffix(b".dmg").is_some_and(|stem| !stem.is_empty()),
        }
    }
}

/// Whether a text begins as a VMDK's descriptor does, and QEMU takes it for one: comments and lines of
/// spaces, then its version.
fn is_vmdk_descriptor(start: &[u8]) -> bool {
    for line in start.split_inclusive(|byte| *byte == b'\n') {
        let Some(line) = line.strip_suffix(b"\n") else { return false };
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.starts_with(b"#") || !line.is_empty() && line.iter().all(|byte| *byte == b' ') {
            continue;
        }
        return matches!(line, b"version=1" | b"version=2" | b"version=3");
    }
    false
}
