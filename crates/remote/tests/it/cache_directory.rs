//! Only a directory that was made for it is a cache, and only what a cache has written is ever removed.

use crate::cache::{Layer, names, open, open_within, tidy};
use isobath_remote::BLOCK;
use isobath_remote::cache::{Cache, LEAST_LIMIT};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};

fn refused(path: &Path) -> String {
    Cache::open(path, LEAST_LIMIT).unwrap_err().to_string()
}

/// All files below a directory, with what is in them.
fn all(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for name in names(directory) {
        let path = directory.join(name);
        if path.is_dir() {
            found.extend(all(&path));
        } else {
            found.push((path.clone(), fs::read(&path).unwrap()));
        }
    }
    found.sort();
    found
}

#[test]
fn a_directory_with_anything_in_it_does_not_become_a_cache() {
    let digest = "a".repeat(64);
    let of_others = [
        "manifests/vm.json".to_owned(),
        format!("layers/{digest}"),
        format!("manifests/{digest}"),
        format!("layers/.tmp-{}", &digest[..32]),
        "usage".to_owned(),
        ".hidden".to_owned(),
    ];
    for file in &of_others {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, vec![1; 17 << 20]).unwrap();
        let before = all(directory.path());
        let error = refused(directory.path());
        assert!(error.contains("not empty") && error.contains("isobath-cache"), "{file}: {error}");
        assert!(all(directory.path()) == before, "{file}");
        assert_eq!(names(directory.path()).len(), 1, "{file}");
    }
    // An empty directory and one that does not exist become one, and stay one.
    let directory = tempfile::tempdir().unwrap();
    for path in [directory.path().join("new"), directory.path().join("empty")] {
        if path.ends_with("empty") {
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o700)).unwrap();
        }
        drop(open(&path));
        assert!(names(&path).contains(&"isobath-cache".to_owned()));
        drop(open(&path));
        // What a cache has without its mark is none.
        fs::remove_file(path.join("isobath-cache")).unwrap();
        assert!(refused(&path).contains("not empty"));
        fs::create_dir(path.join("isobath-cache")).unwrap();
        assert!(refused(&path).contains("isobath-cache"));
    }
}

#[test]
fn files_that_a_cache_has_not_named_are_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    drop(open(directory.path()));
    let digest = "a".repeat(64);
    let of_others = [
        "notes".to_owned(),
        ".tmp-mine".to_owned(),
        format!(".tmp-{}", &digest[..32]),
        format!("layers/.tmp-{}", &digest[..32]),
        format!("layers/{digest}"),
        format!("layers/{digest}.data"),
        format!("layers/{digest}-7-{digest}-{}.data", "g".repeat(32)),
        format!("layers/{digest}-7-{digest}-{}.data", "A".repeat(32)),
        format!("objects/{digest}"),
        format!("objects/other-{digest}"),
        format!("objects/table-{}", &digest[..63]),
        "manifests/vm.json".to_owned(),
        format!("manifests/{}", digest.to_uppercase()),
        format!("manifests/.tmp-{}", &digest[..32]),
    ];
    for file in &of_others {
        fs::write(directory.path().join(file), vec![1; 3 << 20]).unwrap();
    }
    let cache = open_within(directory.path(), LEAST_LIMIT);
    let of_store = Layer::new(1, BLOCK);
    of_store.open(&cache);
    tidy(&cache);
    for file in &of_others {
        assert_eq!(fs::metadata(directory.path().join(file)).unwrap().len(), 3 << 20, "{file}");
    }
}

#[test]
fn a_link_to_a_directory_is_not_followed() {
    let directory = tempfile::tempdir().unwrap();
    let (home, link) = (directory.path().join("home"), directory.path().join("link"));
    drop(open(&home));
    symlink(&home, &link).unwrap();
    for path in [link.clone(), link.join(""), link.join(".")] {
        let error = refused(&path);
        assert!(error.contains("symbolic link"), "{error}");
    }
}
