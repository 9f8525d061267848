//! The CPU device, driven step by step without an engine: against the oracle, and against itself in every bucket, packing,
//! launch-ahead, thread count and rank count.

use slotgraph_graphs::cpu::{CpuDevice, CpuOptions, Loaded, SharedWeights};
use slotgraph_graphs::device::{Device, DeviceError};
use slotgraph_graphs::exchange::MemoryExchange;
use slotgraph_graphs::fault::{Fault, FaultDevice};
use slotgraph_graphs::plan::RankShape;
use slotgraph_graphs::source::Source;
use slotgraph_graphs::spec::ModelSpec;
use slotgraph_graphs::step::{Record, StepLimits, StepOutput};
use slotgraph_kernels::{Op, Precision};
use slotgraph_runtime::checkpoint::Checkpoint;
use slotgraph_tests::drive::{self, Ask, Drive, Packing};
use slotgraph_tests::{MODELS, model, oracle};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

const DEFAULT: Packing = Packing { chunk: 32, bucket_min: 1 };

struct Model {
    spec: ModelSpec,
    source: Arc<dyn Source>,
}

impl Model {
    fn open(name: &str) -> Model {
        let checkpoint = Checkpoint::open(&model(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        Model { source: checkpoint.source(), spec: checkpoint.spec }
    }

    /// A device of one rank with `change`d options.
    fn device<'a>(&'a self, limits: &'a StepLimits, change: impl FnOnce(&mut CpuOptions<'a>)) -> CpuDevice {
        let mut options = CpuOptions::new(&self.spec, limits, &*self.source);
        change(&mut options);
        CpuDevice::prepare(options).unwrap_or_else(|error| panic!("{error}"))
    }
}

fn demo() -> &'static Model {
    static DEMO: OnceLock<Model> = OnceLock::new();
    DEMO.get_or_init(|| Model::open("shakespeare-dsv2"))
}

/// What `asks` say on `device`.
fn said(device: &mut dyn Device, limits: &StepLimits, packing: Packing, asks: &[Ask]) -> Vec<Vec<String>> {
    bits(&Drive::new(limits).run(device, packing, asks))
}

/// Prompts of uneven lengths from the oracle, some of them longer than a page.
fn asks(tokens: usize) -> Vec<Ask> {
    let cases = oracle::cases("dsv2");
    cases.iter().filter(|case| case.prompt_ids.len() <= 160).map(|case| Ask::greedy(&case.prompt_ids, tokens)).collect()
}

/// Everything in a record, floats by their bits.
fn bits(records: &[Vec<Record>]) -> Vec<Vec<String>> {
    let line = |record: &Record| {
        let top: Vec<(u32, u32)> = record.top.iter().map(|&(id, logprob)| (id, logprob.to_bits())).collect();
        format!("{} {} {:08x} {} {top:x?}", record.position, record.token, record.logprob.to_bits(), record.rank)
    };
    records.iter().map(|records| records.iter().map(line).collect()).collect()
}

fn alone(precision: Precision) -> Vec<Vec<String>> {
    let limits = drive::limits(1, 0);
    let mut device = demo().device(&limits, |options| options.precision = precision);
    said(&mut device, &limits, DEFAULT, &asks(12))
}

/// What the demo model says one request at a time, in fp32.
fn reference() -> &'static [Vec<String>] {
    static ALONE: OnceLock<Vec<Vec<String>>> = OnceLock::new();
    ALONE.get_or_init(|| alone(Precision::Oracle))
}

#[test]
fn first_logits_and_tokens_are_the_oracles() {
    for (name, file) in MODELS {
        let model = Model::open(name);
        let limits = drive::limits(1, 0);
        let mut device = model.device(&limits, |_| {});
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        device.watch(Box::new(move |placed, memory| {
            if let Op::Head(head) = &placed.op {
                let vocab = memory.stride(head.logits);
                log.lock().unwrap().push(memory.f32(head.logits)[..vocab].to_vec());
            }
        }));
        let mut worst = 0.0_f64;
        let mut drive = Drive::new(&limits);
        for case in oracle::cases(file).iter().filter(|case| case.prompt_ids.len() <= 400) {
            seen.lock().unwrap().clear();
            let ask = Ask::greedy(&case.prompt_ids, 4);
            let records = drive.run(&mut device, DEFAULT, std::slice::from_ref(&ask));
            let prefill_steps = case.prompt_ids.len().div_ceil(DEFAULT.chunk);
            if let Some(expected) = &case.first_logits {
                let seen = seen.lock().unwrap();
                let got = &seen[prefill_steps - 1];
                let difference = got.iter().zip(expected).map(|(&got, want)| (f64::from(got) - want).abs());
                worst = difference.fold(worst, f64::max);
                assert!(worst <= 1e-3, "{name} {}: logits differ by {worst:e}", case.name);
            }
            let tokens: Vec<u32> = records[0].iter().map(|record| record.token).collect();
            let sure = case.margin.iter().take(4).position(|&margin| margin < 2e-4).unwrap_or(4);
            assert_eq!(tokens[..sure], case.tokens[..sure], "{name} {}", case.name);
        }
        println!("{name}: first logits differ from the oracle by at most {worst:.1e}");
        assert!(worst > 0.0, "{name}: some case of the oracle has first logits");
    }
}

#[test]
fn a_rows_bits_ignore_bucket_company_chunk_and_launch_ahead() {
    for (slots, launch_ahead, chunk, bucket_min) in
        [(1, 0, 32, 64), (1, 1, 7, 1), (4, 0, 32, 1), (5, 1, 3, 1), (8, 2, 17, 16), (16, 2, 32, 64)]
    {
        let limits = drive::limits(slots, launch_ahead);
        let mut device = demo().device(&limits, |_| {});
        let mut asks = asks(12);
        asks.iter_mut().enumerate().for_each(|(index, ask)| ask.after = index * 3 % 11);
        let said = said(&mut device, &limits, Packing { chunk, bucket_min }, &asks);
        let what = format!("{slots} slots, launch-ahead {launch_ahead}, chunk {chunk}, bucket at least {bucket_min}");
        assert_eq!(said, reference(), "{what}");
    }
}

#[test]
fn computed_padding_changes_no_bit() {
    let limits = drive::limits(4, 1);
    let mut device = demo().device(&limits, |options| options.compute_padding = true);
    let said = said(&mut device, &limits, Packing { chunk: 9, bucket_min: 8 }, &asks(12));
    assert_eq!(said, reference());
}

#[test]
fn threads_change_no_bit() {
    let limits = drive::limits(8, 1);
    for threads in [1, 2, 5] {
        let mut device = demo().device(&limits, |options| options.threads = Some(threads));
        let said = said(&mut device, &limits, DEFAULT, &asks(12));
        assert_eq!(said, reference(), "{threads} threads");
    }
}

#[test]
fn ranks_change_no_bit() {
    for (precision, reference) in
        [(Precision::Oracle, reference().to_vec()), (Precision::Contract, alone(Precision::Contract))]
    {
        for ranks in [2, 4, 8] {
            let limits = drive::limits(4, 1);
            let said = over_ranks(ranks, &limits, precision);
            for (rank, said) in said.iter().enumerate() {
                assert_eq!(*said, reference, "rank {rank} of {ranks}, {precision:?}");
            }
        }
    }
}

/// What every rank says; ranks are OS threads over one exchange and one pool of weights.
fn over_ranks(ranks: usize, limits: &StepLimits, precision: Precision) -> Vec<Vec<Vec<String>>> {
    let exchange = MemoryExchange::new(ranks, Duration::from_secs(60));
    let weights = SharedWeights::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let (exchange, weights) = (exchange.clone(), &weights);
                scope.spawn(move || {
                    let mut device = demo().device(limits, |options| {
                        options.rank = RankShape { rank, ranks };
                        options.precision = precision;
                        options.peers = Some(exchange);
                        options.weights = Some(weights);
                    });
                    said(&mut device, limits, DEFAULT, &asks(12))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect()
    })
}

#[test]
fn ranks_share_the_weights_that_are_equal() {
    let limits = drive::limits(1, 0);
    let single = demo().device(&limits, |_| {}).facts().weight_bytes;
    let exchange = MemoryExchange::new(2, Duration::from_secs(60));
    let weights = SharedWeights::default();
    let read = Mutex::new(Vec::new());
    let progress = |loaded: Loaded| read.lock().unwrap().push(loaded);
    let devices: Vec<CpuDevice> = (0..2)
        .map(|rank| {
            demo().device(&limits, |options| {
                options.rank = RankShape { rank, ranks: 2 };
                options.peers = Some(exchange.clone());
                options.weights = Some(&weights);
                options.progress = Some(&progress);
            })
        })
        .collect();
    let each: u64 = devices.iter().map(|device| device.facts().weight_bytes).sum();
    assert!(each > single, "both ranks hold attention and dense parts");
    let read = read.into_inner().unwrap();
    let whole: u64 = read.iter().filter(|loaded| loaded.bytes == loaded.of).map(|loaded| loaded.of).sum();
    let experts: u64 =
        devices[0].plan(1).unwrap().weights.iter().filter(|spec| spec.name.contains("expert")).count() as u64;
    assert!(experts > 0 && whole > 0);
    assert!(whole <= single, "what both need is read once: {whole} of {single} bytes");
}

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
