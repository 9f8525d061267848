//! Weights of CPU devices, read once per process: ranks that need equal weights share them.
//!
//! A device claims the weights that nobody has claimed, reads those in parallel, and then waits for the rest on its own OS
//! thread. **Invariant:** nothing blocks inside the rayon pool; a claim that is not kept is reported to whoever waits for it.

use super::PrepareError;
use crate::source::{Source, group_extents};
use rayon::prelude::*;
use slotgraph_kernels::cpu::CpuWeight;
use slotgraph_kernels::{WeightForm, WeightSpec};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

/// How far the weights of one device are, in bytes as the checkpoint holds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loaded {
    pub bytes: u64,
    pub of: u64,
}

/// The weights that the devices of this process have read.
#[derive(Default)]
pub struct SharedWeights {
    /// By name; ranks of an expert-parallel model use one name for different parts.
    claims: Mutex<HashMap<String, Vec<Claim>>>,
    kept: Condvar,
}

struct Claim {
    spec: WeightSpec,
    state: ClaimState,
}

#[derive(Clone)]
enum ClaimState {
    Reading,
    Read(Arc<CpuWeight>),
    Abandoned,
}

impl SharedWeights {
    /// Reads those of `specs` that no device has claimed yet.
    pub(super) fn load(
        &self,
        specs: &[WeightSpec],
        source: &dyn Source,
        progress: Option<&(dyn Fn(Loaded) + Sync)>,
    ) -> Result<(), PrepareError> {
        let mine = Claims { shared: self, specs: self.claim(specs) };
        let of = mine.specs.iter().map(|spec| source_bytes(spec)).sum();
        let read = AtomicU64::new(0);
        mine.specs.par_iter().try_for_each(|spec| {
            let weight = CpuWeight::from_bf16(spec, |group, out| source.read(spec, group, out))?;
            self.settle(spec, ClaimState::Read(Arc::new(weight)));
            let bytes = read.fetch_add(source_bytes(spec), Ordering::Relaxed) + source_bytes(spec);
            if let Some(progress) = progress {
                progress(Loaded { bytes, of });
            }
            Ok(())
        })
    }

    /// All of `specs`, waiting for those that other devices are reading.
    pub(super) fn gather(&self, specs: &[WeightSpec]) -> Result<Arc<[Arc<CpuWeight>]>, PrepareError> {
        let mut claims = self.claims();
        let mut weights = Vec::with_capacity(specs.len());
        for spec in specs {
            loop {
                match find(&claims, spec) {
                    Some(ClaimState::Read(weight)) => break weights.push(weight),
                    Some(ClaimState::Reading) => {
                        claims = self.kept.wait(claims).unwrap_or_else(|poisoned| poisoned.into_inner());
                    }
                    Some(ClaimState::Abandoned) | None => {
                        return Err(PrepareError::LeftUnread { weight: spec.name.clone() });
                    }
                }
            }
        }
        Ok(weights.into())
    }

    fn claim<'a>(&self, specs: &'a [WeightSpec]) -> Vec<&'a WeightSpec> {
        let mut claims = self.claims();
        let mut mine = Vec::new();
        for spec in specs {
            if find(&claims, spec).is_none() {
                let claim = Claim { spec: spec.clone(), state: ClaimState::Reading };
                claims.entry(spec.name.clone()).or_default().push(claim);
                mine.push(spec);
            }
        }
        mine
    }

    fn settle(&self, spec: &WeightSpec, state: ClaimState) {
        let mut claims = self.claims();
        let claims = claims.get_mut(&spec.name).expect("a weight is claimed before it is read");
        claims.iter_mut().filter(|claim| claim.spec == *spec).for_each(|claim| claim.state = state.clone());
        self.kept.notify_all();
    }

    /// Every change is a whole assignment, so a panic elsewhere leaves nothing half done.
    fn claims(&self) -> MutexGuard<'_, HashMap<String, Vec<Claim>>> {
        self.claims.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

fn find(claims: &HashMap<String, Vec<Claim>>, spec: &WeightSpec) -> Option<ClaimState> {
    claims.get(&spec.name)?.iter().find(|claim| claim.spec == *spec).map(|claim| claim.state.clone())
}

/// The claims of one device; those it has not kept when it returns, or panics, are abandoned.
struct Claims<'a> {
    shared: &'a SharedWeights,
    specs: Vec<&'a WeightSpec>,
}

impl Drop for Claims<'_> {
    fn drop(&mut self) {
        for spec in &self.specs {
            let state = find(&self.shared.claims(), spec);
            if matches!(state, Some(ClaimState::Reading)) {
                self.shared.settle(spec, ClaimState::Abandoned);
            }
        }
    }
}

fn source_bytes(spec: &WeightSpec) -> u64 {
    let groups = match spec.form {
        WeightForm::Gemm { groups, .. } => groups,
        _ => 1,
    };
    let (rows, cols) = group_extents(&spec.form);
    2 * (groups * rows * cols) as u64
}
