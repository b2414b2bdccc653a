//! Frontends on the command line: their options, from the table of frontends, and the requested exports.

use crate::failure::Failure;
use crate::server::endpoint::Endpoint;
use crate::server::handed_in::HandedIn;
use crate::server::keeper;
use crate::server::listen::bind;
use crate::server::runtime_directory;
use crate::server::tls::{SecuredEndpoint, Tls};
use clap::builder::{
    BoolValueParser, PathBufValueParser, RangedU64ValueParser, TypedValueParser, ValueParser,
};
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches, ValueHint};
use isobath_disk::{LiveDisk, OpenOptions, WhenLocked};
use isobath_export::frontend::{Outlive, Parameter, Protocol, Setting, Settings, Takes};
use isobath_export::keeper::{Keeper, Opening, give_up_admin};
use isobath_export::registry::{Frontends, Listeners, PROTOCOLS};
use isobath_qmp::monitor::{Drive, Monitor};
use isobath_ring::net::Access;
use isobath_storage::Host;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process;
use std::rc::Rc;
use std::sync::Arc;

/// The options of each frontend.
pub(super) struct FrontendArgs(Vec<Given>);

/// The keepers of the block devices, in the order of the options.
pub(super) struct Keepers(VecDeque<Keeper>);

impl Keepers {
    /// The keeper of the device of the image with this number, if the device waits for this server.
    fn that_waits(&self, image: usize) -> Option<&Keeper> {
        self.0.get(image).filter(|keeper| keeper.waits())
    }

    /// How to open the image of this number and name with these options if those who use a device go on with it. It is
    /// opened while what is returned besides exists.
    ///
    /// # Errors
    /// The device is of another image.
    pub(super) fn begin_opening(
        &self,
        image: usize,
        name: &Path,
        options: OpenOptions,
    ) -> Result<(OpenOptions, Option<Arc<Opening>>), Failure> {
        let Some(keeper) = self.that_waits(image) else { return Ok((options, None)) };
        let opening = std::path::absolute(name).and_then(|name| keeper.open(&name));
        let opening = Arc::new(opening.map_err(Failure::new)?);
        if !opening.is_known() && !options.writable {
            return Err(Failure::new(format_args!(
                "nobody knows whether '{}' was written to since its server was killed: its keeper was killed, too",
                name.display()
            )));
        }
        let asked = Arc::downgrade(&opening);
        let check = move |id| asked.upgrade().map_or(Ok(()), |opening| opening.locked(id));
        let options = options.continues(true).only_with_log(!opening.is_known());
        Ok((options.when_locked(WhenLocked(Arc::new(check))), Some(opening)))
    }

    /// The failure of opening the image with this number, with what it is for the device that waits.
    pub(super) fn explain(&self, image: usize, failure: Failure) -> Failure {
        match self.that_waits(image).and_then(Keeper::number) {
            Some(number) => failure.context(format_args!(
                "/dev/ublkb{number} waits for this image ('ublk del -n {number}' removes the device)"
            )),
            None => failure,
        }
    }
}

/// The options of one frontend.
struct Given {
    protocol: &'static Protocol,
    locations: Vec<Value>,
    /// Parameters common to all of its exports.
    others: Vec<(&'static Parameter, Value)>,
}

/// The value of an option.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Text(String),
    Flag(bool),
    Number(u64),
    Path(PathBuf),
    Endpoint(Endpoint),
    Secured(SecuredEndpoint),
    /// The number of a ublk device, or any that is free.
    Device(Option<u32>),
    /// A socket file of this server's own, if no frontend was requested.
    OwnSocket,
}

impl Value {
    /// The setting for an export; binds a socket at once.
    fn setting(
        &self,
        option: &str,
        access: Access,
        keepers: &mut Keepers,
    ) -> Result<Setting, Failure> {
        Ok(match self {
            Self::Text(text) => Setting::Text(text.clone()),
            Self::Flag(flag) => Setting::Flag(*flag),
            Self::Number(number) => Setting::Number(*number),
            Self::Path(path) => Setting::Path(path.clone()),
            Self::Endpoint(endpoint) | Self::Secured(SecuredEndpoint { endpoint, .. }) => {
                Setting::Listener(bind(endpoint, option, access)?)
            }
            Self::OwnSocket => Setting::Listener(bind(&own_socket(option)?, option, access)?),
            Self::Device(_) => {
                let Some(keeper) = keepers.0.pop_front() else {
                    unreachable!("each device has a keeper, and is exported once")
                };
                Setting::Keeper(keeper)
            }
        })
    }
}

/// The parser for an option's values.
fn parser(takes: Takes) -> ValueParser {
    match takes {
        Takes::Text => ValueParser::new(|text: &str| Ok::<_, String>(Value::Text(text.to_owned()))),
        Takes::Flag => ValueParser::new(BoolValueParser::new().map(Value::Flag)),
        Takes::Number { most } | Takes::Bytes { most } => {
            let number = RangedU64ValueParser::<u64>::new().range(0..=most);
            ValueParser::new(number.map(Value::Number))
        }
        Takes::Choice(words) => ValueParser::new(move |text: &str| choice(words, text)),
        Takes::Path => ValueParser::new(PathBufValueParser::new().map(Value::Path)),
        Takes::UnixSocket => ValueParser::new(socket_file),
        Takes::UblkDevice => ValueParser::new(ublk_device),
        Takes::Socket => {
            ValueParser::new(|text: &str| text.parse::<SecuredEndpoint>().map(Value::Secured))
        }
    }
}

fn choice(words: &[&str], text: &str) -> Result<Value, String> {
    if words.contains(&text) {
        return Ok(Value::Text(text.to_owned()));
    }
    Err(match words {
        [others @ .., last] if !others.is_empty() => {
            format!("expected {} or {last}", others.join(", "))
        }
        words => format!("expected {}", words.concat()),
    })
}

/// `auto`, a number, or the name of a device.
fn ublk_device(text: &str) -> Result<Value, String> {
    /// The driver has no more numbers.
    const NUMBERS: u32 = 1 << 20;
    if text == "auto" {
        return Ok(Value::Device(None));
    }
    let number = text.strip_prefix("/dev/ublkb").unwrap_or(text).parse().ok();
    match number.filter(|number| *number < NUMBERS) {
        Some(number) => Ok(Value::Device(Some(number))),
        None => Err(format!("expected auto or a number below {NUMBERS}")),
    }
}

/// `unix:PATH` or `fd:NAME`
fn socket_file(text: &str) -> Result<Value, String> {
    if text.starts_with("fd:") {
        return text.parse().map(Value::Endpoint);
    }
    match text.strip_prefix("unix:") {
        Some("") => Err("missing socket path after 'unix:'".into()),
        Some(path) => Ok(Value::Endpoint(Endpoint::Unix(path.into()))),
        None => Err("write a socket file as unix:PATH, one handed in as fd:NAME".into()),
    }
}

/// The option of a parameter, if it has one.
fn argument(parameter: &Parameter) -> Option<Arg> {
    let option = parameter.option.as_ref()?;
    let argument = Arg::new(option.flag).long(option.flag).help(option.help);
    let argument = match parameter.takes {
        Takes::Flag => argument.action(ArgAction::SetTrue),
        Takes::Path => argument.value_hint(ValueHint::AnyPath),
        _ => argument,
    };
    let argument = argument.value_parser(parser(parameter.takes));
    Some(if option.value_name.is_empty() {
        argument
    } else {
        argument.value_name(option.value_name)
    })
}

impl clap::Args for FrontendArgs {
    fn augment_args(mut command: Command) -> Command {
        for protocol in PROTOCOLS {
            let location = argument(&protocol.location);
            command = command.args(location.map(|argument| argument.action(ArgAction::Append)));
        }
        for protocol in PROTOCOLS {
            for parameter in protocol.parameters {
                let Some(mut argument) = argument(parameter) else { continue };
                if let Some(option) = &protocol.location.option {
                    argument = argument.requires(option.flag);
                }
                if let Some(default) = parameter.option.as_ref().and_then(|option| option.default) {
                    argument = argument.default_value(default);
                }
                command = command.arg(argument);
            }
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for FrontendArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let values = |parameter: &Parameter| -> Vec<Value> {
            let option = parameter.option.as_ref();
            let values = option.and_then(|option| matches.get_many(option.flag));
            values.into_iter().flatten().cloned().collect()
        };
        let given = PROTOCOLS.iter().map(|&protocol| Given {
            protocol,
            locations: values(&protocol.location),
            others: protocol
                .parameters
                .iter()
                .flat_map(|parameter| {
                    values(parameter).into_iter().map(move |value| (parameter, value))
                })
                .collect(),
        });
        let mut given: Vec<_> = given.collect();
        if given.iter().all(|given| given.locations.is_empty())
            && let Some(shared) = given.iter_mut().find(|given| given.protocol.shared)
        {
            shared.locations.push(Value::OwnSocket);
        }
        Ok(Self(given))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Given {
    /// The option that requests an export or names an address.
    fn option(&self) -> String {
        let flag = self.protocol.location.option.as_ref().map_or("", |option| option.flag);
        format!("--{flag}")
    }

    /// The option by which its exports wait for another server once this one is killed, and for how many seconds.
    fn recovery(&self) -> Option<(String, u64)> {
        let Outlive::With(name) = self.protocol.clients_outlive else { return None };
        let given = self.others.iter().find(|(parameter, _)| parameter.name == name);
        match given? {
            (Parameter { option: Some(option), .. }, Value::Number(seconds)) => {
                Some((format!("--{}", option.flag), *seconds))
            }
            _ => None,
        }
    }

    /// The settings of the export at `location`; without one, of an export of a shared server.
    fn settings(
        &self,
        location: Option<&Value>,
        access: Access,
        keepers: &mut Keepers,
    ) -> Result<Settings, Failure> {
        let mut settings = Settings::default();
        // Through QMP it is offered only on request, as in QEMU. It costs nothing.
        let depth = |parameter: &&Parameter| parameter.name == "allocation-depth";
        if let Some(parameter) = self.protocol.parameters.iter().find(depth) {
            settings.set(parameter, Setting::Flag(true));
        }
        for (parameter, value) in &self.others {
            settings.set(parameter, value.setting(&self.option(), access, keepers)?);
        }
        if let Some(location) = location {
            let setting = location.setting(&self.option(), access, keepers)?;
            settings.set(&self.protocol.location, setting);
        }
        Ok(settings)
    }
}

/// A socket file of this server's own, instead of the option's.
fn own_socket(option: &str) -> Result<Endpoint, Failure> {
    let directory = runtime_directory::create().map_err(|error| {
        Failure::new(format_args!("no place for a socket: {error}; choose one with {option}"))
    })?;
    Ok(Endpoint::Unix(directory.join(format!("nbd-{}.sock", process::id()))))
}

impl FrontendArgs {
    /// The requested frontends that run one server per export, so that each serves one image.
    fn own_servers(&self) -> impl Iterator<Item = &Given> {
        self.0.iter().filter(|given| !given.protocol.shared)
    }

    /// Whether clients of the image with this number continue when this server is killed and restarted.
    pub(super) fn outlives(&self, image: usize) -> bool {
        let always = |given: &&Given| given.protocol.clients_outlive == Outlive::Always;
        let mut given = self.own_servers().filter(always);
        given.any(|given| image < given.locations.len()) || self.must_outlive(image).is_some()
    }

    /// The option by which they do, if the image is not to be served unless its writes survive.
    pub(super) fn must_outlive(&self, image: usize) -> Option<String> {
        let mut given = self.own_servers().filter(|given| image < given.locations.len());
        given.find_map(|given| given.recovery().map(|(option, _)| option))
    }

    /// Refuses devices that are to wait for another server where that would not recognize them: one without a number,
    /// or of a disk whose image is not the one of the command line.
    pub(super) fn check_recovery(&self, qmp: bool, snapshot: bool) -> Result<(), Failure> {
        for given in self.own_servers() {
            let Some((option, seconds)) = given.recovery() else { continue };
            let refused = |why: &str| Err(Failure::usage(format!("{option}: {why}")));
            if seconds == 0 {
                return refused("a device waits for at least a second");
            }
            if given.locations.contains(&Value::Device(None)) {
                return refused(&format!(
                    "the next server finds a device by its number; say which with {} N, not 'auto'",
                    given.option()
                ));
            }
            if qmp {
                return refused(
                    "not with --qmp: after a snapshot or a job the next server would have to be started with another \
                     image",
                );
            }
            if self.mounts() {
                return refused(
                    "not with --fuse: a mount needs CAP_SYS_ADMIN, which a server of such devices gives up",
                );
            }
            if snapshot {
                return refused("not with --snapshot: serve the image itself");
            }
        }
        Ok(())
    }

    /// Refuses more exports of a frontend than there are images.
    pub(super) fn check(&self, images: usize) -> Result<(), Failure> {
        for given in self.own_servers() {
            let (option, count) = (given.option(), given.locations.len());
            if count > images {
                return Err(Failure::new(format_args!(
                    "{option} is given {count} times for {images} images; give it at most once per image"
                )));
            }
        }
        Ok(())
    }

    /// The addresses of shared servers that were given.
    pub(super) fn addresses(&self) -> impl Iterator<Item = &SecuredEndpoint> {
        let shared = self.0.iter().filter(|given| given.protocol.shared);
        shared.flat_map(|given| &given.locations).filter_map(|location| match location {
            Value::Secured(endpoint) => Some(endpoint),
            _ => None,
        })
    }

    /// The descriptors that the options name.
    pub(super) fn handed_in(&self) -> impl Iterator<Item = &HandedIn> {
        let locations = self.0.iter().flat_map(|given| &given.locations);
        locations.filter_map(|location| match location {
            Value::Endpoint(endpoint) | Value::Secured(SecuredEndpoint { endpoint, .. }) => {
                endpoint.handed_in()
            }
            _ => None,
        })
    }

    /// Starts what needs rights that the server is to give up: the keepers of block devices, in the order of the
    /// images. If the devices outlive this process, it gives up a right that they have.
    ///
    /// # Errors
    /// The machine has no such devices, or this user has not the rights.
    pub(super) fn start_keepers(&self) -> Result<Keepers, Failure> {
        let mut keepers = VecDeque::new();
        for given in self.own_servers() {
            for location in &given.locations {
                if let Value::Device(number) = location {
                    let seconds = given.recovery().map(|(_, seconds)| u32::try_from(seconds));
                    let seconds = seconds.transpose();
                    let seconds = seconds.map_err(Failure::new)?;
                    let started = keeper::start(*number, seconds);
                    keepers.push_back(
                        started.map_err(|error| Failure::new(error).context(given.option()))?,
                    );
                }
            }
        }
        if self.own_servers().any(|given| given.recovery().is_some()) {
            give_up_admin().map_err(Failure::new)?;
        }
        Ok(Keepers(keepers))
    }

    /// Whether a file system is mounted.
    pub(super) fn mounts(&self) -> bool {
        let mut locations = self.0.iter().flat_map(|given| &given.locations);
        locations.any(|location| matches!(location, Value::Path(_)))
    }

    /// The socket files of all frontends; that of the server's own is in its directory, which is made for it.
    ///
    /// # Errors
    /// There is no such directory.
    pub(super) fn socket_files(&self) -> Result<Vec<PathBuf>, Failure> {
        let mut files = Vec::new();
        for given in &self.0 {
            for location in &given.locations {
                let endpoint = match location {
                    Value::OwnSocket => &own_socket(&given.option())?,
                    Value::Endpoint(endpoint) => endpoint,
                    Value::Secured(secured) => &secured.endpoint,
                    Value::Text(_)
                    | Value::Flag(_)
                    | Value::Number(_)
                    | Value::Path(_)
                    | Value::Device(_) => continue,
                };
                if let Endpoint::Unix(path) = endpoint {
                    files.push(path.clone());
                }
            }
        }
        Ok(files)
    }

    /// Refuses addresses for exports that there are not, unless `more` may be added.
    pub(super) fn check_exports(&self, names: &[String], more: bool) -> Result<(), Failure> {
        for address in self.addresses() {
            let unknown = address.exports.iter().find(|name| !names.contains(name));
            if let Some(unknown) = unknown.filter(|_| !more) {
                return Err(Failure::usage(format!(
                    "'{},export={unknown}': there is no export '{unknown}'; there are '{}'",
                    address.endpoint,
                    names.join("', '")
                )));
            }
        }
        Ok(())
    }

    /// Listens for clients of shared servers.
    pub(super) fn listen(&self, access: Access, tls: &Tls) -> Result<Listeners, Failure> {
        let mut listeners = Listeners::new();
        for given in self.0.iter().filter(|given| given.protocol.shared) {
            let option = given.option();
            let endpoints = given.locations.iter().filter_map(|location| match location {
                Value::Secured(endpoint) => Some(Ok(endpoint.clone())),
                Value::OwnSocket => Some(own_socket(&option).map(SecuredEndpoint::from)),
                _ => None,
            });
            let endpoints = endpoints.collect::<Result<Vec<_>, _>>()?;
            listeners.insert(given.protocol.name, tls.listen(&endpoints, &option, access)?);
        }
        Ok(listeners)
    }

    /// Exports the monitor's disks: all through shared servers that listen, and one per location through the others.
    pub(super) fn export<H: Host + Clone>(
        &self,
        monitor: &Monitor<H>,
        frontends: &Frontends<LiveDisk<H>>,
        access: Access,
        mut keepers: Keepers,
    ) -> Result<(), Failure> {
        let drives = monitor.drives();
        for given in self.0.iter().filter(|given| !given.locations.is_empty()) {
            let protocol = given.protocol;
            let mut export = |id: &str, drive: &Rc<Drive<H>>, location| {
                let Some(frontend) = frontends.of(protocol.name) else {
                    return Err(Failure::new(format_args!(
                        "there is no frontend '{}'",
                        protocol.name
                    )));
                };
                let exported = monitor.export(
                    frontend,
                    id,
                    drive,
                    given.settings(location, access, &mut keepers)?,
                );
                exported.map_err(|error| Failure::new(error).context(given.option()))
            };
            if protocol.shared {
                for drive in &drives {
                    export(drive.device(), drive, None)?;
                }
                continue;
            }
            for (number, (drive, location)) in drives.iter().zip(&given.locations).enumerate() {
                export(&format!("{}-{number}", protocol.name), drive, Some(location))?;
            }
        }
        for protocol in PROTOCOLS {
            if let Some(frontend) = frontends.of(protocol.name) {
                frontend.exported();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Args as _;

    fn parse(arguments: &[&str]) -> Result<FrontendArgs, clap::Error> {
        let command = FrontendArgs::augment_args(Command::new("serve").no_binary_name(true));
        FrontendArgs::from_arg_matches(&command.try_get_matches_from(arguments)?)
    }

    #[test]
    fn a_socket_file_is_written_with_its_kind() {
        let endpoint = Endpoint::Unix("/run/a".into());
        assert_eq!(socket_file("unix:/run/a"), Ok(Value::Endpoint(endpoint)));
        assert!(socket_file("unix:").is_err());
        assert!(socket_file("/run/a").is_err());
        let handed_in = Endpoint::HandedIn(HandedIn::Name("a".into()));
        assert_eq!(socket_file("fd:a"), Ok(Value::Endpoint(handed_in)));
    }

    #[test]
    fn a_block_device_is_written_as_its_number_or_its_name() {
        assert_eq!(ublk_device("auto"), Ok(Value::Device(None)));
        for text in ["7", "/dev/ublkb7"] {
            assert_eq!(ublk_device(text), Ok(Value::Device(Some(7))));
        }
        for text in ["", "-1", "1048576", "/dev/ublkb", "/dev/ublkc1", "x"] {
            assert!(ublk_device(text).is_err(), "{text}");
        }
    }

    #[test]
    fn a_choice_is_one_of_its_words() {
        assert_eq!(choice(&["off", "on"], "on"), Ok(Value::Text("on".into())));
        assert_eq!(choice(&["off", "on", "auto"], ""), Err("expected off, on or auto".into()));
        assert_eq!(choice(&["off"], "on"), Err("expected off".into()));
    }

    #[test]
    fn nbd_is_where_nothing_else_is_asked_for() {
        let count = |arguments: &[&str]| -> Vec<usize> {
            parse(arguments).unwrap().0.iter().map(|given| given.locations.len()).collect()
        };
        assert_eq!(count(&[]), [1, 0, 0, 0]);
        assert_eq!(count(&["--fuse", "/a", "--fuse", "/b"]), [0, 0, 2, 0]);
        assert_eq!(count(&["--nbd", "1", "--vhost-user-blk", "unix:/a"]), [1, 1, 0, 0]);
        assert_eq!(count(&["--ublk", "auto", "--ublk", "3"]), [0, 0, 0, 2]);
        let default = &parse(&[]).unwrap().0[0].locations[0];
        assert_eq!(*default, Value::OwnSocket);
    }

    #[test]
    fn options_belong_to_their_frontend() {
        assert!(parse(&["--fuse", "/a", "--queues", "2"]).is_err());
        assert!(parse(&["--fuse", "/a", "--allow-other", "maybe"]).is_err());
        let given = parse(&["--vhost-user-blk", "unix:/a", "--poll", "0"]).unwrap();
        assert!(given.outlives(0) && !given.outlives(1));
        assert!(given.check(0).is_err() && given.check(1).is_ok());
        let values: Vec<_> = given.0[1].others.iter().map(|(_, value)| value.clone()).collect();
        assert_eq!(values, [Value::Number(64), Value::Number(0)]);
        assert!(parse(&["--vhost-user-blk", "unix:/a", "--queues", "65536"]).is_err());
    }

    #[test]
    fn a_device_that_waits_for_another_server_is_found_again() {
        assert!(parse(&["--ublk-recovery", "5"]).is_err(), "without a device");
        assert!(parse(&["--ublk", "3", "--ublk-recovery", "86401"]).is_err());
        let plain = parse(&["--ublk", "auto"]).unwrap();
        assert!(!plain.outlives(0) && plain.check_recovery(true, true).is_ok());
        let given =
            |arguments: &[&str]| parse(&[&["--ublk-recovery", "5"], arguments].concat()).unwrap();
        let good = given(&["--ublk", "3", "--ublk", "/dev/ublkb4"]);
        assert!(good.check_recovery(false, false).is_ok());
        assert_eq!(good.must_outlive(1).as_deref(), Some("--ublk-recovery"));
        assert!(good.outlives(1) && !good.outlives(2));
        let why = |given: &FrontendArgs, qmp, snapshot| {
            given.check_recovery(qmp, snapshot).unwrap_err().message.unwrap()
        };
        assert!(why(&good, true, false).contains("not with --qmp"));
        assert!(why(&good, false, true).contains("not with --snapshot"));
        let any = why(&given(&["--ublk", "3", "--ublk", "auto"]), false, false);
        assert!(any.contains("say which with --ublk N"), "{any}");
        let none = parse(&["--ublk", "3", "--ublk-recovery", "0"]).unwrap();
        assert!(why(&none, false, false).contains("at least a second"));
    }
}
