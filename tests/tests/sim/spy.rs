//! A spy around the null device: reports old records again, as a device with a broken ring might, and lets a step settle when all ranks have
//! ended its exchanges.

use super::script::Rng;
use super::wires::Wires;
use slotgraph_graphs::device::{Device, DeviceError, DeviceFacts};
use slotgraph_graphs::null::NullDevice;
use slotgraph_graphs::step::{Record, StepInput, StepOutput};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

pub struct Spy {
    device: NullDevice,
    rng: Rng,
    /// Once in this many records an old one is reported again; 0 is never.
    echo: u64,
    old: VecDeque<Record>,
    pub echoed: u64,
    wires: Arc<Mutex<Wires>>,
    /// Steps that have not settled.
    open: VecDeque<u64>,
    /// Polls in a row that ranks let go by.
    late: u32,
}

impl Spy {
    pub fn new(device: NullDevice, seed: u64, echo: u64, wires: Arc<Mutex<Wires>>) -> Self {
        let (old, open) = (VecDeque::new(), VecDeque::new());
        Spy { device, rng: Rng::new(seed), echo, old, echoed: 0, wires, open, late: 0 }
    }

    /// Whether all ranks have ended the oldest step; every third question in a row is answered when they have.
    fn exchanged(&mut self, all: bool) -> bool {
        let Some(&step) = self.open.front() else { return true };
        let done = self.wires.lock().expect("nobody panicked").settled(step, all || self.late == 2);
        self.late = if done { 0 } else { self.late + 1 };
        done
    }

    fn settle(&mut self, output: &mut StepOutput) {
        self.open.retain(|step| *step > output.step);
        self.repeat(output);
    }

    fn repeat(&mut self, output: &mut StepOutput) {
        if self.echo == 0 {
            return;
        }
        let fresh = output.records.len();
        for at in 0..fresh {
            if !self.old.is_empty() && self.rng.once_in(self.echo) {
                let slot = output.records[at].slot;
                // Rather one of the same seat: the one that could be mistaken.
                let same = self
                    .old
                    .iter()
                    .rposition(|old| old.slot == slot && old.generation != output.records[at].generation);
                let pick = same.unwrap_or(self.rng.below(self.old.len() as u64) as usize);
                let mut echo = self.old[pick].clone();
                if same.is_some() {
                    echo.position = output.records[at].position;
                }
                self.echoed += 1;
                output.records.insert(at, echo);
            }
        }
        self.old.extend(output.records.iter().cloned());
        while self.old.len() > 64 {
            self.old.pop_front();
        }
    }
}

impl Device for Spy {
    fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError> {
        self.device.enqueue(input)?;
        self.wires.lock().expect("nobody panicked").enqueue(input);
        self.open.push_back(input.step);
        Ok(())
    }
    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        if !self.exchanged(false) {
            return Ok(false);
        }
        let settled = self.device.poll(output)?;
        if settled {
            self.settle(output);
        }
        Ok(settled)
    }
    fn wait(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        self.exchanged(true);
        let settled = self.device.wait(output)?;
        if settled {
            self.settle(output);
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
