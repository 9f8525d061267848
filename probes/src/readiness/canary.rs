//! The faults that graph-readiness must catch, each planted on the bundled model.

use crate::cli::ProbeError;
use crate::cuda;
use crate::driver::Driver;
use crate::evidence::Canary;
use crate::script::{self, Transcript, first_divergence};
use crate::subject::{Subject, SubjectArgs};
use slotgraph_graphs::device::Device;
use slotgraph_graphs::fault::{Fault, FaultDevice};
use slotgraph_runtime::config::Settings;

/// Must fail the capture, with a reason that says so.
const AT_PREPARE: [(&str, &str); 2] =
    [("unregistered-pointer", "no registered allocation"), ("capture-fail@4", "bucket 4")];
/// Must change the transcript. The page that step 1 gives is seat 0's own whichever it is; step 2 gives another seat's.
const AT_REPLAY: [&str; 5] = ["baked-position@4", "pad-write@4", "token@9", "logprob-bit@9", "freed-page@2"];
/// Bucket whose script the faults run in; one short of full, so that there is a pad row.
const BUCKET: usize = 4;
const STEPS: usize = 24;

/// Plants every fault; caught only if all are.
pub fn planted(args: &SubjectArgs) -> Result<Canary, ProbeError> {
    let settings = Settings {
        device: Some("cuda".into()),
        devices: args.engine.settings().devices,
        lib_dir: args.engine.settings().lib_dir,
        max_slots: Some(8),
        kv_pages: Some(260),
        prefill_chunk: Some(64),
        ..Settings::default()
    };
    let demo = SubjectArgs { model: None, engine: args.engine.clone() };
    let subject = Subject::with(&demo, &settings)?;
    let truth = transcript(&subject, false, None)?;
    let mut missed = Vec::new();
    for (fault, sign) in AT_PREPARE {
        let planted: Fault = fault.parse().map_err(|e| ProbeError::Failed(format!("{e}")))?;
        match cuda::prepare(&subject, true, Some(planted)) {
            Err(refused) if refused.to_string().contains(sign) => {}
            Err(other) => missed.push(format!("{fault} ({other})")),
            Ok(_) => missed.push(fault.to_owned()),
        }
    }
    for fault in AT_REPLAY {
        let planted: Fault = fault.parse().map_err(|e| ProbeError::Failed(format!("{e}")))?;
        if first_divergence(&truth, &transcript(&subject, true, Some(planted))?).is_none() {
            missed.push(fault.to_owned());
        }
    }
    if first_divergence(&truth, &transcript(&subject, true, None)?).is_some() {
        missed.push("(the unfaulted graph differs from eager)".into());
    }
    let faults: Vec<&str> = AT_PREPARE.map(|(fault, _)| fault).into_iter().chain(AT_REPLAY).collect();
    let faults = faults.join(", ");
    let what = if missed.is_empty() { faults } else { format!("{faults}; missed: {}", missed.join(", ")) };
    Ok(Canary::planted(&what, missed.is_empty()))
}

/// The script's outcome. A step that fails ends it early, which is a difference too; a device that cannot be prepared is no outcome.
fn transcript(subject: &Subject, graph: bool, fault: Option<Fault>) -> Result<Transcript, ProbeError> {
    let failed = |e: &dyn std::fmt::Display| ProbeError::Failed(e.to_string());
    let device = cuda::prepare(subject, graph, None).map_err(|e| failed(&e))?;
    let limits = device.limits().clone();
    let device: Box<dyn Device> = match fault {
        None => Box::new(device),
        Some(fault) => Box::new(FaultDevice::arm(device, 0, &[fault]).map_err(|e| failed(&e))?),
    };
    let mut driver = Driver::new(device, limits);
    match script::run(&mut driver, BUCKET, STEPS) {
        Err(_) if fault.is_some() => Ok(Transcript::default()),
        ran => ran.map_err(|e| failed(&e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use slotgraph_graphs::cpu::{CpuDevice, CpuOptions};
    use slotgraph_graphs::fault::FaultPlace;

    /// The faults of a device's edge are the same on every device, so the CPU tells whether the script sees them.
    #[test]
    fn the_script_sees_every_fault_of_the_edge() {
        let settings = Settings {
            device: Some("cpu".into()),
            max_slots: Some(8),
            kv_pages: Some(260),
            prefill_chunk: Some(64),
            ..Settings::default()
        };
        let demo = SubjectArgs { model: None, engine: Default::default() };
        let subject = Subject::with(&demo, &settings).unwrap();
        let limits = subject.limits();
        let source = subject.checkpoint.source();
        let run = |faults: &[Fault]| {
            let device = CpuDevice::prepare(CpuOptions::new(&subject.checkpoint.spec, &limits, &*source)).unwrap();
            let device = FaultDevice::arm(device, 0, faults).unwrap();
            script::run(&mut Driver::new(device, limits.clone()), BUCKET, STEPS).unwrap()
        };
        let truth = run(&[]);
        let edge: Vec<Fault> = AT_REPLAY
            .map(|text| text.parse().unwrap())
            .into_iter()
            .filter(|f: &Fault| f.kind.place() == FaultPlace::Edge)
            .collect();
        assert!(edge.len() >= 3);
        for fault in edge {
            assert!(first_divergence(&truth, &run(&[fault])).is_some(), "{fault} changes nothing that the script sees");
        }
    }
}
