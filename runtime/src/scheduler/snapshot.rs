//! The slot table between two turns, as `/debug/slots` and the simulator see it.

use super::Scheduler;
use crate::slots::Seat;
use serde::Serialize;
use slotgraph_graphs::step::SlotId;

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Snapshot {
    pub enqueued_step: u64,
    pub settled_step: u64,
    pub queued: usize,
    pub pages_free: usize,
    pub pages_cooling: usize,
    pub pages_total: usize,
    /// Prompt pages that queued choices may share, held for them.
    pub pages_kept_for_siblings: usize,
    /// Seats that are not free.
    pub slots: Vec<SlotView>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SlotView {
    pub slot: u32,
    pub generation: u32,
    /// `prefilling`, `active` or `cooling`.
    pub state: &'static str,
    pub holder: Option<HolderView>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HolderView {
    pub request_id: String,
    pub choice_index: u32,
    /// Arrival number.
    pub arrival: u64,
    pub prompt_tokens: u32,
    pub generated_tokens: u32,
    /// Rows enqueued: known tokens, then draws that were fed.
    pub position: u32,
    pub pages: Vec<u32>,
    pub shared_pages: usize,
    pub preemptions: u32,
}

impl Scheduler {
    pub fn snapshot(&self) -> Snapshot {
        let view = |index: usize| {
            let slot = SlotId(index as u32);
            let holder = self.seats[index].as_ref();
            let state = match (self.slots.seat(slot), holder) {
                (Seat::Free, _) => return None,
                (_, Some(seated)) => seated.state().name(),
                (_, None) => "cooling",
            };
            let holder = holder.map(|seated| HolderView {
                request_id: seated.live.group.id.to_string(),
                choice_index: seated.live.choice.index,
                arrival: seated.live.key,
                prompt_tokens: seated.live.prompt_len(),
                generated_tokens: seated.live.generated.len() as u32,
                position: seated.next + seated.draws.saturating_sub(1),
                pages: seated.pages.iter().map(|page| page.0).collect(),
                shared_pages: seated.shared,
                preemptions: seated.live.stats.preemptions,
            });
            Some(SlotView { slot: slot.0, generation: self.slots.generation(slot).0, state, holder })
        };
        Snapshot {
            enqueued_step: self.enqueued,
            settled_step: self.settled,
            queued: self.queue.len(),
            pages_free: self.pages.free(),
            pages_cooling: self.pages.cooling(),
            pages_total: self.pages.total(),
            pages_kept_for_siblings: self.shares.held,
            slots: (0..self.seats.len()).filter_map(view).collect(),
        }
    }
}
