//! A file through io_uring, by the same loop as a device: what a frontend adds is told against it.

use crate::Result;
use crate::drive::{self, Port};
use crate::options::Load;
use io_uring::{IoUring, opcode, types};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::hint;
use std::io::{ErrorKind, Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The file or block device
    file: PathBuf,
    #[command(flatten)]
    load: Load,
    /// Bypass the page cache
    #[arg(long)]
    direct: bool,
}

/// Runs the load; gives its line.
///
/// # Errors
/// The file cannot be opened, or io_uring refuses.
pub(crate) fn run(args: &Args) -> Result<Value> {
    let load = &args.load;
    let flags = if args.direct { libc::O_DIRECT } else { 0 };
    let options = OpenOptions::new().read(true).write(load.rw.writes()).custom_flags(flags).clone();
    let mut file = options.open(&args.file)?;
    // A block device has no length in its status.
    let capacity = file.seek(SeekFrom::End(0))?;
    let memory = drive::buffers(load)?;
    let ports = (0..load.queues)
        .map(|queue| Queue::new(&file, load, drive::first_buffer(&memory, load, queue)))
        .collect::<Result<Vec<_>>>()?;
    drive::run("raw", load, capacity, ports)
}

struct Queue {
    ring: IoUring,
    file: RawFd,
    buffers: usize,
    block: u32,
    writes: bool,
    poll: bool,
}

impl Queue {
    fn new(file: &File, load: &Load, buffers: usize) -> Result<Self> {
        Ok(Self {
            ring: IoUring::new(u32::from(load.qd).next_power_of_two())?,
            file: file.as_raw_fd(),
            buffers,
            block: u32::try_from(load.bs)?,
            writes: load.rw.writes(),
            poll: load.poll,
        })
    }
}

impl Port for Queue {
    fn push(&mut self, slot: usize, offset: u64) -> Result<()> {
        let buffer = (self.buffers + slot * self.block as usize) as *mut u8;
        let file = types::Fd(self.file);
        let entry = if self.writes {
            opcode::Write::new(file, buffer, self.block).offset(offset).build()
        } else {
            opcode::Read::new(file, buffer, self.block).offset(offset).build()
        };
        // SAFETY: the buffer is the slot's own, which has one request at a time; `run` keeps the memory
        // and the file until every queue has seen all its completions, or the program ends.
        unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) }?;
        Ok(())
    }

    fn submit(&mut self) -> Result<()> {
        // Who sleeps submits in the same call.
        if self.poll {
            self.ring.submit()?;
        }
        Ok(())
    }

    fn complete(&mut self, done: &mut Vec<(usize, bool)>) -> Result<()> {
        if self.poll {
            while self.ring.completion().is_empty() {
                hint::spin_loop();
            }
        } else {
            match self.ring.submit_and_wait(1) {
                Err(error) if error.kind() != ErrorKind::Interrupted => return Err(error.into()),
                _ => {}
            }
        }
        let block = i64::from(self.block);
        done.extend(
            self.ring
                .completion()
                .map(|entry| (entry.user_data() as usize, i64::from(entry.result()) == block)),
        );
        Ok(())
    }
}
