//! The device over a mock driver: start-up, capture, audit and rings, and in `failure_tests` what goes wrong, on a machine without a GPU.
//!
//! Each test runs in a process of its own, since a loaded driver stays loaded: the test starts itself again by name, and there
//! finds the mock's folder prepared. Kernels do nothing there but publish their step, so these tests say nothing of numbers.

use super::*;
use crate::device::{Device, DeviceError};
use crate::exchange::MemoryExchange;
use crate::meeting::Meeting;
use crate::plan::RankShape;
use crate::source::{DummySpec, Source, SourceError, group_extents};
use crate::step::{StepInput, StepLimits, StepOutput};
use crate::{model, samples};
use slotgraph_kernels::launch::{Arg, GpuFacts, Launch, stamp};
use slotgraph_kernels::{Op, WeightSpec, pack};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

mod failure_tests;

/// Set in the child: the folder of the mock.
pub(super) const FOLDER: &str = "SLOTGRAPH_MOCK_FOLDER";

/// A source that fills every row with its number and remembers what was asked.
#[derive(Default)]
pub(super) struct Rows {
    asked: Mutex<Vec<(String, usize, Range<usize>)>>,
    fails: Option<&'static str>,
    panics: Option<&'static str>,
    dummy: bool,
}

impl Source for Rows {
    fn read_rows(
        &self,
        spec: &WeightSpec,
        group: usize,
        rows: Range<usize>,
        out: &mut [u16],
    ) -> Result<(), SourceError> {
        assert_eq!(out.len(), rows.len() * group_extents(&spec.form).1);
        assert_ne!(self.panics, Some(spec.name.as_str()), "planted");
        if self.fails == Some(spec.name.as_str()) {
            return Err(SourceError { weight: spec.name.clone(), reason: "the disk is on fire".into() });
        }
        out.fill(1);
        self.asked.lock().unwrap().push((spec.name.clone(), group, rows));
        Ok(())
    }
    fn dummy(&self) -> Option<DummySpec> {
        self.dummy.then_some(DummySpec { seed: 7 })
    }
}

pub(super) fn options() -> CudaOptions {
    CudaOptions {
        lib_dirs: vec![PathBuf::from(std::env::var_os(FOLDER).unwrap())],
        cache: Cache::off(),
        kv: KvMemory::Pages(5),
        ..CudaOptions::new(samples::deepseek_on_cuda(), samples::limits(), Arc::new(Rows::default()))
    }
}

/// Runs `body` in a process that has the mock, for one of `ranks` ranks, with `extra` lines of its configuration.
fn with_mock(name: &str, ranks: usize, extra: &str, body: impl FnOnce()) {
    if std::env::var_os(FOLDER).is_some() {
        return body();
    }
    let folder = mock_folder(ranks, &samples::limits(), extra);
    run_child(
        &format!("cuda::mock_tests::{name}"),
        Command::new(std::env::current_exe().unwrap()).env(FOLDER, folder.path()),
    );
}

pub(super) fn mock_folder(ranks: usize, limits: &StepLimits, extra: &str) -> tempfile::TempDir {
    let folder = tempfile::TempDir::new().unwrap();
    for file in ["libcuda.so.1", "libnvrtc.so.13"] {
        std::fs::copy(built("libmockcuda.so"), folder.path().join(file)).unwrap();
    }
    std::fs::write(folder.path().join("mockcuda.conf"), configuration(RankShape { rank: 0, ranks }, limits) + extra)
        .unwrap();
    folder
}

/// A library that cargo built beside this test.
pub(super) fn built(name: &str) -> PathBuf {
    std::env::current_exe().unwrap().with_file_name(name)
}

pub(super) fn run_child(test: &str, command: &mut Command) {
    let child = command.args(["--exact", test, "--nocapture"]).output().unwrap();
    let text = String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
}

/// The kernels of the sample model, as the mock must know them.
fn configuration(rank: RankShape, limits: &StepLimits) -> String {
    let mut text = String::from("memory 268435456\n");
    let mut seen = BTreeSet::new();
    let mut declare = |launch: &Launch| {
        if seen.insert(launch.kernel.function) {
            write!(text, "function {}", launch.kernel.function).unwrap();
            for arg in &launch.args {
                write!(text, " {}", if matches!(arg, Arg::U32(_)) { 4 } else { 8 }).unwrap();
            }
            text.push('\n');
        }
    };
    let mut publish = String::new();
    let spec = samples::deepseek_on_cuda();
    for bucket in &limits.buckets {
        let plan = model::build(&spec, limits, rank, *bucket).unwrap();
        for weight in &plan.weights {
            pack::launch(&weight.form, 0..1).iter().for_each(&mut declare);
        }
        declare(&pack::dummy_launch(&plan.weights[0].parts[0], 0, 1));
        declare(&stamp(0));
        for (placed, next) in plan.ops_with_next() {
            let facts = GpuFacts::h200();
            let launches = placed.op.launches(next, &plan, &facts).unwrap();
            launches.iter().for_each(&mut declare);
            placed.op.launches_over_peers(next, &plan, &facts).unwrap().iter().for_each(&mut declare);
            if let Op::Feed(feed) = &placed.op {
                let last = launches.last().unwrap();
                let at = |id| last.args.iter().position(|arg| *arg == Arg::Buffer(id)).unwrap();
                let (counter, ring) = (at(feed.step_counter), at(feed.output_ring));
                let (entries, words) = (limits.ring_entries(), limits.entry_layout().output_words());
                publish = format!("publish {} {counter} {ring} {entries} {words}\n", last.kernel.function);
            }
        }
    }
    text += &format!("exchange exchange {}\n", spec.hidden);
    text + &publish
}

fn prepare_error(options: CudaOptions) -> String {
    match CudaDevice::prepare(options) {
        Ok(_) => panic!("it prepared"),
        Err(error) => error.to_string(),
    }
}

pub(super) fn step(step: u64, bucket: usize) -> StepInput {
    StepInput { step, bucket, ..StepInput::default() }
}

#[test]
fn every_bucket_is_captured_and_steps_settle_in_order() {
    with_mock("every_bucket_is_captured_and_steps_settle_in_order", 1, "", || {
        let mut device = CudaDevice::prepare(options()).unwrap();
        let buckets = samples::limits().buckets;
        let report = device.report().clone();
        assert_eq!(report.graphs.iter().map(|graph| graph.bucket).collect::<Vec<_>>(), buckets);
        for graph in &report.graphs {
            let launches = device.nodes(graph.bucket).unwrap().len();
            assert_eq!((graph.audit.kernels, graph.audit.nodes, graph.edges), (launches, launches, launches - 1));
            assert!(graph.programmatic_edges > 0 && graph.programmatic_edges < launches);
            assert!(graph.audit.pointers_checked > launches && graph.audit.pointers_unregistered == 0);
            assert_eq!(device.recheck(graph.bucket).unwrap().digest, graph.audit.digest);
        }
        assert_eq!((device.limits().pages, report.memory.pages), (5, 5));
        assert!(report.modules.units > 0 && report.modules.cached == 0);
        assert!(report.memory.weights > 0 && report.memory.arena.kv > 0 && report.memory.graphs > 0);

        let before = device.counters();
        let mut output = StepOutput::default();
        for number in 1..=20 {
            let bucket = buckets[number as usize % buckets.len()];
            device.enqueue(&step(number, bucket)).unwrap();
            assert_eq!(device.in_flight(), 1);
            assert!(device.poll(&mut output).unwrap());
            assert_eq!((output.step, output.records.len(), device.in_flight()), (number, 0, 0));
        }
        assert_eq!(device.counters(), Counters { replays: before.replays + 20, ..before }, "a step only replays");
        let facts = device.facts();
        assert_eq!(facts.buckets.iter().map(|bucket| bucket.replays).sum::<u64>(), 20);
        assert_eq!((facts.kind.as_str(), facts.mode.as_str()), ("cuda", "graph"));
    });
}

#[test]
fn an_eager_device_launches_what_a_graph_holds() {
    with_mock("an_eager_device_launches_what_a_graph_holds", 1, "", || {
        let mut device = CudaDevice::prepare(CudaOptions { graph: false, ..options() }).unwrap();
        assert!(device.report().graphs.is_empty());
        let before = device.counters();
        let mut output = StepOutput::default();
        device.enqueue(&step(1, 4)).unwrap();
        assert!(device.wait(&mut output).unwrap());
        let launches = device.facts().buckets[2].nodes as u64;
        assert_eq!(device.counters(), Counters { launches: before.launches + launches, ..before });
        assert!(device.nodes(4).is_err());
    });
}

#[test]
fn the_ring_and_the_order_are_enforced() {
    with_mock("the_ring_and_the_order_are_enforced", 1, "", || {
        let mut device = CudaDevice::prepare(options()).unwrap();
        let mut output = StepOutput::default();
        assert!(!device.poll(&mut output).unwrap() && !device.wait(&mut output).unwrap());
        assert!(matches!(device.enqueue(&step(2, 1)), Err(DeviceError::OutOfOrder { expected: 1, got: 2 })));
        assert!(matches!(device.enqueue(&step(1, 3)), Err(DeviceError::NoBucket { bucket: 3, .. })));
        device.enqueue(&step(1, 1)).unwrap();
        device.enqueue(&step(2, 2)).unwrap();
        assert!(matches!(device.enqueue(&step(3, 1)), Err(DeviceError::RingFull { in_flight: 2, max: 2, .. })));
        assert!(device.poll(&mut output).unwrap() && output.step == 1);
        device.enqueue(&step(3, 1)).unwrap();
        assert!(device.poll(&mut output).unwrap() && output.step == 2);
        assert!(device.poll(&mut output).unwrap() && output.step == 3);
    });
}

#[test]
fn weights_are_read_once_each_and_dummies_are_made() {
    with_mock("weights_are_read_once_each_and_dummies_are_made", 1, "", || {
        let source = Arc::new(Rows::default());
        let device = CudaDevice::prepare(CudaOptions { source: source.clone(), ..options() }).unwrap();
        let mut asked = std::mem::take(&mut *source.asked.lock().unwrap());
        asked.sort_by(|a, b| (&a.0, a.1, a.2.start).cmp(&(&b.0, b.1, b.2.start)));
        let plan = device.plan(1).unwrap();
        let mut want: Vec<(String, usize, Range<usize>)> = Vec::new();
        for spec in plan.weights.iter().filter(|spec| group_extents(&spec.form).0 > 0) {
            want.extend(
                (0..pack::groups(&spec.form)).map(|group| (spec.name.clone(), group, 0..group_extents(&spec.form).0)),
            );
        }
        want.sort_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
        assert_eq!(asked, want);
        assert!(device.report().weights.read_bytes > 0 && !device.report().weights.dummy);
        drop(device);

        let source = Arc::new(Rows { dummy: true, ..Rows::default() });
        let device = CudaDevice::prepare(CudaOptions { source: source.clone(), ..options() }).unwrap();
        assert!(device.report().weights.dummy);
        let asked = source.asked.lock().unwrap();
        assert!(
            !asked.is_empty() && asked.iter().all(|(name, ..)| name.contains("norm")),
            "only vectors are read: {asked:?}"
        );
    });
}

#[test]
fn the_pool_takes_its_share_and_a_hopeless_one_is_refused() {
    with_mock("the_pool_takes_its_share_and_a_hopeless_one_is_refused", 1, "memory 1073741824\n", || {
        let fraction = KvMemory::Fraction { of_free: 0.9, ranks_on_device: 1 };
        let device = CudaDevice::prepare(CudaOptions { kv: fraction, ..options() }).unwrap();
        let limits = samples::limits();
        assert_eq!(device.limits().pages, limits.slots_max * limits.pages_per_slot + 1, "no more than the seats hold");
        drop(device);
        let error = prepare_error(CudaOptions { kv: KvMemory::Bytes(1), ..options() });
        assert!(error.contains("--kv-memory"), "{error}");
        let error = prepare_error(CudaOptions { kv: KvMemory::Pages(10_000_000), ..options() });
        assert!(error.contains("a pool of 10000000 pages"), "{error}");
    });
}

#[test]
fn probes_see_every_op_buffer_and_node() {
    with_mock("probes_see_every_op_buffer_and_node", 1, "", || {
        struct Watch(Vec<usize>, Vec<usize>);
        impl Observer for Watch {
            fn before(&mut self, at: OpAt<'_>, device: &CudaDevice) -> Result<Turn, CudaError> {
                for id in at.placed.op.reads() {
                    device.read_shaped(at.plan, id)?;
                }
                self.0.push(at.index);
                Ok(Turn::Launch)
            }
            fn after(&mut self, at: OpAt<'_>, _: &CudaDevice) -> Result<(), CudaError> {
                self.1.push(at.index);
                Ok(())
            }
        }
        let mut device = CudaDevice::prepare(options()).unwrap();
        let ops = device.plan(8).unwrap().ops.len();
        let mut watch = Watch(Vec::new(), Vec::new());
        let output = device.run_observed(&step(1, 8), &mut watch).unwrap();
        assert_eq!((output.step, &watch.0, &watch.1), (1, &(0..ops).collect(), &(0..ops).collect()));
        let (output, times) = device.time_ops(&step(2, 8)).unwrap();
        assert_eq!((output.step, times.len()), (2, ops));
        assert_eq!((times[0].op, times[ops - 1].op), ("fetch", "feed"));
        for (number, bucket) in [(3, 8), (4, 8), (5, 2)] {
            let (output, times) = device.time_nodes(&step(number, bucket)).unwrap();
            assert_eq!((output.step, times.ops.len()), (number, ops));
        }

        let nodes = device.nodes(8).unwrap();
        let ops_of_nodes: Vec<usize> = nodes.iter().filter_map(|node| Some(node.op?.0)).collect();
        assert!(ops_of_nodes.is_sorted() && ops_of_nodes.len() == nodes.len());
        assert_eq!(ops_of_nodes.iter().collect::<BTreeSet<_>>().len(), ops);
        assert!(nodes[0].after.is_empty() && nodes[1].after[0].0 == 0);

        device.write_buffer("x", 4, &[1, 2, 3, 4]).unwrap();
        assert_eq!(device.read_buffer("x", 2, 8).unwrap(), [0, 0, 1, 2, 3, 4, 0, 0]);
        let seats = samples::limits().slots_max + 1;
        assert_eq!(device.read_buffer("slot.ended", 0, 4 * seats).unwrap(), [1, 0, 0, 0].repeat(seats), "empty seats");
        assert!(matches!(device.read_buffer("nothing", 0, 1), Err(CudaError::NoBuffer(_))));
        assert!(matches!(device.write_buffer("x", usize::MAX, &[0]), Err(CudaError::OutOfBounds { .. })));
        assert!(matches!(device.write_buffer("ring.output", 0, &[0]), Err(CudaError::Unsupported(_))));
    });
}

#[test]
fn two_ranks_meet_on_the_host_and_refuse_graphs() {
    with_mock("two_ranks_meet_on_the_host_and_refuse_graphs", 2, "", || {
        let limit = Duration::from_secs(10);
        let transport = Transport::HostStaged(Meeting::new(2, limit), MemoryExchange::new(2, limit));
        let of_rank = |rank, graph| CudaOptions {
            rank: RankShape { rank, ranks: 2 },
            transport: transport.clone(),
            graph,
            ..options()
        };
        assert!(prepare_error(of_rank(0, true)).contains("--cuda-graph off"));
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let options = of_rank(rank, false);
                scope.spawn(move || {
                    let mut device = CudaDevice::prepare(options).unwrap();
                    let mut output = StepOutput::default();
                    device.enqueue(&step(1, 2)).unwrap();
                    assert!(device.wait(&mut output).unwrap());
                    assert_eq!(output.step, 1);
                });
            }
        });
    });
}

#[test]
fn a_profiler_sees_the_phases_and_the_steps() {
    if std::env::var_os(FOLDER).is_some() {
        for graph in [true, false] {
            let mut device = CudaDevice::prepare(CudaOptions { graph, ..options() }).unwrap();
            let mut output = StepOutput::default();
            for number in 1..=2 {
                device.enqueue(&step(number, 4)).unwrap();
                assert!(device.wait(&mut output).unwrap());
            }
        }
        return;
    }
    let folder = mock_folder(1, &samples::limits(), "");
    let report = folder.path().join("ranges");
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.env(FOLDER, folder.path()).env("NVTXINJ_OUT", &report).env("NVTX_INJECTION64_PATH", built("libnvtxinj.so"));
    run_child("cuda::mock_tests::a_profiler_sees_the_phases_and_the_steps", &mut child);
    let report = std::fs::read_to_string(report).unwrap();
    let mut lines = report.lines();
    let counts = lines.next().unwrap();
    assert!(counts.ends_with("other 0 unbalanced 0"), "{counts}");
    let ranges: Vec<&str> = lines.collect();
    for range in ["2 slotgraph:prepare", "1 slotgraph:capture/b1", "1 slotgraph:capture/b16", "2 slotgraph:replay/b4"] {
        assert!(ranges.contains(&range), "{range} is not in {report}");
    }
    assert!(ranges.contains(&"2 slotgraph:fetch"), "ops have ranges in eager steps, and only there: {report}");
}
