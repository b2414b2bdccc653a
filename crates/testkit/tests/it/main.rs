//! The support of other tests, against QEMU.

mod chains_against_the_model;
mod guest_on_qemu_nbd;
