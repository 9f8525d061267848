//! Each rule of the scheduler turned off in turn: the chaos must notice.

use super::chaos::run;
use slotgraph_runtime::policy::Policy;

/// Seeds that a mutant may survive before the simulator counts as blind to it.
const PATIENCE: u64 = 400;

fn caught(policy: Policy) -> String {
    let quiet = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let found = (0..PATIENCE).find_map(|seed| run(seed, policy).err().map(|wrong| format!("seed {seed}: {wrong}")));
    std::panic::set_hook(quiet);
    found.unwrap_or_else(|| panic!("{PATIENCE} seeds did not notice {policy:?}"))
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
        let wrong = caught(policy);
        println!("{wrong}");
        assert!(wrong.contains(sign), "{policy:?} was noticed by {wrong:?}");
    }
}
