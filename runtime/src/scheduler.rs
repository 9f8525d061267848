//! The scheduler: who holds a slot, who waits, and what the next step does.

use serde::Serialize;

/// The slot table between two turns, for `/debug/slots`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Snapshot {
    pub enqueued_step: u64,
    pub settled_step: u64,
    pub queued: usize,
    pub pages_free: usize,
    pub pages_cooling: usize,
    pub slots: Vec<SlotView>,
}

/// One seat that is not free.
#[derive(Clone, Debug, Serialize)]
pub struct SlotView {
    pub slot: u32,
    pub generation: u32,
    /// `prefilling`, `active` or `cooling`.
    pub state: &'static str,
    /// Empty when cooling.
    pub request_id: String,
    pub choice_index: u32,
    pub prompt_tokens: u32,
    pub generated_tokens: u32,
    pub position: u32,
    pub pages: Vec<u32>,
    pub shared_pages: u32,
}
