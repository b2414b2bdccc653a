//! Descriptors of images that clients hand in: `add-fd`, `remove-fd` and `query-fdsets`.

use super::Result;
use super::arguments::{Arguments, integer, optional_text};
use crate::error::QmpError;
use crate::server::{ClientFiles, check_length};
use isobath_storage_file::descriptor_sets;
use serde_json::{Value, json};
use std::os::fd::AsRawFd;

/// Adds the client's descriptor to a set, or to a new one.
pub(super) fn add_fd(arguments: &Arguments, client: &ClientFiles) -> Result<Value> {
    let file = client.take()?;
    let number = file.as_raw_fd();
    let set = match integer(arguments, "fdset-id").map(u64::try_from) {
        None => None,
        Some(Ok(set)) => Some(set),
        Some(Err(_)) => {
            return Err(QmpError::new("Parameter 'fdset-id' expects a non-negative value"));
        }
    };
    let opaque = optional_text(arguments, "opaque").map(str::to_owned);
    check_length("opaque", opaque.as_deref().unwrap_or_default())?;
    let set = descriptor_sets::add(file, set, opaque, false);
    Ok(json!({"fd": number, "fdset-id": set}))
}

/// Closes a descriptor of a set, or all of them.
pub(super) fn remove_fd(arguments: &Arguments) -> Result<Value> {
    let set = integer(arguments, "fdset-id").unwrap_or(-1);
    let given = integer(arguments, "fd");
    // A number that no descriptor can have is not taken for "all".
    let number = given.map(|number| i32::try_from(number).unwrap_or(-1));
    let removed = u64::try_from(set).is_ok_and(|set| descriptor_sets::remove(set, number));
    if removed {
        return Ok(json!({}));
    }
    let name = match given {
        Some(number) => format!("fdset-id:{set}, fd:{number}"),
        None => format!("fdset-id:{set}"),
    };
    Err(QmpError::new(format_args!("File descriptor named '{name}' not found")))
}

/// All sets.
pub(super) fn query_fdsets() -> Value {
    let shown = |set: descriptor_sets::DescriptorSet| {
        let files = set.descriptors.into_iter().map(|(number, opaque)| match opaque {
            Some(opaque) => json!({"fd": number, "opaque": opaque}),
            None => json!({"fd": number}),
        });
        json!({"fdset-id": set.number, "fds": files.collect::<Vec<_>>()})
    };
    // The latest first, as in QEMU.
    descriptor_sets::all().into_iter().rev().map(shown).collect()
}
