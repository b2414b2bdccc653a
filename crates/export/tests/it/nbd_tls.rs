//! Encrypted connections, with the programs that people use and with clients that attack.

use crate::memory_disk::MemoryDisk;
use crate::script::{contexts, flags, go, option as option_bytes, request};
use crate::served::{Served, export, run};
use isobath_export::nbd::Limits;
use isobath_export::nbd::wire::{command, option, option_reply};
use isobath_export::tls::Security;
use isobath_testkit::args;
use isobath_testkit::certificates::{self, Authority};
use isobath_tls::{Admission, Blocking, ClientCredentials, ServerCredentials};
use rand::{RngExt, SeedableRng};
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

const MIB: usize = 1 << 20;
/// How long a server may take to end a connection.
const PATIENCE: Duration = Duration::from_mins(1);
const SUBJECT: &str = "/C=GB/O=Example, Org/CN=client";
/// As `GnuTLS` prints it.
const NAME: &str = r"C=GB,O=Example\, Org,CN=client";

/// Keys, and credentials with them.
struct Keys(certificates::Keys);

impl Keys {
    fn new() -> Self {
        Self(certificates::Keys::new(SUBJECT))
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.at(name)
    }

    fn credentials(&self, admission: Admission) -> Arc<ServerCredentials> {
        Arc::new(ServerCredentials::read(&self.at("server"), admission).unwrap())
    }

    fn required(&self, admission: Admission) -> Security {
        Security::Required(self.credentials(admission))
    }

    /// A copy of the client's directory without its certificate.
    fn anonymous(&self) -> PathBuf {
        let anonymous = self.at("anonymous");
        fs::create_dir(&anonymous).unwrap();
        fs::copy(self.at("client/ca-cert.pem"), anonymous.join("ca-cert.pem")).unwrap();
        anonymous
    }
}

fn served(security: &Security) -> Served {
    Served::secured(vec![export("disk", noise())], Limits::default(), 1, security)
}

/// A disk of random bytes.
fn noise() -> MemoryDisk {
    let disk = MemoryDisk::new(8 * MIB);
    let mut random = rand::rngs::StdRng::seed_from_u64(1);
    disk.overwrite(|bytes| random.fill(bytes));
    disk
}

/// The export's name for libnbd, with the credentials in `directory`.
fn uri(served: &Served, directory: &std::path::Path) -> String {
    format!("nbds://{}/disk?tls-certificates={}", served.tcp, directory.display())
}

/// QEMU's options for the export.
fn qemu(served: &Served, directory: &std::path::Path, rest: &[&str]) -> Vec<String> {
    let object = format!("tls-creds-x509,id=tls0,dir={},endpoint=client", directory.display());
    let port = served.tcp.port();
    let image = format!("driver=nbd,host=127.0.0.1,port={port},export=disk,tls-creds=tls0");
    let mut all: Vec<String> = rest.iter().map(|&text| text.to_owned()).collect();
    all.extend(["--object".into(), object, "--image-opts".into(), image]);
    all
}

#[test]
fn libnbd_and_qemu_read_and_write_encrypted() {
    let keys = Keys::new();
    let served = served(&keys.required(Admission::Certified));
    let uri = uri(&served, &keys.at("client"));
    let info = run("nbdinfo", ["--json", &uri]).ok().json();
    assert_eq!((&info["TLS"], &info["structured"]), (&true.into(), &true.into()));
    let copy = served.directory.path().join("copy");
    let _ = run("nbdcopy", args![&uri, &copy]).ok();
    let bytes = fs::read(&copy).unwrap();
    assert!(bytes == served.disk(0).bytes(0, 8 * MIB));

    let changed: Vec<u8> = bytes.iter().map(|byte| byte ^ 0x55).collect();
    fs::write(&copy, &changed).unwrap();
    let _ = run("nbdcopy", args![&copy, &uri]).ok();
    assert!(changed == served.disk(0).bytes(0, 8 * MIB));

    let described = run("qemu-img", qemu(&served, &keys.at("client"), &["info", "--output=json"]));
    assert_eq!(described.ok().json()["virtual-size"], 8 * MIB);
    let write = ["-c", "aio_write -P 7 1000 3M", "-c", "aio_flush", "-c", "read -P 7 1000 3M"];
    let wrote = run("qemu-io", qemu(&served, &keys.at("client"), &write)).ok().text();
    assert!(!wrote.contains("failed") && !wrote.contains("error"), "{wrote}");
    assert!(served.disk(0).bytes(1000, 3 * MIB).iter().all(|byte| *byte == 7));
}

#[test]
fn who_is_not_admitted_is_refused() {
    let keys = Keys::new();
    let (other, anonymous) = (keys.at("other"), keys.anonymous());
    let foreign = Authority::new(&keys.at("foreign"));
    foreign.client(&other, SUBJECT);
    // It knows the server's authority, but its certificate is another's.
    fs::copy(keys.at("client/ca-cert.pem"), other.join("ca-cert.pem")).unwrap();
    let admissions = [Admission::Certified, Admission::Named(vec!["CN=x".into(), NAME.into()])];
    for admission in admissions {
        let served = served(&keys.required(admission));
        assert_eq!(run("nbdinfo", ["--size", &uri(&served, &keys.at("client"))]).code(), 0);
        for directory in [&other, &anonymous] {
            let refused = run("nbdinfo", ["--size", &uri(&served, directory)]);
            assert_ne!(refused.code(), 0, "{}", directory.display());
        }
    }
    let served = served(&keys.required(Admission::Named(vec!["CN=client".into()])));
    assert_ne!(run("nbdinfo", ["--size", &uri(&served, &keys.at("client"))]).code(), 0);
}

#[test]
fn a_revoked_certificate_is_refused() {
    let keys = Keys::new();
    keys.0.authority.client(&keys.at("revoked"), "/CN=revoked");
    keys.0.authority.revoke(&keys.at("revoked"), &keys.at("server"));
    let served = served(&keys.required(Admission::Certified));
    assert_ne!(run("nbdinfo", ["--size", &uri(&served, &keys.at("revoked"))]).code(), 0);
    assert_eq!(run("nbdinfo", ["--size", &uri(&served, &keys.at("client"))]).code(), 0);
}

#[test]
fn everyone_is_admitted_where_that_is_asked_for() {
    let keys = Keys::new();
    let served = served(&keys.required(Admission::Everyone));
    assert_eq!(run("nbdinfo", ["--size", &uri(&served, &keys.anonymous())]).code(), 0);
}

#[test]
fn plain_clients_are_refused_only_where_tls_is_required() {
    let keys = Keys::new();
    let credentials = keys.credentials(Admission::Certified);
    let plain = |served: &Served| run("nbdinfo", ["--size", &format!("nbd://{}/disk", served.tcp)]);
    let required = served(&Security::Required(credentials.clone()));
    assert_ne!(plain(&required).code(), 0);
    let optional = served(&Security::Optional(credentials));
    assert_eq!(plain(&optional).code(), 0);
    let encrypted = run("nbdinfo", ["--json", &uri(&optional, &keys.at("client"))]).ok().json();
    assert_eq!(encrypted["TLS"], true);
    let none = served(&Security::Plain);
    assert_ne!(run("nbdinfo", ["--size", &uri(&none, &keys.at("client"))]).code(), 0);
}

/// A plain connection whose greeting was read and answered.
fn greeted(served: &Served) -> TcpStream {
    let mut stream = TcpStream::connect(served.tcp).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    stream.write_all(&flags()).unwrap();
    stream
}

/// What the server still sends until it ends the connection.
#[track_caller]
fn rest(stream: &mut TcpStream) -> Vec<u8> {
    let mut rest = Vec::new();
    if let Err(error) = stream.read_to_end(&mut rest) {
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    }
    rest
}

/// The type of the reply to an option.
fn answer(stream: &mut impl Read) -> u32 {
    let mut header = [0; 20];
    stream.read_exact(&mut header).unwrap();
    let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
    let mut payload = vec![0; number(16) as usize];
    stream.read_exact(&mut payload).unwrap();
    number(12)
}

/// Sends `STARTTLS`, and performs the handshake.
fn encrypted(keys: &Keys, mut stream: TcpStream) -> Blocking<TcpStream> {
    stream.write_all(&option_bytes(option::STARTTLS, &[])).unwrap();
    assert_eq!(answer(&mut stream), option_reply::ACK);
    let credentials = ClientCredentials::read(&keys.at("client")).unwrap();
    Blocking::handshake(stream, credentials.channel("localhost").unwrap()).unwrap()
}

#[test]
fn what_somebody_negotiates_before_tls_has_no_effect() {
    let keys = Keys::new();
    let served = served(&Security::Optional(keys.credentials(Admission::Certified)));
    let mut stream = greeted(&served);
    stream.write_all(&option_bytes(option::STRUCTURED_REPLY, &[])).unwrap();
    assert_eq!(answer(&mut stream), option_reply::ACK);
    stream.write_all(&contexts("disk", &["base:allocation"])).unwrap();
    assert_eq!(answer(&mut stream), option_reply::META_CONTEXT);
    assert_eq!(answer(&mut stream), option_reply::ACK);
    let mut client = encrypted(&keys, stream);
    client.write_all(&go("disk")).unwrap();
    while answer(&mut client) == option_reply::INFO {}
    client.write_all(&request(command::READ, 0, 9, (4096, 512), &[])).unwrap();
    let mut header = [0; 16];
    client.read_exact(&mut header).unwrap();
    assert_eq!(header[..4], 0x6744_6698_u32.to_be_bytes(), "the reply is a simple one");
    let mut data = vec![0; 512];
    client.read_exact(&mut data).unwrap();
    assert!(data == served.disk(0).bytes(4096, 512));
    client.write_all(&request(command::DISC, 0, 0, (0, 0), &[])).unwrap();
    assert_eq!(client.read(&mut data).unwrap(), 0, "the end is not a cut one");
}

#[test]
fn plain_bytes_are_never_taken_for_encrypted_ones() {
    let keys = Keys::new();
    let served = served(&keys.required(Admission::Certified));
    let starttls = option_bytes(option::STARTTLS, &[]);
    let choose = [option_bytes(option::STRUCTURED_REPLY, &[]), go("disk")].concat();
    // In one piece with STARTTLS, and after its answer.
    for together in [true, false] {
        let mut stream = greeted(&served);
        let first = if together { [&starttls[..], &choose].concat() } else { starttls.clone() };
        stream.write_all(&first).unwrap();
        if !together {
            assert_eq!(answer(&mut stream), option_reply::ACK);
            stream.write_all(&choose).unwrap();
        }
        let rest = rest(&mut stream);
        let magic = isobath_export::nbd::wire::OPTION_REPLY_MAGIC.to_be_bytes();
        assert!(!rest.windows(8).any(|window| window == magic), "no option was answered");
    }
    assert_eq!(run("nbdinfo", ["--size", &uri(&served, &keys.at("client"))]).code(), 0);
}

#[test]
fn changed_and_cut_streams_end_the_session_without_a_write() {
    let keys = Keys::new();
    let served = served(&keys.required(Admission::Certified));
    let before = served.disk(0).bytes(0, 8 * MIB);
    for change in [true, false] {
        let mut client = encrypted(&keys, greeted(&served));
        client.write_all(&go("disk")).unwrap();
        while answer(&mut client) == option_reply::INFO {}
        let (mut stream, mut channel, _) = client.into_parts();
        let write = request(command::WRITE, 0, 1, (0, 512), &[0xaa; 512]);
        channel.write(&[std::io::IoSlice::new(&write)]).unwrap();
        let mut record = vec![0; 4096];
        let length = channel.output(&mut record);
        record.truncate(length);
        if change {
            record[length / 2] ^= 1;
        } else {
            record.truncate(length - 1);
        }
        stream.write_all(&record).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let _ = rest(&mut stream);
    }
    assert!(served.disk(0).bytes(0, 8 * MIB) == before);
}

#[test]
fn a_handshake_that_never_ends_is_cut_off() {
    let keys = Keys::new();
    let security = keys.required(Admission::Certified);
    let limits = Limits { handshake: Duration::from_millis(50), ..Limits::default() };
    let slow = Served::secured(vec![export("disk", noise())], limits, 0, &security);
    let mut stream = TcpStream::connect(slow.tcp).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let hello = [flags(), option_bytes(option::STARTTLS, &[])].concat();
    // All of this may come too late. What is seen is that it ends.
    let _ = stream.write_all(&hello);
    let _ = rest(&mut stream);

    let served = served(&security);
    let mut stream = greeted(&served);
    stream.write_all(&option_bytes(option::STARTTLS, &[])).unwrap();
    assert_eq!(answer(&mut stream), option_reply::ACK);
    // A ClientHello of 64 KiB, in records that the server must collect.
    let mut hello = vec![1, 0, 0xff, 0xff];
    hello.resize(4 + 0xffff, 0);
    for piece in hello.chunks(1000) {
        let header = [0x16, 3, 1, (piece.len() >> 8) as u8, piece.len() as u8];
        if stream.write_all(&[&header[..], piece].concat()).is_err() {
            break;
        }
    }
    let _ = rest(&mut stream);
    assert_eq!(run("nbdinfo", ["--size", &uri(&served, &keys.at("client"))]).code(), 0);
}
