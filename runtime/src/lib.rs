//! Who rides next: configuration, weights, slots, pages, the scheduler, the engine loop, ranks.
//!
//! Knows tokens and never text or HTTP.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod clock;
pub mod config;
pub mod devices;
pub mod engine;
pub mod faults;
pub mod load;
pub mod pages;
pub mod policy;
pub mod ranks;
pub mod request;
pub mod scheduler;
pub mod sink;
pub mod slots;
pub mod startup;
#[cfg(test)]
mod testing;
pub mod trace;
pub mod watchdog;
pub mod weights;
