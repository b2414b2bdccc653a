//! Disk images of other programs: VMDK, VDI, VHDX, VHD ("vpc") and QED.
//!
//! [`Image::open`] checks an image's header and gives its disk, which is read-only: [`Image::read`] reads guest bytes,
//! [`Image::run`] says where they are. Tables are read when needed, through a cache of fixed size, so the memory used
//! depends on nothing that an image says.
//!
//! [`Writer`] writes an image of each of them, from the start of the disk to its end.
//!
//! Images are hostile until proved otherwise: each field is checked before it is used, and what is refused names the
//! image, the field and its value. Whatever is accepted here reads as it does in QEMU.

#![allow(clippy::missing_errors_doc, reason = "errors are those of the storage and of the format")]

mod error;
mod files;
mod image;
mod le;
mod qed;
mod run;
mod tables;
mod vdi;
mod vhdx;
mod vmdk;
mod vpc;
mod write;

pub use error::{Error, Result};
pub use image::{Format, Image};
pub use run::{Run, RunKind};
pub use vmdk::{VmdkExtent, VmdkInfo};
pub use write::{
    PIECE, Piece, QedOptions, VdiOptions, VhdxOptions, VmdkOptions, VmdkSubformat, VpcOptions,
    Writer,
};
