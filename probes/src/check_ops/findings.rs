//! What a check found, by op, layer, bucket and buffer, and the compact table that a person reads.

use super::checker::Judged;
use super::stepped::At;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write;

/// Where a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spot {
    pub row: usize,
    /// Within the line of the row.
    pub element: usize,
    pub slot: u32,
    pub position: u32,
}

/// All comparisons of one buffer that one op of one layer wrote in one bucket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    pub bucket: usize,
    pub op: String,
    pub layer: Option<usize>,
    pub buffer: String,
    pub elements: u64,
    /// Elements whose bits differ.
    pub differing: u64,
    /// Elements beyond their limit.
    pub bad: u64,
    /// Largest error in units of its limit; None when an exact rule was broken.
    pub worst: Option<f64>,
    /// Largest error over the largest magnitude of its line.
    pub of_line: f64,
    /// The first bad value, or else the worst.
    pub at: Option<Example>,
    /// What no number says.
    pub note: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Example {
    pub step: u64,
    pub spot: Spot,
    /// As text: JSON has no NaN.
    pub got: String,
    pub want: String,
}

type Key = (usize, usize, String);

/// Findings in plan order.
#[derive(Default)]
pub struct Findings {
    /// By bucket, index of the op, buffer.
    by_key: BTreeMap<Key, Finding>,
    /// By op and buffer.
    shares: BTreeMap<(String, String), f64>,
}

impl Findings {
    fn entry(&mut self, at: At, buffer: &str) -> &mut Finding {
        let key = (at.plan.rows, at.index, buffer.to_owned());
        self.by_key.entry(key).or_insert_with(|| Finding {
            bucket: at.plan.rows,
            op: at.placed.op.name().to_owned(),
            layer: at.placed.layer,
            buffer: buffer.to_owned(),
            elements: 0,
            differing: 0,
            bad: 0,
            worst: Some(0.0),
            of_line: 0.0,
            at: None,
            note: None,
        })
    }

    /// Adds a comparison; `spot` says where in the step `judged.at` is.
    pub fn add(&mut self, at: At, buffer: &str, step: u64, judged: &Judged, spot: Option<Spot>) {
        let finding = self.entry(at, buffer);
        let worse = match (judged.worst.is_finite(), finding.worst) {
            (true, Some(worst)) => judged.worst > worst,
            (true, None) => false,
            (false, known) => known.is_some(),
        };
        finding.elements += judged.elements as u64;
        finding.differing += judged.differing as u64;
        if worse {
            finding.worst = judged.worst.is_finite().then_some(judged.worst);
            if (finding.bad == 0 || judged.bad > 0)
                && let (Some((_, _, got, want)), Some(spot)) = (judged.at, spot)
            {
                let (got, want) = (format!("{got:.9e}"), format!("{want:.9e}"));
                finding.at = Some(Example { step, spot, got, want });
            }
        }
        finding.bad += judged.bad as u64;
        finding.of_line = finding.of_line.max(judged.of_line);
    }

    /// At most `share` of the buffer's elements may differ, over all layers, steps and buckets.
    pub fn limit_share(&mut self, at: At, buffer: &str, share: f64) {
        self.shares.insert((at.placed.op.name().to_owned(), without_layer(buffer).to_owned()), share);
    }

    /// Something that is wrong beyond any number.
    pub fn note(&mut self, at: At, buffer: &str, step: u64, what: String) {
        let finding = self.entry(at, buffer);
        finding.bad += 1;
        finding.note.get_or_insert(format!("step {step}: {what}"));
    }

    /// Findings that are bad.
    pub fn bad(&self) -> usize {
        self.by_key.values().filter(|finding| finding.bad > 0).count()
    }

    pub fn into_list(self) -> Vec<Finding> {
        let mut list: Vec<Finding> = self.by_key.into_values().collect();
        for ((op, buffer), share) in self.shares {
            let of = |finding: &&mut Finding| finding.op == op && without_layer(&finding.buffer) == buffer;
            let mine: Vec<&mut Finding> = list.iter_mut().filter(of).collect();
            let (differing, elements) =
                mine.iter().fold((0, 0), |(d, e), finding| (d + finding.differing, e + finding.elements));
            // A few elements may differ by chance however few there are.
            if differing <= 2 || differing as f64 <= share * elements as f64 {
                continue;
            }
            if let Some(worst) = mine.into_iter().max_by_key(|finding| finding.differing) {
                worst.bad += differing;
                worst
                    .note
                    .get_or_insert(format!("{differing} of {elements} elements differ, more than {share} of them"));
            }
        }
        list
    }
}

/// The worst of each op and buffer over layers, a column a bucket, then the bad ones in words.
pub fn table(findings: &[Finding]) -> String {
    let mut buckets: Vec<usize> = findings.iter().map(|finding| finding.bucket).collect();
    buckets.sort_unstable();
    buckets.dedup();
    let mut rows: Vec<(String, BTreeMap<usize, Cell>)> = Vec::new();
    for finding in findings {
        let name = format!("{} {}", finding.op, without_layer(&finding.buffer));
        let at = rows.iter().position(|(known, _)| *known == name).unwrap_or_else(|| {
            rows.push((name, BTreeMap::new()));
            rows.len() - 1
        });
        rows[at].1.entry(finding.bucket).or_default().add(finding);
    }
    let (exact, inexact): (Vec<_>, Vec<_>) =
        rows.iter().partition(|(_, cells)| cells.values().all(|cell| cell.differing == 0 && !cell.bad));
    let mut text = String::new();
    if !exact.is_empty() {
        let names: Vec<&str> = exact.iter().map(|(name, _)| name.as_str()).collect();
        text += &format!("bit for bit in buckets {buckets:?}: {}\n", names.join(", "));
    }
    if !inexact.is_empty() {
        let _ = write!(text, "{:<28}", "worst error / limit");
        for bucket in &buckets {
            let _ = write!(text, "{:>7}", format!("b{bucket}"));
        }
        text += " err/line  differ\n";
    }
    for (name, cells) in inexact {
        let _ = write!(text, "{name:<28}");
        for bucket in &buckets {
            let cell = cells.get(bucket).map_or("-".into(), Cell::text);
            let _ = write!(text, "{cell:>7}");
        }
        let of_line = cells.values().fold(0.0f64, |most, cell| most.max(cell.of_line));
        let (differing, elements) = cells.values().fold((0, 0), |(d, e), cell| (d + cell.differing, e + cell.elements));
        let _ = writeln!(text, "  {of_line:7.1e} {:.3}%", 100.0 * differing as f64 / f64::max(elements as f64, 1.0));
    }
    let bad: Vec<&Finding> = findings.iter().filter(|finding| finding.bad > 0).collect();
    for finding in bad.iter().take(MOST_BAD) {
        text += &format!("BAD {}\n", sentence(finding));
    }
    if bad.len() > MOST_BAD {
        text += &format!("… and {} more\n", bad.len() - MOST_BAD);
    }
    text
}

/// Bad findings that are spelled out.
const MOST_BAD: usize = 24;

#[derive(Default)]
struct Cell {
    bad: bool,
    worst: Option<f64>,
    of_line: f64,
    differing: u64,
    elements: u64,
}

impl Cell {
    fn add(&mut self, finding: &Finding) {
        self.bad |= finding.bad > 0;
        self.worst = [self.worst, finding.worst].into_iter().flatten().reduce(f64::max);
        self.of_line = self.of_line.max(finding.of_line);
        self.differing += finding.differing;
        self.elements += finding.elements;
    }

    fn text(&self) -> String {
        match (self.bad, self.worst) {
            (true, _) => "BAD".into(),
            (false, None | Some(0.0)) => "=".into(),
            (false, Some(worst)) => format!("{worst:.3}"),
        }
    }
}

/// `layer.3.kv` is the same buffer in every layer.
fn without_layer(buffer: &str) -> &str {
    buffer.strip_prefix("layer.").and_then(|rest| rest.split_once('.')).map_or(buffer, |(_, rest)| rest)
}

/// One bad finding in words.
pub fn sentence(finding: &Finding) -> String {
    let layer = finding.layer.map_or(String::new(), |layer| format!(" of layer {layer}"));
    let mut text = format!("bucket {} {}{layer}, {}: ", finding.bucket, finding.op, finding.buffer);
    if let Some(note) = &finding.note {
        text += note;
        return text;
    }
    text += &format!("{} of {} elements beyond the limit, {} differ", finding.bad, finding.elements, finding.differing);
    if let Some(worst) = finding.worst {
        text += &format!(", worst {worst:.1} limits");
    }
    if let Some(Example { step, spot: Spot { row, element, slot, position }, got, want }) = &finding.at {
        text +=
            &format!("; step {step} row {row} (slot {slot}, position {position}) element {element}: {got}, not {want}");
    }
    text
}
