//! The value of `--slow-disk`.

use crate::size;
use isobath_storage_test::slow::{Mechanics, SlowDisk};
use std::num::{NonZeroU64, NonZeroUsize};
use std::time::Duration;

/// A SATA SSD.
const SSD: &str = "250000000,80,32,500";
/// A desktop disk's properties other than its mechanics.
const HDD: &str = "100000000,100,32,0";

/// Parses `hdd`, `ssd`, or `BANDWIDTH,LATENCY,DEPTH,FLUSH`, such as `400M,100,32,500`.
pub(super) fn parse(text: &str) -> Result<SlowDisk, String> {
    match text {
        "ssd" => numbers(SSD),
        "hdd" => Ok(SlowDisk { mechanics: Some(Mechanics::DESKTOP), ..numbers(HDD)? }),
        _ => numbers(text),
    }
}

fn numbers(text: &str) -> Result<SlowDisk, String> {
    let parts: Vec<&str> = text.split(',').collect();
    let [bandwidth, latency, depth, flush] = parts[..] else {
        return Err("expected 'hdd', 'ssd', or four numbers, as in 400M,100,32,500".into());
    };
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("'{text}' is not a number"));
    Ok(SlowDisk {
        bandwidth: NonZeroU64::new(size::parse(bandwidth)?).ok_or("the bandwidth must not be 0")?,
        latency: Duration::from_micros(number(latency)?),
        depth: NonZeroUsize::new(number(depth)? as usize).ok_or("the queue depth must not be 0")?,
        flush: Duration::from_micros(number(flush)?),
        mechanics: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn four_numbers_make_a_disk() {
        let disk = parse("400M,100,32,500").unwrap();
        assert_eq!(disk.bandwidth.get(), 400 << 20);
        assert_eq!(disk.latency, Duration::from_micros(100));
        assert_eq!((disk.depth.get(), disk.flush), (32, Duration::from_micros(500)));
        assert_eq!(disk.mechanics, None);
        for text in ["400M", "floppy", "0,1,1,1", "1,1,0,1", "1,x,1,1"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn disks_have_names() {
        let (ssd, hdd) = (parse("ssd").unwrap(), parse("hdd").unwrap());
        assert_eq!((ssd.bandwidth.get(), ssd.mechanics), (250_000_000, None));
        assert_eq!((hdd.bandwidth.get(), hdd.mechanics), (100_000_000, Some(Mechanics::DESKTOP)));
    }
}
