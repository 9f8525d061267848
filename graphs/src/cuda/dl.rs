//! The dynamic loader: open a library, look up a symbol, ask which file an address came from.
//!
//! Used by `libs` and by the function tables (`nvrtc`). **Invariant:** a library that was opened stays open for the life of
//! the process, so a symbol taken from it never dangles. CUDA's libraries keep threads and atexit handlers of their own and
//! do not take being unloaded.

use std::ffi::{CStr, CString, c_void};
use std::path::{Path, PathBuf};

/// An open library.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    handle: *mut c_void,
}

// SAFETY: a dlopen handle is a token for the loader, which locks for itself; dlsym on it may be called from any thread. The
// handle is never closed (there is no Drop), so no thread can see it dangle.
unsafe impl Send for Library {}
// SAFETY: as above; `Library` has no state of its own that a shared reference could change.
unsafe impl Sync for Library {}

impl Library {
    /// Opens `name`: a path, or a bare name that ld.so searches for. The error is the loader's own text.
    pub fn open(name: &Path) -> Result<Library, String> {
        let text = CString::new(name.as_os_str().as_encoded_bytes()).map_err(|_| "the path holds a NUL".to_owned())?;
        // SAFETY: `text` is a NUL-terminated string that outlives the call. dlopen runs the library's initialisers: these
        // are NVIDIA's libraries, chosen by the user or found in the usual places, and loading them is the purpose.
        let handle = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() { Err(last_error()) } else { Ok(Library { handle }) }
    }

    /// Address of symbol `name`, or None if the library (with what it depends on) has none of that name.
    pub fn address(&self, name: &CStr) -> Option<*const c_void> {
        // SAFETY: `handle` came from dlopen and is never closed; `name` is NUL-terminated.
        let address = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        (!address.is_null()).then_some(address.cast_const())
    }

    /// The file that symbol `name` was loaded from.
    pub fn file_of(&self, name: &CStr) -> Option<PathBuf> {
        file_of_address(self.address(name)?)
    }
}

/// The file that holds the code or data at `address`.
pub fn file_of_address(address: *const c_void) -> Option<PathBuf> {
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: dladdr accepts any address and only writes `info`, which outlives the call.
    let found = unsafe { libc::dladdr(address, &raw mut info) };
    if found == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: on success dli_fname is the loader's NUL-terminated name of a loaded object, which stays loaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(name.to_string_lossy().into_owned()))
}

fn last_error() -> String {
    // SAFETY: dlerror returns NULL or a NUL-terminated string valid until this thread's next loader call; it is copied here.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "unknown loader error".into();
    }
    // SAFETY: not NULL, see above.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_knows_its_symbols_and_their_file() {
        let library = Library::open(Path::new("libm.so.6")).unwrap();
        assert!(library.address(c"cos").is_some());
        assert!(library.address(c"no_such_symbol_here").is_none());
        let file = library.file_of(c"cos").unwrap();
        assert!(file.to_string_lossy().contains("libm"), "{}", file.display());
    }

    #[test]
    fn a_missing_library_says_its_name() {
        let error = Library::open(Path::new("/nowhere/libnothing.so.9")).unwrap_err();
        assert!(error.contains("/nowhere/libnothing.so.9"), "{error}");
    }
}
