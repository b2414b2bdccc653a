//! Changing the backing file name of a header in place.

use super::edit::{HeaderWrite, Places, SECTOR};
use super::{Header, ParseMode};
use crate::bytes;
use crate::error::FormatError;
use crate::extension::{BACKING_FORMAT, HEAD};
use std::ops::Range;

/// The name's offset (8 bytes) and length (4 bytes).
const PLACE: Range<usize> = 8..20;

impl Header {
    /// The writes after which the image with this header cluster has another backing file, or none.
    /// `backing` is its name, and its format's.
    ///
    /// If there is room, the new name is written after everything else, and then one write within a sector makes it
    /// valid: after a crash the image has the old backing file or the new one. If the header is so full that it must be
    /// rewritten, that takes one write of several sectors.
    ///
    /// # Errors
    /// If the header is not valid, or has no room for the name.
    pub fn edit_backing(
        cluster: &[u8],
        backing: Option<(&str, &str)>,
    ) -> Result<Vec<HeaderWrite>, FormatError> {
        let mut header = Self::parse_for(cluster, ParseMode::Check)?;
        let owned = backing.map(|(name, format)| (name.to_owned(), Some(format.to_owned())));
        header.set_backing(owned);
        header.validate(ParseMode::Check)?;
        let places = Places::find(cluster)?;
        let in_place = match backing {
            None => remove(&places),
            Some((name, format)) => replace(&places, cluster, name, format)
                .or_else(|| append(&places, cluster, name, format)),
        };
        match in_place {
            Some(writes) => Ok(writes),
            None => Ok(vec![(0, header.encode()?)]),
        }
    }
}

/// The rest of the old name is not read, since the extensions end with their mark. A format without a name has no
/// meaning.
fn remove(places: &Places<'_>) -> Option<Vec<HeaderWrite>> {
    places.end?;
    Some(vec![(PLACE.start, vec![0; PLACE.len()])])
}

/// The bytes of the header cluster that hold the current name.
fn present_name(cluster: &[u8]) -> Option<Range<usize>> {
    let at = bytes::be64(cluster, PLACE.start)? as usize;
    let length = bytes::be32(cluster, PLACE.start + 8)? as usize;
    Some(at..at.checked_add(length)?)
}

/// The header's fields for a name: its offset and its length.
fn place(at: usize, length: usize) -> Vec<u8> {
    let mut place = (at as u64).to_be_bytes().to_vec();
    place.extend_from_slice(&(length as u32).to_be_bytes());
    place
}

fn replace(
    places: &Places<'_>,
    cluster: &[u8],
    name: &str,
    format: &str,
) -> Option<Vec<HeaderWrite>> {
    let size = 1usize << places.header.cluster_bits;
    let behind = (places.end? + HEAD).max(present_name(cluster)?.end);
    let name_at = behind.next_multiple_of(8);
    if name_at.checked_add(name.len())? > size {
        return None;
    }
    let mut extents = places.extents.iter().filter(|extent| extent.magic == BACKING_FORMAT);
    let (named, other) = (extents.next()?, extents.next());
    let room = (named.length as usize).next_multiple_of(8);
    let end = named.at + HEAD + room;
    if other.is_some() || end > SECTOR || format.len() > room {
        return None;
    }
    let mut sector = cluster.get(..end)?.to_vec();
    bytes::put(&mut sector, PLACE.start, &place(name_at, name.len()))?;
    let mut data = format.as_bytes().to_vec();
    data.resize(room, 0);
    bytes::put(&mut sector, named.at + 4, &(format.len() as u32).to_be_bytes())?;
    bytes::put(&mut sector, named.at + HEAD, &data)?;
    let same_format = sector.get(PLACE.end..) == cluster.get(PLACE.end..end);
    let last = if same_format { PLACE.end } else { end };
    Some(vec![
        (name_at, name.as_bytes().to_vec()),
        (PLACE.start, sector.get(PLACE.start..last)?.to_vec()),
    ])
}

/// For a header that names no format: the format becomes the last extension. The old name is moved first if it follows
/// the extensions.
fn append(
    places: &Places<'_>,
    cluster: &[u8],
    name: &str,
    format: &str,
) -> Option<Vec<HeaderWrite>> {
    let size = 1usize << places.header.cluster_bits;
    let old = present_name(cluster)?;
    let mark = places.end?;
    let named = places.extents.iter().any(|extent| extent.magic == BACKING_FORMAT);
    if named || mark + HEAD > SECTOR {
        return None;
    }
    let mut data = format.as_bytes().to_vec();
    // And the new end of the extensions.
    data.resize(data.len().next_multiple_of(8) + HEAD, 0);
    let (data_at, data_end) = (mark + HEAD, mark + HEAD + data.len());
    let mut next = data_end.max(old.end).next_multiple_of(8);
    let mut writes = Vec::new();
    if !old.is_empty() && old.start < data_end && data_at < old.end {
        writes.push((next, cluster.get(old.clone())?.to_vec()));
        writes.push((PLACE.start, place(next, old.len())));
        next = (next + old.len()).next_multiple_of(8);
    }
    if next.checked_add(name.len())? > size {
        return None;
    }
    writes.push((next, name.as_bytes().to_vec()));
    writes.push((data_at, data));
    let mut sector = cluster.get(..mark + HEAD)?.to_vec();
    bytes::put(&mut sector, PLACE.start, &place(next, name.len()))?;
    bytes::put(&mut sector, mark, &BACKING_FORMAT.to_be_bytes())?;
    bytes::put(&mut sector, mark + 4, &(format.len() as u32).to_be_bytes())?;
    writes.push((PLACE.start, sector.get(PLACE.start..)?.to_vec()));
    Some(writes)
}

#[cfg(test)]
mod tests {
    use super::super::tests::sample;
    use super::*;
    use crate::extension::Extension;

    fn cluster(header: &Header) -> Vec<u8> {
        let mut cluster = header.encode().unwrap();
        cluster.resize(1 << header.cluster_bits, 0);
        cluster
    }

    fn named(header: &Header) -> (Option<&str>, Option<&str>) {
        (header.backing_file.as_deref(), header.backing_format())
    }

    /// Applies the writes; until the last one the header is unchanged.
    fn applied(cluster: &[u8], writes: &[HeaderWrite]) -> Header {
        let old = Header::parse(cluster).unwrap();
        let mut now = cluster.to_vec();
        for (n, (at, bytes)) in writes.iter().enumerate() {
            assert_eq!(named(&Header::parse(&now).unwrap()), named(&old), "before write {n}");
            now[*at..*at + bytes.len()].copy_from_slice(bytes);
        }
        Header::parse(&now).unwrap()
    }

    fn with_backing(name: &str, format: &str) -> Header {
        let mut header = sample();
        header.set_backing(Some((name.into(), Some(format.into()))));
        header
    }

    #[test]
    fn a_name_counts_by_one_write_within_a_sector() {
        let header = with_backing("base.qcow2", "qcow2");
        let cluster = cluster(&header);
        for (name, format) in [("other", "qcow2"), ("/some/where/else.img", "raw")] {
            let writes = Header::edit_backing(&cluster, Some((name, format))).unwrap();
            assert_eq!(writes.len(), 2);
            let (at, bytes) = &writes[1];
            assert_eq!(at / SECTOR, (at + bytes.len() - 1) / SECTOR);
            let now = applied(&cluster, &writes);
            assert_eq!(named(&now), (Some(name), Some(format)));
            assert_eq!(now.extensions.len(), header.extensions.len());
        }
    }

    #[test]
    fn a_backing_file_is_removed() {
        let cluster = cluster(&with_backing("base.qcow2", "qcow2"));
        let writes = Header::edit_backing(&cluster, None).unwrap();
        assert_eq!(applied(&cluster, &writes).backing_file, None);
    }

    #[test]
    fn a_header_without_a_format_gets_one_by_writes_within_sectors() {
        let old = [None, Some("b".to_owned()), Some("base".repeat(40))];
        for old in old {
            let mut header = sample();
            // The others take more than a sector.
            header.extensions.retain(|other| matches!(other, Extension::FeatureNames(_)));
            header.set_backing(old.map(|name| (name, None)));
            let cluster = cluster(&header);
            for name in ["a", "a/name/that/is/longer.qcow2"] {
                let writes = Header::edit_backing(&cluster, Some((name, "qcow2"))).unwrap();
                for (at, bytes) in writes.iter().filter(|(at, _)| *at < PLACE.end) {
                    assert_eq!(at / SECTOR, (at + bytes.len() - 1) / SECTOR);
                }
                let now = applied(&cluster, &writes);
                assert_eq!(named(&now), (Some(name), Some("qcow2")));
                assert_eq!(now.extensions.len(), header.extensions.len() + 1);
            }
        }
    }

    #[test]
    fn a_name_that_is_too_long_is_refused() {
        let cluster = cluster(&with_backing("base.qcow2", "qcow2"));
        assert!(Header::edit_backing(&cluster, Some((&"x".repeat(1024), "qcow2"))).is_err());
    }
}
