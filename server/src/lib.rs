//! HTTP in, text out: the server of slotgraph, and its command line.
//!
//! A request goes one way: bytes → `api` → `request` → `prompt` → the engine → `answer` → `respond` → bytes. Knows text and HTTP, and
//! nothing of slots, pages or devices.
#![forbid(unsafe_code)]

pub mod answer;
pub mod api;
pub mod app;
pub mod auth;
pub mod body;
pub mod cli;
pub mod debug;
pub mod demo;
pub mod detokenize;
pub mod error;
pub mod generate;
pub mod input;
pub mod json;
pub mod listen;
pub mod live;
pub mod load;
pub mod logging;
pub mod messages;
pub mod metrics;
pub mod prompt;
pub mod request;
pub mod respond;
pub mod router;
pub mod routes;
pub mod sampling;
pub mod serve;
pub mod socket;
pub mod sse;
pub mod stop;
pub mod template;
pub mod texts;
pub mod tokenizer;
pub mod traces;
pub mod wire;
