//! The world of a simulation: the real scheduler and engine loop over the null device, a clock that stands still, and clients.

use super::client::Client;
use super::model::{Known, Model};
use super::script::{EOS, script};
use super::spy::Spy;
use super::wires::{Wires, Wiring};
use slotgraph_graphs::null::{NullControl, NullDevice, NullOptions, Settle};
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_graphs::step::StepLimits;
use slotgraph_runtime::clock::{Clock, ManualClock};
use slotgraph_runtime::engine::{Engine, EngineHandle, SubmitError, Turn};
use slotgraph_runtime::faults::EngineFaults;
use slotgraph_runtime::load::{Load, SlotState};
use slotgraph_runtime::policy::Policy;
use slotgraph_runtime::request::{Choice, Group};
use slotgraph_runtime::scheduler::{Scheduler, SchedulerOptions};
use slotgraph_runtime::sink::Backlog;
use slotgraph_runtime::trace::{Epoch, Latency, Observer, TraceContext, TraceRecord};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What a world is made of.
#[derive(Clone)]
pub struct Setup {
    pub limits: StepLimits,
    pub max_queue: usize,
    pub reserve_tokens: usize,
    pub itl_target: Option<Duration>,
    pub policy: Policy,
    pub settle: Settle,
    /// Once in this many records an old one is reported again; 0 is never.
    pub echo: u64,
    pub seed: u64,
    /// Ranks that exchange, and a rule of it that is off.
    pub ranks: usize,
    pub wiring: Wiring,
}

impl Setup {
    /// Small enough for everything to run out.
    pub fn small() -> Self {
        let limits = StepLimits {
            slots_max: 2,
            pages: 9,
            pages_per_slot: 4,
            buckets: vec![1, 2, 4, 8, 16, 32],
            launch_ahead: 1,
            max_model_len: 256,
            prefill_chunk: 16,
        };
        Setup {
            limits,
            max_queue: 16,
            reserve_tokens: 32,
            itl_target: None,
            policy: Policy::default(),
            settle: Settle::AtOnce,
            echo: 0,
            seed: 1,
            ranks: 1,
            wiring: Wiring::Sound,
        }
    }
}

/// A request: prompts × n choices.
#[derive(Clone)]
pub struct Ask {
    pub prompts: Vec<Vec<u32>>,
    pub n: u32,
    pub sampling: SamplingSpec,
    /// Scores its prompts.
    pub score: bool,
    pub deadline: Option<Duration>,
    pub attentive: bool,
    /// Of each choice's channel.
    pub capacity: usize,
    /// Bytes of events that may wait in all of them.
    pub backlog: usize,
}

impl Ask {
    pub fn new(prompt_tokens: usize, max_tokens: u32) -> Self {
        let prompt = (0..prompt_tokens as u32).map(|at| 2 + (at * 7 + prompt_tokens as u32) % 60).collect();
        let sampling = SamplingSpec { ignore_eos: true, ..SamplingSpec::greedy(max_tokens) };
        Ask {
            prompts: vec![prompt],
            n: 1,
            sampling,
            score: false,
            deadline: None,
            attentive: true,
            capacity: 64,
            backlog: usize::MAX,
        }
    }
}

#[derive(Default)]
struct Recorder(Mutex<Vec<TraceRecord>>);

impl Observer for Recorder {
    fn ended(&self, record: TraceRecord) {
        self.0.lock().expect("no test panics while it holds the records").push(record);
    }
    fn latency(&self, _latency: Latency, _took: Duration) {}
    fn step(&self, _bucket: usize, _took: Duration) {}
}

pub struct World {
    pub engine: Engine<Spy, ManualClock>,
    pub handle: EngineHandle,
    pub control: NullControl,
    pub clock: ManualClock,
    pub load: Arc<Load>,
    pub clients: Vec<Client>,
    /// Why the engine died.
    pub dead: Option<String>,
    pub wires: Arc<Mutex<Wires>>,
    recorder: Arc<Recorder>,
    model: Model,
    groups: u64,
    context_max: usize,
}

impl World {
    pub fn new(setup: &Setup) -> Self {
        let Setup { limits, max_queue, reserve_tokens, itl_target, policy, settle, echo, seed, ranks, wiring } =
            setup.clone();
        let device = NullDevice::new(NullOptions {
            limits: limits.clone(),
            eos_ids: vec![EOS],
            settle,
            step_ns: 0,
            script: script(),
        });
        let control = device.control();
        let clock = ManualClock::default();
        let load = Arc::new(Load::new(&limits.buckets));
        let recorder = Arc::new(Recorder::default());
        let (handle, inbox) = EngineHandle::connect(load.clone(), limits.slots_max + max_queue, Vec::new());
        let (launch_ahead, context_max) = (limits.launch_ahead, limits.max_model_len);
        let trace = TraceContext::default();
        let options = SchedulerOptions { limits, reserve_tokens, itl_target, policy, trace, replays: true };
        let scheduler = Scheduler::new(options, load.clone(), recorder.clone(), Epoch::new(clock.now()));
        let wires = Arc::new(Mutex::new(Wires::new(ranks, wiring, seed)));
        let spy = Spy::new(device, seed, echo, wires.clone());
        let engine =
            Engine::new(scheduler, spy, clock.clone(), inbox, load.clone(), EngineFaults::default(), launch_ahead);
        let (clients, model) = (Vec::new(), Model::default());
        let dead = None;
        World { engine, handle, control, clock, load, clients, dead, wires, recorder, model, groups: 0, context_max }
    }

    /// Submits a request through the edge; the clients of its choices, or why it was refused.
    pub fn ask(&mut self, ask: &Ask) -> Result<std::ops::Range<usize>, SubmitError> {
        let (sampling, first) = (Arc::new(ask.sampling.clone()), self.clients.len());
        let mut choices = Vec::new();
        let mut clients = Vec::new();
        let backlog = Backlog::new(ask.backlog);
        for prompt in &ask.prompts {
            let prompt: Arc<[u32]> = prompt.as_slice().into();
            for sample in 0..ask.n {
                let (sink, stream) = backlog.channel(ask.capacity);
                let index = choices.len() as u32;
                let arrival = (first + clients.len()) as u64;
                let who = (arrival, self.groups, index, sample);
                let (known, sampled) = (prompt.clone(), sampling.clone());
                let score_prompt = ask.score.then_some(0);
                clients.push(Client::new(who, known, sampled, ask.score, stream, ask.attentive, self.context_max));
                choices.push(Choice {
                    index,
                    sample,
                    prompt: prompt.clone(),
                    sampling: sampling.clone(),
                    score_prompt,
                    sink,
                });
            }
        }
        let received = self.clock.now();
        let id = self.groups.to_string().into();
        self.handle.submit(Group { id, choices, received, deadline: ask.deadline.map(|after| received + after) })?;
        self.groups += 1;
        self.clients.extend(clients);
        Ok(first..self.clients.len())
    }

    /// One turn of the engine, then everything is checked.
    pub fn turn(&mut self) -> Result<Turn, String> {
        self.turn_with(|_| {})
    }

    /// One turn in which something happens between the two halves of the sweep.
    pub fn turn_with(&mut self, between: impl FnOnce(&mut World)) -> Result<Turn, String> {
        if self.dead.is_some() {
            return Ok(Turn::Idle);
        }
        self.engine.drain_commands();
        self.engine.collect();
        between(self);
        self.engine.retire();
        self.engine.publish();
        self.engine.admit();
        let stepped = self.engine.run_step().and_then(|ran| Ok((ran, self.engine.settle(ran)?)));
        let turn = match stepped {
            Ok((ran, settled)) if ran || settled => Turn::Worked,
            Ok(_) => Turn::Stuck,
            Err(error) => {
                self.engine.fail(&error.to_string());
                self.dead = Some(error.to_string());
                Turn::Idle
            }
        };
        self.check()?;
        let idle = self.dead.is_some() || self.engine.scheduler().is_idle();
        Ok(if idle { Turn::Idle } else { turn })
    }

    /// Checks tables, traces and what attentive clients hear.
    pub fn check(&mut self) -> Result<(), String> {
        if let Some(wrong) = &self.wires.lock().expect("nobody panicked").wrong {
            return Err(wrong.clone());
        }
        let dead = self.dead.is_some();
        for record in std::mem::take(&mut *self.recorder.0.lock().expect("nobody panicked")) {
            let (group, index) = (record.request_id.parse::<u64>().expect("ids are numbers"), record.choice_index);
            let client = self.clients.iter_mut().rev().find(|client| (client.group, client.index) == (group, index));
            client.ok_or("a trace of nobody")?.judge_trace(record, dead)?;
        }
        for client in self.clients.iter_mut().filter(|client| client.attentive) {
            client.pump(dead)?;
        }
        let known = |client: &Client| Known {
            live: client.is_live(),
            seatless: client.sampling.max_tokens == 0 && (!client.score || client.prompt.len() == 1),
        };
        let known: Vec<Known> = self.clients.iter().map(known).collect();
        let live = known.iter().filter(|known| known.live).count();
        if self.load.live.load(Relaxed) != live {
            return Err(format!("{live} choices are live, the edge counts {}", self.load.live.load(Relaxed)));
        }
        if dead {
            return Ok(());
        }
        self.model.check(self.engine.scheduler(), &self.control, &known)
    }

    /// Turns until nothing is live, then checks that everything is back where it was.
    pub fn finish(&mut self) -> Result<(), String> {
        self.control.set_settle(Settle::AtOnce);
        self.clients.iter_mut().for_each(|client| client.attentive = true);
        let mut stuck = 0;
        for turn in 0.. {
            match self.turn()? {
                Turn::Idle => break,
                Turn::Worked => stuck = 0,
                Turn::Stuck => stuck += 1,
            }
            if stuck > 3 || turn > 50_000 {
                return Err(format!("no progress: {:?}", self.engine.scheduler().snapshot()));
            }
            self.clock.advance(Duration::from_millis(1));
        }
        self.check()?;
        for client in &mut self.clients {
            client.pump(self.dead.is_some())?;
            if client.is_live() {
                return Err(format!("choice {} has not ended", client.arrival));
            }
            if client.stream.is_some() && client.terminal.is_none() {
                return Err(format!("choice {} has not heard how it ended", client.arrival));
            }
        }
        if self.dead.is_none() { self.check_baseline() } else { Ok(()) }
    }

    fn check_baseline(&mut self) -> Result<(), String> {
        self.engine.publish();
        let load = &self.load;
        let gauges = [
            ("running", load.running.load(Relaxed)),
            ("waiting", load.waiting.load(Relaxed)),
            ("pages used", load.pages_used.load(Relaxed)),
            (
                "slots not free",
                load.slots(SlotState::Prefilling) + load.slots(SlotState::Active) + load.slots(SlotState::Cooling),
            ),
        ];
        if let Some((name, value)) = gauges.iter().find(|(_, value)| *value != 0) {
            return Err(format!("{name} is {value} at the end"));
        }
        let traced: u64 =
            self.clients.iter().flat_map(|client| &client.trace).map(|t| u64::from(t.completion_tokens)).sum();
        let generated = load.generation_tokens.load(Relaxed);
        let cut =
            self.clients.iter().any(|client| client.trace.as_ref().is_some_and(|t| t.cause == Some("stop_string")));
        if generated < traced || (generated > traced && !cut) {
            return Err(format!("{generated} tokens were counted, {traced} traced"));
        }
        let (preempted, aborted) =
            (load.preemptions.load(Relaxed) > 0, |c: &Client| c.trace.as_ref().is_some_and(|t| t.abort.is_some()));
        if !preempted && !self.clients.iter().any(aborted) {
            let prompt = |client: &Client| {
                let trace = client.trace.as_ref().expect("every choice has ended");
                let drawn = client.sampling.max_tokens > 0;
                let rows = if drawn {
                    client.prompt.len()
                } else if client.score {
                    client.prompt.len() - 1
                } else {
                    0
                };
                rows as u64 - u64::from(trace.shared_tokens)
            };
            let (wanted, counted) = (self.clients.iter().map(prompt).sum::<u64>(), load.prompt_tokens.load(Relaxed));
            if wanted != counted {
                return Err(format!("{counted} prompt tokens were counted, {wanted} computed"));
            }
        }
        Ok(())
    }
}
