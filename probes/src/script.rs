//! The script: fixed work for one bucket that a graph must do exactly as eager does. Positions advance over page and group boundaries,
//! rows join, finish and leave, and the bucket is full, one short of full, and mixed.
//!
//! Run on two devices by the graph probes; their transcripts must be equal bit for bit. **Invariant:** the steps depend on the limits and the
//! bucket alone, never on what a device answered.

use crate::driver::{Driver, Seated, StepTime};
use crate::load::{prompt_ids, scatter};
use serde::Serialize;
use slotgraph_graphs::device::{Device, DeviceError};
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_graphs::step::{EndReason, StepLimits, StepOutput};
use std::sync::Arc;

/// A record with its numbers as bits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordBits {
    pub slot: u32,
    pub position: u32,
    pub token: u32,
    pub logprob: u32,
    pub rank: u32,
    pub top: Vec<(u32, u32)>,
    pub ended: Option<EndReason>,
}

/// One settled step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepBits {
    pub step: u64,
    pub records: Vec<RecordBits>,
    pub routes: (u64, u64),
    pub pad_rows: u32,
    pub checksum: u32,
}

impl From<&StepOutput> for StepBits {
    fn from(output: &StepOutput) -> StepBits {
        let record = |record: &slotgraph_graphs::step::Record| RecordBits {
            slot: record.slot.0,
            position: record.position,
            token: record.token,
            logprob: record.logprob.to_bits(),
            rank: record.rank,
            top: record.top.iter().map(|&(id, logprob)| (id, logprob.to_bits())).collect(),
            ended: record.ended,
        };
        StepBits {
            step: output.step,
            records: output.records.iter().map(record).collect(),
            routes: (output.routes_local, output.routes_remote),
            pad_rows: output.pad_rows,
            checksum: output.checksum,
        }
    }
}

/// What a device did with a bucket's script.
#[derive(Clone, Debug, Default)]
pub struct Transcript {
    pub steps: Vec<StepBits>,
    /// Of the decode steps.
    pub times: Vec<StepTime>,
}

/// Where two transcripts part.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Divergence {
    pub step: u64,
    /// Index among the step's records; None when the step itself differs.
    pub row: Option<usize>,
    pub what: String,
}

/// The first difference, if any.
pub fn first_divergence(want: &Transcript, got: &Transcript) -> Option<Divergence> {
    if want.steps.len() != got.steps.len() {
        let what = format!("{} steps against {}", want.steps.len(), got.steps.len());
        return Some(Divergence { step: 0, row: None, what });
    }
    let (a, b) = want.steps.iter().zip(&got.steps).find(|(a, b)| a != b)?;
    let row = a.records.iter().zip(&b.records).position(|(a, b)| a != b);
    let what = match row {
        Some(row) => format!("{:?} against {:?}", a.records[row], b.records[row]),
        None => format!(
            "{} records, routes {:?}, {} pad rows against {} records, routes {:?}, {} pad rows",
            a.records.len(),
            a.routes,
            a.pad_rows,
            b.records.len(),
            b.routes,
            b.pad_rows
        ),
    };
    Some(Divergence { step: a.step, row, what })
}

/// A request of the script: some greedy, some sampled with every optional part of the sampler.
fn request(number: usize, prompt: usize) -> Seated {
    let plain = SamplingSpec { ignore_eos: true, logprobs: Some(5), ..SamplingSpec::greedy(100_000) };
    let sampling = match number % 4 {
        0 => plain,
        1 => SamplingSpec { temperature: 0.9, seed: number as u64, ..plain },
        2 => SamplingSpec { temperature: 1.1, top_p: 0.9, top_k: 50, seed: number as u64, ..plain },
        _ => SamplingSpec {
            temperature: 0.7,
            presence_penalty: 0.4,
            repetition_penalty: 1.1,
            logit_bias: vec![(11, 1.5), (12, -100.0)],
            min_tokens: 4,
            seed: number as u64,
            ..plain
        },
    };
    Seated {
        prompt: prompt_ids(scatter(number as u64), prompt.max(1)),
        sampling: Arc::new(sampling),
        choice: number as u32 % 3,
    }
}

/// A greedy request with a prompt of its own.
pub fn plain_request(number: usize, prompt: usize) -> Seated {
    request(number * 4, prompt)
}

/// Runs the script of `bucket` with `steps` decode steps in its longest part.
pub fn run<D: Device>(driver: &mut Driver<D>, bucket: usize, steps: usize) -> Result<Transcript, DeviceError> {
    let limits = driver.limits().clone();
    let limits = &limits;
    let mut transcript = Transcript::default();
    driver.bucket_floor = bucket;
    if bucket <= limits.slots_max {
        decode(driver, limits, bucket, steps, &mut transcript)?;
    } else {
        prefill(driver, limits, bucket, bucket, &mut transcript)?;
        prefill(driver, limits, bucket, bucket - 1, &mut transcript)?;
    }
    driver.bucket_floor = 0;
    Ok(transcript)
}

/// The script of `rows` rows in steps of at least `bucket`: the same answers are due in every bucket.
pub fn run_wide<D: Device>(
    driver: &mut Driver<D>,
    rows: usize,
    bucket: usize,
    steps: usize,
) -> Result<Transcript, DeviceError> {
    let mut transcript = Transcript::default();
    let limits = driver.limits().clone();
    driver.bucket_floor = bucket;
    decode(driver, &limits, rows, steps, &mut transcript)?;
    driver.bucket_floor = 0;
    Ok(transcript)
}

/// A decode bucket: full, one short, joined again, and one request that ends by itself.
fn decode<D: Device>(
    driver: &mut Driver<D>,
    limits: &StepLimits,
    bucket: usize,
    steps: usize,
    transcript: &mut Transcript,
) -> Result<(), DeviceError> {
    // Room for what is decoded in all, and one prompt that soon crosses a group of keys.
    let decoded = steps + 32;
    let longest = 250.min(limits.max_model_len.saturating_sub(decoded + 8)).max(1);
    let requests: Vec<Seated> = (0..bucket)
        .map(|number| {
            let mut request = request(number, if number == bucket / 2 { longest } else { 3 + number % 5 });
            if number == 2 {
                request.sampling = Arc::new(SamplingSpec { max_tokens: 9, ..(*request.sampling).clone() });
            }
            request
        })
        .collect();
    driver.seat(requests, longest + decoded + 8);
    let Transcript { steps: seen, times } = transcript;
    driver.prefill(bucket, |output| seen.push(output.into()))?;
    times.extend(driver.decode(steps, |output| seen.push(output.into()))?);
    if bucket > 1 {
        driver.leave(0);
        times.extend(driver.decode(6, |output| seen.push(output.into()))?);
        driver.join(0, request(1000 + bucket, 5), 1, |output| seen.push(output.into()))?;
        times.extend(driver.decode(6, |output| seen.push(output.into()))?);
    }
    Ok(())
}

/// A prefill bucket: one step of `rows` rows, then decode rows beside what is left.
fn prefill<D: Device>(
    driver: &mut Driver<D>,
    limits: &StepLimits,
    bucket: usize,
    rows: usize,
    transcript: &mut Transcript,
) -> Result<(), DeviceError> {
    let most = limits.max_model_len - 8;
    let seats = rows.div_ceil(most).max(2).min(limits.slots_max);
    let total = rows.min(seats * most);
    let requests: Vec<Seated> =
        (0..seats).map(|seat| request(bucket + seat, total * (seat + 1) / seats - total * seat / seats)).collect();
    driver.seat(requests, total.div_ceil(seats) + 8);
    let Transcript { steps: seen, times } = transcript;
    driver.prefill(bucket, |output| seen.push(output.into()))?;
    times.extend(driver.decode(3, |output| seen.push(output.into()))?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use slotgraph_graphs::fault::FaultDevice;
    use slotgraph_graphs::null::{Draw, Drawn, NullDevice, NullOptions, Settle};

    fn limits() -> StepLimits {
        StepLimits {
            slots_max: 8,
            pages: 8 * 8 + 1,
            pages_per_slot: 8,
            buckets: vec![1, 2, 4, 8, 16, 64, 128],
            launch_ahead: 1,
            max_model_len: 512,
            prefill_chunk: 64,
        }
    }

    /// A device that refuses what a real one would compute wrongly; its tokens follow from what it was fed.
    fn driver() -> Driver<NullDevice> {
        let script = |draw: Draw| Drawn::Token((draw.context % 900) as u32 + 10);
        let device = NullDevice::new(NullOptions {
            limits: limits(),
            eos_ids: vec![1],
            settle: Settle::AfterPolls(1),
            step_ns: 1000,
            script: Box::new(script),
        });
        Driver::new(device, limits())
    }

    #[test]
    fn every_bucket_s_script_is_a_proper_use_of_a_device_and_repeats() {
        let (mut one, mut two) = (driver(), driver());
        for bucket in limits().buckets {
            let a = run(&mut one, bucket, 96).unwrap_or_else(|e| panic!("bucket {bucket}: {e}"));
            let b = run(&mut two, bucket, 96).unwrap();
            assert!(a.steps.len() > 4);
            assert_eq!(first_divergence(&a, &b), None);
        }
        let narrow = run_wide(&mut one, 4, 4, 40).unwrap();
        let wide = run_wide(&mut two, 4, 64, 40).unwrap();
        assert!(narrow.steps.iter().zip(&wide.steps).all(|(a, b)| a.records == b.records));
    }

    #[test]
    fn a_changed_record_is_named_by_step_and_row() {
        let truth = run(&mut driver(), 4, 40).unwrap();
        let device = FaultDevice::arm(driver().device, 0, &["logprob-bit@9".parse().unwrap()]).unwrap();
        let faulty = run(&mut Driver::new(device, limits()), 4, 40).unwrap();
        let divergence = first_divergence(&truth, &faulty).unwrap();
        // The fault waits for a step that has a record.
        assert!(divergence.step >= 9 && divergence.row.is_some(), "{divergence:?}");
    }

    #[test]
    fn scoring_an_answer_is_a_proper_use_too() {
        let mut driver = driver();
        let ask = plain_request(3, 20);
        driver.seat(vec![ask.clone()], 200);
        let generated: Vec<u32> = driver.regenerate(100).unwrap().iter().map(|record| record.token).collect();
        assert_eq!(generated.len(), 100);
        driver.seat(vec![ask], 200);
        let scored: Vec<u32> = driver.score(&generated).unwrap().iter().map(|record| record.token).collect();
        assert_eq!(scored, generated);
    }
}
