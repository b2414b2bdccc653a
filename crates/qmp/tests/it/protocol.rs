//! Sessions: greeting, negotiation, ids, events, bounds, end.

use crate::common::{Raw, Served};
use isobath_qmp::client::{Address, Client, ClientError};
use isobath_qmp::json;
use isobath_qmp::server::Limits;
use isobath_testkit::process::PATIENCE;
use serde_json::{Value, json};
use std::time::Duration;

fn class(reply: &Value) -> &str {
    reply["error"]["class"].as_str().unwrap_or("")
}

#[test]
fn requests_are_answered_in_order_with_their_ids() {
    let served = Served::start(Limits::default());
    let mut raw = Raw::negotiated(&served.socket);
    raw.send(br#"{"execute":"echo","arguments":{"text":"a"},"id":[1]}{"execute":"nope","id":"b"}"#);
    raw.send(b"{'execute':'fail', 'id':null}\n\n 3 {\"execute\":\"echo\",");
    raw.send(br#""arguments":{"text":"b"}}"#);
    assert_eq!(raw.line(), json!({"return": "a", "id": [1]}));
    let unknown =
        json!({"class": "CommandNotFound", "desc": "The command nope has not been found"});
    assert_eq!(raw.line(), json!({"id": "b", "error": unknown}));
    let fails = json!({"class": "GenericError", "desc": "it fails"});
    assert_eq!(raw.line(), json!({"id": null, "error": fails}));
    assert_eq!(raw.line()["error"]["desc"], "QMP input must be a JSON object");
    assert_eq!(raw.line(), json!({"return": "b"}));
    raw.finish();
    assert_eq!(raw.line(), Value::Null);
}

#[test]
fn nothing_is_done_before_the_negotiation() {
    let served = Served::start(Limits::default());
    let mut raw = Raw::connect(&served.socket);
    let greeting = raw.line();
    assert_eq!(greeting["QMP"]["capabilities"], json!([]));
    assert_eq!(greeting["QMP"]["version"]["qemu"]["major"], 7);
    assert_eq!(class(&raw.ask(r#"{"execute":"query-commands"}"#)), "CommandNotFound");
    let oob = r#"{"execute":"qmp_capabilities","arguments":{"enable":["oob"]}}"#;
    assert_eq!(class(&raw.ask(oob)), "GenericError");
    assert_eq!(class(&raw.ask(r#"{"execute":"emit"}"#)), "CommandNotFound");
    let mut other = Raw::negotiated(&served.socket);
    other.send(br#"{"execute":"emit"}"#);
    assert_eq!(other.line()["event"], "TOLD");
    assert_eq!(other.line(), json!({"return": {}}));
    assert_eq!(raw.ask(r#"{"execute":"qmp_capabilities"}"#), json!({"return": {}}));
    assert_eq!(class(&raw.ask(r#"{"execute":"qmp_capabilities"}"#)), "CommandNotFound");
    let names = raw.ask(r#"{"execute":"query-commands"}"#);
    assert!(names["return"].as_array().unwrap().contains(&json!({"name": "echo"})), "{names}");
}

#[test]
fn who_does_not_speak_qmp_is_not_heard_out() {
    let served = Served::start(Limits::default());
    let negotiate = r#"{"execute":"qmp_capabilities"}{"execute":"emit"}"#;
    let mut other = Raw::negotiated(&served.socket);
    for before in [
        "POST / HTTP/1.1\r\nContent-Type: text/plain\r\n\r\n",
        "pOsT / HTTP/1.1\r\n\r\n",
        "@\n",
        "]",
        "\n 3 ",
        "\"x\"",
        "[]",
        "\u{16}\u{3}\u{1}\n",
        "{,}\n",
        "{\"a\":1,\"a\":2}\n",
        "{\"execute\":\"query-version\"}GET /\n",
    ] {
        let mut raw = Raw::connect(&served.socket);
        raw.line();
        raw.send(format!("{before}{negotiate}").as_bytes());
        let mut replies = Vec::new();
        while let reply @ Value::Object(_) = raw.line() {
            replies.push(reply);
        }
        assert!(!replies.is_empty(), "{before}: it is told why");
        assert!(replies.iter().all(|reply| reply["error"].is_object()), "{before}: {replies:?}");
    }
    assert_eq!(
        other.ask(r#"{"execute":"fail"}"#)["error"]["desc"],
        "it fails",
        "nothing was emitted"
    );
    other.send(b"post / HTTP/1.1\r\n\r\n{\"execute\":\"emit\"}");
    assert_eq!(other.line()["error"]["desc"], "QMP is not HTTP");
    assert_eq!(other.line(), Value::Null);
}

#[test]
fn the_first_byte_that_begins_no_request_ends_the_session() {
    let served = Served::start(Limits::default());
    let mut raw = Raw::connect(&served.socket);
    raw.line();
    assert!(raw.ask("\r\n P")["error"].is_object());
    assert_eq!(raw.line(), Value::Null);
}

#[test]
fn other_users_are_turned_away() {
    let nobody = Limits { users: Some([u32::MAX - 1; 2]), ..Limits::default() };
    let served = Served::start(nobody);
    assert_eq!(Raw::connect(&served.socket).line(), Value::Null);
    let served = Served::start(Limits { users: None, ..nobody });
    let _ = Raw::negotiated(&served.socket);
}

#[test]
fn everybody_hears_events_before_the_reply_that_caused_them() {
    let served = Served::start(Limits::default());
    let mut one = Raw::negotiated(&served.socket);
    let mut two = Raw::negotiated(&served.socket);
    let event = one.ask(r#"{"execute":"emit","arguments":{"text":"x"}}"#);
    assert_eq!(
        (&event["event"], &event["data"]["text"]),
        (&json!("TOLD"), &"x".repeat(1000).into())
    );
    assert!(event["timestamp"]["seconds"].as_u64().unwrap() > 1_600_000_000);
    assert!(event["timestamp"]["microseconds"].as_u64().unwrap() < 1_000_000);
    assert_eq!(one.line(), json!({"return": {}}));
    assert_eq!(two.line(), event);
}

#[test]
fn one_clients_long_command_does_not_hold_up_another() {
    let served = Served::start(Limits::default());
    let mut slow = Raw::negotiated(&served.socket);
    slow.send(br#"{"execute":"pause","arguments":{"times":600000}}"#);
    let mut quick = Raw::negotiated(&served.socket);
    assert_eq!(quick.ask(r#"{"execute":"echo","arguments":{"text":"a"}}"#), json!({"return": "a"}));
}

#[test]
fn a_client_that_does_not_read_is_cut_off_and_the_others_hear_all() {
    let served = Served::start(Limits { events: 1 << 20, ..Limits::default() });
    let mut deaf = Raw::negotiated(&served.socket);
    let mut other = Raw::negotiated(&served.socket);
    let request = br#"{"execute":"emit","arguments":{"times":100}}"#;
    let (mut events, mut rounds) = (0, 0);
    while rounds < 100 {
        other.send(request);
        while other.line()["event"] == "TOLD" {
            events += 1;
        }
        rounds += 1;
    }
    assert_eq!(events, 100 * rounds);
    let mut heard = 0;
    while deaf.line() != Value::Null {
        heard += 1;
    }
    assert!(heard < events, "{heard} of {events}");
}

#[test]
fn requests_wait_for_who_does_not_take_replies() {
    let served = Served::start(Limits { replies: 4096, ..Limits::default() });
    let mut raw = Raw::negotiated(&served.socket);
    let request = r#"{"execute":"echo","arguments":{"text":"0123456789","times":10000}}"#;
    let mut sent = 0;
    // Each answer has 100 kB: the server stops reading long before the requests end.
    while sent < 100_000 && raw.try_send(request.as_bytes()) {
        sent += 1;
    }
    assert!(sent < 100_000);
    let mut other = Raw::negotiated(&served.socket);
    assert_eq!(other.ask(r#"{"execute":"fail"}"#)["error"]["desc"], "it fails");
    assert_eq!(raw.line()["return"].as_str().unwrap().len(), 100_000);
}

#[test]
fn hostile_input_is_answered_or_ends_the_session() {
    let request = json::Limits { bytes: 1000, depth: 10 };
    let served = Served::start(Limits { request, sessions: 2, ..Limits::default() });
    let mut raw = Raw::negotiated(&served.socket);
    let deep = format!("{}\n", "[".repeat(100));
    assert_eq!(raw.ask(&deep)["error"]["desc"], "JSON nesting depth limit exceeded");
    let long = format!("\"{}\"\n", "x".repeat(100_000));
    assert_eq!(raw.ask(&long)["error"]["desc"], "JSON token size limit exceeded");
    for bad in ["{\"execute\":3}", "{}", "[]", "\"\"", "{\"a\":\"\\ud800\"}", "{,}", "]", "@\n"] {
        assert_eq!(class(&raw.ask(bad)), "GenericError", "{bad}");
    }
    assert_eq!(class(&raw.ask(b"{\"execute\":\xff")), "GenericError");
    assert_eq!(class(&raw.ask(r#"{"execute":"fail","execute":"quit"}"#)), "GenericError");
    let mut second = Raw::negotiated(&served.socket);
    assert_eq!(Raw::connect(&served.socket).line(), Value::Null);
    assert_eq!(second.ask(r#"{"execute":"fail"}"#)["error"]["desc"], "it fails");
}

#[test]
fn quit_is_answered_and_ends_every_session() {
    let served = Served::start(Limits::default());
    let mut waiting = Raw::connect(&served.socket);
    waiting.line();
    let mut client = Client::connect(&Address::Unix(served.socket.clone())).unwrap();
    assert_eq!(client.execute("echo", json!({"text": "a"})).unwrap(), json!("a"));
    client.execute("emit", json!({})).unwrap();
    assert_eq!(client.event(PATIENCE).unwrap().unwrap().name, "TOLD");
    assert_eq!(client.event(Duration::from_millis(1)).unwrap(), None);
    let refused = client.execute("echo", json!({})).unwrap_err();
    assert!(refused.is_of("GenericError") && refused.to_string().contains("'text' is missing"));
    assert_eq!(client.execute("quit", json!({})).unwrap(), json!({}));
    assert!(matches!(client.event(PATIENCE), Err(ClientError::Closed)));
    assert_eq!(waiting.line(), Value::Null);
    served.ended();
}
