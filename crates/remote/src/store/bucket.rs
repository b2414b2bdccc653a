//! A bucket of an object store: S3, and Google's and Microsoft's.
//!
//! The client runs in a runtime of its own. It repeats nothing by itself: here every attempt has a time limit, all of
//! them together another, and what is repeated is safe to repeat. The limit of an attempt is for the store's silence:
//! while data arrives it begins anew, and a request that sends data has more, at the slowest rate that is borne. An
//! object's name is the digest of what it holds, so that a put whose outcome is unknown may be repeated; a conditional
//! put is settled by reading the object.

use super::answers::{Connector, InPieces};
use super::hedge::Hedge;
use super::profile::Profile;
use super::{Entry, Found, Limits, Outcome, Parts, Store, Version};
use crate::error::{Error, Result};
use crate::progress::Progress;
use futures_util::TryStreamExt;
use futures_util::future::{Either, select};
use isobath_qcow2::text::Shown;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::multipart::{MultipartStore, PartId};
use object_store::path::Path;
use object_store::{
    ClientConfigKey, ClientOptions, Extensions, GetOptions, GetRange, GetResult, ObjectStore,
    ObjectStoreExt, PutMode, PutOptions, PutPayload, RetryConfig, UpdateVersion,
};
use reqwest::header::HeaderValue;
use reqwest::{Certificate, ClientBuilder, Url};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::fs::File;
use std::future::Future;
use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use tokio::runtime::Runtime;
use tokio::time::{Instant, sleep, timeout};

type Failed = object_store::Error;

/// Least bytes of a part, and most parts.
const PART: u64 = 8 << 20;
const MOST_PARTS: u64 = 9_000;

/// The longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The slowest rate in bytes a second at which a request's data is sent.
const SLOWEST: u64 = 16 << 10;

/// The slowest rate in bytes a second at which a store joins the parts of an object: some copy them.
const JOINED: u64 = 4 << 20;

/// Least bytes a second of what a store answers, and the bytes that an object of a list counts for.
const LEAST: u64 = 1 << 10;
const ENTRY: u64 = 256;

/// Most bytes of a list in memory, which are those of some millions of objects.
const MOST_OF_LIST: usize = 512 << 20;

/// How often it is looked whether an operation was cancelled.
const LOOK: Duration = Duration::from_millis(50);

trait Client: ObjectStore + MultipartStore {}
impl<T: ObjectStore + MultipartStore> Client for T {}

/// A bucket.
pub struct Bucket {
    client: Arc<dyn Client>,
    /// What all names begin with, with a slash at the end; may be empty.
    prefix: String,
    limits: Limits,
    progress: Arc<Progress>,
    hedge: Hedge,
    runtime: Runtime,
}

impl Bucket {
    /// A bucket, with the credentials and the endpoint that the environment names.
    ///
    /// # Errors
    /// The environment names none, or wrong ones.
    pub fn open(
        scheme: &str,
        bucket: &str,
        prefix: &str,
        limits: Limits,
        progress: &Arc<Progress>,
    ) -> Result<Self> {
        let wrong = |error: Failed| {
            Error::refused(format_args!("cannot use {scheme}://{bucket}: {}", short(&error)))
        };
        let (options, connect) = client_options(limits);
        let retry = retry_config(limits);
        let connector = || Connector { begin: ClientBuilder::new, connect };
        Self::new(prefix, limits, progress, || match scheme {
            "s3" => {
                let builder = described(std::env::vars_os())?;
                let begin = trusting(|name| std::env::var_os(name))?;
                s3(builder.with_bucket_name(bucket), begin, limits)?.map_err(wrong)
            }
            "gs" => {
                let builder = GoogleCloudStorageBuilder::from_env().with_bucket_name(bucket);
                let builder = builder.with_client_options(options).with_retry(retry);
                let builder = builder.with_http_connector(connector());
                Ok(Arc::new(builder.build().map_err(wrong)?) as Arc<dyn Client>)
            }
            _ => {
                let builder = MicrosoftAzureBuilder::from_env().with_container_name(bucket);
                let builder = builder.with_client_options(options).with_retry(retry);
                let builder = builder.with_http_connector(connector());
                Ok(Arc::new(builder.build().map_err(wrong)?) as Arc<dyn Client>)
            }
        })
    }

    /// A bucket of S3 that is not described by the environment alone, with clients that begin as the function says.
    ///
    /// # Errors
    /// The description is wrong.
    pub fn of_s3(
        builder: AmazonS3Builder,
        begin: impl Fn() -> ClientBuilder + Send + Sync + 'static,
        prefix: &str,
        limits: Limits,
        progress: &Arc<Progress>,
    ) -> Result<Self> {
        let wrong = |error: Failed| {
            Error::refused(format_args!("cannot use the bucket: {}", short(&error)))
        };
        Self::new(prefix, limits, progress, || s3(builder, begin, limits)?.map_err(wrong))
    }

    fn new(
        prefix: &str,
        limits: Limits,
        progress: &Arc<Progress>,
        client: impl FnOnce() -> Result<Arc<dyn Client>>,
    ) -> Result<Self> {
        // Another part of the process may have chosen one.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(2).thread_name("remote").enable_all().build();
        let runtime =
            runtime.map_err(|error| Error::Local(format!("cannot start threads: {error}")))?;
        let client = {
            let _inside = runtime.enter();
            client()?
        };
        let prefix = if prefix.is_empty() { String::new() } else { format!("{prefix}/") };
        let (progress, hedge) = (Arc::clone(progress), Hedge::default());
        Ok(Self { client, prefix, limits, progress, hedge, runtime })
    }

    fn path(&self, key: &str) -> Path {
        Path::from(format!("{}{key}", self.prefix))
    }

    /// Runs an operation without data until it succeeds, its failure is final, or the time is over.
    fn run<T, F: Future<Output = std::result::Result<T, Failed>>>(
        &self,
        what: &str,
        key: &str,
        cancellable: bool,
        operation: impl Fn() -> F,
    ) -> Result<std::result::Result<T, Failed>> {
        self.repeat(what, key, cancellable, Duration::ZERO, |silence| within(silence, operation()))
    }

    /// Runs an operation until it succeeds, its failure is final, or the time is over, `more` than the usual one. The
    /// operation is told how long it may take without progress. An interruption ends one that is `cancellable`, and
    /// hurries another.
    fn repeat<T, F: Future<Output = std::result::Result<T, Failed>>>(
        &self,
        what: &str,
        key: &str,
        cancellable: bool,
        more: Duration,
        operation: impl Fn(Duration) -> F,
    ) -> Result<std::result::Result<T, Failed>> {
        let overall = self.limits.overall + more;
        let work = async {
            let end = Instant::now() + overall;
            let mut pause = self.limits.pause;
            loop {
                let left = end.saturating_duration_since(Instant::now());
                let cause = match operation((self.limits.attempt + more).min(left)).await {
                    Ok(done) => return Ok(Ok(done)),
                    Err(error) if is_final(&error) => return Ok(Err(error)),
                    Err(error) => short(&error),
                };
                if Instant::now() + pause >= end {
                    let limit = overall;
                    return Err(Error::store(
                        what,
                        key,
                        format_args!("{cause} (given up after {limit:?})"),
                    ));
                }
                sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        };
        let then = if cancellable { Duration::ZERO } else { self.limits.hurried };
        match self.runtime.block_on(self.cut_short(then, work)) {
            Some(done) => done,
            None if cancellable => Err(Error::Interrupted),
            None => {
                let cause = format_args!("no success within {then:?} of an interruption");
                Err(Error::store(what, key, cause))
            }
        }
    }

    /// Waits for `work`, after an interruption no longer than this; `None` if it has not ended then.
    async fn cut_short<T>(&self, then: Duration, work: impl Future<Output = T>) -> Option<T> {
        let over = async {
            while !self.progress.is_cancelled() {
                sleep(LOOK).await;
            }
            sleep(then).await;
        };
        tokio::pin!(work, over);
        match select(work, over).await {
            Either::Left((done, _)) => Some(done),
            Either::Right(_) => None,
        }
    }

    /// The beginning of a store's answer to a read of this range, or of all of an object.
    async fn asked(
        &self,
        path: &Path,
        range: Option<&GetRange>,
    ) -> std::result::Result<GetResult, Failed> {
        let ask = || {
            let (range, extensions) = (range.cloned(), in_pieces());
            let options = GetOptions { range, extensions, ..GetOptions::default() };
            self.client.get_opts(path, options)
        };
        let late = if self.limits.hedged { self.hedge.late() } else { None };
        let begin = Instant::now();
        let mut first = ask();
        let answered = match late {
            None => first.await,
            Some(late) => match timeout(late, &mut first).await {
                Ok(answered) => answered,
                Err(_) if self.hedge.may_ask_again() => either(first, ask()).await,
                Err(_) => first.await,
            },
        };
        if answered.is_ok() {
            self.hedge.began(begin.elapsed());
        }
        answered
    }

    fn pace(&self) -> Pace {
        Pace::new(self.limits.attempt, Instant::now())
    }

    /// What a store answers, piece by piece: each must come within the limit, not too slowly, and they are at most so
    /// many bytes.
    async fn received(
        &self,
        silence: Duration,
        most: u64,
        found: GetResult,
    ) -> std::result::Result<Vec<u8>, Failed> {
        let (mut bytes, mut pace) = (Vec::new(), self.pace());
        let mut pieces = found.into_stream();
        while let Some(piece) = within(silence, pieces.try_next()).await? {
            if (bytes.len() + piece.len()) as u64 > most {
                let source = "it answered with too many bytes".into();
                return Err(Failed::Generic { store: "store", source });
            }
            bytes.extend_from_slice(&piece);
            pace.add(piece.len() as u64, Instant::now())?;
        }
        Ok(bytes)
    }

    /// All of an object, of at most `most` bytes.
    fn whole(&self, key: &str, most: u64, cancellable: bool) -> Result<Option<(Vec<u8>, Version)>> {
        let path = self.path(key);
        let path = &path;
        let read = |silence| async move {
            let found = within(silence, self.asked(path, None)).await?;
            let meta = found.meta.clone();
            if meta.size > most {
                return Ok(None);
            }
            let bytes = self.received(silence, most, found).await?;
            Ok(Some((bytes, Version { tag: meta.e_tag, number: meta.version })))
        };
        match self.repeat("read", key, cancellable, Duration::ZERO, read)? {
            Ok(Some(read)) => Ok(Some(read)),
            Ok(None) => Err(Error::damaged(format_args!(
                "'{key}' has more than the {most} bytes that it may have"
            ))),
            Err(Failed::NotFound { .. }) => Ok(None),
            Err(error) => Err(Error::store("read", key, short(&error))),
        }
    }

    /// The same, where a failure that is final is an error.
    fn done<T, F: Future<Output = std::result::Result<T, Failed>>>(
        &self,
        what: &str,
        key: &str,
        operation: impl Fn() -> F,
    ) -> Result<T> {
        self.run(what, key, true, operation)?
            .map_err(|error| Error::store(what, key, short(&error)))
    }
}

/// What marks a request whose answer is received by [`Bucket::received`].
fn in_pieces() -> Extensions {
    let mut extensions = Extensions::new();
    extensions.insert(InPieces);
    extensions
}

/// The time that so many bytes may take besides.
fn sending(bytes: u64) -> Duration {
    Duration::from_secs(bytes / SLOWEST)
}

/// The time that a store may take besides to join parts of so many bytes in all.
fn joining(bytes: u64) -> Duration {
    Duration::from_secs(bytes / JOINED)
}

/// What comes first of two answers to the same question. A failure of the second is none: one machine of a store may
/// refuse what another is about to answer. One of the first that may be over by now leaves the second.
async fn either<T>(
    first: impl Future<Output = std::result::Result<T, Failed>>,
    second: impl Future<Output = std::result::Result<T, Failed>>,
) -> std::result::Result<T, Failed> {
    tokio::pin!(first, second);
    match select(first, second).await {
        Either::Left((Err(error), second)) if !is_final(&error) => second.await,
        Either::Right((Err(_), first)) => first.await,
        Either::Left((answer, _)) | Either::Right((answer, _)) => answer,
    }
}

/// The result of an operation, which is a failure that may be repeated if it takes longer.
async fn within<T>(
    limit: Duration,
    operation: impl Future<Output = std::result::Result<T, Failed>>,
) -> std::result::Result<T, Failed> {
    timeout(limit, operation).await.unwrap_or_else(|_| {
        Err(Failed::Generic {
            store: "store",
            source: format!("no answer within {limit:?}").into(),
        })
    })
}

/// Whether what a store answers arrives fast enough: in each interval there must be as much as the least rate gives.
/// A store that is silent for no long time could else keep its user busy for ever.
struct Pace {
    interval: Duration,
    since: Instant,
    bytes: u64,
}

impl Pace {
    fn new(interval: Duration, now: Instant) -> Self {
        Self { interval, since: now, bytes: 0 }
    }

    /// Counts these bytes, which arrived now.
    fn add(&mut self, bytes: u64, now: Instant) -> std::result::Result<(), Failed> {
        self.bytes = self.bytes.saturating_add(bytes);
        if now.saturating_duration_since(self.since) < self.interval {
            return Ok(());
        }
        let interval = self.interval;
        if u128::from(self.bytes) * 1000 < u128::from(LEAST) * interval.as_millis() {
            let source =
                format!("only {} bytes of the answer within {interval:?}", self.bytes).into();
            return Err(Failed::Generic { store: "store", source });
        }
        (self.since, self.bytes) = (now, 0);
        Ok(())
    }
}

/// What the environment does not give is taken from the profile of Amazon's tools, which is read only then. Keys, and
/// the token that belongs to them, are never put together from both. A variable that is empty counts as missing.
fn described(
    environment: impl IntoIterator<Item = (OsString, OsString)>,
) -> Result<AmazonS3Builder> {
    let environment = environment.into_iter().filter(|(_, value)| !value.is_empty());
    let environment: BTreeMap<OsString, OsString> = environment.collect();
    let (mut builder, mut token) = (AmazonS3Builder::new(), None);
    for (name, value) in &environment {
        if let (Some(name), Some(value)) = (name.to_str(), value.to_str())
            && name.starts_with("AWS_")
            && let Ok(key) = name.to_ascii_lowercase().parse::<AmazonS3ConfigKey>()
        {
            if key == AmazonS3ConfigKey::Token {
                token = Some(value);
            } else {
                builder = builder.with_config(key, value);
            }
        }
    }
    let lacks = |builder: &AmazonS3Builder, key| builder.get_config_value(&key).is_none();
    let keys = [AmazonS3ConfigKey::AccessKeyId, AmazonS3ConfigKey::SecretAccessKey];
    let has_keys = keys.into_iter().any(|key| !lacks(&builder, key));
    if let Some(token) = token.filter(|_| has_keys) {
        builder = builder.with_token(token);
    }
    let unsigned = builder.get_config_value(&AmazonS3ConfigKey::SkipSignature);
    let needs_keys = !has_keys
        && !environment.contains_key(OsStr::new("AWS_WEB_IDENTITY_TOKEN_FILE"))
        && unsigned.is_none_or(|skip| skip != "true");
    let needs_endpoint = lacks(&builder, AmazonS3ConfigKey::Endpoint)
        && lacks(&builder, AmazonS3ConfigKey::S3Endpoint);
    if !needs_keys && !needs_endpoint && !lacks(&builder, AmazonS3ConfigKey::Region) {
        return Ok(builder);
    }
    let profile = Profile::of(|name| environment.get(OsStr::new(name)).cloned())?;
    if needs_keys && let Some((id, secret, token)) = profile.keys()? {
        builder = builder.with_access_key_id(id).with_secret_access_key(secret);
        if let Some(token) = token {
            builder = builder.with_token(token);
        }
    }
    if let Some(region) = profile.region.filter(|_| lacks(&builder, AmazonS3ConfigKey::Region)) {
        builder = builder.with_region(region);
    }
    let endpoint = profile.endpoint.filter(|_| needs_endpoint);
    Ok(match endpoint {
        Some(endpoint) => builder.with_endpoint(endpoint),
        None => builder,
    })
}

/// How a client begins that trusts the certificates of `AWS_CA_BUNDLE`, if it names a file, and no others.
fn trusting(
    environment: impl Fn(&str) -> Option<OsString>,
) -> Result<impl Fn() -> ClientBuilder + Send + Sync + 'static> {
    let certificates = bundle(environment)?;
    Ok(move || match &certificates {
        Some(certificates) => ClientBuilder::new().tls_certs_only(certificates.clone()),
        None => ClientBuilder::new(),
    })
}

/// The certificates of `AWS_CA_BUNDLE`, if it names a file.
fn bundle(environment: impl Fn(&str) -> Option<OsString>) -> Result<Option<Vec<Certificate>>> {
    const MOST: u64 = 16 << 20;
    let Some(path) = environment("AWS_CA_BUNDLE").filter(|path| !path.is_empty()) else {
        return Ok(None);
    };
    let path = std::path::PathBuf::from(path);
    let failed = |cause: &dyn Display| Error::local("read AWS_CA_BUNDLE", &path, cause);
    let file = File::open(&path).map_err(|error| failed(&error))?;
    let mut bytes = Vec::new();
    file.take(MOST).read_to_end(&mut bytes).map_err(|error| failed(&error))?;
    let certificates =
        Certificate::from_pem_bundle(&bytes).map_err(|error| failed(&short(&error)))?;
    if certificates.is_empty() {
        return Err(failed(&"it has no certificate in the PEM format"));
    }
    Ok(Some(certificates))
}

/// A client of S3. What would make it panic, or show up in its messages, is refused before.
fn s3(
    builder: AmazonS3Builder,
    begin: impl Fn() -> ClientBuilder + Send + Sync + 'static,
    limits: Limits,
) -> Result<std::result::Result<Arc<dyn Client>, Failed>> {
    let mut builder = builder;
    for (name, key) in [
        ("AWS_ENDPOINT_URL", AmazonS3ConfigKey::Endpoint),
        ("AWS_ENDPOINT_URL_S3", AmazonS3ConfigKey::S3Endpoint),
        ("AWS_ENDPOINT_URL_STS", AmazonS3ConfigKey::StsEndpoint),
        ("AWS_METADATA_ENDPOINT", AmazonS3ConfigKey::MetadataEndpoint),
    ] {
        if let Some(given) = builder.get_config_value(&key) {
            builder = builder.with_config(key, endpoint(name, &given)?);
        }
    }
    for (name, key) in [
        ("AWS_ACCESS_KEY_ID", AmazonS3ConfigKey::AccessKeyId),
        ("AWS_SECRET_ACCESS_KEY", AmazonS3ConfigKey::SecretAccessKey),
        ("AWS_SESSION_TOKEN", AmazonS3ConfigKey::Token),
    ] {
        if let Some(given) = builder.get_config_value(&key)
            && HeaderValue::from_str(&given).is_err()
        {
            return Err(Error::refused(format_args!(
                "{name} (of the environment or a profile) has a character that cannot be sent, such as a newline"
            )));
        }
    }
    if let Some(region) = builder.get_config_value(&AmazonS3ConfigKey::Region) {
        let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if region.is_empty() || !region.bytes().all(is_part) {
            return Err(Error::refused(format_args!(
                "the region '{}' (AWS_REGION or a profile) is not one: it has letters, digits, '-', '_' and '.'",
                Shown(&region)
            )));
        }
    }
    // The options take the place of those that the environment gave.
    let allow = builder.get_config_value(&AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp));
    let (options, connect) = client_options(limits);
    let options = options.with_allow_http(allow.is_some_and(|allow| allow == "true"));
    let builder = builder.with_client_options(options).with_retry(retry_config(limits));
    let built = builder.with_http_connector(Connector { begin, connect }).build();
    Ok(built.map(|client| Arc::new(client) as Arc<dyn Client>))
}

/// The address of a server, as the client wants it. One that may have a password in it is not shown.
fn endpoint(setting: &str, given: &str) -> Result<String> {
    let wrong = |why: &dyn Display| {
        let shown = if given.contains('@') { "..." } else { given };
        Error::refused(format_args!(
            "{setting} '{}' (of the environment, or endpoint_url of a profile): {why}; it is as \
             'https://objects.example.com:9000'",
            Shown(shown)
        ))
    };
    let url = Url::parse(given).map_err(|error| wrong(&error))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(wrong(&"it does not begin with 'https://' or 'http://'"));
    }
    if !url.username().is_empty() || url.password().is_some() || given.contains('@') {
        return Err(wrong(
            &"it has a name or a password, which belong into AWS_ACCESS_KEY_ID and \
                           AWS_SECRET_ACCESS_KEY",
        ));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(wrong(&"it has a query or a fragment"));
    }
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:[]".contains(&byte);
    if !url.host_str().is_some_and(|host| host.bytes().all(is_part)) {
        return Err(wrong(&"its host is not a name or an address"));
    }
    Ok(url.as_str().trim_end_matches('/').to_owned())
}

/// The options of a client, and how long a connection may take to be made.
fn client_options(limits: Limits) -> (ClientOptions, Duration) {
    // How long a request may take depends on what it sends and receives.
    let options = ClientOptions::default().with_timeout_disabled();
    (options, limits.attempt.min(Duration::from_secs(10)))
}

/// The client repeats nothing.
fn retry_config(limits: Limits) -> RetryConfig {
    RetryConfig { max_retries: 0, retry_timeout: limits.attempt, ..RetryConfig::default() }
}

/// Whether repeating the request gives the same. The client does not say which status it got, except in words; if they
/// are not found, the request is repeated.
fn is_final(error: &Failed) -> bool {
    match error {
        Failed::Generic { .. } => match status(error) {
            None => error.to_string().contains("redirect"),
            Some(408 | 425 | 429) => false,
            Some(501) => true,
            Some(status) => (300..500).contains(&status),
        },
        _ => true,
    }
}

fn status(error: &Failed) -> Option<u32> {
    let text = error.to_string();
    let (_, rest) = text.split_once("status code: ")?;
    rest.get(..3)?.parse().ok()
}

/// The message of an error, without the pages that some servers answer.
fn short(error: &impl Display) -> String {
    const MOST: usize = 300;
    let text = error.to_string();
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text,
    }
}

impl Store for Bucket {
    fn head(&self, key: &str) -> Result<Option<Found>> {
        let path = self.path(key);
        match self.run("look at", key, true, || self.client.head(&path))? {
            Ok(found) => {
                Ok(Some(Found { length: found.size, modified: found.last_modified.into() }))
            }
            Err(Failed::NotFound { .. }) => Ok(None),
            Err(error) => Err(Error::store("look at", key, short(&error))),
        }
    }

    fn get(&self, key: &str, most: u64) -> Result<Option<(Vec<u8>, Version)>> {
        self.whole(key, most, true)
    }

    fn read(&self, key: &str, offset: u64, length: usize) -> Result<Vec<u8>> {
        let path = self.path(key);
        let path = &path;
        let end = offset + length as u64;
        let range = &GetRange::Bounded(offset..end);
        let read = |silence| async move {
            let found = within(silence, self.asked(path, Some(range))).await?;
            if found.meta.size < end {
                return Ok(None);
            }
            let bytes = self.received(silence, length as u64, found).await?;
            if bytes.len() == length {
                Ok(Some(bytes))
            } else {
                Err(Failed::Generic {
                    store: "store",
                    source: "it answered with too few bytes".into(),
                })
            }
        };
        match self.repeat("read", key, true, Duration::ZERO, read)? {
            Ok(Some(bytes)) => Ok(bytes),
            Ok(None) => Err(Error::ends(key, end)),
            Err(Failed::NotFound { .. }) => Err(Error::missing(key)),
            Err(error) if status(&error) == Some(416) => Err(Error::ends(key, end)),
            Err(error) => Err(Error::store("read", key, short(&error))),
        }
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        let (path, payload) =
            (self.path(key), PutPayload::from(bytes::Bytes::copy_from_slice(bytes)));
        let put = |limit| within(limit, self.client.put(&path, payload.clone()));
        let put = self.repeat("write", key, true, sending(bytes.len() as u64), put)?;
        put.map(drop).map_err(|error| Error::store("write", key, short(&error)))
    }

    fn put_if(&self, key: &str, bytes: &[u8], was: Option<&Version>) -> Result<Outcome> {
        let (path, payload) =
            (self.path(key), PutPayload::from(bytes::Bytes::copy_from_slice(bytes)));
        let mode = match was {
            None => PutMode::Create,
            Some(was) => PutMode::Update(UpdateVersion {
                e_tag: was.tag.clone(),
                version: was.number.clone(),
            }),
        };
        let more = sending(bytes.len() as u64);
        let end = std::time::Instant::now() + self.limits.overall + more;
        let mut pause = self.limits.pause;
        let unknown = || format!("it is unknown whether '{key}' was written");
        let told = |error: Error, given_up: bool| {
            if given_up { Error::Unknown(format!("{error}; {}", unknown())) } else { error }
        };
        // A request that was given up may still be on its way.
        let mut given_up = false;
        loop {
            if self.progress.is_cancelled() {
                return Err(if given_up {
                    Error::Unsettled(unknown())
                } else {
                    Error::Interrupted
                });
            }
            // One attempt: whether it may be repeated is seen by reading the object.
            let attempt = self.runtime.block_on(async {
                let options = PutOptions { mode: mode.clone(), ..PutOptions::default() };
                let put = self.client.put_opts(&path, payload.clone(), options);
                let put = timeout(self.limits.attempt + more, put);
                self.cut_short(self.limits.hurried, put).await
            });
            let failed = match attempt {
                Some(Ok(Ok(_))) => return Ok(Outcome::Done),
                Some(Ok(Err(Failed::NotImplemented { .. } | Failed::NotSupported { .. }))) => {
                    return Ok(Outcome::Unsupported);
                }
                Some(Ok(Err(error))) if status(&error) == Some(501) => {
                    return Ok(Outcome::Unsupported);
                }
                Some(Ok(Err(error))) => Some(error),
                Some(Err(_)) | None => None,
            };
            // Whoever answers with 500 or more, such as a proxy, need not know what became of it.
            given_up |= failed
                .as_ref()
                .is_none_or(|error| status(error).is_none_or(|status| status >= 500));
            let refused =
                matches!(&failed, Some(Failed::AlreadyExists { .. } | Failed::Precondition { .. }));
            let is_over = failed.as_ref().is_some_and(|error| !refused && is_final(error));
            let cause = || failed.as_ref().map_or_else(|| "no answer".to_owned(), short);
            if is_over && !given_up {
                return Err(Error::store("write", key, cause()));
            }
            match self.whole(key, bytes.len() as u64, false) {
                Ok(Some((now, _))) if now == bytes => return Ok(Outcome::Done),
                Ok(now) if now.as_ref().map(|(_, version)| version) != was => {
                    return Ok(Outcome::Changed);
                }
                // It is longer than what was to be written.
                Err(Error::Damaged(_)) if refused || was.is_none() => return Ok(Outcome::Changed),
                Ok(_) | Err(Error::Damaged(_)) => {}
                Err(_) if self.progress.is_cancelled() => return Err(Error::Unsettled(unknown())),
                Err(error) => return Err(told(error, given_up)),
            }
            if is_over || std::time::Instant::now() + pause >= end {
                return Err(told(Error::store("write", key, cause()), given_up));
            }
            self.runtime.block_on(async { self.cut_short(Duration::ZERO, sleep(pause)).await });
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    fn begin<'a>(&'a self, key: &str, length: u64) -> Result<Box<dyn Parts + 'a>> {
        let path = self.path(key);
        let id = self.done("begin", key, || self.client.create_multipart(&path))?;
        let size = PART.max(length.div_ceil(MOST_PARTS).next_multiple_of(PART));
        Ok(Box::new(Upload {
            bucket: self,
            key: key.to_owned(),
            path,
            id,
            size,
            length,
            parts: Mutex::default(),
        }))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        let path = self.path(prefix);
        let path = &path;
        let list = |silence| async move {
            let (mut found, mut listed) = (Vec::new(), self.client.list(Some(path)));
            let (mut pace, mut size) = (self.pace(), 0_usize);
            // A large store has many pages.
            while let Some(entry) = within(silence, listed.try_next()).await? {
                pace.add(ENTRY, Instant::now())?;
                let name = entry.location.as_ref();
                size = size.saturating_add(size_of::<Entry>() + name.len());
                if size > MOST_OF_LIST {
                    return Ok(None);
                }
                if let Some(key) = name.strip_prefix(&self.prefix) {
                    let (length, modified) = (entry.size, entry.last_modified.into());
                    found.push(Entry { key: key.to_owned(), found: Found { length, modified } });
                }
            }
            Ok(Some(found))
        };
        let found = self.repeat("list", prefix, true, Duration::ZERO, list)?;
        let found = found.map_err(|error| Error::store("list", prefix, short(&error)))?;
        found.ok_or_else(|| {
            Error::damaged(format_args!(
                "the names of the objects '{prefix}...' in the store have more than {MOST_OF_LIST} bytes"
            ))
        })
    }

    fn delete(&self, key: &str) -> Result<()> {
        let path = self.path(key);
        // Whoever was cancelled still removes what it has noted.
        match self.run("remove", key, false, || self.client.delete(&path))? {
            Ok(()) | Err(Failed::NotFound { .. }) => Ok(()),
            Err(error) => Err(Error::store("remove", key, short(&error))),
        }
    }

    fn sweep(&self, _before: SystemTime) -> Result<u64> {
        // Parts of uploads that were not finished are seen by nobody; a rule of the bucket removes them.
        Ok(0)
    }
}

/// An object whose parts are sent.
struct Upload<'b> {
    bucket: &'b Bucket,
    key: String,
    path: Path,
    id: String,
    size: u64,
    length: u64,
    parts: Mutex<BTreeMap<u64, PartId>>,
}

impl Parts for Upload<'_> {
    fn size(&self) -> u64 {
        self.size
    }

    fn put(&self, number: u64, bytes: Vec<u8>) -> Result<()> {
        let payload = PutPayload::from(bytes);
        let client = &self.bucket.client;
        let more = sending(payload.content_length() as u64);
        let send = |limit| {
            let part = client.put_part(&self.path, &self.id, number as usize, payload.clone());
            within(limit, part)
        };
        let id = self.bucket.repeat("write", &self.key, true, more, send)?;
        let id = id.map_err(|error| Error::store("write", &self.key, short(&error)))?;
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).insert(number, id);
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let parts = std::mem::take(&mut *self.parts.lock().unwrap_or_else(PoisonError::into_inner));
        let parts: Vec<PartId> = parts.into_values().collect();
        let client = &self.bucket.client;
        let finish =
            |limit| within(limit, client.complete_multipart(&self.path, &self.id, parts.clone()));
        let finished = self.bucket.repeat("write", &self.key, true, joining(self.length), finish);
        let error = match finished {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) => Error::store("write", &self.key, short(&error)),
            Err(error @ Error::Store(_)) => error,
            Err(error) => return Err(error),
        };
        // If an attempt succeeded whose answer was lost, the next one finds no upload any more.
        match self.bucket.head(&self.key) {
            Ok(Some(found)) if found.length == self.length => Ok(()),
            Err(Error::Interrupted) => Err(Error::Interrupted),
            _ => Err(error),
        }
    }

    fn abandon(self: Box<Self>) -> Result<()> {
        let client = &self.bucket.client;
        let abort = || client.abort_multipart(&self.path, &self.id);
        let aborted = self.bucket.run("remove the parts of", &self.key, false, abort)?;
        aborted.map_err(|error| Error::store("remove the parts of", &self.key, short(&error)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{pending, ready};

    #[test]
    fn a_request_that_fails_leaves_the_other_one_unless_the_first_was_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(first_answers());
    }

    async fn first_answers() {
        let failed = |status: u32| {
            let source = format!("status code: {status}").into();
            Err::<u8, _>(Failed::Generic { store: "store", source })
        };
        let status = |failed: std::result::Result<u8, Failed>| super::status(&failed.unwrap_err());
        assert_eq!(either(pending(), ready(Ok(2))).await.unwrap(), 2);
        assert_eq!(either(ready(Ok(1)), pending()).await.unwrap(), 1);
        assert_eq!(status(either(ready(failed(403)), pending()).await), Some(403));
        assert_eq!(either(ready(failed(503)), ready(Ok(2))).await.unwrap(), 2);
        for refused in [403, 503] {
            let first = async {
                tokio::task::yield_now().await;
                Ok(1)
            };
            assert_eq!(either(first, ready(failed(refused))).await.unwrap(), 1);
        }
        assert_eq!(status(either(ready(failed(503)), ready(failed(500))).await), Some(500));
    }

    #[test]
    fn the_environment_counts_more_than_a_profile_and_keys_are_of_one_of_them() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("credentials");
        let text = "[default]\naws_access_key_id=a\naws_secret_access_key=b\naws_session_token=c\n\
                    region=r\nendpoint_url=http://e\n";
        std::fs::write(&file, text).unwrap();
        let environment = |set: &[(&str, &str)]| {
            let file = ("AWS_SHARED_CREDENTIALS_FILE".into(), file.clone().into_os_string());
            let set = set.iter().map(|(name, value)| (name.into(), value.into()));
            set.chain([file]).collect::<Vec<(OsString, OsString)>>()
        };
        let value = |builder: &AmazonS3Builder| {
            [
                AmazonS3ConfigKey::AccessKeyId,
                AmazonS3ConfigKey::SecretAccessKey,
                AmazonS3ConfigKey::Token,
                AmazonS3ConfigKey::Region,
                AmazonS3ConfigKey::Endpoint,
            ]
            .map(|key| builder.get_config_value(&key).unwrap_or_default())
        };
        let of = |set: &[(&str, &str)]| value(&described(environment(set)).unwrap());
        assert_eq!(of(&[]), ["a", "b", "c", "r", "http://e"]);
        let keys = [("AWS_ACCESS_KEY_ID", "x"), ("AWS_SECRET_ACCESS_KEY", "y")];
        let (token, region) = (("AWS_SESSION_TOKEN", "t"), ("AWS_REGION", "z"));
        assert_eq!(of(&[keys[0], keys[1], region]), ["x", "y", "", "z", "http://e"]);
        assert_eq!(of(&[keys[0], keys[1], token]), ["x", "y", "t", "r", "http://e"]);
        let empty = keys.map(|(name, _)| (name, ""));
        let endpoint = ("AWS_ENDPOINT_URL", "");
        assert_eq!(of(&[empty[0], empty[1], endpoint]), ["a", "b", "c", "r", "http://e"]);
        // A token belongs to the keys that it comes with.
        assert_eq!(of(&[token]), ["a", "b", "c", "r", "http://e"]);
        std::fs::write(&file, text.replace("aws_session_token=c\n", "")).unwrap();
        assert_eq!(of(&[token]), ["a", "b", "", "r", "http://e"]);
        // Files of which nothing is needed are not read.
        std::fs::write(&file, [0xff]).unwrap();
        assert!(described(environment(&[keys[0], keys[1], region])).is_err());
        let endpoint = ("AWS_ENDPOINT_URL", "http://h");
        assert_eq!(of(&[keys[0], keys[1], region, endpoint]), ["x", "y", "", "z", "http://h"]);
    }

    #[test]
    fn an_endpoint_a_key_or_a_region_that_cannot_be_used_is_refused_and_no_secret_is_shown() {
        let builder = || {
            AmazonS3Builder::new()
                .with_bucket_name("bucket")
                .with_region("nowhere")
                .with_access_key_id("key")
                .with_secret_access_key("secret")
        };
        let open = |builder| {
            Bucket::of_s3(builder, ClientBuilder::new, "", Limits::default(), &Arc::default())
                .map(drop)
        };
        for wrong in [
            "",
            " ",
            "localhost:9000",
            "objects.example.com",
            "https://",
            "https://host:port",
            "https://host:99999",
            "ftp://host",
            "http://a{b/",
            "http://host/?query",
            "http://host/#fragment",
            "http://host\u{1b}[0m",
            "http://user:geheim@host:1",
            "user:geheim@host",
            "http://user@host",
            "http://@host",
        ] {
            let message = open(builder().with_endpoint(wrong)).unwrap_err().to_string();
            assert!(
                message.contains("AWS_ENDPOINT_URL") && message.contains("https://"),
                "{message}"
            );
            assert!(!message.contains("geheim") && !message.contains('\u{1b}'), "{message}");
            let key = AmazonS3ConfigKey::S3Endpoint;
            open(builder().with_config(key, wrong)).unwrap_err();
        }
        for right in
            ["https://host", "http://host:9000/", " http://[::1]:1", "https://Host/path{/x"]
        {
            open(builder().with_endpoint(right)).unwrap();
        }
        for wrong in ["geheim\n", "geheim\u{7f}"] {
            for builder in [
                builder().with_access_key_id(wrong),
                builder().with_secret_access_key(wrong),
                builder().with_token(wrong),
            ] {
                let message = open(builder).unwrap_err().to_string();
                assert!(message.contains("AWS_") && !message.contains("geheim"), "{message}");
            }
        }
        for wrong in ["", "a b", "a\n", "a/b", "a@b"] {
            let message = open(builder().with_region(wrong)).unwrap_err().to_string();
            assert!(message.contains("region") && !message.contains('\n'), "{message}");
        }
    }

    #[test]
    fn a_bundle_without_certificates_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("bundle.pem");
        let bundle = |_: &str| Some(file.clone().into_os_string());
        let message = trusting(bundle).err().unwrap().to_string();
        assert!(message.contains("AWS_CA_BUNDLE") && message.contains("bundle.pem"), "{message}");
        std::fs::write(&file, "text").unwrap();
        let message = trusting(bundle).err().unwrap().to_string();
        assert!(message.contains("no certificate"), "{message}");
        assert!(trusting(|_| None).is_ok());
    }

    #[test]
    fn an_answer_that_arrives_too_slowly_is_ended_and_no_other() {
        let (minute, begin) = (Duration::from_mins(1), Instant::now());
        // How long it goes on, of ten hours, when so many bytes arrive every so many seconds.
        let lasts = |bytes: u64, every: u64| {
            let mut pace = Pace::new(minute, begin);
            let mut times = (1..).map(|number| number * every).take_while(|at| *at < 36_000);
            times.find(|at| pace.add(bytes, begin + Duration::from_secs(*at)).is_err())
        };
        assert_eq!(lasts(1, 59), Some(118));
        assert_eq!(lasts(1, 1), Some(60));
        assert_eq!(lasts(LEAST - 1, 1), Some(60));
        assert_eq!(lasts(LEAST, 1), None);
        assert_eq!(lasts(LEAST * 60, 59), None);
        assert_eq!(lasts(ENTRY, 59), Some(118));
        // A fast beginning is not for ever.
        let mut pace = Pace::new(minute, begin);
        pace.add(1 << 30, begin + minute).unwrap();
        pace.add(1, begin + minute + Duration::from_secs(59)).unwrap();
        assert!(pace.add(1, begin + minute * 2).is_err());
    }

    #[test]
    fn a_request_has_time_for_the_bytes_that_it_sends() {
        assert_eq!(sending(100), Duration::ZERO);
        assert_eq!(sending(PART), Duration::from_secs(512));
        assert!(sending(128 << 20) > sending(PART) * 15);
    }

    #[test]
    fn a_store_has_time_to_copy_the_parts_that_it_joins() {
        assert_eq!(joining(1), Duration::ZERO);
        assert!(joining(1 << 30) > Duration::from_mins(4));
        assert!(joining(5 << 40) > Duration::from_hours(24));
    }
}
