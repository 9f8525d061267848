//! The slot table: fixed seats, who may sit, and when a seat that was left may be taken again.
//!
//! Owned by the scheduler. **Invariant:** every take bumps the seat's generation, so (slot, generation) names one holder for ever; a seat that
//! was left is not taken again before the step it cools for has settled.

use crate::policy::Policy;
use slotgraph_graphs::step::{Generation, SlotId};
use std::collections::VecDeque;

/// What a seat is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seat {
    Free,
    Held,
    /// Free once this step has settled.
    Cooling(u64),
}

#[derive(Debug)]
pub struct SlotTable {
    seats: Vec<Seat>,
    generations: Vec<u32>,
    /// The seat left last is taken first: the shortest way to a mistake, if there is one.
    free: Vec<SlotId>,
    cooling: VecDeque<SlotId>,
    policy: Policy,
}

impl SlotTable {
    pub fn new(slots_max: usize, policy: Policy) -> Self {
        SlotTable {
            seats: vec![Seat::Free; slots_max],
            generations: vec![0; slots_max],
            free: (0..slots_max as u32).rev().map(SlotId).collect(),
            cooling: VecDeque::with_capacity(slots_max),
            policy,
        }
    }

    /// A free seat for a new holder.
    pub fn take(&mut self) -> Option<(SlotId, Generation)> {
        let slot = self.free.pop()?;
        let index = slot.0 as usize;
        self.seats[index] = Seat::Held;
        if self.policy.bump_generation || self.generations[index] == 0 {
            self.generations[index] = self.generations[index].wrapping_add(1);
        }
        Some((slot, Generation(self.generations[index])))
    }

    /// The holder leaves; the seat is free again once step `until` has settled.
    pub fn leave(&mut self, slot: SlotId, until: u64) {
        let seat = &mut self.seats[slot.0 as usize];
        assert_eq!(*seat, Seat::Held, "slot {} is left by nobody", slot.0);
        if self.policy.cool_seats {
            *seat = Seat::Cooling(until);
            self.cooling.push_back(slot);
        } else {
            *seat = Seat::Free;
            self.free.push(slot);
        }
    }

    /// Frees the seats that cooled for steps up to `settled`.
    pub fn thaw(&mut self, settled: u64) {
        while let Some(&slot) = self.cooling.front() {
            let seat = &mut self.seats[slot.0 as usize];
            if !matches!(*seat, Seat::Cooling(until) if until <= settled) {
                break;
            }
            *seat = Seat::Free;
            self.free.push(slot);
            self.cooling.pop_front();
        }
    }

    pub fn seat(&self, slot: SlotId) -> Seat {
        self.seats[slot.0 as usize]
    }
    /// Of the seat's holder, or of its last one.
    pub fn generation(&self, slot: SlotId) -> Generation {
        Generation(self.generations[slot.0 as usize])
    }
    pub fn free(&self) -> usize {
        self.free.len()
    }
    pub fn cooling(&self) -> usize {
        self.cooling.len()
    }
    pub fn total(&self) -> usize {
        self.seats.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seat_cools_until_its_step_settled_and_comes_back_with_another_generation() {
        let mut slots = SlotTable::new(2, Policy::default());
        let (first, one) = slots.take().unwrap();
        let (second, _) = slots.take().unwrap();
        assert_ne!(first, second);
        assert_eq!(slots.take(), None);
        slots.leave(first, 5);
        slots.thaw(4);
        assert_eq!((slots.take(), slots.seat(first)), (None, Seat::Cooling(5)));
        slots.thaw(5);
        let (again, two) = slots.take().unwrap();
        assert_eq!(again, first);
        assert_ne!(one, two);
    }

    #[test]
    #[should_panic(expected = "left by nobody")]
    fn a_seat_is_left_once() {
        let mut slots = SlotTable::new(1, Policy::default());
        let (slot, _) = slots.take().unwrap();
        slots.leave(slot, 1);
        slots.leave(slot, 1);
    }
}
