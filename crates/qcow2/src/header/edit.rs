//! Changing one extension of a header in place, so that a crash between any two writes leaves a valid header, with the
//! old extension or the new one.

use super::{FEATURE_NAMES_CLUSTER_BITS, Header, ParseMode, field};
use crate::bytes;
use crate::error::FormatError;
use crate::extension::{
    BITMAPS, BitmapsExtension, DATA_FILE, Extension, Extent, Extents, FEATURE_NAMES, HEAD,
};
use crate::features::{AutoclearFeatures, FeatureName, FeatureNameTable, IncompatibleFeatures};
use crate::index::IndexExtension;
use crate::journal::JournalExtension;

/// Bytes to be written at an offset in the header cluster, durable before the next are.
pub type HeaderWrite = (usize, Vec<u8>);

const BACKING_FILE_OFFSET: usize = 8;
const BACKING_FILE_SIZE: usize = 16;
/// A write is atomic if it does not cross a multiple of this.
pub(super) const SECTOR: usize = 512;
/// The type, "IBX0", of an extension that covers others while they are moved. A crash may leave one.
const MOVING: u32 = 0x4942_5830;

/// An extension of a fixed length that is no longer valid once its first eight bytes are zeroes.
trait Editable: Copy {
    const MAGIC: u32;
    const BYTES: usize;
    /// Its name in messages.
    const NAME: &'static str;
    /// Its variant of [`Extension`].
    fn of(self) -> Extension;
    fn is_valid(data: &[u8]) -> bool;
    fn encode(&self) -> Vec<u8>;
}

impl Editable for IndexExtension {
    const MAGIC: u32 = Self::MAGIC;
    const BYTES: usize = Self::BYTES;
    const NAME: &'static str = "a direct-access index";

    fn of(self) -> Extension {
        Extension::Index(self)
    }

    fn is_valid(data: &[u8]) -> bool {
        Self::parse(data).is_some()
    }

    fn encode(&self) -> Vec<u8> {
        Self::encode(self)
    }
}

impl Editable for JournalExtension {
    const MAGIC: u32 = Self::MAGIC;
    const BYTES: usize = Self::BYTES;
    const NAME: &'static str = "a journal";

    fn of(self) -> Extension {
        Extension::Journal(self)
    }

    fn is_valid(data: &[u8]) -> bool {
        Self::parse(data).is_some()
    }

    fn encode(&self) -> Vec<u8> {
        Self::encode(self)
    }
}

impl Editable for BitmapsExtension {
    const MAGIC: u32 = BITMAPS;
    const BYTES: usize = Self::SIZE;
    const NAME: &'static str = "bitmaps";

    fn of(self) -> Extension {
        Extension::Bitmaps(self)
    }

    fn is_valid(data: &[u8]) -> bool {
        Self::parse(data).is_some_and(|bitmaps| bitmaps.count > 0)
    }

    fn encode(&self) -> Vec<u8> {
        Self::encode(self)
    }
}

impl Header {
    /// The writes that make `index` the index of the image with this header cluster, or remove the existing one. The
    /// decisive write is always one of eight aligned bytes.
    ///
    /// # Errors
    /// If the header is not valid, or has no room.
    pub fn edit_index(
        cluster: &[u8],
        index: Option<&IndexExtension>,
    ) -> Result<Vec<HeaderWrite>, FormatError> {
        let places = Places::find(cluster)?;
        match index {
            Some(index) => places.set(index),
            None => Ok(places.remove::<IndexExtension>()),
        }
    }

    /// The writes that make `journal` the place of the journal of the image with this header cluster, or remove the
    /// existing one. The feature bit [`JOURNAL`](IncompatibleFeatures::JOURNAL), without which it has no meaning, is
    /// not changed; the bit gets its name in the feature name table if there is room.
    ///
    /// While the bit is set the journal cannot be removed, and can be changed only if one sector contains the change,
    /// such as the last field alone.
    ///
    /// # Errors
    /// If the header is not valid, is of version 2, or has no room; if the journal does not fit the
    /// image's clusters; if the bit is set and does not allow the change.
    pub fn edit_journal(
        cluster: &[u8],
        journal: Option<&JournalExtension>,
    ) -> Result<Vec<HeaderWrite>, FormatError> {
        let places = Places::find(cluster)?;
        let in_use = places.header.incompatible.contains(IncompatibleFeatures::JOURNAL);
        let refused = || {
            FormatError::invalid(
                "incompatible_features",
                format_args!("{:#x}", places.header.incompatible.bits()),
                "the journal is in use (bit 61), and must be replayed before it is moved or removed",
            )
        };
        let Some(journal) = journal else {
            return if in_use { Err(refused()) } else { Ok(places.remove::<JournalExtension>()) };
        };
        if places.header.version < 3 {
            return Err(FormatError::invalid(
                "version",
                places.header.version,
                "a journal needs version 3; upgrade the image with qemu-img amend -o compat=1.1",
            ));
        }
        journal.validate(&places.header.geometry()?)?;
        // The name only makes the refusal readable; the bit keeps programs out without it too.
        let mut writes = places.name_journal().unwrap_or_default();
        let mut named = cluster.to_vec();
        for (at, bytes) in &writes {
            let _ = bytes::put(&mut named, *at, bytes);
        }
        let set = if let Ok(set) = Places::find(&named)?.set(journal) {
            set
        } else {
            writes.clear();
            places.set(journal)?
        };
        let in_one_piece =
            |(at, bytes): &HeaderWrite| at / SECTOR == (at + bytes.len().max(1) - 1) / SECTOR;
        if in_use && (set.len() > 1 || !set.iter().all(in_one_piece)) {
            return Err(refused());
        }
        writes.extend(set);
        Ok(writes)
    }
}

impl Header {
    /// The writes that make `bitmaps` the bitmap directory of the image with this header cluster, with the feature bit
    /// [`BITMAPS`](AutoclearFeatures::BITMAPS), or remove the current one and the bit. After a crash in between the
    /// image has the old directory or the new one.
    ///
    /// # Errors
    /// If the header is not valid, is of version 2, or has no room.
    pub fn edit_bitmaps(
        cluster: &[u8],
        bitmaps: Option<&BitmapsExtension>,
    ) -> Result<Vec<HeaderWrite>, FormatError> {
        let places = Places::find(cluster)?;
        let header = &places.header;
        if header.version < 3 {
            return Err(FormatError::invalid(
                "version",
                header.version,
                "bitmaps need version 3; upgrade the image with 'isobath amend -o compat=1.1'",
            ));
        }
        let bit = |set: bool| {
            let bits = header.autoclear;
            let bits = if set {
                bits.with(AutoclearFeatures::BITMAPS)
            } else {
                bits.without(AutoclearFeatures::BITMAPS)
            };
            (field::AUTOCLEAR_FEATURES, bits.bits().to_be_bytes().to_vec())
        };
        let is_set = header.autoclear.contains(AutoclearFeatures::BITMAPS);
        let mut writes = Vec::new();
        let Some(bitmaps) = bitmaps else {
            if is_set {
                writes.push(bit(false));
            }
            writes.extend(places.hide::<BitmapsExtension>());
            return Ok(writes);
        };
        bitmaps.validate(&header.geometry()?)?;
        let torn = |(at, bytes): &HeaderWrite| at / SECTOR != (at + bytes.len() - 1) / SECTOR;
        let mut set = places.set(bitmaps)?;
        let mut old = places.of_type::<BitmapsExtension>().map(|(extent, _)| extent.at).peekable();
        if is_set && old.peek().is_some() && set.iter().any(torn) {
            // A second one, and then only that: of two, either may count.
            set = places.add(bitmaps)?;
            set.extend(old.map(|at| (at, MOVING.to_be_bytes().to_vec())));
        }
        writes.extend(set);
        if !is_set {
            writes.push(bit(true));
        }
        Ok(writes)
    }
}

impl Header {
    /// The writes that replace the header cluster `cluster` by this header: of its first sector, and of the rest. The
    /// first sector is written last if the old header ends in it, and first otherwise: if one of the two headers fits
    /// it, a crash leaves the old or the new one.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn rewrite(&self, cluster: &[u8]) -> Result<Vec<HeaderWrite>, FormatError> {
        let new = self.encode()?;
        let (head, tail) = new.split_at(SECTOR.min(new.len()));
        let mut writes = vec![(0, head.to_vec())];
        if !tail.is_empty() {
            writes.push((SECTOR, tail.to_vec()));
        }
        if Self::ends_in(cluster.get(..SECTOR).unwrap_or(cluster)) {
            writes.reverse();
        }
        Ok(writes)
    }

    /// The writes that give the image with this header cluster another name for its external data file. After a crash
    /// it has the old or the new one.
    ///
    /// # Errors
    /// If the header is not valid, or has no room for the name.
    pub fn edit_data_file(cluster: &[u8], name: &str) -> Result<Vec<HeaderWrite>, FormatError> {
        let places = Places::find(cluster)?;
        let kept =
            places.extents.iter().filter(|extent| ![MOVING, DATA_FILE].contains(&extent.magic));
        let mut extensions = vec![Extension::DataFile(name.to_owned())];
        extensions.extend(kept.filter_map(|extent| {
            Some(Extension::Unknown { magic: extent.magic, data: extent.data?.to_vec() })
        }));
        let mut list = Vec::new();
        Extension::encode_all(&extensions, &mut list);
        places.replace(&list).ok_or_else(|| places.no_room("an external data file"))
    }
}

/// The positions of extensions in a header cluster.
pub(super) struct Places<'a> {
    cluster: &'a [u8],
    pub(super) header: Header,
    pub(super) extents: Vec<Extent<'a>>,
    /// The mark that ends the extensions, if it is there and nothing but zeroes.
    pub(super) end: Option<usize>,
}

impl<'a> Places<'a> {
    pub(super) fn find(cluster: &'a [u8]) -> Result<Self, FormatError> {
        let header = Header::parse_for(cluster, ParseMode::Check)?;
        let name_at = bytes::be64(cluster, BACKING_FILE_OFFSET).unwrap_or(0) as usize;
        let end = 1 << header.cluster_bits;
        // Extensions end where the name begins.
        let end = if name_at == 0 { end } else { name_at.min(end) };
        let area = cluster.get(..end).unwrap_or(cluster);
        let mut extents: Vec<_> = Extents::new(area, header.header_length as usize).collect();
        let mark = extents.pop_if(|extent| extent.is_end());
        let end = mark.filter(|mark| mark.length == 0).map(|mark| mark.at);
        Ok(Self { cluster, header, extents, end })
    }

    /// The extensions of a type that are of the right length.
    fn of_type<E: Editable>(&self) -> impl DoubleEndedIterator<Item = (&Extent<'a>, &'a [u8])> {
        self.extents.iter().filter_map(|extent| {
            let data = extent.data.filter(|data| data.len() == E::BYTES)?;
            (extent.magic == E::MAGIC).then_some((extent, data))
        })
    }

    /// Writes that make `new` the effective extension of its type: in place of the current one, or of a removed one, or
    /// after the others.
    fn set<E: Editable>(&self, new: &E) -> Result<Vec<HeaderWrite>, FormatError> {
        let counts = self.of_type::<E>().find(|(_, data)| E::is_valid(data));
        let Some((place, old)) = counts.or_else(|| self.of_type::<E>().next()) else {
            return self.add(new);
        };
        let mut writes = Vec::new();
        let new = new.encode();
        let mut differing = (0..new.len()).filter(|&at| old.get(at) != new.get(at));
        if let Some(first) = differing.next() {
            let end = (differing.next_back().unwrap_or(first) + 1).next_multiple_of(8);
            let first = first & !7;
            let part = new.get(first..end).unwrap_or_default().to_vec();
            writes.push((place.at + HEAD + first, part));
        }
        let others =
            self.of_type::<E>().filter(|(other, data)| other.at != place.at && E::is_valid(data));
        writes.extend(others.map(|(other, _)| (other.at + HEAD, vec![0; HEAD])));
        Ok(writes)
    }

    /// Writes that add an extension: where one was hidden, or after the others.
    fn add<E: Editable>(&self, new: &E) -> Result<Vec<HeaderWrite>, FormatError> {
        let hidden = self.extents.iter().find(|extent| {
            extent.magic == MOVING && extent.data.is_some_and(|data| data.len() == E::BYTES)
        });
        if let Some(hidden) = hidden {
            let magic = (hidden.at, E::MAGIC.to_be_bytes().to_vec());
            return Ok(vec![(hidden.at + HEAD, new.encode()), magic]);
        }
        self.insert(&[new.of()]).ok_or_else(|| self.no_room(E::NAME))
    }

    /// Writes that remove every extension of a type: one at the end is cut off, others are made invalid.
    fn remove<E: Editable>(&self) -> Vec<HeaderWrite> {
        let mut end = self.end;
        let mut writes = Vec::new();
        for (extent, data) in self.of_type::<E>().rev() {
            if end.is_some() && extent.next() == end {
                end = Some(extent.at);
                writes.push((extent.at, vec![0; HEAD]));
            } else if E::is_valid(data) {
                writes.push((extent.at + HEAD, vec![0; HEAD]));
            }
        }
        writes
    }

    /// Writes that remove every extension of a type, for one of which programs know the type but not the invalid form:
    /// one at the end is cut off, others get a type that nothing reads.
    fn hide<E: Editable>(&self) -> Vec<HeaderWrite> {
        let mut end = self.end;
        let mut writes = Vec::new();
        for (extent, _) in self.of_type::<E>().rev() {
            if end.is_some() && extent.next() == end {
                end = Some(extent.at);
                writes.push((extent.at, vec![0; HEAD]));
            } else {
                writes.push((extent.at, MOVING.to_be_bytes().to_vec()));
            }
        }
        writes
    }

    /// Writes that append extensions.
    fn insert(&self, extensions: &[Extension]) -> Option<Vec<HeaderWrite>> {
        let end = self.end?;
        let mut list = Vec::new();
        Extension::encode_all(extensions, &mut list);
        let (head, rest) = list.split_at_checked(HEAD)?;
        let mut writes = self.make_room(end + list.len())?;
        writes.push((end + HEAD, rest.to_vec()));
        writes.push((end, head.to_vec()));
        Some(writes)
    }

    /// Writes that replace all extensions by those of `list`, which ends with the mark. A copy of the list is written
    /// after its place; then one write makes everything before the copy the data of a single extension; then the list
    /// is written there, and another write uncovers it.
    fn replace(&self, list: &[u8]) -> Option<Vec<HeaderWrite>> {
        let first = self.header.header_length as usize;
        let copy = (self.end? + HEAD).max(first + list.len());
        let (head, rest) = list.split_at_checked(HEAD)?;
        let mut writes = self.make_room(copy + list.len())?;
        let covered = copy.checked_sub(first + HEAD)? as u32;
        writes.push((copy, list.to_vec()));
        writes.push((first, [MOVING.to_be_bytes(), covered.to_be_bytes()].concat()));
        writes.push((first + HEAD, rest.to_vec()));
        writes.push((first, head.to_vec()));
        Some(writes)
    }

    /// Writes that move the backing file name where it is in the way of extensions that end at `end`.
    fn make_room(&self, end: usize) -> Option<Vec<HeaderWrite>> {
        let size = 1usize << self.header.cluster_bits;
        let name_at = bytes::be64(self.cluster, BACKING_FILE_OFFSET)? as usize;
        if end > size {
            return None;
        }
        // An offset without a name bounds the extensions too.
        if name_at == 0 || name_at >= end {
            return Some(Vec::new());
        }
        let length = bytes::be32(self.cluster, BACKING_FILE_SIZE)? as usize;
        let name = self.cluster.get(name_at..name_at.checked_add(length)?)?;
        let to = end.max(name_at + length).next_multiple_of(8);
        if to + length > size {
            return None;
        }
        let mut writes = Vec::new();
        if !name.is_empty() {
            writes.push((to, name.to_vec()));
        }
        writes.push((BACKING_FILE_OFFSET, (to as u64).to_be_bytes().to_vec()));
        Some(writes)
    }

    /// Writes that give the journal's feature bit its name in the feature name table: in the existing one, or in a new
    /// one, which also has the other names if QEMU would write a table. In an existing one it comes after the last
    /// whole entry that QEMU reads, and all bytes of the table stay. They also clean up after a crash in the middle of
    /// such an edit. `None` if there is no room.
    fn name_journal(&self) -> Option<Vec<HeaderWrite>> {
        let name = FeatureName::journal();
        let tables = || self.extents.iter().filter(|extent| extent.magic == FEATURE_NAMES);
        let has_name = |extent: &Extent<'_>| {
            let data = extent.data.unwrap_or_default();
            // QEMU sees no others.
            let seen = data.get(..FeatureNameTable::used(data)).unwrap_or_default();
            FeatureNameTable::parse(seen).find(name.kind, name.bit).is_some()
        };
        // The last is the one that is read.
        let named = tables().next_back().is_some_and(has_name);
        let Some(last) = tables().next_back() else {
            let names_all = self.header.cluster_bits >= FEATURE_NAMES_CLUSTER_BITS;
            let mut table =
                if names_all { FeatureNameTable::known() } else { FeatureNameTable::default() };
            table.entries.push(name);
            return self.insert(&[Extension::FeatureNames(table)]);
        };
        if named && self.extents.iter().all(|extent| extent.magic != MOVING) {
            return Some(Vec::new());
        }
        let mut extensions = Vec::new();
        for extent in self.extents.iter().filter(|extent| extent.magic != MOVING) {
            let mut data = extent.data?.to_vec();
            if !named && extent.at == last.at {
                let at = FeatureNameTable::used(&data);
                data.splice(at..at, name.encode());
            }
            extensions.push(Extension::Unknown { magic: extent.magic, data });
        }
        let mut list = Vec::new();
        Extension::encode_all(&extensions, &mut list);
        self.replace(&list)
    }

    fn no_room(&self, what: &str) -> FormatError {
        FormatError::too_large(
            "header cluster",
            format_args!("{} bytes", 1u64 << self.header.cluster_bits),
            format!(
                "has no room for the extension of {what}; use a shorter backing file name or larger \
                 clusters"
            ),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FeatureKind;
    use crate::header::tests::sample;
    use crate::index::BlockHash;
    use crate::lsn::Lsn;
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
        let end = Places::find(&cluster).unwrap().end.unwrap();
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

    #[test]
    fn of_several_indexes_the_one_that_counts_is_edited() {
        let mut header = sample();
        header.extensions.insert(0, Extension::Index(index(1)));
        header.extensions.push(Extension::Index(index(2)));
        let mut cluster = header.encode().unwrap();
        let apply = |cluster: &mut [u8], wanted: Option<&IndexExtension>| {
            for (at, bytes) in Header::edit_index(cluster, wanted).unwrap() {
                cluster[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            assert_eq!(Header::parse(cluster).unwrap().index(), wanted);
        };
        let mut copy = cluster.clone();
        apply(&mut copy, None);
        apply(&mut cluster, Some(&index(3)));
        apply(&mut cluster, None);
    }

    fn journal(n: u64) -> JournalExtension {
        JournalExtension {
            area_offset: HostOffset::new(n << 16),
            area_length: n << 16,
            id: n << 32,
            first_lsn: Lsn::new(n),
        }
    }

    fn found(cluster: &[u8]) -> Option<JournalExtension> {
        Header::parse(cluster).unwrap().journals().next().copied()
    }

    fn put(cluster: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
        let mut cluster = cluster.to_vec();
        cluster[at..at + bytes.len()].copy_from_slice(bytes);
        cluster
    }

    /// The parts that must not change, and the names of the features that QEMU knows.
    fn rest(cluster: &[u8]) -> (Header, Vec<String>) {
        let mut header = Header::parse(cluster).unwrap();
        let names = header.extensions.iter().find_map(|extension| match extension {
            Extension::FeatureNames(table) => Some(table.entries.clone()),
            _ => None,
        });
        let known = FeatureNameTable { entries: names.unwrap_or_default() };
        let names = known.entries.iter().filter(|name| name.bit != 61).map(FeatureName::text);
        let names = names.collect();
        header.extensions.retain(|extension| {
            ![JournalExtension::MAGIC, MOVING, FEATURE_NAMES].contains(&extension.magic())
        });
        (header, names)
    }

    fn has_name(cluster: &[u8]) -> bool {
        Header::parse(cluster).unwrap().extensions.iter().any(|extension| match extension {
            Extension::FeatureNames(table) => table.entries.contains(&FeatureName::journal()),
            _ => false,
        })
    }

    /// Applies an edit; the header is valid after each write, and after a part of one.
    fn apply(cluster: &mut Vec<u8>, wanted: Option<&JournalExtension>, depth: u32) {
        let (before, (header, names)) = (found(cluster), rest(cluster));
        for (at, bytes) in Header::edit_journal(cluster, wanted).unwrap() {
            assert_eq!(at % 8, 0);
            let mut states: Vec<_> = (0..bytes.len())
                .filter(|n| *n == 0 || (at + n).is_multiple_of(SECTOR))
                .map(|n| {
                    put(cluster, at + n, &bytes[n..bytes.len().min(n + SECTOR - (at + n) % SECTOR)])
                })
                .collect();
            *cluster = put(cluster, at, &bytes);
            states.push(cluster.clone());
            for mut state in states {
                let (now, now_names) = rest(&state);
                assert_eq!(now, header);
                assert!(now_names == names || names.is_empty(), "{now_names:?}");
                assert!([before.as_ref(), wanted].contains(&found(&state).as_ref()));
                if depth > 0 {
                    apply(&mut state, wanted, depth - 1);
                    assert!(
                        !Header::parse(&state)
                            .unwrap()
                            .extensions
                            .iter()
                            .any(|e| e.magic() == MOVING)
                    );
                }
            }
        }
        assert_eq!(found(cluster).as_ref(), wanted);
    }

    #[test]
    fn a_journal_is_set_moved_and_removed_by_whole_steps() {
        let index = Extension::Index(index(9));
        let filler = Extension::Unknown { magic: 5, data: vec![1; 280] };
        for (bits, name, behind, named) in [
            (16, Some("base"), None, true),
            (16, None, None, true),
            (16, Some("base"), Some(&index), true),
            (13, Some("base"), Some(&index), true),
            (12, Some("base"), None, true),
            (9, Some("base"), None, true),
            (9, None, Some(&filler), false),
        ] {
            let extensions = [Extension::BackingFormat("qcow2".into())].into_iter();
            let header = Header {
                cluster_bits: bits,
                l1_size: 32768,
                l1_table_offset: HostOffset::new(1 << 30),
                backing_file: name.map(str::to_owned),
                extensions: extensions.chain(behind.cloned()).collect(),
                ..sample()
            };
            let mut cluster = header.encode().unwrap();
            let mut used = None;
            for n in 1..4 {
                apply(&mut cluster, Some(&journal(n)), 1);
                apply(&mut cluster, Some(&journal(n + 10)), 0);
                assert_eq!(has_name(&cluster), named, "{bits} {name:?}");
                let name_at = bytes::be64(&cluster, BACKING_FILE_OFFSET).unwrap();
                let now = (Places::find(&cluster).unwrap().end.unwrap(), name_at);
                assert_eq!(*used.get_or_insert(now), now, "the header grows");
                apply(&mut cluster, None, 1);
                assert_eq!(Header::edit_journal(&cluster, None), Ok(Vec::new()));
            }
        }
    }

    #[test]
    fn a_journal_among_others_is_disarmed_and_its_place_taken_again() {
        let mut cluster = sample().encode().unwrap();
        apply(&mut cluster, Some(&journal(1)), 0);
        edit(&mut cluster, Some(&index(1)));
        apply(&mut cluster, None, 1);
        let end = Places::find(&cluster).unwrap().end;
        apply(&mut cluster, Some(&journal(2)), 1);
        assert_eq!(Places::find(&cluster).unwrap().end, end);
        assert_eq!(Header::parse(&cluster).unwrap().index(), Some(&index(1)));
    }

    #[test]
    fn a_table_of_names_keeps_all_of_its_bytes_and_gets_the_journals_where_qemu_reads_it() {
        let table = || FeatureNameTable::known().encode();
        let empty = FeatureName::new(FeatureKind::Incompatible, 9, "").encode().collect::<Vec<_>>();
        let unseen = FeatureName::journal().encode().collect();
        let other = FeatureName::new(FeatureKind::Compatible, 40, "other").encode().collect();
        for (seen, unseen) in [
            (table(), Vec::new()),
            (Vec::new(), Vec::new()),
            // An incomplete entry, which QEMU reads too.
            (table(), b"\0\x30incomplete".to_vec()),
            (Vec::new(), b"\0\x30incomplete".to_vec()),
            (table(), vec![0]),
            (table(), [empty.clone(), unseen].concat()),
            (table(), [empty.clone(), other, b"\x01\x29end".to_vec()].concat()),
            (Vec::new(), [empty, table()].concat()),
        ] {
            let data = [seen.clone(), unseen.clone()].concat();
            let names = Extension::Unknown { magic: FEATURE_NAMES, data };
            let header = Header { extensions: vec![names], ..sample() };
            let mut cluster = header.encode().unwrap();
            for _ in 0..2 {
                for (at, bytes) in Header::edit_journal(&cluster, Some(&journal(1))).unwrap() {
                    cluster = put(&cluster, at, &bytes);
                }
                let places = Places::find(&cluster).unwrap();
                let tables = places.extents.iter().filter(|extent| extent.magic == FEATURE_NAMES);
                // The encoder puts one of its own before it; the last is the one that is read.
                let data = tables.filter_map(|extent| extent.data).next_back();
                let name = FeatureName::journal().encode().collect();
                let expected = [seen.clone(), name, unseen.clone()].concat();
                assert_eq!(data, Some(&expected[..]), "{seen:?}, {unseen:?}");
            }
        }
    }

    #[test]
    fn a_journal_in_use_stays_where_it_is() {
        // The extension's data is from 496 to 528.
        let filler = Extension::Unknown { magic: 5, data: vec![0; 368] };
        let bits = IncompatibleFeatures::JOURNAL;
        let extensions = vec![filler, Extension::Journal(journal(1))];
        let header =
            Header { incompatible: bits, cluster_bits: 12, extensions, l1_size: 512, ..sample() };
        let cluster = header.encode().unwrap();
        assert_eq!(Header::parse(&cluster).unwrap().journal(), Some(&journal(1)));
        for wanted in
            [None, Some(journal(2)), Some(JournalExtension { area_length: 1 << 17, ..journal(2) })]
        {
            let error = Header::edit_journal(&cluster, wanted.as_ref()).unwrap_err();
            assert!(error.to_string().contains("must be replayed before"), "{error}");
        }
        for wanted in [
            JournalExtension { first_lsn: Lsn::MAX, ..journal(1) },
            JournalExtension { id: 77, first_lsn: Lsn::new(78), ..journal(1) },
            JournalExtension { area_length: 1 << 17, ..journal(1) },
        ] {
            let mut cluster = cluster.clone();
            apply(&mut cluster, Some(&wanted), 1);
            assert!(has_name(&cluster));
        }
    }

    #[test]
    fn a_journal_that_cannot_be_is_not_set() {
        let v2 = Header {
            version: 2,
            incompatible: IncompatibleFeatures::default(),
            compatible: crate::CompatibleFeatures::default(),
            autoclear: crate::AutoclearFeatures::default(),
            refcount_order: 4,
            header_length: 72,
            unknown_fields: Vec::new(),
            ..sample()
        };
        let error = Header::edit_journal(&v2.encode().unwrap(), Some(&journal(1))).unwrap_err();
        assert!(error.to_string().contains("compat=1.1"), "{error}");
        let cluster = sample().encode().unwrap();
        let odd = JournalExtension { area_length: 20 << 10, ..journal(1) };
        assert_eq!(Header::edit_journal(&cluster, Some(&odd)).unwrap_err().field(), "journal area");
        let full = Header {
            cluster_bits: 9,
            l1_size: 32768,
            backing_file: Some("n".repeat(300)),
            extensions: Vec::new(),
            ..sample()
        };
        let error = Header::edit_journal(&full.encode().unwrap(), Some(&journal(1))).unwrap_err();
        assert!(error.to_string().contains("no room for the extension of a journal"), "{error}");
    }
}
