//! NVRTC's functions: every source compiles, to an image that is an ELF magic and a hash.

use crate::state::{Code, SUCCESS};
use std::ffi::{CStr, c_char, c_int};
use std::hash::{DefaultHasher, Hash, Hasher};

pub struct Program {
    image: Vec<u8>,
}

/// # Safety
/// As nvrtc.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> Code {
    // SAFETY: by the caller's word.
    unsafe {
        major.write(13);
        minor.write(0);
    }
    SUCCESS
}

/// # Safety
/// As nvrtc.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetErrorString(_code: Code) -> *const c_char {
    c"as the mock was told".as_ptr()
}

/// # Safety
/// As nvrtc.h says: `source` is NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut *mut Program,
    source: *const c_char,
    _name: *const c_char,
    _header_count: c_int,
    _headers: *const *const c_char,
    _names: *const *const c_char,
) -> Code {
    let mut hasher = DefaultHasher::new();
    // SAFETY: by the caller's word.
    unsafe { CStr::from_ptr(source) }.hash(&mut hasher);
    let mut image = b"\x7fELF".to_vec();
    image.extend_from_slice(&hasher.finish().to_le_bytes());
    // SAFETY: by the caller's word.
    unsafe { program.write(Box::into_raw(Box::new(Program { image }))) };
    SUCCESS
}

/// # Safety
/// As nvrtc.h says: a program that is destroyed once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(program: *mut *mut Program) -> Code {
    // SAFETY: made by nvrtcCreateProgram, given back once.
    drop(unsafe { Box::from_raw(*program) });
    SUCCESS
}

/// # Safety
/// As nvrtc.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(
    _program: *mut Program,
    _count: c_int,
    _options: *const *const c_char,
) -> Code {
    SUCCESS
}

/// # Safety
/// As nvrtc.h says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLogSize(_program: *mut Program, size: *mut usize) -> Code {
    // SAFETY: by the caller's word.
    unsafe { size.write(1) };
    SUCCESS
}

/// # Safety
/// As nvrtc.h says: room for the size that was told.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetProgramLog(_program: *mut Program, log: *mut c_char) -> Code {
    // SAFETY: by the caller's word.
    unsafe { log.write(0) };
    SUCCESS
}

/// # Safety
/// As nvrtc.h says: a live program.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBINSize(program: *mut Program, size: *mut usize) -> Code {
    // SAFETY: by the caller's word.
    unsafe { size.write((*program).image.len()) };
    SUCCESS
}

/// # Safety
/// As nvrtc.h says: a live program, room for the size that was told.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcGetCUBIN(program: *mut Program, cubin: *mut u8) -> Code {
    // SAFETY: by the caller's word.
    unsafe {
        let image = &(*program).image;
        std::ptr::copy_nonoverlapping(image.as_ptr(), cubin, image.len());
    }
    SUCCESS
}
