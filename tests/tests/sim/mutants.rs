//! Each rule of the scheduler, and of the exchange between ranks, turned off in turn: the chaos must notice.

use super::chaos::run;
use super::wires::Wiring;
use slotgraph_runtime::policy::Policy;

/// Seeds that a mutant may survive before the simulator counts as blind to it.
const PATIENCE: u64 = 400;

fn caught(policy: Policy, wiring: Wiring) -> String {
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let found =
        (0..PATIENCE).find_map(|seed| run(seed, policy, wiring).err().map(|wrong| format!("seed {seed}: {wrong}")));
    std::panic::set_hook(quiet);
    found.unwrap_or_else(|| panic!("{PATIENCE} seeds did not notice {policy:?}, {wiring:?}"))
}

#[test]
fn every_rule_that_is_turned_off_is_noticed() {
    let on = Policy::default();
    // What is expected to be noticed first, beside the rule.
    let mutants = [
        (Policy { cool_pages: false, ..on }, "names page"),
        (Policy { cool_seats: false, ..on }, "names slot"),
        (Policy { cool_preempted: false, ..on }, "names page"),
        (Policy { bump_generation: false, ..on }, "issued twice"),
        (Policy { check_generation: false, ..on }, ""),
        (Policy { count_holders: false, ..on }, ""),
        (Policy { sweep_once: false, ..on }, ""),
        (Policy { first_come: false, ..on }, "was seated before"),
    ];
    for (policy, sign) in mutants {
        let wrong = caught(policy, Wiring::Sound);
        println!("{wrong}");
        assert!(wrong.contains(sign), "{policy:?} was noticed by {wrong:?}");
    }
}

#[test]
fn every_rule_of_the_exchange_that_is_turned_off_is_noticed() {
    for (wiring, sign) in [
        (Wiring::OneHalf, "had not read"),
        (Wiring::NoWait, "read"),
        (Wiring::Swapped, "read Some"),
        (Wiring::Skipped, "layer"),
    ] {
        let wrong = caught(Policy::default(), wiring);
        println!("{wrong}");
        assert!(wrong.contains(sign), "{wiring:?} was noticed by {wrong:?}");
    }
}
