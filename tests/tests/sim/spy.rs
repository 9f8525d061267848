//! A spy around the null device: reports old records again, as a device with a broken ring might.

use super::script::Rng;
use slotgraph_graphs::device::{Device, DeviceError, DeviceFacts};
use slotgraph_graphs::null::NullDevice;
use slotgraph_graphs::step::{Record, StepInput, StepOutput};
use std::collections::VecDeque;

pub struct Spy {
    device: NullDevice,
    rng: Rng,
    /// Once in this many records an old one is reported again; 0 is never.
    echo: u64,
    old: VecDeque<Record>,
    pub echoed: u64,
}

impl Spy {
    pub fn new(device: NullDevice, seed: u64, echo: u64) -> Self {
        Spy { device, rng: Rng::new(seed), echo, old: VecDeque::new(), echoed: 0 }
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
        self.device.enqueue(input)
    }
    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        let settled = self.device.poll(output)?;
        if settled {
            self.repeat(output);
        }
        Ok(settled)
    }
    fn wait(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        let settled = self.device.wait(output)?;
        if settled {
            self.repeat(output);
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
