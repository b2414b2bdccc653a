//! The crate imago: its reads wait in `preadv`, so that any executor will do.

use super::{Args, Start, WARM};
use crate::Result;
use imago::file::File;
use imago::qcow2::Qcow2;
use imago::{FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;

/// Reads all of the range once, then `count` times at random places; gives the line.
///
/// # Errors
/// The image cannot be opened or read, or more than one read in flight is asked for.
pub(crate) fn run(args: &Args) -> Result<Value> {
    if args.qd != 1 {
        return Err("imago has one read in flight".into());
    }
    futures_executor::block_on(async {
        let image = Qcow2::<File>::builder_path(&args.image);
        let disk = FormatAccess::new(image.open(PermissiveImplicitOpenGate::default()).await?);
        let places = args.places(disk.size())?;
        let end = places * args.bs;
        let mut buf = vec![0; WARM];
        let mut offset = 0;
        while offset < end {
            let length = (end - offset).min(WARM as u64);
            disk.read(&mut buf[..length as usize], offset).await?;
            offset += length;
        }
        let mut random = SmallRng::seed_from_u64(args.seed);
        let mut buf = vec![0; usize::try_from(args.bs)?];
        let start = Start::now()?;
        for _ in 0..args.count {
            disk.read(&mut buf[..], random.random_range(0..places) * args.bs).await?;
        }
        start.line("imago", args, None)
    })
}
