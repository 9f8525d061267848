//! What every connection shares: configuration, keys, numbers, and the service once it is ready.
//!
//! Made by `serve` before the port is read, completed when the engine has started. **Invariant:** `service` is set at most once, after every
//! plan was prepared; until then everything that needs it answers 503.

use crate::auth::Keys;
use crate::body::Intake;
use crate::error::ApiError;
use crate::live::Registry;
use crate::metrics::Metrics;
use crate::request::Limits;
use crate::template::Template;
use crate::tokenizer::Tokenizer;
use crate::traces::Traces;
use slotgraph_runtime::config::Config;
use slotgraph_runtime::engine::{EngineHandle, NotAccepting};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

pub struct App {
    pub config: Config,
    pub keys: Keys,
    pub metrics: Arc<Metrics>,
    pub traces: Arc<Traces>,
    pub registry: Arc<Registry>,
    pub intake: Intake,
    pub service: OnceLock<Service>,
    /// Unix seconds; `created` of the model list.
    pub started: u64,
    pub draining: AtomicBool,
    /// Requests whose answer is not on the socket yet, of every kind.
    pub exchanges: AtomicUsize,
}

/// A loaded model and its engine.
pub struct Service {
    pub engine: EngineHandle,
    pub tokenizer: Arc<Tokenizer>,
    pub template: Option<Template>,
    pub limits: Limits,
    pub fingerprint: String,
    pub contract_hash: String,
    pub model_sha256: String,
    /// The start-up record, JSON.
    pub startup: String,
}

/// Why the server is not ready, as `/health` says it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unready {
    Loading,
    Draining,
    Stalled,
    Dead,
}

impl Unready {
    pub fn name(self) -> &'static str {
        match self {
            Unready::Loading => "loading",
            Unready::Draining => "draining",
            Unready::Stalled => "stalled",
            Unready::Dead => "dead",
        }
    }
    /// What a request hears.
    pub fn error(self) -> ApiError {
        match self {
            Unready::Loading => ApiError::unavailable("the model is still loading", Some(2)),
            Unready::Draining => ApiError::unavailable("the server is shutting down", Some(1)),
            Unready::Stalled => ApiError::unavailable("the engine is stalled", Some(5)),
            Unready::Dead => ApiError::unavailable("the engine has failed", None),
        }
    }
}

impl From<NotAccepting> for Unready {
    fn from(reason: NotAccepting) -> Self {
        match reason {
            NotAccepting::Draining => Unready::Draining,
            NotAccepting::Dead(_) => Unready::Dead,
        }
    }
}

impl App {
    /// Whether the engine is well: nothing here waits for it.
    pub fn alive(&self) -> Result<(), Unready> {
        let Some(service) = self.service.get() else { return Ok(()) };
        let load = service.engine.load();
        if load.dead().is_some() {
            return Err(Unready::Dead);
        }
        if load.stalled(self.config.stall_timeout) { Err(Unready::Stalled) } else { Ok(()) }
    }
    /// Whether new requests are welcome.
    pub fn ready(&self) -> Result<&Service, Unready> {
        self.alive()?;
        if self.draining.load(Relaxed) {
            return Err(Unready::Draining);
        }
        let service = self.service.get().ok_or(Unready::Loading)?;
        service.engine.accepting()?;
        Ok(service)
    }
    /// The service, for what does not need the engine to be well.
    pub fn loaded(&self) -> Result<&Service, Unready> {
        self.service.get().ok_or(Unready::Loading)
    }
}

pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
