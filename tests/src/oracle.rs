//! The oracle: greedy continuations, log-probabilities and first logits from Transformers in fp32.

use serde_json::Value;

/// One prompt and what the oracle did with it.
#[derive(Clone, Debug)]
pub struct Case {
    pub name: String,
    pub prompt_ids: Vec<u32>,
    pub tokens: Vec<u32>,
    /// Logit of the best minus logit of the second, at each position.
    pub margin: Vec<f64>,
    /// Log-probability of the chosen token, at each position.
    pub logprobs: Vec<f64>,
    /// The five best with their log-probabilities, where the oracle has them.
    pub top: Vec<Vec<(u32, f64)>>,
    /// Logits of the first new token, in some cases.
    pub first_logits: Option<Vec<f64>>,
    /// The prompt as text.
    pub prompt: String,
}

/// Every case of one oracle file.
pub fn cases(file: &str) -> Vec<Case> {
    let path = crate::root().join("tests/oracle").join(format!("{file}.json"));
    let text = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let whole: Value = serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    whole["cases"].as_array().expect("an oracle file has cases").iter().map(case).collect()
}

fn case(case: &Value) -> Case {
    let top: Vec<Vec<(u32, f64)>> = match case.get("top5_logprobs") {
        None => Vec::new(),
        Some(rows) => list(rows).iter().map(|row| list(row).iter().map(pair).collect()).collect(),
    };
    let logprobs = match case.get("chosen_logprobs") {
        Some(chosen) => floats(chosen),
        None => top.iter().map(|row| row[0].1).collect(),
    };
    let found = Case {
        name: case["name"].as_str().expect("a case has a name").into(),
        prompt_ids: ids(&case["prompt_ids"]),
        tokens: ids(&case["tokens"]),
        margin: floats(&case["margin"]),
        logprobs,
        top,
        first_logits: case["first_logits"].is_array().then(|| floats(&case["first_logits"])),
        prompt: case["prompt"].as_str().expect("a case has a prompt").into(),
    };
    assert_eq!(found.tokens.len(), found.margin.len());
    assert_eq!(found.tokens.len(), found.logprobs.len());
    found
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("an oracle list")
}

fn floats(value: &Value) -> Vec<f64> {
    list(value).iter().map(|v| v.as_f64().expect("an oracle number")).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    list(value).iter().map(|v| v.as_u64().expect("an oracle id") as u32).collect()
}

fn pair(value: &Value) -> (u32, f64) {
    (value[0].as_u64().expect("an oracle id") as u32, value[1].as_f64().expect("an oracle number"))
}
