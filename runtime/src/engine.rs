//! The engine: one thread that owns slots, pages, queues and, with one device, the device.
//!
//! Others send it values through `EngineHandle`. **Invariant:** it waits for nothing but the device, or for a command when there is nothing to
//! do; whatever ends it, every open stream hears so first.

mod edge;
mod handle;
mod start;
#[cfg(test)]
mod tests;

pub use handle::{EngineFailure, EngineHandle, NotAccepting, SubmitError};
pub use start::{EngineOptions, StartError, device, start, start_with};

pub(crate) use edge::panic_text;
pub(crate) use start::STEP_TIMEOUT;

use crate::clock::Clock;
use crate::faults::EngineFaults;
use crate::load::Load;
use crate::request::Command;
use crate::scheduler::{Scheduler, Swept};
use slotgraph_graphs::cuda::nvtx;
use slotgraph_graphs::device::{Device, DeviceError};
use slotgraph_graphs::step::{StepInput, StepOutput};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

/// Longest pause between two heartbeats of an idle engine.
const PARK: Duration = Duration::from_millis(500);
/// Pause when something is live but nothing can be done for it.
const PAUSE: Duration = Duration::from_millis(1);

/// What a turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// A step was enqueued or settled.
    Worked,
    /// Something is live, but no step could be made of it.
    Stuck,
    /// Nothing is live and nothing is in flight.
    Idle,
}

/// The loop's state.
pub struct Engine<D: Device, C: Clock> {
    scheduler: Scheduler,
    commands: Receiver<Command>,
    load: Arc<Load>,
    clock: C,
    faults: EngineFaults,
    launch_ahead: usize,
    leaving: bool,
    swept: Vec<Swept>,
    input: StepInput,
    output: StepOutput,
    device: D,
}

impl<D: Device, C: Clock> Engine<D, C> {
    pub fn new(
        scheduler: Scheduler,
        device: D,
        clock: C,
        commands: Receiver<Command>,
        load: Arc<Load>,
        faults: EngineFaults,
        launch_ahead: usize,
    ) -> Self {
        Engine {
            scheduler,
            commands,
            load,
            clock,
            faults,
            launch_ahead,
            leaving: false,
            swept: Vec::new(),
            input: StepInput::default(),
            output: StepOutput::default(),
            device,
        }
    }

    /// Turns until it was told to leave and nothing is live.
    pub fn run(&mut self) -> Result<(), DeviceError> {
        loop {
            match self.turn()? {
                Turn::Worked => {}
                Turn::Stuck => self.park(PAUSE),
                Turn::Idle if self.leaving => return Ok(()),
                Turn::Idle => self.park(PARK),
            }
        }
    }

    /// One turn: drain commands → sweep → publish load → admit → fill → run → settle.
    pub fn turn(&mut self) -> Result<Turn, DeviceError> {
        self.drain_commands();
        self.collect();
        self.retire();
        self.publish();
        self.admit();
        let ran = self.run_step()?;
        let settled = self.settle(ran)?;
        Ok(match (ran || settled, self.scheduler.is_idle()) {
            (_, true) => Turn::Idle,
            (true, false) => Turn::Worked,
            (false, false) => Turn::Stuck,
        })
    }

    pub fn drain_commands(&mut self) {
        loop {
            match self.commands.try_recv() {
                Ok(command) => self.obey(command),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.leaving = true;
                    return;
                }
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::Submit(group) => self.scheduler.submit(group, self.clock.now()),
            Command::Drain { deadline } => self.scheduler.drain_at(deadline),
            Command::Shutdown => self.leaving = true,
            // Whoever asked may have gone.
            Command::Inspect(reply) => drop(reply.send(self.scheduler.snapshot())),
        }
    }

    /// The first half of the sweep: who is to leave.
    pub fn collect(&mut self) {
        let _range = nvtx::range("sweep");
        self.scheduler.collect(&mut self.swept, self.clock.now());
    }
    /// The second half: they leave.
    pub fn retire(&mut self) {
        self.scheduler.retire(&self.swept, self.clock.now());
    }
    pub fn publish(&mut self) {
        self.scheduler.publish(self.clock.now());
    }
    pub fn admit(&mut self) {
        let now = self.clock.now();
        if self.faults.leaks(now) {
            self.scheduler.leak_page();
        }
        self.scheduler.admit(now);
    }

    /// Fills the next step and enqueues it, if the ring has room and there is something to do.
    pub fn run_step(&mut self) -> Result<bool, DeviceError> {
        if self.device.in_flight() > self.launch_ahead {
            return Ok(false);
        }
        let range = nvtx::range("fill");
        let filled = self.scheduler.fill(&mut self.input, self.clock.now());
        drop(range);
        if filled {
            self.faults.before_step(self.input.step);
            self.device.enqueue(&self.input)?;
        }
        Ok(filled)
    }

    /// Settles the oldest step in flight: waits for it when nothing more could be enqueued, else only looks.
    pub fn settle(&mut self, ran: bool) -> Result<bool, DeviceError> {
        let nothing_better = !ran || self.device.in_flight() > self.launch_ahead;
        let settled =
            if nothing_better { self.device.wait(&mut self.output)? } else { self.device.poll(&mut self.output)? };
        if settled {
            let _range = nvtx::range("settle");
            self.scheduler.settle(&mut self.output, self.clock.now())?;
        }
        Ok(settled)
    }

    /// Waits for a command, having published that there is nothing else to do.
    fn park(&mut self, limit: Duration) {
        self.publish();
        match self.commands.recv_timeout(limit) {
            Ok(command) => self.obey(command),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.leaving = true,
        }
    }

    /// Tells every open stream that the engine has failed.
    pub fn fail(&mut self, reason: &str) {
        self.load.set_dead(reason);
        let now = self.clock.now();
        self.scheduler.fail(reason, now);
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Submit(group) = command {
                self.scheduler.submit(group, now);
            }
        }
        self.scheduler.fail(reason, now);
        self.scheduler.publish(now);
    }

    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }
    pub fn device(&self) -> &D {
        &self.device
    }
}
