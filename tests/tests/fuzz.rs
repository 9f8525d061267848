//! Every fuzz target over its corpus and a second of seeded mutations; a failure prints the seed, the input's number and the input.

use slotgraph_tests::fuzz::{TARGETS, run};
use std::path::Path;

fn fuzz(name: &str) {
    let (_, target) = TARGETS.into_iter().find(|(known, _)| *known == name).expect("a target");
    let inputs = run::run(name, target, Path::new(env!("CARGO_TARGET_TMPDIR")));
    println!("{name}: {inputs} mutated inputs");
    assert!(inputs > 0);
}

macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            fuzz(stringify!($name));
        })*

        #[test]
        fn every_target_is_run_here_and_by_libfuzzer() {
            let here = [$(stringify!($name)),*];
            assert_eq!(here, TARGETS.map(|(name, _)| name));
            for name in here {
                let file = slotgraph_tests::root().join("fuzz/fuzz_targets").join(format!("{name}.rs"));
                let text = std::fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
                assert!(text.contains(&format!("fuzz::{name}(")), "{text}");
            }
        }
    };
}

targets!(
    completion_body,
    chat_body,
    tokenize_body,
    detokenize_body,
    config_json,
    safetensors_header,
    weights_index,
    tokenizer_stream,
    stop_strings,
    chat_template,
    path,
);
