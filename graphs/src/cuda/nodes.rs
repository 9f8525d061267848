//! Walking a captured graph: its nodes in launch order, with functions and parameters.
//!
//! Used by the audit, by graph-dump and graph-diff. **Invariant:** reads only; what the driver reports as an enum of its own is
//! read as an integer, since a newer driver may know values that our bindings do not.

use super::error::{CallError, check};
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_void};

/// What a node does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub enum NodeKind {
    Kernel,
    Memcpy,
    Memset,
    /// The driver's number of another kind.
    Other(u32),
}

/// One node.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct GraphNode {
    pub kind: NodeKind,
    /// Kernel name; for other kinds what the kind is called.
    pub function: String,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
    /// Bytes of each parameter (copies: source, then target address).
    pub parameters: Vec<Vec<u8>>,
}

/// A graph's nodes in launch order, and its edges.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Walk {
    pub nodes: Vec<GraphNode>,
    /// (from, to, programmatic), as indices into `nodes`.
    pub edges: Vec<(usize, usize, bool)>,
}

/// Reads all of `graph`.
///
/// # Safety
/// `graph` is a live graph of a context that is current on this thread.
pub(super) unsafe fn walk(graph: sys::CUgraph) -> Result<Walk, CallError> {
    let mut count = 0usize;
    // SAFETY: the graph is live; NULL asks for the count alone.
    check("cuGraphGetNodes", unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut count) })?;
    let mut handles: Vec<sys::CUgraphNode> = vec![std::ptr::null_mut(); count];
    if count > 0 {
        // SAFETY: `handles` has room for `count` nodes.
        check("cuGraphGetNodes", unsafe { sys::cuGraphGetNodes(graph, handles.as_mut_ptr(), &raw mut count) })?;
    }
    // SAFETY: as the caller vouches.
    let edges = unsafe { edges(graph) }?;
    let index_of = |handle: sys::CUgraphNode| handles.iter().position(|other| *other == handle);
    let edges: Vec<(usize, usize, bool)> = edges
        .into_iter()
        .filter_map(|(from, to, programmatic)| Some((index_of(from)?, index_of(to)?, programmatic)))
        .collect();
    let order = launch_order(count, &edges);
    let mut place = vec![0; count];
    for (position, index) in order.iter().enumerate() {
        place[*index] = position;
    }
    // SAFETY: the handles are nodes of the live graph.
    let nodes = order.iter().map(|index| unsafe { node(handles[*index]) }).collect::<Result<_, _>>()?;
    let edges = edges.into_iter().map(|(from, to, programmatic)| (place[from], place[to], programmatic)).collect();
    Ok(Walk { nodes, edges })
}

/// Indices such that every edge goes forward; among free nodes the lower index first.
fn launch_order(count: usize, edges: &[(usize, usize, bool)]) -> Vec<usize> {
    let mut waiting_for = vec![0usize; count];
    for (_, to, _) in edges {
        waiting_for[*to] += 1;
    }
    let mut free: std::collections::BTreeSet<usize> = (0..count).filter(|index| waiting_for[*index] == 0).collect();
    let mut order = Vec::with_capacity(count);
    while let Some(index) = free.pop_first() {
        order.push(index);
        for (_, to, _) in edges.iter().filter(|(from, _, _)| *from == index) {
            waiting_for[*to] -= 1;
            if waiting_for[*to] == 0 {
                free.insert(*to);
            }
        }
    }
    order
}

type Edge = (sys::CUgraphNode, sys::CUgraphNode, bool);

/// # Safety
/// As for `walk`.
unsafe fn edges(graph: sys::CUgraph) -> Result<Vec<Edge>, CallError> {
    const PROGRAMMATIC: u8 = 1;
    let mut count = 0usize;
    // SAFETY: the graph is live; NULLs ask for the count alone.
    check("cuGraphGetEdges_v2", unsafe {
        let (from, to, data) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
        sys::cuGraphGetEdges_v2(graph, from, to, data, &raw mut count)
    })?;
    if count == 0 {
        return Ok(Vec::new());
    }
    let mut from: Vec<sys::CUgraphNode> = vec![std::ptr::null_mut(); count];
    let mut to: Vec<sys::CUgraphNode> = vec![std::ptr::null_mut(); count];
    let blank = sys::CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] };
    let mut data = vec![blank; count];
    // SAFETY: the three arrays have room for `count` edges.
    check("cuGraphGetEdges_v2", unsafe {
        sys::cuGraphGetEdges_v2(graph, from.as_mut_ptr(), to.as_mut_ptr(), data.as_mut_ptr(), &raw mut count)
    })?;
    Ok(from.into_iter().zip(to).zip(data).map(|((from, to), data)| (from, to, data.type_ == PROGRAMMATIC)).collect())
}

/// # Safety
/// `handle` is a node of a live graph.
unsafe fn node(handle: sys::CUgraphNode) -> Result<GraphNode, CallError> {
    let mut kind = std::mem::MaybeUninit::<sys::CUgraphNodeType>::zeroed();
    // SAFETY: the node is live and `kind` is a live C enum of 32 bits.
    check("cuGraphNodeGetType", unsafe { sys::cuGraphNodeGetType(handle, kind.as_mut_ptr()) })?;
    // SAFETY: `kind` has 4 initialised bytes; read as u32 because the value may be unknown to the Rust enum.
    let kind = unsafe { kind.as_ptr().cast::<u32>().read() };
    match kind {
        // SAFETY: the node is live and a kernel node.
        0 => unsafe { kernel_node(handle) },
        // SAFETY: the node is live and a memcpy node.
        1 => unsafe { memcpy_node(handle) },
        // SAFETY: the node is live and a memset node.
        2 => unsafe { memset_node(handle) },
        other => Ok(plain(NodeKind::Other(other), kind_name(other), Vec::new())),
    }
}

fn plain(kind: NodeKind, function: String, parameters: Vec<Vec<u8>>) -> GraphNode {
    GraphNode { kind, function, grid: [0; 3], block: [0; 3], shared_bytes: 0, parameters }
}

fn kind_name(kind: u32) -> String {
    const NAMES: [&str; 14] = [
        "kernel",
        "memcpy",
        "memset",
        "host",
        "child graph",
        "empty",
        "wait event",
        "record event",
        "signal semaphore",
        "wait semaphore",
        "allocation",
        "free",
        "batch memory operation",
        "conditional",
    ];
    NAMES.get(kind as usize).map_or_else(|| format!("kind {kind}"), |name| (*name).to_owned())
}

/// # Safety
/// `handle` is a memcpy node of a live graph.
unsafe fn memcpy_node(handle: sys::CUgraphNode) -> Result<GraphNode, CallError> {
    let mut params = std::mem::MaybeUninit::<sys::CUDA_MEMCPY3D>::zeroed();
    // SAFETY: a live memcpy node and a live structure.
    check("cuGraphMemcpyNodeGetParams", unsafe { sys::cuGraphMemcpyNodeGetParams(handle, params.as_mut_ptr()) })?;
    let base = params.as_ptr();
    // SAFETY: the fields are plain integers and pointers, zeroed before the call and filled by it; the structure's enums
    // are not read.
    let (source, source_host, target, target_host) =
        unsafe { ((*base).srcDevice, (*base).srcHost as u64, (*base).dstDevice, (*base).dstHost as u64) };
    let either = |device: u64, host: u64| if device != 0 { device } else { host };
    let addresses = [either(source, source_host), either(target, target_host)];
    Ok(plain(NodeKind::Memcpy, "memcpy".into(), addresses.map(|address| address.to_le_bytes().to_vec()).to_vec()))
}

/// # Safety
/// `handle` is a memset node of a live graph.
unsafe fn memset_node(handle: sys::CUgraphNode) -> Result<GraphNode, CallError> {
    let mut params = std::mem::MaybeUninit::<sys::CUDA_MEMSET_NODE_PARAMS>::zeroed();
    // SAFETY: a live memset node and a live structure.
    check("cuGraphMemsetNodeGetParams", unsafe { sys::cuGraphMemsetNodeGetParams(handle, params.as_mut_ptr()) })?;
    // SAFETY: plain integers, zeroed before the call and filled by it.
    let target = unsafe { (*params.as_ptr()).dst };
    Ok(plain(NodeKind::Memset, "memset".into(), vec![target.to_le_bytes().to_vec()]))
}

/// # Safety
/// `handle` is a kernel node of a live graph.
unsafe fn kernel_node(handle: sys::CUgraphNode) -> Result<GraphNode, CallError> {
    let mut params = std::mem::MaybeUninit::<sys::CUDA_KERNEL_NODE_PARAMS>::zeroed();
    // SAFETY: a live kernel node and a live structure.
    check("cuGraphKernelNodeGetParams_v2", unsafe { sys::cuGraphKernelNodeGetParams_v2(handle, params.as_mut_ptr()) })?;
    // SAFETY: the structure holds integers and pointers only, zeroed before the call and filled by it.
    let params = unsafe { params.assume_init() };
    // SAFETY: one of the two handles is set and live, as the driver filled them.
    let function = unsafe { kernel_name(&params) }?;
    // SAFETY: as above; the parameter memory belongs to the node and lives as long as the graph.
    let parameters = unsafe { kernel_parameters(&params) }?;
    Ok(GraphNode {
        kind: NodeKind::Kernel,
        function,
        grid: [params.gridDimX, params.gridDimY, params.gridDimZ],
        block: [params.blockDimX, params.blockDimY, params.blockDimZ],
        shared_bytes: params.sharedMemBytes,
        parameters,
    })
}

/// # Safety
/// `params` came from a live kernel node.
unsafe fn kernel_name(params: &sys::CUDA_KERNEL_NODE_PARAMS) -> Result<String, CallError> {
    let mut name: *const c_char = std::ptr::null();
    if params.func.is_null() {
        // SAFETY: a node without a CUfunction has a live CUkernel.
        check("cuKernelGetName", unsafe { sys::cuKernelGetName(&raw mut name, params.kern) })?;
    } else {
        // SAFETY: the node's function is live.
        check("cuFuncGetName", unsafe { sys::cuFuncGetName(&raw mut name, params.func) })?;
    }
    if name.is_null() {
        return Ok("unnamed".into());
    }
    // SAFETY: the driver gave a NUL-terminated name that lives as long as the function.
    Ok(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned())
}

/// # Safety
/// `params` came from a live kernel node.
unsafe fn kernel_parameters(params: &sys::CUDA_KERNEL_NODE_PARAMS) -> Result<Vec<Vec<u8>>, CallError> {
    // SAFETY: as the caller vouches.
    let (packed, packed_bytes) = unsafe { packed_arguments(params.extra) };
    let mut parameters = Vec::new();
    loop {
        let (mut offset, mut size) = (0usize, 0usize);
        let index = parameters.len();
        // SAFETY: the handle is live; an index past the last parameter is answered with INVALID_VALUE.
        let code = unsafe {
            if params.func.is_null() {
                sys::cuKernelGetParamInfo(params.kern, index, &raw mut offset, &raw mut size)
            } else {
                sys::cuFuncGetParamInfo(params.func, index, &raw mut offset, &raw mut size)
            }
        };
        if code == sys::CUresult::CUDA_ERROR_INVALID_VALUE {
            return Ok(parameters);
        }
        check("cuFuncGetParamInfo", code)?;
        let (start, size) = if !params.kernelParams.is_null() {
            // SAFETY: kernelParams has one pointer for each declared parameter, each to `size` bytes.
            (unsafe { *params.kernelParams.add(index) }.cast::<u8>().cast_const(), size)
        } else if !packed.is_null() && offset < packed_bytes {
            // A library may pass a buffer shorter than the declared parameter: its own size counts.
            // SAFETY: the offset is inside the buffer.
            (unsafe { packed.add(offset) }, size.min(packed_bytes - offset))
        } else {
            (std::ptr::null(), 0)
        };
        // SAFETY: `start` is readable for `size` bytes, as established above; an empty slice is made without it.
        parameters.push(if size == 0 {
            Vec::new()
        } else {
            unsafe { std::slice::from_raw_parts(start, size) }.to_vec()
        });
    }
}

/// The one packed argument buffer of a launch that was made with `extra`: (buffer, bytes), or NULL.
///
/// # Safety
/// `extra` is NULL or the list of a live kernel node: key, value, …, END.
unsafe fn packed_arguments(extra: *mut *mut c_void) -> (*const u8, usize) {
    const END: usize = 0;
    const POINTER: usize = 1;
    const SIZE: usize = 2;
    let (mut buffer, mut bytes) = (std::ptr::null(), 0);
    if extra.is_null() {
        return (buffer, bytes);
    }
    for pair in 0.. {
        // SAFETY: the list goes on until its END key, which is checked before the value is read.
        let key = unsafe { *extra.add(2 * pair) } as usize;
        if key == END {
            break;
        }
        // SAFETY: a key other than END is followed by its value.
        let value = unsafe { *extra.add(2 * pair + 1) };
        match key {
            POINTER => buffer = value.cast::<u8>().cast_const(),
            // SAFETY: the value of the size key points to a usize.
            SIZE => bytes = unsafe { *value.cast::<usize>() },
            _ => break,
        }
    }
    (buffer, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_come_in_launch_order_whatever_their_handles_order() {
        let chain = [(2, 0, false), (0, 3, true), (3, 1, false)];
        assert_eq!(launch_order(4, &chain), [2, 0, 3, 1]);
        assert_eq!(launch_order(3, &[]), [0, 1, 2]);
        let diamond = [(0, 2, false), (0, 1, false), (1, 3, false), (2, 3, false)];
        assert_eq!(launch_order(4, &diamond), [0, 1, 2, 3]);
    }

    #[test]
    fn a_packed_argument_list_is_read_up_to_its_end() {
        let mut buffer = [1u8, 2, 3];
        let mut size = 3usize;
        let mut list: [*mut c_void; 5] = [
            std::ptr::without_provenance_mut(1),
            buffer.as_mut_ptr().cast(),
            std::ptr::without_provenance_mut(2),
            (&raw mut size).cast(),
            std::ptr::null_mut(),
        ];
        // SAFETY: the list ends with its END key, and its pointers are live.
        let (start, bytes) = unsafe { packed_arguments(list.as_mut_ptr()) };
        assert_eq!((start, bytes), (buffer.as_ptr(), 3));
        // SAFETY: NULL is allowed.
        assert_eq!(unsafe { packed_arguments(std::ptr::null_mut()) }, (std::ptr::null(), 0));
    }
}
