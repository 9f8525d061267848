//! embed, norm_gemm, gemm_add, norm_gate_up, head.

use crate::cases::{Case, Expected};
use crate::rig::exactly::{apply, gated, norm, widened};
use crate::rig::{Net, Random};
use slotgraph_kernels::contract::GemmKind;
use slotgraph_kernels::ops::{Embed, GemmAdd, Head, NormGateUp, NormGemm, Op};
use slotgraph_kernels::{Cols, DType};

const EPS: f32 = 1e-5;

pub fn cases() -> Vec<Case> {
    let mut cases = vec![embed(), norm_gate_up(), head()];
    cases.extend([(50, 37, true), (51, 37, false), (300, 16, true)].map(|(k, n, bias)| norm_gemm(k, n, bias)));
    cases.extend(
        [(GemmKind::AttnOut, 51, true), (GemmKind::Down, 129, false)].map(|(kind, k, bias)| gemm_add(kind, k, bias)),
    );
    cases
}

fn embed() -> Case {
    let (mut net, mut random) = (Net::new(5), Random(1));
    let x = net.per_row("x", DType::F32, 19);
    let token = net.per_row("token", DType::U32, 1);
    let table = net.table(&mut random, 23, 19);
    Case::new(
        "embed",
        net,
        Op::Embed(Embed { x, token, table }),
        vec![x],
        Box::new(move |net, before, _| {
            let table = net.matrix(table, 0);
            let lines = before.u32(token).iter().flat_map(|&token| table[token as usize].clone());
            vec![Expected::whole(x, lines.collect())]
        }),
    )
    .words(token, vec![22, 0, 7, 7, 13])
}

fn norm_gemm(k: usize, n: usize, with_bias: bool) -> Case {
    let (mut net, mut random) = (Net::new(5), Random(2));
    let x = net.per_row("x", DType::F32, k + 20);
    let out = net.per_row("out", DType::F32, n);
    let norm_weight = net.vector(&mut random, k);
    let weight = net.gemm(&mut random, GemmKind::AttnIn, 1, n, k);
    let bias = with_bias.then(|| net.vector(&mut random, n));
    let cols = Cols { buffer: x, offset: 7, width: k };
    Case::new(
        format!("norm_gemm k = {k}"),
        net,
        Op::NormGemm(NormGemm { out, x: cols, norm: norm_weight, weight, bias, eps: EPS }),
        vec![out],
        Box::new(move |net, before, _| {
            let bias = bias.map_or(vec![0.0; n], |bias| net.values(bias));
            let line = |x: &[f32]| {
                let h = norm(&widened(&x[7..7 + k]), &net.values(norm_weight), EPS.into());
                apply(&net.matrix(weight, 0), &h).into_iter().zip(&bias).map(|(y, b)| y + b).collect::<Vec<_>>()
            };
            vec![Expected::whole(out, before.f32(x).chunks(k + 20).flat_map(line).collect())]
        }),
    )
}

fn gemm_add(kind: GemmKind, k: usize, with_bias: bool) -> Case {
    let (mut net, mut random) = (Net::new(7), Random(3));
    let n = 37;
    let x = net.per_row("x", DType::F32, n);
    let input = net.per_row("input", DType::Bf16, k);
    let weight = net.gemm(&mut random, kind, 1, n, k);
    let bias = with_bias.then(|| net.vector(&mut random, n));
    Case::new(
        format!("gemm_add {kind:?}"),
        net,
        Op::GemmAdd(GemmAdd { x, input, weight, bias }),
        vec![x],
        Box::new(move |net, before, _| {
            let bias = bias.map_or(vec![0.0; n], |bias| net.values(bias));
            let products = before.f32(input).chunks(k).flat_map(|input| apply(&net.matrix(weight, 0), &widened(input)));
            let sums = products.zip(before.f32(x)).zip(bias.iter().cycle());
            vec![Expected::whole(x, sums.map(|((y, &x), b)| f64::from(x) + y + b).collect())]
        }),
    )
}

fn norm_gate_up() -> Case {
    let (mut net, mut random) = (Net::new(5), Random(4));
    let (hidden, inner) = (51, 21);
    let x = net.per_row("x", DType::F32, hidden);
    let out = net.per_row("out", DType::Bf16, inner);
    let norm_weight = net.vector(&mut random, hidden);
    let weight = net.gemm(&mut random, GemmKind::GateUp, 1, 2 * inner, hidden);
    Case::new(
        "norm_gate_up",
        net,
        Op::NormGateUp(NormGateUp { out, x, norm: norm_weight, weight, eps: EPS }),
        vec![out],
        Box::new(move |net, before, _| {
            let line = |x: &[f32]| {
                gated(&apply(&net.matrix(weight, 0), &norm(&widened(x), &net.values(norm_weight), EPS.into())))
            };
            vec![Expected::whole(out, before.f32(x).chunks(hidden).flat_map(line).collect())]
        }),
    )
}

fn head() -> Case {
    let (mut net, mut random) = (Net::new(6), Random(5));
    net.logit_rows = 3;
    let (hidden, vocab) = (51, 83);
    let x = net.per_row("x", DType::F32, hidden);
    let logits = net.buffer("logits", DType::F32, &[3, vocab]);
    let logit_row = net.buffer("logit_row", DType::U32, &[3]);
    let norm_weight = net.vector(&mut random, hidden);
    let weight = net.gemm(&mut random, GemmKind::Head, 1, vocab, hidden);
    Case::new(
        "head",
        net,
        Op::Head(Head { logits, x, logit_row, norm: norm_weight, weight, eps: EPS }),
        vec![logits],
        Box::new(move |net, before, _| {
            let line = |&row: &u32| {
                let x = &before.f32(x)[row as usize * hidden..][..hidden];
                apply(&net.matrix(weight, 0), &norm(&widened(x), &net.values(norm_weight), EPS.into()))
            };
            vec![Expected::whole(logits, before.u32(logit_row).iter().flat_map(line).collect())]
        }),
    )
    .words(logit_row, vec![5, 0, 3])
}
