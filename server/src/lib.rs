//! HTTP in, text out: the server of slotgraph, and its command line.
//!
//! A request goes one way: bytes → `api` → `request` → `prompt` → the engine → `answer` → `respond` → bytes. Knows text and HTTP, and
//! nothing of slots, pages or devices.
#![forbid(unsafe_code)]

pub mod api;
pub mod detokenize;
pub mod error;
pub mod json;
pub mod messages;
pub mod request;
pub mod stop;
pub mod template;
pub mod tokenizer;
