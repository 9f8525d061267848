//! exactness: do all legs give the same tokens and logprob bits, and are they the oracle's?
//!
//! The base leg runs each case alone in the smallest bucket (eager on a GPU, interpreted on the CPU); every other leg changes one factor.
//! **Invariant:** our own legs are compared by bits; the oracle, another program, is judged by its margins.

mod cases;
mod forms;
mod legs;
mod oracle;
mod tasks;

use crate::check_ops;
use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError};
use crate::driver::Driver;
use crate::evidence::{Canary, Draft};
use crate::subject::{AnyDriver, Subject, SubjectArgs};
use cases::Case;
use legs::{CaseAnswer, Factor, FirstDifferent, first_different};
use oracle::Judgement;
use serde::Serialize;
use serde_json::json;
use slotgraph_graphs::device::DeviceError;
use slotgraph_graphs::fault::{Fault, FaultDevice};
use slotgraph_runtime::config::{DeviceKind, PrecisionMode, Settings};
use slotgraph_server::load;
use slotgraph_server::tokenizer::Tokenizer;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tasks::{Item, Task, What};

/// Compare every leg with the base leg bit for bit, the base leg with an oracle, and, on a GPU with wgmma, every sum of the model's weights
/// by wgmma with the same by mma.sync.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    subject: SubjectArgs,
    #[command(flatten)]
    ops: check_ops::Args,
    /// Case-set files [default: the built-in set].
    #[arg(long, value_name = "FILE")]
    cases: Vec<PathBuf>,
    /// Oracle file, as tests/gpu/oracle.py writes it.
    #[arg(long, value_name = "FILE")]
    oracle: Option<PathBuf>,
    /// Expert-parallel degrees to compare with one rank (MoE models) [default on the CPU: 2,4,8].
    #[arg(long, value_delimiter = ',')]
    ep_legs: Option<Vec<usize>>,
    /// Transports of those legs [default: the device's].
    #[arg(long, value_delimiter = ',')]
    transport_legs: Vec<String>,
    /// Only this leg beside the base, by the name that the report gives it; several [default: all].
    #[arg(long = "leg", value_name = "NAME")]
    legs: Vec<String>,
    /// GPUs of those legs, one a rank [default: 0, 1, …]; one named twice is shared.
    #[arg(long, value_delimiter = ',')]
    ep_devices: Vec<String>,
    /// Devices at a time: legs that do not fill a GPU share it.
    #[arg(long, default_value_t = 1, value_name = "N")]
    side_by_side: usize,
    /// Mean |Δlogprob| against the oracle, teacher-forced, prompts of at most 512 tokens.
    #[arg(long)]
    mean_limit: Option<f64>,
    /// Largest margin of the oracle over which another token may win, prompts of at most 512 tokens.
    #[arg(long)]
    margin_limit: Option<f64>,
}

/// What a leg's difference would mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Base,
    /// The same once more.
    Repeat,
    Graph,
    /// Another bucket, place, company or phase.
    Bucket,
    Transport,
    Ep,
}

impl Kind {
    fn regression(self) -> &'static str {
        match self {
            Kind::Base => "all_token_text_exact",
            Kind::Repeat => "repeat_variance",
            Kind::Graph => "graph_replay_regression",
            Kind::Bucket => "bucket_variance",
            Kind::Transport => "transport_regression",
            Kind::Ep => "ep_variance",
        }
    }
}

/// A leg and its answers, by case.
struct Leg {
    name: String,
    kind: Kind,
    answers: Vec<CaseAnswer>,
}

/// A pair of legs over all cases.
#[derive(Clone, Debug, Serialize)]
struct Pair {
    name: String,
    kind: Kind,
    exact: bool,
    cases_different: usize,
    first: Option<(String, FirstDifferent)>,
}

pub fn run(args: &Args) -> Result<Outcome, ProbeError> {
    if args.ops.check_ops {
        return check_ops::run(&args.subject, &args.ops);
    }
    let subject = Subject::open(&args.subject)?;
    let mut draft = Draft::new(
        "exactness",
        "do all legs give the same tokens and logprob bits, and are they the oracle's?",
        Claim::of(Label::Exactness),
    );
    draft = subject.describe(draft);
    let texts = load::texts(&subject.checkpoint).map_err(|e| ProbeError::Usage(e.to_string()))?;
    let context = subject.config.max_model_len;
    let cases::Asked { sets, cases, left_out } =
        cases::read(&args.cases, args.oracle.as_deref(), &texts.tokenizer, context)?;
    draft.detail("case_sets", sets);
    draft.detail("cases_longer_than_the_context", left_out);
    if let Some(wide) = cases.iter().find(|case| case.prompts.len() > subject.config.max_slots) {
        let (rows, slots) = (wide.prompts.len(), subject.config.max_slots);
        return Err(ProbeError::Usage(format!("case {}: its {rows} rows need more than --max-slots {slots}", wide.id)));
    }
    let run = Run { args, cases: &cases, tokenizer: &texts.tokenizer };
    // On a GPU the base is eager and graphs are a leg; the CPU interprets.
    let cuda = subject.config.device == DeviceKind::Cuda;
    let base =
        if cuda { run.subject(|settings| settings.cuda_graph = Some("off".into()))? } else { run.subject(|_| {})? };
    let base = Arc::new(base);
    let mut compared = None;
    let prepared = match base.device_after(|device| compared = Some(device.forms())) {
        Ok(prepared) => prepared,
        Err(none) => return none.end(draft),
    };
    if cuda {
        forms::record(&mut draft, compared);
    }
    draft.contract_hash = prepared.device.facts().contract_hash;
    draft.startup = prepared.startup.clone();
    let mut driver = prepared.into_driver();
    let mut legs = Legs::default();
    let Some(truth) = legs.take(run.leg(&base, &mut driver, "base", Kind::Base, Factor::PLAIN)) else {
        draft.check("base", false, legs.failed.join("; "));
        return Ok(Outcome::Evidence(Box::new(draft.finish())));
    };
    let judgement = args.oracle.is_some().then(|| run.judge(&base, &mut driver, &truth)).transpose()?;
    drop(driver);
    let tasks = run.tasks(&base, cuda)?;
    run.work_off(&tasks, &truth, &mut legs);
    let pairs: Vec<Pair> = legs.done.iter().map(|leg| pair(&cases, &truth, leg)).collect();
    record(&mut draft, &truth, &cases, &pairs, judgement.as_ref());
    draft.check("every_leg_ran", legs.failed.is_empty(), legs.failed.join("; "));
    draft.canary(run.canary(&base, &truth)?);
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

/// Legs as they come in; one that fails is named and does not end the others.
#[derive(Default)]
struct Legs {
    done: Vec<Leg>,
    failed: Vec<String>,
}

impl Legs {
    fn take(&mut self, leg: Result<Leg, String>) -> Option<Leg> {
        leg.map_err(|reason| self.failed.push(reason)).ok()
    }
}

struct Run<'a> {
    args: &'a Args,
    cases: &'a [Case],
    tokenizer: &'a Arc<Tokenizer>,
}

impl Run<'_> {
    fn subject(&self, change: impl FnOnce(&mut Settings)) -> Result<Subject, ProbeError> {
        let mut settings = self.args.subject.engine.settings();
        change(&mut settings);
        Subject::with(&self.args.subject, &settings)
    }

    /// Whether `--leg` names it.
    fn wants(&self, name: &str) -> bool {
        self.args.legs.is_empty() || self.args.legs.iter().any(|leg| leg == name)
    }

    /// Works the tasks off, `--side-by-side` at a time, each with a device of its own on a thread of its own.
    fn work_off(&self, tasks: &[Task], truth: &Leg, legs: &mut Legs) {
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(task) = tasks.get(index) else { return done };
                done.push((index, self.work(task, truth)));
            }
        };
        let mut all: Vec<(usize, Vec<Result<Leg, String>>)> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..self.args.side_by_side.max(1)).map(|_| scope.spawn(work)).collect();
            let join = |worker: std::thread::ScopedJoinHandle<'_, Vec<_>>| match worker.join() {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            workers.into_iter().flat_map(join).collect()
        });
        all.sort_by_key(|(index, _)| *index);
        for leg in all.into_iter().flat_map(|(_, legs)| legs) {
            let leg = legs.take(leg);
            legs.done.extend(leg);
        }
    }

    fn work(&self, task: &Task, truth: &Leg) -> Vec<Result<Leg, String>> {
        let mut driver = match task.subject.device() {
            Ok(prepared) => prepared.into_driver(),
            Err(none) => {
                let names: Vec<&str> = task.items.iter().map(|item| item.name.as_str()).collect();
                return vec![Err(format!("{}: {none}", names.join(", ")))];
            }
        };
        let mut run = |item: &Item| match item.what {
            What::Asked(factor) => self.leg(&task.subject, &mut driver, &item.name, item.kind, factor),
            What::Scored => self.scored(&mut driver, &item.name, item.kind, truth),
        };
        task.items.iter().map(&mut run).collect()
    }

    /// Every case that fits the seats beside the factor's neighbours; the others repeat the base's answer by their absence.
    fn leg(
        &self,
        subject: &Subject,
        driver: &mut AnyDriver,
        name: &str,
        kind: Kind,
        factor: Factor,
    ) -> Result<Leg, String> {
        let answers = self.answers(subject, driver, factor).map_err(|e| format!("leg {name}: {e}"))?;
        Ok(Leg { name: name.into(), kind, answers })
    }

    /// The answers of `truth`, scored after their prompts in one pass: the logprob bits must be those of their generation.
    fn scored(&self, driver: &mut AnyDriver, name: &str, kind: Kind, truth: &Leg) -> Result<Leg, String> {
        let scored = |(case, answer)| legs::score(driver, case, answer);
        let answers: Result<Vec<CaseAnswer>, DeviceError> = self.cases.iter().zip(&truth.answers).map(scored).collect();
        Ok(Leg { name: name.into(), kind, answers: answers.map_err(|e| format!("leg {name}: {e}"))? })
    }

    fn answers(
        &self,
        subject: &Subject,
        driver: &mut AnyDriver,
        factor: Factor,
    ) -> Result<Vec<CaseAnswer>, DeviceError> {
        let spec = &subject.checkpoint.spec;
        let slots = driver.limits().slots_max;
        let mut answers = Vec::new();
        for case in self.cases {
            let neighbours = factor.neighbours.min(slots - case.prompts.len());
            let joiners = if neighbours > 0 { factor.joiners } else { 0 };
            let factor = Factor { neighbours, joiners, ..factor };
            answers.push(legs::run(driver, self.tokenizer, &spec.eos_ids, spec.vocab, case, factor)?);
        }
        Ok(answers)
    }

    fn judge(&self, base: &Subject, driver: &mut AnyDriver, leg: &Leg) -> Result<Judgement, ProbeError> {
        let contract = base.config.device == DeviceKind::Cuda || base.config.precision == PrecisionMode::Contract;
        let limits = oracle::Limits::of(contract, self.args.mean_limit, self.args.margin_limit);
        oracle::judge(driver, self.cases, &leg.answers, limits).map_err(|e| ProbeError::Failed(e.to_string()))
    }

    /// A changed token and a flipped logprob bit in one record must each be seen.
    fn canary(&self, base: &Subject, truth: &Leg) -> Result<Canary, ProbeError> {
        let mut caught = true;
        for fault in ["token@3", "logprob-bit@3"] {
            let prepared = base.device().map_err(|e| ProbeError::Failed(e.to_string()))?;
            let fault: Fault = fault.parse().expect("a known fault");
            let armed = FaultDevice::arm(prepared.device, 0, &[fault]);
            let armed = armed.map_err(|e| ProbeError::Failed(e.to_string()))?;
            let spec = &base.checkpoint.spec;
            let mut driver = Driver::new(armed, prepared.limits);
            let case = &self.cases[0];
            let answer = legs::run(&mut driver, self.tokenizer, &spec.eos_ids, spec.vocab, case, Factor::PLAIN)
                .map_err(|e| ProbeError::Failed(e.to_string()))?;
            caught &= first_different(&truth.answers[0], &answer).is_some();
        }
        Ok(Canary::planted("a changed token, a flipped logprob bit", caught))
    }
}

fn pair(cases: &[Case], base: &Leg, leg: &Leg) -> Pair {
    let different: Vec<(String, FirstDifferent)> = cases
        .iter()
        .zip(base.answers.iter().zip(&leg.answers))
        .filter_map(|(case, (a, b))| Some((case.id.clone(), first_different(a, b)?)))
        .collect();
    Pair {
        name: format!("base_vs_{}", leg.name),
        kind: leg.kind,
        exact: different.is_empty(),
        cases_different: different.len(),
        first: different.into_iter().next(),
    }
}

fn record(draft: &mut Draft, base: &Leg, cases: &[Case], pairs: &[Pair], judgement: Option<&Judgement>) {
    for pair in pairs {
        let detail = match &pair.first {
            None => format!("{} cases", cases.len()),
            Some((id, first)) => format!("{} cases differ; first {id} {first:?}", pair.cases_different),
        };
        draft.check(&pair.name, pair.exact, detail);
    }
    let mut classification = Kind::Base.regression();
    if let Some(judgement) = judgement {
        judgement.record(draft);
        if !judgement.holds() {
            classification = "baseline_accuracy_gap";
        }
        draft.detail("oracle", judgement);
    }
    // The most telling difference wins: repeats, then graphs, transports, ranks, buckets.
    for kind in [Kind::Bucket, Kind::Ep, Kind::Transport, Kind::Graph, Kind::Repeat] {
        if pairs.iter().any(|pair| pair.kind == kind && !pair.exact) {
            classification = kind.regression();
        }
    }
    draft.detail("classification", classification);
    draft.detail("pairs", pairs);
    let answers: BTreeMap<&str, &CaseAnswer> = cases.iter().map(|case| case.id.as_str()).zip(&base.answers).collect();
    draft.detail("answers", json!(answers));
}
