//! Ranks that start, step, fail and leave.

use super::*;
use crate::engine::start_with;
use crate::request::{Event, Finish, FinishReason};
use crate::startup::Phase;
use crate::testing::{factory, limits, null_device, options, plain, read, request};
use crate::trace::NoObserver;
use std::sync::Mutex;
use std::thread::ThreadId;

const SOON: Duration = Duration::from_secs(5);

/// A device with one broken verb.
struct Broken<D> {
    device: D,
    at: u64,
    how: How,
}

#[derive(Clone, Copy, PartialEq)]
enum How {
    Panic,
    Drift,
    Stall,
}

impl<D: Device> Device for Broken<D> {
    fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError> {
        if self.how == How::Panic && input.step == self.at {
            panic!("a wire came loose");
        }
        self.device.enqueue(input)
    }
    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        if self.how == How::Stall {
            return Ok(false);
        }
        let settled = self.device.poll(output)?;
        if settled && self.how == How::Drift && output.step == self.at {
            output.checksum ^= 1;
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

fn broken(how: How, at: u64) -> Factory {
    factory(move |device| Box::new(Broken { device, at, how }))
}

fn failure_of(factories: Vec<Factory>, init: Duration) -> String {
    Ranks::start(factories, init, SOON).err().expect("the start fails").to_string()
}

#[test]
fn ranks_run_as_one_device() {
    for ranks in [1, 2, 4] {
        let factories = (0..ranks).map(|_| plain()).collect();
        let handle = start_with(options(), factories, Arc::new(NoObserver)).unwrap();
        assert_eq!(
            handle.ranks().iter().map(|start| start.record.rank).collect::<Vec<_>>(),
            (0..ranks).collect::<Vec<_>>()
        );
        let streams: Vec<_> = (0..5)
            .map(|at| {
                let (group, stream) = request(&at.to_string(), 6, None);
                handle.submit(group).unwrap();
                stream
            })
            .collect();
        for stream in streams {
            let (tokens, end) = read(stream);
            assert_eq!(tokens, [102, 103, 104, 105, 106, 107], "{end:?}");
            let reason = FinishReason::Length;
            let finish = Finish { reason, prompt_tokens: 3, completion_tokens: 6, cached_tokens: 0 };
            assert_eq!(end, Event::Finished(finish));
        }
        handle.shutdown();
        handle.join().unwrap();
    }
}

#[test]
fn a_device_is_made_used_and_dropped_on_its_rank_thread() {
    struct Homebound {
        device: slotgraph_graphs::null::NullDevice,
        home: ThreadId,
        log: Arc<Mutex<Vec<bool>>>,
    }
    impl Device for Homebound {
        fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError> {
            self.log.lock().unwrap().push(std::thread::current().id() == self.home);
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
    impl Drop for Homebound {
        fn drop(&mut self) {
            self.log.lock().unwrap().push(std::thread::current().id() == self.home);
        }
    }
    let log = Arc::new(Mutex::new(Vec::new()));
    let made = |log: Arc<Mutex<Vec<bool>>>| {
        factory(move |device| Box::new(Homebound { device, home: std::thread::current().id(), log }))
    };
    let handle = start_with(options(), vec![made(log.clone()), made(log.clone())], Arc::new(NoObserver)).unwrap();
    let (group, stream) = request("a", 3, None);
    handle.submit(group).unwrap();
    read(stream);
    handle.shutdown();
    handle.join().unwrap();
    let log = log.lock().unwrap();
    assert!(log.len() >= 2 * 3 + 2 && log.iter().all(|&at_home| at_home), "{log:?}");
}

#[test]
fn a_failed_start_names_rank_and_phase_and_stops_the_others() {
    let left = Arc::new(Mutex::new(Vec::new()));
    let waits = |left: Arc<Mutex<Vec<String>>>| -> Factory {
        Box::new(move |startup| {
            let result = startup.enter(Phase::Read).and_then(|()| startup.enter(Phase::Capture));
            left.lock().unwrap().push(result.clone().unwrap_err().to_string());
            result?;
            Ok(Prepared::new(Box::new(null_device()), limits(), 0))
        })
    };
    let fails: Factory = Box::new(|startup| {
        startup.enter(Phase::Read)?;
        Err(PrepareError::Failed("the file ends early".into()))
    });
    let error = failure_of(vec![waits(left.clone()), fails], SOON);
    assert_eq!(error, "rank 1 failed in phase read: the file ends early");
    let deadline = Instant::now() + SOON;
    while left.lock().unwrap().is_empty() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(left.lock().unwrap()[0].contains("the file ends early"));

    let panics: Factory = Box::new(|startup| {
        startup.enter(Phase::Warm)?;
        panic!("no such kernel");
    });
    let error = failure_of(vec![plain(), panics], SOON);
    assert!(error.contains("rank 1 failed in phase warm: panic: no such kernel"), "{error}");

    let refuses: Factory = Box::new(|_| Err(PrepareError::Config("--kv-memory 1: too small".into())));
    let error = start_with(options(), vec![refuses], Arc::new(NoObserver)).unwrap_err();
    assert_eq!(error, StartError::Config("--kv-memory 1: too small".into()));
}

#[test]
fn a_start_that_takes_too_long_says_where_everybody_is() {
    let stuck: Factory = Box::new(|startup| {
        startup.enter(Phase::Read)?;
        std::thread::sleep(Duration::from_millis(600));
        Err(PrepareError::Failed("woke up too late".into()))
    });
    let error = failure_of(vec![plain(), stuck], Duration::from_millis(150));
    assert!(error.contains("rank 0") && error.contains("rank 1 is in read"), "{error}");
}

#[test]
fn a_rank_that_panics_in_a_step_ends_every_stream_and_is_named() {
    let factories = vec![plain(), broken(How::Panic, 3)];
    let handle = start_with(options(), factories, Arc::new(NoObserver)).unwrap();
    let streams: Vec<_> = (0..4)
        .map(|at| {
            let (group, stream) = request(&at.to_string(), 50, None);
            handle.submit(group).unwrap();
            stream
        })
        .collect();
    for stream in streams {
        let (_, end) = read(stream);
        let Event::Error(reason) = end else { panic!("{end:?}") };
        assert!(reason.contains("rank 1 failed in phase step: panic: a wire came loose"), "{reason}");
    }
    let failure = handle.join().unwrap_err();
    assert!(failure.0.contains("rank 1"), "{failure}");
    assert!(handle.accepting().is_err());
}

#[test]
fn ranks_that_disagree_or_fall_silent_are_named() {
    let mut ranks = Ranks::start(vec![plain(), broken(How::Drift, 1)], SOON, SOON).unwrap().0;
    let input = one_row();
    ranks.enqueue(&input).unwrap();
    let mut output = StepOutput::default();
    let mut error = None;
    let deadline = Instant::now() + SOON;
    // A release build hands rank 0's output out at once and compares as soon as the others have answered.
    while error.is_none() && Instant::now() < deadline {
        error = ranks.poll(&mut output).err();
    }
    let error = error.expect("they differ").to_string();
    assert!(error.contains("rank 1 disagrees with rank 0 on step 1"), "{error}");

    let patience = Duration::from_millis(100);
    let mut ranks = Ranks::start(vec![broken(How::Stall, 1), plain()], SOON, patience).unwrap().0;
    ranks.enqueue(&input).unwrap();
    let error = ranks.wait(&mut output).unwrap_err().to_string();
    assert!(error.contains("ranks [0] did not finish step 1"), "{error}");
}

/// A first step that seats a slot and feeds one token.
fn one_row() -> StepInput {
    use slotgraph_graphs::spec::SamplingSpec;
    use slotgraph_graphs::step::{Generation, NewSlot, PageId, PageUpdate, RowFeed, RowInput, RowWant, SlotId};
    let (slot, generation) = (SlotId(0), Generation(1));
    let feed = RowFeed::Given { token: 5, position: 0, generated: false };
    let sampling = Arc::new(SamplingSpec::greedy(9));
    StepInput {
        step: 1,
        bucket: 1,
        rows: vec![RowInput { slot, generation, feed, want: RowWant::Sample }],
        new_slots: vec![NewSlot { slot, generation, sampling, choice: 0, generated: 0 }],
        pages: vec![PageUpdate { slot, index: 0, page: PageId(1) }],
        ..StepInput::default()
    }
}
