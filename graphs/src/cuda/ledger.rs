//! The pointer ledger: every allocation that a kernel may be given, by name, and the audit of captured graphs against it.
//!
//! Filled while `prepare` allocates; asked after each capture and again by the readiness probe. **Invariant:** every pointer of
//! our own kernels in a captured graph lies in a registered allocation; anything else is a finding, never a warning.
//!
//! The driver tells offset and size of a kernel's parameters, not their types, so every aligned 8-byte word of every
//! parameter is looked at (pointers inside by-value structs are found that way) and counts as a pointer when it falls into
//! memory that the ledger or the driver knows.

use super::nodes::{GraphNode, NodeKind};
use sha2::{Digest, Sha256};

/// Nodes by which a library orders its own work: a call of the host, nothing, a wait for an event, its record. A child graph could hide
/// anything, and an allocation would move what was captured.
const ORDERING: [u32; 4] = [3, 5, 6, 7];

/// One registered allocation.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Region {
    pub name: String,
    pub base: u64,
    pub bytes: u64,
}

impl Region {
    fn holds(&self, address: u64) -> bool {
        address >= self.base && address - self.base < self.bytes
    }
}

/// All registered allocations, by ascending address.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    regions: Vec<Region>,
}

impl Ledger {
    pub fn register(&mut self, name: impl Into<String>, base: u64, bytes: u64) {
        let region = Region { name: name.into(), base, bytes };
        let at = self.regions.partition_point(|other| other.base < base);
        let clear_before = at == 0 || self.regions[at - 1].base + self.regions[at - 1].bytes <= base;
        let clear_after = self.regions.get(at).is_none_or(|next| base + bytes <= next.base);
        assert!(clear_before && clear_after, "the allocations of {} and a neighbour overlap", region.name);
        self.regions.insert(at, region);
    }

    /// The region that holds `address`, and the offset into it.
    pub fn lookup(&self, address: u64) -> Option<(&Region, u64)> {
        let at = self.regions.partition_point(|region| region.base <= address);
        let region = self.regions.get(at.checked_sub(1)?)?;
        region.holds(address).then(|| (region, address - region.base))
    }

    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Without the region named `name` (a planted fault).
    pub fn without(&self, name: &str) -> Ledger {
        Ledger { regions: self.regions.iter().filter(|region| region.name != name).cloned().collect() }
    }

    /// SHA-256 over names, addresses and sizes: the same hash means the same places.
    pub fn hash(&self) -> String {
        let mut sha = Sha256::new();
        for region in &self.regions {
            sha.update((region.name.len() as u64).to_le_bytes());
            sha.update(&region.name);
            sha.update(region.base.to_le_bytes());
            sha.update(region.bytes.to_le_bytes());
        }
        hex(&sha.finalize())
    }
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where a pointer leads.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Pointer {
    /// Index of the node in launch order.
    pub node: usize,
    /// Kernel name, or the kind of node.
    pub function: String,
    /// Index of the parameter and byte offset inside it.
    pub parameter: usize,
    pub offset: usize,
    pub address: u64,
    /// Name of the region and offset into it; None outside the ledger.
    pub region: Option<(String, u64)>,
}

/// What the audit of one graph found.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Audit {
    pub nodes: usize,
    pub kernels: usize,
    pub memcpys: usize,
    pub memsets: usize,
    /// Kernels of a library, by their names.
    pub library_kernels: usize,
    /// Copies, fills and nodes that only order others which came with a library's kernels.
    pub library_nodes: usize,
    /// Nodes of any other kind (none is expected).
    pub others: usize,
    /// Pointers of our own nodes.
    pub pointers_checked: usize,
    pub pointers_unregistered: usize,
    /// Pointers of library kernels.
    pub pointers_foreign: usize,
    /// Hash of every node's kind, function and parameters: a recheck must give the same.
    pub digest: String,
    /// The unregistered ones.
    pub findings: Vec<Pointer>,
}

impl Audit {
    /// Why the graph must not run, if it must not.
    pub fn refusal(&self) -> Option<String> {
        if let Some(finding) = self.findings.first() {
            return Some(format!(
                "{} of its pointers are in no registered allocation; the first is {:#x}, parameter {} + {} of {} (node {})",
                self.pointers_unregistered,
                finding.address,
                finding.parameter,
                finding.offset,
                finding.function,
                finding.node
            ));
        }
        (self.others > 0).then(|| format!("{} nodes are neither kernels nor copies", self.others))
    }
}

/// Audits nodes in launch order. `is_foreign` names the kernels of libraries; `is_memory` asks the driver whether an address
/// outside the ledger is memory at all.
pub fn audit(
    nodes: &[GraphNode],
    ledger: &Ledger,
    is_foreign: impl Fn(&str) -> bool,
    mut is_memory: impl FnMut(u64) -> bool,
) -> Audit {
    let mut audit = Audit { nodes: nodes.len(), ..Audit::default() };
    // Our own launches are all kernels: whatever else is in a graph with a library's kernels is the library's.
    let has_library = nodes.iter().any(|node| node.kind == NodeKind::Kernel && is_foreign(&node.function));
    let mut sha = Sha256::new();
    for (index, node) in nodes.iter().enumerate() {
        let foreign = match node.kind {
            NodeKind::Kernel if is_foreign(&node.function) => {
                audit.library_kernels += 1;
                true
            }
            NodeKind::Kernel => {
                audit.kernels += 1;
                false
            }
            NodeKind::Memcpy | NodeKind::Memset if has_library => {
                audit.library_nodes += 1;
                true
            }
            NodeKind::Other(kind) if has_library && ORDERING.contains(&kind) => {
                audit.library_nodes += 1;
                true
            }
            NodeKind::Memcpy => {
                audit.memcpys += 1;
                false
            }
            NodeKind::Memset => {
                audit.memsets += 1;
                false
            }
            NodeKind::Other(_) => {
                audit.others += 1;
                false
            }
        };
        sha.update(format!("{:?} {} {:?} {:?}", node.kind, node.function, node.grid, node.block));
        for (parameter, bytes) in node.parameters.iter().enumerate() {
            sha.update(bytes);
            for (word, eight) in bytes.chunks_exact(8).enumerate() {
                let address = u64::from_le_bytes(eight.try_into().expect("chunks_exact gives eight bytes"));
                let region = ledger.lookup(address).map(|(region, offset)| (region.name.clone(), offset));
                if region.is_none() && !is_memory(address) {
                    continue;
                }
                if foreign {
                    audit.pointers_foreign += 1;
                    continue;
                }
                audit.pointers_checked += 1;
                if region.is_none() {
                    audit.pointers_unregistered += 1;
                    let function = node.function.clone();
                    audit.findings.push(Pointer {
                        node: index,
                        function,
                        parameter,
                        offset: word * 8,
                        address,
                        region,
                    });
                }
            }
        }
    }
    audit.digest = hex(&sha.finalize());
    audit
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ledger() -> Ledger {
        let mut ledger = Ledger::default();
        ledger.register("b", 0x2000, 0x100);
        ledger.register("a", 0x1000, 0x1000);
        ledger
    }

    fn kernel(function: &str, parameters: &[&[u8]]) -> GraphNode {
        GraphNode {
            kind: NodeKind::Kernel,
            function: function.into(),
            grid: [1, 1, 1],
            block: [32, 1, 1],
            shared_bytes: 0,
            parameters: parameters.iter().map(|bytes| bytes.to_vec()).collect(),
        }
    }

    fn run(nodes: &[GraphNode]) -> Audit {
        // The driver knows one allocation that is in no ledger.
        audit(nodes, &ledger(), |name| name.starts_with("nccl"), |address| (0x9000..0x9100).contains(&address))
    }

    #[test]
    fn lookup_finds_the_region_and_its_edges() {
        let ledger = ledger();
        let at = |address: u64| ledger.lookup(address).map(|(region, offset)| (region.name.as_str(), offset));
        assert_eq!(at(0x0fff), None);
        assert_eq!(at(0x1000), Some(("a", 0)));
        assert_eq!(at(0x1fff), Some(("a", 0xfff)));
        assert_eq!(at(0x2000), Some(("b", 0)));
        assert_eq!(at(0x20ff), Some(("b", 0xff)));
        assert_eq!(at(0x2100), None);
        assert_eq!(at(u64::MAX), None);
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn overlapping_allocations_are_refused() {
        ledger().register("c", 0x1fff, 1);
    }

    #[test]
    fn the_hash_follows_names_places_and_sizes() {
        let with = |name: &str, base: u64, bytes: u64| {
            let mut ledger = ledger();
            ledger.register(name, base, bytes);
            ledger.hash()
        };
        let base = with("c", 0x3000, 16);
        assert_eq!(base, with("c", 0x3000, 16));
        for other in [with("d", 0x3000, 16), with("c", 0x3008, 16), with("c", 0x3000, 32), ledger().hash()] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn pointers_are_found_also_inside_structs() {
        let mut by_value = Vec::new();
        for word in [0x1010u64, 7, 0x2008] {
            by_value.extend_from_slice(&word.to_le_bytes());
        }
        by_value.extend_from_slice(&3u32.to_le_bytes());
        let found = run(&[kernel("k", &[&0x1000u64.to_le_bytes(), &5u32.to_le_bytes(), &by_value])]);
        assert_eq!((found.pointers_checked, found.pointers_unregistered), (3, 0));
        assert_eq!(found.refusal(), None);
    }

    #[test]
    fn memory_outside_the_ledger_is_a_finding() {
        let found = run(&[
            kernel("ok", &[&0x1000u64.to_le_bytes()]),
            kernel("stray", &[&1u64.to_le_bytes(), &0x9010u64.to_le_bytes()]),
        ]);
        assert_eq!((found.kernels, found.pointers_checked, found.pointers_unregistered), (2, 2, 1));
        let finding = &found.findings[0];
        assert_eq!((finding.node, finding.parameter, finding.address), (1, 1, 0x9010));
        let refusal = found.refusal().unwrap();
        assert!(refusal.contains("0x9010") && refusal.contains("stray"), "{refusal}");
    }

    #[test]
    fn numbers_that_are_no_memory_are_not_pointers() {
        let found = run(&[kernel("k", &[&0x4_0000_0000u64.to_le_bytes(), &u64::MAX.to_le_bytes()])]);
        assert_eq!((found.pointers_checked, found.pointers_unregistered), (0, 0));
    }

    #[test]
    fn library_kernels_are_counted_apart() {
        let found = run(&[kernel("ncclDevKernel_AllGather", &[&0x9010u64.to_le_bytes(), &0x1000u64.to_le_bytes()])]);
        assert_eq!((found.kernels, found.library_kernels), (0, 1));
        assert_eq!((found.pointers_checked, found.pointers_unregistered, found.pointers_foreign), (0, 0, 2));
        assert_eq!(found.refusal(), None);
    }

    #[test]
    fn what_a_library_adds_to_its_kernels_is_its_own() {
        let host = GraphNode { kind: NodeKind::Other(3), ..kernel("host", &[]) };
        let copy = GraphNode { kind: NodeKind::Memcpy, ..kernel("memcpy", &[&0x9010u64.to_le_bytes()]) };
        let found = run(&[kernel("ncclDevKernel_AllGather", &[]), host, copy]);
        assert_eq!((found.library_nodes, found.others, found.memcpys, found.pointers_foreign), (2, 0, 0, 1));
        assert_eq!(found.refusal(), None);
    }

    #[test]
    fn a_library_hides_no_child_graph() {
        let child = GraphNode { kind: NodeKind::Other(4), ..kernel("child graph", &[]) };
        let found = run(&[kernel("ncclDevKernel_AllGather", &[]), child]);
        assert_eq!((found.library_nodes, found.others), (0, 1));
        assert!(found.refusal().is_some());
    }

    #[test]
    fn copies_are_audited_and_other_nodes_refused() {
        let copy = GraphNode {
            kind: NodeKind::Memcpy,
            ..kernel("memcpy", &[&0x1000u64.to_le_bytes(), &0x9010u64.to_le_bytes()])
        };
        let host = GraphNode { kind: NodeKind::Other(3), ..kernel("host", &[]) };
        let found = run(&[copy, host]);
        assert_eq!((found.memcpys, found.others, found.pointers_unregistered), (1, 1, 1));
        let only_host = run(&[GraphNode { kind: NodeKind::Other(3), ..kernel("host", &[]) }]);
        assert!(only_host.refusal().unwrap().contains("neither kernels nor copies"));
    }

    #[test]
    fn the_digest_sees_a_changed_parameter() {
        let one = run(&[kernel("k", &[&0x1000u64.to_le_bytes()])]);
        let same = run(&[kernel("k", &[&0x1000u64.to_le_bytes()])]);
        let other = run(&[kernel("k", &[&0x1008u64.to_le_bytes()])]);
        assert_eq!(one.digest, same.digest);
        assert_ne!(one.digest, other.digest);
    }
}
