//! What tests of invariants share.

use crate::{DiskError, Result};
use isobath_sync::Invariants;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A structure is sound, and after a change it violates the invariant `what`.
#[track_caller]
pub(crate) fn assert_violated<T: Invariants>(
    what: &str,
    mut structure: T,
    change: impl FnOnce(&mut T),
) {
    structure.check_invariants();
    change(&mut structure);
    let checked = catch_unwind(AssertUnwindSafe(|| structure.check_invariants()));
    let panic = checked.expect_err(what);
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains(what), "{what}: {text}");
}

/// Fails unless a request violates the invariant `what`, and returns it as its error.
#[track_caller]
pub(crate) fn must_violate<T: Debug>(done: Result<T>, what: &str) {
    match done {
        Err(DiskError::Internal { violated, .. }) => assert_eq!(violated, what),
        other => panic!("{other:?} although not: {what}"),
    }
}
