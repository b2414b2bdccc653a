//! Secrets, as described by QEMU's `secret` objects.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use isobath_disk::encryption::{MAX_SECRET, Secret};
use std::fs::File;
use std::io::Read;
use zeroize::Zeroizing;

/// Where a secret's value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The contents of a file, which may be a descriptor (`/dev/fd/N`).
    File(String),
    /// The value itself.
    Data(Zeroizing<String>),
}

/// A secret object's properties.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// The object's ID.
    pub id: String,
    /// Where its value comes from.
    pub source: Source,
    /// Whether the value is base64-encoded.
    pub base64: bool,
}

impl Description {
    /// A description from pairs of property names and values.
    ///
    /// # Errors
    /// If a property is missing, unknown or not supported, in QEMU's wording.
    pub fn of<'a>(pairs: impl Iterator<Item = (&'a str, &'a str)>) -> Result<Self, String> {
        let (mut id, mut file, mut data, mut base64) = (None, None, None, false);
        for (name, value) in pairs {
            match name {
                "id" => id = Some(value.to_owned()),
                "file" => file = Some(value.to_owned()),
                "data" => data = Some(Zeroizing::new(value.to_owned())),
                "format" => {
                    base64 = match value {
                        "raw" => false,
                        "base64" => true,
                        _ => {
                            return Err(format!(
                                "Parameter 'format' does not accept value '{value}'"
                            ));
                        }
                    }
                }
                "keyid" | "iv" => {
                    return Err(format!(
                        "'{name}' is not supported; a secret cannot be encrypted with another one"
                    ));
                }
                _ => return Err(format!("Parameter '{name}' is unexpected")),
            }
        }
        let id = id.ok_or("Parameter 'id' is missing")?;
        let source = match (file, data) {
            (Some(_), Some(_)) => return Err("'file' and 'data' are mutually exclusive".into()),
            (Some(file), None) => Source::File(file),
            (None, Some(data)) => Source::Data(data),
            (None, None) => return Err("Either 'file' or 'data' must be provided".into()),
        };
        Ok(Self { id, source, base64 })
    }

    /// Loads the value. Reading a file may take a long time.
    ///
    /// # Errors
    /// If the file cannot be read, or the value is not base64 or too long.
    pub fn load(&self) -> Result<Secret, String> {
        let bytes = match &self.source {
            Source::File(name) => read(name)?,
            Source::Data(text) => Zeroizing::new(text.as_bytes().to_vec()),
        };
        let bytes = if self.base64 {
            // Like QEMU, ignore whitespace between the digits.
            let digits: Zeroizing<Vec<u8>> = Zeroizing::new(
                bytes.iter().copied().filter(|b| !b.is_ascii_whitespace()).collect(),
            );
            let decoded = STANDARD.decode(&*digits);
            Zeroizing::new(decoded.map_err(|_| "the secret is not valid base64".to_owned())?)
        } else {
            bytes
        };
        Secret::new(bytes.to_vec()).map_err(|error| error.to_string())
    }
}

/// A file's contents, truncated if they are too long for a secret.
fn read(name: &str) -> Result<Zeroizing<Vec<u8>>, String> {
    // Base64 is longer than the secret.
    let most = 2 * MAX_SECRET;
    let failed = |error: std::io::Error| {
        format!("Unable to read {name}: {}", isobath_storage::cause(&error))
    };
    // Reserve enough: growing would leave copies in memory.
    let mut bytes = Zeroizing::new(Vec::with_capacity(most + 1));
    let file = File::open(name).map_err(failed)?;
    file.take(most as u64 + 1).read_to_end(&mut bytes).map_err(failed)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn describe(text: &str) -> Result<Description, String> {
        Description::of(text.split(',').filter_map(|pair| pair.split_once('=')))
    }

    #[test]
    fn properties_are_checked() {
        for (text, reason) in [
            ("file=a", "'id' is missing"),
            ("id=a", "must be provided"),
            ("id=a,file=b,data=c", "mutually exclusive"),
            ("id=a,file=b,format=hex", "does not accept value 'hex'"),
            ("id=a,file=b,keyid=c", "'keyid' is not supported"),
            ("id=a,file=b,x=c", "'x' is unexpected"),
        ] {
            let error = describe(text).unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn values_have_a_form_and_a_limit() {
        let value = |text| describe(text).unwrap().load();
        assert!(value("id=a,data=YWJj,format=base64").is_ok());
        assert!(value("id=a,data=%%,format=base64").unwrap_err().contains("base64"));
        assert!(value("id=a,file=/nonexistent").unwrap_err().contains("No such file"));
        assert!(value("id=a,file=/dev/zero").unwrap_err().contains("longer than 64 KiB"));
        assert!(value("id=a,file=/dev/null").is_ok());
    }
}
