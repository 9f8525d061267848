//! The search over folders made for the purpose.

use super::*;
use std::collections::HashMap;
use std::os::unix::fs::PermissionsExt;
use tempfile::TempDir;

/// Some real shared object, under another name, so that opening it succeeds.
fn place(folder: &Path, name: &str) -> PathBuf {
    std::fs::create_dir_all(folder).unwrap();
    let real = Library::open(Path::new("libm.so.6")).unwrap().file_of(c"cos").unwrap();
    let path = folder.join(name);
    std::fs::copy(real, &path).unwrap();
    path
}

/// A library that libm can play.
static FAKE: LibrarySpec = LibrarySpec {
    title: "a library of the tests",
    files: &["libfake.so.13", "libfake.so.12"],
    symbol: c"cos",
    before: &["libfake-builtins.so."],
    remedy: "write one",
};

fn search(root: &TempDir, lib_dirs: &[PathBuf], variables: &[(&str, PathBuf)]) -> Search {
    let mut map: HashMap<String, OsString> =
        variables.iter().map(|(name, value)| ((*name).to_owned(), value.clone().into_os_string())).collect();
    map.entry("PATH".into()).or_insert_with(|| root.path().join("empty").into_os_string());
    Search::with_environment(lib_dirs, |name| map.get(name).cloned())
}

#[test]
fn the_flag_comes_before_variables_and_toolkits() {
    let root = TempDir::new().unwrap();
    let folder = |name: &str| root.path().join(name);
    let flag = place(&folder("flag"), "libfake.so.12");
    let variable = place(&folder("variable"), "libfake.so.13");
    let path = place(&folder("ld"), "libfake.so.13");
    let home = place(&folder("home/lib64"), "libfake.so.13");
    let variables =
        [("SLOTGRAPH_LIB_DIR", folder("variable")), ("LD_LIBRARY_PATH", folder("ld")), ("CUDA_HOME", folder("home"))];
    let found = search(&root, &[folder("flag")], &variables).toolkit(&FAKE).unwrap();
    assert_eq!((found.path, found.why.as_str()), (flag, "--lib-dir"));
    let found = search(&root, &[], &variables).toolkit(&FAKE).unwrap();
    assert_eq!((found.path, found.why.as_str()), (variable, "SLOTGRAPH_LIB_DIR"));
    let found = search(&root, &[], &variables[1..]).toolkit(&FAKE).unwrap();
    assert_eq!((found.path, found.why.as_str()), (path, "LD_LIBRARY_PATH"));
    let found = search(&root, &[], &variables[2..]).toolkit(&FAKE).unwrap();
    assert_eq!((found.path, found.why.as_str()), (home, "CUDA_HOME"));
}

#[test]
fn the_better_name_wins_inside_a_folder() {
    let root = TempDir::new().unwrap();
    place(root.path(), "libfake.so.12");
    let best = place(root.path(), "libfake.so.13");
    let found = search(&root, &[root.path().to_path_buf()], &[]).toolkit(&FAKE).unwrap();
    assert_eq!(found.path, best);
}

#[test]
fn a_file_that_does_not_open_is_passed_over_and_named() {
    let root = TempDir::new().unwrap();
    let (bad, good) = (root.path().join("bad"), root.path().join("good"));
    std::fs::create_dir_all(&bad).unwrap();
    std::fs::write(bad.join("libfake.so.13"), b"not an ELF file").unwrap();
    let path = place(&good, "libfake.so.13");
    let found = search(&root, &[bad.clone(), good], &[]).toolkit(&FAKE).unwrap();
    assert_eq!(found.path, path);
    let error = search(&root, std::slice::from_ref(&bad), &[]).toolkit(&FAKE).unwrap_err().to_string();
    assert!(error.contains(&bad.join("libfake.so.13").display().to_string()), "{error}");
}

#[test]
fn companions_of_the_folder_are_opened_first_and_the_alternative_pair_is_left_alone() {
    let root = TempDir::new().unwrap();
    let library = place(root.path(), "libfake.so.13");
    let builtins = place(root.path(), "libfake-builtins.so.13.0");
    place(root.path(), "libfake-builtins.alt.so.13.0");
    assert_eq!(companions(&library, FAKE.before), [builtins]);
}

#[test]
fn wheels_are_found_through_the_interpreters_sys_path() {
    let root = TempDir::new().unwrap();
    let site = root.path().join("site");
    let old = place(&site.join("nvidia/cuda_fake/lib"), "libfake.so.12");
    let new = place(&site.join("nvidia/cu13/lib"), "libfake.so.13");
    let bin = root.path().join("bin");
    std::fs::create_dir_all(&bin).unwrap();
    let python = bin.join("python3");
    std::fs::write(&python, format!("#!/bin/sh\necho\necho {}\n", site.display())).unwrap();
    std::fs::set_permissions(&python, std::fs::Permissions::from_mode(0o755)).unwrap();
    let mut search = search(&root, &[], &[("PATH", bin)]);
    let found = search.toolkit(&FAKE).unwrap();
    assert_eq!(found.path, new, "the newer library wins, whatever its folder is called");
    assert!(found.why.contains("wheels of"), "{}", found.why);
    std::fs::remove_file(new).unwrap();
    assert_eq!(search.toolkit(&FAKE).unwrap().path, old);
}

#[test]
fn a_missing_library_is_reported_with_every_place_and_the_flag() {
    let root = TempDir::new().unwrap();
    let variables = [("LD_LIBRARY_PATH", root.path().join("ld")), ("CUDA_PATH", root.path().join("cuda"))];
    let error = search(&root, &[root.path().join("flag")], &variables).toolkit(&FAKE).unwrap_err().to_string();
    for part in
        ["libfake.so.13", "flag (--lib-dir)", "ld (LD_LIBRARY_PATH)", "cuda/lib64 (CUDA_PATH)", "/usr/local/cuda"]
    {
        assert!(error.contains(part), "{part} is not in: {error}");
    }
    assert!(error.ends_with("write one; or give its folder with --lib-dir"), "{error}");
}

#[test]
fn the_driver_is_never_taken_from_a_toolkit() {
    let root = TempDir::new().unwrap();
    place(&root.path().join("cuda/lib64/stubs"), "libcuda.so.1");
    let stubs = root.path().join("cuda/lib64/stubs");
    let mut search = search(&root, &[], &[("LD_LIBRARY_PATH", stubs.clone()), ("CUDA_HOME", root.path().join("cuda"))]);
    match search.driver() {
        Ok(found) => assert!(!found.path.starts_with(root.path()), "{}", found.path.display()),
        Err(error) => {
            let text = error.to_string();
            assert!(text.starts_with("libcuda.so.1 (the NVIDIA driver) was not found; looked by name"), "{text}");
            assert!(text.contains("/usr/local/nvidia/lib64"), "{text}");
            assert!(text.contains("--device cpu"), "{text}");
            assert!(!text.contains("stubs"), "{text}");
        }
    }
}
