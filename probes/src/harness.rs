//! A server under test: started by the probe from its own binary, or given by its address.
//!
//! Used by every gate over HTTP. **Invariant:** a server that a probe started is stopped when the probe ends, however it ends; request ids
//! are unique to a run, so that no older log can answer for it.

use crate::cli::ProbeError;
use crate::client::{ClientError, Server};
use crate::evidence::short_path;
use crate::load::scatter;
use crate::scrape::Baseline;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Where the server is, or how to start it.
#[derive(Clone, Debug, clap::Args)]
pub struct TargetArgs {
    /// A running server; without it the probe starts one. Its planted faults are then reported as skipped.
    #[arg(long, value_name = "http://HOST:PORT")]
    pub url: Option<String>,
    /// Another build of the server to start [default: this binary, so that probe and server are of one commit].
    #[arg(long, value_name = "FILE", conflicts_with = "url")]
    pub server_binary: Option<PathBuf>,
    /// Name to ask for [default: the first that the server lists].
    #[arg(long)]
    pub model: Option<String>,
    #[arg(long, env = "SLOTGRAPH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Where the server writes its traces (with --url) [default: asked from /debug/traces].
    #[arg(long, value_name = "FILE", requires = "url")]
    pub trace_file: Option<PathBuf>,
    /// Arguments of `slotgraph serve` for the server that the probe starts.
    #[arg(last = true)]
    pub serve: Vec<String>,
}

/// A server that answers.
pub struct Target {
    pub server: Server,
    pub model: String,
    /// Context of one request, as the server lists it.
    pub max_model_len: usize,
    started: Option<Started>,
    trace_file: Option<PathBuf>,
    run: String,
}

struct Started {
    child: Child,
    folder: tempfile::TempDir,
}

impl Drop for Started {
    fn drop(&mut self) {
        // A server that already left needs no signal.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Time that a start may take.
const START_LIMIT: Duration = Duration::from_secs(120);

impl TargetArgs {
    /// Whether the probe starts the server itself, and so may plant faults in it.
    pub fn starts_its_own(&self) -> bool {
        self.url.is_none()
    }

    /// Connects, or starts a server with `more` arguments, and waits until it is ready.
    pub async fn open(&self, more: &[&str]) -> Result<Target, ProbeError> {
        let started = match &self.url {
            Some(_) => None,
            None => Some(self.start(more)?),
        };
        let deadline = Instant::now() + START_LIMIT;
        let url = match (&self.url, &started) {
            (Some(url), _) => url.clone(),
            (None, Some(started)) => wait_for_address(started, deadline).await?,
            (None, None) => unreachable!("a server is given or started"),
        };
        let server = Server::new(&url, self.api_key.clone()).map_err(|e| ProbeError::Usage(format!("--url {e}")))?;
        let mut target = Target {
            server,
            model: String::new(),
            max_model_len: 0,
            trace_file: self.trace_file.clone().or(started.as_ref().map(|s| s.folder.path().join("traces.jsonl"))),
            started,
            run: format!("{:08x}", scatter(u64::from(std::process::id()) ^ unix_nanos()) as u32),
        };
        target.wait_ready(deadline).await?;
        target.describe(self.model.as_deref(), deadline).await?;
        Ok(target)
    }

    fn start(&self, more: &[&str]) -> Result<Started, ProbeError> {
        let folder = tempfile::tempdir().map_err(|e| ProbeError::Failed(e.to_string()))?;
        let error = |e: std::io::Error| ProbeError::Failed(e.to_string());
        let log = std::fs::File::create(folder.path().join("server.log")).map_err(error)?;
        let out = log.try_clone().map_err(error)?;
        let binary = self.binary()?;
        let child = Command::new(&binary)
            .arg("serve")
            .args(["--port", "0", "--trace-file"])
            .arg(folder.path().join("traces.jsonl"))
            .args(&self.serve)
            .args(more)
            .stdin(Stdio::null())
            .stdout(out)
            .stderr(log)
            .spawn()
            .map_err(|e| ProbeError::Usage(format!("{}: {e}", binary.display())))?;
        Ok(Started { child, folder })
    }

    fn binary(&self) -> Result<PathBuf, ProbeError> {
        if let Some(binary) = &self.server_binary {
            return Ok(binary.clone());
        }
        std::env::current_exe().map_err(|e| ProbeError::Failed(e.to_string()))
    }

    /// What evidence says of the server's origin.
    pub fn config(&self) -> Value {
        json!({
            "server": self.url.as_deref().map_or("started by the probe", |_| "given by its address"),
            "serve": self.serve.iter().map(|word| short_path(word)).collect::<Vec<_>>(),
        })
    }
}

/// The address that the server printed.
async fn wait_for_address(started: &Started, deadline: Instant) -> Result<String, ProbeError> {
    let log = started.folder.path().join("server.log");
    loop {
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let found = text.lines().filter(|line| line.contains("slotgraph_listening")).find_map(|line| {
            let at = line.find("http://")?;
            let end = line[at..].find(['"', ' ', '\'']).unwrap_or(line.len() - at);
            Some(line[at..at + end].trim_end_matches('/').to_string())
        });
        if let Some(address) = found {
            return Ok(address);
        }
        if !is_alive(started.child.id()) || Instant::now() > deadline {
            let last = text.lines().last().unwrap_or("it printed nothing");
            return Err(ProbeError::Failed(format!("the server did not start: {last}")));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

impl Target {
    async fn wait_ready(&self, deadline: Instant) -> Result<(), ProbeError> {
        loop {
            let last = match self.server.get("/health", deadline).await {
                Ok(answer) if answer.status == 200 => return Ok(()),
                Ok(answer) => format!("/health is {}", answer.status),
                Err(error) => error.to_string(),
            };
            let gone = self.started.as_ref().is_some_and(|started| !is_alive(started.child.id()));
            if gone || Instant::now() > deadline {
                return Err(ProbeError::Failed(format!("the server is not ready: {last}; {}", self.log_tail())));
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn describe(&mut self, model: Option<&str>, deadline: Instant) -> Result<(), ProbeError> {
        let answer = self.server.get("/v1/models", deadline).await.map_err(failed)?.json().map_err(failed)?;
        let listed = answer["data"].as_array().cloned().unwrap_or_default();
        let found = listed.iter().find(|m| model.is_none_or(|name| m["id"] == name));
        let Some(found) = found else {
            return Err(ProbeError::Usage(format!(
                "--model {}: the server does not list it",
                model.unwrap_or_default()
            )));
        };
        self.model = found["id"].as_str().unwrap_or_default().into();
        self.max_model_len = found["max_model_len"].as_u64().unwrap_or(2048) as usize;
        Ok(())
    }

    /// Process id of a server that the probe started.
    pub fn pid(&self) -> Option<u32> {
        self.started.as_ref().map(|started| started.child.id())
    }

    pub fn is_alive(&self) -> bool {
        self.pid().is_none_or(is_alive)
    }

    /// An id that no other run used.
    pub fn id(&self, name: &str, number: usize) -> String {
        format!("{}-{name}-{number}", self.run)
    }

    pub async fn baseline(&self) -> Result<Baseline, ProbeError> {
        Baseline::read(&self.server, self.pid(), Instant::now() + Duration::from_secs(10)).await.map_err(failed)
    }

    /// Everything that the server printed so far (a server that the probe started).
    pub fn log(&self) -> String {
        let Some(started) = &self.started else { return String::new() };
        std::fs::read_to_string(started.folder.path().join("server.log")).unwrap_or_default()
    }

    fn log_tail(&self) -> String {
        self.log().lines().last().unwrap_or_default().into()
    }

    /// The server's start-up record.
    pub async fn startup(&self) -> Value {
        let deadline = Instant::now() + Duration::from_secs(10);
        let answer = self.server.get("/debug/graphs", deadline).await;
        answer.ok().and_then(|answer| answer.json().ok()).map(|body| body["startup"].clone()).unwrap_or_default()
    }

    /// Traces by request id, of ids that start with this run's mark.
    pub async fn traces(&self) -> Result<HashMap<String, Vec<Map<String, Value>>>, ProbeError> {
        let records = match &self.trace_file {
            Some(file) => read_traces(file).map_err(|e| ProbeError::Failed(format!("{}: {e}", file.display())))?,
            None => {
                let deadline = Instant::now() + Duration::from_secs(30);
                let answer =
                    self.server.get("/debug/traces", deadline).await.map_err(failed)?.json().map_err(failed)?;
                let list = answer.as_array().or(answer["traces"].as_array()).cloned().unwrap_or_default();
                list.into_iter().filter_map(untagged).collect()
            }
        };
        let mut by_id: HashMap<String, Vec<Map<String, Value>>> = HashMap::new();
        for record in records {
            let id = record.get("request_id").and_then(Value::as_str).unwrap_or_default();
            if id.starts_with(&self.run) {
                by_id.entry(id.to_string()).or_default().push(record);
            }
        }
        Ok(by_id)
    }

    /// Waits until every id has a trace; returns those that have none in the end.
    pub async fn missing_traces(&self, ids: &[String], limit: Duration) -> Result<Vec<String>, ProbeError> {
        let until = Instant::now() + limit;
        loop {
            let traces = self.traces().await?;
            let missing: Vec<String> = ids.iter().filter(|id| !traces.contains_key(*id)).cloned().collect();
            if missing.is_empty() || Instant::now() > until {
                return Ok(missing);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// SIGTERM; waits for the exit. The exit code, or None after `limit`.
    pub async fn terminate(&mut self, limit: Duration) -> Option<i32> {
        let started = self.started.as_mut()?;
        let pid = Pid::from_raw(started.child.id().try_into().ok()?)?;
        // A process that already left cannot be signalled; the wait below tells.
        let _ = kill_process(pid, Signal::TERM);
        let until = Instant::now() + limit;
        while Instant::now() < until {
            if let Ok(Some(status)) = started.child.try_wait() {
                return Some(status.code().unwrap_or(-1));
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        None
    }
}

/// The traces of a running server, read as they are written.
pub struct TraceTail {
    file: PathBuf,
    offset: u64,
    /// By request id, since the last `forget`.
    seen: HashMap<String, Map<String, Value>>,
}

impl TraceTail {
    pub fn of(target: &Target) -> Result<TraceTail, ProbeError> {
        let missing =
            || ProbeError::Usage("--trace-file: a long run needs the file that the server writes its traces to".into());
        let file = target.trace_file.clone().ok_or_else(missing)?;
        let offset = std::fs::metadata(&file).map_or(0, |meta| meta.len());
        Ok(TraceTail { file, offset, seen: HashMap::new() })
    }

    pub fn get(&self, id: &str) -> Option<&Map<String, Value>> {
        self.seen.get(id)
    }

    /// Waits until every id was seen; returns those that were not.
    pub async fn await_all(&mut self, ids: &[String], limit: Duration) -> Result<Vec<String>, ProbeError> {
        let until = Instant::now() + limit;
        loop {
            self.read().map_err(|e| ProbeError::Failed(format!("{}: {e}", self.file.display())))?;
            let missing: Vec<String> = ids.iter().filter(|id| !self.seen.contains_key(*id)).cloned().collect();
            if missing.is_empty() || Instant::now() > until {
                return Ok(missing);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Drops what was seen: the next requests have other ids.
    pub fn forget(&mut self) {
        self.seen.clear();
    }

    /// Reads whole lines that are new.
    fn read(&mut self) -> std::io::Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = std::fs::File::open(&self.file)?;
        file.seek(SeekFrom::Start(self.offset))?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        let whole = text.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        self.offset += whole as u64;
        for line in String::from_utf8_lossy(&text[..whole]).lines() {
            if let Some(record) = parse_trace(line) {
                let id = record.get("request_id").and_then(Value::as_str).unwrap_or_default().to_string();
                self.seen.insert(id, record);
            }
        }
        Ok(())
    }
}

fn failed(error: ClientError) -> ProbeError {
    ProbeError::Failed(error.to_string())
}

/// Whether a process runs (a zombie does not).
fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next()).is_some_and(|state| state != "Z")
}

fn unix_nanos() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |since| since.as_nanos() as u64)
}

/// Every trace line of a file; lines that are no traces are passed over.
pub fn read_traces(file: &Path) -> std::io::Result<Vec<Map<String, Value>>> {
    let text = std::fs::read_to_string(file)?;
    Ok(text.lines().filter_map(parse_trace).collect())
}

fn parse_trace(line: &str) -> Option<Map<String, Value>> {
    untagged(serde_json::from_str(line.get(line.find('{')?..)?).ok()?)
}

/// The record inside `{"slotgraph_http_trace": {…}}`, or the record itself.
fn untagged(value: Value) -> Option<Map<String, Value>> {
    let Value::Object(mut object) = value else { return None };
    if let Some(inner) = object.remove("slotgraph_http_trace") {
        return inner.as_object().cloned();
    }
    object.contains_key("request_id").then_some(object)
}

/// Lets this process hold as many sockets as the system allows.
pub fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // Refused only where the hard limit is unreadable; the soft one then stays.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}
