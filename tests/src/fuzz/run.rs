//! Runs a target over its corpus and then over seeded mutations of it, for a bounded time.
//!
//! `SLOTGRAPH_FUZZ_SEED` (default 1) and `SLOTGRAPH_FUZZ_SECONDS` (default 1) set the run; `SLOTGRAPH_FUZZ_INPUT` runs one number of it alone.
//! A failure prints seed, number and input. The number that runs is in `fuzz-TARGET` in the temporary folder of the build, for a target that
//! takes the process down.

use super::{Target, mutate};
use std::fs;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// No input may take longer, on a machine that does other things too.
const ONE_INPUT: Duration = Duration::from_secs(5);
/// Address space that a run may come to need beyond what it had: what parsers may allocate, and what threads beside it do.
const GROWTH_KIB: u64 = 1 << 20;

/// The committed inputs of a target.
pub fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder = crate::root().join("tests/fuzz/corpora").join(name);
    let mut files: Vec<PathBuf> =
        fs::read_dir(&folder).expect("every target has a corpus").map(|entry| entry.expect("a file").path()).collect();
    files.sort();
    files.iter().map(|file| fs::read(file).expect("a corpus file")).collect()
}

/// How many mutated inputs were run.
pub fn run(name: &str, target: Target, scratch: &Path) -> u64 {
    let number = |variable: &str, default: u64| match std::env::var(variable) {
        Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable}={text} is not a number")),
        Err(_) => default,
    };
    let seed = number("SLOTGRAPH_FUZZ_SEED", 1);
    let time = Duration::from_secs(number("SLOTGRAPH_FUZZ_SECONDS", 1));
    let corpus = corpus(name);
    assert!(!corpus.is_empty(), "{name} has no corpus");
    let label = |at: u64| format!("{name}: SLOTGRAPH_FUZZ_SEED={seed} SLOTGRAPH_FUZZ_INPUT={at}");
    if std::env::var_os("SLOTGRAPH_FUZZ_INPUT").is_some() {
        let at = number("SLOTGRAPH_FUZZ_INPUT", 0);
        check(&label(at), target, &mutate::input(&corpus, seed, at));
        return 1;
    }
    for (at, input) in corpus.iter().enumerate() {
        check(&format!("{name}: corpus file {at}"), target, input);
    }
    let peak = peak_kib();
    let now = fs::File::create(scratch.join(format!("fuzz-{name}"))).expect("a scratch file");
    let began = Instant::now();
    let mut at = 0;
    while began.elapsed() < time {
        now.write_all_at(format!("{:<80}", label(at)).as_bytes(), 0).expect("a scratch file");
        check(&label(at), target, &mutate::input(&corpus, seed, at));
        if at.is_multiple_of(64) {
            let grown = peak_kib().saturating_sub(peak);
            assert!(
                grown <= GROWTH_KIB,
                "{}, the 63 before it, or a target beside it, needed {grown} KiB more",
                label(at)
            );
        }
        at += 1;
    }
    at
}

fn check(label: &str, target: Target, input: &[u8]) {
    let began = Instant::now();
    let outcome = catch_unwind(AssertUnwindSafe(|| target(input)));
    let took = began.elapsed();
    if outcome.is_err() || took > ONE_INPUT {
        eprintln!("{label} ({} bytes, {took:?}): {}", input.len(), input.escape_ascii());
    }
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
    assert!(took <= ONE_INPUT, "{label} took {took:?}");
}

/// The largest address space that the process has had, in KiB.
fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("procfs");
    let line = status.lines().find(|line| line.starts_with("VmPeak:")).expect("VmPeak");
    line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
}
