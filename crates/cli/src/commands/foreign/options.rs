//! The options of `-o` for new images in other programs' formats: QEMU's names, defaults and words.

use crate::failure::Outcome;
use crate::{options, size};
use isobath_formats::{
    Format, QedOptions, VdiOptions, VhdxOptions, VmdkOptions, VmdkSubformat, VpcOptions,
};
use isobath_storage::Layout;
use std::fmt::Write as _;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

const MIB: u64 = 1 << 20;

/// The start of the year 2000, in seconds since 1970.
const YEAR_2000: u64 = 946_684_800;

/// What an option takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    Word,
    OnOff,
    Size,
}

/// An option.
#[derive(Debug)]
struct Known {
    name: &'static str,
    takes: Takes,
    /// What it is if it is not given, as far as QEMU prints that.
    default: Option<&'static str>,
    meaning: &'static str,
}

const fn word(name: &'static str, default: Option<&'static str>, meaning: &'static str) -> Known {
    Known { name, takes: Takes::Word, default, meaning }
}

const fn on_off(name: &'static str, default: Option<&'static str>, meaning: &'static str) -> Known {
    Known { name, takes: Takes::OnOff, default, meaning }
}

const fn bytes(name: &'static str, default: Option<&'static str>, meaning: &'static str) -> Known {
    Known { name, takes: Takes::Size, default, meaning }
}

const SIZE: Known = bytes("size", None, "Virtual disk size");
const BACKING_FILE: Known = word("backing_file", None, "File name of a base image");

/// The options of a format, in the order in which QEMU prints their values.
const fn of_format(format: Format) -> &'static [Known] {
    match format {
        Format::Vmdk => VMDK,
        Format::Vhdx => VHDX,
        Format::Vpc => VPC,
        Format::Vdi => VDI,
        Format::Qed => QED,
    }
}

const VMDK: &[Known] = &[
    SIZE,
    word(
        "adapter_type",
        None,
        "Virtual adapter type, can be one of ide (default), lsilogic, buslogic or legacyESX",
    ),
    BACKING_FILE,
    word("backing_fmt", None, "Must be 'vmdk' if present"),
    on_off("compat6", Some("off"), "VMDK version 6 image"),
    word("hwversion", Some("undefined"), "VMDK hardware version"),
    word("toolsversion", None, "VMware guest tools version"),
    word(
        "subformat",
        None,
        "VMDK flat extent format, can be one of {monolithicSparse (default) | monolithicFlat | \
         twoGbMaxExtentSparse | twoGbMaxExtentFlat | streamOptimized} ",
    ),
    on_off("zeroed_grain", None, "Enable efficient zero writes using the zeroed-grain GTE feature"),
];

const VHDX: &[Known] = &[
    bytes("size", None, "Virtual disk size; max of 64TB."),
    bytes("log_size", Some("1048576"), "Log size; min 1MB."),
    bytes(
        "block_size",
        Some("0"),
        "Block Size; min 1MB, max 256MB. 0 means auto-calculate based on image size.",
    ),
    word(
        "subformat",
        None,
        "VHDX format type, can be either 'dynamic' or 'fixed'. Default is 'dynamic'.",
    ),
    on_off(
        "block_state_zero",
        None,
        "Force use of payload blocks of type 'ZERO'. Non-standard, but default.  Do not set to \
         'off' when using 'qemu-img convert' with subformat=dynamic.",
    ),
];

const VPC: &[Known] = &[
    SIZE,
    word(
        "subformat",
        None,
        "Type of virtual hard disk format. Supported formats are {dynamic (default) | fixed} ",
    ),
    on_off(
        "force_size",
        None,
        "Force disk size calculation to use the actual size specified, rather than using the \
         nearest CHS-based calculation",
    ),
];

const VDI: &[Known] = &[SIZE, on_off("static", Some("off"), "VDI static (pre-allocated) image")];

const QED: &[Known] = &[
    SIZE,
    BACKING_FILE,
    word("backing_fmt", None, "Image format of the base image"),
    bytes("cluster_size", Some("65536"), "Cluster size (in bytes)"),
    bytes("table_size", None, "L1/L2 table size (in clusters)"),
];

/// The options of files, which QEMU accepts for each format.
const FILE: &[Known] = &[
    on_off("nocow", None, "Turn off copy-on-write (valid only on btrfs)"),
    word("preallocation", None, "Preallocation mode (allowed values: off, falloc, full)"),
    bytes("extent_size_hint", None, "Extent size hint for the image file, 0 to disable"),
];

/// Prints the options of a format, with those of files if the image has a name.
pub(crate) fn help(format: Format, named: bool, out: &mut dyn Write) -> Outcome {
    let mut known: Vec<&Known> = of_format(format).iter().collect();
    if named {
        known.extend(FILE);
        writeln!(out, "Supported options:")?;
    } else {
        writeln!(out, "Supported {} options:", format.name())?;
    }
    known.sort_by_key(|known| known.name);
    for Known { name, takes, meaning, .. } in known {
        let takes = match takes {
            Takes::Word => "<str>",
            Takes::OnOff => "<bool (on/off)>",
            Takes::Size => "<size>",
        };
        writeln!(out, "  {:<22} - {meaning}", format!("{name}={takes}"))?;
    }
    if !named {
        writeln!(out, "\nThe protocol level may support further options.")?;
        writeln!(out, "Specify the target filename to include those options.")?;
    }
    Ok(0)
}

/// The options for a new image, with values that have the right form.
#[derive(Debug)]
pub(crate) struct Options {
    format: Format,
    values: Vec<(&'static Known, Option<String>)>,
}

impl Options {
    /// Parses the pairs of `-o`. Of values given twice the last one counts.
    ///
    /// # Errors
    /// If an option is not known, or its value has not its form; in QEMU's words.
    pub(crate) fn parse(format: Format, pairs: &[(String, String)]) -> Result<Self, String> {
        let known = of_format(format).iter().chain(FILE);
        let mut values: Vec<_> =
            known.map(|known| (known, known.default.map(str::to_owned))).collect();
        for (name, value) in pairs {
            let found = values.iter_mut().find(|(known, _)| known.name == name);
            let (known, slot) = found.ok_or_else(|| {
                let known = of_format(format).iter().chain(FILE);
                options::unknown(name, known.map(|known| known.name))
            })?;
            *slot = Some(match known.takes {
                Takes::Word => value.clone(),
                Takes::OnOff => options::on_off(name, value).map(|_| value.clone())?,
                Takes::Size => size::parse(value)
                    .map_err(|_| {
                        format!(
                            "Parameter '{name}' expects a non-negative number below 2^64\nOptional \
                             suffix k, M, G, T, P or E means kilo-, mega-, giga-, tera-, peta-\nand \
                             exabytes, respectively."
                        )
                    })?
                    .to_string(),
            });
        }
        Ok(Self { format, values })
    }

    /// Sets `backing_fmt`, which means nothing without a backing file.
    ///
    /// # Errors
    /// If the format has no such option.
    pub(crate) fn set_backing_format(&mut self, name: &str) -> Result<(), String> {
        let found = self.values.iter_mut().find(|(known, _)| known.name == "backing_fmt");
        let (_, slot) = found.ok_or_else(|| {
            let format = self.format.name();
            format!("Backing file format not supported for file format '{format}'")
        })?;
        *slot = Some(name.to_owned());
        Ok(())
    }

    /// The image's format.
    pub(crate) fn format(&self) -> Format {
        self.format
    }

    fn get(&self, name: &str) -> Option<&str> {
        let value = self.values.iter().find(|(known, _)| known.name == name);
        value.and_then(|(_, value)| value.as_deref())
    }

    fn is_on(&self, name: &str) -> bool {
        self.get(name) == Some("on")
    }

    fn bytes(&self, name: &str) -> Option<u64> {
        // It has been parsed before.
        self.get(name).and_then(|value| value.parse().ok())
    }

    /// The disk's size in bytes, if it is an option.
    pub(crate) fn size(&self) -> Option<u64> {
        self.bytes("size")
    }

    /// How the host lays out the files.
    pub(crate) fn layout(&self) -> Layout {
        Layout { no_copy_on_write: self.is_on("nocow"), ..Layout::default() }
    }

    /// The options of a disk of `size` bytes, as qemu-img prints them.
    pub(crate) fn describe(&self, size: u64) -> String {
        let mut text = format!("fmt={} size={size}", self.format.name());
        for (known, value) in self.values.iter().filter(|(known, _)| known.name != "size") {
            if let Some(value) = value {
                // Writing to a string cannot fail.
                let _ = write!(text, " {}={}", known.name, options::printable(value));
            }
        }
        text
    }

    /// What is to be created.
    ///
    /// # Errors
    /// If the options cannot be used, in QEMU's words where it refuses them too.
    pub(crate) fn image(&self) -> Result<NewImage, String> {
        match self.get("preallocation") {
            // As in QEMU, which gives it to the file before that has any contents.
            None | Some("off" | "falloc" | "full") => {}
            Some("metadata") => return Err("Unsupported preallocation mode: metadata".into()),
            Some(other) => return Err(format!("invalid parameter value: {other}")),
        }
        if self.get("backing_file").is_some() {
            return Err(no_backing(self.format));
        }
        match self.format {
            Format::Vmdk => self.vmdk().map(NewImage::Vmdk),
            Format::Vhdx => self.vhdx().map(NewImage::Vhdx),
            Format::Vpc => Ok(NewImage::Vpc(VpcOptions {
                fixed: self.is_fixed()?,
                force_size: self.is_on("force_size"),
                id: ids()[0],
                created: SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, |time| time.as_secs().saturating_sub(YEAR_2000) as u32),
            })),
            Format::Vdi => {
                let [image, contents, _] = ids();
                let fixed = self.is_on("static");
                Ok(NewImage::Vdi(VdiOptions { fixed, ids: [image, contents] }))
            }
            Format::Qed => self.qed().map(NewImage::Qed),
        }
    }

    /// Whether `subformat` is `fixed`; `dynamic` by default.
    fn is_fixed(&self) -> Result<bool, String> {
        match self.get("subformat") {
            None | Some("dynamic") => Ok(false),
            Some("fixed") => Ok(true),
            Some(other) => Err(format!("Parameter 'subformat' does not accept value '{other}'")),
        }
    }

    fn vmdk(&self) -> Result<VmdkOptions, String> {
        let invalid = |value: &str| format!("invalid parameter value: {value}");
        let subformat = match self.get("subformat") {
            None => VmdkSubformat::default(),
            Some(name) => VmdkSubformat::from_name(name).ok_or_else(|| invalid(name))?,
        };
        let adapter = self.get("adapter_type").unwrap_or("ide");
        let known = ["ide", "lsilogic", "buslogic", "legacyESX"];
        let adapter =
            known.into_iter().find(|known| *known == adapter).ok_or_else(|| invalid(adapter))?;
        let version = self.get("hwversion").filter(|version| *version != "undefined");
        let hardware_version = match (version, self.is_on("compat6")) {
            (Some(_), true) => return Err("compat6 cannot be enabled with hwversion set".into()),
            (Some(version), false) => version,
            (None, true) => "6",
            (None, false) => "4",
        };
        let zeroed_grains = self.is_on("zeroed_grain");
        if zeroed_grains && subformat.is_flat() {
            return Err("Flat image can't enable zeroed grain".into());
        }
        Ok(VmdkOptions {
            subformat,
            // All ones would stand for no parent.
            content_id: ids()[0] as u32 & 0x7fff_ffff,
            adapter,
            hardware_version: hardware_version.to_owned(),
            // QEMU's default, which stands for tools that VMware does not manage.
            tools_version: self.get("toolsversion").unwrap_or("2147483647").to_owned(),
            zeroed_grains,
        })
    }

    fn vhdx(&self) -> Result<VhdxOptions, String> {
        let log_size = self.bytes("log_size").unwrap_or(MIB).next_multiple_of(MIB);
        if log_size == 0 {
            return Err("Log size must be a multiple of 1 MB".into());
        }
        if log_size >= 4 << 30 {
            return Err("Log size must be smaller than 4 GB".into());
        }
        // 0 stands for a size that suits the disk.
        let block_size = self.bytes("block_size").filter(|bytes| *bytes != 0);
        let block_size = block_size.map(|bytes| bytes.next_multiple_of(MIB).min(256 * MIB));
        if block_size.is_some_and(|bytes| !bytes.is_power_of_two()) {
            return Err("Block size must be a power of two".into());
        }
        let zero_blocks = self.get("block_state_zero") != Some("off");
        Ok(VhdxOptions { block_size, log_size, fixed: self.is_fixed()?, zero_blocks, ids: ids() })
    }

    fn qed(&self) -> Result<QedOptions, String> {
        let cluster_size = self.bytes("cluster_size").filter(|bytes| *bytes != 0);
        let cluster_size = cluster_size.unwrap_or(64 << 10);
        if !cluster_size.is_power_of_two() || !(4096..=64 * MIB).contains(&cluster_size) {
            return Err(
                "QED cluster size must be within range [4096, 67108864] and power of 2".to_owned()
            );
        }
        let table_size = self.bytes("table_size").filter(|clusters| *clusters != 0).unwrap_or(4);
        if !table_size.is_power_of_two() || table_size > 16 {
            return Err("QED table size must be within range [1, 16] and power of 2".to_owned());
        }
        if table_size == 1 {
            return Err(
                "QEMU does not open QED images with tables of 1 cluster; use table_size=2 or more"
                    .into(),
            );
        }
        Ok(QedOptions { cluster_size, table_size })
    }
}

/// Why a backing file is refused, in QEMU's words for formats that have none.
pub(crate) fn no_backing(format: Format) -> String {
    match format {
        Format::Vmdk | Format::Qed => format!(
            "Backing file not supported: images in the format {} are created without one; use \
             qcow2 for an overlay",
            format.name()
        ),
        _ => format!("Backing file not supported for file format '{}'", format.name()),
    }
}

/// Identities that no other image has.
fn ids() -> [u128; 3] {
    let random = RandomState::new();
    [1_u64, 2, 3].map(|n| u128::from(random.hash_one(n)) << 64 | u128::from(random.hash_one(!n)))
}

/// An image to create.
#[derive(Clone, Debug)]
pub(crate) enum NewImage {
    Vmdk(VmdkOptions),
    Vhdx(VhdxOptions),
    Vpc(VpcOptions),
    Vdi(VdiOptions),
    Qed(QedOptions),
}
