//! The edge of the engine thread: what happens when the loop ends, however it ends.

use super::Engine;
use crate::clock::Clock;
use crate::watchdog::Watchdog;
use slotgraph_graphs::device::Device;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// How long telling every stream and dropping the devices may take before the process is aborted.
const LAST_WORDS: Duration = Duration::from_secs(10);

/// Runs the loop to its end. A panic or a device error becomes an error event on every open stream and a dead engine.
pub(super) fn run_to_the_end<D: Device, C: Clock>(mut engine: Engine<D, C>) {
    let ended = catch_unwind(AssertUnwindSafe(|| engine.run()));
    let reason = match ended {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(panic) => panic_text(&*panic),
    };
    tracing::error!(%reason, "the engine has failed");
    let _watchdog = Watchdog::arm(LAST_WORDS, "ending a failed engine");
    engine.load.set_dead(&reason);
    // The tables may be broken; a sink that is dropped says that the engine stopped.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| engine.fail(&reason))) {
        tracing::error!(reason = panic_text(&*panic), "the failed engine could not end its choices one by one");
    }
    drop(engine);
}

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panic: {}", text.unwrap_or("of an unknown kind"))
}
