//! What the kernel and the server agree on before the first request.

use super::channel::MAX_WRITE;
use super::wire::{InitIn, InitOut, LEAST_MINOR, MAJOR, MINOR, init_flag};

/// Maximum number of concurrent asynchronous requests, such as those of a loop device with direct I/O.
const MAX_BACKGROUND: u16 = 256;
/// The number of asynchronous requests at which the kernel starts to delay writeback.
const CONGESTION: u16 = 192;
/// Maximum number of pages in a request: those of the longest write.
const MAX_PAGES: u16 = (MAX_WRITE / 4096) as u16;

/// The features used if the kernel supports them.
const WANTED: u32 = init_flag::ASYNC_READ
    | init_flag::BIG_WRITES
    | init_flag::ASYNC_DIO
    | init_flag::MAX_PAGES
    | init_flag::HANDLE_KILLPRIV_V2;

/// The kernel's protocol version is not supported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooOld {
    pub(super) major: u32,
    pub(super) minor: u32,
}

/// The reply to the kernel's `INIT`.
///
/// # Errors
/// If the kernel is too old, or has a later major version and would have to retry with this one.
pub(super) fn agree(kernel: &InitIn) -> Result<InitOut, TooOld> {
    let InitIn { major, minor, max_readahead, flags } = *kernel;
    if major != MAJOR || minor < LEAST_MINOR {
        return Err(TooOld { major, minor });
    }
    Ok(InitOut {
        major: MAJOR,
        minor: minor.min(MINOR),
        max_readahead,
        flags: flags & WANTED,
        max_background: MAX_BACKGROUND,
        congestion_threshold: CONGESTION,
        max_write: MAX_WRITE as u32,
        time_gran: 1,
        max_pages: MAX_PAGES,
        map_alignment: 0,
        flags2: 0,
        unused: [0; 7],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_kernel_offers_is_used() {
        let kernel = InitIn { major: 7, minor: 45, max_readahead: 1 << 17, flags: u32::MAX };
        let agreed = agree(&kernel).map(|init| (init.minor, init.max_readahead, init.flags));
        assert_eq!(agreed, Ok((MINOR, 1 << 17, WANTED)));
        let agreed = agree(&InitIn { minor: 31, flags: 1, ..kernel });
        assert_eq!(agreed.map(|init| (init.minor, init.flags)), Ok((31, 1)));
        for (major, minor) in [(6, 40), (8, 0), (7, 30)] {
            let refused = agree(&InitIn { major, minor, ..kernel }).map(|init| init.minor);
            assert_eq!(refused, Err(TooOld { major, minor }));
        }
    }
}
