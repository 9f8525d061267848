//! One step, and how it runs: plans, their verification, the model families, and the devices that run them.
//!
//! Knows ops (`kernels`) and nothing of requests, files or HTTP. All unsafe code of the project is in `cuda/`.
#![deny(unsafe_code)]

pub mod bucket;
pub mod cpu;
pub mod cuda;
pub mod device;
pub mod exchange;
pub mod fault;
pub mod meeting;
pub mod model;
pub mod null;
pub mod plan;
#[cfg(test)]
mod samples;
pub mod source;
pub mod spec;
pub mod step;
