//! Whole checkpoints: every bundled model opens with the spec its config describes, and its weights read back as the files hold them.

use slotgraph_graphs::model::build;
use slotgraph_graphs::plan::RankShape;
use slotgraph_graphs::source::group_extents;
use slotgraph_graphs::spec::{Attention, Family, Gqa, Mla, Mlp, Moe};
use slotgraph_graphs::step::StepLimits;
use slotgraph_kernels::WeightForm;
use slotgraph_kernels::ops::{Routing, TopkMethod};
use slotgraph_runtime::checkpoint::write::{Order, write_dummy};
use slotgraph_runtime::checkpoint::{Checkpoint, Folder, LoadFormat};
use std::fs;
use std::path::PathBuf;

fn model(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/models").join(name)
}

fn shape(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/shapes").join(name)
}

fn limits() -> StepLimits {
    StepLimits {
        slots_max: 2,
        pages: 9,
        pages_per_slot: 4,
        buckets: vec![1, 2],
        launch_ahead: 1,
        max_model_len: 256,
        prefill_chunk: 2,
    }
}

#[test]
fn the_demo_model_is_what_its_config_says() {
    let demo = Checkpoint::open(&model("shakespeare-dsv2")).unwrap();
    assert_eq!((demo.name.as_str(), demo.weights.shards), ("shakespeare-dsv2", 2));
    assert_eq!((demo.weights.parameters, demo.weights.bytes), (4_979_200, 9_958_400));
    assert_eq!(demo.warnings, Vec::<String>::new());
    let spec = &demo.spec;
    assert_eq!((spec.family, spec.hidden, spec.layers, spec.vocab), (Family::DeepseekV2, 256, 4, 2048));
    assert_eq!((spec.positions, spec.norm_eps, spec.tied_head), (2048, 1e-6, false));
    assert_eq!((spec.eos_ids.as_slice(), spec.bos_id), ([1].as_slice(), Some(0)));
    // 48^-0.5 · (0.1 · 0.707 · ln 4 + 1)², worked by hand.
    let scale = 0.144_337_57 * 1.098_010_9 * 1.098_010_9;
    let Attention::Mla(mla) = &spec.attention else { panic!("not latent attention") };
    assert!((mla.scale - scale).abs() < 1e-7, "{}", mla.scale);
    let expected = Mla {
        heads: 8,
        q_lora: None,
        kv_lora: 64,
        nope_dim: 32,
        rope_dim: 16,
        v_dim: 32,
        scale: mla.scale,
        bias: false,
    };
    assert_eq!(*mla, expected);
    let routing = Routing { experts: 16, top_k: 4, method: TopkMethod::Greedy, norm_topk_prob: false, scaling: 1.0 };
    let moe = Moe { routing, expert_inner: 64, shared_inner: 128, dense_inner: 512, first_moe_layer: 1, layer_freq: 1 };
    assert_eq!(spec.mlp, Mlp::Moe(moe));
    assert_eq!(spec.rope.inv_freq_bits.len(), 8);
    assert_eq!(f32::from_bits(spec.rope.scale_bits), 1.0);
}

#[test]
fn both_spellings_of_the_config_mean_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    fs::copy(model("shakespeare-dsv2").join("config.v5.json"), folder.path().join("config.json")).unwrap();
    let newer = Checkpoint::dummy(folder.path(), 0).unwrap();
    let older = Checkpoint::dummy(&model("shakespeare-dsv2"), 0).unwrap();
    assert_eq!(newer.spec, older.spec);
}

#[test]
fn the_other_models_open_with_their_own_variants() {
    let grouped = Checkpoint::open(&model("tiny-dsv2-grouped")).unwrap().spec;
    let Attention::Mla(mla) = &grouped.attention else { panic!() };
    assert_eq!((mla.q_lora, mla.scale), (Some(48), (48.0_f64).sqrt().recip() as f32));
    let Mlp::Moe(moe) = &grouped.mlp else { panic!() };
    let method = TopkMethod::GroupLimitedGreedy { groups: 4, topk_groups: 2 };
    assert_eq!(moe.routing, Routing { experts: 16, top_k: 3, method, norm_topk_prob: false, scaling: 4.0 });
    assert_eq!((moe.first_moe_layer, moe.shared_inner), (2, 64));

    let qwen = Checkpoint::open(&model("shakespeare-qwen3")).unwrap().spec;
    let gqa = Gqa { heads: 8, kv_heads: 2, head_dim: 64, qk_norm: true, qkv_bias: false, o_bias: false, scale: 0.125 };
    assert_eq!((qwen.attention, qwen.tied_head, qwen.mlp), (Attention::Gqa(gqa), true, Mlp::Dense { inner: 768 }));

    let untied = Checkpoint::open(&model("tiny-qwen3-untied")).unwrap().spec;
    let Attention::Gqa(gqa) = &untied.attention else { panic!() };
    assert_eq!((gqa.head_dim, gqa.kv_heads, gqa.qkv_bias, gqa.o_bias), (48, 3, true, true));
    assert!(!untied.tied_head);

    let llama = Checkpoint::open(&model("tiny-llama3")).unwrap().spec;
    let Attention::Gqa(gqa) = &llama.attention else { panic!() };
    assert_eq!((llama.family, gqa.qk_norm, llama.norm_eps), (Family::Llama, false, 1e-5));
    assert_ne!(llama.rope.inv_freq_bits[15], (500000.0_f32).powf(-30.0 / 32.0).to_bits());
}

#[test]
fn real_shapes_need_only_their_config() {
    let lite = Checkpoint::dummy(&shape("deepseek-v2-lite"), 7).unwrap();
    assert_eq!(lite.weights.parameters, 15_706_484_224);
    let Attention::Mla(mla) = &lite.spec.attention else { panic!() };
    assert!((mla.scale - 0.1147214).abs() < 1e-7);
    assert_eq!(f32::from_bits(lite.spec.rope.scale_bits), 1.0);
    let qwen = Checkpoint::dummy(&shape("qwen3-4b"), 7).unwrap();
    assert_eq!((qwen.weights.parameters, qwen.spec.kv_width()), (4_022_468_096, 2048));
    assert_ne!(lite.model_sha256(), Checkpoint::dummy(&shape("deepseek-v2-lite"), 8).unwrap().model_sha256());
}

#[test]
fn a_bundled_model_is_the_same_as_its_folder() {
    macro_rules! files {
        ($($name:literal),*) => { &[$(($name, include_bytes!(concat!("../../../tests/models/tiny-llama3/", $name)))),*] };
    }
    let files: &'static [(&'static str, &'static [u8])] =
        files!("config.json", "generation_config.json", "tokenizer.json", "model.safetensors");
    let (bundled, folder) =
        (Checkpoint::embedded("tiny", files).unwrap(), Checkpoint::open(&model("tiny-llama3")).unwrap());
    assert_eq!((bundled.name.as_str(), &bundled.spec), ("tiny", &folder.spec));
    assert_eq!(bundled.model_sha256(), folder.model_sha256());
    assert_eq!(bundled.file("tokenizer.json").unwrap(), folder.file("tokenizer.json").unwrap());
    assert_eq!(bundled.file("chat_template.jinja").unwrap(), None);
    for spec in build(&folder.spec, &limits(), RankShape::SINGLE, 1).unwrap().weights {
        let (rows, columns) = group_extents(&spec.form);
        if rows > 0 {
            let (mut a, mut b) = (vec![1u16; rows * columns], vec![2u16; rows * columns]);
            bundled.source().read(&spec, 0, &mut a).unwrap();
            folder.source().read(&spec, 0, &mut b).unwrap();
            assert!(a == b, "{}", spec.name);
        }
    }
}

/// Every weight of the plan, read whole and in pieces, against the file's own bytes.
fn check_weights(name: &str) {
    let folder = model(name);
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            files.push(fs::read(path).unwrap());
        }
    }
    let tensors: Vec<_> = files.iter().map(|bytes| safetensors::SafeTensors::deserialize(bytes).unwrap()).collect();
    let tensor = |name: &str| -> Vec<u16> {
        let view = tensors.iter().find_map(|file| file.tensor(name).ok()).unwrap();
        view.data().chunks(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()
    };
    let source = checkpoint.source();
    for spec in build(&checkpoint.spec, &limits(), RankShape::SINGLE, 1).unwrap().weights {
        let groups = match spec.form {
            WeightForm::Gemm { groups, .. } => groups,
            WeightForm::Rope(_) => continue,
            _ => 1,
        };
        let (rows, columns) = group_extents(&spec.form);
        for group in 0..groups {
            let mut expected = vec![0u16; rows * columns];
            for part in spec.parts.iter().filter(|part| part.group == group) {
                let across: usize = part.tensor_shape[1..].iter().product();
                let values = tensor(&part.tensor);
                for (i, row) in part.rows.clone().enumerate() {
                    for column in 0..across {
                        let (r, c) = if part.transpose { (column, i) } else { (i, column) };
                        expected[(part.dst_row + r) * columns + c] = values[row * across + column];
                    }
                }
            }
            let mut read = vec![0xffff; rows * columns];
            source.read(&spec, group, &mut read).unwrap();
            assert!(read == expected, "{name}: {} group {group}", spec.name);
            let (from, to) = (rows / 3, rows - rows / 5);
            let mut piece = vec![0xffff; (to - from) * columns];
            source.read_rows(&spec, group, from..to, &mut piece).unwrap();
            assert!(piece == expected[from * columns..to * columns], "{name}: {} rows {from}..{to}", spec.name);
        }
    }
}

#[test]
fn weights_read_back_as_the_files_hold_them() {
    for name in ["shakespeare-dsv2", "shakespeare-qwen3", "tiny-dsv2-grouped", "tiny-llama3", "tiny-qwen3-untied"] {
        check_weights(name);
    }
}

#[test]
fn a_made_checkpoint_holds_exactly_the_dummy_weights() {
    let scratch = tempfile::tempdir().unwrap();
    let out = scratch.path().join("made");
    let order = Order { shape: &model("tiny-dsv2-grouped"), out: &out, seed: 42, shard_bytes: 1 << 20 };
    let mut last = (0, 0);
    let made = write_dummy(&order, |done, all| last = (done, all)).unwrap();
    assert!(made.shards > 2, "{made:?}");
    assert_eq!(last, (made.bytes, made.bytes));
    let files = Checkpoint::open(&out).unwrap();
    assert_eq!((files.weights.parameters, files.weights.shards), (made.parameters, made.shards));
    let dummy = Checkpoint::load(Folder::Disk(out.clone()), LoadFormat::Dummy { seed: 42 }).unwrap();
    assert_eq!(dummy.source().dummy().map(|d| d.seed), Some(42));
    assert!(files.source().dummy().is_none());
    for spec in build(&files.spec, &limits(), RankShape::SINGLE, 1).unwrap().weights {
        let (rows, columns) = group_extents(&spec.form);
        let (mut a, mut b) = (vec![1u16; rows * columns], vec![2u16; rows * columns]);
        if rows > 0 {
            files.source().read(&spec, 0, &mut a).unwrap();
            dummy.source().read(&spec, 0, &mut b).unwrap();
            assert!(a == b, "{}", spec.name);
            if spec.name.contains("norm") {
                assert!(a.iter().all(|bits| *bits == 0x3f80), "{} is not ones", spec.name);
            }
        }
    }
    let refused = write_dummy(&order, |_, _| ()).unwrap_err().to_string();
    assert!(refused.contains("is not empty"), "{refused}");
}
