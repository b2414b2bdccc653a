//! Prometheus metrics, over HTTP.
//!
//! `GET /metrics` returns them in Prometheus text format 0.0.4. Each connection serves one request.

mod text;

use crate::monitor::Monitor;
use crate::server::Server;
use isobath_ring::net::after_failed_accept;
use isobath_ring::net::{Listener, Stream};
use isobath_ring::{spawn, timeout};
use isobath_storage::Host;
use isobath_storage::IoBuf;
use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

/// Concurrent connections; further ones are closed at once.
const CONNECTIONS: usize = 16;
/// The longest request.
const LONGEST: usize = 8 << 10;
/// How long a request and its reply may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves a listener until the future is dropped.
///
/// # Errors
/// If the listener fails.
///
/// # Panics
/// Outside a ring's `block_on`.
pub async fn serve<H: Host + Clone>(
    listener: Listener,
    server: Rc<Server<Monitor<H>>>,
) -> io::Result<()> {
    let connections = Rc::new(Cell::new(0));
    loop {
        let stream = match listener.accept().await {
            Ok(stream) => stream,
            Err(error) => {
                after_failed_accept(error, |_| {}).await?;
                continue;
            }
        };
        if connections.get() >= CONNECTIONS {
            continue;
        }
        connections.set(connections.get() + 1);
        let (counted, server) = (Counted(connections.clone()), server.clone());
        drop(spawn(async move {
            if timeout(PATIENCE, answer(&stream, &server)).await.is_err() {
                tracing::debug!("a metrics request timed out");
            }
            drop(counted);
        }));
    }
}

struct Counted(Rc<Cell<usize>>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

async fn answer<H: Host + Clone>(stream: &Stream, server: &Server<Monitor<H>>) {
    let mut request = Vec::new();
    let mut buf = IoBuf::zeroed(LONGEST);
    while !is_whole(&request) {
        let (result, back) = stream.recv(buf).await;
        buf = back;
        match result {
            Ok(count) if count > 0 && request.len() + count <= LONGEST => {
                request.extend_from_slice(buf.get(..count).unwrap_or_default());
            }
            _ => return,
        }
    }
    let (status, body) = match wanted(&request) {
        Wanted::Metrics => ("200 OK", text::metrics(server)),
        Wanted::Other => ("404 Not Found", "Metrics are served at /metrics.\n".to_owned()),
        Wanted::Method => ("405 Method Not Allowed", "Only GET is supported.\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n\
         Content-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    let reply = IoBuf::copy_of((head + &body).as_bytes());
    if let Err(error) = stream.send_all(reply).await.0 {
        tracing::debug!(%error, "cannot send metrics");
    }
}

enum Wanted {
    Metrics,
    Other,
    Method,
}

fn is_whole(request: &[u8]) -> bool {
    request.windows(4).any(|end| end == b"\r\n\r\n") || request.windows(2).any(|end| end == b"\n\n")
}

fn wanted(request: &[u8]) -> Wanted {
    let line = request.split(|byte| *byte == b'\r' || *byte == b'\n').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let mut words = line.split(' ');
    if words.next() != Some("GET") {
        return Wanted::Method;
    }
    let path = words.next().unwrap_or_default().split('?').next().unwrap_or_default();
    if path == "/metrics" { Wanted::Metrics } else { Wanted::Other }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_get_of_the_metrics_is_wanted() {
        assert!(is_whole(b"GET / HTTP/1.1\r\n\r\n") && !is_whole(b"GET / HTTP/1.1\r\nA: b\r\n"));
        assert!(matches!(wanted(b"GET /metrics HTTP/1.1\r\n\r\n"), Wanted::Metrics));
        assert!(matches!(wanted(b"GET /metrics?x HTTP/1.0\n\n"), Wanted::Metrics));
        assert!(matches!(wanted(b"GET / HTTP/1.1\r\n\r\n"), Wanted::Other));
        assert!(matches!(wanted(b"POST /metrics HTTP/1.1\r\n\r\n"), Wanted::Method));
        assert!(matches!(wanted(b"\r\n\r\n"), Wanted::Method));
    }
}
