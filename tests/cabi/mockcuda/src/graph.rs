//! Launches, captures and graphs. A captured graph is a chain; a launched one runs its nodes in order.

use crate::driver::Function;
use crate::state::{CAPTURE_INVALIDATED, Capture, Code, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, config, log, state};
use std::ffi::{c_int, c_uint, c_void};

/// Device bytes that an executable graph takes.
const EXEC_BYTES: usize = 64 << 10;
const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;

/// `CUlaunchAttribute`: id, padding, a union of 64 bytes.
#[repr(C)]
pub struct Attribute {
    id: c_uint,
    padding: [u8; 4],
    value: [u8; 64],
}

/// `CUlaunchConfig`.
#[repr(C)]
pub struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    stream: *mut c_void,
    attributes: *const Attribute,
    attribute_count: c_uint,
}

/// `CUDA_KERNEL_NODE_PARAMS_v2`.
#[repr(C)]
pub struct KernelNodeParams {
    function: *const Function,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    parameters: *const *const u8,
    extra: *mut *mut c_void,
    kernel: *mut c_void,
    context: *mut c_void,
}

/// One launch, with copies of its arguments.
pub struct Node {
    function: *const Function,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared_bytes: c_uint,
    programmatic: bool,
    values: Vec<Box<[u8]>>,
    /// To each of `values`.
    pointers: Vec<*const u8>,
}

// SAFETY: the pointers lead into the node's own boxes and to functions that are never freed.
unsafe impl Send for Node {}

pub struct Graph {
    nodes: Vec<Node>,
}

impl Node {
    /// # Safety
    /// As for cuLaunchKernelEx.
    unsafe fn of(config: &LaunchConfig, function: *const Function, arguments: *const *const u8) -> Node {
        // SAFETY: the function is live, and `arguments` has a pointer for each of its parameters, each to that many bytes.
        let values: Vec<Box<[u8]>> = unsafe {
            let sizes = &(*function).sizes;
            sizes
                .iter()
                .enumerate()
                .map(|(i, size)| std::slice::from_raw_parts(*arguments.add(i), *size).into())
                .collect()
        };
        let attributes = if config.attributes.is_null() {
            &[]
        } else {
            // SAFETY: the launch says how many attributes there are.
            unsafe { std::slice::from_raw_parts(config.attributes, config.attribute_count as usize) }
        };
        let programmatic = attributes
            .iter()
            .any(|attribute| attribute.id == PROGRAMMATIC_STREAM_SERIALIZATION && attribute.value[0] == 1);
        let pointers = values.iter().map(|value| value.as_ptr()).collect();
        let (grid, block, shared_bytes) = (config.grid, config.block, config.shared_bytes);
        Node { function, grid, block, shared_bytes, programmatic, values, pointers }
    }

    /// Calls the function that the first parameter leads to.
    fn call(&self) {
        let word = |at: usize| u64::from_le_bytes(self.values[at][..].try_into().expect("parameters of eight bytes"));
        // SAFETY: the library that launched this passes a function of this type of its own, and what that function takes.
        let function = unsafe { std::mem::transmute::<u64, extern "C" fn(u64, u64, u64, u64, u64)>(word(0)) };
        function(word(1), word(2), word(3), word(4), word(5));
    }

    /// Counts every sum of the launch as compared, `different` of them as different and `cut` as changed by a cut.
    fn compare(&self, [different, cut]: [u32; 2]) {
        let word = |at: usize| u32::from_le_bytes(self.values[at][..].try_into().expect("a number of four bytes"));
        let (n, tokens, groups) = (word(3), word(7), self.grid[1]);
        let found = u64::from_le_bytes(self.values[0][..].try_into().expect("a pointer has eight bytes")) as usize;
        assert!(state().kind_of(found, 16).is_some(), "the counts lie in an allocation");
        // SAFETY: four words in one live allocation, as just checked, and aligned.
        let found = unsafe { std::slice::from_raw_parts_mut(found as *mut u32, 4) };
        for (count, more) in found.iter_mut().zip([n * tokens * groups, different, 0, cut]) {
            *count += more;
        }
    }

    /// Does what the configuration says of the kernel.
    fn run(&self) {
        // SAFETY: functions are never freed.
        let name = unsafe { &(*self.function).name }.to_string_lossy();
        if let Some(hidden) = config().exchange.get(&*name) {
            crate::exchange::run(&self.values, *hidden);
        }
        if let Some(counts) = config().compare.get(&*name) {
            self.compare(*counts);
        }
        if config().call.contains(&*name) {
            self.call();
        }
        let Some(publish) = config().publish.get(&*name) else { return };
        let address = |parameter: usize| {
            u64::from_le_bytes(self.values[parameter][..].try_into().expect("a pointer has eight bytes")) as usize
        };
        let (counter, ring) = (address(publish.counter), address(publish.ring));
        let in_reach = |address, bytes| state().kind_of(address, bytes).is_some();
        assert!(
            in_reach(counter, 8) && in_reach(ring, publish.entries as usize * publish.words * 4),
            "{name} is out of bounds"
        );
        // SAFETY: both ranges were just checked to lie in live allocations, aligned as those are.
        unsafe {
            let counter = counter as *mut u64;
            let step = *counter + 1;
            let entry = (ring as *mut u32).add((*counter % publish.entries) as usize * publish.words);
            *entry.add(2) = 0;
            *entry.add(1) = (step >> 32) as u32;
            std::sync::atomic::AtomicU32::from_ptr(entry).store(step as u32, std::sync::atomic::Ordering::Release);
            *counter = step;
        }
    }
}

/// # Safety
/// As cuda.h says of cuLaunchKernelEx.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernelEx(
    launch: *const LaunchConfig,
    function: *const Function,
    arguments: *const *const u8,
    _extra: *mut *mut c_void,
) -> Code {
    if state().fails("cuLaunchKernelEx") {
        return OUT_OF_MEMORY;
    }
    // SAFETY: by the caller's word.
    let node = unsafe { Node::of(&*launch, function, arguments) };
    let mut state = state();
    // SAFETY: by the caller's word.
    match state.captures.get_mut(&(unsafe { (*launch).stream } as usize)) {
        Some(capture) => capture.nodes.push(node),
        None => {
            drop(state);
            node.run();
        }
    }
    SUCCESS
}

/// # Safety
/// As cuda.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamBeginCapture_v2(stream: *mut c_void, _mode: c_int) -> Code {
    let mut state = state();
    if state.fails("cuStreamBeginCapture_v2") || state.captures.contains_key(&(stream as usize)) {
        return INVALID_VALUE;
    }
    state.captures.insert(stream as usize, Capture::default());
    SUCCESS
}

/// # Safety
/// As cuda.h says: `graph` is valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut Graph) -> Code {
    let Some(capture) = state().captures.remove(&(stream as usize)) else { return INVALID_VALUE };
    let made =
        if capture.broken { std::ptr::null_mut() } else { Box::into_raw(Box::new(Graph { nodes: capture.nodes })) };
    // SAFETY: by the caller's word.
    unsafe { graph.write(made) };
    if capture.broken { CAPTURE_INVALIDATED } else { SUCCESS }
}

/// # Safety
/// As cuda.h says: a live graph, room for the nodes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphGetNodes(graph: *const Graph, nodes: *mut *const Node, count: *mut usize) -> Code {
    // SAFETY: by the caller's word; the handles are the addresses of the graph's own nodes, whose list no longer grows.
    unsafe {
        let own = &(*graph).nodes;
        if !nodes.is_null() {
            for (index, node) in own.iter().enumerate() {
                *nodes.add(index) = std::ptr::from_ref(node);
            }
        }
        *count = own.len();
    }
    SUCCESS
}

/// `CUgraphEdgeData`.
#[repr(C)]
pub struct EdgeData {
    from_port: u8,
    to_port: u8,
    kind: u8,
    reserved: [u8; 5],
}

/// # Safety
/// As cuda.h says: a live graph, room for the edges.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphGetEdges_v2(
    graph: *const Graph,
    from: *mut *const Node,
    to: *mut *const Node,
    data: *mut EdgeData,
    count: *mut usize,
) -> Code {
    // SAFETY: by the caller's word.
    unsafe {
        let own = &(*graph).nodes;
        if !from.is_null() {
            for (index, pair) in own.windows(2).enumerate() {
                *from.add(index) = &raw const pair[0];
                *to.add(index) = &raw const pair[1];
                let kind = u8::from(pair[1].programmatic);
                data.add(index).write(EdgeData { from_port: kind, to_port: 0, kind, reserved: [0; 5] });
            }
        }
        *count = own.len().saturating_sub(1);
    }
    SUCCESS
}

/// # Safety
/// As cuda.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphNodeGetType(_node: *const Node, kind: *mut c_uint) -> Code {
    const KERNEL: c_uint = 0;
    // SAFETY: by the caller's word.
    unsafe { kind.write(KERNEL) };
    SUCCESS
}

/// # Safety
/// As cuda.h says: a live node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphKernelNodeGetParams_v2(node: *const Node, params: *mut KernelNodeParams) -> Code {
    // SAFETY: by the caller's word.
    unsafe {
        let node = &*node;
        params.write(KernelNodeParams {
            function: node.function,
            grid: node.grid,
            block: node.block,
            shared_bytes: node.shared_bytes,
            parameters: node.pointers.as_ptr(),
            extra: std::ptr::null_mut(),
            kernel: std::ptr::null_mut(),
            context: std::ptr::null_mut(),
        });
    }
    SUCCESS
}

/// The executable form is the graph itself, which outlives it.
///
/// # Safety
/// As cuda.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    exec: *mut *const Graph,
    graph: *const Graph,
    _flags: u64,
) -> Code {
    let mut state = state();
    if state.fails("cuGraphInstantiateWithFlags") {
        return OUT_OF_MEMORY;
    }
    state.used += EXEC_BYTES;
    // SAFETY: by the caller's word.
    unsafe { exec.write(graph) };
    SUCCESS
}

/// # Safety
/// As cuda.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphUpload(_exec: *const Graph, _stream: *mut c_void) -> Code {
    SUCCESS
}

/// # Safety
/// As cuda.h says: a live executable graph.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphLaunch(exec: *const Graph, _stream: *mut c_void) -> Code {
    if state().fails("cuGraphLaunch") {
        return OUT_OF_MEMORY;
    }
    // SAFETY: by the caller's word.
    for node in unsafe { &(*exec).nodes } {
        node.run();
    }
    SUCCESS
}

/// # Safety
/// As cuda.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphExecDestroy(_exec: *const Graph) -> Code {
    log("cuGraphExecDestroy");
    state().used -= EXEC_BYTES;
    SUCCESS
}

/// # Safety
/// As cuda.h says: a graph that is destroyed once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphDestroy(graph: *mut Graph) -> Code {
    // SAFETY: made by cuStreamEndCapture, given back once.
    drop(unsafe { Box::from_raw(graph) });
    SUCCESS
}
