//! graph-dump and graph-diff: what is in a captured graph, and how two dumps differ.

use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::cuda::{self, NoDevice};
use crate::evidence::{Canary, Draft};
use crate::subject::{Subject, SubjectArgs};
use serde_json::{Value, json};
use slotgraph_graphs::cuda::NodeInfo;
use slotgraph_graphs::cuda::nodes::NodeKind;
use std::path::PathBuf;

/// Print a captured graph: node → op → buffers.
#[derive(Debug, clap::Args)]
pub struct DumpArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    /// Rows of the step [default: the smallest bucket].
    #[arg(long)]
    bucket: Option<usize>,
    #[arg(long, default_value = "json", value_parser = ["dot", "json"])]
    format: String,
}

/// Compare two dumps (JSON): nodes that came, went or changed.
#[derive(Debug, clap::Args)]
pub struct DiffArgs {
    before: PathBuf,
    after: PathBuf,
}

pub fn dump(args: &DumpArgs) -> Result<Outcome, ProbeError> {
    examine(args, &Subject::open(&args.subject)?)
}

fn examine(args: &DumpArgs, subject: &Subject) -> Result<Outcome, ProbeError> {
    let mut draft = Draft::new("graph-dump", "what is in this graph?", Claim::of(Label::GraphReadiness));
    draft = subject.describe(draft);
    if !cuda::is_cuda(subject) {
        return NoDevice::Absent("there is no CUDA device to capture graphs on".into()).end(draft);
    }
    let device = match cuda::prepare(subject, true, None) {
        Ok(device) => device,
        Err(none) => return none.end(draft),
    };
    let bucket = args.bucket.unwrap_or(device.limits().buckets[0]);
    let nodes = device.nodes(bucket).map_err(|e| ProbeError::Usage(format!("--bucket {bucket}: {e}")))?;
    Ok(Outcome::Text(match args.format.as_str() {
        "dot" => dot(bucket, &nodes),
        _ => {
            let (library, own): (Vec<_>, Vec<_>) = nodes.iter().partition(|node| node.library);
            let kernels = library.iter().filter(|node| node.kind == NodeKind::Kernel).count();
            let counts =
                json!({"launches": own.len(), "library_kernels": kernels, "library_nodes": library.len() - kernels});
            let dump = json!({
                "schema": 1, "kind": "slotgraph_graph_dump", "model": subject.checkpoint.name, "bucket": bucket, "counts": counts,
                "nodes": nodes,
            });
            serde_json::to_string_pretty(&dump).expect("nodes are plain data") + "\n"
        }
    }))
}

fn dot(bucket: usize, nodes: &[NodeInfo]) -> String {
    let mut text = format!("digraph bucket_{bucket} {{\n  rankdir=TB; node [shape=box, fontname=monospace];\n");
    for node in nodes {
        let op = match &node.op {
            Some((_, op, Some(layer))) => format!("{layer}.{op}"),
            Some((_, op, None)) => (*op).to_string(),
            None if node.library => format!("NCCL's {:?}", node.kind).to_lowercase(),
            None => format!("{:?}", node.kind),
        };
        let buffers: Vec<String> = node.pointers.iter().map(|(_, region, _)| region.clone()).collect();
        let label = format!("{op}\\n{} {:?}×{:?}\\n{}", node.function, node.grid, node.block, buffers.join(" "));
        text += &format!("  n{} [label=\"{label}\"];\n", node.index);
        for (from, programmatic) in &node.after {
            let style = if *programmatic { " [style=dashed]" } else { "" };
            text += &format!("  n{from} -> n{}{style};\n", node.index);
        }
    }
    text + "}\n"
}

pub fn diff(args: &DiffArgs) -> Result<Outcome, ProbeError> {
    let read = |path: &PathBuf| -> Result<Value, ProbeError> {
        let usage = |e: &dyn std::fmt::Display| ProbeError::Usage(format!("{}: {e}", path.display()));
        let bytes = std::fs::read(path).map_err(|e| usage(&e))?;
        let dump: Value = serde_json::from_slice(&bytes).map_err(|e| usage(&e))?;
        match dump["kind"] == "slotgraph_graph_dump" {
            true => Ok(dump),
            false => Err(usage(&"not a graph dump (graph-dump --format json makes one)")),
        }
    };
    let (before, after) = (read(&args.before)?, read(&args.after)?);
    let changes = changes(&before, &after);
    let mut draft = Draft::new("graph-diff", "are these two graphs the same?", Claim::of(Label::GraphReadiness));
    draft.check("same_graph", changes.is_empty(), changes.first().cloned().unwrap_or_else(|| "no node differs".into()));
    draft.metric("changes", changes.len() as f64, "nodes", 1, None);
    let mut planted = after.clone();
    if let Some(node) = planted["nodes"].as_array_mut().and_then(|nodes| nodes.first_mut()) {
        node["grid"][0] = json!(u32::MAX);
    }
    draft.canary(Canary::planted("a changed grid", self::changes(&after, &planted).len() == 1));
    draft.detail("changes", &changes);
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

/// Nodes matched by their place in the plan; those of one dump alone, and what differs in the rest. Addresses are not in a dump.
fn changes(before: &Value, after: &Value) -> Vec<String> {
    let nodes = |dump: &Value| dump["nodes"].as_array().cloned().unwrap_or_default();
    let name = |node: &Value| match node["op"].as_array() {
        Some(op) => format!("{} {} of layer {}", op[0], op[1], op[2]),
        None => format!("node {} {}", node["index"], node["function"]),
    };
    let (before, after) = (nodes(before), nodes(after));
    let mut changes = Vec::new();
    for (at, node) in before.iter().enumerate() {
        match after.get(at) {
            None => changes.push(format!("gone: {}", name(node))),
            Some(other) if name(node) != name(other) => changes.push(format!("{} became {}", name(node), name(other))),
            Some(other) => {
                let keys = ["kind", "function", "grid", "block", "shared_bytes", "pointers", "after"];
                let differing: Vec<String> = keys
                    .into_iter()
                    .filter(|key| node[*key] != other[*key])
                    .map(|key| format!("{key} {} → {}", node[key], other[key]))
                    .collect();
                if !differing.is_empty() {
                    changes.push(format!("{}: {}", name(node), differing.join(", ")));
                }
            }
        }
    }
    changes.extend(after.iter().skip(before.len()).map(|node| format!("new: {}", name(node))));
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_gone_and_new_nodes_are_named() {
        let node = |op: &str, grid: u32| json!({"index": 0, "op": [0, op, 1], "grid": [grid, 1, 1], "function": op});
        let dump = |nodes: Vec<Value>| json!({"kind": "slotgraph_graph_dump", "nodes": nodes});
        let a = dump(vec![node("fetch", 1), node("embed", 2)]);
        assert!(changes(&a, &a).is_empty());
        assert!(changes(&a, &dump(vec![node("fetch", 1), node("embed", 3)]))[0].contains("grid"));
        assert!(changes(&a, &dump(vec![node("fetch", 1)]))[0].starts_with("gone"));
        assert!(changes(&a, &dump(vec![node("fetch", 1), node("embed", 2), node("head", 1)]))[0].starts_with("new"));
    }

    #[test]
    fn a_mock_graph_is_dumped_node_by_node() {
        crate::mock::with_subject(
            "graph_dump::tests::a_mock_graph_is_dumped_node_by_node",
            |_| {},
            |subject| {
                let demo = || SubjectArgs { model: None, engine: Default::default() };
                let json = DumpArgs { subject: demo(), bucket: Some(4), format: "json".into() };
                let Outcome::Text(text) = examine(&json, subject).unwrap() else { panic!("text") };
                let dump: Value = serde_json::from_str(&text).unwrap();
                let nodes = dump["nodes"].as_array().unwrap();
                assert_eq!(dump["counts"], json!({"launches": nodes.len(), "library_kernels": 0, "library_nodes": 0}));
                assert!(
                    nodes.iter().all(|node| node["op"].is_array() && !node["pointers"].as_array().unwrap().is_empty())
                );
                assert_eq!(
                    (nodes[0]["op"][1].as_str(), nodes.last().unwrap()["op"][1].as_str()),
                    (Some("fetch"), Some("feed"))
                );
                let dot = DumpArgs { format: "dot".into(), ..json };
                let Outcome::Text(text) = examine(&dot, subject).unwrap() else { panic!("text") };
                assert!(text.starts_with("digraph bucket_4 {") && text.matches(" -> ").count() >= nodes.len() - 1);
            },
        );
    }
}
