//! Servers whose connections are encrypted, and their clients.

use crate::serving::ISOBATH;
use isobath_testkit::certificates::Keys;
use isobath_testkit::process::{Finished, Ready, Server, run_program};
use isobath_testkit::{args, qemu, tools};
use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;

/// An image, and certificates.
struct Place {
    keys: Keys,
}

impl Place {
    fn new() -> Self {
        let keys = Keys::new("/C=GB/CN=client");
        qemu::create(&keys.at("vm.qcow2"), "qcow2", MIB, "");
        Self { keys }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.keys.at(name)
    }

    fn serve(&self, options: &[&str]) -> Server {
        Server::start(self.command("serve").args(options), Ready::Line("-blockdev"))
    }

    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(ISOBATH);
        command.current_dir(self.keys.path()).args([name, "vm.qcow2"]);
        command
    }

    /// Runs `isobath serve` where it must fail.
    #[track_caller]
    fn refused(&self, options: &[&str], reason: &str) {
        let all = [&["serve", "vm.qcow2"], options].concat();
        let mut command = Command::new(ISOBATH);
        let done = isobath_testkit::process::run(command.current_dir(self.keys.path()).args(&all));
        let done = done.exits(1);
        let said = &done.stderr;
        assert!(said.contains(reason), "{said}");
    }
}

/// The value behind `name=` in a text.
fn value<'a>(text: &'a str, name: &str) -> &'a str {
    let (_, rest) = text.split_once(&format!("{name}=")).expect(name);
    rest.split(|end: char| end == ',' || end.is_whitespace()).next().unwrap()
}

/// QEMU's arguments for the export that a server has announced.
fn as_announced(server: &Server, credentials: &Path) -> Vec<OsString> {
    let text = server.output();
    let object = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", credentials.display());
    let image = format!(
        "driver=nbd,host={},port={},export={},tls-creds={}",
        value(&text, "server.host"),
        value(&text, "server.port"),
        value(&text, "export"),
        value(&text, "tls-creds")
    );
    args!["--object", object, "--image-opts", image]
}

fn info(program: impl Into<PathBuf>, server: &Server, credentials: &Path) -> Finished {
    let mut command = args!["info", "--output=json"];
    command.extend(as_announced(server, credentials));
    run_program(program.into(), command)
}

#[test]
fn nbd_over_tcp_is_encrypted_for_those_who_are_admitted() {
    let place = Place::new();
    let options =
        ["--nbd", "127.0.0.1:0", "--tls-creds", "server", "--tls-authz", "C=GB,CN=client"];
    let server = place.serve(&options);
    let text = server.output();
    assert!(text.contains("nbds://127.0.0.1:") && !text.contains("nbd://"), "{text}");
    let found = info(tools::require("qemu-img"), &server, &place.at("client"));
    assert_eq!(found.ok().json()["virtual-size"], MIB);
    assert_ne!(info(tools::require("qemu-img"), &server, &place.at("server")).code(), 0);
    let uri = text.split_whitespace().find(|word| word.starts_with("nbds:")).unwrap();
    let plain = uri.replacen("nbds:", "nbd:", 1);
    assert_ne!(run_program(tools::require("nbdinfo"), [plain]).code(), 0);
    let done = server.stop().ok();
    assert!(!done.stderr.contains("without"), "{}", done.report());
}

#[test]
fn qemus_names_of_the_servers_encrypt_as_its_own_do() {
    let place = Place::new();
    let object =
        format!("tls-creds-x509,id=t,endpoint=server,dir={}", place.at("server").display());
    let named = ["--object", "authz-simple,id=z,identity=C=GB,,CN=client"];
    let socket = place.at("socket");
    let nbd = ["-k", socket.to_str().unwrap(), "-t", "--tls-creds", "t", "--tls-authz", "z"];
    let mut command = Command::new(ISOBATH);
    command.arg("qemu-nbd").args(["--object", &object]).args(named).args(nbd);
    let server = Server::start(command.arg(place.at("vm.qcow2")), Ready::Socket(&socket));
    let size = |client: &str| {
        let uri = format!(
            "nbds+unix://localhost/?socket={}&tls-certificates={}",
            socket.display(),
            place.at(client).display()
        );
        run_program(tools::require("nbdinfo"), ["--size", &uri])
    };
    assert_eq!(size("client").ok().text().trim(), MIB.to_string());
    assert_ne!(size("server").code(), 0);
    let client = format!("tls-creds-x509,id=c,dir={}", place.at("client").display());
    let list = ["-k", socket.to_str().unwrap(), "--tls-creds", "c", "--tls-hostname", "localhost"];
    let list = [&["qemu-nbd", "--list", "--object", &client], &list[..]].concat();
    let listed = run_program(ISOBATH, &list).ok().text();
    assert!(listed.contains("exports available: 1"), "{listed}");
    let _ = run_program(ISOBATH, &list[..6]).exits(1);
    let _ = server.stop().ok();

    let mut command = Command::new(ISOBATH);
    command.arg("qemu-storage-daemon").args(["--object", &object]);
    let address = format!("addr.type=unix,addr.path={},tls-creds=t", socket.display());
    command.args(["--nbd-server", &address]);
    let image = place.at("vm.qcow2");
    let file =
        format!("driver=qcow2,node-name=n,file.driver=file,file.filename={}", image.display());
    command.args(["--blockdev", &file, "--export", "type=nbd,id=e,node-name=n,name="]);
    let server = Server::start(&mut command, Ready::Socket(&socket));
    let done = size("client");
    assert_eq!(done.ok().text().trim(), MIB.to_string());
    let _ = server.stop().ok();
}

#[test]
fn images_on_encrypted_exports_are_used_like_others() {
    let place = Place::new();
    let server = place.serve(&["--nbd", "127.0.0.1:0", "--tls-creds", "server"]);
    let client = place.at("client");
    assert_eq!(info(ISOBATH, &server, &client).ok().json()["virtual-size"], MIB);
    let io = |commands: &[&str]| {
        let mut command = args!["io"];
        command.extend(commands.iter().flat_map(|text| args!["-c", text]));
        command.extend(as_announced(&server, &client));
        let done = run_program(ISOBATH, command).ok();
        assert!(!done.text().contains("failed"), "{}", done.report());
    };
    io(&["write -P 5 1000 300k", "aio_write -P 6 512k 200k", "aio_flush", "write -z 0 100"]);
    io(&["read -P 0 0 100", "read -P 5 1000 300k", "read -P 6 512k 200k"]);

    // With no credentials, with the server's, and for a server of another name.
    let text = server.output();
    let uri = text.split_whitespace().find(|word| word.starts_with("nbds:")).unwrap();
    let plain = uri.replacen("nbds:", "nbd:", 1);
    let refused = run_program(ISOBATH, ["info", &plain]).exits(1);
    assert!(refused.stderr.contains("requires TLS"), "{}", refused.report());
    let _ = info(ISOBATH, &server, &place.at("server")).exits(1);
    let object = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", client.display());
    let port = value(&text, "server.port");
    let image = format!(
        "driver=nbd,host=127.0.0.1,port={port},export=vm,tls-creds=tls0,tls-hostname=example.org"
    );
    let refused = run_program(ISOBATH, ["info", "--object", &object, "--image-opts", &image]);
    assert!(refused.exits(1).stderr.contains("example.org"));
    let _ = server.stop().ok();
}

/// QEMU's object for the client, and the options of the export on a server for which plain clients are as good.
fn on_a_lenient_server(place: &Place) -> (Server, String, String) {
    let server = place.serve(&["--nbd", "127.0.0.1:0,tls=optional", "--tls-creds", "server"]);
    let directory = place.at("client");
    let object = format!("tls-creds-x509,id=tls0,endpoint=client,dir={}", directory.display());
    let port = value(&server.output(), "server.port").to_owned();
    (server, object, format!("driver=nbd,port={port},export=vm,tls-creds=tls0"))
}

#[test]
fn whoever_asks_for_encryption_never_reads_a_plain_connection() {
    let place = Place::new();
    let (server, object, options) = on_a_lenient_server(&place);
    let info = |host: &str| {
        let image = format!("{options},host={host}");
        run_program(ISOBATH, ["info", "--object", &object, "--image-opts", &image])
    };
    let _ = info("127.0.0.1").ok();
    let refused = info("127.0.0.1,tls-hostname=example.org").exits(1);
    assert!(refused.stderr.contains("certificate"), "{}", refused.report());
    let _ = server.stop().ok();
}

#[test]
fn one_export_is_not_used_with_different_credentials() {
    let place = Place::new();
    let (server, object, options) = on_a_lenient_server(&place);
    let one = format!("{options},host=127.0.0.1");
    let compare = |other: &str| {
        run_program(ISOBATH, ["compare", "--object", &object, "--image-opts", &one, other])
    };
    let _ = compare(&one).ok();
    // Another name of the same directory.
    symlink(place.at("client"), place.at("link")).unwrap();
    let link = format!("tls-creds-x509,id=tls1,endpoint=client,dir={}", place.at("link").display());
    let other = one.replace("tls0", "tls1");
    let objects = ["--object", &object, "--object", &link];
    let both = [&["compare"], &objects[..], &["--image-opts", &one, &other]].concat();
    let _ = run_program(ISOBATH, both).ok();
    let refused = compare(&format!("{one},tls-hostname=example.org")).exits(2);
    assert!(refused.stderr.contains("already used with the credentials"), "{}", refused.report());
    let _ = server.stop().ok();
}

#[test]
fn an_image_that_io_opens_is_encrypted() {
    let place = Place::new();
    let (server, object, options) = on_a_lenient_server(&place);
    let open = format!("open -o {options},host=127.0.0.1");
    let commands = ["-c", &open, "-c", "write -P 5 0 64k", "-c", "read -P 5 0 64k"];
    let done = run_program(ISOBATH, [&["io", "--object", &object], &commands[..]].concat()).ok();
    assert!(!done.text().contains("failed"), "{}", done.report());
    // It is the encryption that this fails for.
    let command = format!("{open},tls-hostname=example.org");
    let refused = run_program(ISOBATH, ["io", "--object", &object, "-c", &command]).exits(1);
    assert!(refused.stderr.contains("example.org"), "{}", refused.report());
    // An attempt that failed keeps nobody from another.
    let wrong = format!("{open},tls-hostname=example.org");
    let commands = ["-c", &wrong, "-c", &open, "-c", "read -P 5 0 64k"];
    let done = run_program(ISOBATH, [&["io", "--object", &object], &commands[..]].concat());
    assert!(done.text().contains("read 65536/65536"), "{}", done.report());
    let _ = server.stop().ok();
}

#[test]
fn exports_of_qemu_nbd_are_used_encrypted() {
    let place = Place::new();
    let socket = place.at("socket");
    let object =
        format!("tls-creds-x509,id=t,endpoint=server,dir={}", place.at("server").display());
    let mut command = Command::new(tools::require("qemu-nbd"));
    command.args(["--object", &object, "--tls-creds", "t", "-t", "-f", "qcow2", "-k"]);
    command.arg(&socket).arg(place.at("vm.qcow2"));
    let server = Server::start(&mut command, Ready::Socket(&socket));
    let object = format!("tls-creds-x509,id=c,dir={}", place.at("client").display());
    let image = format!("driver=nbd,path={},tls-creds=c,tls-hostname=localhost", socket.display());
    let mut command = args!["io", "--object", object, "--image-opts", image];
    command.extend(args!["-c", "write -P 7 3 700k", "-c", "read -P 7 3 700k", "-c", "flush"]);
    let done = run_program(ISOBATH, command).ok();
    assert!(!done.text().contains("failed"), "{}", done.report());
    let _ = server.stop_qemu();
}

#[test]
fn encryption_opens_no_export_that_an_address_does_not_offer() {
    let place = Place::new();
    let hidden = ["--nbd", "unix:hidden,tls=required,export=late", "--qmp", "unix:qmp"];
    let offered = ["--nbd", "unix:offered,tls=required", "--tls-creds", "server"];
    let server = place.serve(&[hidden, offered].concat());
    let size = |socket: &str, name: &str| {
        let (socket, client) = (place.at(socket), place.at("client"));
        let query = format!("socket={}&tls-certificates={}", socket.display(), client.display());
        let uri = format!("nbds+unix://localhost/{name}?{query}");
        run_program(tools::require("nbdinfo"), ["--size", &uri]).code()
    };
    for name in ["vm", ""] {
        assert_eq!(size("offered", name), 0);
        assert_ne!(size("hidden", name), 0);
    }
    let _ = server.stop().ok();
}

#[test]
fn another_name_is_not_admitted() {
    let place = Place::new();
    let options = ["--nbd", "127.0.0.1:0", "--tls-creds", "server", "--tls-authz", "CN=client"];
    let server = place.serve(&options);
    assert_ne!(info(tools::require("qemu-img"), &server, &place.at("client")).code(), 0);
    let _ = server.stop().ok();
}

#[test]
fn the_documented_certificates_work() {
    let page = std::fs::read_to_string(tools::workspace().join("docs/tls.md")).unwrap();
    let (_, rest) = page.split_once("```sh\n").unwrap();
    let (script, _) = rest.split_once("```").unwrap();
    let place = Place::new();
    let made = place.at("made");
    std::fs::create_dir(&made).unwrap();
    let mut shell = Command::new("sh");
    let _ = isobath_testkit::process::run(shell.current_dir(&made).args(["-ec", script])).ok();
    let name = "CN=laptop,O=Example Org,C=GB";
    let options = ["--nbd", "127.0.0.1:0", "--tls-creds", "made/server", "--tls-authz", name];
    let server = place.serve(&options);
    let found = info(tools::require("qemu-img"), &server, &made.join("client"));
    // QEMU asks for a certificate of the address.
    assert!(found.exits(1).stderr.contains("not match the hostname"));
    let uri = format!(
        "nbds://localhost:{}/vm?tls-certificates={}",
        value(&server.output(), "server.port"),
        made.join("client").display()
    );
    let size = run_program(tools::require("nbdinfo"), ["--size", &uri]).ok().text();
    assert_eq!(size.trim(), MIB.to_string());
    let _ = server.stop().ok();
}

#[test]
fn qmp_is_encrypted_from_the_first_byte() {
    let place = Place::new();
    let socket = place.at("qmp");
    let qmp = format!("unix:{},tls=required", socket.display());
    let server = place.serve(&["--nbd", "unix:n", "--qmp", &qmp, "--tls-creds", "server"]);
    let ctl = |credentials: &str, rest: &[&str]| {
        let credentials = place.at(credentials);
        let mut command = args!["ctl", &socket, "--tls-creds", credentials];
        command.extend(args!["--tls-hostname", "localhost"]);
        command.extend(rest.iter().map(OsString::from));
        run_program(ISOBATH, command)
    };
    let text = ctl("client", &["chain"]).ok().text();
    assert!(text.contains("vm.qcow2"), "{text}");
    // The server's directory has no certificate of a client.
    assert_ne!(ctl("server", &["chain"]).code(), 0);
    // A name that the server's certificate is not for.
    let mut command = args!["ctl", &socket, "--tls-creds", place.at("client")];
    command.extend(args!["--tls-hostname", "example.org", "chain"]);
    let refused = run_program(ISOBATH, command).exits(1);
    assert!(refused.stderr.contains("example.org"));
    let _ = ctl("client", &["quit"]).ok();
    let _ = server.wait().ok();
}

#[test]
fn qmp_is_at_a_port_with_certificates_or_if_it_is_meant() {
    let place = Place::new();
    for how in [&["--insecure"][..], &["--tls-creds", "server"]] {
        let qmp = ["--nbd", "unix:n", "--qmp", "127.0.0.1:0"];
        let _ = place.serve(&[&qmp, how].concat()).stop().ok();
    }
}

#[test]
fn tls_options_that_cannot_be_meant_are_refused() {
    let place = Place::new();
    place.refused(&["--nbd", "127.0.0.1:0,tls=required"], "--tls-creds");
    place.refused(&["--nbd", "unix:n", "--tls-creds", "server"], "no address is encrypted");
    place.refused(&["--qmp", "127.0.0.1:0,tls=optional", "--tls-creds", "server"], "first byte");
    place.refused(&["--qmp", "127.0.0.1:0,export=vm"], "is for --nbd");
    for open in [
        &["--qmp", "127.0.0.1:0"][..],
        &["--qmp", "127.0.0.1:0,tls=off", "--nbd", "127.0.0.1:0", "--tls-creds", "server"],
        &["--qmp", "127.0.0.1:0", "--tls-creds", "server", "--tls-verify-peer", "no"],
    ] {
        place.refused(open, "--insecure");
    }
    place.refused(&["--nbd", "unix:n,export=disk"], "there is no export 'disk'");
    let nbd = ["--nbd", "127.0.0.1:0"];
    let anyone = ["--tls-verify-peer", "no", "--tls-authz", "CN=x", "--tls-creds", "server"];
    place.refused(&[&nbd[..], &anyone].concat(), "--tls-authz");
    let lenient = ["--nbd", "127.0.0.1:0,tls=optional", "--tls-creds", "server"];
    for selecting in [["--tls-authz", "CN=client"], ["--tls-verify-peer", "yes"]] {
        place.refused(&[&lenient, &selecting[..]].concat(), "write tls=required");
    }
    place.refused(&[&nbd[..], &["--tls-creds", "client"]].concat(), "server-cert.pem");
    std::fs::copy(place.at("client/client-key.pem"), place.at("server/server-key.pem")).unwrap();
    place.refused(&[&nbd[..], &["--tls-creds", "server"]].concat(), "cannot be used");
}
