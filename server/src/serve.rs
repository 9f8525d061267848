//! `slotgraph serve`: bind, load, serve, drain, exit.
//!
//! The port is bound before anything is loaded, and answers `/health` with 503 until every plan is prepared. SIGTERM or SIGINT drains: queued
//! and running requests finish within `--drain-timeout`, new ones get 503; what is left at the deadline gets an error; a second signal ends
//! the process at once. **Invariant:** exit 0 after a complete drain, 1 after a cut one or a failed engine, 2 for what must be changed first.

use crate::app::{App, Service, unix_seconds};
use crate::auth::Keys;
use crate::body::Intake;
use crate::cli::Serve;
use crate::listen::{self, Patience};
use crate::live::Registry;
use crate::load::{self, LoadError};
use crate::logging;
use crate::metrics::{Info, Metrics};
use crate::traces::Traces;
use serde_json::json;
use slotgraph_runtime::checkpoint::Checkpoint;
use slotgraph_runtime::config::Config;
use slotgraph_runtime::engine::EngineFailure;
use slotgraph_runtime::load::LIFE_STATES;
use slotgraph_runtime::ranks::RankStart;
use slotgraph_runtime::request::AbortCause;
use slotgraph_runtime::startup::{Phase, Phases};
use std::io::Write;
use std::process::ExitCode;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// File descriptors kept for everything that is not a client's connection; where there are few, half of them.
const FILES_KEPT: u64 = 64;
/// After the drain deadline: time for the last error events to leave.
const LAST_WORDS: Duration = Duration::from_millis(700);
/// How long the engine may take to put its devices away.
const ENGINE_LEAVES: Duration = Duration::from_secs(10);
/// After the engine died.
const LAST_WORDS_OF_THE_DEAD: Duration = Duration::from_secs(1);

/// Runs the server until it is told to stop.
pub fn run(arguments: &Serve) -> ExitCode {
    let began = Instant::now();
    match prepare(arguments) {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some((runtime, listener))) => {
            let code = runtime.block_on(serve(arguments, listener, began));
            // Blocking threads may still be loading a model: the process does not wait for them.
            runtime.shutdown_background();
            std::process::exit(code.into())
        }
        Err((code, message)) => {
            eprintln!("slotgraph: {message}");
            ExitCode::from(code)
        }
    }
}

/// A line on stdout; a reader that is gone does not matter.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

type Failure = (u8, String);

fn usage(message: impl ToString) -> Failure {
    (2, message.to_string())
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        (error.exit_code(), error.to_string())
    }
}

/// Everything that can be refused at once; None when there was only something to print.
fn prepare(arguments: &Serve) -> Result<Option<(tokio::runtime::Runtime, TcpListener)>, Failure> {
    logging::start(arguments.log_format).map_err(usage)?;
    if arguments.print_config {
        let (checkpoint, config) = load::open(arguments.model(), &arguments.settings(), &mut Phases::default())?;
        say(&config.print(&checkpoint).map_err(usage)?);
        return Ok(None);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(8)
        .enable_all()
        .build()
        .map_err(|error| (1, format!("threads cannot be started: {error}")))?;
    let listener = {
        let _inside = runtime.enter();
        listen::bind(&arguments.host, arguments.port).map_err(usage)?
    };
    let address = listener.local_addr().map_err(usage)?;
    let line = json!({"url": listen::url(address), "host": address.ip().to_string(), "port": address.port()});
    say(&format!("slotgraph_listening {line}"));
    Ok(Some((runtime, listener)))
}

async fn serve(arguments: &Serve, listener: TcpListener, began: Instant) -> u8 {
    let mut signals = match Signals::new() {
        Ok(signals) => signals,
        Err(error) => return fail((1, format!("signals cannot be heard: {error}"))),
    };
    let server = match Server::start(arguments, listener) {
        Ok(server) => server,
        Err(failure) => return fail(failure),
    };
    let app = server.app.clone();
    let loading = tokio::task::spawn_blocking({
        let (app, checkpoint, phases) = (app.clone(), server.checkpoint.clone(), server.phases.clone());
        move || load_service(&app, &checkpoint, phases, began)
    });
    tokio::select! {
        loaded = loading => match loaded {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => return fail(failure),
            Err(panic) => return fail((1, format!("loading failed: {panic}"))),
        },
        () = signals.next() => {
            tracing::info!("stopped while loading");
            return 0;
        }
    }
    let service = app.service.get().expect("load_service set it");
    let mut left = watch(service);
    let code = tokio::select! {
        () = signals.next() => {
            let drained = server.drain(service, &mut left);
            tokio::select! {
                complete = drained => u8::from(!complete),
                () = signals.next() => {
                    tracing::warn!("a second signal: stopping at once");
                    1
                }
            }
        }
        outcome = &mut left => {
            let reason = match outcome {
                Ok(Err(failure)) => failure.to_string(),
                _ => "its thread left unasked".to_owned(),
            };
            tracing::error!(reason, "the engine has failed; stopping");
            server.last_words(LAST_WORDS_OF_THE_DEAD).await;
            1
        }
    };
    app.traces.flush(Duration::from_secs(1));
    code
}

fn fail((code, message): Failure) -> u8 {
    eprintln!("slotgraph: {message}");
    code
}

/// SIGTERM and SIGINT.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// The open port and what it needs before the model is there.
struct Server {
    app: Arc<App>,
    checkpoint: Arc<Checkpoint>,
    phases: Phases,
    stop: CancellationToken,
    close: CancellationToken,
    connections: TaskTracker,
}

impl Server {
    fn start(arguments: &Serve, listener: TcpListener) -> Result<Server, Failure> {
        let keys = keys(arguments)?;
        let mut phases = Phases::default();
        let (checkpoint, config) = load::open(arguments.model(), &arguments.settings(), &mut phases)?;
        for warning in checkpoint.warnings.iter().chain(&config.warnings) {
            tracing::warn!("{warning}");
        }
        let files = rlimit::increase_nofile_limit(u64::MAX).unwrap_or(0);
        let room = usize::try_from(files - FILES_KEPT.min(files / 2)).unwrap_or(usize::MAX).max(1);
        let connections_max = if files == 0 { config.max_connections } else { config.max_connections.min(room) };
        tracing::info!(file_descriptors = files, connections_max, "limits");
        let metrics = Arc::new(Metrics::new(&config.served_names[0], &config.buckets));
        let traces = Traces::start(arguments.trace_file.as_deref(), metrics.clone())
            .map_err(|error| usage(format!("--trace-file: {error}")))?;
        let app = Arc::new(App {
            keys,
            metrics,
            traces,
            registry: Arc::new(Registry::default()),
            intake: Intake::new(config.body_limit, Duration::from_secs_f64(arguments.body_timeout)),
            service: OnceLock::new(),
            started: unix_seconds(),
            draining: Default::default(),
            exchanges: Default::default(),
            config,
        });
        let patience =
            Patience { headers: Duration::from_secs_f64(arguments.header_timeout), write: app.config.write_timeout };
        let (stop, close, connections) = (CancellationToken::new(), CancellationToken::new(), TaskTracker::new());
        tokio::spawn(listen::accept(
            listener,
            app.clone(),
            patience,
            connections_max,
            stop.clone(),
            close.clone(),
            connections.clone(),
        ));
        Ok(Server { app, checkpoint: Arc::new(checkpoint), phases, stop, close, connections })
    }

    /// Ends the server in good order; whether everything was answered in time.
    async fn drain(&self, service: &Service, left: &mut oneshot::Receiver<Result<(), EngineFailure>>) -> bool {
        let timeout = self.app.config.drain_timeout;
        let deadline = Instant::now() + timeout;
        tracing::info!(requests = self.app.registry.count(), seconds = timeout.as_secs_f64(), "draining");
        self.app.draining.store(true, Relaxed);
        service.engine.drain(deadline);
        let idle = self.idle_before(deadline + LAST_WORDS).await;
        let load = service.engine.load();
        let complete = idle && LIFE_STATES.iter().all(|state| load.swept(*state, AbortCause::Drain) == 0);
        service.engine.shutdown();
        self.last_words(LAST_WORDS).await;
        let clean = matches!(tokio::time::timeout(ENGINE_LEAVES, left).await, Ok(Ok(Ok(()))));
        tracing::info!(complete, engine_left = clean, "stopped");
        complete && clean
    }

    async fn idle_before(&self, deadline: Instant) -> bool {
        while self.app.registry.count() > 0 || self.app.exchanges.load(Relaxed) > 0 {
            if Instant::now() >= deadline {
                return false;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        true
    }

    /// Closes the port and every connection; those that still write get `patience`.
    async fn last_words(&self, patience: Duration) {
        self.idle_before(Instant::now() + patience / 2).await;
        self.stop.cancel();
        self.close.cancel();
        self.connections.close();
        let _ = tokio::time::timeout(patience, self.connections.wait()).await;
    }
}

fn keys(arguments: &Serve) -> Result<Keys, Failure> {
    let mut keys = arguments.api_keys.clone();
    if let Some(path) = &arguments.api_key_file {
        let read = Keys::read(path);
        keys.extend(read.map_err(|error| usage(format!("--api-key-file {}: {error}", path.display())))?);
    }
    match std::env::var("SLOTGRAPH_API_KEY") {
        Ok(list) => keys.extend(list.split(',').map(str::to_owned)),
        Err(std::env::VarError::NotPresent) => {}
        Err(error) => return Err(usage(format!("SLOTGRAPH_API_KEY: {error}"))),
    }
    let asked = !keys.is_empty();
    let keys = Keys::new(keys);
    if asked && keys.is_empty() {
        return Err(usage("--api-key: only empty keys were given; a server without keys is open to everybody"));
    }
    Ok(keys)
}

/// Loads the model and opens the doors.
fn load_service(app: &App, checkpoint: &Checkpoint, mut phases: Phases, began: Instant) -> Result<(), Failure> {
    let texts = phases.time(Phase::Tokenizer, || load::texts(checkpoint))?;
    let service = load::start(&app.config, checkpoint, texts, app.traces.clone(), &phases, began)?;
    app.metrics.set_info(&info(&app.config, service.engine.ranks()));
    let pages = service.engine.load().pages_total.load(Relaxed) as usize;
    app.metrics.set_cache(slotgraph_kernels::contract::PAGE_TOKENS, pages);
    eprintln!("{}", service.startup);
    tracing::info!(
        model = app.config.served_names[0],
        contract_hash = service.contract_hash,
        seconds = began.elapsed().as_secs_f64(),
        "ready"
    );
    let _ = app.service.set(service);
    Ok(())
}

fn info(config: &Config, ranks: &[RankStart]) -> Info {
    let first = ranks.first().map(|rank| rank.record.device.clone()).unwrap_or_default();
    Info {
        device: first.kind,
        contract_hash: first.contract_hash,
        ledger_hash: first.ledger_hash,
        transport: config.transport.name().to_owned(),
        ep: config.ep.to_string(),
        graph_bytes: ranks.iter().map(|rank| rank.record.device.graph_bytes).sum(),
    }
}

/// Hears how the engine's thread left.
fn watch(service: &Service) -> oneshot::Receiver<Result<(), EngineFailure>> {
    let (tell, hear) = oneshot::channel();
    let engine = service.engine.clone();
    let body = move || {
        let _ = tell.send(engine.join());
    };
    std::thread::Builder::new().name("watch".into()).spawn(body).expect("a thread can be started");
    hear
}
