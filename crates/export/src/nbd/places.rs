//! The address of an export, and QEMU's options to use it.

use crate::command_line::{absolute, option_value, quoted};
use crate::frontend::{Place, Shown};
use isobath_ring::net::Address;
use std::fmt::Write as _;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::ffi::OsStrExt;

/// The client's credentials, in the options for an export that is reached encrypted.
const CREDENTIALS: &str = "tls-creds-x509,id=tls0,endpoint=client,dir=DIRECTORY";

/// The location of a named export at an address, which is used encrypted if `tls` is set.
pub(super) fn place(address: &Address, tls: bool, name: &str, shown: Shown) -> Place {
    let uri = uri(address, tls, name);
    let (drive, blockdev) = if shown.read_only {
        (",readonly=on", ",read-only=on")
    } else {
        (",discard=unmap", ",discard=unmap")
    };
    let drive = format!("file={uri},format=raw,if=virtio{drive}");
    let node = format!("disk{}", shown.number);
    let server = match address {
        Address::Unix(path) => format!("server.type=unix,server.path={}", option_value(path)),
        Address::Tcp(address) => {
            let address = reachable(*address);
            format!("server.type=inet,server.host={},server.port={}", address.ip(), address.port())
        }
    };
    let export = name.replace(',', ",,");
    let tls_options = if tls { ",tls-creds=tls0" } else { "" };
    let blockdev =
        format!("driver=nbd,node-name={node},{server},export={export}{tls_options}{blockdev}");
    let blockdev = format!("-blockdev {} -device virtio-blk-pci,drive={node}", quoted(&blockdev));
    let uses = if tls {
        // QEMU has no name for an export that is reached encrypted.
        vec![format!("-object {CREDENTIALS} {blockdev}")]
    } else {
        vec![format!("-drive {}", quoted(&drive)), blockdev]
    };
    Place { name: uri, uses }
}

/// An export's NBD URI.
fn uri(address: &Address, tls: bool, name: &str) -> String {
    let scheme = if tls { "nbds" } else { "nbd" };
    let name = percent_encoded(name.as_bytes(), b"");
    match address {
        Address::Unix(path) => {
            let path = absolute(path);
            let path = percent_encoded(path.as_os_str().as_bytes(), b"/");
            format!("{scheme}+unix:///{name}?socket={path}")
        }
        Address::Tcp(address) => format!("{scheme}://{}/{name}", reachable(*address)),
    }
}

/// An address at which a client on this machine reaches the server: `0.0.0.0` and `::` stand for all addresses.
fn reachable(address: SocketAddr) -> SocketAddr {
    let mut address = address;
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

/// Percent-encodes bytes for a URI, except unreserved characters and those in `also`.
fn percent_encoded(bytes: &[u8], also: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(byte) || also.contains(byte) {
            text.push(char::from(*byte));
        } else {
            let _ = write!(text, "%{byte:02X}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_qcow2::text::is_hidden;

    fn place(name: &str, address: &Address, read_only: bool) -> Place {
        super::place(address, false, name, Shown { number: 0, read_only })
    }

    #[test]
    fn an_encrypted_port() {
        let address = Address::Tcp(([192, 0, 2, 1], 10809).into());
        let place = super::place(&address, true, "root", Shown { number: 1, read_only: false });
        assert_eq!(place.name, "nbds://192.0.2.1:10809/root");
        assert_eq!(
            place.uses,
            ["-object tls-creds-x509,id=tls0,endpoint=client,dir=DIRECTORY -blockdev \
              driver=nbd,node-name=disk1,server.type=inet,server.host=192.0.2.1,server.port=10809,\
              export=root,tls-creds=tls0,discard=unmap -device virtio-blk-pci,drive=disk1"]
        );
    }

    #[test]
    fn a_unix_socket() {
        let place = place("root", &Address::Unix("/run/disk.sock".into()), false);
        assert_eq!(place.name, "nbd+unix:///root?socket=/run/disk.sock");
        assert_eq!(
            place.uses,
            [
                "-drive 'file=nbd+unix:///root?socket=/run/disk.sock,format=raw,if=virtio,discard=unmap'",
                "-blockdev driver=nbd,node-name=disk0,server.type=unix,server.path=/run/disk.sock,\
                 export=root,discard=unmap -device virtio-blk-pci,drive=disk0",
            ]
        );
    }

    #[test]
    fn a_port() {
        let place = place("root", &Address::Tcp(([0, 0, 0, 0], 10809).into()), true);
        assert_eq!(place.name, "nbd://127.0.0.1:10809/root");
        assert_eq!(
            place.uses,
            [
                "-drive file=nbd://127.0.0.1:10809/root,format=raw,if=virtio,readonly=on",
                "-blockdev driver=nbd,node-name=disk0,server.type=inet,server.host=127.0.0.1,\
                 server.port=10809,export=root,read-only=on -device virtio-blk-pci,drive=disk0",
            ]
        );
    }

    #[test]
    fn odd_names_are_encoded_and_quoted() {
        let place = place("it's, é", &Address::Unix("/a,b".into()), false);
        assert_eq!(place.name, "nbd+unix:///it%27s%2C%20%C3%A9?socket=/a%2Cb");
        let blockdev = &place.uses[1];
        assert!(blockdev.contains(r"server.path=/a,,b,export=it'\''s,, é,discard"), "{blockdev}");
    }

    #[test]
    fn names_that_do_something_to_a_terminal_are_written_as_bytes() {
        let place = place("it's\x1b[2J\u{202e}7\\", &Address::Unix("/a".into()), false);
        let text = [&[place.name], &place.uses[..]].concat().concat();
        assert!(!text.chars().any(is_hidden), "{text:?}");
        let expected = r"export=it\'s\033[2J\342\200\2567\\,discard=unmap'";
        assert!(text.contains(expected), "{text}");
    }
}
