//! The values of `--werror` and `--rerror`.

use crate::failure::Failure;
use isobath_disk::pausing::{OnFailure, Policies};
use isobath_qmp::monitor::Monitor;
use isobath_storage::Host;

/// Parses what becomes of a write.
pub(super) fn of_writes(name: &str) -> Result<OnFailure, String> {
    OnFailure::from_name(name).ok_or_else(|| "expected report, enospc or stop".into())
}

/// Parses what becomes of a read, which needs no space.
pub(super) fn of_reads(name: &str) -> Result<OnFailure, String> {
    let value = OnFailure::from_name(name).filter(|value| *value != OnFailure::Enospc);
    value.ok_or_else(|| "expected report or stop".into())
}

/// Refuses values for some of several images only, and disks that would pause with nobody to let them go on.
pub(super) fn check(
    writes: &[OnFailure],
    reads: &[OnFailure],
    images: usize,
    has_qmp: bool,
) -> Result<(), Failure> {
    for (option, values) in [("--werror", writes), ("--rerror", reads)] {
        if values.len() > 1 && values.len() != images {
            return Err(Failure::usage(format_args!(
                "{option} is given {} times for {images} images; give it once for all images, or \
                 once for each",
                values.len()
            )));
        }
        let pauses = values.iter().find(|value| **value != OnFailure::Report);
        if let Some(value) = pauses
            && !has_qmp
        {
            return Err(Failure::usage(format_args!(
                "{option} {} needs --qmp: a disk that pauses goes on when 'isobath ctl SOCKET cont' \
                 lets it",
                value.name()
            )));
        }
    }
    Ok(())
}

/// The value for an image: the only one, or that of its number.
fn value(given: &[OnFailure], number: usize) -> OnFailure {
    match given {
        [only] => *only,
        several => several.get(number).copied().unwrap_or_default(),
    }
}

/// Sets what becomes of the requests to the monitor's disks, which are the images in order.
pub(super) fn apply<H: Host + Clone>(
    writes: &[OnFailure],
    reads: &[OnFailure],
    monitor: &Monitor<H>,
) {
    for (number, drive) in monitor.drives().iter().enumerate() {
        let (reads, writes) = (value(reads, number), value(writes, number));
        drive.disk().pausing().set_policies(Policies { reads, writes });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_value_is_for_all_images_and_several_are_for_one_each() {
        use OnFailure::{Enospc, Report, Stop};
        assert_eq!([0, 1].map(|number| value(&[Stop], number)), [Stop, Stop]);
        assert_eq!([0, 1].map(|number| value(&[Stop, Enospc], number)), [Stop, Enospc]);
        assert_eq!(value(&[], 0), Report);
        assert!(of_reads("enospc").is_err() && of_writes("ignore").is_err());
        assert_eq!((of_reads("stop"), of_writes("enospc")), (Ok(Stop), Ok(Enospc)));
    }
}
