//! A plain HTTP/1.1 client for tests: bytes out as given, bytes in as they come, nothing repaired.

use serde_json::Value;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Longest wait for any byte.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection.
pub struct Conn {
    pub tcp: TcpStream,
    held: Vec<u8>,
}

/// A response's head.
#[derive(Clone, Debug)]
pub struct Head {
    pub status: u16,
    pub version: String,
    pub headers: Vec<(String, String)>,
}

/// A whole response.
#[derive(Clone, Debug)]
pub struct Reply {
    pub head: Head,
    pub body: Vec<u8>,
}

/// One event of a stream, and when it came.
#[derive(Clone, Debug)]
pub struct Event {
    pub data: String,
    pub at: Instant,
}

impl Head {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

impl Reply {
    pub fn status(&self) -> u16 {
        self.head.status
    }
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("bodies are UTF-8")
    }
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {:?}", self.text()))
    }
    /// The envelope, checked: status, JSON, exactly four keys of the right types.
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status(), status, "{}", self.text());
        assert_eq!(self.head.header("content-type"), Some("application/json"));
        let value = self.json();
        let error = value["error"].as_object().expect("an envelope").clone();
        let mut keys: Vec<&str> = error.keys().map(String::as_str).collect();
        keys.sort_unstable();
        assert_eq!(keys, ["code", "message", "param", "type"]);
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()));
        assert!(error["type"].is_string());
        for key in ["param", "code"] {
            assert!(error[key].is_string() || error[key].is_null(), "{key}: {}", error[key]);
        }
        Value::Object(error)
    }
    /// The envelope's `param` and `code`.
    pub fn refusal(&self, status: u16) -> (Option<String>, Option<String>) {
        let error = self.error(status);
        let text = |key: &str| error[key].as_str().map(str::to_owned);
        (text("param"), text("code"))
    }
}

/// The bytes of a request with a body.
pub fn post(path: &str, body: &str, headers: &[(&str, &str)]) -> Vec<u8> {
    let mut head = format!("POST {path} HTTP/1.1\r\nhost: test\r\n");
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("content-type")) {
        head += "content-type: application/json\r\n";
    }
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    head += &format!("content-length: {}\r\n\r\n", body.len());
    [head.as_bytes(), body.as_bytes()].concat()
}

/// The bytes of a request without a body.
pub fn bare(method: &str, path: &str, headers: &[(&str, &str)]) -> Vec<u8> {
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    format!("{method} {path} HTTP/1.1\r\nhost: test\r\n{headers}\r\n").into_bytes()
}

impl Conn {
    pub fn open(address: SocketAddr) -> Conn {
        let tcp = TcpStream::connect(address).expect("the server listens");
        Conn::over(tcp)
    }
    pub fn over(tcp: TcpStream) -> Conn {
        tcp.set_read_timeout(Some(PATIENCE)).expect("a socket takes a time-out");
        tcp.set_nodelay(true).expect("a socket takes an option");
        Conn { tcp, held: Vec::new() }
    }
    pub fn send(&mut self, bytes: &[u8]) {
        self.tcp.write_all(bytes).expect("the server reads");
    }
    /// Sends a request and reads its whole response.
    pub fn ask(&mut self, request: &[u8]) -> Reply {
        self.send(request);
        self.reply(request.starts_with(b"HEAD"))
    }
    pub fn reply(&mut self, headless: bool) -> Reply {
        self.try_reply(headless).expect("a response")
    }
    pub fn try_reply(&mut self, headless: bool) -> io::Result<Reply> {
        let head = self.head()?;
        let body = match (headless, head.header("content-length"), head.header("transfer-encoding")) {
            (true, ..) => Vec::new(),
            (_, Some(length), _) => self.exactly(length.parse().expect("a number"))?,
            (_, None, Some("chunked")) => self.chunks()?,
            _ => self.rest()?,
        };
        Ok(Reply { head, body })
    }
    /// Reads a response's head; interim ones are skipped.
    pub fn head(&mut self) -> io::Result<Head> {
        loop {
            let mut lines = Vec::new();
            loop {
                let line = self.line()?;
                if line.is_empty() {
                    break;
                }
                lines.push(line);
            }
            let mut words = lines[0].splitn(3, ' ');
            let version = words.next().unwrap_or_default().to_owned();
            let status: u16 = words.next().and_then(|word| word.parse().ok()).expect("a status line");
            let headers = lines[1..]
                .iter()
                .filter_map(|line| line.split_once(':'))
                .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
                .collect();
            if status != 100 {
                return Ok(Head { status, version, headers });
            }
        }
    }
    /// One line without its end.
    pub fn line(&mut self) -> io::Result<String> {
        loop {
            if let Some(end) = self.held.windows(2).position(|pair| pair == b"\r\n") {
                let line: Vec<u8> = self.held.drain(..end + 2).take(end).collect();
                return String::from_utf8(line).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error));
            }
            self.more()?;
        }
    }
    fn exactly(&mut self, length: usize) -> io::Result<Vec<u8>> {
        while self.held.len() < length {
            self.more()?;
        }
        Ok(self.held.drain(..length).collect())
    }
    /// The next chunk of a chunked body; None for the last one.
    pub fn chunk(&mut self) -> io::Result<Option<Vec<u8>>> {
        let size = usize::from_str_radix(&self.line()?, 16).expect("a chunk size");
        let data = self.exactly(size)?;
        assert_eq!(self.line()?, "", "a chunk ends with its line");
        Ok((size > 0).then_some(data))
    }
    fn chunks(&mut self) -> io::Result<Vec<u8>> {
        let mut body = Vec::new();
        while let Some(chunk) = self.chunk()? {
            body.extend(chunk);
        }
        Ok(body)
    }
    /// Everything until the server closes.
    pub fn rest(&mut self) -> io::Result<Vec<u8>> {
        let mut rest = std::mem::take(&mut self.held);
        self.tcp.read_to_end(&mut rest)?;
        Ok(rest)
    }
    fn more(&mut self) -> io::Result<()> {
        let mut bytes = [0; 16 << 10];
        match self.tcp.read(&mut bytes)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                self.held.extend_from_slice(&bytes[..count]);
                Ok(())
            }
        }
    }
    /// Whether the server has closed, within `patience`.
    pub fn closes_within(&mut self, patience: Duration) -> bool {
        self.tcp.set_read_timeout(Some(patience)).expect("a socket takes a time-out");
        let mut byte = [0; 1024];
        loop {
            match self.tcp.read(&mut byte) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return !matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut),
            }
        }
    }
}

/// A stream of events that is being read.
pub struct Stream {
    pub conn: Conn,
    pub head: Head,
    text: String,
    pub raw: Vec<u8>,
    over: bool,
}

impl Stream {
    /// Sends a request and reads the head of its stream.
    pub fn open(address: SocketAddr, request: &[u8]) -> Stream {
        let mut conn = Conn::open(address);
        conn.send(request);
        Stream::of(conn)
    }
    /// The stream that `conn` asked for.
    pub fn of(mut conn: Conn) -> Stream {
        let head = conn.head().expect("a head");
        assert_eq!(head.status, 200, "{head:?}");
        Stream { conn, head, text: String::new(), raw: Vec::new(), over: false }
    }
    /// The next event; None after the last one. Comments are skipped.
    pub fn next_event(&mut self) -> io::Result<Option<Event>> {
        loop {
            if let Some(end) = self.text.find("\n\n") {
                let event: String = self.text.drain(..end + 2).collect();
                if event.starts_with(':') {
                    continue;
                }
                let data = event.strip_prefix("data: ").expect("one data line").trim_end_matches('\n');
                assert!(!data.contains('\n'), "an event is one line: {data:?}");
                return Ok(Some(Event { data: data.to_owned(), at: Instant::now() }));
            }
            if self.over {
                assert_eq!(self.text, "", "a stream ends after an event");
                return Ok(None);
            }
            let bytes = match self.head.header("transfer-encoding") {
                Some("chunked") => self.conn.chunk()?,
                _ => Some(self.conn.rest()?).filter(|rest| !rest.is_empty()),
            };
            match bytes {
                Some(bytes) => {
                    self.raw.extend_from_slice(&bytes);
                    self.text.push_str(std::str::from_utf8(&bytes).expect("each event is UTF-8 by itself"));
                }
                None => self.over = true,
            }
        }
    }
    /// All events to the end.
    pub fn all(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.next_event().expect("the stream ends well")).collect()
    }
}

/// The chunks of a complete stream: JSON values, after checking that it ends with one `[DONE]`.
pub fn chunks(events: &[Event]) -> Vec<Value> {
    let (last, others) = events.split_last().expect("a stream has events");
    assert_eq!(last.data, "[DONE]");
    others.iter().map(|event| serde_json::from_str(&event.data).expect("events are JSON")).collect()
}

/// Joined text of choice `index` in a stream's chunks.
pub fn joined(chunks: &[Value], index: u64) -> String {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().expect("choices"));
    let text = |choice: &Value| {
        let text = choice["text"].as_str().or_else(|| choice["delta"]["content"].as_str());
        text.unwrap_or_default().to_owned()
    };
    choices.filter(|choice| choice["index"] == index).map(text).collect()
}

/// Finish reasons of choice `index` in a stream's chunks.
pub fn finishes(chunks: &[Value], index: u64) -> Vec<String> {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().expect("choices"));
    let reasons = choices.filter(|choice| choice["index"] == index).filter_map(|c| c["finish_reason"].as_str());
    reasons.map(str::to_owned).collect()
}
