//! Ranks over a mock of NCCL: its kernels in the graphs, its order of calls, and how it fails.

use super::*;
use crate::cuda::nccl;

#[test]
fn nccl_gathers_eager_and_captured_and_goes_in_order() {
    with_mocks("nccl_tests::nccl_gathers_eager_and_captured_and_goes_in_order", 2, "", "", |folder| {
        for graph in [false, true] {
            let (transport, together) = (Transport::Nccl(Meeting::new(2, LONG)), Barrier::new(2));
            std::fs::write(folder.join("calls.log"), "").unwrap();
            on_threads(2, |rank| {
                let options = CudaOptions { graph, ..of_rank(rank, 2, &transport, false) };
                let mut device = CudaDevice::prepare(options).unwrap();
                exchange_partials(&mut device, rank, 2, &together);
                let nccl = device.report().libraries.iter().find(|library| library.name == "libnccl").unwrap();
                assert_eq!((nccl.version.as_str(), nccl.path.parent()), ("2.28.9", Some(folder)));
                if graph {
                    for made in &device.report().graphs {
                        assert_eq!((made.collectives, made.audit.library_kernels, made.audit.library_nodes), (2, 2, 0));
                        assert_eq!(made.audit.pointers_unregistered, 0);
                        assert!(made.audit.pointers_foreign > 0);
                        assert_eq!(device.recheck(made.bucket).unwrap().digest, made.audit.digest);
                        check_library_nodes(&device, made.bucket, 1);
                    }
                    // Stamps stand between its nodes too.
                    let (_, times) = device.time_nodes(&step(10, 4)).unwrap();
                    assert_eq!(times.ops.iter().filter(|time| time.op == "exchange").count(), 2);
                }
            });
            for rank in 0..2 {
                let calls = calls(folder, &format!("rank-{rank}"));
                let at = |call: &str| calls.iter().position(|other| other == call);
                let last = |call: &str| calls.iter().rposition(|other| other == call);
                assert_eq!(calls.iter().filter(|call| *call == "ncclGetUniqueId").count(), usize::from(rank == 0));
                assert!(at("ncclCommInitRank") < at("ncclAllGather"), "{calls:?}");
                let (finalize, destroy) = (at("ncclCommFinalize").unwrap(), at("ncclCommDestroy").unwrap());
                assert!(finalize < destroy && at("ncclCommAbort").is_none(), "{calls:?}");
                assert!(last("ncclAllGather").unwrap() < finalize);
                if graph {
                    assert!(last("cuGraphExecDestroy").unwrap() < finalize, "graphs go before their communicator");
                }
                let frees = &calls[destroy..];
                assert!(frees.iter().filter(|call| *call == "cuMemFree_v2").count() > 20, "memory goes last");
            }
        }
    });
}

/// NCCL's kernels stand where the plan has its exchanges, `pieces` for each, and no programmatic edge leads into or out of one.
fn check_library_nodes(device: &CudaDevice, bucket: usize, pieces: usize) {
    let nodes = device.nodes(bucket).unwrap();
    let library: Vec<usize> = (0..nodes.len()).filter(|&at| nodes[at].library).collect();
    assert_eq!(library.len(), 2 * pieces);
    for &at in &library {
        assert_eq!((nodes[at].function.as_str(), nodes[at].op), (NCCL_KERNEL, None));
        assert!(!nodes[at].after[0].1 && !nodes[at + 1].after[0].1, "bucket {bucket}, node {at}");
    }
    let plan = device.plan(bucket).unwrap();
    for group in library.chunks(pieces) {
        let before = nodes[group[0] - 1].op.unwrap().0;
        assert!(matches!(plan.ops[before + 1].op, Op::Exchange(_)));
        assert_eq!(nodes[group[pieces - 1] + 1].op.unwrap().0, before + 2);
    }
    assert!(nodes.iter().any(|node| node.after.iter().any(|(_, programmatic)| *programmatic)));
}

#[test]
fn a_collective_may_be_cut_into_several_kernels() {
    with_mocks("nccl_tests::a_collective_may_be_cut_into_several_kernels", 2, "", "pieces 3\n", |_| {
        let (transport, together) = (Transport::Nccl(Meeting::new(2, LONG)), Barrier::new(2));
        on_threads(2, |rank| {
            let mut device = CudaDevice::prepare(of_rank(rank, 2, &transport, false)).unwrap();
            exchange_partials(&mut device, rank, 2, &together);
            for made in &device.report().graphs {
                assert_eq!((made.collectives, made.audit.library_kernels), (2, 6));
                check_library_nodes(&device, made.bucket, 3);
            }
        });
    });
}

/// A graph in which NCCL's part is not as it must be is refused in `capture`, by name.
fn refused_over_nccl(name: &str, nccl: &str, wanted: &str) {
    let driver = "function a_stranger 8 8 8 8 8 8\ncall a_stranger\n";
    with_mocks(&format!("nccl_tests::{name}"), 2, driver, nccl, |_| {
        let transport = Transport::Nccl(Meeting::new(2, LONG));
        let errors = on_threads(2, |rank| CudaDevice::prepare(of_rank(rank, 2, &transport, false)).err().unwrap());
        let told = errors.iter().find(|error| !error.is_of_another_rank()).unwrap().to_string();
        assert!(told.contains("the graph of bucket 1") && told.contains(wanted), "{told}");
    });
}

#[test]
fn a_kernel_of_nobody_is_refused() {
    refused_over_nccl("a_kernel_of_nobody_is_refused", "kernel a_stranger\n", "a_stranger is neither");
}

#[test]
fn a_collective_that_left_no_kernel_is_refused() {
    let wanted = "has 0 kernels of NCCL for 1 collectives";
    refused_over_nccl("a_collective_that_left_no_kernel_is_refused", "pieces 0\n", wanted);
}

#[test]
fn a_programmatic_edge_into_nccl_is_refused() {
    let wanted = "a programmatic edge leads from";
    refused_over_nccl("a_programmatic_edge_into_nccl_is_refused", "programmatic 1\n", wanted);
}

#[test]
fn nccl_is_aborted_when_a_rank_fails() {
    with_mocks("nccl_tests::nccl_is_aborted_when_a_rank_fails", 2, "", "", |folder| {
        let transport = Transport::Nccl(Meeting::new(2, LONG));
        on_threads(2, |rank| {
            let mut device = CudaDevice::prepare(of_rank(rank, 2, &transport, false)).unwrap();
            let _ = device.lose(DeviceError::Lost("told to".into()));
        });
        // The thread that aborts is nobody's to wait for.
        let began = Instant::now();
        let log = loop {
            let log = std::fs::read_to_string(folder.join("calls.log")).unwrap();
            if log.lines().filter(|line| *line == "nccl-abort ncclCommAbort").count() == 2 {
                break log;
            }
            assert!(began.elapsed() < LONG, "{log}");
            std::thread::yield_now();
        };
        assert!(!log.contains("ncclCommDestroy"), "{log}");
    });
}

#[test]
fn a_rank_whose_step_does_not_end_says_who_enqueued_none() {
    with_mocks("nccl_tests::a_rank_whose_step_does_not_end_says_who_enqueued_none", 2, "", "", |_| {
        let (transport, over) = (Transport::Nccl(Meeting::new(2, LONG)), Barrier::new(2));
        on_threads(2, |rank| {
            let device = CudaDevice::prepare(of_rank(rank, 2, &transport, false)).unwrap();
            let exchange = device.exchange.as_ref().unwrap();
            if rank == 0 {
                exchange.enqueued(3);
                exchange.check_step(3, Duration::from_secs(9)).unwrap();
                let error = exchange.check_step(3, Duration::from_secs(11)).unwrap_err().to_string();
                assert_eq!(error, "rank 0 did not finish step 3 in 10s: rank 1 has enqueued no step after 0");
            }
            over.wait();
        });
    });
}

#[test]
fn an_nccl_that_fails_says_its_words_and_the_circumstances() {
    with_mocks(
        "nccl_tests::an_nccl_that_fails_says_its_words_and_the_circumstances",
        2,
        "",
        "fail ncclCommInitRank 2\n",
        |_| {
            let transport = Transport::Nccl(Meeting::new(2, LONG));
            let errors = on_threads(2, |rank| CudaDevice::prepare(of_rank(rank, 2, &transport, false)).err().unwrap());
            let text = errors.iter().find(|error| !error.is_of_another_rank()).unwrap().to_string();
            for part in [
                "ncclCommInitRank failed with code 2",
                "the mock's last words",
                "NCCL 2.28.9 at",
                "NCCL_SOCKET_IFNAME=lo",
            ] {
                assert!(text.contains(part), "{part}: {text}");
            }
        },
    );
}

#[test]
fn an_old_nccl_and_a_shared_gpu_are_refused() {
    with_mocks("nccl_tests::an_old_nccl_and_a_shared_gpu_are_refused", 2, "", "version 21205\n", |_| {
        let transport = Transport::Nccl(Meeting::new(2, LONG));
        let refused = |shared: bool| {
            let errors = on_threads(2, |rank| CudaDevice::prepare(of_rank(rank, 2, &transport, shared)).err().unwrap());
            errors.into_iter().find(|error| !error.is_of_another_rank()).unwrap()
        };
        let old = refused(false);
        assert!(old.is_configuration() && old.to_string().contains("NCCL 2.12.5 at"), "{old}");
        assert!(old.to_string().contains("2.16.0 or newer"), "{old}");
    });
}

#[test]
fn two_ranks_on_one_gpu_are_no_case_for_nccl() {
    with_mocks("nccl_tests::two_ranks_on_one_gpu_are_no_case_for_nccl", 2, "", "", |_| {
        let transport = Transport::Nccl(Meeting::new(2, LONG));
        for error in on_threads(2, |rank| CudaDevice::prepare(of_rank(rank, 2, &transport, true)).err().unwrap()) {
            let text = error.to_string();
            assert!(
                text.contains("rank 1 shares GPU 0") && text.contains("p2p") || error.is_of_another_rank(),
                "{text}"
            );
        }
    });
}

#[test]
fn a_missing_nccl_names_the_places_and_one_rank_needs_none() {
    with_mocks("nccl_tests::a_missing_nccl_names_the_places_and_one_rank_needs_none", 1, "", "", |folder| {
        std::fs::remove_file(folder.join("libnccl.so.2")).unwrap();
        match nccl::Nccl::load(&[PathBuf::from(folder)], 90) {
            // A machine may have one of its own.
            Ok(found) => assert!(!found.path.starts_with(folder)),
            Err(error) => {
                let text = error.to_string();
                assert!(text.starts_with("libnccl.so.2 (NCCL) was not found; looked in"), "{text}");
                assert!(text.contains("(--lib-dir)") && text.contains("another --transport"), "{text}");
            }
        }
        CudaDevice::prepare(CudaOptions { limits: limits(), ..options() }).unwrap();
    });
}

#[test]
fn the_collective_alone_is_tried_word_by_word() {
    with_mocks("nccl_tests::the_collective_alone_is_tried_word_by_word", 2, "", "", |_| {
        let transport = Transport::Nccl(Meeting::new(2, LONG));
        for report in on_threads(2, |rank| smoke(&of_rank(rank, 2, &transport, false)).unwrap()) {
            assert_eq!(report.shapes.len(), 4);
            assert!(
                report.shapes.iter().all(|shape| shape.fault().is_none() && shape.library_kernels == 50),
                "{report:?}"
            );
        }
        let error = smoke(&of_rank(0, 2, &peers(2), false)).unwrap_err();
        assert!(error.to_string().contains("only NCCL"), "{error}");
    });
}
