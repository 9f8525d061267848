//! Log lines: text or JSON on stderr, INFO and above unless `SLOTGRAPH_LOG` says otherwise.
//!
//! **Invariant:** no prompt or output text at any level; a client's mistake or departure is never an ERROR.

use crate::cli::LogFormat;
use tracing_subscriber::EnvFilter;

/// Starts logging; a second call changes nothing.
pub fn start(format: LogFormat) -> Result<(), String> {
    let filter = match std::env::var("SLOTGRAPH_LOG") {
        Ok(words) => EnvFilter::try_new(&words).map_err(|error| format!("SLOTGRAPH_LOG {words}: {error}"))?,
        Err(_) => EnvFilter::new("info"),
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false);
    let _ = match format {
        LogFormat::Text => builder.with_ansi(false).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    Ok(())
}
