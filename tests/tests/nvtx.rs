//! Ranges, as a profiler would receive them: through an injection library in a process of its own.

use slotgraph_graphs::cuda::nvtx;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Set in the process that opens the ranges.
const CHILD: &str = "SLOTGRAPH_NVTX_CHILD";

/// The injection library, which cargo built beside this test.
fn injection() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let library = test.parent().unwrap().join("libnvtxinj.so");
    assert!(library.is_file(), "{} was not built", library.display());
    library
}

/// Runs `child_opens_ranges` alone in a new process and gives the library's report.
fn report(folder: &Path, variables: &[(&str, &Path)]) -> String {
    let out = folder.join("report");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child_opens_ranges", "--test-threads=1", "--nocapture"]);
    command.env_remove("NVTX_INJECTION64_PATH").env(CHILD, "1").env("NVTXINJ_OUT", &out);
    for (name, value) in variables {
        command.env(name, value);
    }
    assert!(command.status().unwrap().success());
    std::fs::read_to_string(&out).unwrap_or_default()
}

#[test]
fn child_opens_ranges() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    assert_eq!(nvtx::is_on(), std::env::var_os("NVTX_INJECTION64_PATH").is_some());
    let _prepare = nvtx::range("prepare");
    for bucket in [1, 2, 2] {
        let _capture = nvtx::range(format_args!("capture/b{bucket}"));
        drop(nvtx::range("settle"));
    }
    std::thread::spawn(|| drop(nvtx::range("sweep"))).join().unwrap();
}

#[test]
fn a_tool_receives_pushes_and_pops_with_their_names_and_nothing_else() {
    let folder = tempfile::TempDir::new().unwrap();
    let report = report(folder.path(), &[("NVTX_INJECTION64_PATH", &injection())]);
    let mut lines = report.lines();
    assert_eq!(lines.next(), Some("push 8 pop 8 other 0 unbalanced 0"), "{report}");
    let names: Vec<&str> = lines.collect();
    let want = [
        "1 slotgraph:capture/b1",
        "2 slotgraph:capture/b2",
        "1 slotgraph:prepare",
        "3 slotgraph:settle",
        "1 slotgraph:sweep",
    ];
    assert_eq!(names, want);
}

#[test]
fn without_a_tool_nothing_is_sent() {
    let folder = tempfile::TempDir::new().unwrap();
    assert_eq!(report(folder.path(), &[]), "");
}
