//! The rules that keep one holder's steps from touching another's, each as a switch that a test or an armed fault can turn off.
//!
//! Read by slots, pages and the scheduler. **Invariant:** in a server that was not told `--fault`, every rule holds (`Policy::default`).
//! The simulator turns each off in turn and must notice.

/// Rules in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// A page that was released cools until the newest step enqueued then has settled.
    pub cool_pages: bool,
    /// So does a seat that was left.
    pub cool_seats: bool,
    /// So do the pages of a preempted choice.
    pub cool_preempted: bool,
    /// A new holder of a seat has a new generation.
    pub bump_generation: bool,
    /// A record of another generation than the seat's is dropped.
    pub check_generation: bool,
    /// A shared page stays until its last holder lets go.
    pub count_holders: bool,
    /// What the sweep retires is what it collected, whatever the abort words say by then.
    pub sweep_once: bool,
    /// Nothing overtakes the head of the queue.
    pub first_come: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            cool_pages: true,
            cool_seats: true,
            cool_preempted: true,
            bump_generation: true,
            check_generation: true,
            count_holders: true,
            sweep_once: true,
            first_come: true,
        }
    }
}
