//! The interpretation of file names in an image's header.

use crate::options::Trust;
use crate::{DiskError, Result};
use isobath_storage::Host;
use std::path::Path;

/// The name that a header's backing or data file name stands for, which `host` [resolves](Host::resolve), or an error
/// if it must not be opened.
///
/// It is a [plain file name](plain_file_name), or one with a protocol that `host` itself [knows](Host::protocol_name),
/// unless the image is untrusted. An image that is no file itself has no directory: it names files by absolute paths.
pub fn name_in_header<'a, H: Host>(
    host: &H,
    image: &Path,
    field: &str,
    name: &'a str,
    trust: &Trust,
) -> Result<&'a str> {
    if *trust == Trust::Full && host.protocol_name(name) && !name.contains('\0') {
        return Ok(name);
    }
    let plain = plain_file_name(image, field, name)?;
    if host.protocol_name(&image.to_string_lossy()) && !Path::new(plain).is_absolute() {
        return Err(DiskError::Refused {
            image: image.to_owned(),
            reason: format!(
                "its {field} is '{}': the image is no file, so a relative name has no meaning; rebase it to an \
                 absolute one",
                name.escape_debug()
            ),
        });
    }
    Ok(plain)
}

/// The file name that a header's backing or data file name stands for, or an error if it is not a plain file name: QEMU
/// would take `json:` and `protocol:` names as instructions to open something else, and an image must not choose that
/// for its user.
pub fn plain_file_name<'a>(image: &Path, field: &str, name: &'a str) -> Result<&'a str> {
    let refuse = |why: &str| {
        Err(DiskError::Refused {
            image: image.to_owned(),
            reason: format!("its {field} is '{}': {why}", name.escape_debug()),
        })
    };
    if name.contains('\0') {
        return refuse("a file name cannot hold a NUL byte");
    }
    let plain = name.strip_prefix("file:").unwrap_or(name);
    let protocol = plain.split('/').next().and_then(|first| first.split_once(':'));
    match protocol {
        Some(("json", _)) => refuse(
            "'json:' descriptions are not supported; give the image a plain file name with \
             'qemu-img rebase -u'",
        ),
        Some(_) => refuse(
            "only files and block devices are supported, not protocols; for a file with a colon in \
             its name, rebase to './NAME'",
        ),
        None if plain.is_empty() => refuse("the name is empty"),
        None => Ok(plain),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_storage::memory::MemoryHost;
    use isobath_storage::{OpenMode, Result as Opened};

    /// A host that knows names with the protocol `nbd`.
    struct Knowing(MemoryHost);

    impl Host for Knowing {
        type File = <MemoryHost as Host>::File;

        async fn open(&self, name: &Path, mode: OpenMode) -> Opened<Self::File> {
            self.0.open(name, mode).await
        }

        async fn create(&self, name: &Path, mode: OpenMode) -> Opened<Self::File> {
            self.0.create(name, mode).await
        }

        async fn remove(&self, name: &Path) -> Opened<()> {
            self.0.remove(name).await
        }

        fn protocol_name(&self, name: &str) -> bool {
            name.starts_with("nbd:")
        }
    }

    #[test]
    fn a_protocol_that_the_host_knows_is_for_trusted_images() {
        let host = Knowing(MemoryHost::new());
        let (file, export) = (Path::new("a.qcow2"), Path::new("nbd:unix:/x"));
        let check = |image: &Path, name, trust: &Trust| {
            name_in_header(&host, image, "backing file", name, trust).map(str::to_owned)
        };
        for name in ["nbd:h:1", "base.raw", "/base.raw", "file:base.raw"] {
            assert!(check(file, name, &Trust::Full).is_ok(), "{name}");
        }
        for name in ["ssh://h/x", "json:{}", "file:nbd:h:1", "nbd:h\0:1", ""] {
            assert!(check(file, name, &Trust::Full).is_err(), "{name}");
        }
        let untrusted = Trust::Within(vec!["/".into()]);
        let error = check(file, "nbd:h:1", &untrusted).unwrap_err().to_string();
        assert!(error.contains("not protocols"), "{error}");
        assert!(check(file, "base.raw", &untrusted).is_ok());
        for name in ["/base.raw", "nbd:h:1"] {
            assert!(check(export, name, &Trust::Full).is_ok(), "{name}");
        }
        let error = check(export, "base.raw", &Trust::Full).unwrap_err().to_string();
        assert!(error.contains("a relative name has no meaning"), "{error}");
        let unknowing = MemoryHost::new();
        let named = name_in_header(&unknowing, file, "backing file", "nbd:h:1", &Trust::Full);
        assert!(named.is_err());
    }

    #[test]
    fn protocols_are_refused_and_files_are_not() {
        let check = |name| plain_file_name(Path::new("a.qcow2"), "backing file", name);
        for good in ["base.qcow2", "/a/b:c", "./x:y", "file:base.raw", "dir/nbd:x"] {
            assert!(check(good).is_ok(), "{good}");
        }
        assert_eq!(check("file:base.raw").unwrap(), "base.raw");
        for bad in
            ["json:{\"driver\":\"file\"}", "nbd:localhost:1", "http://x/y", "fat:/etc", "", "a\0b"]
        {
            let error = check(bad).unwrap_err().to_string();
            assert!(error.contains("a.qcow2"), "{error}");
        }
    }
}
