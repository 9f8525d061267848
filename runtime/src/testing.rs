//! What the tests of this crate share: factories of null devices, requests, and reading a stream to its end.

use crate::engine::EngineOptions;
use crate::faults::EngineFaults;
use crate::ranks::{Factory, Prepared};
use crate::request::{Choice, Event, Group};
use crate::sink::{TokenStream, token_channel};
use crate::startup::Phase;
use crate::trace::TraceContext;
use slotgraph_graphs::device::Device;
use slotgraph_graphs::null::{Draw, Drawn, NullDevice, NullOptions, Settle};
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_graphs::step::StepLimits;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub fn limits() -> StepLimits {
    StepLimits {
        slots_max: 2,
        pages: 9,
        pages_per_slot: 4,
        buckets: vec![1, 2, 4, 8, 16, 32],
        launch_ahead: 1,
        max_model_len: 256,
        prefill_chunk: 16,
    }
}

pub fn options() -> EngineOptions {
    EngineOptions {
        slots_max: 2,
        max_queue: 4,
        reserve_tokens: 64,
        itl_target: None,
        init_timeout: Duration::from_secs(5),
        step_timeout: Duration::from_secs(5),
        faults: EngineFaults::default(),
        trace: TraceContext::default(),
    }
}

/// A device whose token after a row is its position + 100.
pub fn null_device() -> NullDevice {
    let script = |draw: Draw| Drawn::Token(draw.position + 100);
    let (settle, script) = (Settle::AtOnce, Box::new(script));
    NullDevice::new(NullOptions { limits: limits(), eos_ids: vec![1], settle, step_ns: 0, script })
}

/// A factory that makes a null device and lets `wrap` have it, going through two phases.
pub fn factory(wrap: impl FnOnce(NullDevice) -> Box<dyn Device> + Send + 'static) -> Factory {
    Box::new(|startup| {
        startup.enter(Phase::Read)?;
        startup.enter(Phase::Warm)?;
        Ok(Prepared::new(wrap(null_device()), limits(), 0))
    })
}

pub fn plain() -> Factory {
    factory(|device| Box::new(device))
}

/// A request of one choice, prompt `2, 3, 4`.
pub fn request(id: &str, max_tokens: u32, deadline: Option<Duration>) -> (Group, TokenStream) {
    let (sink, stream) = token_channel(256);
    let sampling = Arc::new(SamplingSpec::greedy(max_tokens));
    let prompt: Arc<[u32]> = [2, 3, 4].as_slice().into();
    let choice = Choice { index: 0, sample: 0, prompt, sampling, score_prompt: None, sink };
    let received = Instant::now();
    let deadline = deadline.map(|after| received + after);
    (Group { id: id.into(), choices: vec![choice], received, deadline }, stream)
}

/// The tokens of a stream and its last event.
pub fn read(mut stream: TokenStream) -> (Vec<u32>, Event) {
    let mut tokens = Vec::new();
    loop {
        match stream.next_blocking().expect("a stream ends with a terminal event") {
            Event::Token(token) => tokens.push(token.id),
            event if event.is_terminal() => return (tokens, event),
            _ => {}
        }
    }
}
