//! Entries and records go through words and come back the same.

use super::*;
use crate::device::DeviceError;
use crate::samples;
use proptest::collection::vec;
use proptest::prelude::*;
use slotgraph_kernels::contract::{LOGIT_BIAS_MAX, STOP_IDS_MAX, TOP_LOGPROBS_MAX};
use slotgraph_kernels::entry::{
    BIAS_WORDS, LOGIT_ROW_WORDS, OUTPUT_HEADER_WORDS, PAGE_WORDS, RECORD_WORDS, RETIRED_WORDS, ROW_WORDS, SLOT_WORDS,
    header, logit_row, output, record, row, slot,
};

const EOS_IDS: [u32; 2] = [1, 95];

fn slot_id() -> impl Strategy<Value = SlotId> {
    (0..4u32).prop_map(SlotId)
}

fn generation() -> impl Strategy<Value = Generation> {
    any::<u32>().prop_map(Generation)
}

fn row_input() -> impl Strategy<Value = RowInput> {
    let feed = prop_oneof![
        Just(RowFeed::FromSlot),
        (any::<u32>(), 0..128u32, any::<bool>()).prop_map(|(token, position, generated)| RowFeed::Given {
            token,
            position,
            generated
        }),
    ];
    let want = prop_oneof![Just(RowWant::Nothing), Just(RowWant::Sample), any::<u32>().prop_map(RowWant::Score)];
    (slot_id(), generation(), feed, want).prop_map(|(slot, generation, feed, want)| RowInput {
        slot,
        generation,
        feed,
        want,
    })
}

fn sampling() -> impl Strategy<Value = SamplingSpec> {
    let floats = (any::<f32>(), 0.0..=1.0f32, 0.0..=1.0f32, any::<f32>(), any::<f32>(), any::<f32>());
    let ids = (vec((any::<u32>(), any::<f32>()), 0..40), vec(any::<u32>(), 0..=STOP_IDS_MAX));
    let counts = (any::<u32>(), any::<u64>(), any::<bool>(), any::<u32>(), any::<u32>(), 0..=20u32, any::<bool>());
    (floats, ids, counts).prop_map(|(floats, (logit_bias, stop_ids), counts)| {
        let (temperature, top_p, min_p, presence_penalty, frequency_penalty, repetition_penalty) = floats;
        let (top_k, seed, ignore_eos, min_tokens, max_tokens, top, has_logprobs) = counts;
        SamplingSpec {
            temperature,
            top_p,
            min_p,
            top_k,
            presence_penalty,
            frequency_penalty,
            repetition_penalty,
            seed,
            logit_bias,
            stop_ids,
            ignore_eos,
            min_tokens,
            max_tokens,
            logprobs: has_logprobs.then_some(top),
        }
    })
}

fn new_slot() -> impl Strategy<Value = NewSlot> {
    (slot_id(), generation(), sampling(), any::<u32>(), any::<u32>()).prop_map(
        |(slot, generation, sampling, choice, generated)| NewSlot {
            slot,
            generation,
            sampling: Arc::new(sampling),
            choice,
            generated,
        },
    )
}

fn step_input() -> impl Strategy<Value = StepInput> {
    let page =
        (slot_id(), 0..2u32, 0..9u32).prop_map(|(slot, index, page)| PageUpdate { slot, index, page: PageId(page) });
    (
        any::<u64>(),
        vec(row_input(), 0..=16),
        vec(new_slot(), 0..=4),
        vec((slot_id(), generation()), 0..=8),
        vec(page, 0..=20),
        any::<u32>(),
    )
        .prop_map(|(step, rows, new_slots, retired, pages, features)| StepInput {
            step,
            bucket: 16,
            rows,
            new_slots,
            retired,
            pages,
            features,
        })
}

/// An entry read back by the offsets in its header, as `fetch` reads it.
struct Entry<'a>(&'a [u32]);

impl Entry<'_> {
    fn section(&self, count: usize, at: usize, width: usize) -> impl Iterator<Item = &[u32]> {
        let (count, at) = (self.0[count] as usize, self.0[at] as usize);
        assert!(count == 0 || at + count * width <= self.0[header::USED_WORDS] as usize, "all of it is copied");
        self.0[at..at + count * width].chunks_exact(width)
    }

    fn rows(&self) -> Vec<RowInput> {
        let wants: Vec<(u32, RowWant)> = self
            .section(header::LOGIT_ROWS, header::LOGIT_ROWS_AT, LOGIT_ROW_WORDS)
            .map(|line| {
                let want = match line[logit_row::KIND] {
                    logit_row::SAMPLE => RowWant::Sample,
                    logit_row::SCORE => RowWant::Score(line[logit_row::TARGET]),
                    kind => panic!("logit row of kind {kind}"),
                };
                (line[logit_row::ROW], want)
            })
            .collect();
        assert!(wants.is_sorted_by_key(|&(row, _)| row));
        let rows = self.section(header::ROWS, header::ROWS_AT, ROW_WORDS).enumerate();
        rows.map(|(index, line)| RowInput {
            slot: SlotId(line[row::SLOT]),
            generation: Generation(line[row::GENERATION]),
            feed: match line[row::FLAGS] {
                row::FROM_SLOT => RowFeed::FromSlot,
                flags => RowFeed::Given {
                    token: line[row::TOKEN],
                    position: line[row::POSITION],
                    generated: flags == row::GENERATED,
                },
            },
            want: wants.iter().find(|&&(row, _)| row == index as u32).map_or(RowWant::Nothing, |&(_, want)| want),
        })
        .collect()
    }

    fn new_slots(&self) -> Vec<NewSlot> {
        let bias: Vec<(u32, f32)> = self
            .section(header::BIAS, header::BIAS_AT, BIAS_WORDS)
            .map(|pair| (pair[0], f32::from_bits(pair[1])))
            .collect();
        let slots = self.section(header::NEW_SLOTS, header::NEW_SLOTS_AT, SLOT_WORDS);
        slots
            .map(|line| {
                let float = |field: usize| f32::from_bits(line[field]);
                let flag = |flag: u32| line[slot::FLAGS] & flag != 0;
                let bias_start = line[slot::BIAS_START] as usize;
                let eos_count = line[slot::EOS_COUNT] as usize;
                assert_eq!(line[slot::EOS_IDS..][..eos_count], EOS_IDS);
                assert_eq!(line[slot::CONTEXT], 128);
                let sampling = SamplingSpec {
                    temperature: float(slot::TEMPERATURE),
                    top_p: float(slot::TOP_P),
                    min_p: float(slot::MIN_P),
                    top_k: line[slot::TOP_K],
                    presence_penalty: float(slot::PRESENCE),
                    frequency_penalty: float(slot::FREQUENCY),
                    repetition_penalty: float(slot::REPETITION),
                    seed: whole(line[slot::SEED_LO], line[slot::SEED_HI]),
                    logit_bias: bias[bias_start..][..line[slot::BIAS_COUNT] as usize].to_vec(),
                    stop_ids: line[slot::STOP_IDS..][..line[slot::STOP_COUNT] as usize].to_vec(),
                    ignore_eos: flag(slot::IGNORE_EOS),
                    min_tokens: line[slot::MIN_TOKENS],
                    max_tokens: line[slot::MAX_TOKENS],
                    logprobs: flag(slot::LOGPROBS).then_some(line[slot::TOP_LOGPROBS]),
                };
                assert_eq!(flag(slot::GREEDY), sampling.is_greedy());
                assert_eq!(flag(slot::PENALTIES), sampling.has_penalties());
                assert_eq!(flag(slot::TRUNCATION), sampling.has_truncation());
                assert_eq!(flag(slot::BIAS), !sampling.logit_bias.is_empty());
                NewSlot {
                    slot: SlotId(line[slot::SLOT]),
                    generation: Generation(line[slot::GENERATION]),
                    sampling: Arc::new(sampling),
                    choice: line[slot::CHOICE],
                    generated: line[slot::GENERATED],
                }
            })
            .collect()
    }

    fn step_input(&self) -> StepInput {
        let retired = self.section(header::RETIRED, header::RETIRED_AT, RETIRED_WORDS);
        let pages = self.section(header::PAGES, header::PAGES_AT, PAGE_WORDS);
        StepInput {
            step: whole(self.0[header::STEP_LO], self.0[header::STEP_HI]),
            bucket: 16,
            rows: self.rows(),
            new_slots: self.new_slots(),
            retired: retired.map(|line| (SlotId(line[0]), Generation(line[1]))).collect(),
            pages: pages
                .map(|line| PageUpdate { slot: SlotId(line[0]), index: line[1], page: PageId(line[2]) })
                .collect(),
            features: self.0[header::FEATURES],
        }
    }
}

fn whole(lo: u32, hi: u32) -> u64 {
    u64::from(lo) | u64::from(hi) << 32
}

proptest! {
    #[test]
    fn an_entry_says_what_the_step_said(input in step_input(), stale in any::<u32>()) {
        let limits = samples::limits();
        let mut words = vec![stale; limits.entry_layout().entry_words()];
        let used = encode(&input, &limits, &EOS_IDS, &mut words).unwrap();
        // Only the used words travel.
        words[used..].fill(0xdead_beef);
        // NaN parameters compare by their bits.
        prop_assert_eq!(format!("{:?}", Entry(&words).step_input()), format!("{input:?}"));
    }

    #[test]
    fn a_record_comes_back(
        records in vec((slot_id(), generation(), any::<[u32; 4]>(), vec((any::<u32>(), -9.0..0.0f32), 0..=20), 0..6u32, any::<[bool; 2]>()), 0..=16),
        header in any::<[u32; 5]>(),
        start in 0..u64::MAX / 2,
        took in 0..u64::MAX / 2,
    ) {
        let mut words = vec![0; samples::limits().entry_layout().output_words()];
        let halves = |value: u64| [value as u32, (value >> 32) as u32];
        words[output::STEP_LO..][..2].copy_from_slice(&halves(took ^ start));
        words[output::START_NS..][..2].copy_from_slice(&halves(start));
        words[output::END_NS..][..2].copy_from_slice(&halves(start + took));
        words[output::RECORDS] = records.len() as u32;
        let fields = [output::ROUTES_LOCAL, output::ROUTES_REMOTE, output::PAD_ROWS, output::CHECKSUM];
        fields.into_iter().zip(header).for_each(|(field, value)| words[field] = value);
        let mut expected = Vec::new();
        let lines = words[OUTPUT_HEADER_WORDS..].chunks_exact_mut(RECORD_WORDS);
        for ((slot, generation, numbers, top, reason, [live, scored]), line) in records.into_iter().zip(lines) {
            let [position, token, rank, logprob] = numbers;
            let logprob = logprob as f32 * -1e-9;
            line[record::SLOT] = slot.0;
            line[record::GENERATION] = generation.0;
            line[record::TOKEN] = token;
            line[record::POSITION] = position;
            line[record::TOKEN_RANK] = rank;
            line[record::LOGPROB] = logprob.to_bits();
            line[record::TOP_COUNT] = top.len() as u32;
            for (at, &(id, logprob)) in top.iter().enumerate() {
                line[record::TOP_IDS + at] = id;
                line[record::TOP_LOGPROBS + at] = f32::to_bits(logprob);
            }
            line[record::FLAGS] = if live { record::LIVE } else { 0 }
                | if scored { record::SCORED } else { 0 }
                | if reason > 0 { record::ENDED | reason << record::REASON_SHIFT } else { 0 };
            let reasons = [EndReason::Eos, EndReason::StopId, EndReason::MaxTokens, EndReason::Context, EndReason::Nan];
            let ended = (reason as usize).checked_sub(1).map(|reason| reasons[reason]);
            if live {
                expected.push(Record { slot, generation, position, token, scored, logprob, rank, top, ended });
            }
        }
        let mut decoded = StepOutput { records: expected.clone(), ..StepOutput::default() };
        decode(&words, &mut decoded).unwrap();
        prop_assert_eq!(decoded, StepOutput {
            step: took ^ start,
            records: expected,
            device_ns: took,
            routes_local: u64::from(header[0]),
            routes_remote: u64::from(header[1]),
            pad_rows: header[2],
            checksum: header[3],
        });
    }
}

#[test]
fn a_step_that_does_not_fit_is_refused_by_what_overflows() {
    let limits = samples::limits();
    let refused = |change: &dyn Fn(&mut StepInput)| {
        let mut input = samples::prefill(9);
        change(&mut input);
        let mut words = vec![0; limits.entry_layout().entry_words()];
        match encode(&input, &limits, &EOS_IDS, &mut words) {
            Err(DeviceError::EntryOverflow(what)) => what,
            other => panic!("expected a refusal, got {other:?}"),
        }
    };
    let with_sampling = |change: fn(&mut SamplingSpec)| {
        move |input: &mut StepInput| change(Arc::make_mut(&mut input.new_slots[0].sampling))
    };
    assert_eq!(refused(&|input| input.bucket = 1), "2 rows, at most 1");
    assert_eq!(refused(&|input| input.rows[0].slot = SlotId(4)), "slot 4 of 4");
    assert_eq!(refused(&|input| input.rows[0].feed = samples::given(5, 128)), "position 128 of 128");
    assert_eq!(refused(&|input| input.pages[0].page = PageId(9)), "page 9 of 9");
    assert_eq!(refused(&|input| input.pages[0].index = 2), "block-table index 2 of 2");
    assert_eq!(refused(&|input| input.retired = vec![(SlotId(7), Generation(0))]), "slot 7 of 4");
    assert_eq!(refused(&|input| input.retired = vec![(SlotId(0), Generation(0)); 9]), "9 retirements, at most 8");
    assert_eq!(
        refused(&with_sampling(|sampling| sampling.stop_ids = vec![3; STOP_IDS_MAX + 1])),
        "17 stop ids of a slot, at most 16"
    );
    assert_eq!(
        refused(&with_sampling(|sampling| sampling.logit_bias = vec![(3, 1.0); LOGIT_BIAS_MAX + 1])),
        "1025 logit_bias pairs of a slot, at most 1024"
    );
    assert_eq!(refused(&with_sampling(|sampling| sampling.logprobs = Some(21))), "21 alternatives, at most 20");
}

#[test]
fn a_garbled_record_is_an_error() {
    let mut words = vec![0; samples::limits().entry_layout().output_words()];
    let garbled = |words: &[u32]| decode(words, &mut StepOutput::default()).unwrap_err().to_string();
    words[output::RECORDS] = 17;
    assert!(garbled(&words).contains("17 records"));
    words[output::RECORDS] = 1;
    words[OUTPUT_HEADER_WORDS + record::FLAGS] = record::LIVE | record::ENDED | 9 << record::REASON_SHIFT;
    assert!(garbled(&words).contains("end reason 9"));
    words[OUTPUT_HEADER_WORDS + record::TOP_COUNT] = TOP_LOGPROBS_MAX as u32 + 1;
    assert!(garbled(&words).contains("21 alternatives"));
}
