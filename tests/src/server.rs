//! A real server process for black-box tests: started on a free port, asked over HTTP, killed when the test is done.

use crate::http::{Conn, Reply, Stream, bare, post};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// A running `slotgraph serve`.
pub struct Server {
    child: Child,
    pub address: SocketAddr,
    stderr: Arc<Mutex<String>>,
    /// Served model name.
    pub model: String,
    /// The canary's answer right after start.
    canary: Option<Value>,
}

/// Starts `binary serve --port 0 …` and waits until it is ready.
pub fn start(binary: &str, arguments: &[&str]) -> Server {
    let mut server = launch(binary, arguments, &[]);
    server.wait_ready();
    server.canary = Some(server.ask_canary());
    server.quiescent();
    server
}

/// Starts a server and does not wait for it to load.
pub fn launch(binary: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Server {
    let mut command = Command::new(binary);
    command.arg("serve");
    if !arguments.contains(&"--port") {
        command.args(["--port", "0"]);
    }
    command.args(arguments).envs(variables.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the server's binary starts");
    let stderr = Arc::new(Mutex::new(String::new()));
    collect(child.stderr.take().expect("stderr is piped"), stderr.clone());
    let mut line = String::new();
    let mut stdout = BufReader::new(child.stdout.take().expect("stdout is piped"));
    stdout.read_line(&mut line).expect("stdout can be read");
    let Some(json) = line.strip_prefix("slotgraph_listening ") else {
        let _ = child.wait();
        std::thread::sleep(Duration::from_millis(50));
        panic!("the server did not listen: {}", stderr.lock().unwrap());
    };
    let said: Value = serde_json::from_str(json).expect("the line is JSON");
    let url = said["url"].as_str().expect("a URL");
    let address = url.strip_prefix("http://").expect("http").parse().expect("an address");
    Server { child, address, stderr, model: String::new(), canary: None }
}

fn collect(mut from: impl Read + Send + 'static, into: Arc<Mutex<String>>) {
    std::thread::spawn(move || {
        let mut bytes = [0; 16 << 10];
        while let Ok(count @ 1..) = from.read(&mut bytes) {
            into.lock().unwrap().push_str(&String::from_utf8_lossy(&bytes[..count]));
        }
    });
}

impl Server {
    pub fn wait_ready(&mut self) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.get("/health").status() != 200 {
            assert!(self.child.try_wait().expect("a child").is_none(), "the server left: {}", self.log());
            assert!(Instant::now() < deadline, "not ready: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
        self.model = self.get("/v1/models").json()["data"][0]["id"].as_str().expect("a name").to_owned();
    }
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
    pub fn log(&self) -> String {
        self.stderr.lock().unwrap().clone()
    }
    pub fn conn(&self) -> Conn {
        Conn::open(self.address)
    }
    pub fn get(&self, path: &str) -> Reply {
        self.conn().ask(&bare("GET", path, &[("connection", "close")]))
    }
    /// None where the server does not answer.
    pub fn try_get(&self, path: &str) -> Option<Reply> {
        let mut conn = Conn::over(TcpStream::connect(self.address).ok()?);
        conn.tcp.write_all(&bare("GET", path, &[("connection", "close")])).ok()?;
        conn.try_reply(false).ok()
    }
    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_raw(path, &body.to_string())
    }
    pub fn post_raw(&self, path: &str, body: &str) -> Reply {
        self.conn().ask(&post(path, body, &[("connection", "close")]))
    }
    /// `/v1/completions` with `model` and `prompt` filled in where `fields` lack them.
    pub fn complete(&self, fields: Value) -> Reply {
        self.post("/v1/completions", &self.completion(fields))
    }
    pub fn chat(&self, fields: Value) -> Reply {
        self.post("/v1/chat/completions", &self.conversation(fields))
    }
    /// A streamed completion.
    pub fn stream(&self, fields: Value) -> Stream {
        let mut body = self.completion(fields);
        body["stream"] = json!(true);
        Stream::open(self.address, &post("/v1/completions", &body.to_string(), &[]))
    }
    pub fn stream_chat(&self, fields: Value) -> Stream {
        let mut body = self.conversation(fields);
        body["stream"] = json!(true);
        Stream::open(self.address, &post("/v1/chat/completions", &body.to_string(), &[]))
    }
    pub fn completion(&self, fields: Value) -> Value {
        with(fields, &[("model", json!(self.model)), ("prompt", json!("hi"))])
    }
    pub fn conversation(&self, fields: Value) -> Value {
        with(fields, &[("model", json!(self.model)), ("messages", json!([{"role": "user", "content": "hi"}]))])
    }
    /// The sum of a metric's series whose labels contain all of `labels`.
    pub fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let text = self.get("/metrics");
        let lines = text.text().lines().filter(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']))
                && labels.iter().all(|label| line.contains(label))
        });
        lines.map(|line| line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok()).expect("a number")).sum()
    }
    pub fn gauge(&self, name: &str) -> f64 {
        self.metric(name, &[])
    }
    /// Waits until `condition` holds.
    pub fn until(&self, patience: Duration, what: &str, condition: impl Fn(&Server) -> bool) {
        let deadline = Instant::now() + patience;
        while !condition(self) {
            assert!(Instant::now() < deadline, "{what} did not come to hold within {patience:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    fn ask_canary(&self) -> Value {
        let reply =
            self.complete(json!({"prompt": "The capital of France is", "max_tokens": 32, "temperature": 0, "seed": 1}));
        assert_eq!(reply.status(), 200, "{}", reply.text());
        let mut answer = reply.json();
        json!([answer["choices"].take(), answer["usage"].take()])
    }
    /// Waits until nothing runs or waits and every page is back, at most two seconds.
    pub fn quiescent(&self) {
        self.until(Duration::from_secs(2), "quiescence", |server| {
            server.gauge("vllm:num_requests_running") == 0.0
                && server.gauge("vllm:num_requests_waiting") == 0.0
                && server.gauge("slotgraph_kv_pages_used") == 0.0
        });
    }
    /// What must hold after every case: the canary is what it was, the server is well and idle, the log is clean.
    pub fn calm(&mut self) {
        self.quiescent();
        assert_eq!(Some(self.ask_canary()), self.canary, "the canary changed");
        self.quiescent();
        assert_eq!(self.get("/health").status(), 200);
        assert!(self.child.try_wait().expect("a child").is_none(), "the process left");
        let log = self.log();
        for line in log.lines().filter(|line| !line.starts_with("slotgraph_http_trace")) {
            assert!(!line.contains("panicked") && !line.contains("ERROR"), "{line}");
        }
    }
    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([&format!("-{name}"), &self.pid().to_string()]).status();
        assert!(status.expect("kill runs").success());
    }
    /// Waits for the process to leave.
    pub fn exit(&mut self, patience: Duration) -> ExitStatus {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            assert!(Instant::now() < deadline, "the process did not leave within {patience:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    /// A number of /proc/PID/status, in KiB.
    pub fn rss_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).expect("procfs");
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("VmRSS");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse().ok()).expect("a number")
    }
    pub fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("procfs").count()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn with(mut fields: Value, defaults: &[(&str, Value)]) -> Value {
    let map = fields.as_object_mut().expect("fields are an object");
    for (name, value) in defaults {
        map.entry(*name).or_insert_with(|| value.clone());
    }
    fields
}

/// Runs `binary serve …` that must refuse to start: its exit code and the last line of its log.
pub fn refused(binary: &str, arguments: &[&str], variables: &[(&str, &str)]) -> (i32, String, Duration) {
    let began = Instant::now();
    let mut command = Command::new(binary);
    command.arg("serve").args(arguments).envs(variables.iter().copied());
    let output = command.stdin(Stdio::null()).output().expect("the server's binary starts");
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code().expect("an exit code"), log, began.elapsed())
}

/// A copy of a model folder, to be changed.
pub fn copy_of(model: &Path) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for entry in std::fs::read_dir(model).expect("a model folder") {
        let entry = entry.expect("a model's file");
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("a copy");
    }
    folder
}

/// Changes a JSON file of a folder.
pub fn edit(folder: &Path, file: &str, change: impl FnOnce(&mut Value)) {
    let path = folder.join(file);
    let mut value: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    change(&mut value);
    std::fs::write(&path, value.to_string()).expect("a file");
}

/// `binary` behind a shell script whose `first` line changes what it starts with.
pub fn behind(binary: &str, first: &str) -> tempfile::TempPath {
    let script = tempfile::NamedTempFile::new().expect("a file").into_temp_path();
    std::fs::write(&script, format!("#!/bin/sh\n{first} {binary} \"$@\"\n")).expect("a script");
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("a mode");
    script
}
