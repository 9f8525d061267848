//! A step as ring words, laid out by `kernels::entry`: `encode` on the way in, `decode` on the way out.
//!
//! Used by every device that runs plans, on the words of its rings. **Invariant:** a step that `check` accepts fits its
//! entry and names only seats, pages and positions that exist; `encode` and `decode` allocate nothing but the alternatives
//! of logprob records.

use super::{EndReason, Generation, NewSlot, Record, RowFeed, RowWant, SlotId, StepInput, StepLimits, StepOutput};
use crate::device::DeviceError;
use slotgraph_kernels::contract::{EOS_IDS_MAX, LOGIT_BIAS_MAX, STOP_IDS_MAX, TOP_LOGPROBS_MAX};
use slotgraph_kernels::entry::{
    BIAS_WORDS, EntryLayout, HEADER_WORDS, LOGIT_ROW_WORDS, OUTPUT_HEADER_WORDS, PAGE_WORDS, RECORD_WORDS,
    RETIRED_WORDS, ROW_WORDS, SLOT_WORDS, header, logit_row, output, record, row, slot,
};

/// Refuses a step that does not fit its entry or names what does not exist.
pub fn check(input: &StepInput, limits: &StepLimits, eos_ids: &[u32]) -> Result<(), DeviceError> {
    let layout = limits.entry_layout();
    at_most("rows", input.rows.len(), input.bucket.min(layout.rows_max))?;
    at_most("logit rows", input.logit_rows(), limits.logit_rows(input.bucket))?;
    at_most("new slots", input.new_slots.len(), layout.new_slots_max)?;
    at_most("retirements", input.retired.len(), layout.retired_max)?;
    at_most("page updates", input.pages.len(), layout.pages_max)?;
    let bias = input.new_slots.iter().map(|new| new.sampling.logit_bias.len()).sum();
    at_most("logit_bias pairs", bias, layout.bias_max)?;
    at_most("EOS ids", eos_ids.len(), EOS_IDS_MAX)?;

    for row in &input.rows {
        below("slot", row.slot.0, limits.slots_max)?;
        if let RowFeed::Given { position, .. } = row.feed {
            below("position", position, limits.max_model_len)?;
        }
    }
    for new in &input.new_slots {
        below("slot", new.slot.0, limits.slots_max)?;
        at_most("logit_bias pairs of a slot", new.sampling.logit_bias.len(), LOGIT_BIAS_MAX)?;
        at_most("stop ids of a slot", new.sampling.stop_ids.len(), STOP_IDS_MAX)?;
        at_most("alternatives", new.sampling.logprobs.unwrap_or(0) as usize, TOP_LOGPROBS_MAX)?;
    }
    for (slot, _) in &input.retired {
        below("slot", slot.0, limits.slots_max)?;
    }
    for update in &input.pages {
        below("slot", update.slot.0, limits.slots_max)?;
        below("block-table index", update.index, limits.pages_per_slot)?;
        below("page", update.page.0, limits.pages)?;
    }
    Ok(())
}

fn at_most(what: &str, count: usize, max: usize) -> Result<(), DeviceError> {
    if count <= max { Ok(()) } else { Err(DeviceError::EntryOverflow(format!("{count} {what}, at most {max}"))) }
}

fn below(what: &str, index: u32, end: usize) -> Result<(), DeviceError> {
    if (index as usize) < end { Ok(()) } else { Err(DeviceError::EntryOverflow(format!("{what} {index} of {end}"))) }
}

/// Writes `input` as an entry and returns the words used. `eos_ids` are the model's; `words` is a whole ring entry, of
/// which whatever lies between the sections keeps its old contents.
pub fn encode(
    input: &StepInput,
    limits: &StepLimits,
    eos_ids: &[u32],
    words: &mut [u32],
) -> Result<usize, DeviceError> {
    check(input, limits, eos_ids)?;
    let layout = limits.entry_layout();
    assert!(words.len() >= layout.entry_words(), "an entry has {} words", layout.entry_words());
    let sections = Sections::of(input);
    words[..HEADER_WORDS].fill(0);

    let mut logit_rows = lines(words, sections.logit_rows, LOGIT_ROW_WORDS, input.logit_rows());
    let mut logit_count = 0;
    for (index, line) in input.rows.iter().enumerate() {
        let (kind, target) = match line.want {
            RowWant::Nothing => continue,
            RowWant::Sample => (logit_row::SAMPLE, 0),
            RowWant::Score(token) => (logit_row::SCORE, token),
        };
        let out = logit_rows.next().expect("`check` counted the logit rows");
        out[logit_row::ROW] = word(index);
        out[logit_row::KIND] = kind;
        out[logit_row::TARGET] = target;
        logit_count += 1;
    }
    for (line, out) in input.rows.iter().zip(lines(words, sections.rows, ROW_WORDS, input.rows.len())) {
        let (flags, token, position) = match line.feed {
            RowFeed::FromSlot => (row::FROM_SLOT, 0, 0),
            RowFeed::Given { token, position, generated } => {
                (if generated { row::GENERATED } else { 0 }, token, position)
            }
        };
        out[row::SLOT] = line.slot.0;
        out[row::GENERATION] = line.generation.0;
        out[row::FLAGS] = flags;
        out[row::TOKEN] = token;
        out[row::POSITION] = position;
    }
    let mut bias_count = 0;
    for (index, new) in input.new_slots.iter().enumerate() {
        let count = new.sampling.logit_bias.len();
        let pairs = lines(words, sections.bias + bias_count * BIAS_WORDS, BIAS_WORDS, count);
        for (&(token, bias), out) in new.sampling.logit_bias.iter().zip(pairs) {
            out.copy_from_slice(&[token, bias.to_bits()]);
        }
        let at = sections.new_slots + index * SLOT_WORDS;
        encode_slot(new, limits, eos_ids, bias_count, &mut words[at..at + SLOT_WORDS]);
        bias_count += count;
    }
    let retired = lines(words, sections.retired, RETIRED_WORDS, input.retired.len());
    for ((slot, generation), out) in input.retired.iter().zip(retired) {
        out.copy_from_slice(&[slot.0, generation.0]);
    }
    for (update, out) in input.pages.iter().zip(lines(words, sections.pages, PAGE_WORDS, input.pages.len())) {
        out.copy_from_slice(&[update.slot.0, update.index, update.page.0]);
    }

    let mut set = |field: usize, value: usize| words[field] = word(value);
    set(header::ROWS, input.rows.len());
    set(header::ROWS_AT, sections.rows);
    set(header::LOGIT_ROWS, logit_count);
    set(header::LOGIT_ROWS_AT, sections.logit_rows);
    set(header::NEW_SLOTS, input.new_slots.len());
    set(header::NEW_SLOTS_AT, sections.new_slots);
    set(header::RETIRED, input.retired.len());
    set(header::RETIRED_AT, sections.retired);
    set(header::PAGES, input.pages.len());
    set(header::PAGES_AT, sections.pages);
    set(header::BIAS, bias_count);
    set(header::BIAS_AT, sections.bias);
    set(header::USED_WORDS, sections.end);
    words[header::FEATURES] = input.features;
    [words[header::STEP_LO], words[header::STEP_HI]] = halves(input.step);
    Ok(sections.end)
}

fn encode_slot(new: &NewSlot, limits: &StepLimits, eos_ids: &[u32], bias_start: usize, out: &mut [u32]) {
    let sampling = &*new.sampling;
    out.fill(0);
    out[slot::SLOT] = new.slot.0;
    out[slot::GENERATION] = new.generation.0;
    out[slot::FLAGS] = [
        (sampling.ignore_eos, slot::IGNORE_EOS),
        (sampling.is_greedy(), slot::GREEDY),
        (sampling.has_penalties(), slot::PENALTIES),
        (!sampling.logit_bias.is_empty(), slot::BIAS),
        (sampling.has_truncation(), slot::TRUNCATION),
        (sampling.logprobs.is_some(), slot::LOGPROBS),
    ]
    .into_iter()
    .filter_map(|(on, flag)| on.then_some(flag))
    .sum();
    out[slot::TEMPERATURE] = sampling.temperature.to_bits();
    out[slot::TOP_P] = sampling.top_p.to_bits();
    out[slot::MIN_P] = sampling.min_p.to_bits();
    out[slot::TOP_K] = sampling.top_k;
    out[slot::PRESENCE] = sampling.presence_penalty.to_bits();
    out[slot::FREQUENCY] = sampling.frequency_penalty.to_bits();
    out[slot::REPETITION] = sampling.repetition_penalty.to_bits();
    [out[slot::SEED_LO], out[slot::SEED_HI]] = halves(sampling.seed);
    out[slot::CHOICE] = new.choice;
    out[slot::MIN_TOKENS] = sampling.min_tokens;
    out[slot::MAX_TOKENS] = sampling.max_tokens;
    out[slot::CONTEXT] = word(limits.max_model_len);
    out[slot::TOP_LOGPROBS] = sampling.logprobs.unwrap_or(0);
    out[slot::BIAS_START] = word(bias_start);
    out[slot::BIAS_COUNT] = word(sampling.logit_bias.len());
    out[slot::GENERATED] = new.generated;
    out[slot::EOS_COUNT] = word(eos_ids.len());
    out[slot::EOS_IDS..][..eos_ids.len()].copy_from_slice(eos_ids);
    out[slot::STOP_COUNT] = word(sampling.stop_ids.len());
    out[slot::STOP_IDS..][..sampling.stop_ids.len()].copy_from_slice(&sampling.stop_ids);
}

/// Word offsets of an entry's sections, one behind the other: what a step uses is the entry's beginning, which the device reads at once.
struct Sections {
    rows: usize,
    logit_rows: usize,
    new_slots: usize,
    retired: usize,
    pages: usize,
    bias: usize,
    end: usize,
}

impl Sections {
    fn of(input: &StepInput) -> Sections {
        let used = EntryLayout {
            rows_max: input.rows.len(),
            logit_rows_max: input.logit_rows(),
            new_slots_max: input.new_slots.len(),
            retired_max: input.retired.len(),
            pages_max: input.pages.len(),
            bias_max: input.new_slots.iter().map(|new| new.sampling.logit_bias.len()).sum(),
        };
        let [rows, logit_rows, new_slots, retired, pages, bias, end] = used.sections();
        Sections { rows, logit_rows, new_slots, retired, pages, bias, end }
    }
}

/// `count` lines of `width` words from word `at` on.
fn lines(words: &mut [u32], at: usize, width: usize, count: usize) -> std::slice::ChunksExactMut<'_, u32> {
    words[at..at + width * count].chunks_exact_mut(width)
}

fn word(value: usize) -> u32 {
    u32::try_from(value).expect("entries hold fewer than 2^32 of anything")
}

fn halves(value: u64) -> [u32; 2] {
    [value as u32, (value >> 32) as u32]
}

fn whole(lo: u32, hi: u32) -> u64 {
    u64::from(lo) | u64::from(hi) << 32
}

/// Reads an output record back. Lines that were pad rows on the device are left out; `output` is overwritten.
pub fn decode(words: &[u32], output: &mut StepOutput) -> Result<(), DeviceError> {
    let garbled = |what: String| DeviceError::Lost(format!("the step's record is garbled: {what}"));
    let count = words[output::RECORDS] as usize;
    let records = &words[OUTPUT_HEADER_WORDS..];
    if count * RECORD_WORDS > records.len() {
        return Err(garbled(format!("{count} records in {} words", records.len())));
    }
    output.step = whole(words[output::STEP_LO], words[output::STEP_HI]);
    let start = whole(words[output::START_NS], words[output::START_NS + 1]);
    let end = whole(words[output::END_NS], words[output::END_NS + 1]);
    output.device_ns = end.saturating_sub(start);
    output.routes_local = u64::from(words[output::ROUTES_LOCAL]);
    output.routes_remote = u64::from(words[output::ROUTES_REMOTE]);
    output.pad_rows = words[output::PAD_ROWS];
    output.checksum = words[output::CHECKSUM];

    output.records.clear();
    for line in records.chunks_exact(RECORD_WORDS).take(count) {
        let flags = line[record::FLAGS];
        if flags & record::LIVE == 0 {
            continue;
        }
        let top = line[record::TOP_COUNT] as usize;
        if top > TOP_LOGPROBS_MAX {
            return Err(garbled(format!("{top} alternatives")));
        }
        let ids = line[record::TOP_IDS..][..top].iter().copied();
        let logprobs = line[record::TOP_LOGPROBS..][..top].iter().map(|&bits| f32::from_bits(bits));
        output.records.push(Record {
            slot: SlotId(line[record::SLOT]),
            generation: Generation(line[record::GENERATION]),
            position: line[record::POSITION],
            token: line[record::TOKEN],
            scored: flags & record::SCORED != 0,
            logprob: f32::from_bits(line[record::LOGPROB]),
            rank: line[record::TOKEN_RANK],
            top: ids.zip(logprobs).collect(),
            ended: end_reason(flags).map_err(garbled)?,
        });
    }
    Ok(())
}

fn end_reason(flags: u32) -> Result<Option<EndReason>, String> {
    if flags & record::ENDED == 0 {
        return Ok(None);
    }
    match (flags >> record::REASON_SHIFT) & 0xff {
        record::REASON_EOS => Ok(Some(EndReason::Eos)),
        record::REASON_STOP_ID => Ok(Some(EndReason::StopId)),
        record::REASON_MAX_TOKENS => Ok(Some(EndReason::MaxTokens)),
        record::REASON_CONTEXT => Ok(Some(EndReason::Context)),
        record::REASON_NAN => Ok(Some(EndReason::Nan)),
        other => Err(format!("end reason {other}")),
    }
}
