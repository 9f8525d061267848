//! fetch and feed: what a step's entry does to the tables, and what its record says.

use crate::station::{Entry, LAYOUT, PAD_SLOT, PAGES_PER_SLOT, ROWS, Station, decode, given, greedy, sampled, scored};
use slotgraph_kernels::OpError;
use slotgraph_kernels::contract::LOGIT_BIAS_MAX;
use slotgraph_kernels::entry::{
    OUTPUT_HEADER_WORDS, RECORD_WORDS, SLOT_WORDS, feature, header, logit_row, mix, output, record, row, slot,
};
use slotgraph_kernels::ops::step;

const PROMPT: u32 = 1 << 31;

#[test]
fn a_new_holder_gets_a_clean_seat_and_its_pages() {
    let mut station = Station::new(50);
    station.memory.u32_mut(station.slots.pages).fill(9);
    station.memory.u32_mut(station.slots.counts).fill(7);
    let mut params = greedy(1, 4);
    params[slot::FLAGS] |= slot::PENALTIES | slot::BIAS;
    params[slot::GENERATED] = 12;
    (params[slot::BIAS_START], params[slot::BIAS_COUNT]) = (1, 2);
    let entry = Entry {
        new: vec![params, greedy(2, 8)],
        pages: vec![[1, 0, 5], [1, 3, 6], [0, 2, 3]],
        bias: vec![[1, 1], [10, 11], [20, 21], [2, 2]],
        ..Entry::default()
    };
    station.fetch(&entry).unwrap();

    let pages = station.memory.u32(station.slots.pages);
    assert_eq!(pages[PAGES_PER_SLOT..2 * PAGES_PER_SLOT], [5, 0, 0, 6]);
    assert_eq!(pages[..PAGES_PER_SLOT], [9, 9, 3, 9], "a seat without a new holder keeps its pages");
    assert_eq!(pages[2 * PAGES_PER_SLOT..3 * PAGES_PER_SLOT], [0; PAGES_PER_SLOT]);
    assert_eq!(station.memory.u32(station.slots.generation)[..3], [0, 4, 8]);
    assert_eq!(station.memory.u32(station.slots.ended)[..3], [1, 0, 0]);
    assert_eq!(station.word(station.slots.generated, 1), 12);
    assert_eq!(station.memory.u32(station.slots.params)[SLOT_WORDS..2 * SLOT_WORDS], params);
    assert_eq!(station.memory.u32(station.slots.bias)[2 * LOGIT_BIAS_MAX..][..5], [10, 11, 20, 21, 0]);
    assert_eq!(
        [station.count(1, 0), station.count(1, 49), station.count(2, 0)],
        [0, 0, 7],
        "only penalties need counts"
    );
}

#[test]
fn rows_are_live_only_for_the_holder_they_mean() {
    let mut station = Station::new(50);
    let mut first = greedy(0, 1);
    first[slot::FLAGS] |= slot::PENALTIES;
    station.fetch(&Entry { new: vec![first, greedy(1, 1), greedy(2, 1)], ..Entry::default() }).unwrap();
    station.feed();
    station.memory.u32_mut(station.slots.token)[0] = 33;
    station.memory.u32_mut(station.slots.position)[0] = 17;
    station.memory.u32_mut(station.slots.ended)[2] = 1;
    let entry = Entry {
        features: feature::PENALTIES,
        retired: vec![[1, 99], [1, 1]],
        rows: vec![
            decode(0, 1),
            given(0, 1, 40, 18, 0),
            given(0, 1, 40, 19, row::GENERATED),
            given(1, 1, 41, 5, 0),
            given(2, 1, 42, 6, 0),
        ],
        logit_rows: vec![sampled(4), scored(1, 44), sampled(0)],
        ..Entry::default()
    };
    station.fetch(&entry).unwrap();

    let rows = station.rows;
    let of = |id| station.memory.u32(id)[..ROWS].to_vec();
    assert_eq!(of(rows.slot), [0, 0, 0, PAD_SLOT, PAD_SLOT, PAD_SLOT], "retired, ended, unused");
    assert_eq!(of(rows.token), [33, 40, 40, 0, 0, 0]);
    assert_eq!(of(rows.position), [17, 18, 19, 0, 0, 0]);
    assert_eq!(of(rows.live), [1, 1, 1, 0, 0, 0]);
    assert_eq!(station.memory.u32(rows.logit_row), [0, 1, 0, 0]);
    assert_eq!(station.memory.u32(rows.logit_kind), [0, logit_row::SCORE, logit_row::SAMPLE, 0]);
    assert_eq!(station.memory.u32(rows.logit_target), [0, 44, 0, 0]);
    assert_eq!((station.memory.rows, station.memory.logit_rows), (5, 3));
    let words = station.memory.u32(rows.step);
    assert_eq!(words[..step::START_NS], [feature::PENALTIES, 5, 3, 2, 0, 0, 0, 3]);
    assert_eq!([station.count(0, 40), station.count(0, 33), station.count(1, 41)], [PROMPT | 1, 0, 0]);
    assert_eq!(station.word(station.slots.ended, 1), 1, "the second retirement meant this holder");
}

#[test]
fn an_entry_that_cannot_be_is_refused() {
    let seated = Entry { new: vec![greedy(0, 1)], ..Entry::default() };
    let with = |change: &dyn Fn(&mut Entry)| {
        let mut entry = seated.clone();
        change(&mut entry);
        Station::new(50).fetch(&entry)
    };
    let field = |result: Result<(), OpError>| match result.unwrap_err() {
        OpError::Entry { field, .. } => field,
        other => panic!("{other}"),
    };
    assert_eq!(with(&|_| {}), Ok(()));
    assert_eq!(field(with(&|e| e.rows = vec![given(0, 1, 50, 0, 0)])), "token");
    assert_eq!(field(with(&|e| e.rows = vec![decode(0, 1); ROWS + 1])), "rows");
    assert_eq!(field(with(&|e| e.new[0][slot::SLOT] = PAD_SLOT)), "new slot");
    assert_eq!(field(with(&|e| e.new[0][slot::EOS_COUNT] = 9)), "EOS count");
    assert_eq!(field(with(&|e| e.new[0][slot::BIAS_COUNT] = 1)), "bias start");
    assert_eq!(field(with(&|e| e.pages = vec![[0, PAGES_PER_SLOT as u32, 1]])), "index of a page update");
    assert_eq!(field(with(&|e| e.logit_rows = vec![sampled(ROWS as u32)])), "row of a logit row");
    let scoring = |e: &mut Entry| {
        e.rows = vec![given(0, 1, 1, 0, 0)];
        e.logit_rows = vec![scored(0, 50)];
    };
    assert_eq!(field(with(&scoring)), "target of a logit row");

    let mut station = Station::new(50);
    station.put(&seated);
    station.memory.u32_mut(station.fetch.input_ring)[header::STEP_LO] = 7;
    let late = slotgraph_kernels::Op::Fetch(station.fetch.clone()).run(&mut station.memory);
    assert_eq!(late, Err(OpError::Entry { step: 1, field: "step", got: 7 }));
    station.put(&seated);
    station.memory.u32_mut(station.fetch.input_ring)[header::PAGES] = u32::MAX;
    let endless = slotgraph_kernels::Op::Fetch(station.fetch.clone()).run(&mut station.memory);
    assert_eq!(endless, Err(OpError::Entry { step: 1, field: "page updates", got: u64::from(u32::MAX) }));
}

/// One greedy step of slot 0, whose row stands at `position`, that draws `token`; gives the record.
fn settle(change: impl Fn(&mut [u32; SLOT_WORDS]), generated: u32, position: u32, token: usize) -> (Station, Vec<u32>) {
    let mut station = Station::new(50);
    let mut params = greedy(0, 3);
    params[slot::GENERATED] = generated;
    change(&mut params);
    let entry = Entry {
        new: vec![params],
        rows: vec![given(0, 3, 1, position, 0)],
        logit_rows: vec![sampled(0)],
        ..Entry::default()
    };
    station.fetch(&entry).unwrap();
    station.logits(0)[token] = 5.0;
    station.sample();
    let words = station.feed();
    let record = words[OUTPUT_HEADER_WORDS..][..RECORD_WORDS].to_vec();
    (station, record)
}

/// max_tokens, context, EOS ids, stop ids, flags; and the reason.
type Ending<'a> = (u32, u32, &'a [u32], &'a [u32], u32, u32);

#[test]
fn a_slot_ends_for_the_first_reason_that_holds() {
    let ids = |params: &mut [u32; SLOT_WORDS], eos: &[u32], stop: &[u32]| {
        params[slot::EOS_COUNT] = eos.len() as u32;
        params[slot::EOS_IDS..][..eos.len()].copy_from_slice(eos);
        params[slot::STOP_COUNT] = stop.len() as u32;
        params[slot::STOP_IDS..][..stop.len()].copy_from_slice(stop);
    };
    // For the third token, at position 9, id 7.
    let cases: [Ending; 10] = [
        (100, 200, &[], &[], 0, 0),
        (100, 200, &[6, 8], &[9], 0, 0),
        (3, 10, &[2, 7], &[7], 0, record::REASON_EOS),
        (3, 10, &[7], &[7], slot::IGNORE_EOS, record::REASON_STOP_ID),
        (100, 200, &[7], &[], slot::IGNORE_EOS, 0),
        (3, 10, &[], &[3, 7], 0, record::REASON_STOP_ID),
        (3, 10, &[], &[], 0, record::REASON_MAX_TOKENS),
        (4, 10, &[], &[], 0, record::REASON_CONTEXT),
        (4, 11, &[], &[], 0, record::REASON_CONTEXT),
        (4, 12, &[], &[], 0, 0),
    ];
    for (max_tokens, context, eos, stop, flags, reason) in cases {
        let change = |params: &mut [u32; SLOT_WORDS]| {
            params[slot::MAX_TOKENS] = max_tokens;
            params[slot::CONTEXT] = context;
            params[slot::FLAGS] |= flags;
            ids(params, eos, stop);
        };
        let (station, record) = settle(change, 2, 9, 7);
        let ended = if reason == 0 { 0 } else { record::ENDED | reason << record::REASON_SHIFT };
        assert_eq!(record[record::FLAGS], record::LIVE | ended, "{max_tokens} {context} {eos:?} {stop:?}");
        assert_eq!(station.word(station.slots.ended, 0), u32::from(reason != 0));
        assert_eq!(record[record::SLOT..=record::TOKEN], [0, 3, 7]);
        assert_eq!(record[record::POSITION], 9);
        let slots = station.slots;
        let state = [slots.token, slots.position, slots.generated].map(|id| station.word(id, 0));
        assert_eq!(state, [7, 10, 3]);
    }
}

#[test]
fn a_nan_ends_the_slot_before_any_other_reason() {
    for scoring in [false, true] {
        let mut station = Station::new(50);
        let mut params = greedy(0, 3);
        params[slot::EOS_COUNT] = 1;
        params[slot::FLAGS] |= slot::PENALTIES;
        let want = if scoring { scored(0, 9) } else { sampled(0) };
        let entry = Entry {
            features: feature::SCORE,
            new: vec![params],
            rows: vec![given(0, 3, 1, 4, 0)],
            logit_rows: vec![want],
            ..Entry::default()
        };
        station.fetch(&entry).unwrap();
        station.logits(0)[49] = f32::NAN;
        station.sample();
        let words = station.feed();
        let record = &words[OUTPUT_HEADER_WORDS..][..RECORD_WORDS];
        let nan = record::LIVE | record::ENDED | record::REASON_NAN << record::REASON_SHIFT;
        assert_eq!(record[record::FLAGS], nan | if scoring { record::SCORED } else { 0 });
        assert_eq!(record[record::TOKEN], if scoring { 9 } else { 0 });
        assert_eq!(record[record::LOGPROB], 0);
        assert_eq!(station.word(station.slots.ended, 0), 1);
        assert_eq!(station.count(0, 0), 0, "a token that means nothing is not counted");
    }
}

#[test]
fn a_step_s_record_tells_what_was_asked_and_nothing_else() {
    let mut station = Station::new(50);
    let mut params = greedy(1, 6);
    params[slot::FLAGS] |= slot::LOGPROBS | slot::PENALTIES;
    params[slot::TOP_LOGPROBS] = 2;
    let entry = Entry {
        features: feature::LOGPROBS | feature::TOP_LOGPROBS | feature::SCORE | feature::PENALTIES,
        new: vec![params, greedy(2, 1)],
        rows: vec![given(1, 6, 1, 0, 0), given(1, 6, 2, 1, 0), given(2, 1, 3, 0, 0), given(0, 5, 3, 0, 0)],
        logit_rows: vec![scored(0, 3), sampled(3), sampled(1), sampled(2)],
        ..Entry::default()
    };
    station.fetch(&entry).unwrap();
    station.memory.u32_mut(station.feed.output_ring).fill(0x5555_5555);
    station.memory.u32_mut(station.rows.step)[step::ROUTES_LOCAL..=step::ROUTES_REMOTE].copy_from_slice(&[21, 22]);
    for at in 0..4 {
        station.logits(at).iter_mut().enumerate().for_each(|(id, logit)| *logit = -(id as f32));
    }
    station.sample();
    let words = station.feed();

    assert_eq!(words[output::STEP_LO..=output::RECORDS], [1, 0, 4]);
    assert_eq!(words[output::ROUTES_LOCAL..=output::PAD_ROWS], [21, 22, 3]);
    let records: Vec<&[u32]> = words[OUTPUT_HEADER_WORDS..].chunks(RECORD_WORDS).collect();
    let logprob = |id: f64| (-id - (0..50).map(|id| (-f64::from(id)).exp()).sum::<f64>().ln()) as f32;
    let near = |bits: u32, expected: f32| (f32::from_bits(bits) - expected).abs() < 1e-6;
    let [score, pad, sample, plain] = [0, 1, 2, 3].map(|at| records[at]);

    assert_eq!(score[record::FLAGS], record::LIVE | record::SCORED);
    assert_eq!([score[record::TOKEN], score[record::POSITION], score[record::TOKEN_RANK]], [3, 0, 4]);
    assert!(near(score[record::LOGPROB], logprob(3.0)));
    assert_eq!(*pad, [0; RECORD_WORDS], "no slot 0: a pad row says nothing");
    assert_eq!([sample[record::SLOT], sample[record::GENERATION], sample[record::TOKEN]], [1, 6, 0]);
    assert_eq!([sample[record::TOP_COUNT], sample[record::TOKEN_RANK], sample[record::POSITION]], [2, 1, 1]);
    assert_eq!(sample[record::TOP_IDS..][..3], [0, 1, 0]);
    assert!(near(sample[record::TOP_LOGPROBS], logprob(0.0)) && near(sample[record::TOP_LOGPROBS + 1], logprob(1.0)));
    assert_eq!(sample[record::TOP_LOGPROBS + 2..], [0; RECORD_WORDS - record::TOP_LOGPROBS - 2]);
    assert_eq!(plain[record::FLAGS], record::LIVE);
    assert_eq!([plain[record::LOGPROB], plain[record::TOP_COUNT], plain[record::TOKEN_RANK]], [0; 3], "not asked");

    let used = &words[OUTPUT_HEADER_WORDS..][..4 * RECORD_WORDS];
    let checksum = used.iter().enumerate().fold(0, |sum, (at, &word)| sum ^ mix(at as u32, word));
    assert_eq!(words[output::CHECKSUM], checksum);
    assert_eq!(
        [station.count(1, 0), station.count(1, 1), station.count(1, 2), station.count(1, 3)],
        [1, PROMPT, PROMPT, 0]
    );
    let [start, end] =
        [output::START_NS, output::END_NS].map(|at| u64::from(words[at]) | u64::from(words[at + 1]) << 32);
    assert!(start < end && end < 60_000_000_000);
}

#[test]
fn steps_take_turns_in_the_rings_and_the_counter_carries() {
    let mut station = Station::new(50);
    station.memory.u32_mut(station.fetch.step_counter)[..2].copy_from_slice(&[u32::MAX - 1, 4]);
    station.fetch(&Entry { new: vec![greedy(0, 1)], ..Entry::default() }).unwrap();
    let last = station.feed();
    assert_eq!(last[output::STEP_LO..=output::RECORDS], [u32::MAX, 4, 0]);
    station
        .fetch(&Entry { rows: vec![given(0, 1, 7, 0, 0)], logit_rows: vec![sampled(0)], ..Entry::default() })
        .unwrap();
    station.sample();
    let next = station.feed();
    assert_eq!(next[output::STEP_LO..=output::RECORDS], [0, 5, 1]);
    assert_eq!(station.memory.u32(station.fetch.step_counter)[..2], [0, 5]);
    let words = LAYOUT.output_words();
    assert_eq!(station.memory.u32(station.feed.output_ring)[..words], last[..], "the other step's record is untouched");
}
