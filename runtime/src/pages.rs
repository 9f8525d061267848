//! The page pool: which KV pages are free, held, or cooling.
//!
//! Owned by the scheduler; the pool on the device is allocated at start and never moves. **Invariant:** page 0 belongs to pad rows and is never
//! given out; a page has one holder or is shared by reference count; after its last holder it is not given out again before the step it
//! cools for has settled; free + held + cooling is always the whole pool.

use crate::policy::Policy;
use slotgraph_graphs::step::PageId;
use slotgraph_kernels::contract::PAGE_TOKENS;
use std::collections::VecDeque;

/// What a page is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// Page 0.
    Pad,
    Free,
    /// By this many holders.
    Held(u32),
    /// Free once this step has settled.
    Cooling(u64),
}

#[derive(Debug)]
pub struct PagePool {
    states: Vec<PageState>,
    /// The page freed last is given out first.
    free: Vec<PageId>,
    cooling: VecDeque<PageId>,
    policy: Policy,
}

/// Pages that hold `tokens` tokens.
pub fn pages_for(tokens: usize) -> usize {
    tokens.div_ceil(PAGE_TOKENS)
}

impl PagePool {
    /// A pool of `pages`, page 0 included.
    pub fn new(pages: usize, policy: Policy) -> Self {
        let mut states = vec![PageState::Free; pages];
        states[0] = PageState::Pad;
        PagePool {
            states,
            free: (1..pages as u32).rev().map(PageId).collect(),
            cooling: VecDeque::with_capacity(pages),
            policy,
        }
    }

    /// A free page, held once.
    pub fn take(&mut self) -> Option<PageId> {
        let page = self.free.pop()?;
        self.states[page.0 as usize] = PageState::Held(1);
        Some(page)
    }

    /// One more holder of a held page.
    pub fn share(&mut self, page: PageId) {
        match &mut self.states[page.0 as usize] {
            PageState::Held(holders) => *holders += 1,
            other => panic!("page {} is shared while it is {other:?}", page.0),
        }
    }

    /// A holder lets go; after the last one the page is free once step `until` has settled.
    pub fn release(&mut self, page: PageId, until: u64) {
        let state = &mut self.states[page.0 as usize];
        match state {
            PageState::Held(holders) if *holders > 1 && self.policy.count_holders => *holders -= 1,
            // Step 0 is no step: nothing was ever enqueued.
            PageState::Held(_) if self.policy.cool_pages && until > 0 => {
                *state = PageState::Cooling(until);
                self.cooling.push_back(page);
            }
            PageState::Held(_) => {
                *state = PageState::Free;
                self.free.push(page);
            }
            other => panic!("page {} is released while it is {other:?}", page.0),
        }
    }

    /// Frees the pages that cooled for steps up to `settled`.
    pub fn thaw(&mut self, settled: u64) {
        while let Some(&page) = self.cooling.front() {
            let state = &mut self.states[page.0 as usize];
            if !matches!(*state, PageState::Cooling(until) if until <= settled) {
                break;
            }
            *state = PageState::Free;
            self.free.push(page);
            self.cooling.pop_front();
        }
    }

    pub fn state(&self, page: PageId) -> PageState {
        self.states[page.0 as usize]
    }
    pub fn free(&self) -> usize {
        self.free.len()
    }
    pub fn cooling(&self) -> usize {
        self.cooling.len()
    }
    /// Pages that can be given out at all.
    pub fn total(&self) -> usize {
        self.states.len() - 1
    }
    /// Held or cooling.
    pub fn used(&self) -> usize {
        self.total() - self.free.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_shared_page_outlives_its_first_holder_and_then_cools() {
        let mut pages = PagePool::new(2, Policy::default());
        let page = pages.take().unwrap();
        assert_eq!((page, pages.take()), (PageId(1), None));
        pages.share(page);
        pages.release(page, 3);
        assert_eq!(pages.state(page), PageState::Held(1));
        pages.release(page, 4);
        pages.thaw(3);
        assert_eq!((pages.state(page), pages.take()), (PageState::Cooling(4), None));
        pages.thaw(4);
        assert_eq!(pages.take(), Some(page));
    }

    proptest! {
        /// Against a model that keeps, for each page, its holders and the step it cools for.
        #[test]
        fn the_pool_agrees_with_a_naive_model(ops in prop::collection::vec((0..4u8, 0..16usize), 1..300)) {
            let mut pool = PagePool::new(9, Policy::default());
            let mut held: Vec<PageId> = Vec::new();
            let mut cooling: Vec<(PageId, u64)> = Vec::new();
            let (mut enqueued, mut settled) = (0u64, 0u64);
            for (op, pick) in ops {
                match op {
                    0 => match pool.take() {
                        Some(page) => {
                            prop_assert!(page.0 != 0 && !held.contains(&page));
                            prop_assert!(cooling.iter().all(|&(other, _)| other != page));
                            held.push(page);
                        }
                        None => {
                            let mut distinct = held.clone();
                            distinct.sort();
                            distinct.dedup();
                            prop_assert_eq!(distinct.len() + cooling.len(), 8);
                        }
                    },
                    1 if !held.is_empty() => {
                        let page = held[pick % held.len()];
                        pool.share(page);
                        held.push(page);
                    }
                    2 if !held.is_empty() => {
                        let page = held.swap_remove(pick % held.len());
                        pool.release(page, enqueued);
                        if !held.contains(&page) && enqueued > 0 {
                            cooling.push((page, enqueued));
                        }
                    }
                    3 if pick < 8 => enqueued += 1,
                    _ => {
                        settled = (settled + 1).min(enqueued);
                        pool.thaw(settled);
                        cooling.retain(|&(_, until)| until > settled);
                    }
                }
                let mut distinct = held.clone();
                distinct.sort();
                distinct.dedup();
                prop_assert!(pool.used() >= distinct.len() + cooling.len().min(pool.cooling()));
                pool.thaw(settled);
                cooling.retain(|&(_, until)| until > settled);
                prop_assert_eq!(pool.cooling(), cooling.len());
                prop_assert_eq!(pool.free(), 8 - distinct.len() - cooling.len());
            }
        }
    }
}
