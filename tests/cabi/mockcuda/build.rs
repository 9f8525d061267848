//! Gives the library the driver's SONAME, by which the loader finds it again once it was opened by path.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo:rerun-if-changed=build.rs");
}
