//! A client's socket, watched: writes that make no progress are cut, the first token's departure is noticed, and a refused upload is drained
//! for a moment so that its client sees the answer.
//!
//! Wraps the TCP stream under hyper. **Invariant:** a connection never waits longer than the write timeout for its client to read a byte.

use crate::wire::Wire;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Sleep;

/// How long, and how much, a closing connection reads from a client that is still sending.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 64 << 20;

pub struct Socket {
    tcp: TcpStream,
    wire: Arc<Wire>,
    write_timeout: Duration,
    /// Runs while a write waits.
    stalled: Option<Pin<Box<Sleep>>>,
    closing: Option<Closing>,
}

struct Closing {
    until: Pin<Box<Sleep>>,
    left: usize,
}

impl Socket {
    pub fn new(tcp: TcpStream, wire: Arc<Wire>, write_timeout: Duration) -> Self {
        Socket { tcp, wire, write_timeout, stalled: None, closing: None }
    }

    /// A write's outcome, with the clock of a waiting one.
    fn watch<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if outcome.is_ready() {
            self.stalled = None;
            return outcome;
        }
        let timeout = self.write_timeout;
        let timer = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
        ready!(timer.as_mut().poll(cx));
        self.wire.stalled();
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tcp).poll_read(cx, buf)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.tcp).poll_write(cx, bytes);
        self.watch(cx, outcome)
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let outcome = Pin::new(&mut self.tcp).poll_write_vectored(cx, bytes);
        self.watch(cx, outcome)
    }
    fn is_write_vectored(&self) -> bool {
        true
    }
    /// Called by hyper once its buffer is empty.
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.wire.flushed();
        Pin::new(&mut self.tcp).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.tcp).poll_shutdown(cx))?;
        if !self.wire.lingers() {
            return Poll::Ready(Ok(()));
        }
        let Socket { tcp, closing, .. } = &mut *self;
        let closing =
            closing.get_or_insert_with(|| Closing { until: Box::pin(tokio::time::sleep(LINGER)), left: LINGER_BYTES });
        let mut scratch = [0; 16 << 10];
        loop {
            if closing.left == 0 || closing.until.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            let mut buf = ReadBuf::new(&mut scratch);
            match ready!(Pin::new(&mut *tcp).poll_read(cx, &mut buf)) {
                Ok(()) if !buf.filled().is_empty() => {
                    closing.left = closing.left.saturating_sub(buf.filled().len());
                }
                _ => return Poll::Ready(Ok(())),
            }
        }
    }
}
