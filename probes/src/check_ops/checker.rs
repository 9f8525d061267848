//! The checker: before each op it takes the op's inputs off the device, after it runs the CPU's op on them and compares what both wrote.
//!
//! **Invariant:** the next op is checked on the device's own values, right or wrong, so one bad op never hides another. A buffer that
//! changed although no op wrote it is a finding too.

use super::compared::{Part, Rule, parts};
use super::findings::{Findings, Spot};
use super::stepped::{At, Memory, Watch, from_bytes, to_bytes};
use slotgraph_graphs::plan::Plan;
use slotgraph_kernels::cpu::{CpuBuffer, CpuMemory};
use slotgraph_kernels::ops::{Op, step};
use slotgraph_kernels::{BufferId, Role, Specs};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What the parent hears of before each op, so that it knows where a device died.
pub type Journal<'a> = &'a mut dyn FnMut(u64, At);

pub struct Checker<'a> {
    /// The device's memory as of the last look; the CPU's op runs in it.
    memory: CpuMemory,
    /// By buffer: elements that are the device's own.
    known: Vec<usize>,
    /// Ops that the device does not run, `op` or `op@bucket`: the CPU's outputs take their place.
    replaced: &'a BTreeSet<String>,
    stop_at_first: bool,
    /// Change one element of each op's outputs and expect to see it.
    pub canary: bool,
    /// Ops whose changed element was seen, and not seen.
    pub canary_seen: BTreeSet<&'static str>,
    pub canary_missed: BTreeSet<&'static str>,
    pub findings: Findings,
    pub step: u64,
    journal: Journal<'a>,
}

impl<'a> Checker<'a> {
    /// `memory` is as large as the largest plan.
    pub fn new(
        memory: CpuMemory,
        replaced: &'a BTreeSet<String>,
        stop_at_first: bool,
        journal: Journal<'a>,
    ) -> Checker<'a> {
        Checker {
            known: vec![0; memory.buffers.len()],
            memory,
            replaced,
            stop_at_first,
            canary: false,
            canary_seen: BTreeSet::new(),
            canary_missed: BTreeSet::new(),
            findings: Findings::default(),
            step: 0,
            journal,
        }
    }

    fn is_replaced(&self, at: At) -> bool {
        let name = at.placed.op.name();
        self.replaced.contains(name) || self.replaced.contains(&format!("{name}@{}", at.plan.rows))
    }

    /// Takes a buffer off the device. One that is not what the last op left is reported.
    fn take(&mut self, at: At, id: BufferId, memory: &dyn Memory) -> Result<(), String> {
        let spec = at.plan.buffer(id);
        let bytes = memory.read(at.plan, id)?;
        let index = id.0 as usize;
        let watched = !matches!(spec.role, Role::Scratch | Role::InputRing | Role::OutputRing);
        let before = watched.then(|| self.memory.buffers[index].clone());
        from_bytes(spec.dtype, &bytes, &mut self.memory.buffers[index]);
        let known = self.known[index].min(spec.elements());
        if let Some(before) = before
            && let Some(element) = first_changed(&before, &self.memory.buffers[index], known)
        {
            let what = format!("changed behind the ops at element {element}");
            self.findings.note(at, &spec.name, self.step, what);
        }
        self.known[index] = spec.elements();
        Ok(())
    }

    /// Runs the CPU's op in `memory`; a refusal or a panic is a finding, and leaves the inputs as they were.
    fn run(&mut self, at: At) -> bool {
        let Some(Op::Fetch(fetch)) = at.plan.ops.first().map(|placed| &placed.op) else {
            unreachable!("verify asks for fetch first");
        };
        let memory = &mut self.memory;
        (memory.plan_rows, memory.plan_logit_rows) = (at.plan.rows, at.plan.logit_rows);
        if !matches!(at.placed.op, Op::Fetch(_)) {
            let words = memory.u32(fetch.rows.step);
            let (rows, logit_rows) = (words[step::ROWS] as usize, words[step::LOGIT_ROWS] as usize);
            memory.rows = rows.min(at.plan.rows);
            memory.logit_rows = logit_rows.min(at.plan.logit_rows);
        }
        let touched = touched(&at.placed.op);
        let saved: Vec<CpuBuffer> = touched.iter().map(|id| memory.buffers[id.0 as usize].clone()).collect();
        let done = catch_unwind(AssertUnwindSafe(|| at.placed.op.run(memory)));
        let refusal = match done {
            Ok(Ok(())) => return true,
            Ok(Err(error)) => error.to_string(),
            Err(panic) => panic_text(&*panic),
        };
        for (id, saved) in touched.iter().zip(saved) {
            self.memory.buffers[id.0 as usize] = saved;
        }
        self.findings.note(at, "inputs", self.step, format!("the CPU's op refuses them: {refusal}"));
        false
    }

    fn compare(&mut self, at: At, got: &BTreeMap<BufferId, CpuBuffer>) {
        let compared = parts(&at.placed.op, at.plan, &self.memory);
        if self.canary {
            self.try_canary(at, &compared, got);
        }
        for part in &compared {
            let (want, got) = (&self.memory.buffers[part.buffer.0 as usize], &got[&part.buffer]);
            let outcome = judge(part, want, got);
            let spot = outcome.at.map(|(line, element, ..)| self.spot(at, part, line, element));
            let buffer = &at.plan.buffer(part.buffer).name;
            self.findings.add(at, buffer, self.step, &outcome, spot);
            if let Rule::Near { share, .. } = part.rule {
                self.findings.limit_share(at, buffer, share);
            }
        }
    }

    /// Where in the step a bad element is.
    fn spot(&self, at: At, part: &Part, line: usize, element: usize) -> Spot {
        let Some(Op::Fetch(fetch)) = at.plan.ops.first().map(|placed| &placed.op) else {
            unreachable!("verify asks for fetch first");
        };
        let row = part.lines[line].0;
        let of = |id: BufferId| self.memory.u32(id).get(row).copied().unwrap_or_default();
        Spot { row, element, slot: of(fetch.rows.slot), position: of(fetch.rows.position) }
    }

    /// One changed element of each op must be judged bad.
    fn try_canary(&mut self, at: At, compared: &[Part], got: &BTreeMap<BufferId, CpuBuffer>) {
        for part in compared {
            let Some((_, range)) = part.lines.iter().find(|(_, range)| !range.is_empty()) else { continue };
            let element = range.start + range.len() / 2;
            let want = &self.memory.buffers[part.buffer.0 as usize];
            let mut changed = got[&part.buffer].clone();
            match (&mut changed, want) {
                (CpuBuffer::F32(changed), CpuBuffer::F32(want)) => {
                    let largest = want[range.clone()].iter().fold(1e-3f32, |most, value| most.max(value.abs()));
                    changed[element] = want[element] + 0.05 * largest;
                }
                (CpuBuffer::U32(changed), _) => changed[element] ^= 1,
                _ => unreachable!("both are of one type"),
            }
            let caught = judge(part, want, &changed).bad > 0;
            let list = if caught { &mut self.canary_seen } else { &mut self.canary_missed };
            list.insert(at.placed.op.name());
        }
    }
}

impl Watch for Checker<'_> {
    fn before(&mut self, at: At, memory: &dyn Memory) -> Result<bool, String> {
        (self.journal)(self.step, at);
        let op = &at.placed.op;
        for id in touched(op) {
            let spec = at.plan.buffer(id);
            let read = op.reads().contains(&id);
            // What is only written needs no look, unless it must survive beside what is written.
            if read || matches!(spec.role, Role::SlotState | Role::Kv) {
                self.take(at, id, memory)?;
            }
        }
        Ok(!self.is_replaced(at))
    }

    fn after(&mut self, at: At, memory: &dyn Memory) -> Result<(), String> {
        let op = &at.placed.op;
        let replaced = self.is_replaced(at);
        let ran = self.run(at);
        let mut got = BTreeMap::new();
        for id in op.writes() {
            let spec = at.plan.buffer(id);
            let index = id.0 as usize;
            if replaced {
                if spec.role != Role::Scratch {
                    memory.write(at.plan, id, &to_bytes(spec.dtype, &self.memory.buffers[index], spec.elements()))?;
                    self.known[index] = spec.elements();
                }
            } else {
                let mut buffer = self.memory.buffers[index].clone();
                from_bytes(spec.dtype, &memory.read(at.plan, id)?, &mut buffer);
                got.insert(id, buffer);
            }
        }
        if replaced {
            return Ok(());
        }
        let bad = self.findings.bad();
        if ran {
            self.compare(at, &got);
        }
        for (id, buffer) in got {
            self.known[id.0 as usize] = at.plan.buffer(id).elements();
            self.memory.buffers[id.0 as usize] = buffer;
        }
        if self.stop_at_first && self.findings.bad() > bad {
            return Err(super::STOPPED.into());
        }
        Ok(())
    }
}

fn touched(op: &Op) -> BTreeSet<BufferId> {
    op.reads().into_iter().chain(op.writes()).collect()
}

/// How one part compared.
#[derive(Clone, Copy, Debug, Default)]
pub struct Judged {
    pub elements: usize,
    /// Elements whose bits differ.
    pub differing: usize,
    /// Elements beyond their limit.
    pub bad: usize,
    /// Largest error, in units of its limit; infinite for an exact rule that was broken.
    pub worst: f64,
    /// Largest error over the largest magnitude of its line.
    pub of_line: f64,
    /// Line, element within it, got and want of the first bad element, or else of the worst.
    pub at: Option<(usize, usize, f64, f64)>,
}

/// Compares the lines of one part.
pub fn judge(part: &Part, want: &CpuBuffer, got: &CpuBuffer) -> Judged {
    let mut judged = Judged::default();
    for (line, (_, range)) in part.lines.iter().enumerate() {
        judged.elements += range.len();
        match (want, got) {
            (CpuBuffer::U32(want), CpuBuffer::U32(got)) => {
                let pairs = want[range.clone()].iter().zip(&got[range.clone()]);
                for (element, (want, got)) in pairs.enumerate().filter(|(_, (want, got))| want != got) {
                    judged.differing += 1;
                    judged.fail(line, element, f64::from(*got), f64::from(*want));
                }
            }
            (CpuBuffer::F32(want), CpuBuffer::F32(got)) => {
                judged.floats(line, part.rule, &want[range.clone()], &got[range.clone()]);
            }
            _ => unreachable!("both are of one type"),
        }
    }
    judged
}

impl Judged {
    fn fail(&mut self, line: usize, element: usize, got: f64, want: f64) {
        if self.bad == 0 {
            self.at = Some((line, element, got, want));
        }
        self.bad += 1;
        self.worst = f64::INFINITY;
    }

    fn floats(&mut self, line: usize, rule: Rule, want: &[f32], got: &[f32]) {
        let largest = want.iter().filter(|value| value.is_finite()).fold(0f32, |most, value| most.max(value.abs()));
        for (element, (&want, &got)) in want.iter().zip(got).enumerate() {
            if want.to_bits() == got.to_bits() || want.is_nan() && got.is_nan() {
                continue;
            }
            self.differing += 1;
            let (w, g) = (f64::from(want), f64::from(got));
            let Rule::Near { rel, of_line, abs, .. } = rule else {
                self.fail(line, element, g, w);
                continue;
            };
            let error = (g - w).abs();
            let limit = rel * w.abs() + of_line * f64::from(largest) + abs;
            if !error.is_finite() {
                self.fail(line, element, g, w);
                continue;
            }
            self.of_line = self.of_line.max(error / f64::from(largest).max(1e-30));
            let ratio = error / limit;
            if self.bad == 0 && (ratio > 1.0 || ratio > self.worst) {
                self.at = Some((line, element, g, w));
            }
            self.bad += usize::from(ratio > 1.0);
            self.worst = self.worst.max(ratio);
        }
    }
}

fn first_changed(before: &CpuBuffer, after: &CpuBuffer, elements: usize) -> Option<usize> {
    match (before, after) {
        (CpuBuffer::F32(before), CpuBuffer::F32(after)) => {
            before.iter().zip(after).take(elements).position(|(a, b)| a.to_bits() != b.to_bits())
        }
        (CpuBuffer::U32(before), CpuBuffer::U32(after)) => {
            before.iter().zip(after).take(elements).position(|(a, b)| a != b)
        }
        _ => unreachable!("a buffer keeps its type"),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without words").to_owned()
}

/// Memory for the CPU's ops in contract precision; `plan` is the largest.
pub fn memory(plan: &Plan, weights: std::sync::Arc<[std::sync::Arc<slotgraph_kernels::cpu::CpuWeight>]>) -> CpuMemory {
    CpuMemory::new(slotgraph_kernels::Precision::Contract, &plan.buffers, weights)
}
