//! Faults that are planted on purpose, by name: what probes and tests must notice.
//!
//! Armed by `--fault NAME[@N]` alone and in every build. `FaultDevice` commits those that show at a device's edge; a device
//! commits those inside it (`Device::arm`) and those of its start-up. The engine has a few more of its own.
//! **Invariant:** without a fault the wrapper changes nothing that passes through it.

use crate::device::{Device, DeviceError, DeviceFacts};
use crate::step::{EndReason, PageId, Record, RowFeed, StepInput, StepOutput};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FaultKind {
    /// Enqueuing step N fails.
    DeviceError,
    /// From step N on, no step settles.
    DeviceStall,
    /// A row of step N has a NaN among its logits.
    NanRow,
    /// A record of step N carries another token.
    Token,
    /// A record of step N has the lowest bit of its logprob flipped.
    LogprobBit,
    /// A record of step N is missing.
    LostRecord,
    /// Step N gives a slot a page that it does not own.
    FreedPage,
    /// Rank N's outputs differ from the others'.
    RankDrift,
    /// Rank N runs no step.
    RankStall,
    /// Rank N panics in its first step.
    RankPanic,
    /// From step N on, every row keeps the position that its line of the batch had then, as if a graph had captured it.
    BakedPosition,
    /// From step N on, pad rows write page 1.
    PadWrite,
    /// From step N on, the first row that decodes finds NaN in its holder's first page of the cache; once.
    NanCache,
    /// Rank N never arrives at its first start-up barrier.
    StartStall,
    /// The capture of bucket N fails.
    CaptureFail,
    /// A buffer that bucket N's graph names is in no ledger.
    UnregisteredPointer,
}

/// Who commits a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultPlace {
    /// `FaultDevice`, at the edge of any device.
    Edge,
    /// The device, by `Device::arm`.
    Device,
    /// Start-up.
    Start,
}

/// Name, place, and what N counts.
const FAULTS: [(FaultKind, &str, FaultPlace, &str); 16] = [
    (FaultKind::DeviceError, "device-error", FaultPlace::Edge, "step"),
    (FaultKind::DeviceStall, "device-stall", FaultPlace::Edge, "step"),
    (FaultKind::NanRow, "nan-row", FaultPlace::Edge, "step"),
    (FaultKind::Token, "token", FaultPlace::Edge, "step"),
    (FaultKind::LogprobBit, "logprob-bit", FaultPlace::Edge, "step"),
    (FaultKind::LostRecord, "lost-record", FaultPlace::Edge, "step"),
    (FaultKind::FreedPage, "freed-page", FaultPlace::Edge, "step"),
    (FaultKind::RankDrift, "rank-drift", FaultPlace::Edge, "rank"),
    (FaultKind::RankStall, "rank-stall", FaultPlace::Edge, "rank"),
    (FaultKind::RankPanic, "rank-panic", FaultPlace::Edge, "rank"),
    (FaultKind::BakedPosition, "baked-position", FaultPlace::Device, "step"),
    (FaultKind::PadWrite, "pad-write", FaultPlace::Device, "step"),
    (FaultKind::NanCache, "nan-cache", FaultPlace::Device, "step"),
    (FaultKind::StartStall, "start-stall", FaultPlace::Start, "rank"),
    (FaultKind::CaptureFail, "capture-fail", FaultPlace::Start, "bucket"),
    (FaultKind::UnregisteredPointer, "unregistered-pointer", FaultPlace::Start, "bucket"),
];

impl FaultKind {
    fn entry(self) -> (&'static str, FaultPlace, &'static str) {
        let (_, name, place, counts) = FAULTS.into_iter().find(|entry| entry.0 == self).expect("every kind is listed");
        (name, place, counts)
    }

    pub fn name(self) -> &'static str {
        self.entry().0
    }

    pub fn place(self) -> FaultPlace {
        self.entry().1
    }

    /// `step`, `rank` or `bucket`.
    pub fn counts(self) -> &'static str {
        self.entry().2
    }
}

/// A fault and its N: a step or a bucket (default 1), or a rank (default 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fault {
    pub kind: FaultKind,
    pub at: u64,
}

/// Why a text names no fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is no fault: expected NAME or NAME@N with one of {}", names())]
pub struct UnknownFault {
    text: String,
}

fn names() -> String {
    FAULTS.map(|(_, name, _, counts)| format!("{name}@{counts}")).join(", ")
}

impl FromStr for Fault {
    type Err = UnknownFault;

    fn from_str(text: &str) -> Result<Fault, UnknownFault> {
        let unknown = || UnknownFault { text: text.to_owned() };
        let (name, at) = match text.split_once('@') {
            Some((name, at)) => (name, Some(at.parse().map_err(|_| unknown())?)),
            None => (text, None),
        };
        let (kind, _, _, counts) = FAULTS.into_iter().find(|entry| entry.1 == name).ok_or_else(unknown)?;
        Ok(Fault { kind, at: at.unwrap_or(if counts == "rank" { 0 } else { 1 }) })
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.kind.name(), self.at)
    }
}

/// A device that commits the armed faults of its edge and passes everything else through.
pub struct FaultDevice<D> {
    device: D,
    rank: usize,
    faults: Vec<Planted>,
    /// A step that was changed on its way in; kept for its capacity.
    changed: StepInput,
    settled: u64,
    /// Steps that a stalled rank swallowed.
    swallowed: usize,
}

struct Planted {
    fault: Fault,
    /// Faults of one record or one page happen once.
    committed: bool,
}

impl<D: Device> FaultDevice<D> {
    /// Arms `faults` on rank `rank`; those of start-up are left to it. A fault that the device itself
    /// would have to commit and cannot is refused.
    pub fn arm(mut device: D, rank: usize, faults: &[Fault]) -> Result<FaultDevice<D>, DeviceError> {
        let mut planted = Vec::new();
        for &fault in faults {
            match fault.kind.place() {
                FaultPlace::Edge => planted.push(Planted { fault, committed: false }),
                FaultPlace::Device if !device.arm(fault) => {
                    let kind = device.facts().kind;
                    return Err(DeviceError::Lost(format!("a {kind} device cannot commit the fault {fault}")));
                }
                FaultPlace::Device | FaultPlace::Start => {}
            }
        }
        let changed = StepInput::default();
        Ok(FaultDevice { device, rank, faults: planted, changed, settled: 0, swallowed: 0 })
    }

    pub fn device(&self) -> &D {
        &self.device
    }

    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// Whether a fault of `kind` is due at `now`.
    fn due(&self, kind: FaultKind, now: u64) -> bool {
        self.faults.iter().any(|planted| planted.fault.kind == kind && now >= planted.fault.at)
    }

    fn on_rank(&self, kind: FaultKind) -> bool {
        self.faults.iter().any(|planted| planted.fault.kind == kind && self.rank as u64 == planted.fault.at)
    }

    fn stalled(&self) -> bool {
        self.swallowed > 0 || self.due(FaultKind::DeviceStall, self.settled + 1)
    }

    /// The first fault of `kind` that is due at `step` and has not happened; it counts as committed from now on.
    fn commit(&mut self, kind: FaultKind, step: u64) -> bool {
        let due = |planted: &&mut Planted| planted.fault.kind == kind && !planted.committed && step >= planted.fault.at;
        let found = self.faults.iter_mut().find(due);
        if let Some(planted) = found {
            planted.committed = true;
            return true;
        }
        false
    }

    fn spoil(&mut self, output: &mut StepOutput) {
        self.settled = output.step;
        if self.on_rank(FaultKind::RankDrift) {
            output.checksum ^= 1;
        }
        if output.records.is_empty() {
            return;
        }
        if self.commit(FaultKind::LostRecord, output.step) {
            output.records.remove(0);
        }
        let Some(record) = output.records.first_mut() else { return };
        if self.commit(FaultKind::Token, output.step) {
            record.token ^= 1;
        }
        if self.commit(FaultKind::LogprobBit, output.step) {
            record.logprob = f32::from_bits(record.logprob.to_bits() ^ 1);
        }
        if self.commit(FaultKind::NanRow, output.step) {
            *record = Record { token: 0, logprob: f32::NAN, ended: Some(EndReason::Nan), ..record.clone() };
        }
    }
}

impl<D: Device> Device for FaultDevice<D> {
    fn enqueue(&mut self, input: &StepInput) -> Result<(), DeviceError> {
        if self.due(FaultKind::DeviceError, input.step) {
            return Err(DeviceError::Lost(format!("the fault device-error was armed for step {}", input.step)));
        }
        assert!(!self.on_rank(FaultKind::RankPanic), "the fault rank-panic was armed");
        if self.on_rank(FaultKind::RankStall) {
            self.swallowed += 1;
            return Ok(());
        }
        let given = |row: &crate::step::RowInput| matches!(row.feed, RowFeed::Given { .. });
        let gives_a_page = !input.pages.is_empty() && input.rows.iter().any(given);
        if gives_a_page && self.commit(FaultKind::FreedPage, input.step) {
            self.changed.clone_from(input);
            let page = &mut self.changed.pages[0].page;
            *page = if *page == PageId(1) { PageId(2) } else { PageId(1) };
            return self.device.enqueue(&self.changed);
        }
        self.device.enqueue(input)
    }

    fn poll(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        if self.stalled() || !self.device.poll(output)? {
            return Ok(false);
        }
        self.spoil(output);
        Ok(true)
    }

    /// A stalled device keeps whoever waits waiting, as a real one would.
    fn wait(&mut self, output: &mut StepOutput) -> Result<bool, DeviceError> {
        while self.stalled() && self.in_flight() > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        if !self.device.wait(output)? {
            return Ok(false);
        }
        self.spoil(output);
        Ok(true)
    }

    fn in_flight(&self) -> usize {
        self.device.in_flight() + self.swallowed
    }

    fn facts(&self) -> DeviceFacts {
        self.device.facts()
    }

    fn arm(&mut self, fault: Fault) -> bool {
        self.device.arm(fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::null::{Draw, Drawn, NullDevice, NullOptions, Settle};
    use crate::samples::{decode, limits, prefill};

    fn armed(faults: &[&str]) -> FaultDevice<NullDevice> {
        let device = NullDevice::new(NullOptions {
            limits: limits(),
            eos_ids: vec![1],
            settle: Settle::AtOnce,
            step_ns: 0,
            script: Box::new(|draw: Draw| Drawn::Token(draw.position + 100)),
        });
        let faults: Vec<Fault> = faults.iter().map(|text| text.parse().unwrap()).collect();
        FaultDevice::arm(device, 0, &faults).unwrap()
    }

    /// What steps 1 … 3 of one slot give.
    fn three_steps(device: &mut impl Device) -> Vec<StepOutput> {
        let mut outputs = Vec::new();
        for step in 1..=3 {
            let input = if step == 1 { prefill(9) } else { decode(step) };
            device.enqueue(&input).unwrap();
            let mut output = StepOutput::default();
            assert!(device.poll(&mut output).unwrap());
            outputs.push(output);
        }
        outputs
    }

    #[test]
    fn every_name_parses_and_prints() {
        for (kind, name, place, counts) in FAULTS {
            let fault: Fault = format!("{name}@7").parse().unwrap();
            assert_eq!((fault.kind, fault.at, kind.place(), kind.counts()), (kind, 7, place, counts));
            assert_eq!(fault.to_string(), format!("{name}@7"));
        }
        assert_eq!("token".parse(), Ok(Fault { kind: FaultKind::Token, at: 1 }));
        assert_eq!("rank-stall".parse(), Ok(Fault { kind: FaultKind::RankStall, at: 0 }));
        for text in ["", "tokens", "token@", "token@x", "token@-1", "token@1@2"] {
            let error = text.parse::<Fault>().unwrap_err().to_string();
            assert!(error.contains("no fault") && error.contains("pad-write@step"), "{error}");
        }
    }

    #[test]
    fn unarmed_the_wrapper_changes_nothing() {
        let plain = three_steps(&mut armed(&[]).device);
        assert_eq!(three_steps(&mut armed(&[])), plain);
        assert_eq!(three_steps(&mut armed(&["capture-fail@1", "start-stall@0", "token@9"])), plain);
    }

    #[test]
    fn records_are_spoiled_once_at_their_step() {
        let plain = three_steps(&mut armed(&[]));
        let spoiled = |name: &str| three_steps(&mut armed(&[name]));
        let differing = |outputs: &[StepOutput]| -> Vec<u64> {
            outputs.iter().zip(&plain).filter(|(got, plain)| got != plain).map(|(got, _)| got.step).collect()
        };
        for name in ["token@2", "logprob-bit@2", "lost-record@2", "nan-row@2"] {
            assert_eq!(differing(&spoiled(name)), [2], "{name}");
        }
        assert_eq!(spoiled("token@2")[1].records[0].token, plain[1].records[0].token ^ 1);
        assert!(spoiled("lost-record@2")[1].records.is_empty());
        assert_eq!(spoiled("nan-row@2")[1].records[0].ended, Some(EndReason::Nan));
        assert_eq!(differing(&spoiled("rank-drift@0")), [1, 2, 3]);
        assert!(differing(&spoiled("rank-drift@1")).is_empty());
    }

    #[test]
    fn a_failing_step_fails() {
        let mut device = armed(&["device-error@2"]);
        device.enqueue(&prefill(9)).unwrap();
        assert!(matches!(device.enqueue(&decode(2)), Err(DeviceError::Lost(reason)) if reason.contains("step 2")));
    }

    #[test]
    fn stalls_settle_nothing() {
        let mut output = StepOutput::default();
        let mut device = armed(&["device-stall@2"]);
        device.enqueue(&prefill(9)).unwrap();
        device.enqueue(&decode(2)).unwrap();
        assert!(device.poll(&mut output).unwrap());
        assert!((0..9).all(|_| !device.poll(&mut output).unwrap()));
        assert_eq!(device.in_flight(), 1);

        let mut device = armed(&["rank-stall@0"]);
        device.enqueue(&prefill(9)).unwrap();
        assert!(!device.poll(&mut output).unwrap());
        assert_eq!((device.in_flight(), device.device().in_flight()), (1, 0));
    }

    #[test]
    fn a_freed_page_reaches_the_device() {
        let mut device = armed(&["freed-page"]);
        let control = device.device().control();
        device.enqueue(&prefill(9)).unwrap();
        assert_eq!(control.seat(crate::step::SlotId(0)).pages[0], PageId(2));
    }

    #[test]
    fn a_fault_that_the_device_cannot_commit_is_refused() {
        let fault = Fault { kind: FaultKind::PadWrite, at: 1 };
        let error = FaultDevice::arm(armed(&[]), 0, &[fault]).err().expect("a null device has no pad rows");
        assert!(error.to_string().contains("null device cannot commit the fault pad-write@1"), "{error}");
    }
}
