//! The naive model: looks at every table after every turn and says what cannot be.

use slotgraph_graphs::null::NullControl;
use slotgraph_graphs::step::{PageId, SlotId};
use slotgraph_runtime::pages::PageState;
use slotgraph_runtime::scheduler::{HolderView, Scheduler, Snapshot};
use slotgraph_runtime::slots::Seat;
use std::collections::HashMap;

/// What the model remembers between turns.
#[derive(Default)]
pub struct Model {
    /// Who held a seat under a generation.
    holders: HashMap<(u32, u32), u64>,
    /// By arrival: has held a seat.
    seated: Vec<bool>,
}

/// What the world knows of a choice.
pub struct Known {
    pub live: bool,
    /// Nothing to compute: it never needs a seat.
    pub seatless: bool,
}

impl Model {
    /// Checks every table. `known` is by arrival.
    pub fn check(&mut self, scheduler: &Scheduler, control: &NullControl, known: &[Known]) -> Result<(), String> {
        let snapshot = scheduler.snapshot();
        check_pages(scheduler, &snapshot)?;
        self.check_seats(scheduler, &snapshot, known)?;
        check_unsettled(scheduler, control)?;
        let live = known.iter().filter(|known| known.live).count();
        let held = snapshot.slots.iter().filter(|slot| slot.holder.is_some()).count();
        if live != held + snapshot.queued {
            return Err(format!("{live} choices are live, but {held} hold a seat and {} wait", snapshot.queued));
        }
        Ok(())
    }

    fn check_seats(&mut self, scheduler: &Scheduler, snapshot: &Snapshot, known: &[Known]) -> Result<(), String> {
        self.seated.resize(known.len(), false);
        let mut new = Vec::new();
        for slot in &snapshot.slots {
            let seat = scheduler.slots().seat(SlotId(slot.slot));
            match (seat, &slot.holder) {
                (Seat::Held, Some(holder)) => {
                    let first = *self.holders.entry((slot.slot, slot.generation)).or_insert(holder.arrival);
                    if first != holder.arrival {
                        return Err(format!("generation {} of slot {} was issued twice", slot.generation, slot.slot));
                    }
                    if !known[holder.arrival as usize].live {
                        return Err(format!("choice {} has ended and holds slot {}", holder.arrival, slot.slot));
                    }
                    if !self.seated[holder.arrival as usize] {
                        new.push(holder.arrival as usize);
                    }
                }
                (Seat::Cooling(_), None) => {}
                other => return Err(format!("slot {} is {other:?}", slot.slot)),
            }
        }
        for &arrival in &new {
            self.seated[arrival] = true;
        }
        // First come, first served: whoever was seated for the first time has nobody before it who still waits for that.
        if let Some(&newest) = new.iter().max()
            && let Some(passed) = (0..newest).find(|&at| known[at].live && !known[at].seatless && !self.seated[at])
        {
            return Err(format!("choice {newest} was seated before choice {passed}"));
        }
        Ok(())
    }
}

fn check_pages(scheduler: &Scheduler, snapshot: &Snapshot) -> Result<(), String> {
    let pool = scheduler.pages();
    let mut holders: HashMap<u32, Vec<(&HolderView, usize)>> = HashMap::new();
    for holder in snapshot.slots.iter().filter_map(|slot| slot.holder.as_ref()) {
        for (index, &page) in holder.pages.iter().enumerate() {
            holders.entry(page).or_default().push((holder, index));
        }
    }
    let (mut free, mut cooling, mut kept) = (0, 0, 0);
    for page in 0..=pool.total() as u32 {
        let held_by = holders.get(&page).map_or(&[][..], Vec::as_slice);
        match pool.state(PageId(page)) {
            PageState::Pad if page == 0 && held_by.is_empty() => {}
            PageState::Free if held_by.is_empty() => free += 1,
            PageState::Cooling(_) if held_by.is_empty() => cooling += 1,
            PageState::Held(count) if count as usize >= held_by.len() => {
                kept += count as usize - held_by.len();
                let (first, at) = match held_by.first() {
                    Some(&first) => first,
                    None => continue,
                };
                let together = |&(holder, index): &(&HolderView, usize)| {
                    holder.request_id == first.request_id
                        && index == at
                        && (index + 1) * 64 < holder.prompt_tokens as usize
                };
                if held_by.len() > 1 && !held_by.iter().all(together) {
                    return Err(format!("page {page} is held by strangers"));
                }
            }
            state => return Err(format!("page {page} is {state:?} and in {} block tables", held_by.len())),
        }
    }
    if (free, cooling) != (pool.free(), pool.cooling()) {
        return Err(format!("{free} pages are free and {cooling} cool, not {} and {}", pool.free(), pool.cooling()));
    }
    if kept != snapshot.pages_kept_for_siblings {
        return Err(format!("{kept} pages are held by nobody, {} are kept", snapshot.pages_kept_for_siblings));
    }
    Ok(())
}

/// No step on its way names a page that is free, or a seat that is free or was issued again.
fn check_unsettled(scheduler: &Scheduler, control: &NullControl) -> Result<(), String> {
    let mut wrong = None;
    control.unsettled(|step| {
        for page in &step.pages {
            match scheduler.pages().state(*page) {
                PageState::Held(_) => {}
                PageState::Cooling(until) if until >= step.step => {}
                state => wrong = Some(format!("step {} names page {}, which is {state:?}", step.step, page.0)),
            }
        }
        for row in &step.rows {
            let seat = scheduler.slots().seat(row.slot);
            let mine = scheduler.slots().generation(row.slot) == row.generation;
            let cools = matches!(seat, Seat::Cooling(until) if until >= step.step);
            if !(mine && (seat == Seat::Held || cools)) {
                let (slot, generation) = (row.slot.0, row.generation.0);
                wrong =
                    Some(format!("step {} names slot {slot} generation {generation}, which is {seat:?}", step.step));
            }
        }
    });
    wrong.map_or(Ok(()), Err)
}
