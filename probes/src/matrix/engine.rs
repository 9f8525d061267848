//! An engine of the matrix: where it is or how it is started, and its process group while it runs.

use crate::client::Server;
use rustix::process::{Pid, Signal, kill_process_group};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

#[derive(Clone, Debug)]
pub struct EngineSpec {
    name: String,
    at: At,
}

#[derive(Clone, Debug)]
enum At {
    Url(String),
    Command(String),
}

impl EngineSpec {
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl FromStr for EngineSpec {
    type Err = String;
    fn from_str(text: &str) -> Result<EngineSpec, String> {
        let (name, rest) = text.split_once('=').ok_or("NAME=URL or NAME=COMMAND is needed")?;
        if name.is_empty() || rest.trim().is_empty() {
            return Err("NAME=URL or NAME=COMMAND is needed".into());
        }
        let at = if rest.starts_with("http://") { At::Url(rest.into()) } else { At::Command(rest.into()) };
        Ok(EngineSpec { name: name.into(), at })
    }
}

/// An engine that answers.
pub struct Running {
    pub server: Server,
    pub model: String,
    _process: Option<Process>,
}

/// A started engine and everything it started.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(group) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            // An engine that already left needs no signal.
            let _ = kill_process_group(group, Signal::TERM);
            let until = Instant::now() + Duration::from_secs(15);
            while Instant::now() < until && matches!(self.0.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(50));
            }
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

impl Running {
    /// Waits until the engine lists a model, or says why it never did.
    pub async fn open(spec: &EngineSpec, limit: Duration) -> Result<Running, String> {
        let (url, mut process) = match &spec.at {
            At::Url(url) => (url.clone(), None),
            At::Command(command) => {
                let port = free_port()?;
                let command = command.replace("{port}", &port.to_string());
                let child = Command::new("sh")
                    .args(["-c", &command])
                    .process_group(0)
                    .stdin(Stdio::null())
                    .stdout(Stdio::null())
                    .stderr(Stdio::inherit())
                    .spawn()
                    .map_err(|e| e.to_string())?;
                (format!("http://127.0.0.1:{port}"), Some(Process(child)))
            }
        };
        let server = Server::new(&url, None).map_err(|e| e.to_string())?;
        let deadline = Instant::now() + limit;
        let mut last = String::from("it never listened");
        while Instant::now() < deadline {
            if let Some(Ok(Some(status))) = process.as_mut().map(|process| process.0.try_wait()) {
                return Err(format!("it left with {status}"));
            }
            match server.get("/v1/models", deadline).await {
                Ok(answer) if answer.status == 200 => {
                    let listed = answer.json().map_err(|e| e.to_string())?;
                    let model = listed["data"][0]["id"].as_str().unwrap_or_default().to_string();
                    if answers(&server, &model, deadline).await {
                        return Ok(Running { server, model, _process: process });
                    }
                    last = "it lists a model but does not answer".into();
                }
                Ok(answer) => last = format!("/v1/models is {}", answer.status),
                Err(error) => last = error.to_string(),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Err(last)
    }
}

async fn answers(server: &Server, model: &str, deadline: Instant) -> bool {
    let body = serde_json::json!({"model": model, "prompt": [10, 11, 12], "max_tokens": 1});
    server.post("/v1/completions", &body, deadline).await.is_ok_and(|answer| answer.status == 200)
}

/// A port that nobody listens on.
fn free_port() -> Result<u16, String> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").map_err(|e| e.to_string())?;
    listener.local_addr().map(|address| address.port()).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_is_an_address_or_a_command() {
        assert!(matches!("a=http://127.0.0.1:1".parse::<EngineSpec>().unwrap().at, At::Url(_)));
        assert!(matches!("a=serve --port {port}".parse::<EngineSpec>().unwrap().at, At::Command(_)));
        assert!("a".parse::<EngineSpec>().is_err() && "=x".parse::<EngineSpec>().is_err());
    }
}
