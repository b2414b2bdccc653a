//! The commands, one file each.

mod amend;
mod bench;
mod bitmap;
mod chain;
mod check;
mod commit;
mod compare;
mod completions;
mod convert;
mod create;
pub(crate) mod ctl;
mod dd;
mod foreign;
mod fork;
mod index;
mod info;
mod install_links;
mod io;
mod map;
mod measure;
mod pull;
mod push;
mod qemu_nbd;
mod qemu_storage_daemon;
mod rebase;
mod remote;
mod resize;
mod seal;
mod serve;
mod snapshot;

use crate::failure::Outcome;
use clap::Subcommand;
use std::io::Write;

macro_rules! commands {
    ($($(#[$attribute:meta])* $name:ident = $module:ident;)*) => {
        /// The subcommands of `isobath`. A command's help is the doc comment of its `Args`.
        #[derive(Subcommand)]
        pub(crate) enum Command {
            $($(#[$attribute])* $name(Box<$module::Args>),)*
        }

        impl Command {
            /// Runs the command; its result is printed to `out`.
            pub(crate) fn run(self, out: &mut dyn Write) -> Outcome {
                match self {
                    $(Self::$name(args) => $module::run(&args, out),)*
                }
            }
        }
    };
}

// In the order of the help: images, chains and their upkeep, servers, contents, and the rest; the common ones first.
commands! {
    Create = create;
    Info = info;
    Check = check;
    Convert = convert;
    Resize = resize;
    Snapshot = snapshot;
    Commit = commit;
    Rebase = rebase;
    Fork = fork;
    Chain = chain;
    Index = index;
    Push = push;
    Pull = pull;
    Remote = remote;
    Serve = serve;
    Ctl = ctl;
    #[command(hide = true)]
    QemuNbd = qemu_nbd;
    #[command(hide = true)]
    QemuStorageDaemon = qemu_storage_daemon;
    Io = io;
    Map = map;
    Compare = compare;
    Dd = dd;
    Measure = measure;
    Amend = amend;
    Bitmap = bitmap;
    Seal = seal;
    Bench = bench;
    InstallLinks = install_links;
    Completions = completions;
}
