//! bf16 as bits of an f32: widening, and rounding to nearest even.

/// The f32 of these bf16 bits.
#[inline(always)]
pub fn to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// `x` rounded to the nearest bf16, ties to even, kept as f32. A NaN stays a NaN.
#[inline(always)]
pub fn round(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    let quiet = (bits | 0x0040_0000) & 0xffff_0000;
    f32::from_bits(if x.is_nan() { quiet } else { rounded })
}
