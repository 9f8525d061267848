//! sample: from logits to a token, against numbers worked by hand and a second writing of the noise.

use crate::rig::Random;
use crate::station::{Entry, Station, given, greedy, sampled, scored};
use slotgraph_kernels::entry::{SLOT_WORDS, feature, row, slot};

type Params = [u32; SLOT_WORDS];

/// What the sampler does with `logits` for the slot that `change` describes, at `position`.
struct Ask<'a> {
    features: u32,
    change: &'a dyn Fn(&mut Params),
    bias: Vec<[u32; 2]>,
    /// Tokens given before the sampled row: (token, generated before).
    history: &'a [(u32, bool)],
}

const PLAIN: Ask = Ask { features: 0, change: &|_| {}, bias: Vec::new(), history: &[] };

impl Ask<'_> {
    fn station(&self, logits: &[f32], position: u32) -> Station {
        let mut station = Station::new(logits.len());
        let mut params = greedy(0, 1);
        (self.change)(&mut params);
        params[slot::BIAS_COUNT] = self.bias.len() as u32;
        let mut rows: Vec<[u32; 5]> = (0..)
            .zip(self.history)
            .map(|(at, &(token, generated))| given(0, 1, token, at, if generated { row::GENERATED } else { 0 }))
            .collect();
        rows.push(given(0, 1, 0, position, 0));
        let entry = Entry {
            features: self.features,
            new: vec![params],
            logit_rows: vec![sampled(rows.len() as u32 - 1)],
            rows,
            bias: self.bias.clone(),
            ..Entry::default()
        };
        station.fetch(&entry).unwrap();
        station.logits(0).copy_from_slice(logits);
        station.sample();
        station
    }

    fn token(&self, logits: &[f32], position: u32) -> u32 {
        let station = self.station(logits, position);
        station.word(station.sample.token, 0)
    }

    /// How often each id comes up over `draws` positions.
    fn tally(&self, logits: &[f32], draws: u32) -> Vec<u32> {
        let mut tally = vec![0; logits.len()];
        (0..draws).for_each(|position| tally[self.token(logits, position) as usize] += 1);
        tally
    }

    /// The ids that come up over 300 positions.
    fn drawn(&self, logits: &[f32]) -> Vec<usize> {
        let tally = self.tally(logits, 300);
        (0..logits.len()).filter(|&id| tally[id] > 0).collect()
    }
}

fn set(params: &mut Params, field: usize, value: f32) {
    params[field] = value.to_bits();
}

/// A random slot with these truncations; 0, 0, 1 leave one off.
fn truncated(temperature: f32, min_p: f32, top_k: u32, top_p: f32) -> impl Fn(&mut Params) {
    move |params| {
        params[slot::FLAGS] = slot::TRUNCATION;
        params[slot::SEED_LO] = 77;
        set(params, slot::TEMPERATURE, temperature);
        set(params, slot::MIN_P, min_p);
        params[slot::TOP_K] = top_k;
        set(params, slot::TOP_P, top_p);
    }
}

#[test]
fn equal_maxima_go_to_the_lowest_id() {
    let mut logits = vec![0.0; 151_936];
    [7, 900, 151_000].into_iter().for_each(|id: usize| logits[id] = 3.5);
    let ask = Ask {
        features: feature::LOGPROBS | feature::TOP_LOGPROBS,
        change: &|params| {
            params[slot::FLAGS] |= slot::LOGPROBS;
            params[slot::TOP_LOGPROBS] = 5;
        },
        ..PLAIN
    };
    let station = ask.station(&logits, 0);
    assert_eq!(station.word(station.sample.token, 0), 7);
    assert_eq!(station.word(station.sample.rank, 0), 1);
    assert_eq!(station.memory.u32(station.sample.top_ids)[..6], [7, 900, 151_000, 0, 1, 0]);
    let random = Ask { features: feature::RANDOM | feature::TRUNCATION, change: &truncated(1.0, 0.0, 1, 1.0), ..PLAIN };
    assert_eq!(random.token(&logits, 3), 7);
}

#[test]
fn logprobs_are_of_the_raw_distribution() {
    // softmax [2, 1, 0, −1] = 0.643914, 0.236883, 0.087144, 0.032059.
    let logits = [0.0, 2.0, -1.0, 1.0];
    let ask = Ask {
        features: feature::LOGPROBS | feature::TOP_LOGPROBS | feature::BIAS,
        change: &|params| {
            params[slot::FLAGS] |= slot::LOGPROBS | slot::BIAS;
            params[slot::TOP_LOGPROBS] = 20;
        },
        bias: vec![[2, 50.0_f32.to_bits()]],
        ..PLAIN
    };
    let station = ask.station(&logits, 0);
    assert_eq!([station.sample.token, station.sample.rank].map(|id| station.word(id, 0)), [2, 4], "the bias chose it");
    assert!((station.memory.f32(station.sample.logprob)[0] - 0.032_059_f32.ln()).abs() < 2e-5);
    assert_eq!(station.memory.u32(station.sample.top_ids)[..5], [1, 3, 0, 2, 0]);
    let top = &station.memory.f32(station.sample.top_logprobs)[..4];
    for (logprob, p) in top.iter().zip([0.643_914_f32, 0.236_883, 0.087_144, 0.032_059]) {
        assert!((logprob - p.ln()).abs() < 2e-5, "{top:?}");
    }
}

#[test]
fn a_scored_target_s_rank_counts_larger_logits_and_equal_ones_before_it() {
    let mut station = Station::new(6);
    let rows = (0..4).map(|at| given(0, 1, 0, at, 0)).collect();
    let logit_rows = [0, 2, 3, 5].into_iter().zip(0..).map(|(target, at)| scored(at, target)).collect();
    let entry = Entry { features: feature::SCORE, new: vec![greedy(0, 1)], rows, logit_rows, ..Entry::default() };
    station.fetch(&entry).unwrap();
    (0..4).for_each(|at| station.logits(at).copy_from_slice(&[1.0, 4.0, 1.0, -2.0, 4.0, 1.0]));
    station.sample();
    assert_eq!(station.memory.u32(station.sample.token), [0, 2, 3, 5]);
    assert_eq!(station.memory.u32(station.sample.rank), [3, 4, 6, 5]);
}

#[test]
fn penalties_by_hand() {
    // Id 0 in the prompt, id 1 generated twice, id 2 both, id 3 never.
    let history = [(0, false), (1, true), (1, true), (2, false), (2, true)];
    let with = |repetition: f32, frequency: f32, presence: f32| {
        move |params: &mut Params| {
            params[slot::FLAGS] |= slot::PENALTIES;
            set(params, slot::REPETITION, repetition);
            set(params, slot::FREQUENCY, frequency);
            set(params, slot::PRESENCE, presence);
        }
    };
    let token = |repetition, frequency, presence, logits: [f32; 5]| {
        let change = with(repetition, frequency, presence);
        Ask { features: feature::PENALTIES, change: &change, history: &history, ..PLAIN }.token(&logits, 9)
    };
    // The prompt's last row is given too: id 0.
    assert_eq!(token(2.0, 0.0, 0.0, [3.9, 3.0, 3.0, 2.0, 0.0]), 3, "3.9 / 2 = 1.95");
    assert_eq!(token(2.0, 0.0, 0.0, [4.1, 3.0, 3.0, 2.0, 0.0]), 0, "4.1 / 2 = 2.05");
    assert_eq!(token(2.0, 0.0, 0.0, [-1.0, -9.0, -9.0, -1.9, -9.0]), 3, "−1 · 2 = −2");
    assert_eq!(token(1.0, 0.5, 0.0, [1.0, 2.5, 1.0, 1.6, 0.0]), 3, "2.5 − 2 · 0.5 = 1.5");
    assert_eq!(token(1.0, 0.5, 0.0, [1.0, 2.7, 1.0, 1.6, 0.0]), 1, "2.7 − 2 · 0.5 = 1.7");
    assert_eq!(token(1.0, 0.0, 0.5, [1.0, 2.0, 1.0, 1.6, 0.0]), 3, "once, however often: 2 − 0.5 = 1.5");
    assert_eq!(token(1.0, 0.0, 0.5, [2.0, 2.2, 1.0, 1.6, 0.0]), 0, "presence is of generated tokens: 2.2 − 0.5 < 2");
    assert_eq!(token(2.0, 0.0, 0.6, [0.0, 3.0, 0.0, 0.95, 0.0]), 3, "repetition first: 3 / 2 − 0.6 = 0.9");
}

#[test]
fn no_stop_is_drawn_before_min_tokens() {
    let with = |generated: u32| {
        move |params: &mut Params| {
            params[slot::GENERATED] = generated;
            params[slot::MIN_TOKENS] = 5;
            params[slot::FLAGS] |= slot::IGNORE_EOS;
            params[slot::EOS_COUNT] = 2;
            params[slot::EOS_IDS..][..2].copy_from_slice(&[4, 3]);
            params[slot::STOP_COUNT] = 1;
            params[slot::STOP_IDS] = 2;
        }
    };
    let logits = [0.0, 1.0, 2.0, 3.0, 4.0];
    let token = |generated, features| Ask { features, change: &with(generated), ..PLAIN }.token(&logits, 0);
    assert_eq!(token(4, feature::MIN_TOKENS), 1);
    assert_eq!(token(5, feature::MIN_TOKENS), 4);
    assert_eq!(token(4, 0), 4, "the step's mask leaves the part out");
}

#[test]
fn parts_that_the_mask_leaves_out_do_nothing() {
    let change = |params: &mut Params| {
        params[slot::FLAGS] = slot::PENALTIES | slot::BIAS | slot::TRUNCATION | slot::LOGPROBS;
        set(params, slot::TEMPERATURE, 5.0);
        set(params, slot::REPETITION, 9.0);
    };
    let ask = Ask { change: &change, bias: vec![[0, 9.0_f32.to_bits()]], history: &[(1, false)], ..PLAIN };
    let station = ask.station(&[0.0, 1.0, 0.9], 4);
    assert_eq!([station.sample.token, station.sample.rank].map(|id| station.word(id, 0)), [1, 0]);
    let cold = |params: &mut Params| set(params, slot::TEMPERATURE, 9e-6);
    let cold = Ask { features: feature::RANDOM, change: &cold, ..PLAIN };
    assert_eq!(cold.drawn(&[0.0, 1.0, 0.9]), [1], "below the least temperature sampling is greedy");
}

#[test]
fn truncation_keeps_the_ids_that_it_should() {
    // p = 0.5, 0.3, 0.15, 0.05, in no order.
    let p = [0.15_f32, 0.5, 0.05, 0.3];
    let logits = p.map(|p| p.ln() + 3.0);
    let drawn = |temperature, min_p, top_k, top_p| {
        let change = truncated(temperature, min_p, top_k, top_p);
        Ask { features: feature::RANDOM | feature::TRUNCATION, change: &change, ..PLAIN }.drawn(&logits)
    };
    assert_eq!(drawn(1.0, 0.0, 0, 1.0), [0, 1, 2, 3]);
    assert_eq!(drawn(1.0, 0.0, 2, 1.0), [1, 3]);
    assert_eq!(drawn(1.0, 0.0, 4, 1.0), [0, 1, 2, 3]);
    assert_eq!(drawn(1.0, 0.0, 0, 0.79), [1, 3]);
    assert_eq!(drawn(1.0, 0.0, 0, 0.81), [0, 1, 3]);
    assert_eq!(drawn(1.0, 0.0, 0, 0.49), [1]);
    assert_eq!(drawn(1.0, 0.0, 0, 0.0), [1], "the top one always survives");
    assert_eq!(drawn(1.0, 0.59, 0, 1.0), [1, 3], "0.59 · 0.5 = 0.295");
    assert_eq!(drawn(1.0, 0.61, 0, 1.0), [1]);
    assert_eq!(drawn(1.0, 1.0, 0, 1.0), [1]);
    assert_eq!(drawn(1.0, 0.0, 2, 0.62), [1], "renormalised over top_k: 0.5 / 0.8 = 0.625");
    assert_eq!(drawn(1.0, 0.0, 2, 0.63), [1, 3]);
    // At temperature 2 the weights are √p = 0.3794, 0.2939, 0.2078, 0.1200 of their sum.
    assert_eq!(drawn(2.0, 0.0, 0, 0.66), [1, 3]);
    assert_eq!(drawn(2.0, 0.0, 0, 0.69), [0, 1, 3]);
    assert_eq!(drawn(2.0, 0.7, 0, 1.0), [1, 3], "0.3 / 0.5 = 0.6, and its root 0.77");
}

#[test]
fn truncation_among_ties_keeps_the_lowest_ids() {
    let drawn = |top_k, top_p| {
        let change = truncated(1.0, 0.0, top_k, top_p);
        Ask { features: feature::RANDOM | feature::TRUNCATION, change: &change, ..PLAIN }
            .drawn(&[0.0, 2.0, 2.0, 2.0, 2.0, 1.0])
    };
    assert_eq!(drawn(2, 1.0), [1, 2]);
    assert_eq!(drawn(4, 0.5), [1, 2]);
    assert_eq!(drawn(4, 0.51), [1, 2, 3]);
}

#[test]
fn a_long_nucleus_is_what_sorting_everything_gives() {
    let mut random = Random(41);
    for top_p in [0.3_f32, 0.9, 0.995] {
        let logits = random.floats(3000, 1.5);
        let mut sorted: Vec<usize> = (0..3000).collect();
        sorted.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
        let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        let mut mass = 0.0;
        let kept = sorted.iter().take_while(|&&id| {
            let before = mass;
            mass += f64::from(logits[id]).exp() / total;
            before < f64::from(top_p)
        });
        let mut kept: Vec<usize> = kept.copied().collect();
        kept.sort_unstable();
        // Sixty-four thousand draws would be slow; an id outside must never win, and inside the noise decides.
        let change = truncated(1.0, 0.0, 0, top_p);
        let ask = Ask { features: feature::RANDOM | feature::TRUNCATION, change: &change, ..PLAIN };
        for position in 0..200 {
            let inside = noisy_argmax(&logits, kept.iter().copied(), [77, 0], 0, position);
            assert_eq!(ask.token(&logits, position) as usize, inside, "top_p {top_p}, position {position}");
        }
    }
}

/// Philox4x32-10 and the Gumbel argmax, written again from the papers.
fn noisy_argmax(l: &[f32], ids: impl Iterator<Item = usize>, key: [u32; 2], choice: u32, position: u32) -> usize {
    let word = |id: usize| {
        let (mut c, mut k) = ([choice, position, id as u32 / 4, 0], key);
        for _ in 0..10 {
            let [a, b] = [u64::from(c[0]) * 0xD251_1F53, u64::from(c[2]) * 0xCD9E_8D57];
            c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
            k = [k[0].wrapping_add(0x9E37_79B9), k[1].wrapping_add(0xBB67_AE85)];
        }
        c[id % 4]
    };
    let value = |id: usize| {
        let u = ((word(id) >> 9) as f32 + 0.5) / 8_388_608.0;
        l[id] + -libm::logf(-libm::logf(u))
    };
    ids.fold(None, |best: Option<(usize, f32)>, id| match best {
        Some((_, highest)) if highest >= value(id) => best,
        _ => Some((id, value(id))),
    })
    .expect("some id")
    .0
}

#[test]
fn noise_is_that_of_seed_choice_position_and_id() {
    let mut random = Random(42);
    for (position, spread) in [0.1, 1.0, 5.0, 12.0, 30.0].into_iter().cycle().take(100).enumerate() {
        let position = position as u32;
        let logits = random.floats(303, spread);
        let [seed_lo, seed_hi, choice] = [random.next() as u32, random.next() as u32, random.below(9) as u32];
        let temperature = [0.5_f32, 1.0, 1.7][random.below(3)];
        let change = |params: &mut Params| {
            params[slot::FLAGS] = 0;
            set(params, slot::TEMPERATURE, temperature);
            (params[slot::SEED_LO], params[slot::SEED_HI], params[slot::CHOICE]) = (seed_lo, seed_hi, choice);
        };
        let ask = Ask { features: feature::RANDOM, change: &change, ..PLAIN };
        let scaled: Vec<f32> = logits.iter().map(|l| l / temperature).collect();
        let expected = noisy_argmax(&scaled, 0..303, [seed_lo, seed_hi], choice, position);
        assert_eq!(ask.token(&logits, position) as usize, expected, "spread {spread}");
    }
}

#[test]
fn draws_follow_the_distribution() {
    let p = [0.15_f32, 0.5, 0.05, 0.3];
    let change = |params: &mut Params| {
        params[slot::FLAGS] = 0;
        set(params, slot::TEMPERATURE, 1.0);
        params[slot::SEED_LO] = 5;
    };
    let ask = Ask { features: feature::RANDOM, change: &change, ..PLAIN };
    let draws = 8000;
    let tally = ask.tally(&p.map(f32::ln), draws);
    for (count, p) in tally.iter().zip(p.map(f64::from)) {
        let (expected, deviation) = (p * f64::from(draws), (f64::from(draws) * p * (1.0 - p)).sqrt());
        assert!((f64::from(*count) - expected).abs() < 4.0 * deviation, "{tally:?}");
    }
}

#[test]
fn rows_draw_the_same_whatever_stands_beside_them() {
    let mut random = Random(43);
    let change = truncated(0.8, 0.01, 40, 0.9);
    let seat = |at: u32| {
        let mut params = greedy(at, 1);
        change(&mut params);
        (params[slot::SLOT], params[slot::SEED_LO]) = (at, 100 + at);
        params
    };
    let logits: Vec<Vec<f32>> = (0..3).map(|_| random.floats(200, 3.0)).collect();
    let run = |order: &[u32]| {
        let mut station = Station::new(200);
        let rows: Vec<[u32; 5]> = order.iter().map(|&at| given(at, 1, 0, 30 + at, 0)).collect();
        let logit_rows = (0..rows.len() as u32).map(sampled).collect();
        let features = feature::RANDOM | feature::TRUNCATION;
        station
            .fetch(&Entry { features, new: (0..3).map(seat).collect(), rows, logit_rows, ..Entry::default() })
            .unwrap();
        for (at, &slot) in order.iter().enumerate() {
            station.logits(at).copy_from_slice(&logits[slot as usize]);
        }
        station.sample();
        let mut tokens = vec![None; 3];
        order
            .iter()
            .enumerate()
            .for_each(|(at, &slot)| tokens[slot as usize] = Some(station.word(station.sample.token, at)));
        tokens
    };
    let together = run(&[0, 1, 2]);
    assert_eq!(run(&[2, 0, 1]), together);
    for at in 0..3 {
        assert_eq!(run(&[at])[at as usize], together[at as usize]);
    }
}
