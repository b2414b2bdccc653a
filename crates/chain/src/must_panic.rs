//! Violations of invariants, in tests.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Fails unless this panics with a message that contains `what`.
pub(crate) fn must_panic<T>(change: impl FnOnce() -> T, what: &str) {
    let caught = catch_unwind(AssertUnwindSafe(|| drop(change())));
    let panic = caught.expect_err(what);
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains(what), "{what}: {text}");
}
