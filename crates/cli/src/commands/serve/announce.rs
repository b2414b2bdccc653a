//! What is printed once clients can connect.

use super::endpoint::reachable;
use crate::size;
use isobath_qcow2::text::is_hidden;
use isobath_storage::ring::net::Address;
use std::borrow::Cow;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The description of a served disk.
pub(super) struct Announcement<'a> {
    /// The export's name.
    pub(super) name: &'a str,
    /// Its number among the exports, from 0.
    pub(super) number: usize,
    /// Bytes.
    pub(super) size: u64,
    /// Images in its chain.
    pub(super) layers: usize,
    pub(super) read_only: bool,
}

/// A frontend to one disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Frontend {
    /// A socket file.
    VhostUserBlk(PathBuf),
    /// The disk as a file.
    File(PathBuf),
}

impl Announcement<'_> {
    /// The export in one line, and below it, for each address and frontend, its name and the options or the
    /// command that use it.
    pub(super) fn text(&self, addresses: &[Address], frontends: &[Frontend]) -> String {
        let mode = if self.read_only { "read-only" } else { "read-write" };
        let plural = if self.layers == 1 { "" } else { "s" };
        let mut text = format!(
            "{}: {}, {} layer{plural}, {mode}\n",
            self.name.escape_debug(),
            size::human(self.size),
            self.layers
        );
        for address in addresses {
            let uri = uri(address, self.name);
            let _ = writeln!(text, "  {uri}");
            let (drive, blockdev) = if self.read_only {
                (",readonly=on", ",read-only=on")
            } else {
                (",discard=unmap", ",discard=unmap")
            };
            let drive = format!("file={uri},format=raw,if=virtio{drive}");
            let _ = writeln!(text, "    -drive {}", quoted(&drive));
            let node = format!("disk{}", self.number);
            let server = match address {
                Address::Unix(path) => {
                    let path = absolute(path).to_string_lossy().replace(',', ",,");
                    format!("server.type=unix,server.path={path}")
                }
                Address::Tcp(address) => {
                    let address = reachable(*address);
                    format!(
                        "server.type=inet,server.host={},server.port={}",
                        address.ip(),
                        address.port()
                    )
                }
            };
            let export = self.name.replace(',', ",,");
            let blockdev =
                format!("driver=nbd,node-name={node},{server},export={export}{blockdev}");
            let _ = writeln!(
                text,
                "    -blockdev {} -device virtio-blk-pci,drive={node}",
                quoted(&blockdev)
            );
        }
        for frontend in frontends {
            self.frontend(&mut text, frontend);
        }
        text
    }

    fn frontend(&self, text: &mut String, frontend: &Frontend) {
        let number = self.number;
        match frontend {
            Frontend::VhostUserBlk(path) => {
                let path = absolute(path).to_string_lossy().replace(',', ",,");
                let _ = writeln!(text, "  vhost-user-blk {}", quoted(&path));
                let chardev = format!("socket,id=char{number},path={path},reconnect=1");
                let _ = writeln!(
                    text,
                    "    -m 1G -object memory-backend-memfd,id=mem,size=1G,share=on -machine \
                     memory-backend=mem -chardev {} -device vhost-user-blk-pci,chardev=char{number}",
                    quoted(&chardev)
                );
            }
            Frontend::File(path) => {
                let path = absolute(path).to_string_lossy().into_owned();
                let path = quoted(&path);
                let read_only = if self.read_only { " --read-only" } else { "" };
                let _ = writeln!(text, "  {path}");
                let _ =
                    writeln!(text, "    losetup --find --show --direct-io=on{read_only} {path}");
            }
        }
    }
}

/// An export's NBD URI.
fn uri(address: &Address, name: &str) -> String {
    let name = percent_encoded(name.as_bytes(), b"");
    match address {
        Address::Unix(path) => {
            let path = absolute(path);
            let path = percent_encoded(path.as_os_str().as_bytes(), b"/");
            format!("nbd+unix:///{name}?socket={path}")
        }
        Address::Tcp(address) => format!("nbd://{}/{name}", reachable(*address)),
    }
}

fn absolute(path: &Path) -> Cow<'_, Path> {
    std::path::absolute(path).map_or(Cow::Borrowed(path), Cow::Owned)
}

/// Bytes as a part of a URI; `also` need no encoding either.
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

/// A word as a shell takes it. What would do something to a terminal, or deceive, is written as its bytes
/// in a form that bash, zsh and a POSIX shell of 2024 read.
fn quoted(word: &str) -> Cow<'_, str> {
    if word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~/:,=+%@".contains(&byte)) {
        return Cow::Borrowed(word);
    }
    if !word.chars().any(is_hidden) {
        return Cow::Owned(format!("'{}'", word.replace('\'', r"'\''")));
    }
    let mut text = String::from("$'");
    for c in word.chars() {
        match c {
            '\'' | '\\' => text.extend(['\\', c]),
            _ if is_hidden(c) => {
                for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                    // Three octal digits end by themselves, whatever follows.
                    let _ = write!(text, "\\{byte:03o}");
                }
            }
            _ => text.push(c),
        }
    }
    text.push('\'');
    Cow::Owned(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(name: &str, address: Address, read_only: bool) -> String {
        Announcement { name, number: 0, size: 10 << 30, layers: 3, read_only }.text(&[address], &[])
    }

    #[test]
    fn lines_to_paste_for_a_unix_socket() {
        assert_eq!(
            text("root", Address::Unix("/run/disk.sock".into()), false),
            "root: 10 GiB, 3 layers, read-write\n  \
               nbd+unix:///root?socket=/run/disk.sock\n    \
                 -drive 'file=nbd+unix:///root?socket=/run/disk.sock,format=raw,if=virtio,discard=unmap'\n    \
                 -blockdev driver=nbd,node-name=disk0,server.type=unix,server.path=/run/disk.sock,\
                 export=root,discard=unmap -device virtio-blk-pci,drive=disk0\n"
        );
    }

    #[test]
    fn lines_to_paste_for_tcp() {
        assert_eq!(
            text("root", Address::Tcp(([0, 0, 0, 0], 10809).into()), true),
            "root: 10 GiB, 3 layers, read-only\n  \
               nbd://127.0.0.1:10809/root\n    \
                 -drive file=nbd://127.0.0.1:10809/root,format=raw,if=virtio,readonly=on\n    \
                 -blockdev driver=nbd,node-name=disk0,server.type=inet,server.host=127.0.0.1,\
                 server.port=10809,export=root,read-only=on -device virtio-blk-pci,drive=disk0\n"
        );
    }

    #[test]
    fn lines_to_paste_for_frontends() {
        let frontends =
            [Frontend::VhostUserBlk("/run/a,b".into()), Frontend::File("/mnt/my disk".into())];
        let announcement =
            Announcement { name: "root", number: 1, size: 1 << 30, layers: 1, read_only: true };
        assert_eq!(
            announcement.text(&[], &frontends),
            "root: 1 GiB, 1 layer, read-only\n  \
               vhost-user-blk /run/a,,b\n    \
                 -m 1G -object memory-backend-memfd,id=mem,size=1G,share=on -machine memory-backend=mem \
                 -chardev socket,id=char1,path=/run/a,,b,reconnect=1 \
                 -device vhost-user-blk-pci,chardev=char1\n  \
               '/mnt/my disk'\n    \
                 losetup --find --show --direct-io=on --read-only '/mnt/my disk'\n"
        );
    }

    #[test]
    fn odd_names_are_encoded_and_quoted() {
        let text = text("it's, é", Address::Unix("/a,b".into()), false);
        assert!(text.contains("nbd+unix:///it%27s%2C%20%C3%A9?socket=/a%2Cb"), "{text}");
        assert!(text.contains(r"server.path=/a,,b,export=it'\''s,, é,discard"), "{text}");
    }

    #[test]
    fn names_that_do_something_to_a_terminal_are_written_as_bytes() {
        let name = "it's\x1b[2J\u{202e}7\\";
        let text = text(name, Address::Unix("/a".into()), false);
        assert!(!text.chars().any(|c| c != '\n' && is_hidden(c)), "{text:?}");
        let expected = r"export=it\'s\033[2J\342\200\2567\\,discard=unmap'";
        assert!(text.contains(expected), "{text}");
        let word = std::process::Command::new("bash")
            .args(["-c", &format!("printf %s {}", quoted(name))])
            .output();
        assert_eq!(word.unwrap().stdout, name.as_bytes());
    }
}
