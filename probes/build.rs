//! Embeds what the binary was built from: the commit, whether the tree differed from it, and the compiler.
//! Reruns when git's state or any source of the workspace changes, so that a stale answer cannot be embedded.

use std::path::Path;
use std::process::Command;

fn main() {
    for path in ["HEAD", "index", "logs/HEAD"] {
        if let Some(file) = output("git", &["rev-parse", "--git-path", path]) {
            println!("cargo::rerun-if-changed={file}");
        }
    }
    for path in ["kernels", "graphs", "runtime", "server", "probes", "tests", "Cargo.toml", "Cargo.lock"] {
        let path = format!("../{path}");
        if Path::new(&path).exists() {
            println!("cargo::rerun-if-changed={path}");
        }
    }
    let commit = output("git", &["rev-parse", "HEAD"]).unwrap_or_else(|| "unknown".into());
    let dirty = output("git", &["status", "--porcelain"]).is_none_or(|changes| !changes.is_empty());
    let rustc = std::env::var("RUSTC").ok().and_then(|rustc| output(&rustc, &["--version"])).unwrap_or_default();
    println!("cargo::rustc-env=SLOTGRAPH_COMMIT={commit}");
    println!("cargo::rustc-env=SLOTGRAPH_DIRTY={dirty}");
    println!("cargo::rustc-env=SLOTGRAPH_RUSTC={rustc}");
}

/// The trimmed standard output of a command that succeeded.
fn output(program: &str, args: &[&str]) -> Option<String> {
    let run = Command::new(program).args(args).output().ok()?;
    run.status.success().then(|| String::from_utf8_lossy(&run.stdout).trim().to_string())
}
