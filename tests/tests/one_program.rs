//! One program: a request's tokens and logprob bits are the same whatever bucket, neighbours, phase, rank count, thread count,
//! launch-ahead or prefill chunk served it. One factor at a time from the default.

use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_runtime::checkpoint::Checkpoint;
use slotgraph_runtime::config::{Config, Machine, Settings};
use slotgraph_tests::rig::{Ask, Bits, Rig, Said, bits};
use slotgraph_tests::{model, oracle};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

/// A model with its 18 cases and what they say one by one, by default.
struct Subject {
    checkpoint: Checkpoint,
    asks: Vec<Ask>,
    names: Vec<String>,
    alone: Vec<Said>,
}

impl Subject {
    fn new(folder: &str, file: &str, precision: &str) -> Subject {
        let checkpoint = Checkpoint::open(&model(folder)).unwrap();
        let cases = oracle::cases(file);
        assert_eq!(cases.len(), 18);
        let asks: Vec<Ask> = cases.iter().map(|case| Ask::greedy(&case.prompt_ids, case.tokens.len())).collect();
        let rig = Rig::start(&checkpoint, |settings| settings.precision = Some(precision.into()));
        let alone = rig.one_by_one(&asks);
        drop(rig);
        Subject { checkpoint, asks, names: cases.into_iter().map(|case| case.name).collect(), alone }
    }

    fn assert_same(&self, what: &str, said: &[Said]) {
        for ((name, alone), said) in self.names.iter().zip(&self.alone).zip(said) {
            assert_same_bits(&format!("{name}, {what}"), &alone.bits(), &said.bits());
        }
    }

    /// All cases at once among neighbours that come and go, under changed settings: the bits of the default, alone.
    fn assert_company(&self, what: &str, change: impl FnOnce(&mut Settings)) {
        let rig = Rig::start(&self.checkpoint, change);
        self.assert_same(what, &in_company(&rig, &self.asks));
    }
}

fn dsv2() -> &'static Subject {
    static SUBJECT: OnceLock<Subject> = OnceLock::new();
    SUBJECT.get_or_init(|| Subject::new("shakespeare-dsv2", "dsv2", "oracle"))
}

fn qwen3() -> &'static Subject {
    static SUBJECT: OnceLock<Subject> = OnceLock::new();
    SUBJECT.get_or_init(|| Subject::new("shakespeare-qwen3", "qwen3", "oracle"))
}

fn assert_same_bits(what: &str, want: &[Bits], got: &[Bits]) {
    assert_eq!(want.len(), got.len(), "{what}: number of tokens");
    if let Some(at) = (0..want.len()).find(|&at| want[at] != got[at]) {
        panic!("{what}: position {at} differs\n  want {:?}\n  got  {:?}", want[at], got[at]);
    }
}

/// The asks at once; beside them neighbours that finish early, sample at random, or leave after a few tokens.
fn in_company(rig: &Rig, asks: &[Ask]) -> Vec<Said> {
    let mut heard = Vec::new();
    let mut leaving = Vec::new();
    for (number, ask) in asks.iter().enumerate() {
        let neighbour = &asks[(number * 7 + 3) % asks.len()];
        let shortened = &neighbour.prompt[..neighbour.prompt.len().min(40)];
        match number % 3 {
            0 => leaving.push((rig.submit(&Ask::greedy(shortened, 400)), 2 + number)),
            1 => {
                let sampling = SamplingSpec { temperature: 1.0, seed: number as u64, ..SamplingSpec::greedy(5) };
                leaving.push((rig.submit(&Ask { sampling, ..Ask::greedy(shortened, 5) }), usize::MAX));
            }
            _ => {}
        }
        heard.push(rig.submit(ask));
    }
    for (pending, tokens) in leaving {
        pending.leave_after(tokens);
    }
    heard.into_iter().map(|pending| pending.hear()).collect()
}

#[test]
fn company_changes_no_bit() {
    for subject in [dsv2(), qwen3()] {
        subject.assert_company("in company", |_| {});
    }
}

#[test]
fn expert_parallel_degree_changes_no_bit() {
    for ep in [2, 4, 8] {
        dsv2().assert_company(&format!("ep {ep}"), |settings| settings.ep = Some(ep));
    }
}

#[test]
fn a_dense_model_refuses_expert_parallelism() {
    let settings = Settings { device: Some("cpu".into()), ep: Some(2), ..Settings::default() };
    let checkpoint = &qwen3().checkpoint;
    let machine = Machine { gpus: 0, processors: 2 };
    let refused = Config::resolve(&settings, &checkpoint.spec, &checkpoint.name, machine).unwrap_err();
    assert_eq!(refused.flag, "--ep");
}

#[test]
fn thread_count_changes_no_bit() {
    for subject in [dsv2(), qwen3()] {
        for threads in [1, 2] {
            subject.assert_company(&format!("{threads} threads"), |settings| settings.threads = Some(threads));
        }
    }
}

#[test]
fn launch_ahead_changes_no_bit() {
    for subject in [dsv2(), qwen3()] {
        for ahead in [0, 1, 2] {
            subject.assert_company(&format!("launch-ahead {ahead}"), |settings| settings.launch_ahead = Some(ahead));
        }
    }
}

#[test]
fn prefill_rows_a_step_change_no_bit_mixed_or_alone() {
    for subject in [dsv2(), qwen3()] {
        for rows in [64, 128, 512] {
            let rig = Rig::start(&subject.checkpoint, |settings| settings.prefill_chunk = Some(rows));
            subject.assert_same(&format!("{rows} prefill rows, mixed"), &in_company(&rig, &subject.asks));
            subject.assert_same(&format!("{rows} prefill rows, alone"), &rig.one_by_one(&subject.asks));
        }
    }
}

#[test]
fn contract_precision_is_one_program_too() {
    for (folder, file) in slotgraph_tests::TRAINED {
        let subject = Subject::new(folder, file, "contract");
        subject
            .assert_company("contract precision, in company", |settings| settings.precision = Some("contract".into()));
        if subject.checkpoint.spec.experts().is_some() {
            subject.assert_company("contract precision, ep 4", |settings| {
                settings.precision = Some("contract".into());
                settings.ep = Some(4);
            });
        }
    }
}

#[test]
fn scoring_a_finished_text_gives_the_bits_of_its_generation() {
    for subject in [dsv2(), qwen3()] {
        let rig = Rig::start(&subject.checkpoint, |settings| settings.prefill_chunk = Some(128));
        let texts: Vec<Ask> = subject
            .asks
            .iter()
            .zip(&subject.alone)
            .map(|(ask, said)| Ask::score(&[ask.prompt.clone(), said.ids()].concat()))
            .collect();
        for ((name, said), (ask, scored)) in
            subject.names.iter().zip(&subject.alone).zip(subject.asks.iter().zip(rig.together(&texts)))
        {
            assert_eq!(scored.prompt.len(), ask.prompt.len() + said.tokens.len() - 1, "{name}: scored positions");
            // Scored tokens start at prompt position 1.
            let generated = bits(&scored.prompt[ask.prompt.len() - 1..]);
            assert_same_bits(&format!("{name}, scored"), &said.bits(), &generated);
        }
    }
}

#[test]
fn a_pool_too_small_preempts_and_changes_no_bit() {
    for subject in [dsv2(), qwen3()] {
        // 2,048 tokens of context are 32 pages: the longest case fits alone, all of them together do not.
        let rig = Rig::start(&subject.checkpoint, |settings| {
            settings.kv_pages = Some(40);
            settings.reserve_tokens = Some(1);
        });
        let short: Vec<usize> = (0..subject.asks.len()).filter(|&at| subject.asks[at].prompt.len() < 600).collect();
        let said = rig.together(&subject.asks);
        subject.assert_same("in a small pool", &said);
        // Long answers of short prompts outgrow the pool while they run.
        let long: Vec<Ask> = short.iter().map(|&at| Ask::greedy(&subject.asks[at].prompt, 320)).collect();
        for (&at, said) in short.iter().zip(rig.together(&long)) {
            assert_same_bits(
                &subject.names[at],
                &subject.alone[at].bits(),
                &said.bits()[..subject.alone[at].tokens.len()],
            );
        }
        assert!(rig.handle.load().preemptions.load(Relaxed) > 0, "the pool was small enough to preempt");
    }
}

#[test]
fn sampled_answers_are_worth_the_same_in_any_company() {
    for subject in [dsv2(), qwen3()] {
        let sampled: Vec<Ask> = subject
            .asks
            .iter()
            .enumerate()
            .filter(|(_, ask)| ask.prompt.len() < 130)
            .map(|(number, ask)| {
                let sampling = SamplingSpec {
                    temperature: 0.5 + 0.1 * number as f32,
                    top_p: if number % 2 == 0 { 0.9 } else { 1.0 },
                    top_k: if number % 3 == 0 { 40 } else { 0 },
                    min_p: if number % 5 == 0 { 0.05 } else { 0.0 },
                    presence_penalty: if number % 4 == 1 { 0.7 } else { 0.0 },
                    frequency_penalty: if number % 4 == 1 { 0.3 } else { 0.0 },
                    repetition_penalty: if number % 4 == 2 { 1.2 } else { 1.0 },
                    seed: 1000 + number as u64,
                    ..ask.sampling.clone()
                };
                Ask { sampling, ..ask.clone() }
            })
            .collect();
        let rig = Rig::start(&subject.checkpoint, |_| {});
        let alone = rig.one_by_one(&sampled);
        let company = in_company(&rig, &sampled);
        let again = Rig::start(&subject.checkpoint, |settings| settings.launch_ahead = Some(0));
        for (at, (alone, company)) in alone.iter().zip(&company).enumerate() {
            assert_same_bits(&format!("sampled {at}, in company"), &alone.bits(), &company.bits());
            assert_same_bits(
                &format!("sampled {at}, another engine"),
                &alone.bits(),
                &again.submit(&sampled[at]).hear().bits(),
            );
        }
        let distinct: std::collections::HashSet<Vec<u32>> = alone.iter().map(Said::ids).collect();
        assert!(distinct.len() > 1, "sampling does something");
    }
}
