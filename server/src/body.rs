//! Bodies: reading a request's within its limits, and what a response's may be.
//!
//! **Invariant:** a body over the limit is refused before it is held: by its Content-Length before a byte of it is read, else when it crosses
//! the limit; all bodies that are being read together stay within one budget.

use crate::error::{ApiError, INVALID};
use crate::sse::Events;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::StatusCode;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bodies up to this size need no share of the budget: the number of connections bounds them.
const SMALL: usize = 64 << 10;
/// Unit of the budget.
const UNIT: usize = 64 << 10;
/// Bodies of the largest size that may be read at once.
const LARGEST_AT_ONCE: usize = 4;

/// Limits of request bodies.
#[derive(Clone)]
pub struct Intake {
    limit: usize,
    timeout: Duration,
    budget: Arc<Semaphore>,
}

impl Intake {
    pub fn new(limit: usize, timeout: Duration) -> Self {
        let units = (LARGEST_AT_ONCE * limit).div_ceil(UNIT).max(1);
        Intake { limit, timeout, budget: Arc::new(Semaphore::new(units.min(Semaphore::MAX_PERMITS))) }
    }

    /// The whole body. The permit keeps its share of the budget for as long as the bytes are in use.
    pub async fn read(&self, body: Incoming) -> Result<(Bytes, Option<OwnedSemaphorePermit>), ApiError> {
        match tokio::time::timeout(self.timeout, self.collect(body)).await {
            Ok(outcome) => outcome,
            Err(_) => {
                let message = format!("the body did not arrive within {} s", self.timeout.as_secs());
                Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, INVALID, message).closing())
            }
        }
    }

    async fn collect(&self, mut body: Incoming) -> Result<(Bytes, Option<OwnedSemaphorePermit>), ApiError> {
        let declared = body.size_hint().exact();
        if declared.is_some_and(|bytes| bytes > self.limit as u64) {
            return Err(self.too_large());
        }
        let mut permit = None;
        let mut held = Vec::new();
        if let Some(bytes) = declared {
            permit = self.share(bytes as usize).await;
            held.reserve_exact(bytes as usize);
        }
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| ApiError::body("the body was cut off").closing())?;
            let Ok(data) = frame.into_data() else { continue };
            if held.len() + data.len() > self.limit {
                return Err(self.too_large());
            }
            if permit.is_none() && held.len() + data.len() > SMALL {
                permit = self.share(self.limit).await;
            }
            held.extend_from_slice(&data);
        }
        Ok((held.into(), permit))
    }

    async fn share(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        if bytes <= SMALL {
            return None;
        }
        let units = u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX);
        Some(self.budget.clone().acquire_many_owned(units).await.expect("the budget is never closed"))
    }

    fn too_large(&self) -> ApiError {
        let message = format!("the body is larger than the limit of {} bytes", self.limit);
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, INVALID, message).closing()
    }
}

/// A response's body.
pub enum Reply {
    Whole(Option<Bytes>),
    Events(Box<Events>),
}

impl From<String> for Reply {
    fn from(text: String) -> Self {
        Reply::Whole(Some(text.into()))
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match &mut *self {
            Reply::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Reply::Events(events) => events.poll_bytes(cx).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes)))),
        }
    }
    fn is_end_stream(&self) -> bool {
        match self {
            Reply::Whole(bytes) => bytes.is_none(),
            Reply::Events(events) => events.is_over(),
        }
    }
    fn size_hint(&self) -> SizeHint {
        match self {
            Reply::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Reply::Events(_) => SizeHint::default(),
        }
    }
}
