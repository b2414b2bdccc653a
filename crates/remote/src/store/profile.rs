//! Profiles of Amazon's tools: the files that they share, in which a name stands for keys, a region and an endpoint.

use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// Most bytes of a file.
const MOST: u64 = 1 << 20;

/// What makes the tools get keys from elsewhere, which is not done here.
const ELSEWHERE: [&str; 6] = [
    "role_arn",
    "sso_session",
    "sso_start_url",
    "credential_process",
    "login_session",
    "web_identity_token_file",
];

/// What a profile says.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Profile {
    /// Its access key's id, the secret key, and the token of a session.
    pub(super) keys: Option<(String, String, Option<String>)>,
    pub(super) region: Option<String>,
    pub(super) endpoint: Option<String>,
    /// Its name, and why it has no keys.
    lacks: String,
}

impl Profile {
    /// The profile that the environment names, or that without a name.
    ///
    /// # Errors
    /// A file cannot be read; there is no profile of the name.
    pub(super) fn of(environment: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let place = |variable: &str, name: &str| {
            let home =
                || environment("HOME").map(|home| PathBuf::from(home).join(".aws").join(name));
            environment(variable).map(PathBuf::from).or_else(home)
        };
        let credentials = place("AWS_SHARED_CREDENTIALS_FILE", "credentials");
        let config = place("AWS_CONFIG_FILE", "config");
        let named = environment("AWS_PROFILE").map(|name| name.to_string_lossy().into_owned());
        let named = named.filter(|name| !name.is_empty());
        let name = named.as_deref().unwrap_or("default");
        let read = |path: &Option<PathBuf>| path.as_deref().map_or(Ok(String::new()), text);
        let settings = settings(name, &read(&credentials)?, &read(&config)?);
        let shown = |path: Option<PathBuf>| {
            path.map_or_else(|| "(none)".to_owned(), |path| crate::error::shown(&path))
        };
        if settings.is_none() && named.is_some() {
            return Err(Error::refused(format_args!(
                "AWS_PROFILE is '{name}', and neither '{}' nor '{}' has this profile",
                shown(credentials),
                shown(config)
            )));
        }
        let settings = settings.unwrap_or_default();
        let setting = |name: &str| settings.get(name).filter(|value| !value.is_empty()).cloned();
        let keys = setting("aws_access_key_id").zip(setting("aws_secret_access_key"));
        let keys = keys.map(|(id, secret)| (id, secret, setting("aws_session_token")));
        // The tools prefer the keys to those of a process, and everything else to the keys.
        let counts = |name: &str| keys.is_none() || name != "credential_process";
        let elsewhere = ELSEWHERE.into_iter().find(|name| setting(name).is_some() && counts(name));
        let lacks = match elsewhere {
            Some(how) => format!(
                "the profile '{name}' gets its keys by '{how}', which is not supported: export them with 'aws \
                 configure export-credentials --format env'"
            ),
            None if keys.is_none() && named.is_some() => {
                format!("the profile '{name}' has no aws_access_key_id and aws_secret_access_key")
            }
            None => String::new(),
        };
        Ok(Self { keys, region: setting("region"), endpoint: setting("endpoint_url"), lacks })
    }

    /// Its keys, where nothing else gives any.
    ///
    /// # Errors
    /// It was named, or gets keys from elsewhere, and has none.
    pub(super) fn keys(&self) -> Result<Option<&(String, String, Option<String>)>> {
        if self.lacks.is_empty() {
            Ok(self.keys.as_ref())
        } else {
            Err(Error::refused(&self.lacks))
        }
    }
}

/// A file's text; one that is not there is empty.
fn text(path: &Path) -> Result<String> {
    let failed = |error: std::io::Error| Error::local("read", path, error);
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(String::new());
        }
        Err(error) => return Err(failed(error)),
    };
    let mut text = String::new();
    file.take(MOST + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > MOST {
        return Err(Error::local("read", path, format_args!("it has more than {MOST} bytes")));
    }
    Ok(text)
}

/// What belongs to one pair of keys.
const KEYS: [&str; 3] = ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"];

/// The settings of a profile, of which the first file counts more; `None` if neither has it. Keys are of one file.
fn settings(name: &str, credentials: &str, config: &str) -> Option<BTreeMap<String, String>> {
    let in_credentials = section(credentials, |header| header == name);
    let in_config = section(config, |header| {
        let profile = header.strip_prefix("profile").filter(|rest| rest.starts_with([' ', '\t']));
        profile.is_some_and(|rest| rest.trim().trim_matches('"') == name)
            || (name == "default" && header == name)
    });
    match (in_credentials, in_config) {
        (None, None) => None,
        (first, second) => {
            let (first, mut settings) = (first.unwrap_or_default(), second.unwrap_or_default());
            if KEYS.iter().any(|key| first.contains_key(*key)) {
                settings.retain(|name, _| !KEYS.contains(&name.as_str()));
            }
            settings.extend(first);
            Some(settings)
        }
    }
}

/// The settings below the headers that are meant.
fn section(text: &str, is_meant: impl Fn(&str) -> bool) -> Option<BTreeMap<String, String>> {
    let (mut found, mut inside) = (None, false);
    for line in text.lines() {
        // What is indented belongs to the setting before, as those of services do.
        if line.starts_with([' ', '\t', '#', ';']) || line.trim().is_empty() {
            continue;
        }
        if let Some(header) = line.strip_prefix('[') {
            let header = header.split(']').next().unwrap_or_default().trim();
            inside = is_meant(header);
            if inside {
                found.get_or_insert_with(BTreeMap::new);
            }
            continue;
        }
        if let Some((name, value)) = line.split_once('=')
            && let Some(settings) = found.as_mut().filter(|_| inside)
        {
            let value = [" #", " ;"].into_iter().fold(value, |value, comment| {
                value.split_once(comment).map_or(value, |(before, _)| before)
            });
            settings.insert(name.trim().to_lowercase(), value.trim().to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const CREDENTIALS: &str = "\
        # keys\n\
        [default]\n\
        aws_access_key_id = first\n\
        aws_secret_access_key=a=b/c\n\
        \n\
        [ lab ]\n\
        aws_access_key_id=second ; a comment\n\
        aws_secret_access_key = secret#2\n\
        aws_session_token = token\n";
    const CONFIG: &str = "\
        [default]\n\
        region = eu-central-1\n\
        aws_access_key_id = another\n\
        aws_session_token = another\n\
        [profile lab]\n\
        Region = nowhere\n\
        services = here\n\
        s3 =\n  endpoint_url = https://nested.example\n\
        endpoint_url = http://127.0.0.1:7070\n\
        [profile role]\n\
        role_arn = arn:aws:iam::1:role/x\n\
        [profile both]\n\
        role_arn = arn:aws:iam::1:role/x\n\
        aws_access_key_id = third\n\
        aws_secret_access_key = secret\n\
        [profile process]\n\
        credential_process = true\n\
        aws_access_key_id = fourth\n\
        aws_secret_access_key = secret\n\
        [profile empty]\n\
        [lab2]\n\
        region = not-a-profile\n";

    fn profile(name: Option<&str>) -> Result<Profile> {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join(".aws")).unwrap();
        fs::write(directory.path().join(".aws/credentials"), CREDENTIALS).unwrap();
        fs::write(directory.path().join("other"), CONFIG).unwrap();
        Profile::of(|variable| match variable {
            "HOME" => Some(directory.path().into()),
            "AWS_CONFIG_FILE" => Some(directory.path().join("other").into()),
            "AWS_PROFILE" => name.map(Into::into),
            _ => None,
        })
    }

    fn keys(profile: &Profile) -> (&str, &str, Option<&str>) {
        let (id, secret, token) = profile.keys().ok().flatten().unwrap();
        (id, secret, token.as_deref())
    }

    #[test]
    fn a_profile_has_what_the_files_of_the_tools_say() {
        for name in [None, Some(""), Some("default")] {
            let default = profile(name).ok().unwrap();
            assert_eq!(keys(&default), ("first", "a=b/c", None));
            assert_eq!(default.region.as_deref(), Some("eu-central-1"));
            assert_eq!(default.endpoint, None);
        }
        let lab = profile(Some("lab")).ok().unwrap();
        assert_eq!(keys(&lab), ("second", "secret#2", Some("token")));
        assert_eq!(lab.region.as_deref(), Some("nowhere"));
        assert_eq!(lab.endpoint.as_deref(), Some("http://127.0.0.1:7070"));
    }

    #[test]
    fn a_profile_that_is_missing_or_has_no_keys_is_refused_and_no_secret_is_shown() {
        for name in ["none", "lab2"] {
            let message = profile(Some(name)).err().unwrap().to_string();
            assert!(message.contains(name) && message.contains("credentials"), "{message}");
        }
        assert_eq!(keys(&profile(Some("process")).ok().unwrap()), ("fourth", "secret", None));
        for (name, why) in
            [("role", "role_arn"), ("both", "role_arn"), ("empty", "aws_access_key_id")]
        {
            let message = profile(Some(name)).ok().unwrap().keys().err().unwrap().to_string();
            assert!(message.contains(name) && message.contains(why), "{message}");
        }
        // Without files, and without a name, there is nothing to say.
        let nothing = Profile::of(|_| None).ok().unwrap();
        assert!(nothing.keys().ok().unwrap().is_none() && nothing.region.is_none());
        let message =
            Profile::of(|name| (name == "AWS_PROFILE").then(|| "x".into())).err().unwrap();
        assert!(message.to_string().contains("'x'"), "{message}");
    }
}
