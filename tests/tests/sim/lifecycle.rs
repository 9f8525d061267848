//! One story each: who leaves when, and what must be given back.

use super::world::{Ask, Setup, World};
use slotgraph_graphs::null::Settle;
use slotgraph_runtime::load::{LifeState, SlotState};
use slotgraph_runtime::request::{AbortCause, Event, Finish, FinishReason};
use std::sync::atomic::Ordering::Relaxed;

const LONG: u32 = 100;

fn turns(world: &mut World, turns: usize) {
    for _ in 0..turns {
        world.turn().unwrap();
    }
}

fn aborted(event: Option<&Event>) -> Option<AbortCause> {
    match event {
        Some(Event::Finished(Finish { reason: FinishReason::Aborted(cause), .. })) => Some(*cause),
        _ => None,
    }
}

/// Two choices hold both seats; what comes after waits.
fn busy() -> World {
    let mut world = World::new(&Setup::small());
    for _ in 0..2 {
        world.ask(&Ask::new(5, LONG)).unwrap();
    }
    turns(&mut world, 3);
    world
}

#[test]
fn dropped_queued_never_prefilled() {
    let mut world = busy();
    let prefilled = world.load.prompt_tokens.load(Relaxed);
    let queued: Vec<usize> = (0..10).flat_map(|_| world.ask(&Ask::new(100, 4)).unwrap()).collect();
    turns(&mut world, 1);
    assert_eq!(world.load.waiting.load(Relaxed), 10);
    for at in queued {
        world.clients[at].stream = None;
    }
    turns(&mut world, 1);
    assert_eq!((world.load.waiting.load(Relaxed), world.load.running.load(Relaxed)), (0, 2));
    assert_eq!(world.load.swept(LifeState::Queued, AbortCause::Disconnected), 10);
    // One that is alive takes the next free seat at once.
    let next = world.ask(&Ask::new(3, 2)).unwrap().start;
    world.finish().unwrap();
    assert_eq!(world.clients[next].tokens.len(), 2);
    assert_eq!(world.load.prompt_tokens.load(Relaxed), prefilled + 3);
}

#[test]
fn dropped_mid_chunk_releases() {
    for launch_ahead in [0, 1, 2] {
        let mut setup = Setup::small();
        setup.limits.launch_ahead = launch_ahead;
        setup.settle = Settle::WhenReleased;
        let mut world = World::new(&setup);
        let at = world.ask(&Ask::new(200, 4)).unwrap().start;
        turns(&mut world, 3);
        let enqueued = world.load.steps.load(Relaxed);
        assert_eq!(world.load.slots(SlotState::Prefilling), 1);
        world.clients[at].abort.set(AbortCause::Cancelled);
        turns(&mut world, 1);
        // No chunk after the sweep; what is in flight keeps its pages until it has settled.
        assert_eq!(world.load.steps.load(Relaxed), enqueued);
        assert_eq!(world.load.swept(LifeState::Prefilling, AbortCause::Cancelled), 1);
        assert_eq!(aborted(world.clients[at].terminal.as_ref()), Some(AbortCause::Cancelled));
        world.finish().unwrap();
        assert!(world.load.prompt_tokens.load(Relaxed) < 200);
        assert_eq!(world.load.generation_tokens.load(Relaxed), 0);
    }
}

#[test]
fn dropped_active_returns_pages() {
    let mut world = busy();
    let used = world.load.pages_used.load(Relaxed);
    assert!(used > 0);
    let heard = world.clients[0].tokens.len();
    assert!(heard > 0);
    world.clients[0].stream = None;
    turns(&mut world, 3);
    assert_eq!((world.load.running.load(Relaxed), world.load.pages_used.load(Relaxed)), (1, used / 2));
    assert_eq!(world.load.slots(SlotState::Free), 1);
    assert_eq!(world.load.swept(LifeState::Active, AbortCause::Disconnected), 1);
    let trace = world.clients[0].trace.as_ref().unwrap();
    assert_eq!((trace.terminal_reason, trace.cause), ("disconnected", Some("disconnected")));
    assert!(trace.completion_tokens as usize >= heard);
    world.finish().unwrap();
}

#[test]
fn abort_between_collect_and_retire() {
    let mut world = busy();
    let queued = world.ask(&Ask::new(4, 4)).unwrap().start;
    turns(&mut world, 1);
    let between = |world: &mut World| {
        world.clients[0].abort.set(AbortCause::Cancelled);
        world.clients[queued].abort.set(AbortCause::Cancelled);
    };
    world.turn_with(between).unwrap();
    // Collected by nobody, so retired by nobody: both are still there.
    assert_eq!((world.load.running.load(Relaxed), world.load.waiting.load(Relaxed)), (2, 1));
    assert!(world.clients[0].terminal.is_none() && world.clients[queued].terminal.is_none());
    turns(&mut world, 1);
    assert_eq!((world.load.running.load(Relaxed), world.load.waiting.load(Relaxed)), (1, 0));
    assert_eq!(aborted(world.clients[queued].terminal.as_ref()), Some(AbortCause::Cancelled));
    world.finish().unwrap();
}

#[test]
fn sibling_survives() {
    // Choices of one prompt share its first page; a stop string completes one, a neighbour of another request is cancelled.
    let mut setup = Setup::small();
    setup.limits.slots_max = 3;
    let mut world = World::new(&setup);
    let pair = world.ask(&Ask { n: 2, ..Ask::new(70, 20) }).unwrap();
    let neighbour = world.ask(&Ask::new(6, LONG)).unwrap().start;
    while world.clients[pair.start + 1].tokens.len() < 2 {
        turns(&mut world, 1);
    }
    world.clients[pair.start].abort.stop_string(2);
    world.clients[neighbour].abort.set(AbortCause::Cancelled);
    turns(&mut world, 1);
    assert_eq!(aborted(world.clients[pair.start].terminal.as_ref()), Some(AbortCause::StopString));
    assert_eq!(world.load.running.load(Relaxed), 1);
    world.finish().unwrap();
    let [first, second] = [pair.start, pair.start + 1].map(|at| world.clients[at].trace.as_ref().unwrap());
    assert_eq!((first.terminal_reason, first.completion_tokens), ("completed_stop", 2));
    assert_eq!((second.terminal_reason, second.completion_tokens, second.shared_tokens), ("completed_length", 20, 64));
}

#[test]
fn one_abort_ends_its_group() {
    let mut world = World::new(&Setup::small());
    let group = world.ask(&Ask { n: 4, ..Ask::new(5, LONG) }).unwrap();
    let other = world.ask(&Ask::new(5, 3)).unwrap().start;
    turns(&mut world, 3);
    world.clients[group.start + 1].abort.set(AbortCause::Cancelled);
    turns(&mut world, 1);
    for at in group {
        assert_eq!(aborted(world.clients[at].terminal.as_ref()), Some(AbortCause::Cancelled), "choice {at}");
    }
    world.finish().unwrap();
    assert_eq!(world.clients[other].tokens.len(), 3);
}

#[test]
fn a_slow_reader_is_cut_by_the_bytes_that_wait_for_it() {
    let mut world = World::new(&Setup::small());
    let neighbour = world.ask(&Ask::new(5, LONG)).unwrap().start;
    let mut slow = Ask { attentive: false, capacity: 1000, backlog: 4096, ..Ask::new(5, LONG) };
    slow.sampling.logprobs = Some(20);
    let slow = world.ask(&slow).unwrap().start;
    // It reads one event for three that come.
    for turn in 0.. {
        turns(&mut world, 1);
        if world.clients[slow].abort.cause().is_some() {
            break;
        }
        assert!(turn < LONG, "nobody was cut");
        if turn % 3 == 0 {
            world.clients[slow].read_one(false).unwrap();
        }
    }
    assert_eq!(world.clients[slow].abort.cause(), Some(AbortCause::SlowReader));
    turns(&mut world, 1);
    assert_eq!(world.load.running.load(Relaxed), 1, "its seat is free");
    world.finish().unwrap();
    // Some 20 events of 200 bytes waited, far fewer than the count allows; it heard them, and why it ended.
    assert!((20..40).contains(&world.clients[slow].tokens.len()), "{}", world.clients[slow].tokens.len());
    assert_eq!(aborted(world.clients[slow].terminal.as_ref()), Some(AbortCause::SlowReader));
    assert_eq!(world.clients[neighbour].tokens.len(), LONG as usize);
    assert_eq!(world.load.pages_used.load(Relaxed), 0);
}

#[test]
fn idle_republishes_zero() {
    let mut world = busy();
    assert!(world.load.running.load(Relaxed) == 2 && world.load.pages_used.load(Relaxed) > 0);
    for client in &mut world.clients {
        client.stream = None;
    }
    while world.turn().unwrap() != slotgraph_runtime::engine::Turn::Idle {}
    // What the loop does before it parks.
    world.engine.publish();
    let load = &world.load;
    assert_eq!((load.running.load(Relaxed), load.waiting.load(Relaxed), load.live.load(Relaxed)), (0, 0, 0));
    assert_eq!((load.pages_used.load(Relaxed), load.slots(SlotState::Free)), (0, 2));
    assert!(load.head_wait().is_zero());
}

#[test]
fn the_edge_takes_as_many_as_seats_and_queue_hold_and_no_more() {
    use slotgraph_runtime::engine::{NotAccepting, SubmitError};
    let mut world = World::new(&Setup::small());
    let results: Vec<bool> = (0..25).map(|_| world.ask(&Ask::new(3, 4)).is_ok()).collect();
    assert_eq!(results.iter().filter(|&&taken| taken).count(), 2 + 16);
    assert_eq!(world.ask(&Ask::new(3, 4)), Err(SubmitError::Full { live: 18, limit: 18 }));
    let crowd = Ask { n: 19, ..Ask::new(3, 4) };
    assert_eq!(world.ask(&crowd), Err(SubmitError::TooLarge { choices: 19, limit: 18 }));
    world.finish().unwrap();
    // A group is taken whole or not at all.
    world.ask(&Ask::new(3, 4)).unwrap();
    assert!(matches!(world.ask(&Ask { n: 18, ..Ask::new(3, 4) }), Err(SubmitError::Full { .. })));
    world.finish().unwrap();
    world.handle.shutdown();
    assert_eq!(world.ask(&Ask::new(3, 4)), Err(NotAccepting::Draining.into()));
}

#[test]
fn a_prompt_is_prefilled_once_for_all_its_choices() {
    let mut setup = Setup::small();
    setup.limits.slots_max = 4;
    let mut world = World::new(&setup);
    // 130 tokens: two full pages are shared, two tokens are each choice's own. Four seats, so the last two wait for seats.
    let group = world.ask(&Ask { n: 6, ..Ask::new(130, 3) }).unwrap();
    world.finish().unwrap();
    assert_eq!(world.load.prompt_tokens.load(Relaxed), 130 + 5 * 2);
    let shared: Vec<u32> = group.map(|at| world.clients[at].trace.as_ref().unwrap().shared_tokens).collect();
    assert_eq!(shared, [0, 128, 128, 128, 128, 128]);
}

#[test]
fn what_shares_no_page_prefills_for_itself() {
    let penalised = |mut ask: Ask| {
        ask.sampling.repetition_penalty = 1.2;
        ask
    };
    let scored = Ask { score: true, ..Ask::new(130, 3) };
    for ask in [penalised(Ask::new(130, 3)), scored] {
        let mut world = World::new(&Setup::small());
        world.ask(&Ask { n: 2, ..ask }).unwrap();
        world.finish().unwrap();
        assert_eq!(world.load.prompt_tokens.load(Relaxed), 2 * 130);
    }
}

#[test]
fn scoring_goes_through_the_whole_prompt_and_max_tokens_0_draws_nothing() {
    for (prompt, max_tokens, score) in [(150, 0, true), (1, 0, true), (150, 0, false), (150, 2, true), (1, 2, true)] {
        let mut world = World::new(&Setup::small());
        let at = world.ask(&Ask { score, ..Ask::new(prompt, max_tokens) }).unwrap().start;
        world.finish().unwrap();
        let client = &world.clients[at];
        assert_eq!((client.scores, client.tokens.len()), (if score { prompt - 1 } else { 0 }, max_tokens as usize));
        if max_tokens == 0 {
            let rows = if score { prompt as u64 - 1 } else { 0 };
            assert_eq!(world.load.prompt_tokens.load(Relaxed), rows);
        }
    }
}

#[test]
fn a_choice_that_could_never_run_is_rejected() {
    let mut setup = Setup::small();
    setup.limits.pages = 3;
    let mut world = World::new(&setup);
    for (prompt, max_tokens) in [(100, 60), (256, 1), (300, 0)] {
        let at = world.ask(&Ask::new(prompt, max_tokens)).unwrap().start;
        world.clients[at].attentive = false;
        world.engine.drain_commands();
        let stream = world.clients[at].stream.as_mut().unwrap();
        assert!(matches!(stream.try_next(), Some(Event::Rejected(_))), "{prompt} + {max_tokens}");
        assert_eq!(world.load.live.load(Relaxed), 0);
    }
}
