//! Names of backing files that are `json:` descriptions.

#[cfg(feature = "json-names")]
mod json;

#[cfg(feature = "json-names")]
use json::Entry;

/// How descriptions are read, in a program that does.
type Reader = fn(&str) -> Result<Description, String>;

#[cfg(feature = "json-names")]
const READER: Option<Reader> = Some(parse);
#[cfg(not(feature = "json-names"))]
const READER: Option<Reader> = None;

/// A whole file, as a description names it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Description {
    /// Its name.
    pub(crate) file: String,
    /// The format of the image in it, if that is said.
    pub(crate) driver: Option<String>,
    /// Whether it is a device, if that is said.
    pub(crate) is_device: Option<bool>,
    /// The ID of the secret that unlocks the image, if that is said.
    pub(crate) secret: Option<String>,
}

impl Description {
    /// What a name describes; `None` if it is no description.
    ///
    /// # Errors
    /// If it describes anything but a whole file and its format, or this program reads no descriptions: the reason.
    pub(crate) fn of(name: &str) -> Option<Result<Self, String>> {
        Self::read(name, READER)
    }

    fn read(name: &str, reader: Option<Reader>) -> Option<Result<Self, String>> {
        let json = name.strip_prefix("json:")?;
        let without = || Err("this program was built without the feature 'json-names'".to_owned());
        Some(reader.map_or_else(without, |read| read(json)))
    }
}

#[cfg(feature = "json-names")]
fn parse(json: &str) -> Result<Description, String> {
    let object = json::object(json).map_err(|error| format!("not a JSON object: {error}"))?;
    let mut options = Vec::new();
    flatten("", object, &mut options);
    let (mut file, mut driver, mut protocol, mut secret) = (None, None, None, None);
    for (name, value) in options {
        let Entry::Text(value) = value else {
            return Err(unsupported(&name));
        };
        let place = match (name.as_str(), value.as_str()) {
            ("file.filename", _) => &mut file,
            ("driver", "qcow2" | "raw") => &mut driver,
            ("file.driver", "file" | "host_device") => &mut protocol,
            ("encrypt.key-secret", _) => &mut secret,
            _ => return Err(unsupported(&name)),
        };
        if place.replace(value).is_some() {
            return Err(format!("'{name}' is given more than once"));
        }
    }
    let is_device = protocol.map(|protocol| protocol == "host_device");
    match file {
        Some(file) => Ok(Description { file, driver, is_device, secret }),
        None => Err("'file.filename' is missing".into()),
    }
}

#[cfg(feature = "json-names")]
fn unsupported(name: &str) -> String {
    format!("'{}' is not supported there, or not this value of it", name.escape_debug())
}

/// The values of an object, those of objects within it by their names joined with dots.
#[cfg(feature = "json-names")]
fn flatten(prefix: &str, object: Vec<(String, Entry)>, out: &mut Vec<(String, Entry)>) {
    for (name, value) in object {
        let name = format!("{prefix}{name}");
        match value {
            Entry::Object(object) if !object.is_empty() => {
                flatten(&format!("{name}."), object, out);
            }
            value => out.push((name, value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_without_a_reader_says_what_it_lacks() {
        let error = Description::read(r#"json:{"file.filename":"a"}"#, None).unwrap().unwrap_err();
        assert!(error.contains("'json-names'"), "{error}");
        assert_eq!(Description::read("a", None), None);
    }

    #[cfg(feature = "json-names")]
    #[test]
    fn whole_files_are_understood_and_nothing_else() {
        let of = |name: &str| Description::of(name).unwrap();
        for (name, is_device, secret) in [
            (
                r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"/a"}}"#,
                Some(false),
                None,
            ),
            (
                r#"json:{"driver":"qcow2","file.driver":"host_device","file.filename":"/a"}"#,
                Some(true),
                None,
            ),
            (
                r#"json:{"file":{"filename":"/a"},"driver":"qcow2","encrypt":{"key-secret":"s"}}"#,
                None,
                Some("s".to_owned()),
            ),
        ] {
            let driver = Some("qcow2".into());
            let described = Description { file: "/a".into(), driver, is_device, secret };
            assert_eq!(of(name), Ok(described), "{name}");
        }
        assert_eq!(of(r#"json:{"file.filename":"a"}"#).unwrap().driver, None);
        for (name, says) in [
            ("json:", "not a JSON object"),
            ("json:[]", "not a JSON object"),
            ("json:{}", "'file.filename' is missing"),
            (r#"json:{"file":"node"}"#, "'file' is not supported"),
            (r#"json:{"file.filename":1}"#, "'file.filename' is not supported"),
            (r#"json:{"driver":"quorum","file.filename":"a"}"#, "'driver' is not supported"),
            (r#"json:{"file.driver":"nbd","file.filename":"a"}"#, "'file.driver' is not supported"),
            (r#"json:{"file.filename":"a","offset":"512"}"#, "'offset' is not supported"),
            (r#"json:{"file.filename":"a","backing":null}"#, "'backing' is not supported"),
            (r#"json:{"file.filename":"a","x":{}}"#, "'x' is not supported"),
            (r#"json:{"file.filename":"a","file":{"filename":"b"}}"#, "more than once"),
            (r#"json:{"file.filename":"a","file.filename":"a"}"#, "duplicate key"),
            (r#"json:{"file":{"filename":"a","filename":"b"}}"#, "duplicate key"),
            (r#"json:{"x":[{"y":1,"y":1}],"file.filename":"a"}"#, "'x' is not supported"),
        ] {
            let error = of(name).unwrap_err();
            assert!(error.contains(says), "{name}: {error}");
        }
        assert_eq!(Description::of("json"), None);
        assert_eq!(Description::of("./json:{}"), None);
    }
}
