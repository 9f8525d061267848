//! Both forms of the tensor cores' instruction over every GEMM weight of the model: the same bits, or a failed check.

use crate::evidence::Draft;
use serde_json::json;
use slotgraph_graphs::cuda::{CudaError, Forms};

const CHECK: &str = "wgmma_equals_mma_sync";

/// Records what the base's GPU found; None where several ranks hold the model.
pub fn record(draft: &mut Draft, found: Option<Result<Option<Forms>, CudaError>>) {
    let forms = match found {
        Some(Ok(Some(forms))) => forms,
        Some(Err(error)) => {
            draft.check(CHECK, false, error.to_string());
            return;
        }
        Some(Ok(None)) => return draft.detail("forms", json!({"skipped": "this GPU has no wgmma"})),
        None => return draft.detail("forms", json!({"skipped": "asked of a single rank only"})),
    };
    let faults = forms.faults();
    let each = forms.kinds.iter().map(|of| {
        format!(
            "{} n{}: {} compared, {} differ, {} by a cut",
            of.kind, of.columns, of.compared, of.different, of.cut_seen
        )
    });
    let seen: Vec<String> = if faults.is_empty() { each.collect() } else { faults.clone() };
    draft.check(CHECK, faults.is_empty(), seen.join("; "));
    draft.detail("forms", &forms);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::claim::{Claim, Label};
    use crate::evidence::{Evidence, Verdict};
    use slotgraph_graphs::cuda::KindForms;

    fn recorded(found: Option<Result<Option<Forms>, CudaError>>) -> Evidence {
        let mut draft = Draft::new("test", "do the forms agree?", Claim::of(Label::Exactness));
        record(&mut draft, found);
        draft.finish()
    }

    fn head(compared: u64, different: u64, cut_seen: u64) -> Option<Result<Option<Forms>, CudaError>> {
        let kind = KindForms {
            kind: "Head".into(),
            columns: 64,
            tokens: 61,
            weights: 1,
            sums: 5856,
            compared,
            different,
            cut_seen,
            can_be_cut: true,
            ..KindForms::default()
        };
        Some(Ok(Some(Forms { kinds: vec![kind], ms: 1.5 })))
    }

    #[test]
    fn sums_that_agree_pass_and_come_with_their_table() {
        let evidence = recorded(head(5856, 0, 5000));
        assert_eq!((evidence.verdict, evidence.checks[0].name.as_str()), (Verdict::Pass, CHECK));
        assert_eq!(evidence.checks[0].detail, "Head n64: 5856 compared, 0 differ, 5000 by a cut");
        assert_eq!(evidence.details["forms"]["kinds"][0]["compared"], 5856);
    }

    #[test]
    fn a_difference_a_blind_comparison_and_none_at_all_fail() {
        for (found, fault) in [
            (head(5856, 1, 5000), "1 of 5856 sums differ"),
            (head(5856, 0, 0), "a chain cut in two is not seen"),
            (head(5855, 0, 5000), "5855 of 5856 sums were compared"),
            (Some(Ok(Some(Forms::default()))), "no chain is long enough"),
            (Some(Err(CudaError::Unsupported("planted".into()))), "planted"),
        ] {
            let evidence = recorded(found);
            assert!(!evidence.checks[0].pass && evidence.checks[0].detail.contains(fault), "{:?}", evidence.checks);
        }
    }

    #[test]
    fn what_cannot_be_asked_says_why_and_is_no_check() {
        for found in [None, Some(Ok(None))] {
            let evidence = recorded(found);
            assert!(evidence.checks.is_empty() && evidence.details["forms"]["skipped"].is_string());
        }
    }
}
