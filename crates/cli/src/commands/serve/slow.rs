//! What `--slow-disk` says.

use crate::size;
use isobath_storage::slow::SlowDisk;
use std::num::{NonZeroU64, NonZeroUsize};
use std::time::Duration;

/// Reads `BANDWIDTH,LATENCY,DEPTH,FLUSH`, such as `400M,100,32,500`.
pub(super) fn parse(text: &str) -> Result<SlowDisk, String> {
    let parts: Vec<&str> = text.split(',').collect();
    let [bandwidth, latency, depth, flush] = parts[..] else {
        return Err("it takes four numbers, as in 400M,100,32,500".into());
    };
    let number = |text: &str| text.parse::<u64>().map_err(|_| format!("'{text}' is not a number"));
    Ok(SlowDisk {
        bandwidth: NonZeroU64::new(size::parse(bandwidth)?).ok_or("the bandwidth is 0")?,
        latency: Duration::from_micros(number(latency)?),
        depth: NonZeroUsize::new(number(depth)? as usize).ok_or("the depth is 0")?,
        flush: Duration::from_micros(number(flush)?),
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
        for text in ["400M", "0,1,1,1", "1,1,0,1", "1,x,1,1"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
