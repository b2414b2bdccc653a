//! Certificates for tests, in the files that QEMU reads, by openssl. They are valid for a century.

use crate::args;
use crate::{process, tools};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

const DAYS: &str = "36500";

/// An authority, which signs certificates. Its files lie in a directory of their own.
#[derive(Debug)]
pub struct Authority {
    directory: PathBuf,
}

/// An authority, and in the directories `server` and `client` what it has signed for a server on this machine and for a
/// client. The files are removed when it is dropped.
#[derive(Debug)]
pub struct Keys {
    directory: TempDir,
    /// The authority, which may sign others.
    pub authority: Authority,
}

impl Keys {
    /// Makes them in a new directory; the client's subject is written as `/C=GB/CN=client`.
    pub fn new(subject: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let authority = Authority::new(&directory.path().join("authority"));
        let keys = Self { directory, authority };
        keys.authority.server(&keys.at("server"));
        keys.authority.client(&keys.at("client"), subject);
        keys
    }

    /// Where they are. There is room for a test's own files, too.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// A name there.
    pub fn at(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }
}

#[track_caller]
fn openssl(arguments: impl IntoIterator<Item = OsString>) {
    let _ = process::run_program(tools::require("openssl"), arguments).ok();
}

/// Makes a key, and the arguments that name it and say what is asked for with it.
fn key(file: &Path) -> Vec<OsString> {
    args!["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", file]
}

impl Authority {
    /// Makes an authority in a new directory.
    pub fn new(directory: &Path) -> Self {
        fs::create_dir(directory).unwrap();
        let (own, certificate) = (directory.join("ca-key.pem"), directory.join("ca-cert.pem"));
        let mut command = args!["req", "-x509", "-days", DAYS, "-subj", "/CN=Authority"];
        command.extend(args![
            "-addext",
            "keyUsage=critical,keyCertSign,cRLSign",
            "-out",
            certificate
        ]);
        command.extend(key(&own));
        openssl(command);
        Self { directory: directory.to_owned() }
    }

    /// Credentials of a server on this machine, in a new directory.
    pub fn server(&self, directory: &Path) {
        let names = "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1";
        self.sign(directory, "server", "/CN=localhost", &["extendedKeyUsage=serverAuth", names]);
    }

    /// Credentials of a client, in a new directory. A subject is written as `/C=GB/CN=client`.
    pub fn client(&self, directory: &Path, subject: &str) {
        self.sign(directory, "client", subject, &["extendedKeyUsage=clientAuth"]);
    }

    fn sign(&self, directory: &Path, endpoint: &str, subject: &str, extensions: &[&str]) {
        fs::create_dir(directory).unwrap();
        let at = |name: &str| directory.join(name);
        let (request, extended) = (at("request.pem"), at("extensions"));
        let mut command = args!["req", "-new", "-utf8", "-subj", subject, "-out", &request];
        command.extend(key(&at(&format!("{endpoint}-key.pem"))));
        openssl(command);
        fs::write(&extended, extensions.join("\n")).unwrap();
        let certificate = at(&format!("{endpoint}-cert.pem"));
        let (own, other) = (self.directory.join("ca-cert.pem"), self.directory.join("ca-key.pem"));
        let mut command =
            args!["x509", "-req", "-days", DAYS, "-in", &request, "-out", certificate];
        command.extend(args![
            "-CA",
            &own,
            "-CAkey",
            other,
            "-CAcreateserial",
            "-extfile",
            &extended
        ]);
        openssl(command);
        fs::copy(own, at("ca-cert.pem")).unwrap();
        fs::remove_file(request).unwrap();
        fs::remove_file(extended).unwrap();
    }

    /// Writes `ca-crl.pem` to `directory`: the list of revoked certificates, with that of the client whose credentials
    /// lie in `client`.
    pub fn revoke(&self, client: &Path, directory: &Path) {
        self.list_revoked(Some(&client.join("client-cert.pem")), directory);
    }

    /// Writes `ca-crl.pem` to `directory`: a list of no certificates.
    pub fn revoke_nothing(&self, directory: &Path) {
        self.list_revoked(None, directory);
    }

    fn list_revoked(&self, revoked: Option<&Path>, directory: &Path) {
        let at = |name: &str| self.directory.join(name);
        let config = format!(
            "[ca]\ndefault_ca=own\n[own]\ndatabase={}\ndefault_md=sha256\ncertificate={}\n\
             private_key={}\ncrl_extensions=list\n[list]\nauthorityKeyIdentifier=keyid\n",
            at("database").display(),
            at("ca-cert.pem").display(),
            at("ca-key.pem").display(),
        );
        fs::write(at("config"), config).unwrap();
        fs::write(at("database"), "").unwrap();
        if let Some(certificate) = revoked {
            openssl(args!["ca", "-config", at("config"), "-revoke", certificate]);
        }
        let list = directory.join("ca-crl.pem");
        openssl(args!["ca", "-config", at("config"), "-gencrl", "-crldays", DAYS, "-out", list]);
    }
}
