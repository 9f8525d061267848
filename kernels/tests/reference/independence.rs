//! A row is a row: its bits depend on neither its neighbours, its index, the padding, nor the number of threads.

use crate::cases::{self, Case};
use crate::rig::{Net, Random};
use slotgraph_kernels::contract::{GemmKind, PAGE_TOKENS};
use slotgraph_kernels::cpu::{CpuBuffer, CpuMemory};
use slotgraph_kernels::ops::{GqaAttend, Head, MlaAttend, MoeDown, MoeSum, MoeUp, NormGateUp, Op, Paged};
use slotgraph_kernels::{BufferId, DType, Precision};

/// The lines of each buffer that are the step's rows.
fn is_per_row(net: &Net, id: usize) -> bool {
    let spec = &net.buffers[id];
    spec.shape[0] == net.rows && spec.name != "kv" && spec.name != "block_table"
}

/// Runs the case with `rows[i]` of its rows at index i and nothing else in use.
fn arranged(case: &Case, precision: Precision, rows: &[usize]) -> CpuMemory {
    let from = case.memory(precision);
    let mut memory = case.memory(precision);
    for id in (0..from.buffers.len()).filter(|&id| is_per_row(&case.net, id)) {
        let stride = from.stride(BufferId(id as u32));
        for (to, &row) in rows.iter().enumerate() {
            match (&mut memory.buffers[id], &from.buffers[id]) {
                (CpuBuffer::F32(to_line), CpuBuffer::F32(line)) => {
                    to_line[to * stride..][..stride].copy_from_slice(&line[row * stride..][..stride]);
                }
                (CpuBuffer::U32(to_line), CpuBuffer::U32(line)) => {
                    to_line[to * stride..][..stride].copy_from_slice(&line[row * stride..][..stride]);
                }
                _ => unreachable!("one case has one kind of buffer"),
            }
        }
    }
    // Combine reads rank-major lines.
    if let Op::MoeCombine(combine) = &case.op {
        let (stride, all) = (from.stride(combine.x), from.f32(combine.gathered));
        for rank in 0..combine.ranks {
            for (to, &row) in rows.iter().enumerate() {
                let line = all[(rank * case.net.rows + row) * stride..][..stride].to_vec();
                memory.f32_mut(combine.gathered)[(rank * case.net.rows + to) * stride..][..stride]
                    .copy_from_slice(&line);
            }
        }
    }
    memory.rows = rows.len();
    memory
}

fn line(memory: &CpuMemory, id: BufferId, row: usize) -> Vec<u32> {
    let stride = memory.stride(id);
    memory.f32(id)[row * stride..][..stride].iter().map(|x| x.to_bits()).collect()
}

#[test]
fn a_row_alone_in_company_or_elsewhere_has_the_same_bits() {
    // The head's rows are named by its logit rows.
    for case in cases::all().into_iter().filter(|case| case.name != "head") {
        for precision in [Precision::Oracle, Precision::Contract] {
            let rows = case.net.rows;
            let together = case.run(arranged(&case, precision, &(0..rows).collect::<Vec<_>>()));
            let mut arrangements: Vec<Vec<usize>> = (0..rows).map(|row| vec![row]).collect();
            arrangements.push((0..rows).rev().collect());
            arrangements.push((1..rows).collect());
            for arrangement in arrangements {
                let after = case.run(arranged(&case, precision, &arrangement));
                for &id in &case.writes {
                    if !is_per_row(&case.net, id.0 as usize) {
                        continue;
                    }
                    for (at, &row) in arrangement.iter().enumerate() {
                        let name = &case.net.buffers[id.0 as usize].name;
                        assert_eq!(line(&after, id, at), line(&together, id, row), "{} {name} row {row}", case.name);
                    }
                }
            }
        }
    }
}

#[test]
fn what_a_row_appends_to_the_cache_does_not_depend_on_its_company() {
    for case in cases::all().into_iter().filter(|case| case.name.contains("prep")) {
        let all: Vec<usize> = (0..case.net.rows).collect();
        let together = case.run(arranged(&case, Precision::Contract, &all));
        let mut one_by_one = case.memory(Precision::Contract);
        for row in all {
            let mut alone = arranged(&case, Precision::Contract, &[row]);
            std::mem::swap(&mut alone.buffers[0], &mut one_by_one.buffers[0]);
            let mut alone = case.run(alone);
            std::mem::swap(&mut alone.buffers[0], &mut one_by_one.buffers[0]);
        }
        assert_eq!(case.net.buffers[0].name, "kv");
        assert!(one_by_one.buffers[0] == together.buffers[0], "{}", case.name);
    }
}

#[test]
fn rows_in_use_have_the_same_bits_when_padding_is_computed() {
    for case in cases::all().into_iter().filter(|case| case.name != "head") {
        let mut some = case.memory(Precision::Contract);
        some.rows = case.net.rows - 2;
        let mut padded = case.memory(Precision::Contract);
        padded.rows = some.rows;
        padded.compute_padding = true;
        let (before, some, padded) = (case.memory(Precision::Contract), case.run(some), case.run(padded));
        for &id in case.writes.iter().filter(|id| is_per_row(&case.net, id.0 as usize)) {
            for row in 0..case.net.rows {
                if row < case.net.rows - 2 {
                    assert_eq!(line(&some, id, row), line(&padded, id, row), "{} row {row}", case.name);
                } else {
                    assert_eq!(line(&some, id, row), line(&before, id, row), "{}: row {row} is not in use", case.name);
                }
            }
        }
    }
}

/// Ops large enough to be divided.
fn large() -> Vec<Case> {
    let nothing = || Box::new(|_: &Net, _: &CpuMemory, _: &CpuMemory| Vec::new());
    let mut cases = Vec::new();

    let (mut net, mut random) = (Net::new(150), Random(31));
    let (x, out) = (net.per_row("x", DType::F32, 200), net.per_row("out", DType::Bf16, 150));
    let norm = net.vector(&mut random, 200);
    let weight = net.gemm(&mut random, GemmKind::GateUp, 1, 300, 200);
    cases.push(Case::new(
        "gate",
        net,
        Op::NormGateUp(NormGateUp { out, x, norm, weight, eps: 1e-6 }),
        vec![out],
        nothing(),
    ));

    let (mut net, mut random) = (Net::new(1), Random(32));
    let (x, logits) = (net.per_row("x", DType::F32, 300), net.buffer("logits", DType::F32, &[1, 4100]));
    let logit_row = net.buffer("logit_row", DType::U32, &[1]);
    let norm = net.vector(&mut random, 300);
    let weight = net.gemm(&mut random, GemmKind::Head, 1, 4100, 300);
    cases.push(Case::new(
        "head",
        net,
        Op::Head(Head { logits, x, logit_row, norm, weight, eps: 1e-6 }),
        vec![logits],
        nothing(),
    ));

    let (mut net, mut random) = (Net::new(90), Random(33));
    let ids: Vec<u32> = (0..90).flat_map(|row| [row % 7, 7 + row % 5, 12 + row % 4]).collect();
    let (act, h) = (net.per_row("act", DType::Bf16, 3 * 70), net.per_row("h", DType::Bf16, 120));
    let expert_id = net.per_row("expert_id", DType::U32, 3);
    let weight = net.gemm(&mut random, GemmKind::ExpertGateUp, 16, 140, 120);
    let up = MoeUp { act, h, expert_id, weight, first_expert: 0, local_experts: 16, top_k: 3, early_choice: true };
    cases.push(Case::new("up", net, Op::MoeUp(up), vec![act], nothing()).words(expert_id, ids.clone()));

    let (mut net, mut random) = (Net::new(90), Random(34));
    let x = net.per_row("x", DType::F32, 500);
    let (act, expert_id) = (net.per_row("act", DType::Bf16, 3 * 70), net.per_row("expert_id", DType::U32, 3));
    let expert_weight = net.per_row("expert_weight", DType::F32, 3);
    let weight = net.gemm(&mut random, GemmKind::ExpertDown, 16, 500, 70);
    let sum = MoeSum::Residual { x };
    let (experts, first_expert, local_experts) = (16, 0, 16);
    let down = MoeDown {
        sum,
        act,
        expert_id,
        expert_weight,
        weight,
        shared: None,
        experts,
        first_expert,
        local_experts,
        top_k: 3,
    };
    cases.push(Case::new("down", net, Op::MoeDown(down), vec![x], nothing()).words(expert_id, ids));

    // One row over so many groups that they are divided; many rows that are divided themselves; both at once.
    for (rows, position) in [(1, 2999), (60, 500), (40, 2999)] {
        let (lora, rope_dim, heads, pages) = (64, 16, 8, 48);
        let mut net = Net::new(rows);
        let kv = net.buffer("kv", DType::Bf16, &[pages, PAGE_TOKENS, lora + rope_dim]);
        let block_table = net.buffer("block_table", DType::U32, &[2, pages]);
        let [slot, at] = ["slot", "position"].map(|name| net.per_row(name, DType::U32, 1));
        let [o_lat, q_lat] = ["o_lat", "q_lat"].map(|name| net.per_row(name, DType::Bf16, heads * lora));
        let q_rope = net.per_row("q_rope", DType::Bf16, heads * rope_dim);
        let partials = net.buffer("partials", DType::F32, &[1, 1]);
        let paged = Paged { kv, block_table };
        let (slot_words, positions) = (vec![0; rows], (0..rows as u32).map(|row| position - row).collect());
        let table: Vec<u32> = (0..pages as u32).collect();
        let mla =
            MlaAttend { o_lat, q_lat, q_rope, paged, slot, position: at, partials, heads, rope_dim, lora, scale: 0.1 };
        let case = Case::new(format!("mla {rows}"), net.clone(), Op::MlaAttend(mla), vec![o_lat], nothing());
        cases.push(case.words(slot, slot_words).words(at, positions).words(block_table, table));
    }

    let (rows, heads, kv_heads, head_dim, pages) = (40, 8, 4, 20, 12);
    let mut net = Net::new(rows);
    let kv = net.buffer("kv", DType::Bf16, &[pages, PAGE_TOKENS, 2 * kv_heads * head_dim]);
    let block_table = net.buffer("block_table", DType::U32, &[2, pages]);
    let [slot, position] = ["slot", "position"].map(|name| net.per_row(name, DType::U32, 1));
    let [out, q] = ["out", "q"].map(|name| net.per_row(name, DType::Bf16, heads * head_dim));
    let partials = net.buffer("partials", DType::F32, &[1, 1]);
    let paged = Paged { kv, block_table };
    let gqa = GqaAttend { out, q, paged, slot, position, partials, heads, kv_heads, head_dim, scale: 0.2 };
    let case = Case::new("gqa", net, Op::GqaAttend(gqa), vec![out], nothing());
    let positions = (0..rows as u32).map(|row| 700 - row * 13).collect();
    cases.push(case.words(position, positions).words(block_table, (0..pages as u32).collect()));
    cases
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let pools = [1, 2, 5].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap());
    for case in large() {
        let runs = pools.each_ref().map(|pool| pool.install(|| case.run(case.memory(Precision::Contract))));
        for id in &case.writes {
            let bits = runs.each_ref().map(|run| run.f32(*id).iter().map(|x| x.to_bits()).collect::<Vec<_>>());
            assert!(bits[0] == bits[1] && bits[0] == bits[2], "{}", case.name);
        }
    }
}

/// A thread that waits for the groups of one row may be handed another row meanwhile.
#[test]
fn rows_and_their_groups_divide_at_once() {
    let case = large().into_iter().find(|case| case.name == "mla 40").expect("the case of many long rows");
    let pool = rayon::ThreadPoolBuilder::new().num_threads(8).build().unwrap();
    for _ in 0..60 {
        pool.install(|| case.run(case.memory(Precision::Oracle)));
    }
}
