//! Options of a mounted file.

/// Which other users may access the file, as far as its permissions allow; QEMU's `FuseExportAllowOther`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AllowOther {
    /// Only the user who mounts it, not even root.
    Off,
    /// Everyone.
    On,
    /// Everyone if the system permits it, otherwise only the user who mounts it.
    #[default]
    Auto,
}

/// Options of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Whether it is writable, provided that the disk is.
    pub writable: bool,
    /// Whether writes past its end, `truncate` and `fallocate` grow the disk.
    pub growable: bool,
    /// Who else may use it.
    pub allow_other: AllowOther,
}
