//! `/debug/*`: the slot table, the graphs, the last traces. No prompt or output text.

use crate::app::{App, Unready};
use crate::body::Reply;
use crate::error::ApiError;
use crate::routes::json_reply;
use hyper::{Response, StatusCode};
use serde_json::json;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// How long the engine may take to show its table.
const PATIENCE: Duration = Duration::from_secs(2);

/// The slot table between two turns, with the pages and the queue.
pub async fn slots(app: &App) -> Result<Response<Reply>, ApiError> {
    let service = app.loaded().map_err(Unready::error)?;
    match tokio::time::timeout(PATIENCE, service.engine.inspect()).await {
        Ok(Some(snapshot)) => {
            let text = serde_json::to_string(&snapshot).expect("a snapshot holds numbers and strings");
            Ok(json_reply(StatusCode::OK, text))
        }
        Ok(None) => Err(Unready::Dead.error()),
        Err(_) => Err(Unready::Stalled.error()),
    }
}

/// The devices by rank, steps and replays by bucket, and the start-up record.
pub fn graphs(app: &App) -> Result<Response<Reply>, ApiError> {
    let service = app.loaded().map_err(Unready::error)?;
    let load = service.engine.load();
    let buckets: Vec<_> = load
        .buckets
        .iter()
        .map(|bucket| {
            json!({
                "bucket": bucket.bucket,
                "steps": bucket.steps.load(Relaxed),
                "replays": bucket.replays.load(Relaxed),
            })
        })
        .collect();
    let ranks: Vec<_> = service.engine.ranks().iter().map(|rank| &rank.record).collect();
    let startup: serde_json::Value = serde_json::from_str(&service.startup).unwrap_or_default();
    let text = json!({"ranks": ranks, "buckets": buckets, "startup": startup}).to_string();
    Ok(json_reply(StatusCode::OK, text))
}

/// The last thousand trace lines, oldest first.
pub fn traces(app: &App) -> Response<Reply> {
    json_reply(StatusCode::OK, format!("[{}]", app.traces.recent().join(",")))
}
