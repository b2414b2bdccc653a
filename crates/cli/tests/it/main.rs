//! The command's tests, in one program: so they are compiled once, and no core waits for a long one.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by a panic")]

mod adopters;
#[cfg(target_arch = "x86_64")]
mod at_every_call;
mod block_device;
mod boot;
mod chain_generate;
mod chain_survey;
mod checks_agree_with_qemu;
mod cores;
mod created_images_match_qemus;
mod ctl;
mod damage;
mod deep_chains;
mod detected_raw;
mod disks_agree_with_qemu;
mod documented_commands;
mod encrypted;
mod fewer_layers;
mod foreign;
mod fork;
mod frontends;
mod given_files;
mod handed_in;
mod histories;
mod hostile_images;
mod index_survives_qemu;
mod info_matches_qemus;
mod internal_snapshots;
mod io_like_qemu_io;
mod it_can_fail;
mod kernel_device;
mod known_vulnerabilities;
mod layers_given;
mod left_alone;
mod limits;
mod live;
mod live_guest;
mod live_killed;
mod live_snapshots;
mod luks;
mod manners;
mod manual;
mod mapped;
mod memory_limit;
mod messages;
mod names_and_nulls;
mod nbd_names;
mod options_name_files;
mod overlays;
mod pauses;
mod programs;
mod qemu_img_options;
mod qemu_nbd;
mod qemu_storage_daemon;
mod read_from_stores;
mod refused_as_by_qemu;
#[allow(dead_code, reason = "these tests need less of it")]
#[path = "../../../remote/tests/it/s3.rs"]
mod s3;
#[cfg(target_arch = "x86_64")]
mod sandbox;
mod serve_clients;
mod serve_ends;
mod served_from_stores;
mod serving;
mod sockets;
mod stores;
mod sweep;
mod tls;
mod traces;
mod two_programs;
mod ublk;
mod unheard;
mod untrusted;
mod unusual_images;
#[path = "../../../export/tests/common/vhost_raw.rs"]
mod vhost_raw;
mod without_io_uring;
mod zeroes_stay;
