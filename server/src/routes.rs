//! Requests to responses: authority, method, body, and what each route does.
//!
//! Called by a connection for each of its requests. **Invariant:** every answer carries `x-request-id`; every refusal is the JSON envelope;
//! a refused request took no slot, no page and no place in the queue.

use crate::answer::{self, Answer, Part};
use crate::app::{App, Service, Unready, unix_seconds};
use crate::body::Reply;
use crate::debug;
use crate::error::{ApiError, INVALID};
use crate::live::Cancelled;
use crate::metrics::Outcome;
use crate::prompt::Reader;
use crate::request::{Endpoint, ValidRequest};
use crate::respond::{Head, Whole};
use crate::router::{Route, method_name};
use crate::sse::Events;
use crate::texts;
use crate::wire::Wire;
use http_body_util::BodyExt;
use hyper::body::{Body, Incoming};
use hyper::header::{self, HeaderName, HeaderValue};
use hyper::{Request, Response, StatusCode};
use serde_json::json;
use slotgraph_runtime::engine::SubmitError;
use slotgraph_runtime::request::RequestId;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Bodies above this are parsed and tokenized on a thread of their own.
const INLINE_BYTES: usize = 4 << 10;
/// An unread body up to this size is read and dropped, so that the connection stays usable.
const DRAINED_BYTES: u64 = 1 << 20;

/// Answers one request.
pub async fn answer(app: Arc<App>, wire: Arc<Wire>, request: Request<Incoming>) -> Response<Reply> {
    let began = Instant::now();
    wire.begin();
    let id = request_id(&request);
    let route = Route::of(request.uri().path());
    let method = method_name(request.method());
    let counts = route.counts(request.uri().path());
    app.exchanges.fetch_add(1, Relaxed);
    let _exchange = Exchange(app.clone());
    let mut response = match respond(&app, &wire, &route, request, &id).await {
        Ok(response) => response,
        Err(error) => {
            if counts {
                app.metrics.count(Outcome::of(&error));
            }
            if error.close && error.status != StatusCode::BAD_REQUEST {
                wire.linger();
            }
            refusal(&error)
        }
    };
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    app.metrics.answered(route.name(), method, response.status().as_u16(), began.elapsed());
    response
}

/// Counts a request until its head is written.
struct Exchange(Arc<App>);

impl Drop for Exchange {
    fn drop(&mut self) {
        self.0.exchanges.fetch_sub(1, Relaxed);
    }
}

async fn respond(
    app: &Arc<App>,
    wire: &Arc<Wire>,
    route: &Route,
    request: Request<Incoming>,
    id: &RequestId,
) -> Result<Response<Reply>, ApiError> {
    let path = request.uri().path();
    let authorization = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let early = if route.is_guarded(path) && !app.keys.admit(authorization) {
        let mut error = ApiError::new(StatusCode::UNAUTHORIZED, INVALID, "a valid API key is needed");
        error.code = Some("invalid_api_key");
        Err(error)
    } else if *route == Route::Unknown {
        Err(ApiError::new(StatusCode::NOT_FOUND, INVALID, "there is no such route"))
    } else if !route.takes(request.method()) {
        let mut error = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, INVALID, "this route does not take that method");
        error.allow = route.allows();
        Err(error)
    } else if matches!(route, Route::Completions | Route::Chat) {
        app.ready().map(|_| ()).map_err(|unready| refuse_unready(app, unready))
    } else {
        Ok(())
    };
    let body = request.into_body();
    if let Err(error) = early {
        return Err(drained(body, error).await);
    }
    match route {
        Route::Completions => generate(app, wire, Endpoint::Completion, body, id).await,
        Route::Chat => generate(app, wire, Endpoint::Chat, body, id).await,
        Route::Render => with_body(app, body, texts::render).await,
        Route::Tokenize => with_body(app, body, texts::tokenize).await,
        Route::Detokenize => with_body(app, body, texts::detokenize).await,
        Route::Models => Ok(json_reply(StatusCode::OK, models(app))),
        Route::Model(name) => model(app, name),
        Route::Cancel(target) => {
            let answer = cancel(app, target);
            let _ = drained(body, ApiError::body("")).await;
            answer
        }
        Route::Health | Route::Ready => Ok(health(app.ready().err())),
        Route::Live => Ok(health(app.alive().err())),
        Route::Metrics => Ok(metrics(app)),
        Route::Version => Ok(json_reply(StatusCode::OK, version(app))),
        Route::Slots => debug::slots(app).await,
        Route::Graphs => debug::graphs(app),
        Route::Traces => Ok(debug::traces(app)),
        Route::Unknown => unreachable!("refused above"),
    }
}

/// `/v1/completions` and `/v1/chat/completions`.
async fn generate(
    app: &Arc<App>,
    wire: &Arc<Wire>,
    endpoint: Endpoint,
    body: Incoming,
    id: &RequestId,
) -> Result<Response<Reply>, ApiError> {
    let prompted =
        with_service(app, body, move |service, bytes| texts::prompted(service.reader(), endpoint, bytes)).await?;
    let service = app.ready().map_err(|unready| refuse_unready(app, unready))?;
    let head = head(&prompted.request, service, id);
    let streams = prompted.request.streaming.is_some();
    let (most, n) = (prompted.prompts.iter().map(|prompt| prompt.max_tokens).max().unwrap_or(0), prompted.request.n);
    let tokenizer = service.tokenizer.clone();
    let (group, answer) = answer::open(prompted, tokenizer, wire.clone(), id.clone(), app.config.request_timeout);
    service.engine.submit(group).map_err(|error| not_taken(app, error))?;
    app.metrics.admit(most, n);
    let live = app.registry.begin(id.clone(), answer.aborts(), app.metrics.clone(), wire.clone());
    if streams {
        return Ok(stream(Events::new(head, answer, live)));
    }
    let mut answer = answer;
    match collect(&mut answer).await {
        Ok(wholes) => {
            live.finished(answer.finished().expect("collect returns once every choice has ended"));
            let text = head.whole(&wholes, answer.usage(), |index| answer.prompt_ids(index));
            Ok(json_reply(StatusCode::OK, text))
        }
        Err(error) => {
            // Counted by `answer`, like every refusal.
            live.counted_elsewhere();
            Err(error)
        }
    }
}

impl Service {
    fn reader(&self) -> Reader<'_> {
        Reader { tokenizer: &self.tokenizer, template: self.template.as_ref(), limits: &self.limits }
    }
}

fn head(request: &ValidRequest, service: &Service, id: &RequestId) -> Head {
    let prefix = match request.endpoint {
        Endpoint::Completion => "cmpl",
        Endpoint::Chat => "chatcmpl",
    };
    Head {
        endpoint: request.endpoint,
        id: format!("{prefix}-{id}"),
        created: unix_seconds(),
        model: request.model.clone(),
        fingerprint: service.fingerprint.clone(),
        tokenizer: service.tokenizer.clone(),
        logprobs: request.sampling.logprobs,
        token_ids: request.return_token_ids,
        tokens_as_ids: request.tokens_as_ids,
        include_usage: request.streaming.is_some_and(|streaming| streaming.include_usage),
    }
}

/// Waits for every choice to end.
async fn collect(answer: &mut Answer) -> Result<Vec<Whole>, ApiError> {
    let mut wholes: Vec<Whole> = (0..answer.choices()).map(|_| Whole::default()).collect();
    let mut parts: Vec<Part> = Vec::new();
    let mut open = true;
    while open {
        open = poll_fn(|cx| answer.poll_parts(cx, &mut parts)).await?;
        for part in parts.drain(..) {
            wholes[part.index as usize].add(part);
        }
    }
    Ok(wholes)
}

fn refuse_unready(app: &App, unready: Unready) -> ApiError {
    app.metrics.refuse(unready.name());
    unready.error()
}

fn not_taken(app: &App, error: SubmitError) -> ApiError {
    match error {
        SubmitError::Full { .. } => {
            app.metrics.refuse("queue_full");
            ApiError::busy(error.to_string())
        }
        SubmitError::TooLarge { .. } => ApiError::field("n", None, error.to_string()),
        SubmitError::NotAccepting(reason) => refuse_unready(app, reason.into()),
    }
}

/// Reads a body and works on it with the loaded model, off the connection's thread when that may take long.
async fn with_service<T: Send + 'static>(
    app: &Arc<App>,
    body: Incoming,
    work: impl FnOnce(&Service, &[u8]) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (bytes, permit) = app.intake.read(body).await?;
    let service = app.loaded().map_err(Unready::error)?;
    if bytes.len() <= INLINE_BYTES {
        return work(service, &bytes);
    }
    let app = app.clone();
    let outcome = tokio::task::spawn_blocking(move || {
        let _permit = permit;
        work(app.loaded().map_err(Unready::error)?, &bytes)
    });
    outcome.await.unwrap_or_else(|_| Err(ApiError::engine("the request could not be read")))
}

async fn with_body(
    app: &Arc<App>,
    body: Incoming,
    work: impl FnOnce(Reader<'_>, &[u8]) -> Result<String, ApiError> + Send + 'static,
) -> Result<Response<Reply>, ApiError> {
    let text = with_service(app, body, move |service, bytes| work(service.reader(), bytes)).await?;
    Ok(json_reply(StatusCode::OK, text))
}

fn model_card(app: &App, name: &str) -> serde_json::Value {
    json!({
        "id": name,
        "object": "model",
        "created": app.started,
        "owned_by": "slotgraph",
        "root": app.config.served_names[0],
        "parent": null,
        "max_model_len": app.config.max_model_len,
    })
}

fn models(app: &App) -> String {
    let cards: Vec<_> = app.config.served_names.iter().map(|name| model_card(app, name)).collect();
    json!({"object": "list", "data": cards}).to_string()
}

fn model(app: &App, name: &str) -> Result<Response<Reply>, ApiError> {
    match app.config.served_names.iter().any(|served| served == name) {
        true => Ok(json_reply(StatusCode::OK, model_card(app, name).to_string())),
        false => Err(ApiError::model_not_found(name)),
    }
}

/// Ends a request by its id or its x-request-id.
fn cancel(app: &App, id: &str) -> Result<Response<Reply>, ApiError> {
    let bare = id.strip_prefix("chatcmpl-").or_else(|| id.strip_prefix("cmpl-")).unwrap_or(id);
    let found = match app.registry.cancel(id) {
        Cancelled::Unknown => app.registry.cancel(bare),
        found => found,
    };
    match found {
        Cancelled::Now => {
            Ok(json_reply(StatusCode::ACCEPTED, json!({"id": bare, "object": "request.cancel"}).to_string()))
        }
        Cancelled::AlreadyEnded => Err(ApiError::new(StatusCode::CONFLICT, INVALID, "the request has already ended")),
        Cancelled::Unknown => Err(ApiError::new(StatusCode::NOT_FOUND, INVALID, "there is no such request")),
    }
}

fn health(unready: Option<Unready>) -> Response<Reply> {
    match unready {
        None => json_reply(StatusCode::OK, json!({"status": "ok"}).to_string()),
        Some(unready) => {
            let mut response =
                json_reply(StatusCode::SERVICE_UNAVAILABLE, json!({"status": unready.name()}).to_string());
            if unready != Unready::Dead {
                response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            response
        }
    }
}

fn metrics(app: &App) -> Response<Reply> {
    let load = app.service.get().map(|service| &**service.engine.load());
    let mut response = Response::new(Reply::from(app.metrics.render(load)));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(prometheus::TEXT_FORMAT));
    response
}

fn version(app: &App) -> String {
    let service = app.service.get();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "engine": "slotgraph",
        "model": app.config.served_names[0],
        "model_sha256": service.map(|service| &service.model_sha256),
        "contract_hash": service.map(|service| &service.contract_hash),
        "system_fingerprint": service.map(|service| &service.fingerprint),
    })
    .to_string()
}

pub fn json_reply(status: StatusCode, text: String) -> Response<Reply> {
    let mut response = Response::new(Reply::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn stream(events: Events) -> Response<Reply> {
    let mut response = Response::new(Reply::Events(Box::new(events)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response
}

fn refusal(error: &ApiError) -> Response<Reply> {
    let mut response = json_reply(error.status, error.envelope());
    let headers = response.headers_mut();
    if let Some(seconds) = error.retry_after {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if let Some(allow) = error.allow {
        headers.insert(header::ALLOW, HeaderValue::from_static(allow));
    }
    if error.status == StatusCode::UNAUTHORIZED {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    if error.close {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Reads what the client still sends of a body that is not wanted; the error closes the connection if that is too much.
async fn drained(mut body: Incoming, error: ApiError) -> ApiError {
    if body.is_end_stream() {
        return error;
    }
    if body.size_hint().exact().is_none_or(|bytes| bytes > DRAINED_BYTES) {
        return error.closing();
    }
    let read = async {
        while let Some(frame) = body.frame().await {
            if frame.is_err() {
                return false;
            }
        }
        true
    };
    match tokio::time::timeout(Duration::from_secs(5), read).await {
        Ok(true) => error,
        _ => error.closing(),
    }
}

/// The client's x-request-id where it is one, else a new one.
fn request_id(request: &Request<Incoming>) -> RequestId {
    let given = request.headers().get(REQUEST_ID).and_then(|value| value.to_str().ok());
    let valid = |id: &&str| {
        (1..=128).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:".contains(&b))
    };
    match given.filter(valid) {
        Some(id) => id.into(),
        None => format!("{:016x}{:016x}", answer::random(), answer::random()).into(),
    }
}
