//! A source that shows how far loading is: a bar on stderr when that is a terminal, nothing otherwise.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use slotgraph_graphs::source::{DummySpec, Source, SourceError};
use slotgraph_kernels::WeightSpec;
use std::io::IsTerminal;
use std::ops::Range;
use std::sync::Arc;

struct Progress {
    inner: Arc<dyn Source>,
    bar: ProgressBar,
}

/// Wraps `source`; `bytes` is what will be read over all ranks. The bar leaves when the source is dropped.
pub fn with_progress(source: Arc<dyn Source>, bytes: u64) -> Arc<dyn Source> {
    if !std::io::stderr().is_terminal() {
        return source;
    }
    let bar = ProgressBar::with_draw_target(Some(bytes), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("weights {bar:32} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    bar.set_style(style.expect("the template is well formed"));
    Arc::new(Progress { inner: source, bar })
}

impl Source for Progress {
    fn read_rows(
        &self,
        spec: &WeightSpec,
        group: usize,
        rows: Range<usize>,
        out: &mut [u16],
    ) -> Result<(), SourceError> {
        self.inner.read_rows(spec, group, rows, out)?;
        self.bar.inc(size_of_val(out) as u64);
        Ok(())
    }
    fn dummy(&self) -> Option<DummySpec> {
        self.inner.dummy()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
