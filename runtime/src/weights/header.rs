//! The header of one safetensors file, read and checked before anything is believed.
//!
//! Layout: 8 bytes length N (little endian) · N bytes JSON {name: {dtype, shape, data_offsets}} · data.
//! **Invariant:** tensors of a header that exists tile the data exactly: no gap, no overlap, each of shape × dtype bytes. Nothing larger
//! than the file is ever allocated.

use super::blob::{Blob, LFS_POINTER, LFS_REASON};
use safetensors::tensor::{Dtype, TensorInfo};
use serde::Deserializer;
use serde::de::{MapAccess, Visitor};
use serde_json::Value;
use std::fmt;

/// The largest header the format allows.
const HEADER_BYTES_MAX: u64 = 100_000_000;
/// Bytes before the JSON.
const LENGTH_BYTES: u64 = 8;

/// One tensor of a file.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// From the start of the file.
    pub start: u64,
    pub bytes: u64,
}

/// A checked header.
#[derive(Clone, Debug)]
pub struct Header {
    /// In file order.
    pub tensors: Vec<Tensor>,
    /// First byte of the data.
    pub data_start: u64,
}

/// Reads the header of `file`; the error is what is wrong with the file, without its name.
pub fn read(file: &Blob) -> Result<Header, String> {
    let size = file.len();
    let mut start = [0u8; LFS_POINTER.len()];
    let seen = &mut start[..LFS_POINTER.len().min(size as usize)];
    file.read_at(0, seen).map_err(|error| error.to_string())?;
    if seen == LFS_POINTER {
        return Err(LFS_REASON.to_string());
    }
    if size < LENGTH_BYTES {
        return Err(format!("is truncated: expected at least {LENGTH_BYTES} bytes (a header length), found {size}"));
    }
    let length = u64::from_le_bytes(seen[..8].try_into().expect("eight bytes were read"));
    let data_start = LENGTH_BYTES.saturating_add(length);
    if data_start > size {
        let expected = format!("expected at least {data_start} bytes (8 + a header of {length}), found {size}");
        return Err(format!("is truncated or not a safetensors file: {expected}"));
    }
    if length > HEADER_BYTES_MAX {
        return Err(format!("has a header of {length} bytes; the format allows at most {HEADER_BYTES_MAX}"));
    }
    let mut json = vec![0u8; length as usize];
    file.read_at(LENGTH_BYTES, &mut json).map_err(|error| error.to_string())?;
    let entries = parse(&json).map_err(|error| format!("has a header that is not valid JSON: {error}"))?;
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, value) in entries {
        if name != "__metadata__" {
            tensors.push(tensor(name, value, data_start)?);
        }
    }
    tensors.sort_by(|a, b| (a.start, a.bytes, &a.name).cmp(&(b.start, b.bytes, &b.name)));
    check_tiling(&tensors, data_start, size)?;
    Ok(Header { tensors, data_start })
}

fn tensor(name: String, value: Value, data_start: u64) -> Result<Tensor, String> {
    let info: TensorInfo =
        serde_json::from_value(value).map_err(|error| format!("tensor {name}: its header entry is bad: {error}"))?;
    let (begin, end) = (info.data_offsets.0 as u64, info.data_offsets.1 as u64);
    let bits = info.shape.iter().try_fold(info.dtype.bitsize() as u64, |bits, n| bits.checked_mul(*n as u64));
    let expected = bits.filter(|bits| bits % 8 == 0).map(|bits| bits / 8);
    let found = end.checked_sub(begin);
    if expected.is_none() || found != expected {
        let shape = &info.shape;
        let expected = expected.map_or_else(|| "no whole number of bytes".to_string(), |n| format!("{n} bytes"));
        return Err(format!(
            "tensor {name}: data_offsets [{begin}, {end}] do not fit {:?} {shape:?}, which takes {expected}",
            info.dtype
        ));
    }
    let start = data_start
        .checked_add(begin)
        .filter(|start| start.checked_add(end - begin).is_some())
        .ok_or_else(|| format!("tensor {name}: data_offsets [{begin}, {end}] are out of range"))?;
    Ok(Tensor { name, dtype: info.dtype, shape: info.shape, start, bytes: end - begin })
}

fn check_tiling(tensors: &[Tensor], data_start: u64, size: u64) -> Result<(), String> {
    if let Some(tensor) = tensors.iter().find(|tensor| tensor.start + tensor.bytes > size) {
        let expected = tensors.iter().map(|t| t.start + t.bytes).max().unwrap_or(data_start);
        return Err(format!(
            "is truncated, or tensor {} is out of range (it ends at byte {}): expected {expected} bytes, found {size}",
            tensor.name,
            tensor.start + tensor.bytes
        ));
    }
    let mut end = data_start;
    for (index, tensor) in tensors.iter().enumerate() {
        if tensor.start < end {
            return Err(format!("tensor {}: its data overlaps that of {}", tensor.name, tensors[index - 1].name));
        }
        if tensor.start > end {
            let gap = tensor.start - end;
            return Err(format!("tensor {}: {gap} bytes before its data belong to no tensor", tensor.name));
        }
        end += tensor.bytes;
    }
    if end < size {
        return Err(format!("has {} bytes after its last tensor: expected {end} bytes, found {size}", size - end));
    }
    Ok(())
}

/// The header's entries; a name that occurs twice is an error, which a plain map would hide.
fn parse(json: &[u8]) -> Result<Vec<(String, Value)>, serde_json::Error> {
    struct Entries;
    impl<'de> Visitor<'de> for Entries {
        type Value = Vec<(String, Value)>;
        fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
            f.write_str("an object of tensors")
        }
        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let (mut entries, mut names) = (Vec::new(), std::collections::HashSet::new());
            while let Some((name, value)) = map.next_entry::<String, Value>()? {
                if !names.insert(name.clone()) {
                    return Err(serde::de::Error::custom(format!("tensor {name} is declared twice")));
                }
                entries.push((name, value));
            }
            Ok(entries)
        }
    }
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let entries = deserializer.deserialize_map(Entries)?;
    deserializer.end()?;
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A file of `shapes`, tensors packed in order.
    fn file(shapes: &[Vec<usize>]) -> Vec<u8> {
        let (mut entries, mut at) = (Vec::new(), 0);
        for (index, shape) in shapes.iter().enumerate() {
            let end = at + 2 * shape.iter().product::<usize>();
            entries
                .push(format!("\"t{index}\":{{\"dtype\":\"BF16\",\"shape\":{shape:?},\"data_offsets\":[{at},{end}]}}"));
            at = end;
        }
        let header = format!("{{{}}}", entries.join(","));
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + at, 7);
        bytes
    }

    fn parse_bytes(bytes: &[u8]) -> Result<Header, String> {
        let mut scratch = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut scratch, bytes).unwrap();
        read(&Blob::file(scratch).unwrap())
    }

    fn shapes() -> impl Strategy<Value = Vec<Vec<usize>>> {
        prop::collection::vec(prop::collection::vec(0usize..5, 0..4), 0..6)
    }

    proptest! {
        #[test]
        fn whole_files_read_back(shapes in shapes()) {
            let bytes = file(&shapes);
            let header = parse_bytes(&bytes).unwrap();
            prop_assert_eq!(header.tensors.len(), shapes.len());
            for tensor in header.tensors {
                let index: usize = tensor.name[1..].parse().unwrap();
                prop_assert_eq!(&tensor.shape, &shapes[index]);
            }
        }

        #[test]
        fn damaged_files_are_refused_or_still_tile_their_data(
            shapes in shapes(),
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
            cut in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let mut bytes = file(&shapes);
            for (at, value) in damage {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
            if let Some(cut) = cut {
                bytes.truncate(cut.index(bytes.len()));
            }
            if let Ok(header) = parse_bytes(&bytes) {
                let mut end = header.data_start;
                for tensor in &header.tensors {
                    prop_assert_eq!(tensor.start, end);
                    end += tensor.bytes;
                }
                prop_assert_eq!(end, bytes.len() as u64);
            }
        }

        #[test]
        fn no_bytes_at_all_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_bytes(&bytes);
        }
    }
}
