//! The parent of the checks: one process a model, restarted past every op that took its process with it.

use super::findings::{sentence, table};
use super::{AT, Args, REPORT, Report};
use crate::claim::{Claim, Label};
use crate::cli::{Outcome, ProbeError, gpu_is_required};
use crate::evidence::{Canary, Draft};
use crate::subject::SubjectArgs;
use serde_json::json;
use std::collections::{BTreeSet, VecDeque};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// Restarts for one model.
const RESTARTS: usize = 40;
/// Longest silence of a child: while it prepares (kernels may have to be compiled), and between two ops.
const PREPARING: Duration = Duration::from_secs(150);
const BETWEEN_OPS: Duration = Duration::from_secs(25);

pub fn run(subject: &SubjectArgs, args: &Args) -> Result<Outcome, ProbeError> {
    let mut draft = Draft::new(
        "exactness",
        "is every op what its CPU reference says, fed the device's own inputs?",
        Claim::of(Label::Exactness),
    );
    let models = args.models(subject);
    draft.config = json!({"check_ops": true, "buckets": args.buckets(), "layers": args.layers});
    let (mut seen, mut missed) = (BTreeSet::new(), BTreeSet::new());
    let mut details = serde_json::Map::new();
    for (index, model) in models.iter().enumerate() {
        let name = model
            .as_deref()
            .and_then(Path::file_name)
            .map_or("demo".into(), |name| name.to_string_lossy().into_owned());
        let checked = check_model(args, index)?;
        if let Some(reason) = checked.absent {
            if gpu_is_required() {
                draft.check(&format!("{name}: a device was prepared"), false, reason);
                continue;
            }
            return Ok(Outcome::Evidence(Box::new(draft.skip(&reason))));
        }
        eprintln!("== {name}: {} ops in {} steps", checked.ops, checked.steps);
        eprint!("{}", table(&checked.findings));
        for fatal in &checked.fatal {
            eprintln!("FATAL {fatal}");
        }
        let bad = checked.findings.iter().find(|finding| finding.bad > 0);
        let count = checked.findings.iter().filter(|finding| finding.bad > 0).count();
        let detail = match bad {
            Some(finding) => format!("{count} bad; first {}", sentence(finding)),
            None => format!("{} ops in {} steps, buckets {:?}", checked.ops, checked.steps, checked.done),
        };
        draft.check(&format!("{name}: ops"), bad.is_none() && checked.ops > 0, detail);
        let unfinished: Vec<usize> =
            args.buckets().into_iter().filter(|bucket| !checked.done.contains(bucket)).collect();
        let alive = checked.fatal.is_empty() && unfinished.is_empty();
        let detail = if alive {
            "every bucket".into()
        } else {
            format!("not finished {unfinished:?}; {}", checked.fatal.join(" | "))
        };
        draft.check(&format!("{name}: no op fails"), alive, detail);
        seen.extend(checked.canary_seen);
        missed.extend(checked.canary_missed);
        details.insert(
            name,
            json!({"findings": checked.findings, "fatal": checked.fatal, "steps": checked.steps, "ops": checked.ops}),
        );
    }
    draft.detail("models", details);
    draft.detail("canary", json!({"seen": seen, "missed": missed}));
    draft.canary(Canary::planted(
        "one changed element in the outputs of each op",
        !seen.is_empty() && missed.is_empty(),
    ));
    Ok(Outcome::Evidence(Box::new(draft.finish())))
}

/// What all processes of one model found.
#[derive(Default)]
struct Checked {
    findings: Vec<super::Finding>,
    done: Vec<usize>,
    /// Where a process died, and of what.
    fatal: Vec<String>,
    absent: Option<String>,
    steps: u64,
    ops: u64,
    canary_seen: BTreeSet<String>,
    canary_missed: BTreeSet<String>,
}

impl Checked {
    fn take(&mut self, report: Report) {
        self.findings.extend(report.findings);
        self.done.extend(report.done);
        self.steps += report.steps;
        self.ops += report.ops;
        self.canary_seen.extend(report.canary_seen);
        self.canary_missed.extend(report.canary_missed);
    }
}

fn check_model(args: &Args, index: usize) -> Result<Checked, ProbeError> {
    let mut checked = Checked::default();
    let mut replaced: BTreeSet<String> = args.replace.iter().cloned().collect();
    // What one child is to check; a start that fails for several buckets is tried for each alone.
    let mut queue = VecDeque::from([args.buckets()]);
    for _ in 0..RESTARTS {
        let Some(mut left) = queue.pop_front() else { break };
        let ended = child(index, &left, &replaced)?;
        let mut report = ended.report.unwrap_or_default();
        if let Some(reason) = report.absent.take() {
            checked.absent = Some(reason);
            return Ok(checked);
        }
        let hung = ended.hung;
        let lost = report.lost.take().or(ended.died);
        left.retain(|bucket| !report.done.contains(bucket));
        checked.take(report);
        let Some(lost) = lost else { continue };
        if lost.contains(super::STOPPED) {
            return Ok(checked);
        }
        checked.fatal.push(format!("{}: {lost}", ended.last.as_deref().unwrap_or("before the first op")));
        let op = ended.last.as_deref().and_then(|last| last.split_whitespace().next()).map(str::to_owned);
        match op {
            None if left.len() > 1 => queue.extend(left.into_iter().map(|bucket| vec![bucket])),
            None => {}
            Some(_) if !args.keep_going => return Ok(checked),
            Some(op) => {
                // Past an op that failed once: the CPU's outputs take its place, everywhere if it hung. Where none can, past its bucket.
                let at = if hung { op.clone() } else { format!("{op}@{}", left[0]) };
                if op == "feed" || !replaced.insert(at) {
                    left.remove(0);
                }
                if !left.is_empty() {
                    queue.push_front(left);
                }
            }
        }
    }
    Ok(checked)
}

/// How a child ended.
struct Ended {
    report: Option<Report>,
    /// The op that it was at: its name first.
    last: Option<String>,
    died: Option<String>,
    /// Killed because it said nothing for long.
    hung: bool,
}

fn child(index: usize, buckets: &[usize], replaced: &BTreeSet<String>) -> Result<Ended, ProbeError> {
    let failed = |e: std::io::Error| ProbeError::Failed(format!("starting a child: {e}"));
    let list = |items: &[usize]| items.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let mut command = Command::new(std::env::current_exe().map_err(failed)?);
    command.args(own_arguments()).args(["--child", &index.to_string(), "--child-buckets", &list(buckets)]);
    for op in replaced {
        command.args(["--replace", op]);
    }
    let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(failed)?;
    let lines = BufReader::new(process.stdout.take().expect("it was piped")).lines();
    let (send, heard) = channel();
    let reader = std::thread::spawn(move || {
        lines.map_while(Result::ok).take_while(|line| send.send(line.clone()).is_ok()).count()
    });
    let mut ended = Ended { report: None, last: None, died: None, hung: false };
    loop {
        let patience = if ended.last.is_none() { PREPARING } else { BETWEEN_OPS };
        match heard.recv_timeout(patience) {
            Ok(line) => match (line.strip_prefix(AT), line.strip_prefix(REPORT)) {
                (Some(at), _) => ended.last = Some(at.to_owned()),
                (_, Some(report)) => ended.report = serde_json::from_str(report).ok(),
                _ => {}
            },
            Err(RecvTimeoutError::Timeout) => {
                ended.died = Some(format!("silent for {patience:?}: killed"));
                ended.hung = true;
                // It may have ended by itself meanwhile.
                let _ = process.kill();
                break;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let status = process.wait().map_err(failed)?;
    reader.join().map_err(|_| ProbeError::Failed("the reader of a child's output panicked".into()))?;
    if ended.report.is_none() && ended.died.is_none() {
        if status.code() == Some(2) {
            return Err(ProbeError::Usage("the child refused its arguments (see above)".into()));
        }
        ended.died = Some(format!("the process ended with {status}"));
    }
    Ok(ended)
}

/// This command's arguments without where its report goes.
fn own_arguments() -> Vec<String> {
    let mut kept = Vec::new();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        if word == "--out" {
            words.next();
        } else if !word.starts_with("--out=") {
            kept.push(word);
        }
    }
    kept
}
