//! The simulator: the real scheduler, slots, pages and engine loop over the null device and a clock that stands still.
//!
//! A failure prints `SEED=…`; with that variable set, only that seed runs. `cargo test --release -p slotgraph-tests --test sim`.
#![forbid(unsafe_code)]

#[path = "sim/chaos.rs"]
mod chaos;
#[path = "sim/client.rs"]
mod client;
#[path = "sim/exhaustive.rs"]
mod exhaustive;
#[path = "sim/lifecycle.rs"]
mod lifecycle;
#[path = "sim/model.rs"]
mod model;
#[path = "sim/mutants.rs"]
mod mutants;
#[path = "sim/script.rs"]
mod script;
#[path = "sim/spy.rs"]
mod spy;
#[path = "sim/wires.rs"]
mod wires;
#[path = "sim/world.rs"]
mod world;
