//! The CPU device, driven step by step without an engine: against the oracle, and against itself in every bucket, packing,
//! launch-ahead, thread count and rank count.

use slotgraph_graphs::cpu::{CpuDevice, Loaded, SharedWeights};
use slotgraph_graphs::device::Device;
use slotgraph_graphs::exchange::MemoryExchange;
use slotgraph_graphs::plan::RankShape;
use slotgraph_graphs::step::StepLimits;
use slotgraph_kernels::{Op, Precision};
use slotgraph_tests::cpu::{DEFAULT, Model, alone, asks, bits, demo, reference, said};
use slotgraph_tests::drive::{self, Ask, Drive, Packing};
use slotgraph_tests::{MODELS, oracle};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

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
fn company_changes_no_bit_of_any_model() {
    for (name, file) in MODELS {
        let model = Model::open(name);
        let cases = oracle::cases(file).into_iter().filter(|case| case.prompt_ids.len() <= 100);
        let mut asks: Vec<Ask> = cases.map(|case| Ask::greedy(&case.prompt_ids, 8)).collect();
        let (alone, together) = (drive::limits(1, 0), drive::limits(5, 2));
        let expected = said(&mut model.device(&alone, |_| {}), &alone, DEFAULT, &asks);
        asks.iter_mut().enumerate().for_each(|(index, ask)| ask.after = index * 2 % 5);
        let packing = Packing { chunk: 11, bucket_min: 4 };
        assert_eq!(said(&mut model.device(&together, |_| {}), &together, packing, &asks), expected, "{name}");
    }
}

/// Seeded, penalised, biased and cut down: everything that a slot remembers matters.
fn elaborate(prompt: &[u32], seed: u64) -> Ask {
    let mut ask = Ask::greedy(prompt, 12);
    ask.sampling.temperature = 0.9;
    ask.sampling.top_p = 0.95;
    ask.sampling.top_k = 200;
    ask.sampling.seed = seed;
    ask.sampling.presence_penalty = 0.7;
    ask.sampling.frequency_penalty = 0.4;
    ask.sampling.repetition_penalty = 1.2;
    ask.sampling.logit_bias = vec![(17, -1.5), (201, 2.0)];
    ask.sampling.min_tokens = 4;
    ask
}

#[test]
fn a_request_that_lost_its_seat_goes_on_with_the_same_bits() {
    let limits = drive::limits(3, 1);
    let asks: Vec<Ask> = (0..6).zip(asks(1)).map(|(seed, ask)| elaborate(&ask.prompt, seed)).collect();
    let whole = Drive::new(&limits).run(&mut demo().device(&limits, |_| {}), DEFAULT, &asks);
    for kept in [1, 5, 11] {
        let resumed = asks.iter().zip(&whole).map(|(ask, records)| Ask {
            generated: records[..kept].iter().map(|record| record.token).collect(),
            ..ask.clone()
        });
        let resumed: Vec<Ask> = resumed.collect();
        let packing = Packing { chunk: 5, bucket_min: 1 };
        let rest = Drive::new(&limits).run(&mut demo().device(&limits, |_| {}), packing, &resumed);
        let expected: Vec<_> = whole.iter().map(|records| records[kept..].to_vec()).collect();
        assert_eq!(bits(&rest), bits(&expected), "after {kept} tokens");
    }
}

#[test]
fn scoring_a_finished_text_gives_the_bits_of_its_generation() {
    let limits = drive::limits(3, 1);
    let asks: Vec<Ask> = (0..6).zip(asks(1)).map(|(seed, ask)| elaborate(&ask.prompt, seed)).collect();
    let whole = Drive::new(&limits).run(&mut demo().device(&limits, |_| {}), DEFAULT, &asks);
    let scored: Vec<Ask> = asks
        .iter()
        .zip(&whole)
        .map(|(ask, records)| {
            let tokens = records.iter().map(|record| record.token);
            let text: Vec<u32> = ask.prompt.iter().copied().chain(tokens).collect();
            Ask { score: true, ..Ask::greedy(&text, 1) }
        })
        .collect();
    let packing = Packing { chunk: 40, bucket_min: 1 };
    let scores = Drive::new(&limits).run(&mut demo().device(&limits, |_| {}), packing, &scored);
    for ((ask, generated), scores) in asks.iter().zip(&whole).zip(&scores) {
        let last = ask.prompt.len() - 1;
        assert!(scores[..last + 12].iter().all(|record| record.scored && record.ended.is_none()));
        let tail = scores[last..last + 12].to_vec();
        assert_eq!(bits(&[tail]), bits(std::slice::from_ref(generated)));
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
fn the_demo_model_is_small_and_quick_to_prepare() {
    let limits = drive::limits(16, 1);
    let start = Instant::now();
    let device = demo().device(&limits, |_| {});
    let took = start.elapsed();
    let facts = device.facts();
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let (weights, kv, arena) = (mb(facts.weight_bytes), mb(facts.kv_bytes), mb(facts.arena_bytes));
    println!("prepared in {took:?}: weights {weights:.1} MB, cache {kv:.1} MB, arena {arena:.1} MB");
    assert!(weights <= 60.0);
    assert_eq!((facts.kind.as_str(), facts.mode.as_str(), facts.precision.as_str()), ("cpu", "interpreted", "oracle"));
    assert_eq!(facts.contract_hash.len(), 64);
    assert_eq!(facts.buckets.iter().map(|bucket| bucket.bucket).collect::<Vec<_>>(), limits.buckets);
}
