//! The check itself: right ops pass, a damaged op is found under its own name and no other.

use super::*;
use crate::check_ops::checker::memory;
use slotgraph_kernels::Op;

struct Rig {
    spec: ModelSpec,
    limits: StepLimits,
    plans: Vec<Plan>,
    weights: Arc<[Arc<CpuWeight>]>,
}

fn rig(buckets: &[usize]) -> Rig {
    let folder = Folder::Embedded { name: demo::NAME, files: demo::FILES };
    let checkpoint = Checkpoint::load(folder, slotgraph_runtime::checkpoint::LoadFormat::Safetensors).unwrap();
    let limits = limits(&checkpoint.spec, buckets, 640);
    let plans: Vec<Plan> = limits
        .buckets
        .iter()
        .map(|&bucket| model::build(&checkpoint.spec, &limits, RankShape::SINGLE, bucket).unwrap())
        .collect();
    let source = checkpoint.source();
    let weights = weights(&plans[0].weights, |spec, group, out| source.read(spec, group, out)).unwrap();
    Rig { spec: checkpoint.spec, limits, plans, weights }
}

/// Checks the CPU against itself, with `damage` after ops; the bad findings, and what the canaries said.
fn checked(rig: &Rig, damage: Option<stepped::Damage>) -> (Vec<Finding>, Report) {
    let largest = rig.plans.last().unwrap();
    let mut device = CpuSteps::new(
        rig.limits.clone(),
        rig.spec.eos_ids.clone(),
        rig.plans.clone(),
        memory(largest, rig.weights.clone()),
    );
    device.damage = damage;
    let replaced = BTreeSet::new();
    let mut journal = |_: u64, _: At| {};
    let mut checker = Checker::new(memory(largest, rig.weights.clone()), &replaced, false, &mut journal);
    let mut report = check(&mut device, &rig.spec, Vec::new(), &mut checker);
    report.canary_seen = checker.canary_seen.iter().map(|op| op.to_string()).collect();
    report.canary_missed = checker.canary_missed.iter().map(|op| op.to_string()).collect();
    let bad = checker.findings.into_list().into_iter().filter(|finding| finding.bad > 0).collect();
    (bad, report)
}

#[test]
fn the_cpu_agrees_with_itself_and_every_changed_element_is_seen() {
    let rig = rig(&[1, 2, 8, 64]);
    let (bad, report) = checked(&rig, None);
    assert!(bad.is_empty(), "{}", findings::table(&bad));
    assert_eq!((report.lost, report.done), (None, vec![1, 2, 8, 64]));
    assert!(report.canary_missed.is_empty(), "{:?}", report.canary_missed);
    let ops: BTreeSet<String> = rig.plans[0].ops.iter().map(|placed| placed.op.name().to_owned()).collect();
    assert_eq!(report.canary_seen, ops, "a changed element of every op was seen");
}

#[test]
fn a_damaged_op_is_named_and_no_other() {
    let rig = rig(&[8]);
    let (bad, _) = checked(
        &rig,
        Some(Box::new(|placed, memory| {
            if let (Op::MoeDown(op), Some(2)) = (&placed.op, placed.layer)
                && let slotgraph_kernels::ops::MoeSum::Residual { x } = op.sum
            {
                memory.f32_mut(x)[3] += 0.01;
            }
        })),
    );
    let named: BTreeSet<(&str, Option<usize>)> = bad.iter().map(|bad| (bad.op.as_str(), bad.layer)).collect();
    assert_eq!(named, BTreeSet::from([("moe_down", Some(2))]), "{}", findings::table(&bad));
}

#[test]
fn a_write_to_another_page_is_found() {
    let rig = rig(&[8]);
    let (bad, _) = checked(
        &rig,
        Some(Box::new(|placed, memory| {
            if let (Op::MlaPrep(op), Some(1)) = (&placed.op, placed.layer) {
                let at = memory.stride(op.paged.kv) * 5 + 7;
                memory.f32_mut(op.paged.kv)[at] = 1.0;
            }
        })),
    );
    assert!(!bad.is_empty() && bad.iter().all(|bad| bad.op == "mla_prep" && bad.layer == Some(1)), "{bad:?}");
}

#[test]
fn a_write_behind_the_ops_is_found() {
    let rig = rig(&[8]);
    let mut block_table = None;
    let (bad, _) = checked(
        &rig,
        Some(Box::new(move |placed, memory| {
            if let Op::MlaPrep(op) = &placed.op {
                block_table = Some(op.paged.block_table);
            }
            if let (Op::MoeUp(_), Some(1), Some(id)) = (&placed.op, placed.layer, block_table) {
                let entries = memory.u32(id).len();
                memory.u32_mut(id)[entries - 1] ^= 1;
            }
        })),
    );
    assert!(!bad.is_empty());
    assert!(bad.iter().all(|bad| bad.note.as_ref().is_some_and(|note| note.contains("behind the ops"))), "{bad:?}");
}

#[test]
fn an_op_that_is_replaced_by_the_cpu_leaves_the_rest_checked() {
    let rig = rig(&[8]);
    let largest = rig.plans.last().unwrap();
    let own = memory(largest, rig.weights.clone());
    let mut device = CpuSteps::new(rig.limits.clone(), rig.spec.eos_ids.clone(), rig.plans.clone(), own);
    let replaced = BTreeSet::from(["moe_up".to_owned(), "mla_prep@8".to_owned()]);
    let mut journal = |_: u64, _: At| {};
    let mut checker = Checker::new(memory(largest, rig.weights.clone()), &replaced, false, &mut journal);
    let report = check(&mut device, &rig.spec, Vec::new(), &mut checker);
    assert_eq!(report.lost, None);
    let findings = checker.findings.into_list();
    assert!(findings.iter().all(|finding| finding.bad == 0), "{}", findings::table(&findings));
    let checked: BTreeSet<&str> = findings.iter().map(|finding| finding.op.as_str()).collect();
    assert!(!checked.contains("moe_up") && checked.contains("moe_down"), "{checked:?}");
}

#[test]
fn a_gpu_is_stepped_op_by_op_and_its_idle_kernels_are_found() {
    let rig = rig(&[1, 4]);
    let name = "check_ops::tests::a_gpu_is_stepped_op_by_op_and_its_idle_kernels_are_found";
    crate::mock::with_mock(name, &rig.spec, &rig.limits, "", |folder| {
        let source = Checkpoint::load(
            Folder::Embedded { name: demo::NAME, files: demo::FILES },
            slotgraph_runtime::checkpoint::LoadFormat::Safetensors,
        )
        .unwrap()
        .source();
        let mut options = CudaOptions::new(rig.spec.clone(), rig.limits.clone(), source);
        options.lib_dirs = vec![folder.to_path_buf()];
        options.cache = slotgraph_graphs::cuda::Cache::off();
        options.kv = KvMemory::Pages(rig.limits.pages);
        options.graph = false;
        let mut device = cold(options).unwrap();
        let largest = rig.plans.last().unwrap();
        // The mock publishes steps itself, and everything else must come from the CPU.
        let ops = largest.ops.iter().map(|placed| placed.op.name()).filter(|op| !["feed", "moe_up"].contains(op));
        let replaced: BTreeSet<String> = ops.map(str::to_owned).collect();
        let mut journal = |_: u64, _: At| {};
        let mut checker = Checker::new(memory(largest, rig.weights.clone()), &replaced, false, &mut journal);
        let report = check(&mut device, &rig.spec, Vec::new(), &mut checker);
        assert_eq!((report.lost, report.done), (None, vec![1, 4]));
        let findings = checker.findings.into_list();
        let bad: BTreeSet<&str> = findings.iter().filter(|f| f.bad > 0).map(|f| f.op.as_str()).collect();
        assert_eq!(bad, BTreeSet::from(["feed", "moe_up"]), "{}", findings::table(&findings));
    });
}
