use super::*;
use proptest::prelude::*;

/// A stream whose peer sends prepared bytes, whatever it receives.
struct Script {
    says: io::Cursor<Vec<u8>>,
    heard: Vec<u8>,
}

impl Read for Script {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.says.read(buf)
    }
}

impl Write for Script {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        self.heard.write(buf)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn greeting(flags: u16) -> Vec<u8> {
    let magics = [GREETING_MAGIC.to_be_bytes(), OPTION_MAGIC.to_be_bytes()].concat();
    [magics, flags.to_be_bytes().to_vec()].concat()
}

fn reply(option: u32, kind: u32, payload: &[u8]) -> Vec<u8> {
    let numbers = [option, kind, payload.len() as u32].map(u32::to_be_bytes).concat();
    [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &numbers, payload].concat()
}

fn export(size: u64, flags: u16) -> Vec<u8> {
    [&info::EXPORT.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
}

fn blocks(minimum: u32, maximum: u32) -> Vec<u8> {
    let sizes = [minimum, 4096, maximum].map(u32::to_be_bytes).concat();
    [&info::BLOCK_SIZE.to_be_bytes()[..], &sizes].concat()
}

fn context(id: u32, name: &str) -> Vec<u8> {
    [&id.to_be_bytes()[..], name.as_bytes()].concat()
}

const FLAGS: u16 = transmission_flag::HAS_FLAGS | transmission_flag::SEND_FLUSH;

fn run(parts: &[Vec<u8>]) -> Result<Agreed, HandshakeError> {
    let mut script = Script { says: io::Cursor::new(parts.concat()), heard: Vec::new() };
    negotiate(&mut script, "name")
}

fn good() -> Vec<Vec<u8>> {
    vec![
        greeting(3),
        reply(option::STRUCTURED_REPLY, option_reply::ACK, &[]),
        reply(option::SET_META_CONTEXT, option_reply::META_CONTEXT, &context(9, ALLOCATION)),
        reply(option::SET_META_CONTEXT, option_reply::ACK, &[]),
        reply(option::GO, option_reply::INFO, &export(1 << 20, FLAGS)),
        reply(option::GO, option_reply::INFO, &blocks(512, u32::MAX)),
        reply(option::GO, option_reply::INFO, &[0, 2, b'x']),
        reply(option::GO, option_reply::ACK, &[]),
    ]
}

#[test]
fn everything_is_agreed_upon() {
    let agreed = run(&good()).unwrap();
    let (size, flags) = (1 << 20, FLAGS);
    let (minimum, maximum, allocation) = (512, MAX_PAYLOAD, Some(9));
    assert_eq!(agreed, Agreed { size, flags, structured: true, allocation, minimum, maximum });
}

#[test]
fn old_servers_are_understood() {
    let flags = transmission_flag::HAS_FLAGS;
    let last = [&5000_u64.to_be_bytes()[..], &flags.to_be_bytes(), &[0; PADDING]].concat();
    let unsupported = |option| reply(option, option_reply::ERR_UNSUP, b"what?");
    let fixed =
        [greeting(1), unsupported(option::STRUCTURED_REPLY), unsupported(option::GO), last.clone()];
    let agreed = run(&fixed).unwrap();
    assert_eq!((agreed.size, agreed.structured, agreed.maximum), (5000, false, MAX_PAYLOAD));
    assert_eq!(run(&[greeting(0), last.clone()]).unwrap(), agreed);
    assert_eq!(run(&[greeting(2), last[..10].to_vec()]).unwrap(), agreed);
    let gone = run(&[greeting(2)]).unwrap_err().to_string();
    assert!(gone.contains("no export 'name'"), "{gone}");
}

#[test]
fn every_truncation_is_an_end() {
    let whole = good().concat();
    for length in 0..whole.len() {
        let error = run(&[whole[..length].to_vec()]).unwrap_err();
        assert!(matches!(&error, HandshakeError::Io(_)), "{length}: {error}");
        assert!(error.to_string().contains("closed the connection"), "{error}");
    }
}

#[test]
fn lies_are_refused() {
    let with = |at: usize, part: Vec<u8>| {
        let mut parts = good();
        parts[at] = part;
        run(&parts).unwrap_err().to_string()
    };
    let go = |kind, payload: &[u8]| reply(option::GO, kind, payload);
    let meta =
        |payload: &[u8]| reply(option::SET_META_CONTEXT, option_reply::META_CONTEXT, payload);
    for (at, part, text) in [
        (0, vec![b'x'; 18], "not that of an NBD server"),
        (0, [GREETING_MAGIC.to_be_bytes(), [1; 8]].concat(), "wrong magic"),
        (
            0,
            [GREETING_MAGIC.to_be_bytes(), OLD_STYLE_MAGIC.to_be_bytes()].concat(),
            "first version",
        ),
        (1, reply(option::STRUCTURED_REPLY, 2, &[]), "structured replies with type 2"),
        (1, reply(option::STRUCTURED_REPLY, option_reply::ACK, b"x"), "acknowledgement has data"),
        (1, reply(option::GO, option_reply::ACK, &[]), "replied to option 7 instead of 8"),
        (1, vec![7; 20], "wrong magic"),
        (2, meta(&context(9, "qemu:x")), "not requested"),
        (2, meta(&[1, 2]), "not requested"),
        (3, meta(&context(8, ALLOCATION)), "not requested"),
        (4, go(option_reply::INFO, &export(u64::MAX, FLAGS)), "cannot have"),
        (4, go(option_reply::INFO, &export(1, 0)), "no flags"),
        (4, go(option_reply::INFO, &export(1, 1)[..11]), "wrong length"),
        (4, go(option_reply::INFO, &[0]), "has no type"),
        (4, go(option_reply::SERVER, &[]), "with type 2"),
        (4, go(option_reply::INFO, &[0, 9]), "how large"),
        (5, go(option_reply::INFO, &blocks(3, 4096)), "minimum block size cannot be 3"),
        (5, go(option_reply::INFO, &blocks(1 << 17, 1 << 20)), "minimum block size cannot be"),
        (5, go(option_reply::INFO, &blocks(0, 4096)), "minimum block size cannot be 0"),
        (5, go(option_reply::INFO, &blocks(4096, 512)), "less than the minimum"),
        (5, go(option_reply::INFO, &blocks(1, 4096)[..13]), "wrong length"),
    ] {
        let error = with(at, part);
        assert!(error.contains(text), "{at}: {error}");
    }
    let mut long = reply(option::GO, option_reply::INFO, &[]);
    long[16..20].copy_from_slice(&u32::MAX.to_be_bytes());
    assert!(with(4, long).contains("has 4294967295 bytes"));
    let endless = vec![go(option_reply::INFO, &[0, 2]); 2000].concat();
    assert!(with(4, endless).contains("without an end"));
}

#[test]
fn what_a_server_refuses_is_said_in_its_words() {
    for (kind, text) in [
        (option_reply::ERR_UNKNOWN, "Requested export not available\nserver reported: no such"),
        (option_reply::ERR_POLICY, "Denied by server"),
        (option_reply::ERR_TLS_REQD, "requires TLS"),
        (option_reply::ERR_SHUTDOWN, "shutting down"),
        (option_reply::ERROR + 99, "Unknown error code"),
    ] {
        let mut parts = good();
        parts[4] = reply(option::GO, kind, b"no such");
        let error = run(&parts).unwrap_err().to_string();
        assert!(error.starts_with(text) || error.contains(text), "{error}");
    }
}

proptest! {
    /// Whatever a server sends, the negotiation ends, and its result is valid.
    #[test]
    fn any_answer_ends(
        keep in 0_usize..9,
        noise in proptest::collection::vec(any::<u8>(), 0..300),
        flip in any::<proptest::sample::Index>(),
        bit in 0_u8..8,
    ) {
        let mut bytes = good()[..keep.min(good().len())].concat();
        bytes.extend(noise);
        if !bytes.is_empty() {
            let at = flip.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        if let Ok(agreed) = run(&[bytes]) {
            prop_assert!(agreed.minimum.is_power_of_two() && agreed.minimum <= MAX_MINIMUM);
            prop_assert!(agreed.maximum >= agreed.minimum && agreed.maximum <= MAX_PAYLOAD);
            prop_assert_eq!(agreed.maximum % agreed.minimum, 0);
            prop_assert!(i64::try_from(agreed.size).is_ok());
        }
    }
}
