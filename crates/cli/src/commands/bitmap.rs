//! `isobath bitmap`

use crate::failure::{Failure, Outcome};
use crate::host::images;
use crate::image_name::{Naming, reason};
use crate::options::NamedFormat;
use crate::{options, runtime, size};
use clap::{Arg, ArgAction, ArgMatches, Command, FromArgMatches};
use isobath_disk::{BitmapAction, BitmapEditor, DiskError, OpenOptions, read_bitmap};
use isobath_storage::Locking;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Add, remove and change an image's persistent bitmaps
///
/// The actions are carried out in the order given, and become durable together.
#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    actions: Actions,
    /// With --merge: the image to merge the bitmap from [default: the same image]
    #[arg(short, long = "source-file", value_name = "FILE")]
    base: Option<PathBuf>,
    /// The format of the image to merge the bitmap from [default: detected]
    #[arg(short = 'F', long = "source-format", value_name = "FMT", value_parser = options::named_format)]
    base_format: Option<NamedFormat>,
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// With --add: number of bytes per bit, a power of two [default: the cluster size, at most 64k]
    #[arg(short, long, value_name = "SIZE", value_parser = size::parse)]
    granularity: Option<u64>,
    #[command(flatten)]
    naming: Naming,
    /// The image and the bitmap's name
    #[arg(value_name = "IMAGE BITMAP")]
    names: Vec<OsString>,
}

/// The options for actions: name, help.
const ACTIONS: [(&str, &str); 5] = [
    ("add", "Add the bitmap"),
    ("remove", "Remove the bitmap"),
    ("clear", "Clear the bitmap"),
    ("enable", "Enable the bitmap: writes are recorded in it"),
    ("disable", "Disable the bitmap"),
];

/// The actions, in the order given.
struct Actions(Vec<Action>);

enum Action {
    /// An option of [`ACTIONS`].
    Plain(&'static str),
    /// The bitmap to merge.
    Merge(String),
}

impl clap::Args for Actions {
    fn augment_args(command: Command) -> Command {
        let plain = ACTIONS.iter().map(|(name, help)| {
            Arg::new(*name)
                .long(*name)
                .help(*help)
                .num_args(0)
                .default_missing_value("")
                .action(ArgAction::Append)
        });
        let merge = Arg::new("merge").long("merge").value_name("BITMAP").action(ArgAction::Append);
        command.args(plain).arg(merge.help("Merge another bitmap into the bitmap"))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Actions {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut found = Vec::new();
        for (name, _) in ACTIONS {
            let places = matches.indices_of(name).into_iter().flatten();
            found.extend(places.map(|place| (place, Action::Plain(name))));
        }
        let merged = matches.get_many::<String>("merge").into_iter().flatten().cloned();
        let places = matches.indices_of("merge").into_iter().flatten();
        found.extend(places.zip(merged.map(Action::Merge)));
        found.sort_by_key(|(place, _)| *place);
        Ok(Self(found.into_iter().map(|(_, action)| action).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Action {
    fn name(&self) -> &str {
        match self {
            Self::Plain(name) => name,
            Self::Merge(_) => "merge",
        }
    }
}

pub(crate) fn run(args: &Args, _out: &mut dyn Write) -> Outcome {
    let actions = &args.actions.0;
    let is = |wanted: &str| actions.iter().any(|action| action.name() == wanted);
    let [image, bitmap] = args.names.as_slice() else {
        return Err(Failure::new("Expecting filename and bitmap name"));
    };
    if actions.is_empty() {
        return Err(Failure::new(
            "Need at least one of --add, --remove, --clear, --enable, --disable, or --merge",
        ));
    }
    if args.granularity.is_some() && !is("add") {
        return Err(Failure::new("granularity only supported with --add"));
    }
    if args.base_format.is_some() && args.base.is_none() {
        return Err(Failure::new("-F only supported with -b"));
    }
    if args.base.is_some() && !is("merge") {
        return Err(Failure::new("Merge bitmap source file only supported with --merge"));
    }
    let bitmap = bitmap.to_str().ok_or_else(|| Failure::new("Bitmap name is not valid UTF-8"))?;
    args.naming.instead.check_alone("'bitmap'")?;
    let image = args.naming.image(Path::new(image), args.format)?;
    let base = args.base.as_deref().map(|base| {
        let naming = Naming { trusting: args.naming.trusting.clone(), ..Naming::default() };
        naming.image(base, args.base_format)
    });
    let base = base.transpose()?;
    let options = image.writable(false)?;
    runtime::block_on(async || {
        let editor = Box::pin(BitmapEditor::open(images(), &image.path, &options)).await;
        let mut editor = editor.map_err(|error| image.failed(&error))?;
        for action in actions {
            let failed = |error: &DiskError| failed(action.name(), bitmap, error);
            let wanted = match action {
                Action::Plain("add") => BitmapAction::Add(args.granularity),
                Action::Plain("remove") => BitmapAction::Remove,
                Action::Plain("clear") => BitmapAction::Clear,
                Action::Plain("enable") => BitmapAction::Enable,
                Action::Plain(_) => BitmapAction::Disable,
                Action::Merge(source) => match &base {
                    None => BitmapAction::Merge(source.clone()),
                    Some(base) => {
                        let options: OpenOptions = base.options(false, Locking::Exclusive);
                        let bits = read_bitmap(images(), &base.path, &options, source).await;
                        BitmapAction::MergeFrom(bits.map_err(|error| failed(&error))?)
                    }
                },
            };
            editor.apply(bitmap, &wanted).await.map_err(|error| failed(&error))?;
        }
        Ok(Box::pin(editor.finish()).await?)
    })?;
    Ok(0)
}

fn failed(action: &str, bitmap: &str, error: &DiskError) -> Failure {
    let bitmap = options::printable(bitmap);
    Failure::new(format_args!("Operation {action} on bitmap {bitmap} failed: {}", reason(error)))
}
