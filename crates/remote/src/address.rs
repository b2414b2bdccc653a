//! Names of stores, and of chains in them: `file:///directory/name`, `s3://bucket/prefix/name`.

use crate::error::{Error, Result};
use crate::keys::is_name;
use std::fmt;
use std::path::PathBuf;

/// Where a store is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A directory.
    Directory(PathBuf),
    /// A bucket of an object store.
    Bucket {
        /// `s3`, `gs` or `az`.
        scheme: &'static str,
        /// The bucket; Azure's container.
        bucket: String,
        /// What the names of all objects begin with, without a slash at either end; may be empty.
        prefix: String,
    },
}

/// A chain in a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Where it is.
    pub place: Place,
    /// Its name there.
    pub name: String,
}

const FORMS: &str = "file:///DIRECTORY/NAME, s3://BUCKET/PREFIX/NAME, gs://... or az://...";

impl Address {
    /// The chain with this name: a store's, with a name behind it.
    ///
    /// # Errors
    /// It is none.
    pub fn parse(text: &str) -> Result<Self> {
        let parts = text.rsplit_once('/').filter(|(before, _)| !before.ends_with(":/"));
        let Some((before, name)) = parts.filter(|(before, _)| !before.ends_with(':')) else {
            return match Place::parse(text) {
                Err(error) => Err(error),
                Ok(place) => Err(Error::refused(format_args!(
                    "'{place}' names no chain: the form is {FORMS}"
                ))),
            };
        };
        // What is wrong with the store comes first: only then is it known that the text has no password.
        let place = Place::parse(if before == "file://" { "file:///" } else { before })?;
        if !is_name(name) || (before.ends_with('/') && before != "file://") {
            return Err(Error::refused(format_args!(
                "'{name}' cannot be the name of a chain: it has letters, digits, '.', '_' and '-', begins with a \
                 letter or a digit, and has at most 200 characters"
            )));
        }
        Ok(Self { place, name: name.to_owned() })
    }
}

impl Place {
    /// The store with this name.
    ///
    /// # Errors
    /// It is none.
    pub fn parse(text: &str) -> Result<Self> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Err(Error::refused(format_args!(
                "this is not the name of a store: the form is {FORMS}"
            )));
        };
        if scheme == "file" {
            return match rest {
                _ if rest.starts_with('/') && !rest.contains('\0') => {
                    Ok(Self::Directory(rest.into()))
                }
                _ => Err(Error::refused(format_args!(
                    "a directory is named by its whole path: file:///DIRECTORY"
                ))),
            };
        }
        let Some(scheme) = ["s3", "gs", "az"].into_iter().find(|known| *known == scheme) else {
            return Err(Error::refused(format_args!(
                "this kind of store is not known: the form is {FORMS}"
            )));
        };
        let authority = rest.split('/').next().unwrap_or_default();
        if authority.contains('@') {
            return Err(Error::refused(
                "a store's name has no user and no password: put credentials into the environment, such as \
                 AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            ));
        }
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let parts = std::iter::once(bucket).chain(prefix.split('/').filter(|_| !prefix.is_empty()));
        if let Some(wrong) = parts.into_iter().find(|part| !is_name(part)) {
            return Err(Error::refused(format_args!(
                "'{wrong}' cannot be a part of a store's name: each has letters, digits, '.', '_' and '-', and begins \
                 with a letter or a digit"
            )));
        }
        Ok(Self::Bucket { scheme, bucket: bucket.to_owned(), prefix: prefix.to_owned() })
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => write!(f, "file://{}", path.display()),
            Self::Bucket { scheme, bucket, prefix } if prefix.is_empty() => {
                write!(f, "{scheme}://{bucket}")
            }
            Self::Bucket { scheme, bucket, prefix } => write!(f, "{scheme}://{bucket}/{prefix}"),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.place.to_string();
        write!(f, "{}/{}", place.strip_suffix('/').unwrap_or(&place), self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_shown_as_they_are_given() {
        for text in [
            "file:///srv/store/vm",
            "s3://bucket/vm",
            "s3://b/a/b/c.1",
            "gs://b/x",
            "az://b/x",
            "file:///vm",
        ] {
            assert_eq!(Address::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(
            Address::parse("s3://b/a/vm").unwrap().place,
            Place::parse("s3://b/a/").unwrap()
        );
    }

    #[test]
    fn what_names_no_chain_is_refused() {
        let wrong = [
            "vm.qcow2",
            "/srv/vm",
            "s3://bucket",
            "s3://",
            "file://",
            "file:///",
            "file://host/dir/vm",
            "http://h/b/vm",
            "s3://b/../vm",
            "s3://b//vm",
            "s3://b/a/",
            "s3://b/.hidden",
            "file:///dir/..",
            "s3://b/a?versionId=1",
            "s3:///vm",
            "file:///dir/na me",
        ];
        for text in wrong {
            assert!(Address::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_password_is_not_repeated() {
        for text in
            ["s3://key:hunter2@bucket/vm", "gs://hunter2@b", "https://key:hunter2@example.com/b/vm"]
        {
            let shown = Address::parse(text).unwrap_err().to_string()
                + &Place::parse(text).unwrap_err().to_string();
            assert!(!shown.contains("hunter2"), "{shown}");
        }
    }
}
