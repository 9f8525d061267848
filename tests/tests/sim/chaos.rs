//! Seeded chaos: arrivals, floods, cancels, deadlines, stop strings, deaf clients, slow and lost settles, echoes, a dying device.

use super::script::Rng;
use super::wires::Wiring;
use super::world::{Ask, Setup, World};
use slotgraph_graphs::null::Settle;
use slotgraph_graphs::spec::SamplingSpec;
use slotgraph_graphs::step::StepLimits;
use slotgraph_runtime::policy::Policy;
use slotgraph_runtime::request::AbortCause;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// What a run came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tally {
    pub steps: u64,
    pub choices: u64,
    pub preemptions: u64,
    pub late_records: u64,
    pub shared_tokens: u64,
    pub swept: u64,
    pub nan_rows: u64,
    pub deaths: u64,
    /// Exchanges in which a rank was ahead of another.
    pub leads: u64,
}

/// Runs one seed under a policy and a wiring of its ranks; an error or a panic says what went wrong.
pub fn run(seed: u64, policy: Policy, wiring: Wiring) -> Result<Tally, String> {
    let result = catch_unwind(AssertUnwindSafe(|| chaos(seed, policy, wiring)));
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}

/// A run whose answers are long and whose pool is small.
fn hungry(seed: u64) -> bool {
    seed % 3 == 1
}

fn setup(rng: &mut Rng, seed: u64, policy: Policy, wiring: Wiring) -> Setup {
    let slots_max = rng.between(1, 6) as usize;
    let pages_per_slot = rng.between(2, 5) as usize;
    let top = slots_max.next_power_of_two() as u64;
    let mut buckets: Vec<usize> = (0..=slots_max.next_power_of_two().ilog2()).map(|bit| 1 << bit).collect();
    for _ in 0..rng.below(4) {
        let last = buckets[buckets.len() - 1];
        buckets.push(last * 2 + rng.below(top) as usize);
    }
    let pages_max = if hungry(seed) { pages_per_slot + slots_max } else { slots_max * pages_per_slot };
    let limits = StepLimits {
        slots_max,
        pages: 1 + rng.between(pages_per_slot as u64, pages_max as u64) as usize,
        pages_per_slot,
        buckets,
        launch_ahead: rng.below(3) as usize,
        max_model_len: pages_per_slot * 64 - rng.below(60) as usize,
        prefill_chunk: rng.between(1, 100) as usize,
    };
    Setup {
        limits,
        max_queue: rng.between(0, 12) as usize,
        reserve_tokens: rng.below(if hungry(seed) { 4 } else { 100 }) as usize,
        itl_target: rng.once_in(4).then(|| Duration::from_millis(rng.between(1, 5))),
        policy,
        settle: settle(rng),
        echo: *rng.pick(&[0, 0, 2, 20]),
        seed,
        ranks: if wiring == Wiring::Sound { [1, 2, 4, 8][seed as usize % 4] } else { [2, 4, 8][seed as usize % 3] },
        wiring,
    }
}

fn settle(rng: &mut Rng) -> Settle {
    match rng.below(3) {
        0 => Settle::AtOnce,
        1 => Settle::AfterPolls(rng.below(4) as u32),
        _ => Settle::WhenReleased,
    }
}

fn ask(rng: &mut Rng, limits: &StepLimits, hungry: bool) -> Ask {
    let context = limits.max_model_len.min((limits.pages - 1) * 64);
    let tokens = |rng: &mut Rng, length: u64| (0..length).map(|_| rng.between(2, 63) as u32).collect::<Vec<u32>>();
    let longest = (context as u64 - 2).min(if rng.once_in(3) { 200 } else { 40 });
    let prompts = if rng.once_in(6) { rng.between(2, 3) } else { 1 };
    let prompts: Vec<Vec<u32>> =
        (0..prompts).map(|_| rng.between(1, longest)).collect::<Vec<_>>().into_iter().map(|l| tokens(rng, l)).collect();
    let longest = prompts.iter().map(Vec::len).max().expect("there is a prompt");
    let room = (context - longest) as u64;
    let score = rng.once_in(8);
    let most = room.min(if hungry || rng.once_in(3) { 150 } else { 20 });
    let max_tokens = if rng.once_in(12) { 0 } else { rng.between(1, most) };
    let sampling = SamplingSpec {
        temperature: if rng.once_in(2) { 1.0 } else { 0.0 },
        top_k: rng.below(3) as u32,
        presence_penalty: if rng.once_in(8) { 0.5 } else { 0.0 },
        repetition_penalty: if rng.once_in(8) { 1.1 } else { 1.0 },
        seed: rng.below(1000),
        logit_bias: if rng.once_in(8) {
            (0..rng.between(1, 1024) as u32).map(|id| (id, 1.0)).collect()
        } else {
            vec![]
        },
        stop_ids: if rng.once_in(4) { vec![rng.between(2, 63) as u32] } else { vec![] },
        ignore_eos: hungry || rng.once_in(3),
        min_tokens: if rng.once_in(4) { rng.below(max_tokens + 1) as u32 } else { 0 },
        logprobs: if rng.once_in(3) { Some(rng.below(6) as u32) } else { None },
        ..SamplingSpec::greedy(max_tokens as u32)
    };
    Ask {
        prompts,
        n: if rng.once_in(3) { rng.between(2, 5) as u32 } else { 1 },
        sampling,
        score,
        deadline: rng.once_in(10).then(|| Duration::from_millis(rng.between(1, 60))),
        attentive: !rng.once_in(12),
        capacity: rng.between(4, 24) as usize,
        backlog: rng.between(500, 5_000) as usize,
    }
}

const CAUSES: [AbortCause; 3] = [AbortCause::Cancelled, AbortCause::Disconnected, AbortCause::SlowReader];

/// Something happens to a client.
fn disturb(world: &mut World, rng: &mut Rng) {
    if world.clients.is_empty() {
        return;
    }
    let recent = world.clients.len().saturating_sub(24) as u64;
    let at = rng.between(recent, world.clients.len() as u64 - 1) as usize;
    let client = &mut world.clients[at];
    match rng.below(6) {
        0 | 1 => drop(client.stream.take()),
        2 => drop(client.abort.set(*rng.pick(&CAUSES))),
        3 if !client.tokens.is_empty() => {
            let kept = rng.between(1, client.tokens.len() as u64);
            client.abort.stop_string(kept as u32);
        }
        4 => client.attentive = false,
        _ => client.attentive = true,
    }
}

fn chaos(seed: u64, policy: Policy, wiring: Wiring) -> Result<Tally, String> {
    let mut rng = Rng::new(seed);
    let setup = setup(&mut rng, seed, policy, wiring);
    let mut world = World::new(&setup);
    let busy = rng.between(2, 12);
    let rough = if rng.once_in(4) { u64::MAX } else { rng.between(2, 20) };
    let death = if rng.once_in(10) { rng.between(1, 150) } else { u64::MAX };
    let turns = rng.between(60, 220);
    for turn in 0..turns {
        let flood = if rng.once_in(40) { 12 } else { 1 };
        for _ in 0..flood {
            if rng.once_in(busy) || flood > 1 {
                let ask = ask(&mut rng, &setup.limits, hungry(seed));
                // Full and too large are fine answers.
                let _ = world.ask(&ask);
            }
        }
        if rng.once_in(rough) {
            disturb(&mut world, &mut rng);
        }
        if rng.once_in(3) {
            world.control.release(rng.between(1, 3) as usize);
        }
        if rng.once_in(20) {
            world.control.set_settle(settle(&mut rng));
        }
        if turn == death {
            if rng.once_in(2) { world.control.kill("rank 1 is gone") } else { world.control.drop_newest() }
        }
        if rng.once_in(rough) {
            world.turn_with(|world| disturb(world, &mut rng))?;
        } else {
            world.turn()?;
        }
        world.clock.advance(Duration::from_micros(rng.below(3000)));
    }
    if rng.once_in(5) {
        use slotgraph_runtime::clock::Clock;
        world.handle.drain(world.clock.now() + Duration::from_millis(rng.below(40)));
    }
    world.finish()?;
    if let Some(reason) = &world.dead
        && !(reason.contains("rank 1 is gone") || reason.contains("does not settle"))
    {
        return Err(format!("the engine died: {reason}"));
    }
    let load = &world.load;
    let traces = world.clients.iter().flat_map(|client| &client.trace);
    let mut tally = Tally {
        steps: load.steps.load(Relaxed),
        choices: world.clients.len() as u64,
        preemptions: load.preemptions.load(Relaxed),
        late_records: load.late_records.load(Relaxed),
        nan_rows: load.nan_rows.load(Relaxed),
        deaths: u64::from(world.dead.is_some()),
        leads: world.wires.lock().expect("nobody panicked").leads,
        ..Tally::default()
    };
    for trace in traces {
        tally.shared_tokens += u64::from(trace.shared_tokens);
        tally.swept += u64::from(trace.abort.is_some());
    }
    Ok(tally)
}

/// The seeds of a run: `SEED`, or as many as are wanted.
fn seeds(wanted: u64) -> std::ops::Range<u64> {
    match std::env::var("SEED").map(|seed| seed.parse::<u64>()) {
        Ok(Ok(seed)) => seed..seed + 1,
        Ok(Err(_)) => panic!("SEED must be a number"),
        Err(_) => 0..wanted,
    }
}

#[test]
fn chaos_changes_no_token_and_leaks_nothing() {
    let mut total = Tally::default();
    let seeds = seeds(1500);
    for seed in seeds.clone() {
        match run(seed, Policy::default(), Wiring::Sound) {
            Ok(tally) => {
                total.steps += tally.steps;
                total.choices += tally.choices;
                total.preemptions += tally.preemptions;
                total.late_records += tally.late_records;
                total.shared_tokens += tally.shared_tokens;
                total.swept += tally.swept;
                total.nan_rows += tally.nan_rows;
                total.deaths += tally.deaths;
                total.leads += tally.leads;
            }
            Err(wrong) => panic!("SEED={seed}\n{wrong}"),
        }
    }
    println!("{} seeds: {total:?}", seeds.end - seeds.start);
    if seeds.end - seeds.start > 1 {
        assert!(total.steps >= 100_000, "{total:?}");
        let seen = [
            total.preemptions,
            total.late_records,
            total.shared_tokens,
            total.swept,
            total.nan_rows,
            total.deaths,
            total.leads,
        ];
        assert!(seen.iter().all(|&count| count > 50), "the chaos is too tame: {total:?}");
    }
}
