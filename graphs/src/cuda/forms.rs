//! Whether wgmma gives every sum of the loaded weights the bits that mma.sync gives it: one packing is to serve both.
//!
//! Asked by `exactness` of a prepared device, never by serving. **Invariants:** the weights are those that steps read, where they
//! lie; memory and functions that this takes are gone when it returns; what was not compared is a fault, not a pass.

use super::device::CudaDevice;
use super::error::{CallError, CudaError, During};
use super::launch::{Addresses, Call};
use super::libs::Libraries;
use super::memory::DeviceMemory;
use super::modules::Modules;
use super::nvrtc::Nvrtc;
use crate::device::Device;
use slotgraph_kernels::contract::GemmKind;
use slotgraph_kernels::launch::Arg;
use slotgraph_kernels::launch::forms::{Compared, FOUND_WORDS, WIDTHS, Width};
use slotgraph_kernels::{WeightId, WeightSpec};
use std::collections::BTreeMap;
use std::time::Instant;

/// What both forms gave the sums of all weights.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct Forms {
    /// By kind and width.
    pub kinds: Vec<KindForms>,
    /// All launches, from the first to the wait for the last.
    pub ms: f64,
}

/// The weights of one kind, multiplied by one width of wgmma.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct KindForms {
    pub kind: String,
    /// Tokens that the instruction takes, and those of them that are live.
    pub columns: usize,
    pub tokens: usize,
    pub weights: usize,
    /// Sums that there are, and those that the kernel compared.
    pub sums: u64,
    pub compared: u64,
    pub different: u64,
    /// Zero or not finite.
    pub degenerate: u64,
    /// Sums that a chain cut in two changes; `can_be_cut`: some weight's chains are long enough for that.
    pub cut_seen: u64,
    pub can_be_cut: bool,
    /// Name of the first weight that has a different sum.
    pub first: Option<String>,
}

impl Forms {
    /// What keeps this from showing that the forms agree; empty if it shows it.
    pub fn faults(&self) -> Vec<String> {
        let mut faults: Vec<String> = self.kinds.iter().flat_map(KindForms::faults).collect();
        if !self.kinds.iter().any(|kind| kind.can_be_cut) {
            faults.push("no chain is long enough to be cut".into());
        }
        faults
    }
}

impl KindForms {
    fn faults(&self) -> Vec<String> {
        let KindForms { sums, compared, different, degenerate, .. } = *self;
        let mut faults = Vec::new();
        if compared != sums || sums == 0 {
            faults.push(format!("{compared} of {sums} sums were compared"));
        }
        if different > 0 {
            let first = self.first.as_deref().unwrap_or_default();
            faults.push(format!("{different} of {compared} sums differ, the first in {first}"));
        }
        if degenerate * 2 > compared {
            faults.push(format!("{degenerate} of {compared} sums are zero or not finite"));
        }
        if self.can_be_cut && self.cut_seen == 0 {
            faults.push("a chain cut in two is not seen".into());
        }
        faults.into_iter().map(|fault| format!("{} at n{}: {fault}", self.kind, self.columns)).collect()
    }
}

/// One launch: a weight and a width.
struct Asked<'a> {
    id: WeightId,
    spec: &'a WeightSpec,
    compared: Compared,
    width: Width,
}

/// Where a launch finds its weight, its activations, and its words to count in.
struct FormAddresses {
    packed: u64,
    activations: u64,
    found: u64,
}

impl Addresses for FormAddresses {
    fn address(&self, arg: Arg) -> Option<u64> {
        match arg {
            Arg::Packed => Some(self.packed),
            Arg::Staging => Some(self.activations),
            Arg::Counters => Some(self.found),
            _ => None,
        }
    }
}

impl CudaDevice {
    /// Computes every sum of every GEMM weight in both forms and compares them; None on a GPU that has no wgmma.
    pub fn forms(&self) -> Result<Option<Forms>, CudaError> {
        if !self.facts.has_wgmma() {
            return Ok(None);
        }
        if self.in_flight() > 0 {
            return Err(CudaError::Unsupported("forms can be compared only while no step is in flight".into()));
        }
        let doing = || "comparing forms of sums".to_owned();
        self.gpu.bind().during(doing)?;
        let asked = asked(&self.programs[0].plan.weights);
        let launches: Vec<_> = asked.iter().map(|asked| asked.compared.launch(asked.width)).collect();
        let nvrtc = Nvrtc::new(&Libraries::load(&self.options.lib_dirs)?.nvrtc)?;
        let mut modules = Modules::default();
        modules.load(launches.iter(), &nvrtc, &self.options.cache, &self.gpu)?;

        let elements = asked.iter().map(|asked| asked.width.tokens * asked.compared.row_elements()).max();
        let activations = activations(elements.unwrap_or(0));
        let mut words = vec![0u32; asked.len() * FOUND_WORDS];
        let (x_bytes, found_bytes) = (size_of_val(activations.as_slice()), size_of_val(words.as_slice()));
        let x = DeviceMemory::allocate(&self.gpu, x_bytes).during(doing)?;
        let found = DeviceMemory::allocate(&self.gpu, found_bytes).during(doing)?;
        let call = |at: usize| {
            let counted = found.address + (at * FOUND_WORDS * size_of::<u32>()) as u64;
            let packed = self.weights.address(asked[at].id);
            let addresses = FormAddresses { packed, activations: x.address, found: counted };
            Call::resolve(&launches[at], &modules, &addresses, false).map_err(CudaError::Unsupported)
        };
        let calls = (0..asked.len()).map(call).collect::<Result<Vec<_>, _>>()?;

        let start = Instant::now();
        let enqueue = || -> Result<(), CallError> {
            // SAFETY: both allocations hold what is copied and filled; each launch reads a whole weight, at most `elements` of
            // the activations, and counts in its own words; all of it lives past the wait below, which follows an error too.
            unsafe {
                self.gpu.copy_in(x.address, activations.as_ptr().cast(), x_bytes)?;
                self.gpu.fill(found.address, 0, words.len())?;
                calls.iter().try_for_each(|call| call.launch(&self.gpu))
            }
        };
        let enqueued = enqueue();
        let waited = self.gpu.wait();
        enqueued.and(waited).during(doing)?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        // SAFETY: the allocation holds the words, which nothing else touches before the wait.
        let copied = unsafe { self.gpu.copy_out(words.as_mut_ptr().cast(), found.address, found_bytes) };
        copied.and(self.gpu.wait()).during(doing)?;
        Ok(Some(Forms { kinds: by_kind(&asked, &words), ms }))
    }
}

/// Every GEMM weight at every width.
fn asked(specs: &[WeightSpec]) -> Vec<Asked<'_>> {
    let compared = |(at, spec): (usize, &'_ WeightSpec)| Some((at, Compared::of(&spec.form)?));
    let weights: Vec<_> = specs.iter().enumerate().filter_map(compared).collect();
    let of_width = |width| {
        let one = move |&(at, compared): &(usize, Compared)| Asked {
            id: WeightId(u32::try_from(at).expect("a plan has few weights")),
            spec: &specs[at],
            compared,
            width,
        };
        weights.iter().map(one)
    };
    WIDTHS.into_iter().flat_map(of_width).collect()
}

fn by_kind(asked: &[Asked<'_>], words: &[u32]) -> Vec<KindForms> {
    let mut kinds: BTreeMap<(GemmKind, usize), KindForms> = BTreeMap::new();
    for (asked, found) in asked.iter().zip(words.chunks_exact(FOUND_WORDS)) {
        let Width { columns, tokens } = asked.width;
        let kind = asked.compared.kind;
        let of = kinds.entry((kind, columns)).or_insert_with(|| KindForms {
            kind: format!("{kind:?}"),
            columns,
            tokens,
            ..KindForms::default()
        });
        of.weights += 1;
        of.sums += asked.compared.sums(tokens);
        of.compared += u64::from(found[0]);
        of.different += u64::from(found[1]);
        of.degenerate += u64::from(found[2]);
        of.cut_seen += u64::from(found[3]);
        of.can_be_cut |= asked.compared.can_be_cut();
        if found[1] > 0 && of.first.is_none() {
            of.first = Some(asked.spec.name.clone());
        }
    }
    kinds.into_values().collect()
}

/// bf16 bits, the same at every call: both signs, exponents over 11 binades so that the order of sums shows, one zero in 16.
fn activations(count: usize) -> Vec<u16> {
    let value = |at: usize| {
        let mut word = (at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        let (sign, mantissa, exponent) = (word & 1, word >> 1 & 127, 120 + (word >> 8 & 0xffff) % 11);
        if word >> 24 & 15 == 0 { 0 } else { (sign << 15 | exponent << 7 | mantissa) as u16 }
    };
    (0..count).map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::super::mock_tests::{FOLDER, mock_folder, options, run_child};
    use super::*;
    use crate::samples;
    use std::process::Command;

    /// Runs `body` in a process whose mock driver has the kernel and counts with it as `extra` says.
    fn with_mock(name: &str, extra: &str, body: impl FnOnce(&Forms)) {
        if std::env::var_os(FOLDER).is_some() {
            let device = CudaDevice::prepare(options()).unwrap();
            let allocated = device.free_memory().unwrap();
            let forms = device.forms().unwrap().expect("the mock is an sm_90");
            assert_eq!(device.free_memory().unwrap(), allocated, "what it took is given back");
            return body(&forms);
        }
        let lines = format!("function forms 8 8 8 4 4 4 4 4\n{extra}");
        let folder = mock_folder(1, &samples::limits(), &lines);
        let mut child = Command::new(std::env::current_exe().unwrap());
        run_child(&format!("cuda::forms::tests::{name}"), child.env(FOLDER, folder.path()));
    }

    #[test]
    fn every_gemm_weight_is_compared() {
        with_mock("every_gemm_weight_is_compared", "compare forms 0 1\n", |forms| {
            assert_eq!(forms.faults(), [""; 0]);
            let kinds: Vec<(&str, usize, usize)> =
                forms.kinds.iter().map(|of| (of.kind.as_str(), of.columns, of.weights)).collect();
            let wanted = [
                ("AttnIn", 3),
                ("KeyUp", 3),
                ("ValueUp", 3),
                ("AttnOut", 3),
                ("GateUp", 1),
                ("Down", 1),
                ("Router", 2),
                ("SharedGateUp", 2),
                ("SharedDown", 2),
                ("ExpertGateUp", 2),
                ("ExpertDown", 2),
                ("Head", 1),
            ];
            let both: Vec<_> = wanted.iter().flat_map(|&(kind, count)| [(kind, 8, count), (kind, 64, count)]).collect();
            assert_eq!(kinds, both);
            let experts = forms.kinds.iter().find(|of| of.kind == "ExpertDown" && of.columns == 64).unwrap();
            assert_eq!(experts.sums, 2 * 12 * 64 * 61, "layers, experts, rows, tokens");
        });
    }

    #[test]
    fn a_different_sum_is_a_fault() {
        with_mock("a_different_sum_is_a_fault", "compare forms 1 1\n", |forms| {
            let faults = forms.faults();
            assert_eq!(faults.len(), forms.kinds.len());
            let head = faults.last().unwrap();
            assert!(head.starts_with("Head at n64: 1 of 5856 sums differ, the first in "), "{head}");
        });
    }

    #[test]
    fn a_cut_chain_that_is_not_seen_is_a_fault() {
        with_mock("a_cut_chain_that_is_not_seen_is_a_fault", "compare forms 0 0\n", |forms| {
            let faults = forms.faults();
            assert_eq!(faults.len(), forms.kinds.iter().filter(|of| of.can_be_cut).count());
            assert!(faults.last().unwrap().contains("Head at n64: a chain cut in two is not seen"), "{faults:?}");
        });
    }

    #[test]
    fn nothing_compared_is_a_fault() {
        with_mock("nothing_compared_is_a_fault", "", |forms| {
            let faults = forms.faults();
            assert!(faults.contains(&"Head at n8: 0 of 480 sums were compared".into()), "{faults:?}");
        });
        assert_eq!(Forms::default().faults(), ["no chain is long enough to be cut"]);
    }

    #[test]
    fn sums_that_say_little_are_a_fault() {
        let kind =
            KindForms { sums: 8, compared: 8, degenerate: 5, cut_seen: 1, can_be_cut: true, ..Default::default() };
        let forms = |degenerate| Forms { kinds: vec![KindForms { degenerate, ..kind.clone() }], ms: 0.0 };
        assert!(forms(4).faults().is_empty());
        assert!(forms(5).faults()[0].ends_with("5 of 8 sums are zero or not finite"));
    }

    #[test]
    fn activations_are_uneven_and_finite() {
        let values: Vec<f32> = activations(4096).iter().map(|bits| f32::from_bits(u32::from(*bits) << 16)).collect();
        assert!(values.iter().all(|value| value.abs() < 16.0));
        let share = |want: &dyn Fn(f32) -> bool| values.iter().filter(|value| want(**value)).count();
        assert!((150..400).contains(&share(&|value| value == 0.0)));
        assert!((1500..2400).contains(&share(&|value| value < 0.0)));
        assert!(share(&|value| value != 0.0 && value.abs() < 0.02) > 100 && share(&|value| value.abs() > 4.0) > 100);
    }
}
