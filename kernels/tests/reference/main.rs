//! The CPU references against plain f64 arithmetic, against themselves in other company, and against numbers worked by hand.

mod attention;
mod cases;
mod exact;
mod independence;
mod moe;
mod projections;
mod rig;
mod sampling;
mod shapes;
mod station;
mod steps;

use slotgraph_kernels::Precision;

/// Most that an op may differ from f64, as a share of the largest value of the buffer. Measured: 4.1e-7 and 5.3e-3.
const ORACLE_LIMIT: f64 = 2e-6;
const CONTRACT_LIMIT: f64 = 1.2e-2;

#[test]
fn every_op_computes_what_f64_computes() {
    for case in cases::all() {
        for (precision, limit) in [(Precision::Oracle, ORACLE_LIMIT), (Precision::Contract, CONTRACT_LIMIT)] {
            let before = case.memory(precision);
            let after = case.run(case.memory(precision));
            for expected in (case.expect)(&case.net, &before, &after) {
                let got = expected.lines(after.f32(expected.buffer));
                let largest = expected.values.iter().fold(0.0_f64, |max, x| max.max(x.abs()));
                let worst =
                    got.iter().zip(&expected.values).map(|(&a, b)| (f64::from(a) - b).abs()).fold(0.0, f64::max);
                let name = &case.net.buffers[expected.buffer.0 as usize].name;
                assert_eq!(got.len(), expected.values.len());
                assert!(largest > 0.0, "{} {name}: nothing to compare", case.name);
                assert!(worst <= limit * largest, "{} {name} {precision:?}: {worst:e} of {largest:e}", case.name);
            }
        }
    }
}

#[test]
fn contract_precision_rounds_at_its_points_and_nowhere_else() {
    let representable = |x: &f32| x.to_bits() & 0xffff == 0;
    for case in cases::all() {
        let after = case.run(case.memory(Precision::Contract));
        let unrounded = case.run(case.memory(Precision::Oracle));
        for &id in &case.writes {
            let spec = &case.net.buffers[id.0 as usize];
            let values = after.f32(id);
            match spec.dtype {
                slotgraph_kernels::DType::Bf16 => {
                    assert!(values.iter().all(representable), "{} {}: a value is not bf16", case.name, spec.name);
                    let free = unrounded.f32(id).iter().all(representable);
                    assert!(!free, "{} {}: the oracle precision rounds", case.name, spec.name);
                }
                _ => {
                    let rounds = values.iter().all(representable);
                    assert!(!rounds || case.name == "embed", "{} {}: fp32 was rounded", case.name, spec.name);
                }
            }
        }
    }
}
