//! The words and units of flag values: switches, sizes, durations, lists. Each refusal names the flag, the value and what is understood.

use super::ConfigError;
use std::time::Duration;

/// The error for a flag's value.
pub fn refuse(flag: &str, value: impl ToString, reason: impl Into<String>) -> ConfigError {
    ConfigError { flag: flag.to_string(), value: value.to_string(), reason: reason.into() }
}

/// `on`, `off`, `true`, `false`; None when nothing was said.
pub fn switch(flag: &str, value: &Option<String>) -> Result<Option<bool>, ConfigError> {
    match value.as_deref() {
        None => Ok(None),
        Some("on" | "true") => Ok(Some(true)),
        Some("off" | "false") => Ok(Some(false)),
        Some(other) => Err(refuse(flag, other, "expected on or off")),
    }
}

/// One of a table of words.
pub fn word<T: Copy>(flag: &str, value: &str, words: &[(&str, T)]) -> Result<T, ConfigError> {
    match words.iter().find(|(word, _)| *word == value) {
        Some((_, meaning)) => Ok(*meaning),
        None => {
            let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            Err(refuse(flag, value, format!("expected {}", known.join(", "))))
        }
    }
}

/// `1,2,4` or `1 2 4`: at least one number.
pub fn list(flag: &str, value: &str) -> Result<Vec<usize>, ConfigError> {
    let items: Vec<&str> = match value.contains(',') {
        true => value.split(',').map(str::trim).collect(),
        false => value.split_whitespace().collect(),
    };
    let numbers: Option<Vec<usize>> = items.iter().map(|item| item.parse().ok()).collect();
    numbers
        .filter(|numbers| !numbers.is_empty())
        .ok_or_else(|| refuse(flag, value, "expected numbers with commas between them, such as 1,2,4"))
}

/// `67108864`, `64MiB`, `8GiB`, `1.5G`: bytes. K, M, G, T and KiB … are powers of 1,024; KB, MB, GB, TB are powers of 1,000.
pub fn bytes(flag: &str, value: &str) -> Result<u64, ConfigError> {
    let text = value.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let scale: Option<u64> = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "k" | "kib" => Some(1 << 10),
        "m" | "mib" => Some(1 << 20),
        "g" | "gib" => Some(1 << 30),
        "t" | "tib" => Some(1 << 40),
        "kb" => Some(1_000),
        "mb" => Some(1_000_000),
        "gb" => Some(1_000_000_000),
        "tb" => Some(1_000_000_000_000),
        _ => None,
    };
    let whole = number.parse::<u64>().ok();
    let product = match (whole, number.parse::<f64>(), scale) {
        (Some(whole), _, Some(scale)) => whole.checked_mul(scale),
        (None, Ok(number), Some(scale)) if scale > 1 && number * (scale as f64) < u64::MAX as f64 => {
            Some((number * scale as f64) as u64)
        }
        _ => None,
    };
    product.ok_or_else(|| refuse(flag, value, "expected bytes, such as 67108864, 64MiB or 8GB"))
}

/// `0.9` or `90%`, if the value has that form.
pub fn fraction(value: &str) -> Option<f64> {
    let text = value.trim();
    match text.strip_suffix('%') {
        Some(percent) => percent.trim().parse::<f64>().ok().map(|percent| percent / 100.0),
        None if text.contains('.') => text.parse().ok(),
        None => None,
    }
}

/// `30`, `0.5` (seconds), `500ms`, `30s`, `2m`, `1h`.
pub fn duration(flag: &str, value: &str) -> Result<Duration, ConfigError> {
    let text = value.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let seconds = match unit.trim() {
        "" | "s" => Some(1.0),
        "ms" => Some(0.001),
        "m" | "min" => Some(60.0),
        "h" => Some(3600.0),
        _ => None,
    };
    let parsed = number.parse::<f64>().ok().zip(seconds).map(|(number, unit)| number * unit);
    parsed
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| refuse(flag, value, "expected seconds or a unit: 30, 0.5, 500ms, 30s, 2m"))
}
