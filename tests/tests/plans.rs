//! Golden plans: the text of what every model's step is made of. `UPDATE_GOLDEN=1` rewrites the files; read the diff.

use slotgraph_graphs::model::build;
use slotgraph_graphs::plan::RankShape;
use slotgraph_graphs::spec::ModelSpec;
use slotgraph_graphs::step::StepLimits;
use slotgraph_kernels::contract::PAGE_TOKENS;
use slotgraph_runtime::checkpoint::Checkpoint;
use slotgraph_tests::{MODELS, model, root};

fn limits(slots_max: usize, bucket: usize, max_model_len: usize) -> StepLimits {
    StepLimits {
        slots_max,
        pages: 128,
        pages_per_slot: max_model_len.div_ceil(PAGE_TOKENS),
        buckets: vec![bucket],
        launch_ahead: 1,
        max_model_len,
        prefill_chunk: bucket,
    }
}

/// Compares the plan's text with its golden file, or writes it.
fn golden(name: &str, spec: &ModelSpec, limits: &StepLimits, rank: RankShape) {
    let plan = build(spec, limits, rank, limits.rows_max()).unwrap_or_else(|error| panic!("{name}: {error}"));
    let text = plan.to_string();
    let path = root().join("tests/golden").join(format!("{name}.txt"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::create_dir_all(path.parent().expect("a file lies in a folder")).unwrap();
        std::fs::write(&path, &text).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let first = expected.lines().zip(text.lines()).position(|(expected, got)| expected != got);
    if let Some(line) = first {
        let at = |text: &str| text.lines().nth(line).unwrap_or_default().to_owned();
        panic!("{name}, line {}:\n  golden {}\n  now    {}", line + 1, at(&expected), at(&text));
    }
    assert_eq!(expected.len(), text.len(), "{name}: one text goes on where the other ends");
}

#[test]
fn plans_of_the_test_models() {
    for (name, _) in MODELS {
        let spec = Checkpoint::open(&model(name)).unwrap_or_else(|error| panic!("{name}: {error}")).spec;
        golden(name, &spec, &limits(16, 8, 512), RankShape::SINGLE);
    }
}

#[test]
fn plan_of_one_rank_of_four() {
    let spec = Checkpoint::open(&model("shakespeare-dsv2")).unwrap().spec;
    golden("shakespeare-dsv2-rank-1-of-4", &spec, &limits(16, 8, 512), RankShape { rank: 1, ranks: 4 });
}

#[test]
fn plans_of_real_shapes() {
    for name in ["deepseek-v2-lite", "qwen3-4b"] {
        let folder = root().join("tests/shapes").join(name);
        let spec = Checkpoint::dummy(&folder, 0).unwrap_or_else(|error| panic!("{name}: {error}")).spec;
        golden(name, &spec, &limits(128, 128, 4096), RankShape::SINGLE);
    }
}
