//! `isobath pull`

use crate::failure::{Failure, Outcome};
use crate::store::{self, StoreOptions};
use crate::{json, options, runtime, size};
use isobath_remote::{Address, Names, Target, pull};
use serde_json::json;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Make a chain of files again that was pushed
///
/// The files are as they were, verified by their digests. Each appears under its name when it is whole, and replaces
/// none. Files of the chain that are there already are verified and kept, so that an interrupted pull continues.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Give the layers the names of their files, and change the headers above to name these
    #[arg(long)]
    rebase_names: bool,
    /// Output format
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: options::OutputFormat,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    store: StoreOptions,
    #[arg(help = store::CHAIN)]
    remote: String,
    /// A directory for the files, or the top image's new file, beside which the others go
    #[arg(value_name = "DIR|IMAGE")]
    target: PathBuf,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let address = Address::parse(&args.remote)?;
    let target = target(&args.target)?;
    let names = if args.rebase_names { Names::Rebased } else { Names::Kept };
    let pulled = runtime::block_on(async || {
        let name = address.name.clone();
        let work = move |store: &dyn isobath_remote::Store, progress: &_| {
            pull(store, &name, &target, names, progress)
        };
        let interrupted =
            "the layers that are there are whole, and the next pull continues with them";
        args.store.run(&address.place, args.progress && !args.quiet, interrupted, work).await
    })?;
    match args.output {
        options::OutputFormat::Json => {
            let done = json!({
                "image": pulled.image.to_string_lossy(),
                "layers": pulled.layers,
                "layers-fetched": pulled.fetched,
                "bytes-fetched": pulled.bytes,
            });
            json::print(out, &done)?;
        }
        options::OutputFormat::Human if args.quiet => {}
        options::OutputFormat::Human => writeln!(
            out,
            "Pulled to '{}': {} layers, {} of them fetched ({}).",
            isobath_storage::shown(&pulled.image),
            pulled.layers,
            pulled.fetched,
            size::human(pulled.bytes)
        )?,
    }
    Ok(0)
}

/// A directory, or a file in one.
fn target(path: &Path) -> Result<Target, Failure> {
    if path.is_dir() {
        return Ok(Target { directory: path.to_owned(), name: None });
    }
    let name = path.file_name().and_then(|name| name.to_str());
    let ends_so = path.as_os_str().as_encoded_bytes().ends_with(b"/");
    let Some(name) = name.filter(|_| !ends_so) else {
        return Err(Failure::new(format_args!(
            "'{}' is neither a directory that exists nor the name of a file",
            isobath_storage::shown(path)
        )));
    };
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new(".")).to_owned();
    Ok(Target { directory, name: Some(name.to_owned()) })
}
