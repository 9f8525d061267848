//! A device without a model: it keeps slots, pages and ends as a real one does and takes its tokens from a script.
//!
//! Used by the scheduler's simulator and by tests of everything above the device. It computes a step when it is enqueued,
//! because a device's outcome depends on the steps before it alone, and settles it when its policy says so. **Invariant:** a
//! step that a real device would compute wrongly without noticing is an error here: a live row that writes page 0, a decode
//! row of a slot with no token, keys that another sequence wrote, a feature bit that a row needs and the step lacks.

mod seats;
#[cfg(test)]
mod tests;

use crate::device::{BucketFacts, Device, DeviceError, DeviceFacts};
use crate::step::{Generation, PageId, Record, SlotId, StepInput, StepLimits, StepOutput, check};
use seats::Seats;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};

pub use seats::{Seat, context_hash};

/// What the script is asked for: the next token after a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    pub slot: SlotId,
    pub generation: Generation,
    /// Position of the row.
    pub position: u32,
    /// Tokens that the choice generated before.
    pub generated: u32,
    pub seed: u64,
    pub choice: u32,
    /// `context_hash` of the tokens at positions 0 … `position`, as they were read back through the slot's pages.
    pub context: u64,
}

/// What the script answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drawn {
    Token(u32),
    /// The row's logits hold a NaN.
    Nan,
}

/// When enqueued steps settle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settle {
    /// By the first poll.
    AtOnce,
    /// By the poll after this many that found the step at the front of the queue.
    AfterPolls(u32),
    /// Once `NullControl::release` let it.
    WhenReleased,
}

/// The script: the token that each sampling row draws.
pub type Script = Box<dyn FnMut(Draw) -> Drawn + Send>;

pub struct NullOptions {
    pub limits: StepLimits,
    pub eos_ids: Vec<u32>,
    pub settle: Settle,
    /// What each settled step says it took.
    pub step_ns: u64,
    pub script: Script,
}

/// The device. `control` gives tests a hold on it after it moved into an engine.
pub struct NullDevice {
    state: Arc<Mutex<State>>,
}

/// A test's hold on a null device.
#[derive(Clone)]
pub struct NullControl {
    state: Arc<Mutex<State>>,
}

/// A step that was enqueued and has not settled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnqueuedStep {
    pub step: u64,
    pub bucket: usize,
    pub rows: Vec<EnqueuedRow>,
    /// Pages that its live rows read or write; a page of several slots is listed for each.
    pub pages: Vec<PageId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnqueuedRow {
    pub slot: SlotId,
    pub generation: Generation,
    /// False when the row is a pad row on the device.
    pub live: bool,
    pub position: u32,
}

#[derive(Default)]
struct Pending {
    enqueued: EnqueuedStep,
    output: StepOutput,
    polls: u32,
    released: bool,
    dropped: bool,
}

struct State {
    limits: StepLimits,
    eos_ids: Vec<u32>,
    settle: Settle,
    step_ns: u64,
    script: Script,
    seats: Seats,
    steps: u64,
    pending: VecDeque<Pending>,
    /// Settled entries, kept for their capacity.
    spare: Vec<Pending>,
    replays: Vec<u64>,
    dead: Option<String>,
}

impl NullDevice {
    pub fn new(options: NullOptions) -> NullDevice {
        let NullOptions { limits, eos_ids, settle, step_ns, script } = options;
        let state = State {
            seats: Seats::new(&limits),
            replays: vec![0; limits.buckets.len()],
            limits,
            eos_ids,
            settle,
            step_ns,
            script,
            steps: 0,
            pending: VecDeque::new(),
            spare: Vec::new(),
            dead: None,
        };
        NullDevice { state: Arc::new(Mutex::new(state)) }
    }

    pub fn control(&self) -> NullControl {
        NullControl { state: Arc::clone(&self.state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("a script that panicked ended its test")
    }
}

impl NullControl {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("a script that panicked ended its test")
    }

    /// From now on, steps settle so.
    pub fn set_settle(&self, settle: Settle) {
        self.state().settle = settle;
    }

    /// Lets the oldest `steps` unsettled steps settle.
    pub fn release(&self, steps: usize) {
        let mut state = self.state();
        state.pending.iter_mut().filter(|pending| !pending.released).take(steps).for_each(|p| p.released = true);
    }

    /// The newest enqueued step never settles.
    pub fn drop_newest(&self) {
        if let Some(pending) = self.state().pending.back_mut() {
            pending.dropped = true;
        }
    }

    /// Every call from now on fails with `reason`.
    pub fn kill(&self, reason: &str) {
        self.state().dead = Some(reason.to_owned());
    }

    /// Shows each unsettled step, oldest first.
    pub fn unsettled(&self, mut see: impl FnMut(&EnqueuedStep)) {
        self.state().pending.iter().for_each(|pending| see(&pending.enqueued));
    }

    /// Steps enqueued so far.
    pub fn steps(&self) -> u64 {
        self.state().steps
    }

    /// The state of one seat on the device.
    pub fn seat(&self, slot: SlotId) -> Seat {
        self.state().seats.seat(slot).clone()
    }
}

impl State {
    fn alive(&self) -> Result<(), DeviceError> {
        match &self.dead {
            Some(reason) => Err(DeviceError::Lost(reason.clone())),
            None => Ok(()),
        }
    }

    fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError> {
        self.alive()?;
        let max = self.limits.launch_ahead + 1;
        if self.pending.len() >= max {
            return Err(DeviceError::RingFull { step: input.step, in_flight: self.pending.len(), max });
        }
        if input.step != self.steps + 1 {
            return Err(DeviceError::OutOfOrder { expected: self.steps + 1, got: input.step });
        }
        let Some(bucket) = self.limits.buckets.iter().position(|&bucket| bucket == input.bucket) else {
            return Err(DeviceError::NoBucket { bucket: input.bucket, buckets: self.limits.buckets.clone() });
        };
        check(input, &self.limits, &self.eos_ids)?;

        let mut pending = self.spare.pop().unwrap_or_default();
        pending.polls = 0;
        (pending.released, pending.dropped) = (false, false);
        pending.enqueued.step = input.step;
        pending.enqueued.bucket = input.bucket;
        self.seats.run(input, &self.eos_ids, &mut self.script, &mut pending.enqueued, &mut pending.output.records)?;
        let live = pending.enqueued.rows.iter().filter(|row| row.live).count();
        pending.output.step = input.step;
        pending.output.device_ns = self.step_ns;
        pending.output.pad_rows = (input.bucket - live) as u32;
        pending.output.checksum = checksum(&pending.output.records);
        self.replays[bucket] += 1;
        self.steps = input.step;
        self.pending.push_back(pending);
        Ok(())
    }

    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        self.alive()?;
        let settle = self.settle;
        let Some(front) = self.pending.front_mut() else { return Ok(false) };
        let due = match settle {
            _ if front.dropped => false,
            _ if front.released => true,
            Settle::AtOnce => true,
            Settle::AfterPolls(polls) => {
                front.polls += 1;
                front.polls > polls
            }
            Settle::WhenReleased => false,
        };
        if due {
            let mut settled = self.pending.pop_front().expect("the front was just seen");
            std::mem::swap(output, &mut settled.output);
            self.spare.push(settled);
        }
        Ok(due)
    }
}

fn checksum(records: &[Record]) -> u32 {
    records.iter().fold(0x811c_9dc5, |sum, record| (sum ^ record.token ^ record.slot.0).wrapping_mul(0x0100_0193))
}

impl Device for NullDevice {
    fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError> {
        self.state().enqueue(input)
    }

    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        self.state().poll(output)
    }

    /// Waiting lets a held step settle; a dropped one is reported instead of waited for.
    fn wait(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        let mut state = self.state();
        state.alive()?;
        let Some(front) = state.pending.front_mut() else { return Ok(false) };
        if front.dropped {
            return Err(DeviceError::Lost(format!("step {} does not settle", front.enqueued.step)));
        }
        front.released = true;
        state.poll(output)
    }

    fn in_flight(&self) -> usize {
        self.state().pending.len()
    }

    fn facts(&self) -> DeviceFacts {
        let state = self.state();
        let buckets = state.limits.buckets.iter().zip(&state.replays);
        DeviceFacts {
            kind: "null".into(),
            name: "scripted tokens".into(),
            mode: "scripted".into(),
            precision: "none".into(),
            buckets: buckets.map(|(&bucket, &replays)| BucketFacts { bucket, nodes: 0, replays }).collect(),
            ..DeviceFacts::default()
        }
    }
}
