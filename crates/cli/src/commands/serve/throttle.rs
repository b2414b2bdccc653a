//! The values of `--throttle`.

use crate::failure::Failure;
use crate::{options, size};
use isobath_disk::throttle::Limits;
use isobath_qmp::monitor::Monitor;
use isobath_storage::Host;

/// The limits of an image's requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Throttling {
    limits: Limits,
    /// The group that it shares them with.
    group: Option<String>,
}

/// Parses limits by QEMU's names, such as `iops-total=500,bps-total=20M,group=g`. Nothing is no limit.
pub(super) fn parse(text: &str) -> Result<Throttling, String> {
    let mut throttling = Throttling { limits: Limits::default(), group: None };
    for (name, value) in options::parse(&[text.to_owned()]) {
        if name == "group" {
            throttling.group = Some(value);
            continue;
        }
        let value = number(&name, &value)?;
        if !throttling.limits.set_by_name(&name, value) {
            return Err(format!("there is no limit '{name}'; see isobath serve --help"));
        }
    }
    throttling.limits.check().map_err(|error| error.to_string())?;
    Ok(throttling)
}

/// A limit's value: bytes may have a suffix.
fn number(name: &str, value: &str) -> Result<u64, String> {
    let is_bytes = name == "iops-size" || name.starts_with("bps-") && !name.ends_with("-length");
    let number = if is_bytes { size::parse(value).ok() } else { value.parse().ok() };
    number.ok_or_else(|| {
        let what = if is_bytes { "a number of bytes, such as 20M" } else { "a whole number" };
        format!("{name}={value}: expected {what}")
    })
}

/// Refuses more limits than there are images, and limits that cannot all hold. The images are known by these names.
pub(super) fn check(given: &[Throttling], images: &[String]) -> Result<(), Failure> {
    if given.len() > images.len() {
        return Err(Failure::new(format_args!(
            "--throttle is given {} times for {} images; give it at most once per image",
            given.len(),
            images.len()
        )));
    }
    // Limits that name no group are in one with the image's name.
    for (one, image) in given.iter().zip(images) {
        let is_named = given.iter().any(|other| other.group.as_ref() == Some(image));
        if one.group.is_none() && one.limits.is_enabled() && is_named {
            return Err(Failure::new(format_args!(
                "--throttle gives '{image}' limits of its own, and names a group '{image}'; \
                 give the group another name"
            )));
        }
    }
    for (number, one) in given.iter().enumerate() {
        let Some(group) = &one.group else { continue };
        let of_group = given.iter().filter(|other| other.group.as_ref() == Some(group));
        let mut limits = of_group.map(|other| other.limits).filter(Limits::is_enabled);
        let first = limits.next();
        if first.is_none() {
            return Err(Failure::new(format_args!(
                "--throttle number {}: the group '{group}' has no limits; give them once",
                number + 1
            )));
        }
        if limits.any(|other| Some(other) != first) {
            return Err(Failure::new(format_args!(
                "--throttle gives the group '{group}' two different limits; give them once"
            )));
        }
    }
    Ok(())
}

/// Limits the monitor's disks: the first with the first value, and so on.
pub(super) fn apply<H: Host + Clone>(
    given: &[Throttling],
    monitor: &Monitor<H>,
) -> Result<(), Failure> {
    let drives = monitor.drives();
    let pairs = || drives.iter().zip(given);
    for (drive, Throttling { limits, group }) in pairs().filter(|(_, one)| one.limits.is_enabled())
    {
        monitor.limit(drive, group.as_deref(), limits).map_err(Failure::new)?;
    }
    for (drive, one) in pairs().filter(|(_, one)| !one.limits.is_enabled()) {
        if let Some(group) = &one.group {
            monitor.join_group(drive, group).map_err(Failure::new)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_disk::throttle::LimitKind;

    #[test]
    fn bytes_have_suffixes_and_numbers_have_none() {
        let parsed = parse("bps-total=20M,iops-total=500,iops-total-max=1000,iops-size=4k,group=g");
        let Throttling { limits, group } = parsed.unwrap();
        assert_eq!(limits.get(LimitKind::BpsTotal).average, 20 << 20);
        assert_eq!(limits.get(LimitKind::IopsTotal).average, 500);
        assert_eq!(limits.get(LimitKind::IopsTotal).burst, 1000);
        assert_eq!((limits.iops_size, group.as_deref()), (4096, Some("g")));
        assert!(!parse("").unwrap().limits.is_enabled());
    }

    #[test]
    fn what_is_no_limit_is_refused_by_its_name() {
        for (text, told) in [
            ("iops=5", "'iops'"),
            ("iops-total", "iops-total=on"),
            ("iops-total=5k", "iops-total=5k: expected a whole number"),
            ("bps-total=x", "bps-total=x: expected a number of bytes"),
            ("bps-total-max=5", "'bps-total' is not set"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(told), "{text}: {error}");
        }
    }

    #[test]
    fn a_group_has_no_name_of_an_image_with_limits_of_its_own() {
        let checked = |texts: &[&str]| {
            let given: Vec<_> = texts.iter().map(|text| parse(text).unwrap()).collect();
            check(&given, &["a", "b"].map(String::from)).map_err(|failure| failure.to_string())
        };
        for texts in
            [["iops-total=5", "iops-total=6,group=a"], ["iops-total=6,group=b", "bps-read=1"]]
        {
            let error = checked(&texts).unwrap_err();
            assert!(error.contains("another name"), "{error}");
        }
        for texts in [["", "iops-total=6,group=a"], ["iops-total=5,group=b", "group=b"]] {
            assert_eq!(checked(&texts), Ok(()));
        }
    }

    #[test]
    fn a_groups_limits_are_given_once_or_alike() {
        let checked = |texts: &[&str]| {
            let given: Vec<_> = texts.iter().map(|text| parse(text).unwrap()).collect();
            check(&given, &["a", "b", "c"].map(String::from)).map_err(|failure| failure.to_string())
        };
        assert_eq!(checked(&["group=g", "", "iops-total=5,group=g"]), Ok(()));
        assert_eq!(checked(&["iops-total=5,group=g", "iops-total=5,group=g"]), Ok(()));
        assert!(checked(&["", "group=g"]).unwrap_err().contains("number 2"));
        let different = checked(&["iops-total=5,group=g", "iops-total=6,group=g"]);
        assert!(different.unwrap_err().contains("two different limits"));
        assert!(checked(&["", "", "", ""]).unwrap_err().contains("4 times for 3 images"));
    }
}
