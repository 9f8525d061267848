//! The null device's slots, ends, pages and settling.

use super::*;
use crate::samples::{decode, given, limits, prefill, row};
use crate::spec::SamplingSpec;
use crate::step::{EndReason, NewSlot, PageUpdate, RowFeed, RowInput, RowWant};

/// Echoes: the token after a row is its position + 100.
fn device(settle: Settle) -> NullDevice {
    let script = |draw: Draw| Drawn::Token(draw.position + 100);
    NullDevice::new(NullOptions { limits: limits(), eos_ids: vec![1], settle, step_ns: 7, script: Box::new(script) })
}

#[test]
fn a_slot_decodes_until_it_ends_and_is_a_pad_row_after() {
    let mut device = device(Settle::AtOnce);
    let mut out = StepOutput::default();
    device.enqueue(&prefill(2)).unwrap();
    device.enqueue(&decode(2)).unwrap();
    assert!(device.poll(&mut out).unwrap());
    assert_eq!((out.step, out.pad_rows, out.records[0].token, out.records[0].ended), (1, 2, 101, None));
    device.enqueue(&decode(3)).unwrap();
    assert!(device.poll(&mut out).unwrap());
    assert_eq!((out.records[0].token, out.records[0].ended), (102, Some(EndReason::MaxTokens)));
    assert!(device.poll(&mut out).unwrap());
    assert_eq!((out.step, out.pad_rows, out.records.len()), (3, 1, 0));
    assert!(!device.poll(&mut out).unwrap());
}

#[test]
fn the_script_sees_the_tokens_that_the_pages_hold() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let script = move |draw: Draw| {
        log.lock().unwrap().push(draw.context);
        Drawn::Token(9)
    };
    let mut device = NullDevice::new(NullOptions {
        limits: limits(),
        eos_ids: vec![],
        settle: Settle::AtOnce,
        step_ns: 0,
        script: Box::new(script),
    });
    device.enqueue(&prefill(9)).unwrap();
    device.enqueue(&decode(2)).unwrap();
    assert_eq!(*seen.lock().unwrap(), [context_hash(&[5, 6]), context_hash(&[5, 6, 9])]);
}

#[test]
fn a_page_that_another_sequence_wrote_is_noticed() {
    let mut device = device(Settle::AtOnce);
    device.enqueue(&prefill(9)).unwrap();
    let mut thief = decode(2);
    thief.bucket = 2;
    thief
        .rows
        .insert(0, RowInput { slot: SlotId(1), generation: Generation(1), feed: given(8, 0), want: RowWant::Nothing });
    thief.new_slots = vec![NewSlot { slot: SlotId(1), ..prefill(9).new_slots.remove(0) }];
    thief.pages = vec![PageUpdate { slot: SlotId(1), index: 0, page: PageId(1) }];
    let error = device.enqueue(&thief).unwrap_err().to_string();
    assert!(error.contains("position 2 reads page 1, which holds another sequence"), "{error}");
}

#[test]
fn what_a_real_device_would_miss_is_an_error() {
    let mut pageless = prefill(9);
    pageless.pages.clear();
    let mut unseated = prefill(9);
    unseated.rows = vec![row(RowFeed::FromSlot, RowWant::Sample)];
    let mut featureless = prefill(9);
    let random = SamplingSpec { temperature: 1.0, ..SamplingSpec::greedy(9) };
    featureless.new_slots[0].sampling = Arc::new(random);
    for (step, expected) in
        [(pageless, "holds none"), (unseated, "before its first token"), (featureless, "feature bits 0x1")]
    {
        let error = device(Settle::AtOnce).enqueue(&step).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn rings_and_order_are_enforced() {
    let mut device = device(Settle::WhenReleased);
    assert!(matches!(device.enqueue(&decode(2)), Err(DeviceError::OutOfOrder { expected: 1, got: 2 })));
    device.enqueue(&prefill(9)).unwrap();
    device.enqueue(&decode(2)).unwrap();
    assert!(matches!(device.enqueue(&decode(3)), Err(DeviceError::RingFull { step: 3, in_flight: 2, max: 2 })));
    let odd = StepInput { bucket: 3, ..decode(3) };
    let mut out = StepOutput::default();
    assert!(device.wait(&mut out).unwrap());
    assert!(matches!(device.enqueue(&odd), Err(DeviceError::NoBucket { bucket: 3, .. })));
}

#[test]
fn tests_decide_when_steps_settle() {
    let mut device = device(Settle::WhenReleased);
    let control = device.control();
    let mut out = StepOutput::default();
    device.enqueue(&prefill(9)).unwrap();
    assert!(!device.poll(&mut out).unwrap());
    let mut seen = Vec::new();
    control.unsettled(|step| seen.push((step.step, step.pages.clone(), step.rows.len())));
    assert_eq!(seen, [(1, vec![PageId(1), PageId(1)], 2)]);
    control.release(1);
    assert!(device.poll(&mut out).unwrap());

    control.set_settle(Settle::AfterPolls(2));
    device.enqueue(&decode(2)).unwrap();
    assert!(!device.poll(&mut out).unwrap());
    assert!(!device.poll(&mut out).unwrap());
    assert!(device.poll(&mut out).unwrap());

    device.enqueue(&decode(3)).unwrap();
    control.drop_newest();
    assert!((0..9).all(|_| !device.poll(&mut out).unwrap()));
    assert!(device.wait(&mut out).is_err());
    control.kill("unplugged");
    assert!(matches!(device.poll(&mut out), Err(DeviceError::Lost(reason)) if reason == "unplugged"));
}

#[test]
fn ends_follow_their_precedence() {
    let ended = |sampling: SamplingSpec, drawn: Drawn| {
        let mut device = NullDevice::new(NullOptions {
            limits: limits(),
            eos_ids: vec![1],
            settle: Settle::AtOnce,
            step_ns: 0,
            script: Box::new(move |_| drawn),
        });
        let mut step = prefill(1);
        step.new_slots[0].sampling = Arc::new(sampling);
        step.features = u32::MAX;
        device.enqueue(&step).unwrap();
        let mut out = StepOutput::default();
        device.poll(&mut out).unwrap();
        (out.records[0].token, out.records[0].ended)
    };
    let greedy = SamplingSpec::greedy(1);
    assert_eq!(ended(greedy.clone(), Drawn::Nan), (0, Some(EndReason::Nan)));
    assert_eq!(ended(greedy.clone(), Drawn::Token(1)), (1, Some(EndReason::Eos)));
    let ignoring = SamplingSpec { ignore_eos: true, ..greedy.clone() };
    assert_eq!(ended(ignoring, Drawn::Token(1)), (1, Some(EndReason::MaxTokens)));
    let stopping = SamplingSpec { stop_ids: vec![4], ..greedy.clone() };
    assert_eq!(ended(stopping, Drawn::Token(4)), (4, Some(EndReason::StopId)));
    let longer = SamplingSpec { min_tokens: 1, max_tokens: 2, ..greedy.clone() };
    assert_eq!(ended(longer, Drawn::Token(1)), (2, None));
}
