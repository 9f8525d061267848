//! A small HTTP/1.1 client for gates: one connection a value, absolute deadlines, and every event of a stream with its arrival time.
//!
//! Used by every probe that speaks to a server. **Invariant:** no call outlives its deadline; dropping a connection closes its socket,
//! with a reset when it was opened with `Close::Reset`.

mod answer;

pub use answer::{Answer, Completion, Leave, Outcome};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper::{HeaderMap, Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::time::Instant;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout_at;

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("{0} is not http://HOST:PORT")]
    Url(String),
    #[error("connecting: {0}")]
    Connect(std::io::Error),
    #[error("{0}")]
    Http(#[from] hyper::Error),
    #[error("no answer before the deadline")]
    Deadline,
    #[error("the stream broke its form: {0}")]
    Stream(String),
}

/// How the socket of a connection ends when it is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Close {
    /// FIN.
    Orderly,
    /// RST (a zero linger).
    Reset,
}

/// A server's address and the key it asks for.
#[derive(Clone, Debug)]
pub struct Server {
    authority: String,
    api_key: Option<String>,
}

impl Server {
    /// From `http://HOST:PORT`, with or without a trailing slash.
    pub fn new(url: &str, api_key: Option<String>) -> Result<Server, ClientError> {
        let authority = url.strip_prefix("http://").map(|rest| rest.trim_end_matches('/')).unwrap_or_default();
        if authority.is_empty() || authority.contains('/') || !authority.contains(':') {
            return Err(ClientError::Url(url.into()));
        }
        Ok(Server { authority: authority.into(), api_key })
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.authority)
    }

    pub async fn connect(&self, close: Close, deadline: Instant) -> Result<Connection, ClientError> {
        let stream = timeout_at(deadline.into(), TcpStream::connect(&self.authority))
            .await
            .map_err(|_| ClientError::Deadline)?
            .map_err(ClientError::Connect)?;
        stream.set_nodelay(true).map_err(ClientError::Connect)?;
        if close == Close::Reset {
            stream.set_zero_linger().map_err(ClientError::Connect)?;
        }
        let (sender, driver) = http1::handshake(TokioIo::new(stream)).await?;
        let driver = tokio::spawn(async move {
            // The driver's error reaches the caller through the request that it broke.
            let _ = driver.await;
        });
        Ok(Connection { sender, driver, server: self.clone() })
    }

    /// One GET on a connection of its own.
    pub async fn get(&self, path: &str, deadline: Instant) -> Result<Answer, ClientError> {
        self.connect(Close::Orderly, deadline).await?.get(path, deadline).await
    }

    /// One POST on a connection of its own.
    pub async fn post(&self, path: &str, body: &Value, deadline: Instant) -> Result<Answer, ClientError> {
        self.connect(Close::Orderly, deadline).await?.post(path, body, deadline).await
    }
}

/// One connection; kept alive over several requests.
pub struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    driver: JoinHandle<()>,
    server: Server,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Connection {
    pub async fn get(&mut self, path: &str, deadline: Instant) -> Result<Answer, ClientError> {
        self.whole(self.request(Method::GET, path, &[], Bytes::new()), deadline).await
    }

    pub async fn post(&mut self, path: &str, body: &Value, deadline: Instant) -> Result<Answer, ClientError> {
        self.post_bytes(path, body.to_string().into(), &[], deadline).await
    }

    /// A POST of bytes that need not be JSON, with headers of its own.
    pub async fn post_bytes(
        &mut self,
        path: &str,
        body: Bytes,
        headers: &[(&str, &str)],
        deadline: Instant,
    ) -> Result<Answer, ClientError> {
        self.whole(self.request(Method::POST, path, headers, body), deadline).await
    }

    /// Sends a streamed request; returns once the status line is here.
    pub async fn stream(
        &mut self,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
        deadline: Instant,
    ) -> Result<Stream, ClientError> {
        let request = self.request(Method::POST, path, headers, body.to_string().into());
        let sent = Instant::now();
        let response = self.send(request, deadline).await?;
        let (parts, body) = response.into_parts();
        Ok(Stream { status: parts.status, headers: parts.headers, sent, body, buffer: Vec::new(), at: sent })
    }

    fn request(&self, method: Method, path: &str, headers: &[(&str, &str)], body: Bytes) -> Request<Full<Bytes>> {
        let mut builder = Request::builder()
            .method(method)
            .uri(path)
            .header("host", &self.server.authority)
            .header("content-type", "application/json");
        if let Some(key) = &self.server.api_key {
            builder = builder.header("authorization", format!("Bearer {key}"));
        }
        for (name, value) in headers {
            builder = builder.header(*name, *value);
        }
        builder.body(Full::new(body)).expect("paths and header values of probes are valid")
    }

    async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
        deadline: Instant,
    ) -> Result<hyper::Response<hyper::body::Incoming>, ClientError> {
        timeout_at(deadline.into(), async {
            self.sender.ready().await?;
            self.sender.send_request(request).await
        })
        .await
        .map_err(|_| ClientError::Deadline)?
        .map_err(ClientError::Http)
    }

    async fn whole(&mut self, request: Request<Full<Bytes>>, deadline: Instant) -> Result<Answer, ClientError> {
        let response = self.send(request, deadline).await?;
        let (parts, body) = response.into_parts();
        let body = timeout_at(deadline.into(), body.collect()).await.map_err(|_| ClientError::Deadline)??;
        Ok(Answer { status: parts.status, headers: parts.headers, body: body.to_bytes() })
    }
}

/// A response read event by event.
pub struct Stream {
    pub status: StatusCode,
    pub headers: HeaderMap,
    /// When the request was handed to the socket.
    pub sent: Instant,
    body: hyper::body::Incoming,
    buffer: Vec<u8>,
    /// When the newest bytes arrived.
    at: Instant,
}

/// One `data:` line.
#[derive(Clone, Debug, PartialEq)]
pub struct SseEvent {
    pub at: Instant,
    pub data: String,
}

impl Stream {
    /// The next event; None at the end of the body. Comment lines are passed over.
    pub async fn next(&mut self, deadline: Instant) -> Result<Option<SseEvent>, ClientError> {
        loop {
            if let Some(event) = self.take_event()? {
                return Ok(Some(event));
            }
            let frame = timeout_at(deadline.into(), self.body.frame()).await.map_err(|_| ClientError::Deadline)?;
            match frame {
                None if self.buffer.is_empty() => return Ok(None),
                None => return Err(ClientError::Stream("it ended inside an event".into())),
                Some(frame) => {
                    self.at = Instant::now();
                    if let Ok(bytes) = frame?.into_data() {
                        self.buffer.extend_from_slice(&bytes);
                    }
                }
            }
        }
    }

    /// What is left of the body as bytes: the body of an error answer.
    pub async fn rest(mut self, deadline: Instant) -> Result<Answer, ClientError> {
        let body = timeout_at(deadline.into(), self.body.collect()).await.map_err(|_| ClientError::Deadline)??;
        self.buffer.extend_from_slice(&body.to_bytes());
        Ok(Answer { status: self.status, headers: self.headers, body: self.buffer.into() })
    }

    fn take_event(&mut self) -> Result<Option<SseEvent>, ClientError> {
        loop {
            let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") else { return Ok(None) };
            let block: Vec<u8> = self.buffer.drain(..end + 2).collect();
            let text = String::from_utf8(block).map_err(|e| ClientError::Stream(e.to_string()))?;
            match parse_block(&text)? {
                Some(data) => return Ok(Some(SseEvent { at: self.at, data })),
                None => continue,
            }
        }
    }
}

/// The data of one event block, or None for a block of comments.
fn parse_block(block: &str) -> Result<Option<String>, ClientError> {
    let mut data = None;
    for line in block.split('\n').filter(|line| !line.is_empty()) {
        match line.strip_prefix("data: ") {
            Some(value) if data.is_none() => data = Some(value.to_string()),
            None if line.starts_with(':') => {}
            _ => return Err(ClientError::Stream(format!("unexpected line {line:?}"))),
        }
    }
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked() {
        assert_eq!(Server::new("http://127.0.0.1:8000/", None).unwrap().url(), "http://127.0.0.1:8000");
        for bad in ["127.0.0.1:8000", "https://a:1", "http://a", "http://a:1/v1"] {
            assert!(Server::new(bad, None).is_err(), "{bad}");
        }
    }

    #[test]
    fn event_blocks_hold_one_data_line_or_comments() {
        assert_eq!(parse_block("data: {\"a\":1}\n\n").unwrap().as_deref(), Some("{\"a\":1}"));
        assert_eq!(parse_block(": keep-alive\n\n").unwrap(), None);
        assert!(parse_block("event: x\n\n").is_err());
        assert!(parse_block("data: a\ndata: b\n\n").is_err());
    }
}
