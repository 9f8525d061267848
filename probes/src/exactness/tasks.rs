//! The legs of a run: each changes one factor of the base, and those that can share a device are one task.
//!
//! **Invariant:** decides and runs nothing; names are those of the report and of `--leg`.

use super::legs::Factor;
use super::{Kind, Run};
use crate::cli::ProbeError;
use crate::subject::Subject;
use slotgraph_runtime::config::{DeviceKind, Settings, Transport};
use std::sync::Arc;

/// Legs that share a device.
pub(super) struct Task {
    pub subject: Arc<Subject>,
    pub items: Vec<Item>,
}

/// One leg to run.
#[derive(Clone)]
pub(super) struct Item {
    pub name: String,
    pub kind: Kind,
    pub what: What,
}

#[derive(Clone, Copy)]
pub(super) enum What {
    /// The cases, under a factor.
    Asked(Factor),
    /// The base's answers, in one pass each.
    Scored,
}

/// The leg that replays captured graphs.
const GRAPH: &str = "graph";

/// Requests that come and go beside a case.
const JOINERS: usize = 40;

/// Buckets, row places, prefill chunks and company that must change nothing.
fn variants(subject: &Subject) -> Vec<(String, Factor)> {
    let config = &subject.config;
    let decode: Vec<usize> = config.buckets.iter().copied().filter(|&bucket| bucket > 1).collect();
    let mut variants: Vec<(String, Factor)> =
        decode.iter().map(|&bucket| (format!("bucket {bucket}"), Factor { bucket, ..Factor::PLAIN })).collect();
    for neighbours in [1, 3, 7, 15, 31, 63, 127] {
        if neighbours < config.max_slots {
            variants.push((format!("beside {neighbours}"), Factor { neighbours, ..Factor::PLAIN }));
        }
    }
    for chunk in [1, 17, 64] {
        variants.push((format!("{chunk} prefill rows a step"), Factor { chunk, ..Factor::PLAIN }));
    }
    if config.max_slots > 1 {
        variants.push(("beside joiners".into(), Factor { neighbours: 1, joiners: JOINERS, ..Factor::PLAIN }));
    }
    variants
}

impl Run<'_> {
    /// Every leg that is wanted, with those that share a device together; a device that stands beside others gets fewer.
    pub(super) fn tasks(&self, base: &Arc<Subject>, cuda: bool) -> Result<Vec<Task>, ProbeError> {
        const ITEMS_BESIDE_OTHERS: usize = 6;
        let mut all = vec![(base.clone(), self.items("", Kind::Bucket, base))];
        for (name, subject) in self.switches(cuda)? {
            let kind = if cuda { Kind::Graph } else { Kind::Bucket };
            let mut items = vec![Item { name: name.clone(), kind, what: What::Asked(Factor::PLAIN) }];
            if name == GRAPH {
                items.extend(self.items("graph, ", kind, base));
            }
            all.push((Arc::new(subject), items));
        }
        for (name, kind, subject) in self.rank_subjects(base)? {
            all.push((Arc::new(subject), vec![Item { name, kind, what: What::Asked(Factor::PLAIN) }]));
        }
        let mut tasks = Vec::new();
        for (subject, mut items) in all {
            items.retain(|item| self.wants(&item.name));
            let most = if self.args.side_by_side > 1 { ITEMS_BESIDE_OTHERS } else { items.len().max(1) };
            tasks.extend(items.chunks(most).map(|items| Task { subject: subject.clone(), items: items.to_vec() }));
        }
        Ok(tasks)
    }

    /// The base's legs or the graph's: the same once more, scored, and every variant.
    fn items(&self, prefix: &str, kind: Kind, base: &Subject) -> Vec<Item> {
        let item = |name: &str, kind, what| Item { name: format!("{prefix}{name}"), kind, what };
        let repeat = if kind == Kind::Bucket { Kind::Repeat } else { kind };
        let mut items = vec![item("again", repeat, What::Asked(Factor::PLAIN)), item("scored", kind, What::Scored)];
        items.extend(variants(base).into_iter().map(|(name, factor)| item(&name, kind, What::Asked(factor))));
        items
    }

    /// Subjects whose modes and rollback switches differ from the base's.
    fn switches(&self, cuda: bool) -> Result<Vec<(String, Subject)>, ProbeError> {
        let mut subjects = Vec::new();
        let mut add = |name: &str, change: &dyn Fn(&mut Settings)| -> Result<(), ProbeError> {
            subjects.push((name.to_owned(), self.subject(|settings| change(settings))?));
            Ok(())
        };
        if cuda {
            add(GRAPH, &|settings| settings.cuda_graph = Some("on".into()))?;
            add("graph, pdl off", &|settings| {
                settings.cuda_graph = Some("on".into());
                settings.pdl = Some("off".into());
            })?;
            add("eager, pdl off", &|settings| {
                settings.cuda_graph = Some("off".into());
                settings.pdl = Some("off".into());
            })?;
        }
        for ahead in [0, 2] {
            add(&format!("launch-ahead {ahead}"), &|settings| settings.launch_ahead = Some(ahead))?;
        }
        Ok(subjects)
    }

    /// Subjects with more ranks, over each transport that was asked for; on a GPU eager, and captured where the transport can be.
    fn rank_subjects(&self, base: &Subject) -> Result<Vec<(String, Kind, Subject)>, ProbeError> {
        let cpu = base.config.device == DeviceKind::Cpu;
        if base.checkpoint.spec.experts().is_none() || base.config.ep > 1 {
            return Ok(Vec::new());
        }
        let degrees = self.args.ep_legs.clone().unwrap_or(if cpu { vec![2, 4, 8] } else { Vec::new() });
        let transports: Vec<Option<&String>> = match self.args.transport_legs.as_slice() {
            [] => vec![None],
            named => named.iter().map(Some).collect(),
        };
        let mut subjects = Vec::new();
        for ep in degrees {
            for transport in &transports {
                for graph in [false, true] {
                    let captured = graph && !cpu && transport.is_none_or(|name| name != Transport::HostStaged.name());
                    if graph && !captured {
                        continue;
                    }
                    let subject = self.subject(|settings| {
                        settings.ep = Some(ep);
                        settings.devices =
                            self.args.ep_devices.get(..ep).map(|devices| devices.join(",")).or(settings.devices.take());
                        settings.transport = transport.cloned().or(settings.transport.take());
                        settings.cuda_graph = (!cpu).then(|| if graph { "on" } else { "off" }.into());
                    })?;
                    let mode = if cpu {
                        ""
                    } else if graph {
                        ", graph"
                    } else {
                        ", eager"
                    };
                    let name = format!("ep {ep}, {}{mode}", subject.config.transport.name());
                    let kind = if transport.is_some() { Kind::Transport } else { Kind::Ep };
                    subjects.push((name, kind, subject));
                }
            }
        }
        Ok(subjects)
    }
}
