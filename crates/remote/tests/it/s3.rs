//! A server of the part of S3 that is used, which fails on request.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

/// What goes wrong with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It is answered with this status, and nothing is done.
    Status(u16),
    /// The connection ends before anything is done.
    Reset,
    /// It is done, and the connection ends before the answer.
    AnswerLost,
    /// The answer's body ends in the middle.
    Truncated,
    /// One bit of the answer's body differs.
    WrongByte,
    /// The answer's body comes byte for byte, far too slowly, until the client gives up.
    Drops,
    /// It is answered with this status, and a body that does not end until the client gives up, or has far too much.
    Endless(u16),
    /// No answer comes until the client gives up.
    Silence,
    /// It is done, and no answer comes until the client gives up.
    Unanswered,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Vec<u8>>,
    uploads: BTreeMap<String, BTreeMap<u32, Vec<u8>>>,
    requests: Vec<String>,
    faults: BTreeMap<usize, Fault>,
    /// Where all requests are sent on to.
    elsewhere: Option<String>,
    /// The connections on which an answer does not come.
    silent: Vec<TcpStream>,
    /// The bytes of each answer without an end that has come to one.
    endless: Vec<usize>,
    /// Conditional puts are not implemented.
    unconditional: bool,
}

/// The server, on a port of this machine, until the process ends.
#[derive(Clone)]
pub(crate) struct Server {
    state: Arc<Mutex<State>>,
    pub(crate) endpoint: String,
}

struct Request {
    method: String,
    path: String,
    query: BTreeMap<String, String>,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

struct Response {
    status: u16,
    headers: Vec<(&'static str, String)>,
    body: Vec<u8>,
}

fn answer(status: u16, body: impl Into<Vec<u8>>) -> Response {
    Response { status, headers: Vec::new(), body: body.into() }
}

fn tag(bytes: &[u8]) -> String {
    format!("\"{}\"", isobath_remote::Digest::of(bytes))
}

impl Server {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let server = Self { state: Arc::default(), endpoint };
        let accepting = server.clone();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let server = accepting.clone();
                thread::spawn(move || server.serve(&stream.unwrap()));
            }
        });
        server
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Forgets the requests so far; the faults are those of later ones, by number.
    pub(crate) fn fail(&self, faults: impl IntoIterator<Item = (usize, Fault)>) {
        let mut state = self.state();
        state.requests.clear();
        state.silent.clear();
        state.endless.clear();
        state.faults = faults.into_iter().collect();
    }

    pub(crate) fn requests(&self) -> Vec<String> {
        self.state().requests.clone()
    }

    /// Sends all requests on to another server.
    pub(crate) fn redirect_to(&self, other: &Self) {
        self.state().elsewhere = Some(other.endpoint.clone());
    }

    pub(crate) fn refuse_conditions(&self) {
        self.state().unconditional = true;
    }

    pub(crate) fn objects(&self) -> BTreeMap<String, Vec<u8>> {
        self.state().objects.clone()
    }

    pub(crate) fn set_objects(&self, objects: BTreeMap<String, Vec<u8>>) {
        self.state().objects = objects;
    }

    /// The bytes of each answer without an end of which the client has had enough.
    pub(crate) fn endless(&self) -> Vec<usize> {
        self.state().endless.clone()
    }

    /// How many requests are without an answer, and stay so.
    pub(crate) fn unanswered(&self) -> usize {
        self.state().silent.len()
    }

    /// Closes the connections on which an answer does not come.
    pub(crate) fn hang_up(&self) {
        for stream in self.state().silent.drain(..) {
            // The client may have closed it.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Until the client closes the connection, or the test does.
    fn be_silent(&self, mut reader: BufReader<&TcpStream>) {
        let stream = reader.get_ref().try_clone().unwrap();
        self.state().silent.push(stream);
        let _ = reader.read(&mut [0]);
    }

    fn never_end(&self, status: u16, mut stream: &TcpStream) {
        const FAR_TOO_MUCH: usize = 256 << 20;
        let head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\n\r\n");
        let (block, mut sent) = (vec![b' '; 64 << 10], 0);
        if stream.write_all(head.as_bytes()).is_ok() {
            while sent < FAR_TOO_MUCH && stream.write_all(&block).is_ok() {
                sent += block.len();
            }
        }
        self.state().endless.push(sent);
        let _ = stream.shutdown(Shutdown::Both);
    }

    fn serve(&self, stream: &TcpStream) {
        let mut reader = BufReader::new(stream);
        while let Some(request) = read(&mut reader) {
            let fault = {
                let mut state = self.state();
                let number = state.requests.len();
                state
                    .requests
                    .push(format!("{} {} {:?}", request.method, request.path, request.query));
                state.faults.get(&number).copied()
            };
            match fault {
                Some(Fault::Reset) => return,
                Some(Fault::Silence) => return self.be_silent(reader),
                Some(Fault::Endless(status)) => return self.never_end(status, stream),
                _ => {}
            }
            let mut response = match fault {
                Some(Fault::Status(status)) => answer(status, "<Error><Code>Fault</Code></Error>"),
                _ => self.state().handle(&request),
            };
            let length = response.body.len();
            if request.method == "HEAD" {
                // A client that gets a body takes it for the next answer, and asks once more on another connection.
                response.body.clear();
            }
            match fault {
                Some(Fault::AnswerLost) => return,
                Some(Fault::Unanswered) => return self.be_silent(reader),
                Some(Fault::Truncated) => response.body.truncate(length / 2),
                Some(Fault::WrongByte) if length > 0 && request.method == "GET" => {
                    response.body[length / 2] ^= 1;
                }
                _ => {}
            }
            let mut head = format!("HTTP/1.1 {} X\r\n", response.status);
            if !response.headers.iter().any(|(name, _)| *name == "Content-Length") {
                write!(head, "Content-Length: {length}\r\n").unwrap();
            }
            for (name, value) in &response.headers {
                write!(head, "{name}: {value}\r\n").unwrap();
            }
            head.push_str("\r\n");
            let mut out = stream;
            if fault == Some(Fault::Drops) {
                let _ = out.write_all(head.as_bytes());
                for byte in response.body.iter().cycle() {
                    if out.write_all(&[*byte]).is_err() {
                        return;
                    }
                    thread::sleep(Duration::from_millis(10));
                }
            }
            if out.write_all(head.as_bytes()).and_then(|()| out.write_all(&response.body)).is_err()
            {
                return;
            }
            if fault == Some(Fault::Truncated) {
                return;
            }
        }
    }
}

/// The next request of a connection.
fn read(reader: &mut BufReader<&TcpStream>) -> Option<Request> {
    let line = |reader: &mut BufReader<&TcpStream>| {
        let mut line = String::new();
        reader.read_line(&mut line).ok().filter(|read| *read > 0)?;
        Some(line.trim_end().to_owned())
    };
    let first = line(reader)?;
    let mut words = first.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?);
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    let query = pairs.map(|pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        (name.to_owned(), value.replace("%2F", "/"))
    });
    let (path, query) = (path.to_owned(), query.collect());
    let mut headers = BTreeMap::new();
    loop {
        let line = line(reader)?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(Request { method, path, query, headers, body })
}

impl State {
    fn handle(&mut self, request: &Request) -> Response {
        if let Some(place) = &self.elsewhere {
            let headers = vec![("Location", format!("{place}{}", request.path))];
            return Response { status: 307, headers, body: Vec::new() };
        }
        let has = |name| request.query.contains_key(name);
        let query = |name| request.query.get(name).cloned().unwrap_or_default();
        let key = request.path.strip_prefix("/bucket").unwrap().trim_start_matches('/').to_owned();
        match &*request.method {
            "GET" if has("list-type") => self.list(&query("prefix")),
            "POST" if has("delete") => {
                let text = String::from_utf8(request.body.clone()).unwrap();
                let mut answered = String::from("<DeleteResult>");
                for part in text.split("<Key>").skip(1) {
                    let key = part.split("</Key>").next().unwrap();
                    self.objects.remove(key);
                    write!(answered, "<Deleted><Key>{key}</Key></Deleted>").unwrap();
                }
                answer(200, answered + "</DeleteResult>")
            }
            "POST" if has("uploads") => {
                let id = format!("upload{}", self.uploads.len());
                self.uploads.insert(id.clone(), BTreeMap::new());
                let result = "InitiateMultipartUploadResult";
                answer(200, format!("<{result}><UploadId>{id}</UploadId></{result}>"))
            }
            "PUT" if has("uploadId") => {
                let Some(parts) = self.uploads.get_mut(&query("uploadId")) else {
                    return answer(404, "");
                };
                parts.insert(query("partNumber").parse().unwrap(), request.body.clone());
                Response {
                    status: 200,
                    headers: vec![("ETag", tag(&request.body))],
                    body: Vec::new(),
                }
            }
            "POST" => {
                let Some(parts) = self.uploads.remove(&query("uploadId")) else {
                    return answer(404, "");
                };
                let bytes: Vec<u8> = parts.into_values().flatten().collect();
                let result = "CompleteMultipartUploadResult";
                let text =
                    format!("<{result}><ETag>{}</ETag></{result}>", tag(&bytes).replace('"', ""));
                self.objects.insert(key, bytes);
                answer(200, text)
            }
            "DELETE" if has("uploadId") => {
                self.uploads.remove(&query("uploadId"));
                answer(204, "")
            }
            "DELETE" => {
                self.objects.remove(&key);
                answer(204, "")
            }
            "PUT" => self.put(key, request),
            "GET" | "HEAD" => self.get(&key, request),
            _ => answer(405, ""),
        }
    }

    fn put(&mut self, key: String, request: &Request) -> Response {
        let (none, is) = (request.headers.get("if-none-match"), request.headers.get("if-match"));
        if self.unconditional && (none.is_some() || is.is_some()) {
            return answer(501, "<Error><Code>NotImplemented</Code></Error>");
        }
        let now = self.objects.get(&key).map(|bytes| tag(bytes));
        if (none.is_some() && now.is_some()) || (is.is_some() && is != now.as_ref()) {
            return answer(412, "<Error><Code>PreconditionFailed</Code></Error>");
        }
        let headers = vec![("ETag", tag(&request.body))];
        self.objects.insert(key, request.body.clone());
        Response { status: 200, headers, body: Vec::new() }
    }

    fn get(&self, key: &str, request: &Request) -> Response {
        let Some(bytes) = self.objects.get(key) else { return answer(404, "") };
        let mut headers = vec![
            ("ETag", tag(bytes)),
            ("Last-Modified", "Sat, 28 Nov 2026 00:00:00 GMT".to_owned()),
        ];
        if request.method == "HEAD" {
            headers.push(("Content-Length", bytes.len().to_string()));
            return Response { status: 200, headers, body: Vec::new() };
        }
        let range = request.headers.get("range").and_then(|range| {
            let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some((first.parse::<usize>().ok()?, last.parse::<usize>().ok()?))
        });
        let Some((first, last)) = range else {
            return Response { status: 200, headers, body: bytes.clone() };
        };
        let Some(body) = bytes.get(first..bytes.len().min(last + 1)) else {
            return answer(416, "");
        };
        headers.push(("Content-Range", format!("bytes {first}-{last}/{}", bytes.len())));
        Response { status: 206, headers, body: body.to_vec() }
    }

    fn list(&self, prefix: &str) -> Response {
        let mut text = String::from("<ListBucketResult><IsTruncated>false</IsTruncated>");
        for (key, bytes) in self.objects.iter().filter(|(key, _)| key.starts_with(prefix)) {
            let (length, tag) = (bytes.len(), tag(bytes).replace('"', ""));
            write!(
                text,
                "<Contents><Key>{key}</Key><Size>{length}</Size><ETag>{tag}</ETag>\
                 <LastModified>2026-11-28T00:00:00.000Z</LastModified></Contents>"
            )
            .unwrap();
        }
        answer(200, text + "</ListBucketResult>")
    }
}
