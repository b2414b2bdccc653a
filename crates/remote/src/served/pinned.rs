//! The name of certain layers of a chain, as headers of local images above them have it.

use crate::address::Address;
use crate::digest::{Digest, Hasher};
use crate::heads::Head;
use crate::manifest::{Format, Layer};
use std::fmt;

/// What comes behind the chain's address, and before the digest. No chain's name can have it.
const PIN: &str = "@sha256:";

/// The lower layers of a chain, up to one of them, by everything that decides what they hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// The chain.
    pub address: Address,
    /// The pin of the highest of the layers, as `docs/format.md` defines it.
    pub digest: Digest,
}

impl Pinned {
    /// The layers that a name stands for, if it has this form.
    pub fn parse(name: &str) -> Option<Self> {
        let (address, digest) = name.rsplit_once(PIN)?;
        let address =
            Address::parse(address).ok().filter(|parsed| parsed.to_string() == address)?;
        Some(Self { address, digest: Digest::parse(digest)? })
    }
}

impl fmt::Display for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{PIN}{}", self.address, self.digest)
    }
}

/// The pin of each layer, from the base to the top: a digest of everything that decides what it and the layers below
/// hold. `docs/format.md` specifies it to the byte.
pub(super) fn pins<'l>(
    layers: impl IntoIterator<Item = (&'l Layer, &'l Head)>,
) -> impl Iterator<Item = Digest> {
    let mut hasher = Hasher::default();
    layers.into_iter().map(move |(layer, head)| {
        hasher.update(layer.digest.bytes());
        hasher.update(layer.table.bytes());
        hasher.update(&layer.length.to_be_bytes());
        hasher.update(&layer.size.to_be_bytes());
        hasher.update(&format_number(layer.format).to_be_bytes());
        hasher.update(&(head.header.len() as u32).to_be_bytes());
        hasher.update(&(head.l1.len() as u32).to_be_bytes());
        hasher.update(&head.header);
        hasher.update(&head.l1);
        hasher.clone().finish()
    })
}

fn format_number(format: Format) -> u32 {
    match format {
        Format::Raw => 0,
        Format::Qcow2 => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Change = fn(&mut (Layer, Head));

    fn layers() -> Vec<(Layer, Head)> {
        let layer = |number: u8, format| Layer {
            digest: Digest::of(&[number]),
            length: 1 << 20,
            format,
            size: 8 << 20,
            file: "x".to_owned(),
            backing: None,
            backing_format: None,
            table: Digest::of(&[number, 1]),
        };
        let head =
            |number: u8| Head { header: vec![number; 3], l1: vec![number; 16], table: Vec::new() };
        vec![
            (layer(0, Format::Raw), Head::default()),
            (layer(1, Format::Qcow2), head(1)),
            (layer(2, Format::Qcow2), head(2)),
        ]
    }

    fn pins_of(layers: &[(Layer, Head)]) -> Vec<Digest> {
        pins(layers.iter().map(|(layer, head)| (layer, head))).collect()
    }

    #[test]
    fn a_pin_covers_everything_that_decides_what_layers_hold() {
        let known = pins_of(&layers());
        let changes: [Change; 8] = [
            |(layer, _)| layer.digest = Digest::of(b"other"),
            |(layer, _)| layer.table = Digest::of(b"other"),
            |(layer, _)| layer.length += 1,
            |(layer, _)| layer.size += 512,
            |(layer, _)| layer.format = Format::Raw,
            |(_, head)| head.header.push(0),
            |(_, head)| head.l1[15] ^= 1,
            |(_, Head { header, l1, .. })| header.push(l1.remove(0)),
        ];
        for (number, change) in changes.iter().enumerate() {
            let mut changed = layers();
            change(&mut changed[1]);
            let pins = pins_of(&changed);
            assert_eq!(pins[0], known[0], "{number}: the layer below is the same");
            assert_ne!(pins[1], known[1], "{number}");
            assert_ne!(pins[2], known[2], "{number}: the layer above is above another");
        }
        assert_eq!(pins_of(&layers()[..2]), known[..2], "what comes above changes nothing");
    }

    #[test]
    fn a_name_is_read_as_it_is_written() {
        let hex = "0f".repeat(32);
        for address in ["s3://bucket/vm", "file:///a@sha256:b/c d/vm", "gs://b/x/y", "file:///vm"] {
            let name = format!("{address}@sha256:{hex}");
            let pinned = Pinned::parse(&name).unwrap();
            assert_eq!(pinned.address.to_string(), address);
            assert_eq!(pinned.to_string(), name);
            for other in [
                address.to_owned(),
                format!("{address}@sha256:{}", &hex[1..]),
                format!("{address}@sha256:{}", hex.to_uppercase()),
                format!("{address}@md5:{hex}"),
                format!("{name}#0"),
                format!("./{name}"),
            ] {
                assert_eq!(Pinned::parse(&other), None, "{other}");
            }
        }
        assert_eq!(Pinned::parse(&format!("/a/vm@sha256:{hex}")), None);
        assert_eq!(Pinned::parse(&format!("s3://user@bucket/vm@sha256:{hex}")), None);
    }
}
