//! `--add-fd`: descriptors of images, for sets that are opened as `/dev/fdset/N`.

use super::handed_in::HandedIn;
use crate::failure::Failure;
use crate::options;
use isobath_storage_file::descriptor_sets;

/// The value of `--add-fd`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AddFd {
    pub(crate) descriptors: HandedIn,
    set: u64,
    opaque: Option<String>,
}

/// Parses `fd=N,set=M[,opaque=TEXT]`.
///
/// # Errors
/// Something is missing, or is none of these.
pub(crate) fn parse(text: &str) -> Result<AddFd, String> {
    let (mut descriptors, mut set, mut opaque) = (None, None, None);
    for (name, value) in options::parse(&[text.to_owned()]) {
        match &*name {
            "fd" => descriptors = Some(value.parse()?),
            "set" => {
                let number = value.parse::<u64>();
                set = Some(number.map_err(|_| format!("set={value}: expected a number"))?);
            }
            "opaque" => opaque = Some(value),
            other => return Err(format!("expected fd=, set= or opaque=, not '{other}='")),
        }
    }
    let descriptors = descriptors.ok_or("missing fd=N, the descriptor")?;
    let set = set.ok_or("missing set=M, the number of the descriptor set")?;
    Ok(AddFd { descriptors, set, opaque })
}

impl AddFd {
    /// Adds the descriptors to their set.
    ///
    /// # Errors
    /// There are none, or too many.
    pub(crate) fn add(&self) -> Result<(), Failure> {
        for number in self.descriptors.numbers()? {
            let file = HandedIn::Number(number).take()?;
            let counted = isobath_storage_file::HandedIn::new(file);
            let counted = counted.map_err(|error| Failure::new(error).context("--add-fd"))?;
            let _ = descriptor_sets::add(counted, Some(self.set), self.opaque.clone(), true);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_and_its_set_are_needed() {
        let parsed = parse("fd=vm,set=2,opaque=rw:/disks/vm").unwrap();
        let descriptors = HandedIn::Name("vm".into());
        assert_eq!(parsed, AddFd { descriptors, set: 2, opaque: Some("rw:/disks/vm".into()) });
        for text in
            ["", "fd=3", "set=1", "fd=3,set=-1", "fd=3,set=x", "fd=1,set=1", "fd=3,set=1,x=y"]
        {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
