//! The port: bound before anything is loaded, read until the process ends.
//!
//! **Invariant:** the accept loop survives every error; open connections are bounded; every connection ends within its timeouts.

use crate::app::App;
use crate::routes;
use crate::socket::Socket;
use crate::wire::Wire;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use socket2::{SockRef, TcpKeepalive};
use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 4096;
/// Bytes that hyper may hold of a request's head, or of a response that its client does not read.
pub const BUFFER: usize = 64 << 10;
/// Bytes that the system may hold for a client that does not read (it doubles this).
const SEND_BUFFER: usize = 64 << 10;
const REFUSAL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
    connection: close\r\ncontent-length: 107\r\n\r\n\
    {\"error\":{\"message\":\"too many connections are open\",\"type\":\"server_error\",\"param\":null,\"code\":null}}       ";

/// Why the port cannot be used: one line with the flag.
pub fn bind(host: &str, port: u16) -> Result<TcpListener, String> {
    let bare = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(host);
    let addresses: Vec<SocketAddr> =
        (bare, port).to_socket_addrs().map_err(|error| format!("--host {host}: {error}"))?.collect();
    let mut failure = format!("--host {host}: no such address");
    for address in addresses {
        match bind_one(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => {
                failure = match error.kind() {
                    io::ErrorKind::AddrInUse => {
                        format!("--port {port}: {address} is already in use; choose another port, or 0 for any")
                    }
                    io::ErrorKind::PermissionDenied => {
                        format!("--port {port}: no permission to listen on {address}; choose a port above 1023")
                    }
                    _ => format!("--host {host}: cannot listen on {address}: {error}"),
                }
            }
        }
    }
    Err(failure)
}

fn bind_one(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// The URL of a bound address; IPv6 in brackets.
pub fn url(address: SocketAddr) -> String {
    format!("http://{address}")
}

/// How connections behave.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    pub headers: Duration,
    pub write: Duration,
}

/// Reads the port until `stop`; connections are asked to close after their request when `close` fires.
pub async fn accept(
    listener: TcpListener,
    app: Arc<App>,
    patience: Patience,
    connections_max: usize,
    stop: CancellationToken,
    close: CancellationToken,
    tracker: TaskTracker,
) {
    let seats = Arc::new(Semaphore::new(connections_max));
    let mut complained: Option<Instant> = None;
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((tcp, _)) => match seats.clone().try_acquire_owned() {
                Ok(seat) => {
                    let (app, close) = (app.clone(), close.clone());
                    tracker.spawn(async move {
                        app.metrics.connected();
                        serve(tcp, app.clone(), patience, close).await;
                        app.metrics.disconnected();
                        drop(seat);
                    });
                }
                Err(_) => {
                    app.metrics.refused_connections.inc();
                    tokio::spawn(refuse(tcp));
                }
            },
            Err(error) => {
                if complained.is_none_or(|at| at.elapsed() > Duration::from_secs(10)) {
                    tracing::warn!(%error, "connections cannot be accepted; said at most every 10 s");
                    complained = Some(Instant::now());
                }
                // Out of file descriptors: waiting for one costs less than asking again at once.
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve(tcp: TcpStream, app: Arc<App>, patience: Patience, close: CancellationToken) {
    if let Err(error) = prepare(&tcp) {
        tracing::debug!(%error, "a connection's options cannot be set");
        return;
    }
    let wire = Arc::new(Wire::default());
    let socket = TokioIo::new(Socket::new(tcp, wire.clone(), patience.write));
    let service = service_fn(move |request| {
        let (app, wire) = (app.clone(), wire.clone());
        async move { Ok::<_, Infallible>(routes::answer(app, wire, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(patience.headers)
        .keep_alive(true)
        .half_close(false)
        .max_buf_size(BUFFER)
        .serve_connection(socket, service);
    let mut connection = pin!(connection);
    let outcome = tokio::select! {
        outcome = connection.as_mut() => outcome,
        () = close.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "a connection ended early");
    }
}

fn prepare(tcp: &TcpStream) -> io::Result<()> {
    tcp.set_nodelay(true)?;
    let socket = SockRef::from(tcp);
    socket.set_send_buffer_size(SEND_BUFFER)?;
    // A client that vanished without a word is noticed within a minute or so.
    socket.set_tcp_keepalive(
        &TcpKeepalive::new().with_time(Duration::from_secs(30)).with_interval(Duration::from_secs(10)),
    )
}

async fn refuse(mut tcp: TcpStream) {
    let _ = tokio::time::timeout(Duration::from_secs(1), async {
        tcp.write_all(REFUSAL).await?;
        tcp.shutdown().await
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_refusal_is_well_formed() {
        let text = std::str::from_utf8(REFUSAL).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())), "{}", body.len());
        let value: serde_json::Value = serde_json::from_str(body).unwrap();
        assert_eq!(value["error"].as_object().unwrap().len(), 4);
    }

    #[tokio::test]
    async fn ports_in_use_are_named() {
        let first = bind("127.0.0.1", 0).unwrap();
        let port = first.local_addr().unwrap().port();
        let error = bind("127.0.0.1", port).unwrap_err();
        assert!(error.contains("already in use") && error.contains(&format!("127.0.0.1:{port}")), "{error}");
        assert!(bind("203.0.113.1", 0).unwrap_err().contains("--host 203.0.113.1"));
        let six = bind("[::1]", 0).unwrap();
        assert!(url(six.local_addr().unwrap()).starts_with("http://[::1]:"));
    }
}
