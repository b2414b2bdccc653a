//! The interpretation of file names in an image's header.

use crate::description::Description;
use crate::options::Trust;
use crate::{DiskError, Result};
use isobath_storage::window::Part;
use isobath_storage::{Host, Storage, is_descriptor_set};
use std::borrow::Cow;
use std::path::Path;

/// The field whose name may be a description.
const BACKING_FILE: &str = "backing file";

/// The name that a header's backing or data file name stands for, which `host` [resolves](Host::resolve), or an error
/// if it must not be opened.
///
/// It is a [plain file name](plain_file_name), or one with a protocol that `host` itself [knows](Host::protocol_name),
/// unless the image is untrusted. An image that is no file itself, or was handed
/// in as a descriptor, has no directory: it names files by absolute paths.
pub fn name_in_header<'a, H: Host>(
    host: &H,
    image: &Path,
    field: &str,
    name: &'a str,
    trust: &Trust,
) -> Result<Cow<'a, str>> {
    if host.protocol_name(name) && !name.contains('\0') {
        if *trust == Trust::Full {
            return Ok(Cow::Borrowed(name));
        }
        return Err(DiskError::Refused {
            image: image.to_owned(),
            reason: format!(
                "its {field} is '{}': an untrusted image may name only files and block devices, not protocols",
                name.escape_debug()
            ),
        });
    }
    let plain = plain_file_name(image, field, name)?;
    let part = Part::of_name(image);
    let file = part.as_ref().map_or(image, |part| &part.file);
    let placeless = host.protocol_name(&image.to_string_lossy()) || is_descriptor_set(file);
    if placeless && !Path::new(&*plain).is_absolute() {
        return Err(DiskError::Refused {
            image: image.to_owned(),
            reason: format!(
                "its {field} is '{}': the image is in no directory, so a relative name has no meaning; rebase it to \
                 an absolute one",
                name.escape_debug()
            ),
        });
    }
    Ok(plain)
}

/// The file name that a header's backing or data file name stands for, or an error if it is not a plain file name: QEMU
/// would take `json:` and `protocol:` names as instructions to open something else, and an image must not choose that
/// for its user. A backing file may be a description of a file by its name, which QEMU takes relative to
/// the directory that the program runs in: a relative one must mean the same in the image's directory.
pub fn plain_file_name<'a>(image: &Path, field: &str, name: &'a str) -> Result<Cow<'a, str>> {
    let is_backing = field.ends_with(BACKING_FILE);
    let refuse = |why: &str| {
        Err(DiskError::Refused {
            image: image.to_owned(),
            reason: format!("its {field} is '{}': {why}", name.escape_debug()),
        })
    };
    if name.contains('\0') {
        return refuse("a file name cannot hold a NUL byte");
    }
    if let Some(described) = Description::of(name) {
        const WAY_OUT: &str = "give the image a plain file name with 'qemu-img rebase -u'";
        if !is_backing {
            return refuse("'json:' descriptions are not supported there; give a plain file name");
        }
        let described = match described {
            Ok(described) => described,
            Err(error) => {
                return refuse(&format!(
                    "this 'json:' description is not supported ({error}); {WAY_OUT}"
                ));
            }
        };
        let file = &described.file;
        // With "file:" or another protocol it would be one name to some programs and another to others.
        if file.is_empty() || file.contains('\0') || protocol_of(file).is_some() {
            return refuse(&format!("it describes no plain file name; {WAY_OUT}"));
        }
        let here = image.parent().is_none_or(|directory| directory.as_os_str().is_empty());
        if !here && !Path::new(file).is_absolute() {
            return refuse(&format!(
                "it describes a file by a relative name, whose meaning depends on the directory that the program \
                 runs in; {WAY_OUT}"
            ));
        }
        return Ok(Cow::Owned(described.file));
    }
    let plain = name.strip_prefix("file:").unwrap_or(name);
    match protocol_of(plain) {
        Some(_) => {
            let way_out = if is_backing { "rebase to './NAME'" } else { "give './NAME'" };
            refuse(&format!(
                "only files and block devices are supported, not protocols; for a file with a colon in its name, \
                 {way_out}"
            ))
        }
        None if plain.is_empty() => refuse("the name is empty"),
        None => Ok(Cow::Borrowed(plain)),
    }
}

fn protocol_of(name: &str) -> Option<&str> {
    let first = name.split('/').next()?;
    first.split_once(':').map(|(protocol, _)| protocol)
}

/// The format by name of a backing file: the one that the header gives with its name, or else the one that the name
/// itself describes.
///
/// # Errors
/// If they differ.
pub fn backing_format(image: &Path, name: &str, format: Option<&str>) -> Result<Option<String>> {
    let described = Description::of(name).and_then(|described| described.ok()?.driver);
    match (format, described) {
        (Some(format), Some(driver)) if driver != format => Err(DiskError::Refused {
            image: image.to_owned(),
            reason: format!(
                "its {BACKING_FILE} is '{}', of another format than it says with it, '{}'; name it again with \
                 'qemu-img rebase -u -F FORMAT'",
                name.escape_debug(),
                format.escape_debug()
            ),
        }),
        (Some(format), _) => Ok(Some(format.to_owned())),
        (None, described) => Ok(described),
    }
}

/// The ID of the secret of a backing file that its name gives.
pub fn backing_secret(name: &str) -> Option<String> {
    Description::of(name)?.ok()?.secret
}

/// Checks that an open backing file is a device, or is none, as its name in the header of `image` says.
///
/// # Errors
/// If it is not, in QEMU's words.
pub fn check_backing_kind<S: Storage>(image: &Path, name: &str, file: &S) -> Result<()> {
    let Some(Ok(Description { file: shown, is_device: Some(device), .. })) = Description::of(name)
    else {
        return Ok(());
    };
    if device == file.capabilities().is_device {
        return Ok(());
    }
    let (driver, kind) = if device {
        ("host_device", "either a character or block device")
    } else {
        ("file", "a regular file")
    };
    let shown = shown.escape_debug();
    Err(DiskError::Refused {
        image: image.to_owned(),
        reason: format!(
            "its {BACKING_FILE} is '{}': '{driver}' driver requires '{shown}' to be {kind}; name it again with \
             'qemu-img rebase -u'",
            name.escape_debug()
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open::referenced_file;
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

        async fn remove_file(&self, name: &Path, file: &Self::File) -> Opened<bool> {
            self.0.remove_file(name, file).await
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
            name_in_header(&host, image, "backing file", name, trust).map(Cow::into_owned)
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
        let set = Path::new("/dev/fdset/1");
        let part = Part { offset: 0, size: None, file: set.into() }.name().unwrap();
        for image in [set, &part] {
            assert!(check(image, "/base.raw", &Trust::Full).is_ok());
            for name in ["2", "base.raw", "file:2"] {
                let error = check(image, name, &Trust::Full).unwrap_err().to_string();
                assert!(error.contains("a relative name has no meaning"), "{error}");
            }
        }
        let unknowing = MemoryHost::new();
        let named = name_in_header(&unknowing, file, "backing file", "nbd:h:1", &Trust::Full);
        assert!(named.is_err());
    }

    #[test]
    fn an_untrusted_image_names_no_descriptor_that_was_handed_in() {
        let (host, image) = (MemoryHost::new(), Path::new("/a.qcow2"));
        let untrusted = Trust::Within(vec!["/".into()]);
        let name = "/dev/fdset/2";
        let of = |trust| referenced_file(&host, image, "data file", name, trust);
        let error = of(&untrusted).unwrap_err().to_string();
        assert!(error.contains("may not name a descriptor"), "{error}");
        assert_eq!(of(&Trust::Full).unwrap(), Path::new(name));
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

    #[cfg(feature = "json-names")]
    #[test]
    fn a_description_is_of_a_plain_file_name_that_means_the_same_everywhere() {
        let check = |image: &str, field, file: &str| {
            let name = format!(r#"json:{{"driver":"raw","file":{{"filename":"{file}"}}}}"#);
            plain_file_name(Path::new(image), field, &name).map(Cow::into_owned)
        };
        for image in ["a.qcow2", "dir/a.qcow2", "/a.qcow2"] {
            assert_eq!(check(image, "backing file", "/b/c:d").unwrap(), "/b/c:d");
            for file in ["nbd:h:1", "file:b", "json:{}", "", r"a\u0000b"] {
                let error = check(image, "backing file", file).unwrap_err().to_string();
                assert!(error.contains("describes no plain file name"), "{file}: {error}");
            }
        }
        assert_eq!(check("a.qcow2", "new backing file", "b").unwrap(), "b");
        for image in ["dir/a.qcow2", "./a.qcow2", "/a.qcow2"] {
            let error = check(image, "backing file", "b").unwrap_err().to_string();
            assert!(error.contains("a relative name"), "{error}");
        }
        assert!(check("a.qcow2", "data file", "/b").is_err());
    }

    #[cfg(feature = "json-names")]
    #[test]
    fn a_description_may_give_the_format_but_no_other() {
        let image = Path::new("a.qcow2");
        let name = r#"json:{"driver":"raw","file.filename":"/b"}"#;
        let of = |name, format| backing_format(image, name, format);
        assert_eq!(of(name, None).unwrap().as_deref(), Some("raw"));
        assert_eq!(of(name, Some("raw")).unwrap().as_deref(), Some("raw"));
        let error = of(name, Some("qcow2")).unwrap_err().to_string();
        assert!(error.contains("another format"), "{error}");
        assert_eq!(of("b", Some("qcow2")).unwrap().as_deref(), Some("qcow2"));
        assert_eq!(of("b", None).unwrap(), None);
    }
}
