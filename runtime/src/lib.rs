//! Who rides next: configuration, weights, slots, pages, the scheduler, the engine loop, ranks.
//!
//! Knows tokens and never text or HTTP.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod config;
pub mod request;
pub mod sink;
pub mod startup;
