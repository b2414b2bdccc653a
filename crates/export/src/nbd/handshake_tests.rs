use super::*;
use proptest::prelude::*;

fn exports() -> Vec<ExportInfo> {
    let export = |name: &str, read_only| ExportInfo {
        name: name.into(),
        description: format!("the {name} disk"),
        size: 1 << 30,
        read_only,
        preferred_block: 65536,
        allocation_depth: true,
        multi_conn: true,
        bitmaps: Arc::new([ExportedBitmap::new("b", [])]),
    };
    vec![export("first", false), export("second", true)]
}

fn option_bytes(kind: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&kind.to_be_bytes());
    bytes.extend_from_slice(&(data.len() as u32).to_be_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

fn go(name: &str, requests: &[u16]) -> Vec<u8> {
    let mut data = string(name);
    data.extend_from_slice(&(requests.len() as u16).to_be_bytes());
    for request in requests {
        data.extend_from_slice(&request.to_be_bytes());
    }
    data
}

fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend_from_slice(&(queries.len() as u32).to_be_bytes());
    for query in queries {
        data.extend_from_slice(&string(query));
    }
    data
}

fn greeted() -> Handshake {
    let mut handshake = Handshake::default();
    let step = handshake.advance(&exports(), &3_u32.to_be_bytes(), &mut Vec::new());
    assert_eq!(step, Ok(Step { consumed: 4, outcome: Outcome::More }));
    handshake
}

/// Sends one option and returns the outcome and the replies as (type, payload).
fn send(handshake: &mut Handshake, kind: u32, data: &[u8]) -> (Outcome, Vec<(u32, Vec<u8>)>) {
    let input = option_bytes(kind, data);
    let mut output = Vec::new();
    let step = handshake.advance(&exports(), &input, &mut output).unwrap();
    assert_eq!(step.consumed, input.len());
    let mut cursor = Cursor(&output);
    let mut replies = Vec::new();
    while !cursor.is_empty() {
        assert_eq!(cursor.u64(), Some(OPTION_REPLY_MAGIC));
        assert_eq!(cursor.u32(), Some(kind));
        let reply = cursor.u32().unwrap();
        replies.push((reply, cursor.string().unwrap().to_vec()));
    }
    (step.outcome, replies)
}

fn only_error(handshake: &mut Handshake, kind: u32, data: &[u8]) -> u32 {
    let (outcome, replies) = send(handshake, kind, data);
    assert_eq!((outcome, replies.len()), (Outcome::More, 1));
    assert!(!replies[0].1.is_empty(), "an error has a message");
    replies[0].0
}

#[test]
fn the_greeting_offers_fixed_newstyle_without_zeroes() {
    assert_eq!(Handshake::greeting(), *b"NBDMAGICIHAVEOPT\0\x03");
}

#[test]
fn list_names_every_export_with_its_description() {
    let (outcome, replies) = send(&mut greeted(), option::LIST, &[]);
    assert_eq!(outcome, Outcome::More);
    let server = |text: &[u8]| (option_reply::SERVER, text.to_vec());
    let expected = [
        server(b"\0\0\0\x05firstthe first disk"),
        server(b"\0\0\0\x06secondthe second disk"),
        (option_reply::ACK, vec![]),
    ];
    assert_eq!(replies, expected);
}

#[test]
fn go_describes_and_enters_transmission() {
    let mut handshake = greeted();
    send(&mut handshake, option::STRUCTURED_REPLY, &[]);
    let wanted = go("", &[info::NAME, info::DESCRIPTION, 77]);
    let (outcome, replies) = send(&mut handshake, option::GO, &wanted);
    let expected = Agreement { export: 0, structured: true, contexts: Contexts::default() };
    assert_eq!(outcome, Outcome::Transmission(expected));
    let info = |data: &[u8]| (option_reply::INFO, data.to_vec());
    let flags = 0b1101_1110_1101_u16.to_be_bytes();
    let expected = [
        info(b"\0\x01first"),
        info(b"\0\x02the first disk"),
        info(b"\0\x03\0\0\0\x01\0\x01\0\0\x02\0\0\0"),
        info(&[b"\0\0\0\0\0\0\x40\0\0\0", &flags[..]].concat()),
        (option_reply::ACK, vec![]),
    ];
    assert_eq!(replies, expected);
}

#[test]
fn info_stays_in_the_handshake() {
    let (outcome, replies) = send(&mut greeted(), option::INFO, &go("second", &[]));
    assert_eq!((outcome, replies.len()), (Outcome::More, 3));
    let flags = 0b0101_0000_1111_u16.to_be_bytes();
    assert_eq!(replies[1].1[10..], flags);
}

#[test]
fn export_name_ends_in_zeroes_unless_waived() {
    for (client, length) in [(1_u32, 134), (3, 10), (0, 134)] {
        let mut input = client.to_be_bytes().to_vec();
        input.extend(option_bytes(option::EXPORT_NAME, b"second"));
        let mut output = Vec::new();
        let step = Handshake::default().advance(&exports(), &input, &mut output).unwrap();
        assert!(matches!(step.outcome, Outcome::Transmission(Agreement { export: 1, .. })));
        assert_eq!((step.consumed, output.len()), (input.len(), length));
        assert_eq!(output[..8], (1_u64 << 30).to_be_bytes());
    }
}

#[test]
fn unknown_names_are_refused() {
    let mut handshake = greeted();
    for kind in [option::GO, option::INFO] {
        let error = only_error(&mut handshake, kind, &go("third", &[]));
        assert_eq!(error, option_reply::ERR_UNKNOWN);
    }
    let input = option_bytes(option::EXPORT_NAME, b"third");
    let result = handshake.advance(&exports(), &input, &mut Vec::new());
    assert_eq!(result, Err(Violation::NoSuchExport("third".into())));
}

#[test]
fn what_is_not_supported_says_so() {
    let mut handshake = greeted();
    for kind in [option::STARTTLS, option::EXTENDED_HEADERS, 4, 12, u32::MAX] {
        assert_eq!(only_error(&mut handshake, kind, b""), option_reply::ERR_UNSUP);
        assert_eq!(only_error(&mut handshake, kind, b"data"), option_reply::ERR_UNSUP);
    }
}

/// A client that has sent its flags to a server that can encrypt.
fn greeted_with(encryption: Encryption) -> Handshake {
    let mut handshake = Handshake::new(encryption);
    handshake.advance(&exports(), &3_u32.to_be_bytes(), &mut Vec::new()).unwrap();
    handshake
}

#[test]
fn where_tls_is_required_nothing_else_is_answered_before() {
    let mut handshake = greeted_with(Encryption::Required);
    let kinds = [
        option::LIST,
        option::INFO,
        option::GO,
        option::STRUCTURED_REPLY,
        option::LIST_META_CONTEXT,
        option::SET_META_CONTEXT,
        option::EXTENDED_HEADERS,
        u32::MAX,
    ];
    for kind in kinds {
        for data in [&b""[..], &go("first", &[]), &vec![0; MAX_OPTION]] {
            let error = only_error(&mut handshake, kind, data);
            assert_eq!(error, option_reply::ERR_TLS_REQD, "option {kind}");
        }
    }
    let long = [option_bytes(option::GO, &[])[..12].to_vec(), vec![0, 2, 0, 0]].concat();
    let mut output = Vec::new();
    handshake.advance(&exports(), &long, &mut output).unwrap();
    assert_eq!(output[12..16], option_reply::ERR_TLS_REQD.to_be_bytes());
    handshake.advance(&exports(), &vec![0; 2 << 16], &mut Vec::new()).unwrap();
    assert_eq!(only_error(&mut handshake, option::STARTTLS, b"x"), option_reply::ERR_INVALID);
    let export = option_bytes(option::EXPORT_NAME, b"first");
    let result = handshake.advance(&exports(), &export, &mut Vec::new());
    assert_eq!(result, Err(Violation::TlsRequired));

    let (outcome, replies) = send(&mut handshake, option::STARTTLS, &[]);
    assert_eq!(outcome, Outcome::StartTls);
    assert_eq!(replies, [(option_reply::ACK, vec![])]);
    assert_eq!(send(&mut handshake, option::LIST, &[]).1.len(), 3);
    assert_eq!(only_error(&mut handshake, option::STARTTLS, &[]), option_reply::ERR_INVALID);
    let (outcome, _) = send(&mut handshake, option::GO, &go("first", &[]));
    assert!(matches!(outcome, Outcome::Transmission(_)));
}

#[test]
fn a_client_that_must_encrypt_may_leave() {
    let mut handshake = greeted_with(Encryption::Required);
    assert_eq!(send(&mut handshake, option::ABORT, &[]).0, Outcome::Aborted);
}

#[test]
fn what_was_negotiated_before_tls_is_forgotten() {
    let mut handshake = greeted_with(Encryption::Optional);
    send(&mut handshake, option::STRUCTURED_REPLY, &[]);
    send(&mut handshake, option::SET_META_CONTEXT, &contexts("first", &["base:allocation"]));
    assert_eq!(send(&mut handshake, option::STARTTLS, &[]).0, Outcome::StartTls);
    let set = contexts("first", &["base:allocation"]);
    let error = only_error(&mut handshake, option::SET_META_CONTEXT, &set);
    assert_eq!(error, option_reply::ERR_INVALID, "structured replies are to be negotiated again");
    let (outcome, _) = send(&mut handshake, option::GO, &go("first", &[]));
    let expected = Agreement { export: 0, structured: false, contexts: Contexts::default() };
    assert_eq!(outcome, Outcome::Transmission(expected));
}

#[test]
fn where_tls_is_optional_a_client_may_do_without() {
    let mut handshake = greeted_with(Encryption::Optional);
    let (outcome, _) = send(&mut handshake, option::GO, &go("first", &[]));
    assert!(matches!(outcome, Outcome::Transmission(_)));
}

#[test]
fn plain_bytes_behind_starttls_end_the_session() {
    for encryption in [Encryption::Optional, Encryption::Required] {
        for behind in [option_bytes(option::STRUCTURED_REPLY, &[]), vec![0x16], vec![0; 40]] {
            let mut handshake = greeted_with(encryption);
            let input = [option_bytes(option::STARTTLS, &[]), behind.clone()].concat();
            let result = handshake.advance(&exports(), &input, &mut Vec::new());
            assert_eq!(result, Err(Violation::AfterStartTls(behind.len())));
        }
    }
}

#[test]
fn malformed_data_is_invalid() {
    let mut handshake = greeted();
    for kind in [option::LIST, option::STRUCTURED_REPLY] {
        assert_eq!(only_error(&mut handshake, kind, b"x"), option_reply::ERR_INVALID);
    }
    send(&mut handshake, option::STRUCTURED_REPLY, &[]);
    let more = [go("first", &[]), vec![0]].concat();
    let fewer = &go("first", &[1])[..12];
    let huge = u32::MAX.to_be_bytes();
    for data in [&b""[..], &more, fewer, &huge, b"\0\0\0\x05fir"] {
        assert_eq!(only_error(&mut handshake, option::GO, data), option_reply::ERR_INVALID);
    }
    let more = [contexts("first", &["base:"]), vec![0]].concat();
    let many = [string("first"), u32::MAX.to_be_bytes().to_vec()].concat();
    for kind in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        for data in [&b""[..], &more, &many, &huge] {
            assert_eq!(only_error(&mut handshake, kind, data), option_reply::ERR_INVALID);
        }
    }
}

#[test]
fn contexts_need_structured_replies() {
    let data = contexts("first", &["base:allocation"]);
    for kind in [option::LIST_META_CONTEXT, option::SET_META_CONTEXT] {
        assert_eq!(only_error(&mut greeted(), kind, &data), option_reply::ERR_INVALID);
    }
}

#[test]
fn contexts_are_listed() {
    let mut handshake = greeted();
    send(&mut handshake, option::STRUCTURED_REPLY, &[]);
    let mut names = |queries: &[&str]| {
        let data = contexts("", queries);
        let (_, mut replies) = send(&mut handshake, option::LIST_META_CONTEXT, &data);
        assert_eq!(replies.pop(), Some((option_reply::ACK, vec![])));
        let text = |(_, data): (u32, Vec<u8>)| String::from_utf8(data[4..].to_vec()).unwrap();
        replies.into_iter().map(text).collect::<Vec<_>>()
    };
    let (base, depth) = ("base:allocation", "qemu:allocation-depth");
    let bitmap = "qemu:dirty-bitmap:b";
    assert_eq!(names(&[]), [base, depth, bitmap]);
    assert_eq!(names(&["qemu:"]), [depth, bitmap]);
    assert_eq!(names(&["qemu:dirty-bitmap:"]), [bitmap]);
    assert_eq!(names(&["base:", "base:allocation"]), [base]);
    assert!(names(&["nbd-server:", "qemu:dirty-bitmap:a"]).is_empty());
}

#[test]
fn contexts_hold_for_the_export_they_were_selected_for() {
    let selected = |name: &str, then: Option<(&str, &[&str])>| {
        let mut handshake = greeted();
        send(&mut handshake, option::STRUCTURED_REPLY, &[]);
        let data = contexts("first", &["qemu:allocation-depth", "base:allocation", "base:"]);
        let (_, replies) = send(&mut handshake, option::SET_META_CONTEXT, &data);
        assert_eq!(replies.len(), 3);
        assert_eq!(replies[0].1, b"\0\0\0\0base:allocation");
        assert_eq!(replies[1].1, b"\0\0\0\x01qemu:allocation-depth");
        if let Some((name, queries)) = then {
            send(&mut handshake, option::SET_META_CONTEXT, &contexts(name, queries));
        }
        match send(&mut handshake, option::GO, &go(name, &[])).0 {
            Outcome::Transmission(agreement) => agreement.contexts.iter().count(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(selected("first", None), 2);
    assert_eq!(selected("", None), 2, "the empty name is the first export");
    assert_eq!(selected("second", None), 0);
    assert_eq!(selected("first", Some(("first", &["base:allocation"]))), 1);
    assert_eq!(selected("first", Some(("third", &["base:allocation"]))), 0);
    assert_eq!(selected("first", Some(("second", &["base:allocation"]))), 0);
    assert_eq!(selected("first", Some(("first", &["base:"]))), 0);
}

#[test]
fn contexts_hold_when_exports_come_and_go() {
    let contexts_of = |now: &[ExportInfo], name: &str| {
        let mut handshake = greeted();
        send(&mut handshake, option::STRUCTURED_REPLY, &[]);
        let data = contexts("", &["base:allocation"]);
        send(&mut handshake, option::SET_META_CONTEXT, &data);
        let input = option_bytes(option::GO, &go(name, &[]));
        match handshake.advance(now, &input, &mut Vec::new()).unwrap().outcome {
            Outcome::Transmission(agreement) => {
                Some((agreement.export, agreement.contexts.iter().count()))
            }
            _ => None,
        }
    };
    let [first, second] = exports().try_into().unwrap();
    assert_eq!(contexts_of(&[second.clone(), first.clone()], "first"), Some((1, 1)));
    assert_eq!(contexts_of(&[second.clone(), first], ""), Some((0, 0)));
    assert_eq!(contexts_of(&[second], "first"), None);
    assert_eq!(contexts_of(&[], ""), None);
}

#[test]
fn long_options_are_skipped_and_longer_ones_end_the_session() {
    let mut handshake = greeted();
    let mut input = option_bytes(option::GO, &vec![0; MAX_OPTION + 1]);
    input.extend(option_bytes(option::ABORT, &[]));
    let mut output = Vec::new();
    let mut rest = &input[..];
    let mut outcome = Outcome::More;
    while outcome == Outcome::More {
        let step = handshake.advance(&exports(), &rest[..rest.len().min(5000)], &mut output);
        let step = step.unwrap();
        rest = &rest[step.consumed..];
        outcome = step.outcome;
    }
    assert_eq!((outcome, rest.len()), (Outcome::Aborted, 0));
    assert_eq!(output[12..16], option_reply::ERR_TOO_BIG.to_be_bytes());

    let mut header = option_bytes(option::LIST, &[]);
    header[12..].copy_from_slice(&(MAX_SKIP + 1).to_be_bytes());
    let result = greeted().advance(&exports(), &header, &mut Vec::new());
    assert_eq!(
        result,
        Err(Violation::OptionTooLong { option: option::LIST, length: MAX_SKIP + 1 })
    );
    header[8..12].copy_from_slice(&option::EXPORT_NAME.to_be_bytes());
    header[12..].copy_from_slice(&(MAX_STRING as u32 + 1).to_be_bytes());
    let result = greeted().advance(&exports(), &header, &mut Vec::new());
    assert!(matches!(result, Err(Violation::OptionTooLong { .. })));
    let name = go(&"n".repeat(MAX_STRING + 1), &[]);
    assert_eq!(only_error(&mut greeted(), option::GO, &name), option_reply::ERR_TOO_BIG);
}

#[test]
fn options_wait_while_much_is_to_be_sent() {
    let input = option_bytes(option::LIST, &[]).repeat(8000);
    let mut output = Vec::new();
    let step = greeted().advance(&exports(), &input, &mut output).unwrap();
    assert!(step.consumed < input.len() && step.consumed.is_multiple_of(OPTION_HEADER));
    assert!(output.len() < MAX_OUTPUT + 1000);
}

#[test]
fn violations_end_the_session() {
    let flags = Handshake::default().advance(&exports(), &[0, 0, 0, 4], &mut Vec::new());
    assert_eq!(flags, Err(Violation::ClientFlags(4)));
    let magic = greeted().advance(&exports(), &[0; 16], &mut Vec::new());
    assert_eq!(magic, Err(Violation::OptionMagic(0)));
    let input = [&[0; 4][..], &option_bytes(option::LIST, &[])].concat();
    let fixed = Handshake::default().advance(&exports(), &input, &mut Vec::new());
    assert_eq!(fixed, Err(Violation::NotFixed(option::LIST)));
}

#[derive(Clone, Debug)]
enum Part {
    Option(u32, Vec<u8>),
    Noise(Vec<u8>),
}

fn parts() -> impl Strategy<Value = Vec<Part>> {
    let name = prop_oneof![Just(""), Just("first"), Just("second"), Just("third")];
    let query = prop_oneof![Just("base:"), Just("base:allocation"), Just("qemu:"), Just("")];
    let valid = prop_oneof![
        Just(Part::Option(option::LIST, vec![])),
        Just(Part::Option(option::STRUCTURED_REPLY, vec![])),
        name.clone().prop_map(|name| Part::Option(option::INFO, go(name, &[1, 2]))),
        (name, prop::collection::vec(query, 0..4), 9_u32..11)
            .prop_map(|(name, queries, kind)| { Part::Option(kind, contexts(name, &queries)) }),
    ];
    let noisy = (0_u32..13, prop::collection::vec(any::<u8>(), 0..80))
        .prop_map(|(kind, data)| Part::Option(kind, data));
    let noise = prop::collection::vec(any::<u8>(), 0..40).prop_map(Part::Noise);
    prop::collection::vec(prop_oneof![6 => valid, 2 => noisy, 1 => noise], 0..8)
}

/// Runs a whole conversation in pieces of these lengths, and returns the replies and how it ended.
fn converse(input: &[u8], pieces: &[usize]) -> (Vec<u8>, String) {
    let mut handshake = Handshake::default();
    let mut output = Vec::new();
    let (mut start, mut end, mut turn) = (0, 0, 0);
    while end < input.len() {
        end = (end + pieces[turn % pieces.len()]).min(input.len());
        turn += 1;
        match handshake.advance(&exports(), &input[start..end], &mut output) {
            Ok(Step { consumed, outcome }) => {
                start += consumed;
                assert!(start <= end);
                if outcome != Outcome::More {
                    return (output, format!("{outcome:?} at {start}"));
                }
            }
            Err(violation) => return (output, violation.to_string()),
        }
    }
    (output, "more".into())
}

proptest! {
    #[test]
    fn the_way_input_is_cut_changes_nothing(
        parts in parts(),
        pieces in prop::collection::vec(1_usize..40, 1..8),
    ) {
        let mut input = 3_u32.to_be_bytes().to_vec();
        for part in parts {
            match part {
                Part::Option(kind, data) => input.extend(option_bytes(kind, &data)),
                Part::Noise(noise) => input.extend(noise),
            }
        }
        prop_assert_eq!(converse(&input, &pieces), converse(&input, &[usize::MAX >> 1]));
    }

    #[test]
    fn any_bytes_are_survived(input in prop::collection::vec(any::<u8>(), 0..400)) {
        converse(&input, &[7]);
    }
}
