//! Shares: prompt pages that the choices of one prompt hold together.
//!
//! The first choice of a prompt to take a seat fills the full pages; once all their rows are enqueued the share holds them too, as long as a
//! choice that could use them is queued. Holding is a convenience: under pressure the scheduler takes the pages back, and the next choice
//! prefills for itself, with the same bits. **Invariant:** a share holds pages only while `waiting` > 0, and only pages whose every row
//! has been enqueued.

use crate::pages::PagePool;
use slotgraph_graphs::step::PageId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShareId(usize);

#[derive(Debug)]
pub(crate) enum State {
    Empty,
    /// By the choice with this key.
    Filling(u64),
    Ready(Vec<PageId>),
}

#[derive(Debug)]
pub(crate) struct Share {
    /// Full pages that may be shared.
    pub pages: usize,
    pub state: State,
    /// Queued choices that could use them.
    waiting: usize,
    /// Choices that have not ended.
    members: usize,
}

/// Every share of a live group.
#[derive(Debug, Default)]
pub(crate) struct Shares {
    slab: Vec<Option<Share>>,
    free: Vec<usize>,
    /// Pages held by shares, whoever else holds them.
    pub held: usize,
}

impl Shares {
    /// A share of `pages` full pages among `members` queued choices.
    pub fn open(&mut self, pages: usize, members: usize) -> ShareId {
        let share = Some(Share { pages, state: State::Empty, waiting: members, members });
        match self.free.pop() {
            Some(index) => {
                self.slab[index] = share;
                ShareId(index)
            }
            None => {
                self.slab.push(share);
                ShareId(self.slab.len() - 1)
            }
        }
    }

    pub fn share(&self, id: ShareId) -> &Share {
        self.slab[id.0].as_ref().expect("a live choice's share is open")
    }
    fn share_mut(&mut self, id: ShareId) -> &mut Share {
        self.slab[id.0].as_mut().expect("a live choice's share is open")
    }

    /// A queued member takes a seat (or ends there).
    pub fn leave_queue(&mut self, id: ShareId, pool: &mut PagePool, until: u64) {
        let share = self.share_mut(id);
        share.waiting -= 1;
        if share.waiting == 0 {
            self.let_go(id, pool, until);
        }
    }
    /// A seated member is queued again.
    pub fn enter_queue(&mut self, id: ShareId) {
        self.share_mut(id).waiting += 1;
    }
    /// The member with this key fills the pages, if nobody did and somebody waits for them.
    pub fn fill(&mut self, id: ShareId, key: u64) {
        let share = self.share_mut(id);
        if matches!(share.state, State::Empty) && share.waiting > 0 {
            share.state = State::Filling(key);
        }
    }
    /// Rows up to token `next` of the member with this key, whose block table is `table`, are enqueued.
    pub fn filled(&mut self, id: ShareId, key: u64, next: usize, table: &[PageId], pool: &mut PagePool) {
        let share = self.share_mut(id);
        let full = share.pages * slotgraph_kernels::contract::PAGE_TOKENS;
        if !matches!(share.state, State::Filling(filler) if filler == key) || next < full {
            return;
        }
        if share.waiting == 0 {
            share.state = State::Empty;
            return;
        }
        let pages = table[..share.pages].to_vec();
        pages.iter().for_each(|&page| pool.share(page));
        share.state = State::Ready(pages);
        self.held += self.share(id).pages;
    }
    /// The member with this key leaves its seat.
    pub fn leave_seat(&mut self, id: ShareId, key: u64) {
        let share = self.share_mut(id);
        if matches!(share.state, State::Filling(filler) if filler == key) {
            share.state = State::Empty;
        }
    }
    /// A member has ended, out of queue and seat.
    pub fn ended(&mut self, id: ShareId) {
        let share = self.share_mut(id);
        share.members -= 1;
        if share.members == 0 {
            debug_assert!(!matches!(share.state, State::Ready(_)), "a share holds pages only for queued members");
            self.slab[id.0] = None;
            self.free.push(id.0);
        }
    }
    /// Releases the pages of every share but `keep`.
    pub fn let_all_go(&mut self, keep: Option<ShareId>, pool: &mut PagePool, until: u64) {
        for index in 0..self.slab.len() {
            if self.held > 0 && self.slab[index].is_some() && keep != Some(ShareId(index)) {
                self.let_go(ShareId(index), pool, until);
            }
        }
    }
    fn let_go(&mut self, id: ShareId, pool: &mut PagePool, until: u64) {
        let share = self.share_mut(id);
        if let State::Ready(pages) = &share.state {
            pages.iter().for_each(|&page| pool.release(page, until));
            let pages = pages.len();
            share.state = State::Empty;
            self.held -= pages;
        }
    }
}
