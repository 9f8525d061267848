//! Every interleaving of a few events, to a small depth: two seats, three requests, and what can happen to them.

use super::world::{Ask, Setup, World};
use slotgraph_graphs::null::Settle;
use slotgraph_runtime::request::AbortCause;

/// One thing that happens.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The next of the three requests arrives.
    Arrive,
    /// Client 0 or 1 goes.
    Leave(usize),
    /// Client 0 or 1 goes between the two halves of a sweep.
    LeaveMidSweep(usize),
    /// The oldest step may settle.
    Release,
    Turn,
}

const EVENTS: [Event; 7] = [
    Event::Arrive,
    Event::Turn,
    Event::Release,
    Event::Leave(0),
    Event::Leave(1),
    Event::LeaveMidSweep(0),
    Event::LeaveMidSweep(1),
];

/// Runs the events whose indices are the digits of `code` in base `EVENTS.len()`.
fn run(setup: &Setup, asks: &[Ask], mut code: usize, depth: usize) -> Result<(), String> {
    let mut world = World::new(setup);
    let mut arrived = 0;
    for _ in 0..depth {
        match EVENTS[code % EVENTS.len()] {
            Event::Arrive if arrived < asks.len() => {
                world.ask(&asks[arrived]).expect("there is room for three");
                arrived += 1;
            }
            Event::Arrive | Event::Turn => drop(world.turn()?),
            Event::Release => world.control.release(1),
            Event::Leave(who) => {
                if let Some(client) = world.clients.get_mut(who) {
                    client.abort.set(AbortCause::Cancelled);
                }
            }
            Event::LeaveMidSweep(who) => drop(world.turn_with(|world| {
                if let Some(client) = world.clients.get_mut(who) {
                    client.stream = None;
                }
            })?),
        }
        code /= EVENTS.len();
    }
    for ask in &asks[arrived..] {
        world.ask(ask).expect("there is room for three");
    }
    world.finish()
}

fn every_order(setup: &Setup, asks: &[Ask], depth: usize) {
    for code in 0..EVENTS.len().pow(depth as u32) {
        if let Err(wrong) = run(setup, asks, code, depth) {
            let events: Vec<Event> =
                (0..depth).map(|at| EVENTS[code / EVENTS.len().pow(at as u32) % EVENTS.len()]).collect();
            panic!("{events:?}: {wrong}");
        }
    }
}

#[test]
fn three_requests_on_two_seats_in_every_order() {
    for launch_ahead in [0, 1, 2] {
        let mut setup = Setup { settle: Settle::WhenReleased, ..Setup::small() };
        setup.limits.launch_ahead = launch_ahead;
        every_order(&setup, &[Ask::new(3, 3), Ask::new(20, 2), Ask::new(2, 1)], 5);
    }
}

#[test]
fn preemption_and_shared_pages_in_every_order() {
    // Seven pages that can be given out: the two choices of the first request share one and grow into the third's.
    let mut setup = Setup { settle: Settle::WhenReleased, reserve_tokens: 1, ..Setup::small() };
    setup.limits.pages = 5;
    setup.limits.prefill_chunk = 64;
    setup.limits.buckets.push(64);
    let pair = Ask { n: 2, ..Ask::new(66, 64) };
    every_order(&setup, &[pair, Ask::new(62, 5)], 4);
}
