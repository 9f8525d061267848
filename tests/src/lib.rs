//! slotgraph
#![forbid(unsafe_code)]
