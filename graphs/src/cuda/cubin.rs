//! What a CUBIN says of its functions' parameters and instructions, read without a driver.
//!
//! Used where there is no GPU: a launch that passes other sizes than its kernel declares, or a kernel that stores before it
//! waits for its predecessor, is found by the compile checks and not by a start on a GPU. **Invariant:** reads only; bytes
//! that are no CUBIN give None.
//!
//! A CUBIN is an ELF file. The section `.nv.info.FUNCTION` is a list of attributes: format byte, attribute byte, 16 bits of size,
//! value. KPARAM_INFO has twelve bytes: a word, the parameter's ordinal and offset (16 bits each), and a word whose upper
//! 14 bits are the parameter's size.

const FORMAT_SIZED: u8 = 4;
const KPARAM_INFO: u8 = 0x17;

/// Sizes of the parameters of `function`, in order; None if the image has no such function.
pub fn parameter_sizes(image: &[u8], function: &str) -> Option<Vec<usize>> {
    let info = section(image, &format!(".nv.info.{function}"))?;
    let mut found: Vec<(u16, usize)> = Vec::new();
    let mut rest = info;
    while let Some((&[format, attribute, low, high], after)) = rest.split_first_chunk::<4>() {
        // Other formats hold their value in the two bytes where a sized one holds its length.
        let length = if format == FORMAT_SIZED { usize::from(u16::from_le_bytes([low, high])) } else { 0 };
        let (value, after) = after.split_at_checked(length)?;
        if format == FORMAT_SIZED && attribute == KPARAM_INFO {
            let ordinal = u16::from_le_bytes(value.get(4..6)?.try_into().ok()?);
            let packed = u32::from_le_bytes(value.get(8..12)?.try_into().ok()?);
            found.push((ordinal, (packed >> 18) as usize));
        }
        rest = after;
    }
    found.sort_unstable();
    Some(found.into_iter().map(|(_, size)| size).collect())
}

/// Operation codes of the instructions of interest (the low twelve bits), the same on every architecture from sm_80 to sm_120.
pub mod opcode {
    /// HMMA: the matrix unit.
    pub const MATRIX: u16 = 0x23c;
    /// HGMMA: the matrix unit as a warpgroup uses it (sm_90a).
    pub const WARPGROUP_MATRIX: u16 = 0xdf0;
    /// ACQBULK: griddepcontrol.wait.
    pub const WAIT: u16 = 0x82e;
    /// ST, STG, ATOM (two forms), RED, ATOMG (two forms): whatever writes global memory.
    pub const GLOBAL_WRITES: [u16; 7] = [0x985, 0x986, 0x98a, 0x38b, 0x98e, 0x9a8, 0x3a9];
}

/// Operation codes of `function` in the order of its instructions; None if the image has no such function.
pub fn opcodes(image: &[u8], function: &str) -> Option<Vec<u16>> {
    const INSTRUCTION_BYTES: usize = 16;
    let code = section(image, &format!(".text.{function}"))?;
    Some(code.chunks_exact(INSTRUCTION_BYTES).map(|word| u16::from_le_bytes([word[0], word[1]]) & 0xfff).collect())
}

/// Contents of the section named `name` of a 64-bit little-endian ELF file.
fn section<'a>(image: &'a [u8], name: &str) -> Option<&'a [u8]> {
    if !image.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let headers = usize::try_from(u64_at(image, 0x28)?).ok()?;
    let (size, count, names) = (u16_at(image, 0x3a)?, u16_at(image, 0x3c)?, u16_at(image, 0x3e)?);
    let header = |index: u16| headers.checked_add(usize::from(index) * usize::from(size));
    let contents = |at: usize| {
        let (offset, length) = (u64_at(image, at + 0x18)?, u64_at(image, at + 0x20)?);
        image.get(usize::try_from(offset).ok()?..)?.get(..usize::try_from(length).ok()?)
    };
    let table = contents(header(names)?)?;
    (0..count).find_map(|index| {
        let at = header(index)?;
        let start = usize::try_from(u32_at(image, at)?).ok()?;
        let own = table.get(start..)?.split(|byte| *byte == 0).next()?;
        if own == name.as_bytes() { contents(at) } else { None }
    })
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..)?.first_chunk().copied()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_are_no_cubin_give_nothing() {
        let cut_header = [&b"\x7fELF\x02\x01"[..], &[0xff; 70]].concat();
        for bytes in [&b""[..], b"\x7fELF", b"PTX", &cut_header] {
            assert_eq!(parameter_sizes(bytes, "k"), None);
            assert_eq!(opcodes(bytes, "k"), None);
        }
    }
}
