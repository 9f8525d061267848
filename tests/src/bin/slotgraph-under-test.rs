//! The server's command line as a binary of this crate, so that cargo builds it, fresh, for the tests that start it.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    slotgraph_server::cli::run()
}
