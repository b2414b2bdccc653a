use super::*;
use crate::wire::state;
use proptest::prelude::*;

fn chunk_of(kind: u16, flags: u16, payload: &[u8]) -> (Chunk, Vec<u8>) {
    (Chunk { flags, kind, cookie: 1, length: payload.len() as u32 }, payload.to_vec())
}

/// Handles a chunk as a connection does.
fn take(expected: &mut Expected, kind: u16, flags: u16, payload: &[u8]) -> Result<Step, Violation> {
    let (header, payload) = chunk_of(kind, flags, payload);
    let head = header.head()?;
    expected.chunk(&header, &payload[..head])
}

fn data(offset: u64, length: usize) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &vec![7; length]].concat()
}

fn hole(offset: u64, length: u32) -> Vec<u8> {
    [&offset.to_be_bytes()[..], &length.to_be_bytes()].concat()
}

fn failure(error: u32, message: &str) -> Vec<u8> {
    let length = message.len() as u16;
    [&error.to_be_bytes()[..], &length.to_be_bytes(), message.as_bytes()].concat()
}

fn read() -> Expected {
    Expected::new(command::READ, 1000, 100, 0)
}

#[test]
fn a_read_comes_in_pieces_in_any_order() {
    let mut expected = read();
    let step = take(&mut expected, chunk::OFFSET_DATA, 0, &data(1050, 50)).unwrap();
    assert_eq!(step, Step::Data { at: 50, length: 50 });
    assert!(expected.finish().is_err());
    let step = take(&mut expected, chunk::OFFSET_HOLE, 0, &hole(1010, 40)).unwrap();
    assert_eq!(step, Step::Zeroes { at: 10, length: 40 });
    let step = take(&mut expected, chunk::OFFSET_DATA, 0, &data(1000, 10)).unwrap();
    assert_eq!(step, Step::Data { at: 0, length: 10 });
    assert_eq!(take(&mut expected, chunk::NONE, chunk::FLAG_DONE, &[]), Ok(Step::Nothing));
    assert_eq!(expected.finish(), Ok(()));
}

#[test]
fn what_does_not_fit_a_read_is_refused() {
    for (kind, flags, payload) in [
        (chunk::OFFSET_DATA, 0, data(999, 2)),
        (chunk::OFFSET_DATA, 0, data(1099, 2)),
        (chunk::OFFSET_DATA, 0, data(u64::MAX, 2)),
        (chunk::OFFSET_DATA, 0, data(1000, 0)),
        (chunk::OFFSET_DATA, 0, vec![0; 7]),
        (chunk::OFFSET_HOLE, 0, hole(1000, u32::MAX)),
        (chunk::OFFSET_HOLE, 0, hole(1000, 0)),
        (chunk::OFFSET_HOLE, 0, vec![0; 11]),
        (chunk::OFFSET_HOLE, 0, vec![0; 13]),
        (chunk::NONE, 0, vec![]),
        (chunk::NONE, chunk::FLAG_DONE, vec![1]),
        (chunk::BLOCK_STATUS, 0, vec![0; 12]),
        (chunk::ERROR, 0, failure(0, "")),
        (chunk::ERROR, 0, vec![0, 0, 0, 5, 0]),
        (chunk::ERROR, 0, [failure(5, "x"), vec![0]].concat()),
        (chunk::ERROR, 0, vec![0, 0, 0, 5, 0, 9, b'x']),
        (chunk::ERROR, 0, failure(5, &"x".repeat(MAX_STRING + 1))),
        (chunk::ERROR, 0, vec![0; MAX_HEAD + 1]),
        (chunk::ERROR_OFFSET, 0, failure(5, "x")),
        (3, 0, vec![]),
    ] {
        let taken = take(&mut read(), kind, flags, &payload);
        assert!(taken.is_err(), "{kind} {} {taken:?}", payload.len());
    }
    for (offset, length) in [(1010, 10), (1005, 10), (1015, 10), (1000, 100), (1012, 2)] {
        let mut expected = read();
        take(&mut expected, chunk::OFFSET_DATA, 0, &data(1010, 10)).unwrap();
        let again = take(&mut expected, chunk::OFFSET_DATA, 0, &data(offset, length));
        assert!(again.unwrap_err().0.contains("twice"), "{offset} {length}");
    }
    let mut expected = read();
    take(&mut expected, chunk::OFFSET_DATA, 0, &data(1000, 10)).unwrap();
    take(&mut expected, chunk::OFFSET_DATA, 0, &data(1020, 10)).unwrap();
    assert!(take(&mut expected, chunk::OFFSET_DATA, 0, &data(1010, 11)).is_err());
}

#[test]
fn simple_replies_are_those_that_were_agreed_upon() {
    let mut expected = read();
    assert_eq!(expected.simple(0, false), Ok(Step::Data { at: 0, length: 100 }));
    assert_eq!(expected.finish(), Ok(()));
    assert!(read().simple(0, true).is_err());
    let mut write = Expected::new(command::WRITE, 0, 10, 0);
    assert_eq!(write.simple(28, true), Ok(Step::Nothing));
    assert_eq!((write.error(), write.finish()), (Some(28), Ok(())));
    assert!(Expected::new(command::BLOCK_STATUS, 0, 10, 0).simple(0, true).is_err());
    let chunk = STRUCTURED_REPLY_MAGIC.to_be_bytes();
    assert!(Style::of(chunk, false).is_err());
    assert_eq!(Style::of(chunk, true), Ok(Style::Chunk));
    assert!(Style::of([0; 4], true).is_err());
}

#[test]
fn of_extents_the_first_counts() {
    let status = || Expected::new(command::BLOCK_STATUS, 0, 4096, 3);
    let extents = |context: u32, extents: &[[u32; 2]]| -> Vec<u8> {
        let numbers = [context].into_iter().chain(extents.iter().flatten().copied());
        numbers.flat_map(u32::to_be_bytes).collect()
    };
    let many = extents(3, &[[512, state::ZERO]; 2000]);
    let mut expected = status();
    assert!(expected.finish().is_err());
    let step = take(&mut expected, chunk::BLOCK_STATUS, 0, &many).unwrap();
    assert_eq!(step, Step::Skip { length: many.len() - MAX_HEAD });
    assert_eq!(expected.extent(), Some(Extent { length: 512, flags: state::ZERO }));
    assert!(take(&mut expected, chunk::BLOCK_STATUS, 0, &many).is_err(), "twice");
    for payload in [extents(4, &[[1, 1]]), extents(3, &[[0, 1]]), extents(3, &[]), vec![0; 3]] {
        assert!(take(&mut status(), chunk::BLOCK_STATUS, 0, &payload).is_err(), "{payload:?}");
    }
    let cut = &many[..20];
    assert_eq!(take(&mut status(), chunk::BLOCK_STATUS, 0, cut), Ok(Step::Nothing));
    assert!(take(&mut status(), chunk::BLOCK_STATUS, 0, &many[..19]).is_err());
    assert!(take(&mut status(), chunk::OFFSET_DATA, 0, &data(0, 1)).is_err());
}

#[test]
fn errors_keep_their_numbers_and_have_an_end() {
    let mut expected = read();
    let first = failure(28, "no space");
    take(&mut expected, chunk::ERROR, 0, &first).unwrap();
    let second = [failure(5, "there"), 1024_u64.to_be_bytes().to_vec()].concat();
    take(&mut expected, chunk::ERROR_OFFSET, 0, &second).unwrap();
    assert_eq!((expected.error(), expected.finish()), (Some(28), Ok(())));
    let unknown = chunk::IS_ERROR + 77;
    while expected.errors < MAX_ERRORS {
        take(&mut expected, unknown, 0, &second).unwrap();
    }
    assert!(take(&mut expected, unknown, 0, &second).is_err());
    assert_eq!((errno(28), errno(95), errno(4000)), (libc::ENOSPC, libc::EOPNOTSUPP, libc::EIO));
}

#[test]
fn pieces_have_an_end() {
    let mut expected = Expected::new(command::READ, 0, 1 << 20, 0);
    let mut taken = Ok(Step::Nothing);
    for piece in 0..=MAX_PIECES as u64 {
        taken = take(&mut expected, chunk::OFFSET_DATA, 0, &data(piece * 2, 1));
    }
    assert!(taken.unwrap_err().0.contains("too many pieces"));
}

proptest! {
    /// Whatever arrives, bytes are stored only within the buffer and only once, and a successful reply has stored all
    /// of them.
    #[test]
    fn nothing_leaves_the_buffer(
        command in 0_u16..8,
        chunks in proptest::collection::vec(
            (
                prop_oneof![0_u16..8, (1_u16 << 15)..(1 << 15) + 4],
                any::<u16>(),
                990_u64..1110,
                0_u32..120,
                proptest::collection::vec(any::<u8>(), 0..40),
            ),
            0..20,
        ),
    ) {
        let mut expected = Expected::new(command, 1000, 100, 0);
        let mut came = [false; 100];
        for (kind, flags, offset, length, other) in chunks {
            let payload = match kind {
                chunk::OFFSET_DATA => data(offset, length as usize),
                chunk::OFFSET_HOLE => hole(offset, length),
                _ => other,
            };
            match take(&mut expected, kind, flags, &payload) {
                Ok(Step::Data { at, length } | Step::Zeroes { at, length }) => {
                    prop_assert_eq!(command, command::READ);
                    for byte in &mut came[at..at + length] {
                        prop_assert!(!*byte);
                        *byte = true;
                    }
                }
                Ok(_) => {}
                Err(_) => return Ok(()),
            }
        }
        if command == command::READ && expected.error().is_none() {
            prop_assert_eq!(expected.finish().is_ok(), came.iter().all(|byte| *byte));
        }
    }

    /// Any bytes are a header or a violation.
    #[test]
    fn any_bytes_are_parsed(bytes in any::<[u8; 16]>(), head in proptest::collection::vec(any::<u8>(), 0..64)) {
        let chunk = Chunk::parse(bytes);
        let mut expected = read();
        if let Ok(most) = chunk.head() {
            let head = &head[..most.min(head.len())];
            if head.len() == most {
                let _ = expected.chunk(&chunk, head);
            }
        }
        let [rest @ .., _, _, _, _] = bytes;
        let _ = expected.simple(Simple::parse(rest).error, chunk.is_last());
    }
}
