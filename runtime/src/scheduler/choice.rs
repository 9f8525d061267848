//! A live choice: what is known of it wherever it is (`Live`), and what it has when it holds a seat (`Seated`).
//!
//! **Invariant:** `generated` is exactly what was handed to the sink; a seated choice's rows are its known tokens in order, then one row a
//! sampled token, and no row is ever past the page that it owns.

use super::shares::ShareId;
use crate::load::LifeState;
use crate::pages::pages_for;
use crate::request::{Choice, Event, RequestId, Token};
use slotgraph_graphs::step::{Generation, PageId, RowFeed, RowInput, RowWant, SlotId};
use slotgraph_kernels::contract::PAGE_TOKENS;
use std::rc::Rc;
use std::time::Instant;

/// What the choices of a group have in common.
#[derive(Debug)]
pub(crate) struct GroupFacts {
    /// Arrival number.
    pub number: u64,
    pub id: RequestId,
    pub received: Instant,
    pub deadline: Option<Instant>,
}

/// A choice that has not ended.
#[derive(Debug)]
pub(crate) struct Live {
    /// Arrival number: smaller is older.
    pub key: u64,
    pub group: Rc<GroupFacts>,
    pub choice: Choice,
    /// The prompt pages that it may share with its siblings.
    pub share: Option<ShareId>,
    /// Tokens that it may generate: max_tokens, or what the context leaves.
    pub limit: u32,
    pub generated: Vec<u32>,
    /// Prompt tokens scored so far.
    pub scored: u32,
    /// Prompt positions that were counted as prefilled.
    pub counted: u32,
    /// The sink refused an event: nothing more is sent, the next sweep ends it.
    pub deaf: bool,
    pub stats: Stats,
}

/// What the trace will say.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stats {
    pub scheduled: Option<Instant>,
    pub prefill_done: Option<Instant>,
    pub first_token: Option<Instant>,
    pub second_token: Option<Instant>,
    pub last_token: Option<Instant>,
    pub active_max: u32,
    pub pending_max: u32,
    pub decode_rows_max: u32,
    pub batch_steps: u32,
    pub singleton_steps: u32,
    /// Bit i: the i-th bucket.
    pub buckets: u64,
    pub padded_rows: u64,
    pub chunks: u32,
    pub preemptions: u32,
    pub shared_tokens: u32,
    pub slot: Option<SlotId>,
    pub pages_max: u32,
}

impl Live {
    pub fn prompt_len(&self) -> u32 {
        self.choice.prompt.len() as u32
    }
    /// Prompt tokens that have to be scored in all.
    pub fn scores(&self) -> u32 {
        if self.choice.score_prompt.is_some() { self.prompt_len() - 1 } else { 0 }
    }
    /// Whether there is anything for a device to do.
    pub fn needs_device(&self) -> bool {
        self.limit as usize > self.generated.len() || self.scored < self.scores()
    }
    /// Positions that it may ever write: the last token drawn is never fed.
    pub fn positions_max(&self) -> usize {
        if self.limit == 0 { self.scores() as usize } else { (self.prompt_len() + self.limit - 1) as usize }
    }
    /// Pages that admission reserves: what is known, and at most `reserve` tokens more.
    pub fn pages_reserved(&self, reserve: usize) -> usize {
        let known = self.choice.prompt.len() + self.generated.len();
        pages_for((known + reserve).min(self.positions_max()))
    }
    /// Token at `position` of prompt and answer so far.
    fn token_at(&self, position: u32) -> u32 {
        let prompt = &self.choice.prompt;
        let position = position as usize;
        prompt.get(position).copied().unwrap_or_else(|| self.generated[position - prompt.len()])
    }
    pub fn note_company(&mut self, active: u32, pending: u32) {
        self.stats.active_max = self.stats.active_max.max(active);
        self.stats.pending_max = self.stats.pending_max.max(pending);
    }
}

/// A choice in a seat.
#[derive(Debug)]
pub(crate) struct Seated {
    pub live: Live,
    pub slot: SlotId,
    pub generation: Generation,
    /// Its block table; the first `shared` pages are held together with siblings.
    pub pages: Vec<PageId>,
    pub shared: usize,
    /// Block-table entries that the device knows.
    pub pages_sent: usize,
    /// The device knows the holder.
    pub announced: bool,
    /// Rows of known tokens: prompt and what was generated before it took this seat.
    pub given: u32,
    /// Next of them to enqueue.
    pub next: u32,
    /// Tokens generated before it took this seat.
    pub before: u32,
    /// Draws enqueued since it took this seat.
    pub draws: u32,
    /// Prompt scores of the step that settles now, not sent yet.
    pub scores: Vec<Token>,
}

impl Seated {
    pub fn new(live: Live, slot: SlotId, generation: Generation, pages: Vec<PageId>, shared: usize) -> Self {
        let before = live.generated.len() as u32;
        // Without a draw at the end the last token's row would compute nothing that anyone reads.
        let given = if live.limit == 0 { live.scores() } else { live.prompt_len() + before };
        let next = (shared * PAGE_TOKENS) as u32;
        Seated {
            live,
            slot,
            generation,
            pages,
            shared,
            pages_sent: 0,
            announced: false,
            given,
            next,
            before,
            draws: 0,
            scores: Vec::new(),
        }
    }

    pub fn state(&self) -> LifeState {
        if self.next < self.given { LifeState::Prefilling } else { LifeState::Active }
    }
    /// Position of the next decode row, if one is due.
    pub fn decode_position(&self) -> Option<u32> {
        let due = self.next >= self.given && self.draws > 0 && self.before + self.draws < self.live.limit;
        due.then(|| self.given + self.draws - 1)
    }
    /// Position of the row whose draw is the next one to be delivered.
    pub fn draw_position(&self) -> u32 {
        self.live.prompt_len() + self.live.generated.len() as u32 - 1
    }
    pub fn decode_row(&self) -> RowInput {
        self.row(RowFeed::FromSlot, RowWant::Sample)
    }
    /// The row of the known token at `position`.
    pub fn given_row(&self, position: u32) -> RowInput {
        let prompt = &self.live.choice.prompt;
        let generated = position >= self.live.prompt_len();
        let feed = RowFeed::Given { token: self.live.token_at(position), position, generated };
        let want = match self.live.choice.score_prompt {
            Some(_) if position >= self.live.scored && position < self.live.scores() => {
                RowWant::Score(prompt[position as usize + 1])
            }
            _ if position + 1 == self.given && self.live.limit > 0 => RowWant::Sample,
            _ => RowWant::Nothing,
        };
        self.row(feed, want)
    }
    /// Sends the scores that have come in.
    pub fn send_scores(&mut self) {
        if !self.scores.is_empty() {
            let scores = std::mem::take(&mut self.scores);
            self.live.deaf |= !self.live.choice.sink.send(Event::Prompt(scores));
        }
    }
    /// Block-table entries that rows up to position `end` − 1 need and the device does not know.
    pub fn pages_unsent(&self, end: u32) -> usize {
        pages_for(end as usize).saturating_sub(self.pages_sent)
    }
    fn row(&self, feed: RowFeed, want: RowWant) -> RowInput {
        RowInput { slot: self.slot, generation: self.generation, feed, want }
    }
}
