//! The hand cases that need no GPU, each by its number, against the real server on the CPU device.
//!
//! A case starts its own server and ends with what must hold after every case: the canary unchanged, health 200, everything idle within two
//! seconds, no panic and no ERROR line in the log.

mod hand {
    mod a;
    mod b;
    mod c;
    mod d;
    mod e;
    mod f;
    mod h;
    mod weights;
}

/// The server's binary.
const BINARY: &str = env!("CARGO_BIN_EXE_slotgraph-under-test");

/// A server on the demo model, CPU device, with these flags besides.
fn serve(arguments: &[&str]) -> slotgraph_tests::server::Server {
    slotgraph_tests::server::start(BINARY, &[&["--device", "cpu"], arguments].concat())
}

/// A server on a model folder.
fn serve_folder(folder: &std::path::Path, arguments: &[&str]) -> slotgraph_tests::server::Server {
    let folder = folder.to_str().expect("a UTF-8 path");
    serve(&[&["--model", folder], arguments].concat())
}
