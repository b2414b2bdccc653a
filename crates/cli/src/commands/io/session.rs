//! Runs commands, one after another.

use super::command::Command;
use super::report::{Done, amount};
use super::transfer::{Ended, Form, MOST, Read, Refusal, Write, failed};
use super::words::{BadOption, Words, number};
use crate::failure::Failure;
use crate::messages;
use isobath_disk::{Disk, ImageFormat, Preallocation};
use isobath_ring::{JoinHandle, sleep, spawn};
use isobath_storage::Host;
use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What comes after a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The next command.
    Command,
    /// Nothing: `quit`.
    Quit,
}

/// Commands on one disk.
pub(super) struct Session<'a, H: Host> {
    disk: Arc<Disk<H>>,
    out: &'a mut dyn io::Write,
    good: bool,
    asynchronous: Vec<JoinHandle<()>>,
    /// The output of asynchronous requests, in order of completion.
    reports: Rc<RefCell<String>>,
}

impl<'a, H: Host> Session<'a, H> {
    pub(super) fn new(disk: Arc<Disk<H>>, out: &'a mut dyn io::Write) -> Self {
        Self { disk, out, good: true, asynchronous: Vec::new(), reports: Rc::default() }
    }

    /// Waits for asynchronous requests; returns whether every command succeeded.
    pub(super) async fn end(mut self) -> Result<bool, Failure> {
        self.wait().await?;
        Ok(self.good)
    }

    /// Prints text, after the output of asynchronous requests completed before.
    pub(super) fn print(&mut self, text: &str) -> Result<(), Failure> {
        let reports = std::mem::take(&mut *self.reports.borrow_mut());
        self.out.write_all(reports.as_bytes())?;
        self.out.write_all(text.as_bytes())?;
        Ok(self.out.flush()?)
    }

    /// Runs one command; blank ones do nothing.
    pub(super) async fn carry_out(&mut self, line: &str) -> Result<Next, Failure> {
        let mut words = line.split_whitespace();
        let Some(name) = words.next() else { return Ok(Next::Command) };
        let Some(command) = Command::find(name) else {
            self.complain(&format!("command \"{name}\" not found"));
            return Ok(Next::Command);
        };
        let words: Vec<_> = words.collect();
        if let Some(complaint) = command.refuses(words.len()) {
            self.complain(&complaint);
            return Ok(Next::Command);
        }
        let words = match Words::parse(command.options, &words) {
            Ok(words) => words,
            Err(bad) => {
                let (what, letter) = match bad {
                    BadOption::Unknown(letter) => ("invalid option", letter),
                    BadOption::NoValue(letter) => ("option requires an argument", letter),
                };
                self.complain(&format!("{name}: {what} -- '{letter}'"));
                self.print(&command.usage())?;
                return Ok(Next::Command);
            }
        };
        let ended = match command.name {
            "quit" => return Ok(Next::Quit),
            "sleep" => pause(&words).await,
            "aio_flush" => {
                self.wait().await?;
                Ok(good(String::new()))
            }
            "aio_read" => Read::parse(&words, Form::Asynchronous)
                .map(|read| self.start(async |disk| read.run(disk).await)),
            "aio_write" => self.writing(Write::parse(&words, Form::Asynchronous)).map(|write| {
                write.map_or_else(read_only, |write| self.start(async |disk| write.run(disk).await))
            }),
            "read" => self.read(&words, Form::Plain).await,
            "readv" => self.read(&words, Form::Vectored).await,
            "write" => self.write(&words, Form::Plain).await,
            "writev" => self.write(&words, Form::Vectored).await,
            "discard" => self.discard(&words).await,
            "truncate" => self.truncate(&words).await,
            "flush" => Ok(match self.disk.flush().await {
                Ok(()) => good(String::new()),
                Err(error) => failed("flush", error),
            }),
            "alloc" => self.alloc(&words).await,
            "map" => self.map().await,
            "length" => Ok(good(format!("{}\n", amount(self.disk.size() as f64)))),
            "info" => Ok(good(self.info())),
            _ => Ok(help(&words)),
        };
        let ended = ended.unwrap_or_else(|refusal| Ended {
            text: match refusal {
                Refusal::Usage => command.usage(),
                Refusal::Because(reason) => format!("{reason}\n"),
                Refusal::Complaint(reason) => {
                    messages::tell(reason);
                    String::new()
                }
            },
            good: false,
        });
        self.good &= ended.good;
        self.print(&ended.text)?;
        Ok(Next::Command)
    }

    /// An error that qemu-io writes to stderr.
    fn complain(&mut self, complaint: &str) {
        messages::tell(complaint);
        self.good = false;
    }

    async fn wait(&mut self) -> Result<(), Failure> {
        for request in self.asynchronous.drain(..) {
            if let Err(panicked) = request.await {
                panicked.resume();
            }
        }
        self.print("")
    }

    /// Starts an asynchronous request.
    fn start(&mut self, run: impl AsyncFnOnce(&Disk<H>) -> Ended + 'static) -> Ended {
        let (disk, reports) = (Arc::clone(&self.disk), Rc::clone(&self.reports));
        self.asynchronous.push(spawn(async move {
            let ended = run(&disk).await;
            reports.borrow_mut().push_str(&ended.text);
        }));
        good(String::new())
    }

    /// Lets a change through, or `None` where the disk is read-only.
    fn writing<T>(&self, parsed: Result<T, Refusal>) -> Result<Option<T>, Refusal> {
        Ok(Some(parsed?).filter(|_| !self.disk.is_read_only()))
    }

    async fn read(&self, words: &Words<'_>, form: Form) -> Result<Ended, Refusal> {
        Ok(Read::parse(words, form)?.run(&self.disk).await)
    }

    async fn write(&self, words: &Words<'_>, form: Form) -> Result<Ended, Refusal> {
        Ok(match self.writing(Write::parse(words, form))? {
            Some(write) => write.run(&self.disk).await,
            None => read_only(),
        })
    }

    async fn discard(&self, words: &Words<'_>) -> Result<Ended, Refusal> {
        let [offset, length] = words.arguments.as_slice() else { return Err(Refusal::Usage) };
        let (offset, text) = (number(offset)?, length);
        let length = number(text)?;
        if length > MOST {
            return Err(format!("length cannot exceed {MOST}, given {text}").into());
        }
        if self.writing(Ok(()))?.is_none() {
            return Ok(read_only());
        }
        let start = Instant::now();
        if let Err(error) = self.disk.discard(offset, length).await {
            return Ok(failed("discard", error));
        }
        let done = Done { verb: "discard", offset, bytes: length, time: start.elapsed() };
        Ok(good(match (words.has('q'), words.has('C')) {
            (true, _) => String::new(),
            (false, true) => done.for_programs(),
            (false, false) => done.for_people(),
        }))
    }

    async fn truncate(&self, words: &Words<'_>) -> Result<Ended, Refusal> {
        let [size] = words.arguments.as_slice() else { return Err(Refusal::Usage) };
        let size = number(size)?;
        let mode = words.value('m').unwrap_or("off");
        let Some(mode) = Preallocation::from_name(mode) else {
            return Err(Refusal::Complaint(format!("Invalid preallocation mode '{mode}'")));
        };
        if self.writing(Ok(()))?.is_none() {
            return Ok(read_only());
        }
        if let Err(error) = self.disk.resize(size, mode, true).await {
            messages::complain(error);
            return Ok(Ended { text: String::new(), good: false });
        }
        Ok(good(String::new()))
    }

    /// Counts the bytes of a range that the active layer itself has allocated.
    async fn alloc(&self, words: &Words<'_>) -> Result<Ended, Refusal> {
        let (offset, length) = match words.arguments.as_slice() {
            [offset] => (number(offset)?, 512),
            [offset, length] => (number(offset)?, number(length)?),
            _ => return Err(Refusal::Usage),
        };
        let length = length.min(self.disk.size().saturating_sub(offset));
        let mut allocated = 0;
        let walk = self.walk(offset, length, |_, count, here| {
            allocated += if here { count } else { 0 };
        });
        if let Err(error) = walk.await {
            return Ok(failed("is_allocated", error));
        }
        Ok(good(format!(
            "{allocated}/{length} bytes allocated at offset {}\n",
            amount(offset as f64)
        )))
    }

    /// Lists the ranges that the active layer itself has allocated.
    async fn map(&self) -> Result<Ended, Refusal> {
        let mut runs: Vec<(u64, u64, bool)> = Vec::new();
        let walk = self.walk(0, self.disk.size(), |at, count, here| match runs.last_mut() {
            Some((_, length, last)) if *last == here => *length += count,
            _ => runs.push((at, count, here)),
        });
        if let Err(error) = walk.await {
            return Ok(failed("map", error));
        }
        let line = |(at, length, here): &(u64, u64, bool)| {
            let state = if *here { "    allocated" } else { "not allocated" };
            let (size, offset) = (amount(*length as f64), amount(*at as f64));
            format!("{size} ({length:#x}) bytes {state} at offset {offset} ({at:#x})\n")
        };
        Ok(good(runs.iter().map(line).collect()))
    }

    /// The runs of a range: offset, length, and whether the active layer has allocated it.
    async fn walk(
        &self,
        offset: u64,
        length: u64,
        mut take: impl FnMut(u64, u64, bool),
    ) -> isobath_disk::Result<()> {
        let (mut at, end) = (offset, offset + length);
        while at < end {
            let before = at;
            for run in self.disk.block_status(at, end - at, 1024).await? {
                take(at, run.length, run.allocated && run.depth == 0);
                at += run.length;
            }
            if at == before {
                break;
            }
        }
        Ok(())
    }

    fn info(&self) -> String {
        let layer = self.disk.layers().next();
        let format = layer.map_or(ImageFormat::Raw, |layer| layer.format()).name();
        let geometry = layer.and_then(|layer| layer.header()?.geometry().ok());
        let cluster = geometry.map_or(0, |geometry| geometry.cluster_size());
        format!("format name: {format}\ncluster size: {}\n", amount(cluster as f64))
    }
}

fn good(text: String) -> Ended {
    Ended { text, good: true }
}

/// The error of a change to a read-only disk.
fn read_only() -> Ended {
    messages::complain("the disk is read-only");
    Ended { text: String::new(), good: false }
}

async fn pause(words: &Words<'_>) -> Result<Ended, Refusal> {
    let text = words.arguments.first().copied().ok_or(Refusal::Usage)?;
    let time = text.parse().map_err(|_| format!("{text} is not a valid number"))?;
    sleep(Duration::from_millis(time)).await;
    Ok(good(String::new()))
}

fn help(words: &Words<'_>) -> Ended {
    match words.arguments.first() {
        None => good(Command::all()),
        Some(name) => match Command::find(name) {
            Some(command) => good(command.explanation()),
            None => Ended { text: format!("command {name} not found\n"), good: false },
        },
    }
}
