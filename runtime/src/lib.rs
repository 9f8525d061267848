//! Who rides next: configuration, weights, slots, pages, the scheduler, the engine loop, ranks.
//!
//! Knows tokens and never text or HTTP.
#![forbid(unsafe_code)]

pub mod request;
pub mod sink;
