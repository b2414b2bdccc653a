//! Names of certificates.

use isobath_tls::distinguished_name;

/// A distinguished name: its text is bounded, and has no control character that was not in a value.
pub fn tls_name(input: &[u8]) {
    let Some(name) = distinguished_name(input) else { return };
    // A number of an attribute may have many digits, and a byte two.
    assert!(name.len() <= 16 + input.len() * 20);
    if input.iter().all(|byte| *byte != 0) {
        assert!(!name.contains('\0'));
    }
    // Each set is an attribute at least.
    assert_eq!(name.is_empty(), input.is_empty());
}
