//! A transport that plays a prepared conversation, and the client's side of the protocol in bytes.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used)]

use isobath_export::nbd::Transport;
use isobath_export::nbd::wire::{self, option};
use isobath_storage::IoBuf;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::future::poll_fn;
use std::io;
use std::task::Poll;

/// What a client says, in pieces, and what it has heard.
#[derive(Default)]
pub struct Script {
    pub input: RefCell<VecDeque<Vec<u8>>>,
    pub output: RefCell<Vec<u8>>,
    /// Sends fail once this many bytes were sent.
    pub deaf_after: Option<usize>,
    /// How often a send gives way before it is done.
    pub slow: Cell<usize>,
    /// The most bytes given to a single send.
    pub largest_send: Cell<usize>,
    /// How many bytes were sent when each receive began.
    pub sent_before: RefCell<Vec<usize>>,
}

impl Script {
    pub fn new(input: impl IntoIterator<Item = Vec<u8>>) -> Self {
        Self { input: RefCell::new(input.into_iter().collect()), ..Self::default() }
    }

    /// Plays `input` cut into pieces of the given lengths, over and over.
    pub fn cut(mut input: &[u8], pieces: &[usize]) -> Self {
        let mut cut = Vec::new();
        for piece in pieces.iter().cycle() {
            if input.is_empty() {
                break;
            }
            let (first, rest) = input.split_at((*piece).clamp(1, input.len()));
            cut.push(first.to_vec());
            input = rest;
        }
        Self::new(cut)
    }
}

async fn give_way(mut times: usize) {
    poll_fn(|cx| {
        if times == 0 {
            return Poll::Ready(());
        }
        times -= 1;
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

impl Transport for Script {
    async fn receive(&self, mut buf: IoBuf, from: usize) -> (io::Result<usize>, IoBuf) {
        self.sent_before.borrow_mut().push(self.output.borrow().len());
        give_way(1).await;
        let mut input = self.input.borrow_mut();
        let Some(mut piece) = input.pop_front() else { return (Ok(0), buf) };
        let room = &mut buf[from..];
        let count = room.len().min(piece.len());
        assert!(count > 0, "a receive into nothing");
        room[..count].copy_from_slice(&piece[..count]);
        if count < piece.len() {
            input.push_front(piece.split_off(count));
        }
        (Ok(count), buf)
    }

    async fn send(&self, bufs: Vec<IoBuf>) -> (io::Result<()>, Vec<IoBuf>) {
        give_way(self.slow.get()).await;
        let mut output = self.output.borrow_mut();
        let before = output.len();
        for buf in &bufs {
            output.extend_from_slice(buf);
        }
        self.largest_send.set(self.largest_send.get().max(output.len() - before));
        let deaf = self.deaf_after.is_some_and(|limit| output.len() > limit);
        let result = if deaf { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) };
        (result, bufs)
    }
}

/// The client's flags: fixed newstyle, no zeroes.
pub fn flags() -> Vec<u8> {
    3_u32.to_be_bytes().to_vec()
}

/// An option with its data.
pub fn option(kind: u32, data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u32).to_be_bytes();
    [&wire::OPTION_MAGIC.to_be_bytes()[..], &kind.to_be_bytes(), &length, data].concat()
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

/// `GO` for an export, with nothing further asked.
pub fn go(name: &str) -> Vec<u8> {
    option(option::GO, &[string(name), vec![0, 0]].concat())
}

/// `SET_META_CONTEXT` for an export.
pub fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let count = (queries.len() as u32).to_be_bytes().to_vec();
    let queries = queries.iter().flat_map(|query| string(query)).collect();
    option(option::SET_META_CONTEXT, &[string(name), count, queries].concat())
}

/// The whole handshake for the default export, with simple replies or with structured ones and
/// every context.
pub fn handshake(structured: bool) -> Vec<u8> {
    if structured {
        let names = ["base:allocation", "qemu:allocation-depth"];
        let structured = option(option::STRUCTURED_REPLY, &[]);
        [flags(), structured, contexts("", &names), go("")].concat()
    } else {
        [flags(), go("")].concat()
    }
}

/// A request with its payload.
pub fn request(command: u16, flags: u16, cookie: u64, range: (u64, u32), data: &[u8]) -> Vec<u8> {
    let (offset, length) = range;
    let request = isobath_export::nbd::request::Request { flags, command, cookie, offset, length };
    [&request.encode()[..], data].concat()
}

/// A reply of the transmission phase.
#[derive(Clone, PartialEq, Eq)]
pub enum Reply {
    Simple { error: u32, cookie: u64 },
    Chunk { flags: u16, kind: u16, cookie: u64, payload: Vec<u8> },
}

/// With no more than the start of the payload, which may be what a disk holds.
impl fmt::Debug for Reply {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Simple { error, cookie } => write!(out, "error {error} for {cookie}"),
            Self::Chunk { flags, kind, cookie, payload } => {
                let (length, start) = (payload.len(), &payload[..payload.len().min(64)]);
                write!(out, "chunk {kind} for {cookie}, flags {flags}, {length} bytes: ")?;
                write!(out, "{:?}", String::from_utf8_lossy(start))
            }
        }
    }
}

fn take<const N: usize>(output: &mut &[u8]) -> [u8; N] {
    let (head, rest) = output.split_first_chunk::<N>().expect("the output ends within a reply");
    *output = rest;
    *head
}

/// Skips the handshake's part of the output.
pub fn skip_handshake(output: &[u8]) -> &[u8] {
    let mut output = &output[18..];
    while output.starts_with(&wire::OPTION_REPLY_MAGIC.to_be_bytes()) {
        let length = u32::from_be_bytes(output[16..20].try_into().unwrap());
        output = &output[20 + length as usize..];
    }
    output
}

/// Parses replies; `read_length` tells how much data follows a simple reply without an error.
pub fn replies(mut output: &[u8], read_length: impl Fn(u64) -> usize) -> Vec<(Reply, Vec<u8>)> {
    let output = &mut output;
    let mut replies = Vec::new();
    while !output.is_empty() {
        let magic = u32::from_be_bytes(take(output));
        if magic == wire::SIMPLE_REPLY_MAGIC {
            let error = u32::from_be_bytes(take(output));
            let cookie = u64::from_be_bytes(take(output));
            let (data, rest) = output.split_at(if error == 0 { read_length(cookie) } else { 0 });
            *output = rest;
            replies.push((Reply::Simple { error, cookie }, data.to_vec()));
            continue;
        }
        assert_eq!(magic, wire::STRUCTURED_REPLY_MAGIC, "neither kind of reply");
        let flags = u16::from_be_bytes(take(output));
        let kind = u16::from_be_bytes(take(output));
        let cookie = u64::from_be_bytes(take(output));
        let length = u32::from_be_bytes(take(output)) as usize;
        let (payload, rest) = output.split_at(length);
        *output = rest;
        replies.push((Reply::Chunk { flags, kind, cookie, payload: payload.to_vec() }, vec![]));
    }
    replies
}
