//! Expert-parallel ranks on CPU devices, step by step: every route counted once, pad rows nowhere, exchanges in one order on every rank.

use slotgraph_graphs::device::{Device, DeviceError, DeviceFacts};
use slotgraph_graphs::exchange::MemoryExchange;
use slotgraph_graphs::plan::RankShape;
use slotgraph_graphs::spec::Mlp;
use slotgraph_graphs::step::{StepInput, StepLimits, StepOutput};
use slotgraph_kernels::Op;
use slotgraph_tests::cpu::{asks, bits, demo};
use slotgraph_tests::drive::{self, Ask, Drive, Packing};
use std::time::Duration;

/// No step runs in a smaller bucket, so batches of fewer rows carry pad rows.
const PACKING: Packing = Packing { chunk: 8, bucket_min: 8 };

/// What one settled step had.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Step {
    rows: u64,
    bucket: u64,
    local: u64,
    remote: u64,
    pad_rows: u64,
}

/// Writes down what passes through it.
struct Watched<D> {
    device: D,
    enqueued: Vec<(u64, u64)>,
    settled: Vec<Step>,
}

impl<D: Device> Device for Watched<D> {
    fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError> {
        self.enqueued.push((input.rows.len() as u64, input.bucket as u64));
        self.device.enqueue(input)
    }
    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        let settled = self.device.poll(output)?;
        if settled {
            let (rows, bucket) = self.enqueued[self.settled.len()];
            let (local, remote, pad_rows) = (output.routes_local, output.routes_remote, u64::from(output.pad_rows));
            self.settled.push(Step { rows, bucket, local, remote, pad_rows });
        }
        Ok(settled)
    }
    fn in_flight(&self) -> usize {
        self.device.in_flight()
    }
    fn facts(&self) -> DeviceFacts {
        self.device.facts()
    }
}

/// What every rank of a run said and did.
struct Ran {
    /// By batch and request.
    said: Vec<Vec<Vec<String>>>,
    /// By rank.
    steps: Vec<Vec<Step>>,
    /// Exchanges that each rank came to.
    entered: Vec<u64>,
}

/// Batches of these asks, one after another, on every rank of `ranks`.
fn over_ranks(ranks: usize, limits: &StepLimits, batches: &[Vec<Ask>]) -> Ran {
    let exchange = MemoryExchange::new(ranks, Duration::from_secs(60));
    let outcomes: Vec<_> = std::thread::scope(|scope| {
        let rank = |rank: usize| {
            let exchange = exchange.clone();
            scope.spawn(move || {
                let device = demo().device(limits, |options| {
                    options.rank = RankShape { rank, ranks };
                    options.peers = (ranks > 1).then_some(exchange as _);
                    options.threads = Some(1);
                });
                let mut device = Watched { device, enqueued: Vec::new(), settled: Vec::new() };
                let mut drive = Drive::new(limits);
                let said: Vec<_> = batches.iter().map(|asks| bits(&drive.run(&mut device, PACKING, asks))).collect();
                (said, device.settled)
            })
        };
        let threads: Vec<_> = (0..ranks).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    });
    let entered = (0..ranks).map(|rank| exchange.entered(rank)).collect();
    let (said, steps): (Vec<_>, Vec<_>) = outcomes.into_iter().unzip();
    assert!(said.iter().all(|other| *other == said[0]), "every rank says the same");
    Ran { said: said.into_iter().next().expect("there is a rank"), steps, entered }
}

#[test]
fn pad_rows_are_routed_nowhere_and_every_route_is_counted_once() {
    let limits = drive::limits(8, 0);
    let all = asks(6);
    let batch = |from: usize, size: usize| -> Vec<Ask> { all.iter().cycle().skip(from).take(size).cloned().collect() };
    let batches = [batch(0, 8), batch(2, 3), batch(1, 8), batch(5, 1)];
    let Mlp::Moe(moe) = &demo().spec.mlp else { panic!("the demo model has experts") };
    let plan = demo().device(&limits, |_| {}).plan(8).expect("a bucket of these limits").clone();
    let sparse = plan.ops.iter().filter(|placed| matches!(placed.op, Op::MoeGate(_))).count() as u64;
    let reference = over_ranks(1, &limits, &batches).said;
    for ranks in [1, 2, 4, 8] {
        let Ran { said, steps, entered } = over_ranks(ranks, &limits, &batches);
        assert_eq!(said, reference, "{ranks} ranks");
        let ran = steps[0].len() as u64;
        let due = if ranks > 1 { ran * sparse } else { 0 };
        assert_eq!(entered, vec![due; ranks], "one exchange a sparse layer and step, on every rank");
        assert!(steps[0].iter().any(|step| step.pad_rows >= 5) && steps[0].iter().any(|step| step.pad_rows == 0));
        for at in 0..ran as usize {
            let first = &steps[0][at];
            let routes = first.rows * moe.routing.top_k as u64 * sparse;
            for steps in &steps {
                let step = &steps[at];
                assert_eq!(
                    (step.rows, step.bucket, step.pad_rows),
                    (first.rows, first.bucket, first.bucket - first.rows)
                );
                assert_eq!(step.local + step.remote, routes, "step {at} of {ranks} ranks: {step:?}");
            }
            let local: u64 = steps.iter().map(|steps| steps[at].local).sum();
            assert_eq!(local, routes, "an expert is some rank's own");
        }
    }
}

#[test]
fn a_small_batch_does_not_see_what_the_large_one_before_it_held() {
    let limits = drive::limits(8, 0);
    let all = asks(4);
    let batch = |from: usize, size: usize| -> Vec<Ask> { all.iter().cycle().skip(from).take(size).cloned().collect() };
    let after = |large: Vec<Ask>| over_ranks(2, &limits, &[large, batch(2, 3)]).said.pop();
    assert_eq!(after(batch(0, 8)), after(batch(7, 8)));
}
