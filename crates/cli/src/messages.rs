//! Output to stderr: the log and messages. Whatever stderr is (a full disk, an unread pipe, closed), printing never
//! fails, and never delays a server's requests.

use isobath_qcow2::text::{escape, is_hidden};
use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{panic, thread};
use tracing_subscriber::fmt::MakeWriter;

/// Maximum bytes queued for stderr once it is detached.
const MOST_WAITING: usize = 1 << 20;
/// How long [`settle`] waits while stderr makes no progress.
const PATIENCE: Duration = Duration::from_secs(1);

/// Prints a message on a line of its own.
pub(crate) fn tell(message: impl Display) {
    put(harmless(&format!("{message}\n"), false));
}

/// Like [`tell`], with the program's name in front.
pub(crate) fn complain(message: impl Display) {
    tell(format_args!("{}: {message}", crate::program::name()));
}

/// Notes that `image` becomes raw because no format was given, if its name is that of a qcow2 image. `option` gives
/// one.
pub(crate) fn note_raw(image: &std::path::Path, option: &str) {
    let named = image.extension().is_some_and(|kind| kind.eq_ignore_ascii_case("qcow2"));
    // QEMU's programs say nothing.
    if named && !crate::program::is_link() {
        let name = isobath_storage::shown(image);
        complain(format_args!(
            "note: '{name}' becomes a raw image, since no format is given; a qcow2 image needs \
             '{option} qcow2'"
        ));
    }
}

/// Notes that what takes a while of the index of the new overlay `image` is left to others.
pub(crate) fn note_index_left(image: &std::path::Path) {
    // QEMU's programs say nothing.
    if !crate::program::is_link() {
        let name = isobath_storage::shown(image);
        complain(format_args!(
            "note: '{name}' has no whole index of the chain below, since that takes a while: 'isobath info' shows what \
             there is, and 'isobath index' makes it whole at once"
        ));
    }
}

/// From now on, a thread writes to stderr, and nothing waits for it: messages beyond [`MOST_WAITING`] are dropped and
/// counted. For servers; call it after any fork.
pub(crate) fn detach() {
    let mut state = lock();
    if !state.detached {
        let started = thread::Builder::new().name("stderr".into()).spawn(write_for_ever);
        // Without a thread, writes stay synchronous.
        state.detached = started.is_ok();
    }
}

/// Makes a file stderr, for all later messages: without colours.
///
/// # Errors
/// Those of `dup2(2)`.
pub(crate) fn log_to(file: &std::fs::File) -> io::Result<()> {
    settle();
    rustix::stdio::dup2_stderr(file)?;
    IN_FILE.store(true, Ordering::Relaxed);
    Ok(())
}

/// Waits until everything is written, or stderr makes no more progress. Call it before the process ends.
pub(crate) fn settle() {
    let mut state = lock();
    while !state.waiting.is_empty() || state.writing {
        let left = state.waiting.len();
        let (next, waited) =
            CHANGED.wait_timeout(state, PATIENCE).unwrap_or_else(PoisonError::into_inner);
        state = next;
        if waited.timed_out() && state.waiting.len() >= left {
            return;
        }
    }
}

/// Routes the program's log and panic messages through this module.
pub(crate) fn take_over(filter: tracing_subscriber::EnvFilter) {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let colours = io::stderr().is_terminal() && !plain;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(Log { colours })
        .with_ansi(colours)
        .log_internal_errors(false)
        .init();
    panic::set_hook(Box::new(|panic| {
        let name = thread::current().name().unwrap_or("<unnamed>").to_owned();
        let trace = std::backtrace::Backtrace::capture();
        let trace = match trace.status() {
            std::backtrace::BacktraceStatus::Captured => format!("\n{trace}"),
            _ => String::new(),
        };
        put(harmless(&format!("thread '{name}' {panic}{trace}\n"), false));
    }));
}

/// The writer for the log's lines.
struct Log {
    /// Whether lines have colours, whose escape codes must be kept.
    colours: bool,
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = &'a Self;

    fn make_writer(&'a self) -> Self::Writer {
        self
    }
}

impl Write for &Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        put(match (self.colours, IN_FILE.load(Ordering::Relaxed)) {
            (true, true) => harmless(&uncoloured(&text), false),
            (colours, _) => harmless(&text, colours),
        });
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Whether stderr is a log, where there are no colours.
static IN_FILE: AtomicBool = AtomicBool::new(false);

/// The text without the codes of its colours.
fn uncoloured(text: &str) -> String {
    let mut parts = text.split("\x1b[");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.bytes().take_while(|byte| matches!(byte, b'0'..=b'9' | b';')).count();
        let after = part.get(code..).unwrap_or_default();
        out.push_str(after.strip_prefix('m').unwrap_or(part));
    }
    out
}

/// Escapes characters that would control a terminal or mislead the reader. With `colours`, escape characters are kept:
/// the log has already escaped those in its input.
pub(crate) fn harmless(text: &str, colours: bool) -> String {
    let mut out = String::with_capacity(text.len());
    let kept = |c: char| matches!(c, '\n' | '\t') || (colours && c == '\x1b');
    // Writing to a string does not fail.
    let _ = escape(&mut out, text, |c| is_hidden(c) && !kept(c));
    out
}

/// The queue of messages.
struct Queue {
    waiting: VecDeque<String>,
    bytes: usize,
    /// Whether a message is being written.
    writing: bool,
    /// Number of dropped messages.
    lost: u64,
    /// Whether only the thread writes.
    detached: bool,
}

static STATE: Mutex<Queue> = Mutex::new(Queue {
    waiting: VecDeque::new(),
    bytes: 0,
    writing: false,
    lost: 0,
    detached: false,
});
/// Signalled when a message is queued or written.
static CHANGED: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, Queue> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn put(text: String) {
    let mut state = lock();
    if !state.detached {
        // With the lock held, to keep the order.
        write_whole(&text);
        return;
    }
    if state.bytes + text.len() > MOST_WAITING {
        state.lost += 1;
        return;
    }
    state.bytes += text.len();
    state.waiting.push_back(text);
    CHANGED.notify_all();
}

/// The thread that writes.
fn write_for_ever() {
    let mut state = lock();
    loop {
        let Some(text) = state.waiting.pop_front() else {
            state = CHANGED.wait(state).unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        state.bytes -= text.len();
        state.writing = true;
        let lost = std::mem::take(&mut state.lost);
        drop(state);
        write_whole(&text);
        if lost > 0 {
            write_whole(&format!(
                "isobath: dropped {lost} messages: stderr was not read fast enough\n"
            ));
        }
        state = lock();
        state.writing = false;
        CHANGED.notify_all();
    }
}

/// Writes text to stderr, if possible.
fn write_whole(text: &str) {
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        match io::stderr().write(rest) {
            Ok(0) => return,
            Ok(count) => rest = rest.get(count..).unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait_for_room(),
            // There is nowhere else to report it.
            Err(_) => return,
        }
    }
}

/// Waits until a non-blocking stderr accepts more.
fn wait_for_room() {
    use std::os::fd::AsRawFd;
    let descriptor = io::stderr().as_fd().as_raw_fd();
    let mut poll = libc::pollfd { fd: descriptor, events: libc::POLLOUT, revents: 0 };
    // SAFETY: one valid structure; an error makes the caller try again.
    unsafe { libc::poll(&raw mut poll, 1, -1) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_gets_no_colours() {
        for (text, plain) in [
            ("\x1b[2m12:00\x1b[0m \x1b[31mERROR\x1b[0m x", "12:00 ERROR x"),
            ("\x1b[38;5;1mé\x1b[mü", "éü"),
            ("\x1b[31", "31"),
            ("plain [0m", "plain [0m"),
        ] {
            assert_eq!(uncoloured(text), plain);
        }
    }

    #[test]
    fn lines_do_nothing_to_a_terminal() {
        assert_eq!(harmless("a\u{202e}b\x1b[2J\r\n", false), "a\\u{202e}b\\u{1b}[2J\\r\n");
        assert_eq!(harmless("\x1b[31mERROR\x1b[0m\u{2066}", true), "\x1b[31mERROR\x1b[0m\\u{2066}");
    }
}
