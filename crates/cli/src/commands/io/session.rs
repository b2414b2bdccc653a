//! Runs commands, one after another.

use super::command::Command;
use super::on_disk;
use super::opening::{Opened, Opening, cannot_open};
use super::reopen::Changes;
use super::transfer::{Ended, Form, Read, Refusal, Write, read_only};
use super::words::{BadOption, Words, number};
use crate::cache::{CacheMode, Discard, is_native};
use crate::failure::Failure;
use crate::image_name::Naming;
use crate::{host, messages, options};
use isobath_ring::{JoinHandle, sleep, spawn};
use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

/// What to do after a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The next command.
    Command,
    /// Nothing: `quit`.
    Quit,
}

/// A session of commands, on one disk at a time.
pub(super) struct Session<'a> {
    naming: &'a Naming,
    opened: Option<Rc<Opened>>,
    out: &'a mut dyn io::Write,
    good: bool,
    asynchronous: Vec<JoinHandle<()>>,
    /// The output of asynchronous requests, in order of completion.
    reports: Rc<RefCell<String>>,
}

impl<'a> Session<'a> {
    pub(super) fn new(naming: &'a Naming, out: &'a mut dyn io::Write) -> Self {
        let (asynchronous, reports) = (Vec::new(), Rc::default());
        Self { naming, opened: None, out, good: true, asynchronous, reports }
    }

    /// Waits for asynchronous requests, and closes the disk; returns whether every command succeeded.
    pub(super) async fn end(mut self) -> Result<bool, Failure> {
        self.wait().await?;
        if let Some(opened) = self.opened.take() {
            opened.disk.close().await?;
        }
        Ok(self.good)
    }

    /// Opens the image with which the program was started.
    pub(super) async fn open(&mut self, opening: Opening) -> Result<(), Failure> {
        self.opened = Some(Rc::new(opening.open().await?));
        Ok(())
    }

    /// Prints text, after the output of asynchronous requests that have completed.
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
        if command.needs_image && self.opened.is_none() {
            self.complain("no file open, try 'help open'");
            return Ok(Next::Command);
        }
        let ended = match command.name {
            "quit" => return Ok(Next::Quit),
            "abort" => std::process::abort(),
            "open" => self.open_another(&words).await,
            "close" => self.close().await,
            "reopen" => self.reopen(&words).await,
            "sigraise" => raise(&words),
            "break" => Ok(not_supported("Could not set breakpoint")),
            "remove_break" => Ok(not_supported(&format!(
                "Could not remove breakpoint {}",
                words.arguments.first().copied().unwrap_or_default()
            ))),
            "resume" | "wait_break" => Ok(not_supported("Could not resume request")),
            "sleep" => pause(&words).await,
            "aio_flush" => {
                self.wait().await?;
                Ok(Ended::good(String::new()))
            }
            "aio_read" if words.has('i') => {
                Ok(Ended::good("injecting invalid read request\n".into()))
            }
            "aio_write" if words.has('i') => {
                Ok(Ended::good("injecting invalid write request\n".into()))
            }
            "aio_read" => Read::parse(&words, Form::Asynchronous)
                .map(|read| self.start(async move |opened| read.run(opened).await)),
            "aio_write" if self.opened.as_ref().is_some_and(|opened| opened.is_read_only()) => {
                Ok(read_only())
            }
            "aio_write" => Write::parse(&words, Form::Asynchronous)
                .map(|write| self.start(async move |opened| write.run(opened).await)),
            "help" => Ok(help(&words)),
            name => match &self.opened {
                Some(opened) => on_disk::carry_out(opened, name, &words).await,
                None => Err(Refusal::Usage),
            },
        };
        let ended = ended.unwrap_or_else(|refusal| match refusal {
            Refusal::Usage => Ended::bad(command.usage()),
            Refusal::Because(reason) => Ended::bad(format!("{reason}\n")),
            Refusal::Complaint(reason) => {
                messages::tell(reason);
                Ended::bad(String::new())
            }
        });
        self.good &= ended.good;
        self.print(&ended.text)?;
        if let Some(reason) = ended.reason {
            messages::complain(reason);
        }
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
    fn start(&mut self, run: impl AsyncFnOnce(&Opened) -> Ended + 'static) -> Ended {
        let Some(opened) = self.opened.clone() else { return Ended::good(String::new()) };
        let reports = Rc::clone(&self.reports);
        self.asynchronous.push(spawn(async move {
            let ended = run(&opened).await;
            reports.borrow_mut().push_str(&ended.text);
            if let Some(reason) = ended.reason {
                messages::complain(reason);
            }
        }));
        Ended::good(String::new())
    }

    /// `open`
    async fn open_another(&mut self, words: &Words<'_>) -> Result<Ended, Refusal> {
        let given: Vec<String> = words.values('o').map(str::to_owned).collect();
        if self.naming.image_opts && !given.is_empty() {
            return Err("--image-opts and 'open -o' are mutually exclusive".to_owned().into());
        }
        let cache = match (words.value('t'), words.has('n')) {
            (Some(name), _) => CacheMode::parse(name).map_err(complaint)?,
            (None, true) => CacheMode::None,
            (None, false) => CacheMode::Writeback,
        };
        let discard = words.value('d').map(Discard::parse).transpose().map_err(complaint)?;
        let native = words.value('i').map(is_native).transpose().map_err(complaint)?;
        let path = match words.arguments.as_slice() {
            [] if given.is_empty() => return Err(Refusal::Usage),
            [] => None,
            [path] => Some(*path),
            _ => return Err(Refusal::Usage),
        };
        if self.opened.is_some() {
            return Err(complaint("file open already, try 'help close'"));
        }
        host::forget_encryption();
        let image = match path {
            Some(path) if given.is_empty() => self.naming.found(path.as_ref(), None),
            path => self.naming.with_options(path, options::parse(&given)),
        };
        let shown = path.filter(|_| !self.naming.image_opts);
        let image = image.map_err(|reason| refused(cannot_open(shown, reason)))?;
        let opening = Opening {
            image,
            shown: shown.map(str::to_owned),
            read_only: words.has('r'),
            cache,
            discard: discard.unwrap_or(Discard::Unmap),
            native: native.unwrap_or(words.has('k')),
            copy_on_read: words.has('C'),
            overlay: words.has('s'),
            force_share: words.has('U'),
            snapshot: None,
        };
        self.opened = Some(Rc::new(opening.open().await.map_err(refused)?));
        Ok(Ended::good(String::new()))
    }

    /// Takes the open image, once no asynchronous request uses it.
    async fn take(&mut self) -> Result<Option<Opened>, Failure> {
        self.wait().await?;
        Ok(self.opened.take().and_then(Rc::into_inner))
    }

    /// `close`
    async fn close(&mut self) -> Result<Ended, Refusal> {
        let opened = self.take().await.map_err(refused)?;
        if let Some(opened) = opened {
            opened.disk.close().await.map_err(|error| refused(error.into()))?;
        }
        Ok(Ended::good(String::new()))
    }

    /// `reopen`
    async fn reopen(&mut self, words: &Words<'_>) -> Result<Ended, Refusal> {
        if !words.arguments.is_empty() {
            return Err(Refusal::Usage);
        }
        let (read_only, writable) = (words.has('r'), words.has('w'));
        if read_only && writable {
            return Err(complaint("Only one -r/-w option may be given"));
        }
        let cache = words.value('c').map(CacheMode::parse).transpose().map_err(complaint)?;
        let given: Vec<_> = words.values('o').map(str::to_owned).collect();
        let Some(opened) = &self.opened else { return Err(Refusal::Usage) };
        let has = (read_only || writable, cache.is_some());
        let changes = Changes::parse(&options::parse(&given), has, opened).map_err(complaint)?;
        let Some(opened) = self.take().await.map_err(refused)? else {
            return Err(Refusal::Usage);
        };
        let mut opening = opened.opening().clone();
        if read_only || writable {
            opening.set_read_only(read_only);
        }
        if let Some(cache) = cache {
            opening.set_cache(cache);
        }
        changes.apply(&mut opening);
        match opened.reopen(opening).await {
            Ok(opened) => self.opened = Some(Rc::new(opened)),
            Err((failure, opened)) => {
                self.opened = opened.map(Rc::new);
                return Err(refused(failure));
            }
        }
        Ok(Ended::good(String::new()))
    }
}

/// qemu-io's message, prefixed with the program's name.
fn complaint(message: impl std::fmt::Display) -> Refusal {
    Refusal::Complaint(format!("{}: {message}", crate::program::name()))
}

fn refused(failure: Failure) -> Refusal {
    complaint(failure.message.unwrap_or_default())
}

/// The result of a command that requires QEMU's blkdebug.
fn not_supported(what: &str) -> Ended {
    Ended::bad(format!("{what}: Operation not supported\n"))
}

/// `sigraise`
fn raise(words: &Words<'_>) -> Result<Ended, Refusal> {
    let text = words.arguments.first().copied().ok_or(Refusal::Usage)?;
    let signal = number(text).ok().and_then(|number| i32::try_from(number).ok());
    let signal = signal.ok_or_else(|| {
        format!("Parsing error: non-numeric argument, or extraneous/unrecognized suffix -- {text}")
    })?;
    if signal == 0 {
        return Ok(Ended::good(String::new()));
    }
    match signal_hook::low_level::raise(signal) {
        Ok(()) => Ok(Ended::good(String::new())),
        Err(_) => Err(format!("{text} is not a signal").into()),
    }
}

async fn pause(words: &Words<'_>) -> Result<Ended, Refusal> {
    let text = words.arguments.first().copied().ok_or(Refusal::Usage)?;
    let time = text.parse().map_err(|_| format!("{text} is not a valid number"))?;
    sleep(Duration::from_millis(time)).await;
    Ok(Ended::good(String::new()))
}

fn help(words: &Words<'_>) -> Ended {
    match words.arguments.first() {
        None => Ended::good(Command::all()),
        Some(name) => match Command::find(name) {
            Some(command) => Ended::good(command.explanation()),
            None => Ended::bad(format!("command {name} not found\n")),
        },
    }
}
