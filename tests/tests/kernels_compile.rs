//! Every kernel of every bundled model and real shape through the run-time compiler, for each architecture that is supported; needs
//! NVRTC and no GPU.
//!
//! What a GPU would only show as slowness or as a rare wrong bit is asked of the compiler's log and of the machine code: spills,
//! registers and shared memory that a launch can have, tensor cores where weights are multiplied, and no global write above the wait
//! of a programmatic launch (seen on an H200: it gave wrong bits, and only sometimes).

use slotgraph_graphs::cuda::Cache;
use slotgraph_graphs::cuda::cubin::{opcode, opcodes, parameter_sizes};
use slotgraph_graphs::cuda::libs::{NVRTC, Search};
use slotgraph_graphs::cuda::nvrtc::{FunctionUse, Nvrtc, Unit, function_uses};
use slotgraph_graphs::model;
use slotgraph_graphs::plan::{Plan, RankShape};
use slotgraph_graphs::step::StepLimits;
use slotgraph_kernels::contract::GemmKind;
use slotgraph_kernels::launch::forms::{Compared, WIDTHS};
use slotgraph_kernels::launch::{Arg, GpuFacts, Kernel, Launch, chain, stamp};
use slotgraph_kernels::spec::WeightForm;
use slotgraph_kernels::{Op, cuda_sources, pack};
use slotgraph_runtime::checkpoint::Checkpoint;
use slotgraph_runtime::config::{Config, Machine, Settings};
use slotgraph_tests::{MODELS, model as bundled, shape};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// Real shapes: their weights are dummies, and nothing of them is read here.
const SHAPES: [&str; 2] = ["deepseek-v2-lite", "qwen3-4b"];
/// Context of the real shapes.
const SHAPE_CONTEXT: usize = 8192;
/// Registers of a multiprocessor, and what a warp takes of them at a time.
const REGISTERS: u32 = 65_536;
const REGISTERS_GRAIN: u32 = 8;
/// Shared memory of a block that the driver keeps for itself, in bytes.
const SHARED_RESERVED: u32 = 1024;

/// What an architecture's machines have: (target, multiprocessors of its usual machine, KiB of shared memory a block may opt in to, and
/// a multiprocessor has).
const ARCHITECTURES: [(&str, usize, usize, u32); 6] = [
    ("sm_80", 108, 163, 164),
    ("sm_86", 84, 99, 100),
    ("sm_89", 128, 99, 100),
    ("sm_90a", 132, 227, 228),
    ("sm_100a", 148, 227, 228),
    ("sm_120", 170, 99, 100),
];
/// The architecture whose kernels are all compiled. On the others a sample of buckets is: the smallest, one in between and one for
/// prefill.
const TUNED: &str = "sm_90a";
const SAMPLED_BUCKETS: [usize; 3] = [1, 32, 512];

/// How one function is used over all launches.
#[derive(Clone, Debug, Default)]
struct Use {
    unit: usize,
    block_max: u32,
    shared_max: u32,
    /// Bytes of each argument that launches pass.
    parameters: Vec<usize>,
    /// Launched with a programmatic edge.
    programmatic: bool,
    /// Multiplies by a weight matrix, or attends.
    multiplies: bool,
    /// Multiplies by wgmma too, to compare.
    compares: bool,
}

#[test]
fn the_tuned_architecture_compiles_for_every_bucket_of_every_model() {
    let Some(compiler) = Compiler::find() else { return };
    let mut asked = Asked::default();
    for name in SHAPES {
        asked.add(&Checkpoint::dummy(&shape(name), 0).unwrap(), None, TUNED);
    }
    for (name, _) in MODELS {
        asked.add(&Checkpoint::open(&bundled(name)).unwrap(), None, TUNED);
    }
    none(compiler.faults(&asked, TUNED));
}

#[test]
fn other_architectures_compile_for_the_real_shapes() {
    let Some(compiler) = Compiler::find() else { return };
    let mut faults = Vec::new();
    for (arch, ..) in ARCHITECTURES.into_iter().filter(|(arch, ..)| *arch != TUNED) {
        let mut asked = Asked::default();
        for name in SHAPES {
            asked.add(&Checkpoint::dummy(&shape(name), 0).unwrap(), Some(&SAMPLED_BUCKETS), arch);
        }
        faults.extend(compiler.faults(&asked, arch));
    }
    none(faults);
}

#[test]
fn what_several_ranks_launch_compiles() {
    let Some(compiler) = Compiler::find() else { return };
    let mut faults = Vec::new();
    for arch in ["sm_80", TUNED] {
        let mut asked = Asked::default();
        for ranks in [2, 4, 8] {
            asked.add_exchange(&Checkpoint::dummy(&shape("deepseek-v2-lite"), 0).unwrap(), ranks, arch);
        }
        let exchanges = asked.uses.keys().filter(|kernel| kernel.function == "exchange").count();
        assert_eq!(exchanges, 3 * 2, "of few rows and of more, for each number of ranks");
        faults.extend(compiler.faults(&asked, arch));
    }
    none(faults);
}

/// The comparison of both forms alone: it compiles in seconds.
#[test]
fn both_forms_of_the_instruction_are_compiled() {
    let Some(compiler) = Compiler::find() else { return };
    let mut asked = Asked::default();
    let form = WeightForm::Gemm { kind: GemmKind::AttnOut, groups: 1, n: 64, k: 64 };
    asked.forms(&form, &facts(TUNED));
    asked.note(&chain(true, true), true, false);
    assert_eq!((asked.units.len(), asked.uses.values().all(|used| used.compares)), (3, true));
    none(compiler.faults(&asked, TUNED));
}

/// Without a compiler: every op of every model has a launch on every architecture, in every bucket.
#[test]
fn every_launch_fits_its_architecture() {
    let shapes = SHAPES.map(|name| Checkpoint::dummy(&shape(name), 0).unwrap());
    let models = MODELS.map(|(name, _)| Checkpoint::open(&bundled(name)).unwrap());
    let mut faults = Vec::new();
    for (arch, _, shared_kib, _) in ARCHITECTURES {
        let mut asked = Asked::default();
        shapes.iter().chain(&models).for_each(|checkpoint| asked.add(checkpoint, None, arch));
        faults.extend(asked.refused);
        let wide = asked.uses.iter().filter(|(_, used)| used.shared_max as usize > shared_kib * 1024);
        faults.extend(wide.map(|(kernel, used)| format!("{arch} {kernel:?}: {} bytes", used.shared_max)));
    }
    none(faults);
}

fn none(faults: Vec<String>) {
    assert!(faults.is_empty(), "{} faults\n{}", faults.len(), faults.join("\n"));
}

fn facts(arch: &str) -> GpuFacts {
    let (_, sm_count, shared_kib, _) = *ARCHITECTURES.iter().find(|(name, ..)| *name == arch).expect("a known target");
    let mut facts = GpuFacts { sm_count, arch: arch.into(), shared_max: shared_kib * 1024, pdl: true };
    facts.pdl = facts.capability() >= 90;
    facts
}

/// Units to compile, each once, and how their functions are launched.
#[derive(Default)]
struct Asked {
    units: Vec<Unit>,
    by_text: BTreeMap<String, usize>,
    uses: BTreeMap<Kernel, Use>,
    /// Ops that the architecture has no room for.
    refused: BTreeSet<String>,
}

impl Asked {
    /// Everything that a server of this model would launch, with the buckets of its defaults or only those named.
    fn add(&mut self, checkpoint: &Checkpoint, buckets: Option<&[usize]>, arch: &str) {
        let (limits, facts) = (limits_of(checkpoint), facts(arch));
        let wanted = |bucket: &usize| buckets.is_none_or(|some| some.contains(bucket));
        let built: Vec<usize> = limits.buckets.iter().copied().filter(wanted).collect();
        assert!(built.len() >= buckets.map_or(8, <[usize]>::len), "{}: buckets {built:?}", checkpoint.name);
        for bucket in built {
            let plan = model::build(&checkpoint.spec, &limits, RankShape::SINGLE, bucket).unwrap();
            plan.ops_with_next().for_each(|(placed, next)| self.note_op(&placed.op, next, &plan, &facts));
            for weight in &plan.weights {
                let packs = pack::launch(&weight.form, 0..1);
                let dummy = weight.parts.first().map(|part| pack::dummy_launch(part, 0, 1));
                packs.iter().chain(&dummy).for_each(|launch| self.note(launch, false, false));
                self.forms(&weight.form, &facts);
            }
        }
        self.note(&stamp(0), false, false);
        self.note(&chain(arch == TUNED, false), true, false);
    }

    /// What a rank of several launches from its experts' sums on, at one row, at many and in pieces.
    fn add_exchange(&mut self, checkpoint: &Checkpoint, ranks: usize, arch: &str) {
        let (limits, facts) = (limits_of(checkpoint), facts(arch));
        for bucket in SAMPLED_BUCKETS {
            let plan = model::build(&checkpoint.spec, &limits, RankShape { rank: ranks - 1, ranks }, bucket).unwrap();
            for (placed, next) in plan.ops_with_next() {
                if matches!(placed.op, Op::MoeDown(_) | Op::MoeCombine(_)) {
                    self.note_op(&placed.op, next, &plan, &facts);
                }
                if !matches!(placed.op, Op::Exchange(_)) {
                    continue;
                }
                let launches = placed.op.launches_over_peers(next, &plan, &facts);
                let launches = launches.unwrap_or_else(|e| panic!("the exchange of bucket {bucket}: {e}"));
                launches.iter().for_each(|launch| self.note(launch, false, facts.pdl && launch.pdl));
            }
        }
    }

    fn note_op(&mut self, op: &Op, next: Option<&Op>, plan: &Plan, facts: &GpuFacts) {
        let launches = op.launches(next, plan, facts);
        let launches =
            launches.unwrap_or_else(|e| panic!("{} on {}, bucket {}: {e}", plan.model, facts.arch, plan.rows));
        for launch in launches {
            let by_matrix = launch.args.iter().any(|arg| match arg {
                Arg::Weight(id) => matches!(plan.weights[id.0 as usize].form, WeightForm::Gemm { .. }),
                _ => false,
            });
            let attends = matches!(op, Op::MlaAttend(_) | Op::GqaAttend(_));
            self.note(&launch, by_matrix || attends, facts.pdl && launch.pdl);
        }
    }

    /// What a probe asks of a GPU that has both forms of the instruction.
    fn forms(&mut self, form: &WeightForm, facts: &GpuFacts) {
        let compared = Compared::of(form).filter(|_| facts.has_wgmma());
        for launch in compared.iter().flat_map(|of| WIDTHS.map(|width| of.launch(width))) {
            self.note(&launch, true, false);
        }
    }

    fn note(&mut self, launch: &Launch, multiplies: bool, programmatic: bool) {
        let kernel = &launch.kernel;
        if !self.uses.contains_key(kernel) {
            let text = kernel.unit();
            let next = self.units.len();
            let unit = *self.by_text.entry(text.clone()).or_insert(next);
            if unit == next {
                self.units.push(Unit { name: kernel.source.into(), text });
            }
            let parameters = launch.args.iter().map(|arg| if matches!(arg, Arg::U32(_)) { 4 } else { 8 }).collect();
            self.uses.insert(kernel.clone(), Use { unit, parameters, ..Use::default() });
        }
        let of = self.uses.get_mut(kernel).expect("inserted above");
        of.block_max = of.block_max.max(launch.block);
        of.shared_max = of.shared_max.max(launch.shared_bytes);
        of.programmatic |= programmatic;
        of.multiplies |= multiplies;
        of.compares |= kernel.source == "forms.cu" || kernel.defines.contains(&("WGMMA", "1".into()));
    }
}

/// What a server of this model has by default.
fn limits_of(checkpoint: &Checkpoint) -> StepLimits {
    let settings = Settings {
        device: Some("cuda".into()),
        max_model_len: Some(checkpoint.spec.positions.min(SHAPE_CONTEXT)),
        ..Settings::default()
    };
    let machine = Machine { gpus: 1, processors: 2 };
    let config = Config::resolve(&settings, &checkpoint.spec, &checkpoint.name, machine).unwrap();
    config.limits(1 + config.max_slots * config.pages_per_slot())
}

struct Compiler {
    nvrtc: Nvrtc,
}

impl Compiler {
    /// The compiler, or None with a line that says so. SLOTGRAPH_REQUIRE_NVRTC makes its absence a failure.
    fn find() -> Option<Compiler> {
        match Search::new(&[]).toolkit(&NVRTC) {
            Ok(found) => Some(Compiler { nvrtc: Nvrtc::new(&found).unwrap() }),
            Err(error) if std::env::var_os("SLOTGRAPH_REQUIRE_NVRTC").is_some() => panic!("{error}"),
            Err(error) => {
                eprintln!("skipped: {error}");
                None
            }
        }
    }

    fn faults(&self, asked: &Asked, arch: &str) -> Vec<String> {
        let start = Instant::now();
        let cubins = self.nvrtc.compile_all(&asked.units, arch, &Cache::of_user(), 2).unwrap();
        let cached = cubins.iter().filter(|cubin| cubin.cached).count();
        println!(
            "{arch}: {} units ({cached} cached) for {} kernels in {:.1?}",
            cubins.len(),
            asked.uses.len(),
            start.elapsed()
        );
        let shared_of_machine = ARCHITECTURES.iter().find(|(name, ..)| *name == arch).expect("a known target").3 * 1024;
        let mut wrong: Vec<String> = asked.refused.iter().cloned().collect();
        for (kernel, used) in &asked.uses {
            let cubin = &cubins[used.unit];
            let uses = function_uses(&cubin.log);
            let function = uses.iter().find(|of| of.function == kernel.function);
            let (Some(function), Some(code)) = (function, opcodes(&cubin.image, kernel.function)) else {
                wrong.push(format!("{arch} {kernel:?}: the compiler's log or the machine code does not name it"));
                continue;
            };
            let mut faults = limits(function, used, facts(arch).shared_max as u32, shared_of_machine);
            faults.extend(instructions(&code, used));
            let declared = parameter_sizes(&cubin.image, kernel.function);
            if declared.as_ref() != Some(&used.parameters) {
                faults.push(format!("declares {declared:?} and is given {:?}", used.parameters));
            }
            let spilled = function.spill_store_bytes + function.spill_load_bytes;
            if arch == TUNED && promised_spills(kernel.source).is_some_and(|most| spilled > most) {
                faults.push(format!("spills {spilled} bytes at {} registers", function.registers));
            }
            let named = |fault| format!("{arch} {} {:?}: {fault}", kernel.function, kernel.defines);
            wrong.extend(faults.into_iter().map(named));
        }
        wrong
    }
}

/// What keeps a block of the function from being launched at all.
fn limits(function: &FunctionUse, used: &Use, shared_of_block: u32, shared_of_machine: u32) -> Vec<String> {
    let mut faults = Vec::new();
    let registers = function.registers.next_multiple_of(REGISTERS_GRAIN) * used.block_max.next_multiple_of(32);
    if function.registers > 255 || registers > REGISTERS {
        faults
            .push(format!("{} threads of {} registers are more than {REGISTERS}", used.block_max, function.registers));
    }
    let shared = function.shared_bytes + used.shared_max;
    if shared > shared_of_block || shared + SHARED_RESERVED > shared_of_machine {
        faults.push(format!("{shared} bytes of shared memory are more than {shared_of_block}"));
    }
    if used.block_max > 1024 || used.block_max == 0 {
        faults.push(format!("a block of {} threads", used.block_max));
    }
    faults
}

/// Most bytes of spills, stores and loads, that a kernel's header allows: `no spills`, or `spills at most N B`.
fn promised_spills(source: &str) -> Option<u32> {
    let text = cuda_sources().iter().find(|(name, _)| *name == source).expect("a kernel's file").1;
    let header = text.split("*/").next().expect("a text has a first part");
    if header.contains("no spills") {
        return Some(0);
    }
    header.split("spills at most ").nth(1)?.split_whitespace().next()?.parse().ok()
}

/// What is wrong with the order or the kind of instructions.
fn instructions(code: &[u16], used: &Use) -> Vec<String> {
    let mut faults = Vec::new();
    if used.multiplies && !code.contains(&opcode::MATRIX) {
        faults.push("multiplies matrices and has no HMMA".to_owned());
    }
    if used.compares && !code.contains(&opcode::WARPGROUP_MATRIX) {
        faults.push("compares with wgmma and has no HGMMA".to_owned());
    }
    if used.programmatic {
        let wait = code.iter().position(|&code| code == opcode::WAIT);
        let write = code.iter().position(|code| opcode::GLOBAL_WRITES.contains(code));
        match (wait, write) {
            (_, None) => faults.push("writes nothing".to_owned()),
            (None, _) => faults.push("may start early and does not wait".to_owned()),
            (Some(wait), Some(write)) if write < wait => {
                faults.push(format!("writes at instruction {write} and waits at {wait}"));
            }
            _ => {}
        }
    }
    faults
}

#[test]
fn machine_code_is_judged() {
    const OTHER: u16 = 0x210;
    let write = opcode::GLOBAL_WRITES[1];
    let programmatic = Use { programmatic: true, block_max: 32, ..Use::default() };
    let multiplies = Use { multiplies: true, block_max: 32, ..Use::default() };
    let judge = |code: &[u16], used: &Use| instructions(code, used).join("; ");
    assert_eq!(judge(&[OTHER, opcode::WAIT, OTHER, write], &programmatic), "");
    assert_eq!(judge(&[write, opcode::WAIT], &programmatic), "writes at instruction 0 and waits at 1");
    assert_eq!(judge(&[OTHER, write], &programmatic), "may start early and does not wait");
    assert_eq!(judge(&[opcode::MATRIX, write], &multiplies), "");
    assert_eq!(judge(&[OTHER, write], &multiplies), "multiplies matrices and has no HMMA");
    let compares = Use { compares: true, block_max: 128, ..Use::default() };
    assert_eq!(judge(&[opcode::MATRIX, opcode::WARPGROUP_MATRIX, write], &compares), "");
    assert_eq!(judge(&[opcode::MATRIX, write], &compares), "compares with wgmma and has no HGMMA");

    let function = FunctionUse { registers: 129, shared_bytes: 4096, ..FunctionUse::default() };
    let of = |block_max, shared_max| Use { block_max, shared_max, ..Use::default() };
    let judge = |used: Use| limits(&function, &used, 99 << 10, 100 << 10).len();
    assert_eq!([judge(of(256, 0)), judge(of(512, 0)), judge(of(256, 96 << 10)), judge(of(0, 0))], [0, 1, 1, 1]);
}
