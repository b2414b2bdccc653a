//! Disk images of other programs: VMDK, VDI, VHDX, VHD ("vpc") and QED.
//!
//! [`Image::open`] checks an image's header and opens its disk read-only: [`Image::read`] reads guest bytes, and
//! [`Image::run`] tells where they are stored. Tables are read on demand, through a cache of fixed size, so memory use
//! does not depend on the image.
//!
//! [`Writer`] writes images in these formats, from the start of the disk to its end.
//!
//! Images are not trusted: each field is checked before it is used, and an error names the image, the field and its
//! value. An image that is accepted reads as it does in QEMU.

#![allow(clippy::missing_errors_doc, reason = "errors are those of the storage and of the format")]

mod check;
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

pub use check::Found;
pub use error::{Error, Result};
pub use image::{Format, Image};
pub use run::{Run, RunKind};
pub use vmdk::{VmdkExtent, VmdkInfo};
pub use write::{
    PIECE, Piece, QedOptions, VdiOptions, VhdxOptions, VmdkOptions, VmdkSubformat, VpcOptions,
    Writer,
};
