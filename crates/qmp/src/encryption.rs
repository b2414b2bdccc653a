//! Encryption headers in QEMU's format.

use isobath_disk::encryption::Info;
use serde_json::{Map, Value, json};

/// What QEMU says of a qcow2 image that is encrypted: its `QCryptoBlockInfoLUKS` with the format, in its order.
pub fn info(header: &Info) -> Value {
    describe(header, Some("luks"))
}

/// QEMU's `QCryptoBlockInfoLUKS`, in QEMU's order: what it says of a file that is encrypted as a whole.
pub fn info_of_luks(header: &Info) -> Value {
    describe(header, None)
}

fn describe(header: &Info, format: Option<&str>) -> Value {
    let slots = header.slots.iter().map(|slot| {
        if slot.active {
            json!({
                "active": true,
                "iters": slot.iterations,
                "key-offset": slot.key_offset,
                "stripes": slot.stripes,
            })
        } else {
            json!({"active": false, "key-offset": slot.key_offset})
        }
    });
    let pairs = [
        ("ivgen-alg", Some(header.iv_generator.name().into())),
        ("hash-alg", Some(header.hash.name().into())),
        ("cipher-alg", Some(header.algorithm.name().into())),
        ("uuid", Some(header.uuid.clone().into())),
        ("ivgen-hash-alg", header.iv_hash.map(|hash| hash.name().into())),
        ("format", format.map(Into::into)),
        ("cipher-mode", Some(header.mode.name().into())),
        ("slots", Some(slots.collect())),
        ("payload-offset", Some(header.payload_offset.into())),
        ("master-key-iters", Some(header.master_key_iterations.into())),
    ];
    let pairs = pairs.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?)));
    Value::Object(pairs.collect::<Map<_, _>>())
}
