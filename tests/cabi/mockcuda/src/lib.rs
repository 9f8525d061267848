//! A CUDA driver (libcuda.so.1) and an NVRTC (libnvrtc.so.13) without a GPU: one library, placed under both names.
//!
//! For tests of everything around the kernels: start-up, the arena and its ledger, capture and audit, rings, failures. Device
//! memory is host memory, the stream runs at once, and a kernel does nothing, but that one may be told to publish the
//! step's record. What the mock knows comes from the file `mockcuda.conf` beside the library, a line each:
//!
//! - `driver 13000`: what cuDriverGetVersion says; `devices 1`; `memory 1073741824`: bytes of the device;
//! - `function NAME SIZE…`: a kernel that exists, with the sizes of its parameters;
//! - `publish NAME COUNTER RING ENTRIES WORDS`: the kernel publishes: it adds one to the 64-bit counter at parameter COUNTER,
//!   and writes that step's number into its entry of the ring at parameter RING (ENTRIES of WORDS words each);
//! - `exchange NAME HIDDEN`: the kernel exchanges over peer memory, as kernels/cuda/exchange.cu says, in rows of HIDDEN floats;
//! - `compare NAME DIFFERENT CUT`: the kernel counts, as kernels/cuda/forms.cu says, every sum as compared, and so many as different and as
//!   changed by a cut;
//! - `call NAME`: the kernel's first parameter is a C function, which is called with the five that follow;
//! - `peers 0`: devices do not reach each other's memory;
//! - `silent`: forgets the `publish` lines before it;
//! - `fail CALL N`: the Nth call of a function fails with CUDA_ERROR_OUT_OF_MEMORY.
//!
//! Where there is a file `calls.log` beside the library, calls that take things down, or open ways, are added to it with their thread's name.
//! Each device has a context of its own and each stream a capture of its own; a launch that waits for another rank blocks its thread.
//!
//! Types and numbers are those of cuda.h and nvrtc.h, CUDA 13.0.

mod driver;
mod exchange;
mod graph;
mod nvrtc;
mod state;
