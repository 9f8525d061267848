//! slotgraph-probe: asks one question about this build on this machine and answers it with evidence.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    slotgraph_probes::cli::main()
}
