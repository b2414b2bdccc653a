//! Tests of stores: what is pushed is pulled, whatever happens on the way.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by a panic")]

mod buckets;
mod cache;
mod cache_damage;
mod cache_directory;
mod cache_disks;
mod cache_kills;
mod cache_limits;
mod chains;
mod hostile;
mod interrupted;
mod proxied;
mod proxy;
mod round_trips;
mod s3;
mod s3s;
mod served;
mod servers;
mod store_kills;
mod stores;
mod traces;
