//! Probes: each asks one question, computes its checks from data, plants a fault that it must catch, and writes evidence.
//!
//! Uses every other crate and is used by none. **Invariant:** a verdict is computed (`evidence`), never written.
#![forbid(unsafe_code)]

pub mod attribution;
pub mod bench_decode;
pub mod bench_http;
pub mod check_ops;
pub mod claim;
pub mod cli;
pub mod client;
pub mod combine;
pub mod cuda;
pub mod doctor;
pub mod driver;
pub mod evidence;
pub mod exactness;
pub mod graph_dump;
pub mod harness;
pub mod load;
pub mod machine;
pub mod make_checkpoint;
pub mod manifest;
pub mod matrix;
#[cfg(test)]
mod mock;
pub mod plan;
pub mod readiness;
pub mod regression;
pub mod reliability;
pub mod replay;
pub mod scrape;
pub mod script;
pub mod slo;
pub mod soak;
pub mod stats;
pub mod subject;
