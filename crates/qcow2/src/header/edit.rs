//! Changing one extension of a header in place, so that a crash between any two writes leaves a
//! header that is whole, with the old extension or the new one.

use super::{Header, V2_LENGTH};
use crate::bytes;
use crate::error::FormatError;
use crate::extension::Extension;
use crate::index::IndexExtension;

/// Bytes to be written at an offset in the header cluster, durable before the next are.
pub type HeaderWrite = (usize, Vec<u8>);

/// An extension's type and length, and the mark that ends them.
const HEAD: usize = 8;
const BACKING_FILE_OFFSET: usize = 8;

impl Header {
    /// The writes that make `index` the index of the image with this header cluster, or remove the
    /// one that it has. What decides is in each case one write of eight aligned bytes.
    ///
    /// # Errors
    /// If the header is not valid, or has no room.
    pub fn edit_index(
        cluster: &[u8],
        index: Option<&IndexExtension>,
    ) -> Result<Vec<HeaderWrite>, FormatError> {
        let header = Self::parse(cluster)?;
        let places = Places::find(cluster, &header);
        match (places.index, index) {
            (Some(at), Some(index)) => Ok(vec![(at + HEAD, index.encode())]),
            (None, Some(index)) => places.insert(cluster, &header, index),
            (Some(at), None) => {
                let last = at + HEAD + IndexExtension::BYTES == places.end;
                // Its first bytes hold its version, without which it is no index.
                Ok(vec![(if last { at } else { at + HEAD }, vec![0; HEAD])])
            }
            (None, None) => Ok(Vec::new()),
        }
    }
}

/// Where extensions are in a header cluster.
struct Places {
    /// The index's head.
    index: Option<usize>,
    /// The mark that ends the extensions.
    end: usize,
}

impl Places {
    fn find(cluster: &[u8], header: &Header) -> Self {
        let mut at = header.header_length.max(V2_LENGTH) as usize;
        let mut index = None;
        while let (Some(magic), Some(length)) =
            (bytes::be32(cluster, at), bytes::be32(cluster, at + 4))
        {
            if magic == 0 {
                break;
            }
            let data = cluster.get(at + HEAD..at + HEAD + length as usize).unwrap_or_default();
            if magic == IndexExtension::MAGIC && data.len() == IndexExtension::BYTES {
                index = Some(at);
            }
            at += HEAD + (length as usize).next_multiple_of(8);
        }
        Self { index, end: at }
    }

    fn insert(
        &self,
        cluster: &[u8],
        header: &Header,
        index: &IndexExtension,
    ) -> Result<Vec<HeaderWrite>, FormatError> {
        let no_room = || {
            FormatError::too_large(
                "header cluster",
                format_args!("{} bytes", 1u64 << header.cluster_bits),
                "has no room for the extension of a direct-access index; use a shorter backing \
                 file name or larger clusters",
            )
        };
        let size = 1usize << header.cluster_bits;
        let mut data = index.encode();
        data.extend([0; HEAD]);
        let after = self.end + HEAD + data.len();
        let name_at = bytes::be64(cluster, BACKING_FILE_OFFSET).unwrap_or(0) as usize;
        let name = header.backing_file.as_deref().unwrap_or_default().as_bytes();
        // The mark must be there: without one, what it would replace is the name itself.
        let marked = name_at == 0 || name_at >= self.end + HEAD;
        if !marked || after > size || cluster.get(self.end..self.end + HEAD) != Some(&[0; HEAD]) {
            return Err(no_room());
        }
        let mut writes = Vec::new();
        // An offset without a name bounds the extensions too.
        if name_at != 0 && name_at < after {
            let to = after.max(name_at + name.len()).next_multiple_of(8);
            if to + name.len() > size {
                return Err(no_room());
            }
            if !name.is_empty() {
                writes.push((to, name.to_vec()));
            }
            writes.push((BACKING_FILE_OFFSET, (to as u64).to_be_bytes().to_vec()));
        }
        writes.push((self.end + HEAD, data));
        let mut head = Vec::new();
        Extension::Index(*index).encode(&mut head);
        head.truncate(HEAD);
        writes.push((self.end, head));
        Ok(writes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::header::tests::sample;
    use crate::index::BlockHash;
    use crate::offset::HostOffset;

    fn index(n: u64) -> IndexExtension {
        IndexExtension {
            area_offset: HostOffset::new(n << 16),
            area_length: 1 << 16,
            root_offset: HostOffset::new(n << 16),
            root_length: 100,
            root_hash: BlockHash::of(&n.to_be_bytes()),
        }
    }

    /// Applies an edit write by write: after each the header is as before or as wanted.
    fn edit(cluster: &mut [u8], index: Option<&IndexExtension>) {
        let before = Header::parse(cluster).unwrap();
        let writes = Header::edit_index(cluster, index).unwrap();
        let count = writes.len();
        for (step, (at, bytes)) in writes.into_iter().enumerate() {
            cluster[at..at + bytes.len()].copy_from_slice(&bytes);
            let now = Header::parse(cluster).unwrap();
            let expected = if step + 1 == count { index } else { before.index() };
            assert_eq!(now.index(), expected, "{step}");
            let rest = |header: &Header| {
                let mut header = header.clone();
                header.extensions.retain(|e| e.magic() != IndexExtension::MAGIC);
                header
            };
            assert_eq!(rest(&now), rest(&before), "{step}");
        }
    }

    #[test]
    fn each_step_leaves_a_whole_header() {
        for (name, bits) in [(Some("b".to_owned()), 16), (Some("n".repeat(1023)), 12), (None, 9)] {
            let l1_size = if bits == 9 { 32768 } else { 512 };
            let mut header = Header { backing_file: name, cluster_bits: bits, l1_size, ..sample() };
            if header.backing_file.is_none() {
                header.set_backing(None);
            }
            let mut cluster = header.encode().unwrap();
            edit(&mut cluster, Some(&index(1)));
            edit(&mut cluster, Some(&index(2)));
            edit(&mut cluster, None);
            edit(&mut cluster, Some(&index(3)));
        }
    }

    #[test]
    fn an_offset_without_a_name_makes_room() {
        let header = Header { backing_file: None, extensions: Vec::new(), ..sample() };
        let mut cluster = header.encode().unwrap();
        let end = Places::find(&cluster, &header).end;
        cluster[BACKING_FILE_OFFSET..16].copy_from_slice(&(end as u64 + 8).to_be_bytes());
        edit(&mut cluster, Some(&index(1)));
        edit(&mut cluster, None);
    }

    #[test]
    fn an_index_among_others_is_disarmed() {
        let mut header = sample();
        header.extensions.insert(1, Extension::Index(index(1)));
        let mut cluster = header.encode().unwrap();
        edit(&mut cluster, None);
        edit(&mut cluster, Some(&index(2)));
    }

    #[test]
    fn a_full_header_is_left_alone() {
        let header = Header {
            cluster_bits: 9,
            l1_size: 32768,
            backing_file: Some("n".repeat(300)),
            extensions: Vec::new(),
            ..sample()
        };
        let cluster = header.encode().unwrap();
        let error = Header::edit_index(&cluster, Some(&index(1))).unwrap_err();
        assert!(error.to_string().contains("no room"), "{error}");
        assert_eq!(Header::edit_index(&cluster, None), Ok(Vec::new()));
    }
}
