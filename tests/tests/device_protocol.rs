//! The device protocol on the CPU device: rings, failures, lost ranks, planted faults; and the null device beside it.

use slotgraph_graphs::cpu::CpuDevice;
use slotgraph_graphs::device::{Device, DeviceError, DeviceFacts};
use slotgraph_graphs::exchange::MemoryExchange;
use slotgraph_graphs::fault::{Fault, FaultDevice};
use slotgraph_graphs::null::{Draw, Drawn, NullDevice, NullOptions, Settle};
use slotgraph_graphs::plan::RankShape;
use slotgraph_graphs::step::{
    EndReason, Generation, Record, RowFeed, RowInput, RowWant, SlotId, StepInput, StepLimits, StepOutput,
};
use slotgraph_kernels::cpu::CpuBuffer;
use slotgraph_tests::cpu::{DEFAULT, asks, bits, demo, reference, said};
use slotgraph_tests::drive::{self, Ask, Drive, Packing};
use slotgraph_tests::oracle;
use std::collections::HashSet;
use std::time::Duration;

#[test]
fn a_lost_rank_is_named_by_the_others() {
    let limits = drive::limits(1, 0);
    let exchange = MemoryExchange::new(2, Duration::from_secs(60));
    let rank = |rank: usize| {
        demo().device(&limits, |options| {
            options.rank = RankShape { rank, ranks: 2 };
            options.peers = Some(exchange.clone());
        })
    };
    let mut waiting = rank(0);
    drop(rank(1));
    let step = Drive::new(&limits).first_step(DEFAULT, &Ask::greedy(&[0, 5, 9], 2));
    let error = waiting.enqueue(&step).unwrap_err();
    assert_eq!(error.to_string(), "rank 1 left the exchange: its device was dropped");
    assert!(matches!(waiting.poll(&mut StepOutput::default()), Err(DeviceError::Lost(_))), "it stays lost");
}

#[test]
fn the_null_device_decides_ends_as_the_cpu_device_does() {
    let limits = StepLimits { max_model_len: 60, pages_per_slot: 1, pages: 5, ..drive::limits(4, 1) };
    let asks: Vec<Ask> = varied_asks();
    let device = demo().device(&limits, |_| {});
    let (cpu, cpu_pads) = heard(device, &limits, &asks);
    let spoken: Vec<Vec<u32>> = cpu.iter().map(|records| records.iter().map(|record| record.token).collect()).collect();
    let script = move |draw: Draw| Drawn::Token(spoken[draw.generation.0 as usize - 1][draw.generated as usize]);
    let null = NullDevice::new(NullOptions {
        limits: limits.clone(),
        eos_ids: demo().spec.eos_ids.clone(),
        settle: Settle::AtOnce,
        step_ns: 0,
        script: Box::new(script),
    });
    let (null, null_pads) = heard(null, &limits, &asks);
    let outline = |records: &[Vec<Record>]| -> Vec<Vec<_>> {
        let line = |r: &Record| (r.slot, r.generation, r.position, r.token, r.scored, r.top.len(), r.ended);
        records.iter().map(|records| records.iter().map(line).collect()).collect()
    };
    assert_eq!(outline(&null), outline(&cpu));
    assert_eq!(null_pads, cpu_pads);
    let ends: HashSet<_> = cpu.iter().map(|records| format!("{:?}", records.last().unwrap().ended.unwrap())).collect();
    assert_eq!(ends.len(), 4, "EOS, stop id, max_tokens and context all occur: {ends:?}");
}

/// Requests that end in every way: the models' first tokens serve as stop ids.
fn varied_asks() -> Vec<Ask> {
    let prompts: Vec<Vec<u32>> =
        oracle::cases("dsv2").into_iter().map(|case| case.prompt_ids).filter(|ids| ids.len() <= 40).collect();
    let eos = demo().spec.eos_ids[0];
    let mut asks = Vec::new();
    for (index, prompt) in prompts.iter().cycle().take(24).enumerate() {
        let mut ask = Ask::greedy(prompt, [1, 7, 100][index % 3]);
        ask.after = index;
        ask.sampling.logprobs = [None, Some(0), Some(3)][index % 3];
        match index % 4 {
            // A strong bias makes the model end by itself, in one case only after min_tokens.
            0 => {
                ask.sampling.ignore_eos = false;
                ask.sampling.logit_bias = vec![(eos, 100.0)];
                ask.sampling.min_tokens = index as u32 % 3;
            }
            1 => ask.sampling.stop_ids = (0..2048).step_by(3).take(16).collect(),
            2 => ask.sampling.logit_bias = vec![(17, 100.0)],
            _ => {}
        }
        if index % 8 == 6 {
            ask.sampling.stop_ids = vec![17];
            ask.sampling.min_tokens = 2;
        }
        asks.push(ask);
    }
    asks
}

/// Records of each request, and the pad rows of each step.
fn heard(device: impl Device, limits: &StepLimits, asks: &[Ask]) -> (Vec<Vec<Record>>, Vec<u32>) {
    let mut listening = Listening { device, pads: Vec::new() };
    let records = Drive::new(limits).run(&mut listening, DEFAULT, asks);
    (records, listening.pads)
}

/// Writes down the pad rows of each step.
struct Listening<D> {
    device: D,
    pads: Vec<u32>,
}

impl<D: Device> Device for Listening<D> {
    fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError> {
        self.device.enqueue(input)
    }
    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        let settled = self.device.poll(output)?;
        if settled {
            self.pads.push(output.pad_rows);
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

#[test]
fn faults_inside_the_device_change_what_it_says() {
    let limits = drive::limits(4, 1);
    let packing = Packing { chunk: 9, bucket_min: 16 };
    for name in ["baked-position@3", "pad-write@2", "token@2", "logprob-bit@2"] {
        let device = demo().device(&limits, |_| {});
        let fault: Fault = name.parse().unwrap();
        let mut device = FaultDevice::arm(device, 0, &[fault]).unwrap();
        assert_ne!(said(&mut device, &limits, packing, &asks(12)), reference(), "{name}");
    }
    let mut unarmed = FaultDevice::arm(demo().device(&limits, |_| {}), 0, &[]).unwrap();
    assert_eq!(said(&mut unarmed, &limits, packing, &asks(12)), reference());
}

#[test]
fn a_nan_ends_its_own_request_alone() {
    let limits = drive::limits(2, 0);
    let asks = &asks(12)[..2];
    let mut device = Poisoned { device: demo().device(&limits, |_| {}), poison_at: 4 };
    let records = Drive::new(&limits).run(&mut device, DEFAULT, asks);
    let last = records[0].last().unwrap();
    assert_eq!((last.ended, last.token), (Some(EndReason::Nan), 0));
    assert!(records[0].len() < 12);
    assert_eq!(bits(&records)[1], reference()[1]);
}

/// Writes a NaN into the first key of page 1, which is slot 0's, before step `poison_at`.
struct Poisoned {
    device: CpuDevice,
    poison_at: u64,
}

impl Device for Poisoned {
    fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError> {
        if input.step == self.poison_at {
            let Some(CpuBuffer::F32(kv)) = self.device.buffer_mut("layer.2.kv") else { panic!("the cache is floats") };
            let page = kv.len() / drive::limits(2, 0).pages;
            kv[page] = f32::NAN;
        }
        self.device.enqueue(input)
    }
    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        self.device.poll(output)
    }
    fn in_flight(&self) -> usize {
        self.device.in_flight()
    }
    fn facts(&self) -> DeviceFacts {
        self.device.facts()
    }
}

#[test]
fn records_wait_in_the_ring_until_they_are_polled() {
    let limits = drive::limits(1, 2);
    let mut device = demo().device(&limits, |_| {});
    let ask = Ask::greedy(&[0, 5, 9], 9);
    let mut step = Drive::new(&limits).first_step(DEFAULT, &ask);
    let mut output = StepOutput::default();
    for round in 0..4 {
        for ahead in 1..=3 {
            assert!(!matches!(device.enqueue(&StepInput { step: 99, ..step.clone() }), Ok(())), "out of order");
            device.enqueue(&step).unwrap();
            assert_eq!(device.in_flight(), ahead);
            step = StepInput { step: step.step + 1, bucket: 1, features: step.features, ..StepInput::default() };
            step.rows = vec![RowInput {
                slot: SlotId(0),
                generation: Generation(1),
                feed: RowFeed::FromSlot,
                want: RowWant::Sample,
            }];
        }
        assert!(matches!(device.enqueue(&step), Err(DeviceError::RingFull { in_flight: 3, max: 3, .. })));
        for settled in 1..=3 {
            assert!(device.poll(&mut output).unwrap());
            assert_eq!(output.step, round * 3 + settled);
        }
        assert!(!device.poll(&mut output).unwrap());
    }
    assert_eq!(output.pad_rows, 1, "the request ended nine tokens in");
    assert!(output.records.is_empty());
}

#[test]
fn a_device_that_failed_stays_failed() {
    let limits = drive::limits(1, 0);
    let mut device = demo().device(&limits, |_| {});
    let unknown = Ask::greedy(&[0, 4_000_000], 2);
    let step = Drive::new(&limits).first_step(DEFAULT, &unknown);
    let error = device.enqueue(&step).unwrap_err();
    assert!(matches!(error, DeviceError::Op { op: "fetch", .. }), "{error}");
    assert!(matches!(device.enqueue(&step), Err(DeviceError::Lost(reason)) if reason == error.to_string()));
}
