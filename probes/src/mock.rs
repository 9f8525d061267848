//! A mock driver for the tests of probes that look inside a GPU: its kernels do nothing but publish their step.
//!
//! A loaded driver stays loaded, so each such test starts itself again, by name, in a process that finds the mock's folder prepared.

use crate::subject::Subject;
use slotgraph_graphs::model;
use slotgraph_graphs::plan::RankShape;
use slotgraph_graphs::spec::ModelSpec;
use slotgraph_graphs::step::StepLimits;
use slotgraph_kernels::launch::{Arg, GpuFacts, Launch, stamp};
use slotgraph_kernels::{Op, pack};
use slotgraph_runtime::checkpoint::{Checkpoint, Folder, LoadFormat};
use slotgraph_runtime::config::{Config, Machine, Settings};
use slotgraph_server::demo;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Set in the child: the folder of the mock.
const FOLDER: &str = "SLOTGRAPH_MOCK_FOLDER";

/// Runs `body` with the folder of a mock that knows the kernels of these plans. `test` is the path of the test.
pub fn with_mock(test: &str, spec: &ModelSpec, limits: &StepLimits, extra: &str, body: impl FnOnce(&Path)) {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return body(&PathBuf::from(folder));
    }
    let folder = tempfile::TempDir::new().expect("the test can set up its mock driver");
    let itself = std::env::current_exe().expect("the test can set up its mock driver");
    let library = itself.parent().expect("the test can set up its mock driver").join("libmockcuda.so");
    for file in ["libcuda.so.1", "libnvrtc.so.13"] {
        std::fs::copy(&library, folder.path().join(file)).expect("the test can set up its mock driver");
    }
    std::fs::write(folder.path().join("mockcuda.conf"), configuration(spec, limits) + extra)
        .expect("the test can set up its mock driver");
    let child = Command::new(&itself)
        .args(["--exact", test, "--nocapture"])
        .env(FOLDER, folder.path())
        .output()
        .expect("the test can set up its mock driver");
    let text = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
}

/// The bundled model on the mock, configured as `change` says; `test` is the path of the test.
pub fn with_subject(test: &str, change: impl FnOnce(&mut Settings), body: impl FnOnce(&Subject)) {
    let folder = std::env::var_os(FOLDER).map(PathBuf::from);
    let mut settings = Settings {
        device: Some("cuda".into()),
        max_slots: Some(8),
        kv_pages: Some(8 * 32 + 1),
        prefill_chunk: Some(16),
        lib_dir: folder.clone(),
        ..Settings::default()
    };
    change(&mut settings);
    let demo = Folder::Embedded { name: demo::NAME, files: demo::FILES };
    let checkpoint = Checkpoint::load(demo, LoadFormat::Safetensors).expect("the test can set up its mock driver");
    let machine = Machine { gpus: 1, processors: 2 };
    // The folder is there only in the child.
    let config = Config::resolve(&settings, &checkpoint.spec, &checkpoint.name, machine)
        .expect("the test can set up its mock driver");
    let limits = config.limits(config.fixed_pages().expect("the test can set up its mock driver"));
    let subject = Subject { checkpoint, config };
    with_mock(test, &subject.checkpoint.spec, &limits, "", |_| body(&subject));
}

/// The kernels of the plans, as the mock must know them.
fn configuration(spec: &ModelSpec, limits: &StepLimits) -> String {
    let mut text = String::from("memory 2147483648\n");
    let mut seen = BTreeSet::new();
    let mut declare = |launch: &Launch| {
        if seen.insert(launch.kernel.function) {
            write!(text, "function {}", launch.kernel.function).expect("the test can set up its mock driver");
            for arg in &launch.args {
                write!(text, " {}", if matches!(arg, Arg::U32(_)) { 4 } else { 8 })
                    .expect("the test can set up its mock driver");
            }
            text.push('\n');
        }
    };
    declare(&stamp(0));
    let mut publish = String::new();
    for &bucket in &limits.buckets {
        let plan = model::build(spec, limits, RankShape::SINGLE, bucket).expect("the test can set up its mock driver");
        for weight in &plan.weights {
            pack::launch(&weight.form, 0..1).iter().for_each(&mut declare);
        }
        declare(&pack::dummy_launch(&plan.weights[0].parts[0], 0, 1));
        for (placed, next) in plan.ops_with_next() {
            let launches =
                placed.op.launches(next, &plan, &GpuFacts::h200()).expect("the test can set up its mock driver");
            launches.iter().for_each(&mut declare);
            if let Op::Feed(feed) = &placed.op {
                let last = launches.last().expect("the test can set up its mock driver");
                let at = |id| {
                    last.args
                        .iter()
                        .position(|arg| *arg == Arg::Buffer(id))
                        .expect("the test can set up its mock driver")
                };
                let (counter, ring) = (at(feed.step_counter), at(feed.output_ring));
                let (entries, words) = (limits.ring_entries(), limits.entry_layout().output_words());
                publish = format!("publish {} {counter} {ring} {entries} {words}\n", last.kernel.function);
            }
        }
    }
    text + &publish
}
