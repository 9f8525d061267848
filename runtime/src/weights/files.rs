//! Weights from safetensors: positioned reads straight into the caller's buffer, from any number of threads.
//!
//! BF16 is taken as it is; F16 and F32 are rounded once to bf16, nearest even. A value that is not finite (in the file,
//! or after rounding) is refused with its tensor and index: it would otherwise surface as NaN rows while serving.

use super::header::Tensor;
use super::parts::{self, Tensors};
use super::shards::Shards;
use half::{bf16, f16};
use safetensors::tensor::Dtype;
use slotgraph_graphs::source::{Source, SourceError};
use slotgraph_kernels::{TensorPart, WeightSpec};
use std::ops::Range;

/// Elements converted at a time.
const PIECE: usize = 1 << 16;

/// A source over validated files.
pub struct FileSource {
    shards: Shards,
}

impl FileSource {
    /// `shards` must have passed `Shards::check`.
    pub fn new(shards: Shards) -> FileSource {
        FileSource { shards }
    }
}

impl Source for FileSource {
    fn read_rows(
        &self,
        spec: &WeightSpec,
        group: usize,
        rows: Range<usize>,
        out: &mut [u16],
    ) -> Result<(), SourceError> {
        parts::read_rows(self, spec, group, rows, out)
    }
}

impl Tensors for FileSource {
    fn fill(&self, part: &TensorPart, first: u64, out: &mut [u16]) -> Result<(), String> {
        let name = &part.tensor;
        let (file, tensor) = self.shards.tensors.get(name).ok_or_else(|| format!("tensor {name} is in no file"))?;
        let shard = &self.shards.files[*file];
        let read = |at: u64, bytes: &mut [u8]| {
            shard.blob.read_at(tensor.start + at, bytes).map_err(|error| format!("{}: {error}", shard.label))
        };
        match tensor.dtype {
            Dtype::BF16 => {
                read(first * 2, bytemuck::cast_slice_mut(out))?;
                if cfg!(target_endian = "big") {
                    out.iter_mut().for_each(|value| *value = value.swap_bytes());
                }
            }
            _ => convert(tensor, first, out, read)?,
        }
        match first_not_finite(out) {
            None => Ok(()),
            Some(at) => {
                let (value, index) = (bf16::from_bits(out[at]), first + at as u64);
                Err(format!("{}: tensor {name} holds {value} at element {index}; weights must be finite", shard.label))
            }
        }
    }
}

/// Index of the first bf16 that is infinite or NaN: its exponent is all ones. By blocks, whose maximum is a vector
/// instruction.
fn first_not_finite(values: &[u16]) -> Option<usize> {
    const BLOCK: usize = 4096;
    const INFINITE: i16 = 0x7f80;
    let magnitude = |bits: &u16| (bits & 0x7fff) as i16;
    let (block, values) = values
        .chunks(BLOCK)
        .enumerate()
        .find(|(_, block)| block.iter().map(magnitude).fold(0, i16::max) >= INFINITE)?;
    let at = values.iter().position(|bits| magnitude(bits) >= INFINITE).expect("the block's maximum is not finite");
    Some(block * BLOCK + at)
}

fn convert(
    tensor: &Tensor,
    first: u64,
    out: &mut [u16],
    read: impl Fn(u64, &mut [u8]) -> Result<(), String>,
) -> Result<(), String> {
    let size = tensor.dtype.bitsize() / 8;
    let mut bytes = vec![0u8; PIECE.min(out.len()) * size];
    for (piece, out) in out.chunks_mut(PIECE).enumerate() {
        let bytes = &mut bytes[..out.len() * size];
        read((first + (piece * PIECE) as u64) * size as u64, bytes)?;
        for (value, bytes) in out.iter_mut().zip(bytes.chunks_exact(size)) {
            let wide = match *bytes {
                [a, b] => f16::from_le_bytes([a, b]).to_f32(),
                [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
                _ => return Err(format!("tensor {}: {:?} cannot be converted", tensor.name, tensor.dtype)),
            };
            *value = bf16::from_f32(wide).to_bits();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_infinity_or_nan_is_found_wherever_it_is() {
        let largest = 0x7f7f;
        let mut values = vec![largest; 10_000];
        values[77] = 0xff7f;
        assert_eq!(first_not_finite(&values), None);
        assert_eq!(first_not_finite(&[]), None);
        for (at, bits) in [(9_999, 0x7f80), (5_000, 0xff80), (4_096, 0x7fc0), (4_095, 0xffff), (0, 0x7f81)] {
            values[at] = bits;
            assert_eq!(first_not_finite(&values), Some(at));
        }
    }
}
