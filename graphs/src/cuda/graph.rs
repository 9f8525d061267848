//! One captured graph: the launches of one bucket's program as a single launch.
//!
//! Made by `prepare`, replayed by `CudaDevice`. **Invariants:** a capture that was begun is ended, whatever happens inside; the
//! nodes are exactly the program's calls, in order, with the same arguments, and where it has a collective, the library's; no node of a
//! library stands on a programmatic edge; the audit found nothing; the graph drops before the memory that it names.

use super::error::{CallError, CudaError, During, check};
use super::exchange::Exchanger;
use super::gpu::{Gpu, count};
use super::ledger::{Audit, Ledger, audit};
use super::nodes::{GraphNode, NodeKind, Walk, walk};
use super::program::{Issue, Program};
use cudarc::driver::sys;
use std::sync::Arc;
use std::time::Instant;

/// Kernels of NCCL, by the start of their names. Their parameters are the library's own; they are only compared.
const FOREIGN_KERNELS: [&str; 4] = ["ncclDevKernel", "ncclKernel", "ncclSymk", "ncclSymDev"];

/// What one capture took and gave.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct GraphReport {
    pub bucket: usize,
    pub capture_us: f64,
    pub instantiate_us: f64,
    pub upload_us: f64,
    /// Fall of the device's free memory over instantiate and upload.
    pub graph_bytes: u64,
    /// Edges, and those of them that let a node start before the one before it has ended.
    pub edges: usize,
    pub programmatic_edges: usize,
    /// Collectives of the plan that a library carries out.
    pub collectives: usize,
    pub audit: Audit,
    /// Hash of the ledger at capture.
    pub ledger_hash: String,
}

pub(super) struct Graph {
    graph: sys::CUgraph,
    /// NULL until `instantiate`.
    exec: sys::CUgraphExec,
    pub walk: Walk,
    pub report: GraphReport,
    gpu: Arc<Gpu>,
}

// SAFETY: graph handles belong to this value alone and may be used from any thread that has the context current, one at a
// time; `&mut self` or ownership gives that, and every entry of `CudaDevice` binds the context first. The capture, which is
// bound to its thread, has ended when a `Graph` exists.
unsafe impl Send for Graph {}

impl Graph {
    /// Captures `program`, checks the nodes against it and audits their pointers. `inside` runs at the end of the capture (a
    /// planted fault).
    pub fn capture(
        gpu: &Arc<Gpu>,
        program: &Program,
        ledger: &Ledger,
        exchange: Option<&mut Exchanger>,
        inside: impl FnOnce() -> Result<(), CallError>,
    ) -> Result<Graph, CudaError> {
        let bucket = program.bucket;
        let refused = |reason: String| CudaError::Graph { bucket, reason };
        let mut graph = Graph::record(gpu, bucket, || {
            program.launch(gpu, exchange)?;
            inside().during(|| "inside the capture".into())
        })?;
        graph.take_walk()?;
        graph.report.edges = graph.walk.edges.len();
        graph.report.programmatic_edges = graph.walk.edges.iter().filter(|(_, _, programmatic)| *programmatic).count();
        graph.report.collectives = program.issues().filter(|(_, issue)| matches!(issue, Issue::Collective)).count();
        compare(&graph.walk, program).map_err(refused)?;
        graph.report.audit = audit(&graph.walk.nodes, ledger, is_foreign, is_memory);
        graph.report.ledger_hash = ledger.hash();
        match graph.report.audit.refusal() {
            Some(reason) => Err(refused(reason)),
            None => Ok(graph),
        }
    }

    /// Captures what `work` puts on the stream. The capture is ended whatever `work` does.
    pub fn record(
        gpu: &Arc<Gpu>,
        bucket: usize,
        work: impl FnOnce() -> Result<(), CudaError>,
    ) -> Result<Graph, CudaError> {
        let refused = |reason: String| CudaError::Graph { bucket, reason };
        let start = Instant::now();
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        count(&gpu.counters.captures);
        // SAFETY: the stream is live, not the default stream, and nothing else captures on it.
        check("cuStreamBeginCapture_v2", unsafe { sys::cuStreamBeginCapture_v2(gpu.raw_stream(), mode) })
            .map_err(|error| refused(format!("its capture did not begin: {error}")))?;
        let launched = work();
        let mut handle: sys::CUgraph = std::ptr::null_mut();
        // SAFETY: the stream is the one whose capture was begun on this thread; `handle` is a live pointer.
        let ended = check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(gpu.raw_stream(), &raw mut handle) });
        // From here on the handle, if there is one, is owned and will be destroyed.
        let owned = (!handle.is_null()).then(|| Graph {
            graph: handle,
            exec: std::ptr::null_mut(),
            walk: Walk::default(),
            report: GraphReport { bucket, capture_us: micros(start), ..GraphReport::default() },
            gpu: gpu.clone(),
        });
        launched.map_err(|error| refused(format!("a launch failed in its capture: {error}")))?;
        ended.map_err(|error| refused(format!("its capture failed: {error}")))?;
        owned.ok_or_else(|| refused("its capture gave no graph".into()))
    }

    /// Reads the nodes, once.
    pub fn take_walk(&mut self) -> Result<(), CudaError> {
        let bucket = self.report.bucket;
        // SAFETY: the graph is live, and its context is current (it was captured on this thread).
        self.walk = unsafe { walk(self.graph) }.during(|| format!("walking the graph of bucket {bucket}"))?;
        Ok(())
    }

    /// Makes the graph launchable and puts it on the device.
    pub fn instantiate(&mut self) -> Result<(), CudaError> {
        let bucket = self.report.bucket;
        let doing = || format!("instantiating the graph of bucket {bucket}");
        let (free_before, _) = self.gpu.memory().during(doing)?;
        let start = Instant::now();
        // SAFETY: the graph is live; `exec` is a live pointer; no flags.
        check("cuGraphInstantiateWithFlags", unsafe {
            sys::cuGraphInstantiateWithFlags(&raw mut self.exec, self.graph, 0)
        })
        .during(doing)?;
        self.report.instantiate_us = micros(start);
        let start = Instant::now();
        // SAFETY: the executable graph and the stream are live.
        check("cuGraphUpload", unsafe { sys::cuGraphUpload(self.exec, self.gpu.raw_stream()) })
            .and_then(|()| self.gpu.wait())
            .during(|| format!("uploading the graph of bucket {bucket}"))?;
        self.report.upload_us = micros(start);
        let (free_after, _) = self.gpu.memory().during(doing)?;
        self.report.graph_bytes = free_before.saturating_sub(free_after);
        Ok(())
    }

    /// Launches the whole graph; `instantiate` came before.
    ///
    /// # Safety
    /// The memory that the program names is live until the replay has run.
    pub unsafe fn launch(&self) -> Result<(), CallError> {
        count(&self.gpu.counters.replays);
        // SAFETY: the executable graph and the stream are live; the caller vouches for the memory.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.exec, self.gpu.raw_stream()) })
    }

    /// Walks the graph again and audits what is there now: a recheck compares the two digests.
    pub fn recheck(&self, ledger: &Ledger) -> Result<Audit, CudaError> {
        // SAFETY: the graph is live; the caller (`CudaDevice`) bound the context.
        let now = unsafe { walk(self.graph) }.during(|| "walking a graph again".into())?;
        Ok(audit(&now.nodes, ledger, is_foreign, is_memory))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.gpu.bind().is_err() {
            return;
        }
        if !self.exec.is_null() {
            // SAFETY: made by `instantiate`, destroyed once; the driver keeps what a running replay needs.
            let _ = unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
        // SAFETY: made by the capture, destroyed once.
        let _ = unsafe { sys::cuGraphDestroy(self.graph) };
    }
}

/// Whether a kernel is NCCL's. The driver gives names as C++ mangles them (`_Z31ncclDevKernel_AllGather_RING_LL24…`); ours are C's.
pub(super) fn is_foreign(function: &str) -> bool {
    let plain = match function.strip_prefix("_Z") {
        Some(mangled) => mangled.trim_start_matches(|character: char| character.is_ascii_digit()),
        None => function,
    };
    FOREIGN_KERNELS.iter().any(|start| plain.starts_with(start))
}

/// Whether the driver knows `address` as memory of its own (device, or pinned host memory).
fn is_memory(address: u64) -> bool {
    let mut kind = 0u32;
    // SAFETY: any address may be asked; the attribute is an unsigned int and `kind` is one. An address that is not the
    // driver's is answered with an error.
    let code = unsafe {
        sys::cuPointerGetAttribute(
            (&raw mut kind).cast(),
            sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            address,
        )
    };
    code == sys::CUresult::CUDA_SUCCESS
}

/// That the nodes which touch memory are the program's: its calls, in order, with the same arguments, and at each collective one kernel of the
/// library or more, with its copies. Nodes that only order others may come with a collective and are the audit's to count.
fn compare(walk: &Walk, program: &Program) -> Result<(), String> {
    let touches = |node: &&GraphNode| !matches!(node.kind, NodeKind::Other(_));
    let is_kernel = |node: &GraphNode| node.kind == NodeKind::Kernel;
    let is_library = |node: &GraphNode| !is_kernel(node) || is_foreign(&node.function);
    let planned: Vec<_> = program.calls().collect();
    let stranger = |node: &&GraphNode| !is_library(node) && planned.iter().all(|call| call.name != node.function);
    if let Some(node) = walk.nodes.iter().filter(touches).find(stranger) {
        return Err(format!("{} is neither a launch of its plan nor a kernel of NCCL", node.function));
    }
    let own = walk.nodes.iter().filter(touches).filter(|node| !is_library(node)).count();
    if own != planned.len() {
        return Err(format!("it has {own} kernel nodes of its plan, which makes {} launches", planned.len()));
    }

    let mut nodes = walk.nodes.iter().enumerate().filter(|(_, node)| touches(node)).peekable();
    let mut issues = program.issues().peekable();
    while let Some((op, issue)) = issues.next() {
        let Issue::Call(call) = issue else {
            // A collective may be cut into several kernels, so of some in a row only the sum can be told.
            let mut wanted = 1;
            while issues.next_if(|(_, issue)| matches!(issue, Issue::Collective)).is_some() {
                wanted += 1;
            }
            let mut kernels = 0;
            while let Some((_, node)) = nodes.next_if(|(_, node)| is_library(node)) {
                kernels += usize::from(is_kernel(node));
            }
            if kernels < wanted {
                return Err(format!("{} has {kernels} kernels of NCCL for {wanted} collectives", program.describe(op)));
            }
            continue;
        };
        let Some((index, node)) = nodes.next() else { return Err(format!("it ends before its {}", call.name)) };
        if !is_kernel(node) || node.function != call.name || node.grid != call.grid || node.block != [call.block, 1, 1]
        {
            return Err(format!("node {index} is {} where the plan launches {}", node.function, call.name));
        }
        if !node.parameters.iter().cloned().eq(call.parameters()) {
            return Err(format!("node {index} ({}) holds other arguments than its plan", call.name));
        }
    }
    if let Some((index, node)) = nodes.next() {
        return Err(format!("node {index} ({}) comes after the last of its plan", node.function));
    }
    compare_edges(walk)
}

/// That no programmatic edge leads into or out of a library's node: nothing there says when its successor may read what it wrote, or waits
/// for what came before.
fn compare_edges(walk: &Walk) -> Result<(), String> {
    let own = |index: usize| {
        let node = &walk.nodes[index];
        node.kind == NodeKind::Kernel && !is_foreign(&node.function)
    };
    match walk.edges.iter().find(|(from, to, programmatic)| *programmatic && !(own(*from) && own(*to))) {
        None => Ok(()),
        Some((from, to, _)) => {
            let function = |index: usize| &walk.nodes[index].function;
            Err(format!(
                "a programmatic edge leads from {} (node {from}) to {} (node {to})",
                function(*from),
                function(*to)
            ))
        }
    }
}

fn micros(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_nccl_are_known_mangled_and_plain() {
        for name in [
            // cuFuncGetName's, of libnccl 2.28.9.
            "_Z31ncclDevKernel_AllGather_RING_LL24ncclDevKernelArgsStorageILm4096EE",
            "_Z32ncclSymkDevKernel_AllGather_STMC21ncclSymkDevWorkArgs4K",
            "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclKernel_AllReduce_RING_LL_Sum_float",
        ] {
            assert!(is_foreign(name), "{name}");
        }
        for name in ["exchange", "moe_down", "_Z4nccl", "_Z9my_kernel13ncclDevKernel", "gather_ncclDevKernel"] {
            assert!(!is_foreign(name), "{name}");
        }
    }
}
