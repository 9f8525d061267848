//! The real compiler, where one is installed, and the reading of its log.

use super::*;
use crate::cuda::cubin::parameter_sizes;
use crate::cuda::libs::Search;
use crate::plan::RankShape;
use crate::samples;
use slotgraph_kernels::launch::{Arg, GpuFacts, Kernel, Launch, stamp};
use slotgraph_kernels::pack;
use std::collections::BTreeSet;
use tempfile::TempDir;

/// The compiler, or None with a line that says so: a machine without NVRTC cannot ask these questions.
fn compiler() -> Option<Nvrtc> {
    match Search::new(&[]).toolkit(&NVRTC) {
        Ok(found) => Some(Nvrtc::new(&found).unwrap()),
        Err(error) if std::env::var_os("SLOTGRAPH_REQUIRE_NVRTC").is_some() => panic!("{error}"),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

fn unit(text: &str) -> Unit {
    Unit { name: "test.cu".into(), text: text.into() }
}

const AXPY: &str =
    "extern \"C\" __global__ void axpy(float* y, const float* x, float a) { y[threadIdx.x] += a * x[threadIdx.x]; }";

#[test]
fn a_unit_becomes_a_cubin_and_then_a_hit() {
    let Some(nvrtc) = compiler() else { return };
    let root = TempDir::new().unwrap();
    let cache = Cache::in_folder(root.path());
    let fresh = nvrtc.compile(&unit(AXPY), "sm_90a", &cache).unwrap();
    assert!(fresh.image.starts_with(b"\x7fELF") && !fresh.cached);
    let uses = function_uses(&fresh.log);
    assert_eq!(uses.len(), 1, "{}", fresh.log);
    assert_eq!((uses[0].function.as_str(), uses[0].spill_store_bytes), ("axpy", 0));
    assert!(uses[0].registers > 0);
    let hit = nvrtc.compile(&unit(AXPY), "sm_90a", &cache).unwrap();
    assert!(hit.cached);
    assert_eq!((hit.image, hit.log), (fresh.image.clone(), fresh.log));
    let other = nvrtc.compile(&unit(AXPY), "sm_80", &cache).unwrap();
    assert!(!other.cached, "another architecture is another key");
    assert_ne!(other.image, fresh.image);
}

#[test]
fn an_error_carries_the_compilers_log() {
    let Some(nvrtc) = compiler() else { return };
    let error = nvrtc.compile(&unit("__global__ void k() { undefined_name(); }"), "sm_90a", &Cache::off()).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("test.cu") && text.contains("sm_90a") && text.contains("undefined_name"), "{text}");
}

#[test]
fn many_units_compile_at_once_in_order() {
    let Some(nvrtc) = compiler() else { return };
    let units: Vec<Unit> = (0..6)
        .map(|i| unit(&format!("extern \"C\" __global__ void k{i}(int* y) {{ y[threadIdx.x] = {i}; }}")))
        .collect();
    let cubins = nvrtc.compile_all(&units, "sm_90a", &Cache::off(), 3).unwrap();
    for (i, cubin) in cubins.iter().enumerate() {
        assert_eq!(function_uses(&cubin.log)[0].function, format!("k{i}"));
    }
    let mut broken = units.clone();
    broken[3].text.push_str(" not C");
    assert!(nvrtc.compile_all(&broken, "sm_90a", &Cache::off(), 3).is_err());
}

#[test]
fn the_numeric_flags_reach_the_compiler() {
    let Some(nvrtc) = compiler() else { return };
    // With --fmad=false the multiply and the add stay two instructions, so the product is rounded: the folded constant shows it.
    let text = "extern \"C\" __global__ void k(float* y) { y[0] = y[1] * y[2] + y[3]; }";
    let strict = nvrtc.compile(&unit(text), "sm_90a", &Cache::off()).unwrap();
    let fused = "extern \"C\" __global__ void k(float* y) { y[0] = __fmaf_rn(y[1], y[2], y[3]); }";
    let fused = nvrtc.compile(&unit(fused), "sm_90a", &Cache::off()).unwrap();
    assert_ne!(strict.image, fused.image, "a * b + c was contracted to fma");
    assert!(nvrtc.identity("sm_90a").contains("--fmad=false --ftz=false --prec-div=true --prec-sqrt=true"));
}

#[test]
fn ptxas_lines_are_read() {
    let log = "ptxas info    : 0 bytes gmem\n\
        ptxas info    : Compiling entry function 'first' for 'sm_90a'\n\
        ptxas info    : Function properties for first\n    \
        8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n\
        ptxas info    : Used 255 registers, used 1 barriers, 4096 bytes smem\n\
        ptxas info    : Compiling entry function 'second' for 'sm_90a'\n\
        ptxas info    : Function properties for second\n    \
        0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
        ptxas info    : Used 40 registers, used 0 barriers\n";
    let uses = function_uses(log);
    let first = FunctionUse {
        function: "first".into(),
        registers: 255,
        stack_bytes: 8,
        spill_store_bytes: 12,
        spill_load_bytes: 16,
        shared_bytes: 4096,
    };
    let second = FunctionUse { function: "second".into(), registers: 40, ..FunctionUse::default() };
    assert_eq!(uses, [first, second]);
}

#[test]
fn a_cubin_tells_its_parameters() {
    let Some(nvrtc) = compiler() else { return };
    let text = "struct S { void* a; int b; int c; };\n\
        extern \"C\" __global__ void one(float* y, unsigned n, unsigned long long k, S s) { y[0] = n + k + s.b; }\n\
        extern \"C\" __global__ void none() {}";
    let image = nvrtc.compile(&unit(text), "sm_90a", &Cache::off()).unwrap().image;
    assert_eq!(parameter_sizes(&image, "one"), Some(vec![8, 4, 8, 16]));
    assert_eq!(parameter_sizes(&image, "none"), Some(vec![]));
    assert_eq!(parameter_sizes(&image, "on"), None);
}

/// Every kernel that the sample models launch compiles, and declares the parameters that its launches pass.
#[test]
fn launches_pass_what_their_kernels_declare() {
    let Some(nvrtc) = compiler() else { return };
    let launches = sample_launches();
    let kernels: BTreeSet<&Kernel> = launches.iter().map(|launch| &launch.kernel).collect();
    let units: BTreeSet<Unit> =
        kernels.iter().map(|kernel| Unit { name: kernel.source.into(), text: kernel.unit() }).collect();
    let units: Vec<Unit> = units.into_iter().collect();
    let cubins = nvrtc.compile_all(&units, "sm_90a", &Cache::of_user(), 2).unwrap();
    for launch in &launches {
        let unit = launch.kernel.unit();
        let index = units.iter().position(|other| other.text == unit).unwrap();
        let given = launch.args.iter().map(|arg| if matches!(arg, Arg::U32(_)) { 4 } else { 8 }).collect();
        assert_eq!(parameter_sizes(&cubins[index].image, launch.kernel.function), Some(given), "{:?}", launch.kernel);
    }
}

/// Launches of the peer-to-peer exchange between 2, 4 and 8 ranks, at a decode shape and at one that goes in pieces.
fn exchange_launches() -> Vec<Launch> {
    let mut limits = samples::limits();
    (limits.buckets, limits.prefill_chunk) = (vec![4, 512], 512);
    let mut launches = Vec::new();
    for ranks in [2, 4, 8] {
        for bucket in [4, 512] {
            let spec = samples::deepseek_on_cuda();
            let plan = crate::model::build(&spec, &limits, RankShape { rank: 1, ranks }, bucket).unwrap();
            let exchanges =
                plan.ops_with_next().filter(|(placed, _)| matches!(placed.op, slotgraph_kernels::Op::Exchange(_)));
            launches.extend(
                exchanges
                    .flat_map(|(placed, next)| placed.op.launches_over_peers(next, &plan, &GpuFacts::h200()).unwrap()),
            );
        }
    }
    launches
}

/// The exchange compiles for every architecture, without spills, and takes what its launches pass.
#[test]
fn the_exchange_compiles_for_every_architecture() {
    let Some(nvrtc) = compiler() else { return };
    let launches = exchange_launches();
    assert!(launches.iter().any(|launch| launch.args.contains(&Arg::U32(256))), "a long shape goes in pieces");
    let kernels: BTreeSet<&Kernel> = launches.iter().map(|launch| &launch.kernel).collect();
    assert_eq!(kernels.len(), 3 * 2, "few rows and many, for each number of ranks");
    for arch in ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"] {
        for kernel in &kernels {
            let unit = Unit { name: kernel.source.into(), text: kernel.unit() };
            let cubin = nvrtc.compile(&unit, arch, &Cache::of_user()).unwrap();
            let uses = function_uses(&cubin.log);
            assert!(uses.iter().all(|uses| uses.spill_store_bytes == 0 && uses.stack_bytes == 0), "{arch}: {uses:?}");
            assert!(
                uses[0].registers <= 80,
                "a block leaves others a place beside it: {arch}, {:?}: {uses:?}",
                kernel.defines
            );
            let launch = launches.iter().find(|launch| launch.kernel == **kernel).unwrap();
            let given = launch.args.iter().map(|arg| if matches!(arg, Arg::U32(_)) { 4 } else { 8 }).collect();
            assert_eq!(parameter_sizes(&cubin.image, "exchange"), Some(given));
        }
    }
}

fn sample_launches() -> Vec<Launch> {
    let mut limits = samples::limits();
    limits.buckets = vec![1, 16];
    let mut launches: Vec<Launch> = vec![stamp(0)];
    for spec in [samples::deepseek_on_cuda(), samples::qwen3()] {
        for bucket in limits.buckets.clone() {
            let plan = crate::model::build(&spec, &limits, RankShape::SINGLE, bucket).unwrap();
            launches.extend(plan.weights.iter().filter_map(|weight| pack::launch(&weight.form, 0..1)));
            launches.push(pack::dummy_launch(&plan.weights[0].parts[0], 0, 1));
            for (placed, next) in plan.ops_with_next() {
                launches.extend(placed.op.launches(next, &plan, &GpuFacts::h200()).unwrap());
            }
        }
    }
    launches
}
