//! The name of certain layers of a chain, as headers of local images above them have it.

use crate::address::Address;
use crate::digest::{Digest, Hasher};
use crate::head::KnownHead;
use crate::heads::L1Room;
use crate::manifest::{Format, Layer};
use std::fmt;
use std::ops::Range;

/// What comes behind the chain's address, and before the digest. No chain's name can have it.
const PIN: &str = "@sha256:";

/// What comes behind this digest, and before that of the index.
const INDEX: char = '+';

/// Most bytes of the name of a backing file in a header.
const MOST_NAME: usize = 1023;

/// The lower layers of a chain, up to one of them, by everything that decides what they hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// The chain.
    pub address: Address,
    /// The pin of the highest of the layers, as `docs/format.md` defines it.
    pub digest: Digest,
    /// The digest of the root of these layers' index, if the chain had one when the name was made. It decides which
    /// index is used, and not which layers they are.
    pub index: Option<Digest>,
}

impl Pinned {
    /// The layers that a name stands for, if it has this form.
    pub fn parse(name: &str) -> Option<Self> {
        let (address, digests) = name.rsplit_once(PIN)?;
        let address =
            Address::parse(address).ok().filter(|parsed| parsed.to_string() == address)?;
        let (digest, index) = match digests.split_once(INDEX) {
            Some((digest, index)) => (digest, Some(Digest::parse(index)?)),
            None => (digests, None),
        };
        Some(Self { address, digest: Digest::parse(digest)?, index })
    }

    /// The same layers, by a name without the index if a header has no room for it.
    #[must_use]
    pub(super) fn in_headers(self) -> Self {
        if self.to_string().len() > MOST_NAME { Self { index: None, ..self } } else { self }
    }

    /// The same layers of the chain with another address.
    pub fn at(&self, address: &str) -> String {
        let index = self.index.iter().map(|index| format!("{INDEX}{index}"));
        format!("{address}{PIN}{}{}", self.digest, index.collect::<String>())
    }
}

impl fmt::Display for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.at(&self.address.to_string()))
    }
}

/// The pin of each layer, from the base up: a digest of everything that decides what it and the layers below hold.
/// `docs/format.md` specifies it to the byte. There is none from the first layer on of which something else is known
/// than a push records now: the pin would be another when the chain is pushed again.
pub(super) fn pins<'l>(
    layers: impl IntoIterator<Item = (&'l Layer, &'l KnownHead)>,
) -> impl Iterator<Item = Digest> {
    let (mut hasher, mut room) = (Hasher::default(), L1Room::default());
    layers.into_iter().map_while(move |(layer, head)| {
        let [header, l1] = head.parts();
        let Range { start, end } = head.l1();
        let is_recorded = end <= layer.length && room.take(end - start);
        if l1.len() as u64 != if is_recorded { end - start } else { 0 } {
            return None;
        }
        hasher.update(layer.digest.bytes());
        hasher.update(layer.table.bytes());
        hasher.update(&layer.length.to_be_bytes());
        hasher.update(&layer.size.to_be_bytes());
        hasher.update(&format_number(layer.format).to_be_bytes());
        hasher.update(&(header.len() as u32).to_be_bytes());
        hasher.update(&(l1.len() as u32).to_be_bytes());
        hasher.update(header);
        hasher.update(l1);
        Some(hasher.clone().finish())
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

    /// A layer, and the header and the L1 table in its head.
    type Known = (Layer, Vec<u8>, Vec<u8>);
    type Change = fn(&mut Known);

    fn layers() -> Vec<Known> {
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
        vec![
            (layer(0, Format::Raw), Vec::new(), Vec::new()),
            (layer(1, Format::Qcow2), vec![1; 3], vec![1; 16]),
            (layer(2, Format::Qcow2), vec![2; 3], vec![2; 16]),
        ]
    }

    fn pins_of(layers: &[Known]) -> Vec<Digest> {
        let whole = |(layer, header, l1): &Known| {
            (layer.clone(), KnownHead::sample(header, l1, l1.len() as u64))
        };
        let known: Vec<_> = layers.iter().map(whole).collect();
        pins(known.iter().map(|(layer, head)| (layer, head))).collect()
    }

    #[test]
    fn a_pin_covers_everything_that_decides_what_layers_hold() {
        let known = pins_of(&layers());
        let changes: [Change; 8] = [
            |(layer, ..)| layer.digest = Digest::of(b"other"),
            |(layer, ..)| layer.table = Digest::of(b"other"),
            |(layer, ..)| layer.length += 1,
            |(layer, ..)| layer.size += 512,
            |(layer, ..)| layer.format = Format::Raw,
            |(_, header, _)| header.push(0),
            |(_, _, l1)| l1[15] ^= 1,
            |(_, header, l1)| header.push(l1.remove(0)),
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
    fn layers_of_which_another_thing_is_known_than_a_push_records_have_no_pins() {
        const MOST: u64 = 1 << 20;
        let layer = layers().pop().unwrap().0;
        let head = |bytes: u64, length| KnownHead::sample(&[1], &vec![0; bytes as usize], length);
        let pinned = |heads: &[KnownHead]| pins(heads.iter().map(|head| (&layer, head))).count();
        let mut heads = vec![head(8, 8), head(0, 0), head(0, MOST + 8)];
        assert_eq!(pinned(&heads), 3);
        heads.extend((0..31).map(|_| head(MOST, MOST)));
        assert_eq!(pinned(&heads), 34, "there is room for all");
        heads.extend([head(0, MOST), head(16, 16)]);
        assert_eq!(pinned(&heads), 36, "there is room for the last");
        heads[34] = head(MOST, MOST);
        assert_eq!(pinned(&heads), 34, "there is none for this one");
        heads[0] = head(0, 8);
        assert_eq!(pinned(&heads), 0, "there was room");
    }

    #[test]
    fn a_name_is_read_as_it_is_written() {
        let hex = "0f".repeat(32);
        for address in ["s3://bucket/vm", "file:///a@sha256:b/c d/vm", "gs://b/x/y", "file:///vm"] {
            let name = format!("{address}@sha256:{hex}");
            for (name, index) in [(name.clone(), None), (format!("{name}+{hex}"), Some(&hex))] {
                let pinned = Pinned::parse(&name).unwrap();
                assert_eq!(pinned.address.to_string(), address);
                assert_eq!(pinned.index, index.and_then(|hex| Digest::parse(hex)));
                assert_eq!(pinned.to_string(), name);
                assert_eq!(pinned.at("x"), name.replace(address, "x"));
                assert_eq!(pinned.clone().in_headers(), pinned);
            }
            for other in [
                address.to_owned(),
                format!("{address}@sha256:{}", &hex[1..]),
                format!("{address}@sha256:{}", hex.to_uppercase()),
                format!("{address}@md5:{hex}"),
                format!("{name}#0"),
                format!("{name}+"),
                format!("{name}+{}", &hex[1..]),
                format!("{name}+{hex}+{hex}"),
                format!("{name}+{hex}#0"),
                format!("./{name}"),
            ] {
                assert_eq!(Pinned::parse(&other), None, "{other}");
            }
        }
        let long = format!("s3://b/{}/vm@sha256:{hex}", ["x"; 450].join("/"));
        let pinned = Pinned::parse(&format!("{long}+{hex}")).unwrap();
        assert_eq!(pinned.in_headers().to_string(), long);
        assert_eq!(Pinned::parse(&format!("/a/vm@sha256:{hex}")), None);
        assert_eq!(Pinned::parse(&format!("s3://user@bucket/vm@sha256:{hex}")), None);
    }
}
