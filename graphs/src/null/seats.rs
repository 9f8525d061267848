//! The slot table and the page pool of a null device.
//!
//! A page holds, for each of its tokens, the hash of the sequence up to there, and the hash before its first token. A row
//! follows its slot's block table from position 0 and sees at once whether every page still holds its own sequence.

use super::{Draw, Drawn, EnqueuedRow, EnqueuedStep, Script};
use crate::device::DeviceError;
use crate::spec::SamplingSpec;
use crate::step::{EndReason, Generation, PageId, Record, RowFeed, RowInput, RowWant, SlotId, StepInput, StepLimits};
use slotgraph_kernels::contract::PAGE_TOKENS;
use slotgraph_kernels::entry::feature;
use std::sync::Arc;

/// The hash of no tokens.
const EMPTY: u64 = 0x9e37_79b9_7f4a_7c15;
/// What a page holds where no sequence wrote.
const UNWRITTEN: u64 = 0;

/// The hash of a sequence, as `Draw::context` has it.
pub fn context_hash(tokens: &[u32]) -> u64 {
    tokens.iter().fold(EMPTY, |before, &token| append(before, token))
}

fn append(before: u64, token: u32) -> u64 {
    let mixed = (before ^ u64::from(token).wrapping_add(1)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    mixed ^ (mixed >> 32)
}

/// One seat's state on the device.
#[derive(Clone, Debug)]
pub struct Seat {
    /// None until the seat has its first holder.
    pub generation: Option<Generation>,
    pub ended: bool,
    /// The next token and its position, once one was drawn.
    pub next: Option<(u32, u32)>,
    pub generated: u32,
    pub choice: u32,
    pub sampling: Arc<SamplingSpec>,
    /// The block table; entries not owned hold page 0.
    pub pages: Vec<PageId>,
    /// The step that last drew a token for it.
    sampled_at: u64,
    /// Position of the newest row and the hash of the sequence up to it.
    tail: Option<(u32, u64)>,
}

#[derive(Clone)]
struct Page {
    before: u64,
    prefix: [u64; PAGE_TOKENS],
}

pub(super) struct Seats {
    seats: Vec<Seat>,
    pages: Vec<Page>,
    context: u32,
}

impl Seats {
    pub fn new(limits: &StepLimits) -> Seats {
        let seat = Seat {
            generation: None,
            ended: true,
            next: None,
            generated: 0,
            choice: 0,
            sampling: Arc::new(SamplingSpec::greedy(1)),
            pages: vec![PageId(0); limits.pages_per_slot],
            sampled_at: 0,
            tail: None,
        };
        Seats {
            seats: vec![seat; limits.slots_max],
            pages: vec![Page { before: EMPTY, prefix: [UNWRITTEN; PAGE_TOKENS] }; limits.pages],
            context: u32::try_from(limits.max_model_len).expect("positions are u32"),
        }
    }

    pub fn seat(&self, slot: SlotId) -> &Seat {
        &self.seats[slot.0 as usize]
    }

    /// Does what `fetch` … `feed` do, in their order.
    pub fn run(
        &mut self,
        input: &StepInput,
        eos_ids: &[u32],
        script: &mut Script,
        enqueued: &mut EnqueuedStep,
        records: &mut Vec<Record>,
    ) -> Result<(), DeviceError> {
        self.fetch(input);
        enqueued.rows.clear();
        enqueued.pages.clear();
        for row in &input.rows {
            let seat = &self.seats[row.slot.0 as usize];
            let live = seat.generation == Some(row.generation) && !seat.ended;
            let (token, position) = if live { fed(seat, row)? } else { (0, 0) };
            if live {
                self.append(row, token, position, &mut enqueued.pages)?;
            }
            enqueued.rows.push(EnqueuedRow { slot: row.slot, generation: row.generation, live, position });
        }
        records.clear();
        for (row, at) in input.rows.iter().zip(&enqueued.rows) {
            if !at.live {
                continue;
            }
            match row.want {
                RowWant::Nothing => {}
                RowWant::Score(target) => {
                    self.need(input, row, feature::SCORE)?;
                    records.push(self.record(row, at.position, target, true));
                }
                RowWant::Sample => records.push(self.sample(input, row, at.position, eos_ids, script)?),
            }
        }
        Ok(())
    }

    fn fetch(&mut self, input: &StepInput) {
        for &(slot, generation) in &input.retired {
            let seat = &mut self.seats[slot.0 as usize];
            if seat.generation == Some(generation) {
                seat.ended = true;
            }
        }
        for new in &input.new_slots {
            let seat = &mut self.seats[new.slot.0 as usize];
            seat.generation = Some(new.generation);
            seat.ended = false;
            seat.next = None;
            seat.generated = new.generated;
            seat.choice = new.choice;
            seat.sampling = Arc::clone(&new.sampling);
            seat.pages.fill(PageId(0));
            seat.sampled_at = 0;
            seat.tail = None;
        }
        for update in &input.pages {
            self.seats[update.slot.0 as usize].pages[update.index as usize] = update.page;
        }
    }

    /// Writes the row's token to its page, after the pages before it were found to hold its sequence.
    fn append(
        &mut self,
        row: &RowInput,
        token: u32,
        position: u32,
        named: &mut Vec<PageId>,
    ) -> Result<(), DeviceError> {
        let seat = &mut self.seats[row.slot.0 as usize];
        let (index, offset) = (position as usize / PAGE_TOKENS, position as usize % PAGE_TOKENS);
        let (mut before, mut page_before) = (EMPTY, EMPTY);
        for (held, &page) in seat.pages[..=index].iter().enumerate() {
            if page == PageId(0) {
                return Err(broken(row, position, format!("needs a page at index {held} and the slot holds none")));
            }
            named.push(page);
            let cells = &self.pages[page.0 as usize];
            page_before = before;
            let used = if held == index { offset } else { PAGE_TOKENS };
            if used == 0 {
                continue;
            }
            before = cells.prefix[used - 1];
            if cells.before != page_before || before == UNWRITTEN {
                return Err(broken(row, position, format!("reads page {}, which holds another sequence", page.0)));
            }
        }
        if seat.tail.is_some_and(|(last, prefix)| last + 1 == position && prefix != before) {
            return Err(broken(row, position, "reads back other tokens than its slot wrote".into()));
        }
        let here = append(before, token);
        seat.tail = Some((position, here));
        let cells = &mut self.pages[seat.pages[index].0 as usize];
        if cells.before != page_before || cells.prefix[offset] != here {
            // What lay here and behind belonged to another sequence.
            cells.prefix[offset..].fill(UNWRITTEN);
            cells.before = page_before;
            cells.prefix[offset] = here;
        }
        Ok(())
    }

    fn sample(
        &mut self,
        input: &StepInput,
        row: &RowInput,
        position: u32,
        eos_ids: &[u32],
        script: &mut Script,
    ) -> Result<Record, DeviceError> {
        let seat = &self.seats[row.slot.0 as usize];
        if seat.sampled_at == input.step {
            return Err(broken(row, position, "is sampled twice in one step".into()));
        }
        self.need(input, row, needs(seat))?;
        let page = &self.pages[seat.pages[position as usize / PAGE_TOKENS].0 as usize];
        let drawn = script(Draw {
            slot: row.slot,
            generation: row.generation,
            position,
            generated: seat.generated,
            seed: seat.sampling.seed,
            choice: seat.choice,
            context: page.prefix[position as usize % PAGE_TOKENS],
        });
        let token = match drawn {
            Drawn::Nan => 0,
            Drawn::Token(token) => allowed(seat, eos_ids, token),
        };
        let seat = &mut self.seats[row.slot.0 as usize];
        seat.sampled_at = input.step;
        seat.generated += 1;
        seat.next = Some((token, position + 1));
        let ended = end_reason(seat, eos_ids, drawn, token, position, self.context);
        seat.ended = ended.is_some();
        let mut record = Record { ended, ..self.record(row, position, token, false) };
        if drawn == Drawn::Nan {
            record.top.clear();
        }
        Ok(record)
    }

    fn record(&self, row: &RowInput, position: u32, token: u32, scored: bool) -> Record {
        let top = self.seats[row.slot.0 as usize].sampling.logprobs.unwrap_or(0);
        Record {
            slot: row.slot,
            generation: row.generation,
            position,
            token,
            scored,
            logprob: -1.0,
            rank: 1,
            top: (0..top).map(|rank| (token.wrapping_add(rank), -1.0 - rank as f32)).collect(),
            ended: None,
        }
    }

    fn need(&self, input: &StepInput, row: &RowInput, bits: u32) -> Result<(), DeviceError> {
        let missing = bits & !input.features;
        if missing == 0 {
            return Ok(());
        }
        Err(failed(format!("a row of slot {} needs feature bits {missing:#x} that the step lacks", row.slot.0)))
    }
}

/// The token and position of a live row.
fn fed(seat: &Seat, row: &RowInput) -> Result<(u32, u32), DeviceError> {
    match (row.feed, seat.next) {
        (RowFeed::Given { token, position, .. }, _) => Ok((token, position)),
        (RowFeed::FromSlot, Some(next)) => Ok(next),
        (RowFeed::FromSlot, None) => {
            Err(failed(format!("slot {} has a decode row before its first token was drawn", row.slot.0)))
        }
    }
}

/// Feature bits without which a real device would sample this seat's row wrongly.
fn needs(seat: &Seat) -> u32 {
    let sampling = &*seat.sampling;
    let random = !sampling.is_greedy();
    [
        (random, feature::RANDOM),
        (random && sampling.has_truncation(), feature::TRUNCATION),
        (sampling.has_penalties(), feature::PENALTIES),
        (!sampling.logit_bias.is_empty(), feature::BIAS),
        (seat.generated < sampling.min_tokens, feature::MIN_TOKENS),
        (sampling.logprobs.is_some(), feature::LOGPROBS),
        (sampling.logprobs.is_some_and(|top| top > 0), feature::TOP_LOGPROBS),
    ]
    .into_iter()
    .filter_map(|(on, bit)| on.then_some(bit))
    .sum()
}

/// The scripted token, or the next one that min_tokens does not ban.
fn allowed(seat: &Seat, eos_ids: &[u32], token: u32) -> u32 {
    if seat.generated >= seat.sampling.min_tokens {
        return token;
    }
    let banned = |token: &u32| eos_ids.contains(token) || seat.sampling.stop_ids.contains(token);
    (token..).find(|token| !banned(token)).expect("few ids are banned")
}

/// As `feed` decides, after the token was counted.
fn end_reason(
    seat: &Seat,
    eos_ids: &[u32],
    drawn: Drawn,
    token: u32,
    position: u32,
    context: u32,
) -> Option<EndReason> {
    let sampling = &*seat.sampling;
    if drawn == Drawn::Nan {
        Some(EndReason::Nan)
    } else if !sampling.ignore_eos && eos_ids.contains(&token) {
        Some(EndReason::Eos)
    } else if sampling.stop_ids.contains(&token) {
        Some(EndReason::StopId)
    } else if seat.generated >= sampling.max_tokens {
        Some(EndReason::MaxTokens)
    } else if position + 2 >= context {
        Some(EndReason::Context)
    } else {
        None
    }
}

fn broken(row: &RowInput, position: u32, what: String) -> DeviceError {
    failed(format!("the row of slot {} at position {position} {what}", row.slot.0))
}

fn failed(reason: String) -> DeviceError {
    DeviceError::Op { op: "null", layer: None, reason }
}
