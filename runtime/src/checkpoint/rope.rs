//! Rotary position embedding: from a config's rope keys to per-pair inverse frequencies.
//!
//! Follows the reference definitions (plain, linear, YaRN, llama3) in fp32, step by step as Transformers evaluates
//! them; powers and logarithms are taken in f64 and rounded once, so that a table's bits depend on nothing but its
//! config. Both spellings are read: `rope_theta` + `rope_scaling {type | rope_type}`, and `rope_parameters` with
//! `rope_theta` inside.

use super::CheckpointError;
use super::fields::Fields;
use serde_json::json;
use slotgraph_kernels::spec::RopeTable;
use std::f64::consts::PI;

/// A config's rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    pub theta: f64,
    pub scaling: Scaling,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    Plain,
    Linear { factor: f64 },
    Yarn(Yarn),
    Llama3 { factor: f64, low_freq_factor: f64, high_freq_factor: f64, original: usize },
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    pub factor: f64,
    pub original: usize,
    pub beta_fast: f64,
    pub beta_slow: f64,
    pub mscale: Option<f64>,
    pub mscale_all_dim: Option<f64>,
    pub attention_factor: Option<f64>,
    /// Round the ramp's ends to whole pairs.
    pub truncate: bool,
}

/// How a family turns YaRN's mscale keys into factors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MscaleRule {
    /// DeepSeek: cos and sin times mscale(factor, mscale) / mscale(factor, mscale_all_dim), absent keys being 1 and 0;
    /// the softmax scale times mscale(factor, mscale_all_dim)² when mscale_all_dim is set.
    Deepseek,
    /// Others: the ratio when both keys are set, else mscale(factor, 1); the softmax scale is left alone.
    Common,
}

/// YaRN's magnitude: 1 up to factor 1, then 0.1·m·ln(factor) + 1.
pub fn mscale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * libm::log(factor) + 1.0 }
}

impl Rope {
    /// Reads a config's rope keys in either spelling.
    pub fn parse(config: &Fields) -> Result<Rope, CheckpointError> {
        config.only("partial_rotary_factor", &[json!(1.0), json!(1)])?;
        let outer_theta = config.number("rope_theta")?;
        let older = config.object("rope_scaling")?.map(|f| scaling(&f).map(|s| (f, s))).transpose()?;
        let newer = config.object("rope_parameters")?.map(|f| scaling(&f).map(|s| (f, s))).transpose()?;
        if let (Some((fields, older)), Some((_, newer))) = (&older, &newer)
            && older != newer
        {
            return Err(fields.error("rope_type", "rope_scaling and rope_parameters disagree; keep one of them"));
        }
        let mut inner_theta = None;
        for (fields, _) in newer.iter().chain(&older) {
            inner_theta = inner_theta.or(fields.number("rope_theta")?);
        }
        if let (Some(outer), Some(inner)) = (outer_theta, inner_theta)
            && outer != inner
        {
            let reason = format!("is {outer}, but the rope object says {inner}; keep one of them");
            return Err(config.error("rope_theta", reason));
        }
        let theta = inner_theta.or(outer_theta).unwrap_or(10000.0);
        if theta <= 1.0 {
            return Err(config.error("rope_theta", format!("is {theta}, expected more than 1")));
        }
        for (fields, _) in older.iter().chain(&newer) {
            fields.finish(|_| false)?;
        }
        Ok(Rope { theta, scaling: newer.or(older).map_or(Scaling::Plain, |(_, scaling)| scaling) })
    }

    /// The table of `positions` × `dim`/2 pairs.
    pub fn table(&self, dim: usize, positions: usize, rule: MscaleRule) -> RopeTable {
        let plain: Vec<f32> = (0..dim / 2)
            .map(|pair| {
                let exponent = (2 * pair) as f32 / dim as f32;
                libm::pow(self.theta, f64::from(exponent)) as f32
            })
            .collect();
        let inv_freq: Vec<f32> = match &self.scaling {
            Scaling::Plain => plain.iter().map(|power| 1.0 / power).collect(),
            Scaling::Linear { factor } => plain.iter().map(|power| 1.0 / power / *factor as f32).collect(),
            Scaling::Yarn(yarn) => yarn.inv_freq(&plain, self.theta),
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original } => plain
                .iter()
                .map(|power| llama3(1.0 / power, *factor, *low_freq_factor, *high_freq_factor, *original))
                .collect(),
        };
        RopeTable {
            positions,
            inv_freq_bits: inv_freq.iter().map(|f| f.to_bits()).collect(),
            scale_bits: (self.multiplier(rule) as f32).to_bits(),
        }
    }

    /// Factor on cos and sin.
    pub fn multiplier(&self, rule: MscaleRule) -> f64 {
        let Scaling::Yarn(yarn) = &self.scaling else { return 1.0 };
        if let Some(factor) = yarn.attention_factor {
            return factor;
        }
        match (rule, yarn.mscale, yarn.mscale_all_dim) {
            (MscaleRule::Deepseek, m, all) => {
                mscale(yarn.factor, m.unwrap_or(1.0)) / mscale(yarn.factor, all.unwrap_or(0.0))
            }
            (MscaleRule::Common, Some(m), Some(all)) if m != 0.0 && all != 0.0 => {
                mscale(yarn.factor, m) / mscale(yarn.factor, all)
            }
            (MscaleRule::Common, ..) => mscale(yarn.factor, 1.0),
        }
    }

    /// Factor on the softmax scale under `MscaleRule::Deepseek`.
    pub fn softmax_factor(&self) -> f64 {
        match &self.scaling {
            Scaling::Yarn(Yarn { factor, mscale_all_dim: Some(all), .. }) if *all != 0.0 => {
                mscale(*factor, *all) * mscale(*factor, *all)
            }
            _ => 1.0,
        }
    }
}

impl Yarn {
    fn inv_freq(&self, powers: &[f32], theta: f64) -> Vec<f32> {
        let dim = 2 * powers.len();
        let correction = |rotations: f64| {
            dim as f64 * libm::log(self.original as f64 / (rotations * 2.0 * PI)) / (2.0 * libm::log(theta))
        };
        let (mut low, mut high) = (correction(self.beta_fast), correction(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min((dim - 1) as f64));
        if low == high {
            high += 0.001;
        }
        powers
            .iter()
            .enumerate()
            .map(|(pair, power)| {
                let ramp = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
                let keep = 1.0 - ramp;
                let (extrapolated, interpolated) = (1.0 / power, 1.0 / (self.factor as f32 * power));
                interpolated * (1.0 - keep) + extrapolated * keep
            })
            .collect()
    }
}

fn llama3(inv_freq: f32, factor: f64, low_freq_factor: f64, high_freq_factor: f64, original: usize) -> f32 {
    let wavelength = (2.0 * PI) as f32 / inv_freq;
    let low_wavelength = (original as f64 / low_freq_factor) as f32;
    let high_wavelength = (original as f64 / high_freq_factor) as f32;
    if wavelength < high_wavelength {
        inv_freq
    } else if wavelength > low_wavelength {
        inv_freq / factor as f32
    } else {
        let smooth =
            (original as f32 / wavelength - low_freq_factor as f32) / (high_freq_factor - low_freq_factor) as f32;
        (1.0 - smooth) * (inv_freq / factor as f32) + smooth * inv_freq
    }
}

fn scaling(fields: &Fields) -> Result<Scaling, CheckpointError> {
    // Read here so that `finish` knows it; `parse` takes its value.
    fields.number("rope_theta")?;
    fields.only("partial_rotary_factor", &[json!(1.0), json!(1)])?;
    let (older, newer) = (fields.text("type")?, fields.text("rope_type")?);
    if let (Some(older), Some(newer)) = (older, newer)
        && older != newer
    {
        return Err(fields.error("type", format!("is {older:?}, but rope_type is {newer:?}")));
    }
    let factor = || match fields.number("factor")? {
        None => Err(fields.error("factor", "is missing")),
        Some(factor) if factor >= 1.0 => Ok(factor),
        Some(factor) => Err(fields.error("factor", format!("is {factor}, expected at least 1"))),
    };
    match newer.or(older).unwrap_or("default") {
        "default" => Ok(Scaling::Plain),
        "linear" => Ok(Scaling::Linear { factor: factor()? }),
        "yarn" => Ok(Scaling::Yarn(Yarn {
            factor: factor()?,
            original: fields.size("original_max_position_embeddings")?,
            beta_fast: fields.positive("beta_fast", 32.0)?,
            beta_slow: fields.positive("beta_slow", 1.0)?,
            mscale: fields.number("mscale")?,
            mscale_all_dim: fields.number("mscale_all_dim")?,
            attention_factor: fields.number("attention_factor")?,
            truncate: fields.flag("truncate")?.unwrap_or(true),
        })),
        "llama3" => {
            let (low_freq_factor, high_freq_factor) =
                (fields.positive("low_freq_factor", 1.0)?, fields.positive("high_freq_factor", 4.0)?);
            if low_freq_factor >= high_freq_factor {
                let reason = format!("is {high_freq_factor}, expected more than low_freq_factor {low_freq_factor}");
                return Err(fields.error("high_freq_factor", reason));
            }
            let original = fields.size("original_max_position_embeddings")?;
            Ok(Scaling::Llama3 { factor: factor()?, low_freq_factor, high_freq_factor, original })
        }
        other => Err(fields.error(
            if newer.is_some() { "rope_type" } else { "type" },
            format!("{other:?} is not implemented (default, linear, yarn and llama3 are)"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LITE: Yarn = Yarn {
        factor: 40.0,
        original: 4096,
        beta_fast: 32.0,
        beta_slow: 1.0,
        mscale: Some(0.707),
        mscale_all_dim: Some(0.707),
        attention_factor: None,
        truncate: true,
    };

    fn floats(table: &RopeTable) -> Vec<f32> {
        table.inv_freq_bits.iter().map(|bits| f32::from_bits(*bits)).collect()
    }

    #[test]
    fn deepseek_v2_lite_has_the_known_yarn_numbers() {
        let rope = Rope { theta: 10000.0, scaling: Scaling::Yarn(LITE) };
        assert_eq!(rope.multiplier(MscaleRule::Deepseek), 1.0);
        assert!((mscale(40.0, 0.707) - 1.2608038).abs() < 1e-7);
        assert!((rope.softmax_factor() - 1.5896262).abs() < 1e-7);
        let scale = rope.softmax_factor() / (192.0_f64).sqrt();
        assert!((scale - 0.1147214).abs() < 1e-7, "{scale}");
    }

    #[test]
    fn yarn_keeps_the_fast_pairs_divides_the_slow_and_ramps_between() {
        let rope = Rope { theta: 10000.0, scaling: Scaling::Yarn(LITE) };
        let plain = floats(&Rope { theta: 10000.0, scaling: Scaling::Plain }.table(64, 8, MscaleRule::Deepseek));
        let table = floats(&rope.table(64, 8, MscaleRule::Deepseek));
        // find_correction_dim: 64·ln(4096/(32·2π))/(2·ln 1e4) = 10.47 → 10; 64·ln(4096/2π)/(2·ln 1e4) = 22.51 → 23.
        for pair in 0..32 {
            let ramp = ((pair as f64 - 10.0) / 13.0).clamp(0.0, 1.0);
            let expected = f64::from(plain[pair]) * ((1.0 - ramp) + ramp / 40.0);
            let error = (f64::from(table[pair]) - expected).abs() / expected;
            assert!(error < 3e-7, "pair {pair}: {} against {expected}", table[pair]);
        }
        assert_eq!(table[..=10], plain[..=10]);
        assert!(table[11] < plain[11]);
        assert_eq!(table[31], 1.0 / (40.0 * (1.0 / plain[31])));
    }

    #[test]
    fn mscale_rules_differ_where_the_references_do() {
        let with = |mscale, mscale_all_dim| Rope {
            theta: 10000.0,
            scaling: Scaling::Yarn(Yarn { mscale, mscale_all_dim, ..LITE }),
        };
        let one = mscale(40.0, 1.0);
        assert_eq!(with(None, None).multiplier(MscaleRule::Common), one);
        assert_eq!(with(None, None).multiplier(MscaleRule::Deepseek), one);
        assert_eq!(with(None, None).softmax_factor(), 1.0);
        assert_eq!(with(Some(0.5), None).multiplier(MscaleRule::Deepseek), mscale(40.0, 0.5));
        assert_eq!(with(Some(0.5), None).multiplier(MscaleRule::Common), one);
        let ratio = with(Some(0.707), Some(1.0)).multiplier(MscaleRule::Deepseek);
        assert_eq!(ratio, mscale(40.0, 0.707) / one);
        let fixed = Rope { theta: 10000.0, scaling: Scaling::Yarn(Yarn { attention_factor: Some(1.25), ..LITE }) };
        assert_eq!(fixed.multiplier(MscaleRule::Common), 1.25);
    }

    #[test]
    fn llama3_scales_long_waves_and_blends_the_middle() {
        let scaling = Scaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original: 512 };
        let plain = floats(&Rope { theta: 500000.0, scaling: Scaling::Plain }.table(32, 8, MscaleRule::Common));
        let table = floats(&Rope { theta: 500000.0, scaling }.table(32, 8, MscaleRule::Common));
        for (pair, (&scaled, &base)) in table.iter().zip(&plain).enumerate() {
            let wave = 2.0 * PI / f64::from(base);
            let expected = if wave < 128.0 {
                f64::from(base)
            } else if wave > 512.0 {
                f64::from(base) / 8.0
            } else {
                let smooth = (512.0 / wave - 1.0) / 3.0;
                (1.0 - smooth) * f64::from(base) / 8.0 + smooth * f64::from(base)
            };
            assert!((f64::from(scaled) - expected).abs() / expected < 1e-6, "pair {pair}");
        }
        assert!(table.iter().zip(&plain).any(|(scaled, base)| scaled < base && *scaled > base / 8.0));
    }

    #[test]
    fn plain_frequencies_start_at_one_and_fall_by_the_base() {
        let table = Rope { theta: 10000.0, scaling: Scaling::Plain }.table(4, 8, MscaleRule::Common);
        assert_eq!(floats(&table), [1.0, 0.01]);
        assert_eq!(table.scale_bits, 1.0_f32.to_bits());
        let linear = Rope { theta: 10000.0, scaling: Scaling::Linear { factor: 4.0 } };
        assert_eq!(floats(&linear.table(4, 8, MscaleRule::Common)), [0.25, 0.0025]);
    }
}
