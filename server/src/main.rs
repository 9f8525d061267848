//! The `slotgraph` binary.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    slotgraph_server::cli::run()
}
