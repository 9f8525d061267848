//! Shape checks: every buffer and weight that an op names is looked at.

use crate::cases;
use crate::rig::Net;
use crate::station::Station;
use slotgraph_kernels::spec::Specs;
use slotgraph_kernels::{BufferId, DType, Op, WeightForm};

/// Specs with one of them damaged.
fn damaged(net: &Net, damage: impl FnOnce(&mut Net)) -> Net {
    let mut net = net.clone();
    damage(&mut net);
    net
}

fn everything() -> Vec<(String, Net, Op)> {
    let mut all: Vec<(String, Net, Op)> = cases::all().into_iter().map(|case| (case.name, case.net, case.op)).collect();
    let station = Station::new(50);
    for op in [Op::Fetch(station.fetch), Op::Sample(station.sample), Op::Feed(station.feed)] {
        all.push((op.name().into(), station.net.clone(), op));
    }
    all
}

#[test]
fn a_wrong_dtype_or_extent_of_any_buffer_is_refused_by_its_name() {
    for (name, net, op) in everything() {
        assert_eq!(op.check(&net), Ok(()), "{name}");
        let mut touched = op.reads();
        touched.extend(op.writes());
        for id in touched {
            let spec = net.buffer(id).clone();
            let retyped = damaged(&net, |net| {
                let dtype = &mut net.buffers[id.0 as usize].dtype;
                *dtype = if *dtype == DType::U32 { DType::F32 } else { DType::U32 };
            });
            let error = op.check(&retyped).expect_err(&format!("{name}: dtype of {}", spec.name));
            assert_eq!((error.op, error.buffer.as_str()), (op.name(), spec.name.as_str()), "{name}: {error}");
            // Partials are a device's own business; a block table and rings may be of any size that holds enough.
            if ["partials", "sample.scratch", "block_table", "kv", "ring.input", "ring.output"]
                .contains(&spec.name.as_str())
            {
                continue;
            }
            for axis in 0..spec.shape.len() {
                let wider = damaged(&net, |net| net.buffers[id.0 as usize].shape[axis] += 1);
                if axis == 1
                    && ["x", "slot.pages", "slot.counts", "attn_in"].contains(&spec.name.as_str())
                    && op.check(&wider).is_ok()
                {
                    continue; // Columns of a wider buffer, more pages a slot, or (to the ends alone) another vocabulary.
                }
                assert!(op.check(&wider).is_err(), "{name}: extent {axis} of {}", spec.name);
            }
        }
    }
}

#[test]
fn a_wrong_form_or_extent_of_any_weight_is_refused() {
    for (name, net, op) in everything() {
        for id in op.weights() {
            let form = &net.weight(id).form;
            let other = match form {
                WeightForm::Vector { .. } => WeightForm::Table { rows: 1, cols: 1 },
                _ => WeightForm::Vector { n: 1 },
            };
            assert!(
                op.check(&damaged(&net, |net| net.weights[id.0 as usize].form = other)).is_err(),
                "{name} {form:?}"
            );
            let wider = match form.clone() {
                WeightForm::Gemm { kind, groups, n, k } => vec![
                    WeightForm::Gemm { kind, groups: groups + 1, n, k },
                    WeightForm::Gemm { kind, groups, n: n + 2, k },
                    WeightForm::Gemm { kind, groups, n, k: k + 1 },
                ],
                WeightForm::Vector { n } => vec![WeightForm::Vector { n: n + 1 }],
                WeightForm::Table { rows, cols } => vec![WeightForm::Table { rows, cols: cols + 1 }],
                WeightForm::Rope(mut table) => {
                    table.inv_freq_bits.pop();
                    vec![WeightForm::Rope(table)]
                }
            };
            for form in wider {
                let net = damaged(&net, |net| net.weights[id.0 as usize].form = form.clone());
                assert!(op.check(&net).is_err(), "{name}: {form:?}");
            }
        }
    }
}

#[test]
fn outputs_are_operands_of_their_own() {
    for (name, net, op) in everything() {
        let (reads, writes) = (op.reads(), op.writes());
        for id in &writes {
            assert_eq!(writes.iter().filter(|other| *other == id).count(), 1, "{name} writes a buffer once");
        }
        assert!(!writes.is_empty() && !reads.is_empty(), "{name}");
        let known = |id: &BufferId| (id.0 as usize) < net.buffers.len();
        assert!(reads.iter().chain(&writes).all(known), "{name}");
    }
}

#[test]
fn an_op_that_would_read_what_it_overwrites_is_refused() {
    let (_, net, op) = everything().into_iter().find(|(name, ..)| name == "mla_uv").unwrap();
    let Op::MlaUv(mut uv) = op else { unreachable!() };
    let square = damaged(&net, |net| {
        net.buffers[uv.out.0 as usize].shape = net.buffers[uv.o_lat.0 as usize].shape.clone();
        let WeightForm::Gemm { n, k, .. } = &mut net.weights[uv.w_uv.0 as usize].form else { unreachable!() };
        *n = *k;
    });
    assert_eq!(Op::MlaUv(uv.clone()).check(&square), Ok(()));
    uv.out = uv.o_lat;
    assert!(Op::MlaUv(uv).check(&square).is_err());
}
