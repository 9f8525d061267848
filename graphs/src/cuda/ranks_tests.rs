//! Several ranks over a mock driver: who meets whom, what moves, what is said when one fails, and in which order things go; over NCCL, a mock
//! of it too, in `nccl_tests`.
//!
//! Kernels do nothing there but exchange and publish, so partials that a test writes must arrive on every rank. Each test runs in a process of
//! its own (`mock_tests`).

use super::mock_tests::{FOLDER, Rows, built, mock_folder, options, run_child, step};
use super::*;
use crate::device::{Device, DeviceError};
use crate::exchange::MemoryExchange;
use crate::meeting::Meeting;
use crate::plan::RankShape;
use crate::samples;
use crate::step::{StepLimits, StepOutput};
use slotgraph_kernels::Op;
use slotgraph_kernels::ops::AllGather;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

mod nccl_tests;

const LONG: Duration = Duration::from_secs(20);
/// As the driver gives the name: mangled.
const NCCL_KERNEL: &str = "_Z31ncclDevKernel_AllGather_RING_LL24ncclDevKernelArgsStorageILm4096EE";

fn peers(ranks: usize) -> Transport {
    Transport::P2p(Meeting::new(ranks, LONG))
}

/// A bucket that an exchange goes through in pieces, beside small ones.
fn limits() -> StepLimits {
    StepLimits { buckets: vec![1, 4, 520], prefill_chunk: 520, ..samples::limits() }
}

/// Runs `body` with the folder of both mocks, for `ranks` ranks. `driver` and `nccl` are lines of their configurations.
fn with_mocks(name: &str, ranks: usize, driver: &str, nccl: &str, body: impl FnOnce(&Path)) {
    if let Some(folder) = std::env::var_os(FOLDER) {
        return body(Path::new(&folder));
    }
    let kernel = format!("function {NCCL_KERNEL} 8 8 8 8 8 8\ncall {NCCL_KERNEL}\ndevices 8\n");
    let folder = mock_folder(ranks, &limits(), &(kernel + driver));
    std::fs::copy(built("libmocknccl.so"), folder.path().join("libnccl.so.2")).unwrap();
    std::fs::write(folder.path().join("mocknccl.conf"), nccl).unwrap();
    std::fs::write(folder.path().join("calls.log"), "").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.env(FOLDER, folder.path()).env("NCCL_SOCKET_IFNAME", "lo");
    run_child(&format!("cuda::ranks_tests::{name}"), &mut child);
}

/// Rank `rank` of `ranks`, on the device of that number or all on one.
fn of_rank(rank: usize, ranks: usize, transport: &Transport, shared: bool) -> CudaOptions {
    CudaOptions {
        rank: RankShape { rank, ranks },
        ordinal: if shared { 0 } else { rank },
        transport: transport.clone(),
        limits: limits(),
        source: Arc::new(Rows::default()),
        ..options()
    }
}

/// Runs `body` for every rank on a thread that is named for it.
fn on_threads<T: Send>(ranks: usize, body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let spawn = |rank: usize| {
            let body = &body;
            std::thread::Builder::new().name(format!("rank-{rank}")).spawn_scoped(scope, move || body(rank)).unwrap()
        };
        let threads: Vec<_> = (0..ranks).map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What rank `rank` puts into its partials in round `round`.
fn partial(rank: usize, round: u64, floats: usize) -> Vec<u8> {
    (0..floats).flat_map(|at| ((rank * 1_000_000 + at) as f32 + round as f32 / 8.0).to_le_bytes()).collect()
}

/// Steps of every bucket in turn; each must bring every rank's partials to every rank, and nothing but replays may happen.
fn exchange_partials(device: &mut CudaDevice, rank: usize, ranks: usize, together: &Barrier) {
    let hidden = samples::deepseek_on_cuda().hidden;
    let mut output = StepOutput::default();
    for round in 1..=9 {
        let bucket = limits().buckets[round as usize % 3];
        let floats = bucket * hidden;
        device.write_buffer("moe.partial", 0, &partial(rank, round, floats)).unwrap();
        let before = device.counters();
        device.enqueue(&step(round, bucket)).unwrap();
        assert!(device.wait(&mut output).unwrap());
        let after = device.counters();
        assert_eq!((after.allocations, after.captures), (before.allocations, before.captures));
        let want: Vec<u8> = (0..ranks).flat_map(|rank| partial(rank, round, floats)).collect();
        let got = device.read_buffer("moe.gathered", 0, want.len()).unwrap();
        assert!(got == want, "round {round}, bucket {bucket}, rank {rank}");
        // The next round writes partials that a slower rank may still wait for.
        together.wait();
    }
}

#[test]
fn ranks_exchange_over_peer_memory_eager_and_captured() {
    with_mocks("ranks_exchange_over_peer_memory_eager_and_captured", 2, "", "", |_| {
        for (shared, graph) in [(false, true), (true, true), (false, false), (true, false)] {
            let (transport, together) = (peers(2), Barrier::new(2));
            on_threads(2, |rank| {
                let options = CudaOptions { graph, ..of_rank(rank, 2, &transport, shared) };
                let mut device = CudaDevice::prepare(options).unwrap();
                exchange_partials(&mut device, rank, 2, &together);
                let report = device.report().exchange.clone().unwrap();
                assert_eq!((report.transport, report.shared_device), ("p2p", shared));
                assert_eq!(report.peers[0].way, if shared { "same-gpu" } else { "peer-access" });
                if graph {
                    check_nodes(&device, shared);
                }
            });
        }
    });
}

/// Exchanges are nodes of ours in pieces of 256 rows; they name registered memory alone; edges lead into and out of them only between GPUs.
fn check_nodes(device: &CudaDevice, shared: bool) {
    for bucket in limits().buckets {
        let nodes = device.nodes(bucket).unwrap();
        let exchanges = nodes.iter().filter(|node| node.function == "exchange").count();
        let plan = device.plan(bucket).unwrap();
        let ops = plan.ops.iter().filter(|placed| matches!(placed.op, Op::Exchange(_))).count();
        assert_eq!(exchanges, ops * bucket.div_ceil(256));
        let mut edges = Vec::new();
        for (at, node) in nodes.iter().enumerate().filter(|(_, node)| node.function == "exchange") {
            edges.push(node.after[0].1);
            edges.push(nodes[at + 1].after[0].1);
            let regions: Vec<&str> = node.pointers.iter().map(|(_, region, _)| region.as_str()).collect();
            for region in ["moe.gathered", "moe.partial", "exchange.scratch", "exchange.status"] {
                assert!(regions.contains(&region), "{regions:?}");
            }
            assert!(regions.iter().any(|region| region.starts_with("exchange.scratch of rank")), "{regions:?}");
        }
        assert!(edges.iter().all(|&programmatic| programmatic != shared), "bucket {bucket}: {edges:?}");
    }
}

#[test]
fn eight_ranks_exchange_over_peer_memory() {
    with_mocks("eight_ranks_exchange_over_peer_memory", 8, "memory 2000000000\n", "", |folder| {
        let (transport, together) = (peers(8), Barrier::new(8));
        on_threads(8, |rank| {
            let mut device = CudaDevice::prepare(of_rank(rank, 8, &transport, false)).unwrap();
            exchange_partials(&mut device, rank, 8, &together);
        });
        let log = std::fs::read_to_string(folder.join("calls.log")).unwrap();
        let ways = log.lines().filter(|line| line.ends_with("cuCtxEnablePeerAccess")).count();
        assert_eq!(ways, 8 * 7, "every rank opens the way to every other");
    });
}

#[test]
fn a_rank_that_runs_no_step_is_named_by_who_waits_for_it() {
    with_mocks("a_rank_that_runs_no_step_is_named_by_who_waits_for_it", 2, "", "", |_| {
        let (transport, over) = (peers(2), Barrier::new(2));
        on_threads(2, |rank| {
            let exchange_limit = Duration::from_millis(200);
            let options = CudaOptions { exchange_limit, ..of_rank(rank, 2, &transport, true) };
            let mut device = CudaDevice::prepare(options).unwrap();
            if rank == 0 {
                let began = Instant::now();
                device.enqueue(&step(1, 4)).unwrap();
                let error = device.wait(&mut StepOutput::default()).unwrap_err().to_string();
                assert!(error.starts_with("rank 0 waited longer than 200 ms for rank 1"), "{error}");
                assert!(error.contains("4 rows") && error.contains("wanted") && error.contains("seen"), "{error}");
                let again = device.enqueue(&step(2, 4)).unwrap_err().to_string();
                assert!(again.contains("rank 1"), "{again}");
                drop(device);
                assert!(began.elapsed() < Duration::from_secs(3), "only the first exchange of the step waited");
            }
            over.wait();
        });
    });
}

#[test]
fn a_rank_that_fails_frees_and_informs_the_others() {
    with_mocks("a_rank_that_fails_frees_and_informs_the_others", 2, "", "", |_| {
        // In its start: capture.
        let transport = peers(2);
        let errors = on_threads(2, |rank| {
            let fault = (rank == 1).then(|| "capture-fail@4".parse().unwrap());
            CudaDevice::prepare(CudaOptions { fault, ..of_rank(rank, 2, &transport, true) }).err().unwrap()
        });
        assert!(errors[1].to_string().contains("bucket 4") && !errors[1].is_of_another_rank(), "{}", errors[1]);
        assert!(errors[0].is_of_another_rank() && errors[0].to_string().starts_with("rank 1 left"), "{}", errors[0]);
        // Between steps: the other's next look at its device tells.
        let (transport, gone) = (peers(2), Barrier::new(2));
        on_threads(2, |rank| {
            let mut device = CudaDevice::prepare(of_rank(rank, 2, &transport, true)).unwrap();
            if rank == 1 {
                let _ = device.lose(DeviceError::Lost("its disk is on fire".into()));
                drop(device);
                gone.wait();
                return;
            }
            gone.wait();
            let error = device.exchange.as_ref().unwrap().check().unwrap_err();
            assert_eq!(error.to_string(), "rank 1 left: its disk is on fire");
        });
    });
}

#[test]
fn gpus_that_do_not_reach_each_other_are_refused_by_name() {
    with_mocks("gpus_that_do_not_reach_each_other_are_refused_by_name", 2, "peers 0\n", "", |_| {
        let transport = peers(2);
        let refused = on_threads(2, |rank| CudaDevice::prepare(of_rank(rank, 2, &transport, false)).err().unwrap());
        let told = refused.iter().find(|error| !error.is_of_another_rank()).unwrap();
        assert!(told.is_configuration() && told.to_string().contains("--transport p2p: GPU"), "{told}");
    });
}

#[test]
fn one_gpu_exchanges_with_itself_host_staged_as_over_peer_memory() {
    with_mocks("one_gpu_exchanges_with_itself_host_staged_as_over_peer_memory", 2, "", "", |_| {
        let all: Arc<dyn AllGather> = MemoryExchange::new(2, LONG);
        let (transport, together) = (Transport::HostStaged(Meeting::new(2, LONG), all), Barrier::new(2));
        on_threads(2, |rank| {
            let options = CudaOptions { graph: false, ..of_rank(rank, 2, &transport, true) };
            let mut device = CudaDevice::prepare(options).unwrap();
            let trips = device.round_trips();
            exchange_partials(&mut device, rank, 2, &together);
            assert_eq!(device.round_trips() - trips, 9 * 2, "one a sparse layer and step");
        });
    });
}

/// Lines of the log of one thread.
fn calls(folder: &Path, thread: &str) -> Vec<String> {
    let log = std::fs::read_to_string(folder.join("calls.log")).unwrap();
    log.lines().filter_map(|line| Some(line.strip_prefix(thread)?.strip_prefix(' ')?.to_owned())).collect()
}

#[test]
fn over_peer_memory_graphs_go_first_and_memory_when_nobody_writes_it() {
    with_mocks("over_peer_memory_graphs_go_first_and_memory_when_nobody_writes_it", 2, "", "", |folder| {
        let (transport, ready) = (peers(2), Barrier::new(2));
        let waited = on_threads(2, |rank| {
            let device = CudaDevice::prepare(of_rank(rank, 2, &transport, false)).unwrap();
            if ready.wait().is_leader() {
                std::fs::write(folder.join("calls.log"), "").unwrap();
            }
            ready.wait();
            // The slow one runs on for a while: the other keeps what this one may still write.
            std::thread::sleep(Duration::from_millis(200 * rank as u64));
            let began = Instant::now();
            drop(device);
            began.elapsed()
        });
        assert!(waited[0] >= Duration::from_millis(150), "{waited:?}");
        for rank in 0..2 {
            let calls = calls(folder, &format!("rank-{rank}"));
            let last_graph = calls.iter().rposition(|call| call == "cuGraphExecDestroy").unwrap();
            let first_free = calls.iter().position(|call| call == "cuMemFree_v2").unwrap();
            assert!(last_graph < first_free, "{calls:?}");
        }
    });
}
