//! The output once clients can connect.

use crate::size;
use isobath_export::frontend::{Place, Shown};
use isobath_qmp::monitor::Monitor;
use isobath_storage::Host;
use std::fmt::Write as _;
use std::io::{self, Write};

/// The description of a served disk.
struct Announcement<'a> {
    /// The export's name.
    name: &'a str,
    /// Its size in bytes.
    size: u64,
    /// The number of images in its chain.
    layers: usize,
    read_only: bool,
}

impl Announcement<'_> {
    /// One line for the export, then for each location its name and the options or the command to use it.
    fn text(&self, places: &[Place]) -> String {
        let mode = if self.read_only { "read-only" } else { "read-write" };
        let plural = if self.layers == 1 { "" } else { "s" };
        let mut text = format!(
            "{}: {}, {} layer{plural}, {mode}\n",
            self.name.escape_debug(),
            size::human(self.size),
            self.layers
        );
        for Place { name, uses } in places {
            let _ = writeln!(text, "  {name}");
            for line in uses {
                let _ = writeln!(text, "    {line}");
            }
        }
        text
    }
}

/// Prints the locations of each disk.
pub(super) fn announce<H: Host + Clone>(
    out: &mut dyn Write,
    monitor: &Monitor<H>,
) -> io::Result<()> {
    for (number, drive) in monitor.drives().iter().enumerate() {
        let disk = drive.disk();
        let read_only = disk.is_read_only();
        let announcement = Announcement {
            name: drive.device(),
            size: disk.size(),
            layers: disk.depth(),
            read_only,
        };
        let places = monitor.places(drive, Shown { number, read_only });
        out.write_all(announcement.text(&places).as_bytes())?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_below_their_disk() {
        let place = |name: &str, uses: &[&str]| Place {
            name: name.to_owned(),
            uses: uses.iter().map(|&line| line.to_owned()).collect(),
        };
        let places = [
            place("vhost-user-blk /run/a", &["-chardev"]),
            place("/mnt/disk", &["losetup", "-drive"]),
        ];
        let one = Announcement { name: "r\u{1b}", size: 1 << 30, layers: 1, read_only: true };
        assert_eq!(
            one.text(&places),
            "r\\u{1b}: 1 GiB, 1 layer, read-only\n  vhost-user-blk /run/a\n    -chardev\n  \
             /mnt/disk\n    losetup\n    -drive\n"
        );
        let many = Announcement { name: "root", size: 512, layers: 3, read_only: false };
        assert_eq!(many.text(&[]), "root: 512 B, 3 layers, read-write\n");
    }
}
