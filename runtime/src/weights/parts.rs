//! A weight's rows from the tensors that its spec names: row ranges, transposes, groups.
//!
//! Shared by every source, so that files and dummy weights cannot disagree about what a part means. Rows that no part covers are zero.

use slotgraph_graphs::source::{SourceError, group_extents};
use slotgraph_kernels::{TensorPart, WeightSpec};
use std::ops::Range;

/// What a tensor contains.
pub trait Tensors {
    /// Elements `first`… of the tensor that `part` names, in row-major order, as bf16 bits.
    fn fill(&self, part: &TensorPart, first: u64, out: &mut [u16]) -> Result<(), String>;
}

/// Rows `rows` of group `group` of `spec` into `out`.
pub fn read_rows(
    tensors: &impl Tensors,
    spec: &WeightSpec,
    group: usize,
    rows: Range<usize>,
    out: &mut [u16],
) -> Result<(), SourceError> {
    let (height, width) = group_extents(&spec.form);
    assert!(rows.end <= height && out.len() == rows.len() * width, "weight {}: a bad range of rows", spec.name);
    let parts = || spec.parts.iter().filter(|part| part.group == group);
    if parts().map(|part| Target::of(part, width).rows.len()).sum::<usize>() < height {
        out.fill(0);
    }
    for part in parts() {
        let target = Target::of(part, width);
        let (from, to) = (target.rows.start.max(rows.start), target.rows.end.min(rows.end));
        if from >= to {
            continue;
        }
        let into = &mut out[(from - rows.start) * width..(to - rows.start) * width];
        let wanted = from - target.rows.start..to - target.rows.start;
        let read = if part.transpose {
            transposed(tensors, part, wanted, into)
        } else {
            plain(tensors, part, wanted, width, into)
        };
        read.map_err(|reason| SourceError { weight: spec.name.clone(), reason })?;
    }
    Ok(())
}

/// Where a part lands in its group.
struct Target {
    rows: Range<usize>,
}

impl Target {
    fn of(part: &TensorPart, width: usize) -> Target {
        let columns = columns(part);
        let (height, across) = if part.transpose { (columns, part.rows.len()) } else { (part.rows.len(), columns) };
        assert_eq!(across, width, "tensor {}: a part must span its weight's columns", part.tensor);
        Target { rows: part.dst_row..part.dst_row + height }
    }
}

/// Columns of the part's tensor, seen as a matrix.
fn columns(part: &TensorPart) -> usize {
    part.tensor_shape[1..].iter().product()
}

fn plain(
    tensors: &impl Tensors,
    part: &TensorPart,
    wanted: Range<usize>,
    width: usize,
    out: &mut [u16],
) -> Result<(), String> {
    tensors.fill(part, ((part.rows.start + wanted.start) * width) as u64, out)
}

fn transposed(tensors: &impl Tensors, part: &TensorPart, wanted: Range<usize>, out: &mut [u16]) -> Result<(), String> {
    let (columns, width) = (columns(part), part.rows.len());
    let mut block = vec![0u16; width * columns];
    tensors.fill(part, (part.rows.start * columns) as u64, &mut block)?;
    // 16 source rows at a time, so that the strided reads stay in the first-level cache.
    const TILE: usize = 16;
    for first in (0..width).step_by(TILE) {
        let last = (first + TILE).min(width);
        for (row, out) in wanted.clone().zip(out.chunks_exact_mut(width)) {
            for (at, value) in out[first..last].iter_mut().enumerate() {
                *value = block[(first + at) * columns + row];
            }
        }
    }
    Ok(())
}
