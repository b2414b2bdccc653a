//! What the README says of the library's dependencies.

use std::collections::BTreeSet;
use std::process::Command;

#[test]
fn the_readme_counts_the_packages_that_it_needs() {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let tree = [
        "tree",
        "--locked",
        "--offline",
        "--package",
        "isobath",
        "--edges",
        "normal",
        "--prefix",
        "none",
    ];
    let tree = Command::new(cargo).args(tree).output().unwrap();
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    let tree = String::from_utf8(tree.stdout).unwrap();
    // Name and version; of the project's own, a directory too.
    let packages = tree.lines().filter(|line| !line.is_empty() && !line.starts_with("isobath"));
    let packages: BTreeSet<_> = packages.map(|line| line.trim_end_matches(" (*)")).collect();
    let named = format!("it needs {} packages of others", packages.len());
    assert!(include_str!("../../README.md").contains(&named), "{named}: {packages:?}");
}
