//! generation_config.json: the sampling defaults that a checkpoint ships with, typed.

/// Defaults for requests that leave a field out; None where the file says nothing.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub struct GenerationDefaults {
    /// False means greedy unless the request says otherwise.
    pub do_sample: Option<bool>,
    pub temperature: Option<f32>,
    pub top_p: Option<f32>,
    pub top_k: Option<u32>,
    pub min_p: Option<f32>,
    pub repetition_penalty: Option<f32>,
    pub max_new_tokens: Option<u32>,
}
