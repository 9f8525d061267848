//! Weights on their way to the GPU: read by several threads into pinned buffers, copied to a staging area, packed there.
//!
//! Called once by `prepare`. **Invariants:** reads only from a validated `Source`, so a failure is I/O; each weight has one
//! allocation, in the ledger; the packed form is made on the device by `pack.cu` alone, from files and from the dummy
//! generator alike; staging and pinned buffers are gone when this returns.
//!
//! One thread, the caller's, talks to the driver.

use super::error::{CudaError, During};
use super::gpu::Gpu;
use super::launch::{Addresses, Call};
use super::ledger::Ledger;
use super::memory::DeviceMemory;
use super::modules::Modules;
use super::pieces::{Buffer, Filled, Piece, Queue, pieces, read_pieces};
use crate::source::{Source, group_extents};
use slotgraph_kernels::launch::{Arg, Launch};
use slotgraph_kernels::{WeightForm, WeightId, WeightSpec, dummy, pack};
use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

/// Most reading threads; past this the copy engine is the limit.
const READERS_MAX: usize = 16;

/// Told the bytes done and the bytes in all.
pub type Progress = Arc<dyn Fn(u64, u64) + Send + Sync>;

/// What loading took.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct WeightsReport {
    /// Bytes on the device, packed.
    pub device_bytes: u64,
    /// Bytes read from the source (0 when the device made them).
    pub read_bytes: u64,
    pub seconds: f64,
    /// `read_bytes` over `seconds`.
    pub gb_per_s: f64,
    pub readers: usize,
    /// From the first read to the last copy; the first `pin_ms` of it went to pinning buffers.
    pub stream_ms: f64,
    pub pin_ms: f64,
    /// Reading time, averaged over the readers.
    pub read_ms: f64,
    /// Time that the uploader waited for readers, and for copies and packing.
    pub starved_ms: f64,
    pub copy_wait_ms: f64,
    pub dummy: bool,
}

/// Every weight of a rank, packed.
pub(super) struct Weights {
    memory: Vec<DeviceMemory>,
}

impl Weights {
    pub fn address(&self, id: WeightId) -> u64 {
        self.memory[id.0 as usize].address
    }
}

/// The launches that pack and make weights, for compilation beforehand.
pub(super) fn launches(specs: &[WeightSpec], source: &dyn Source) -> Vec<Launch> {
    let packs = specs.iter().filter_map(|spec| pack::launch(&spec.form, 0..group_extents(&spec.form).0));
    let parts = source.dummy().into_iter().flat_map(|_| specs.iter().filter(|spec| is_matrix(&spec.form)));
    let dummies =
        parts.filter_map(|spec| Some(pack::dummy_launch(spec.parts.first()?, 0, group_extents(&spec.form).1)));
    packs.chain(dummies).collect()
}

/// Loads all of `specs`.
pub(super) fn upload(
    gpu: &Arc<Gpu>,
    modules: &Modules,
    specs: &[WeightSpec],
    source: &dyn Source,
    ledger: &mut Ledger,
    progress: Option<&Progress>,
) -> Result<(Weights, WeightsReport), CudaError> {
    let start = Instant::now();
    let memory = allocate(gpu, specs, ledger)?;
    let staging_bytes = specs.iter().map(|spec| group_elements(&spec.form) * 2).max().unwrap_or(0);
    let staging = DeviceMemory::allocate(gpu, staging_bytes)
        .during(|| format!("allocating {staging_bytes} bytes to stage weights"))?;
    let mut upload =
        Upload { gpu, modules, specs, memory: &memory, staging: &staging, report: WeightsReport::default() };
    upload.report.device_bytes = memory.iter().map(|memory| memory.bytes as u64).sum();

    upload.computed()?;
    let made = source.dummy();
    if let Some(made) = made {
        upload.report.dummy = true;
        // On an error the launches that were issued still use staging and weights.
        upload.make(made.seed).inspect_err(|_| {
            let _ = gpu.wait();
        })?;
    }
    let pieces = pieces(specs, |form| made.is_none() || !is_matrix(form));
    let streamed = upload.stream(source, &pieces, progress);
    // Also after an error: nothing may be freed that a launch still uses.
    let waited = gpu.wait().during(|| "packing the weights".into());
    streamed.and(waited)?;

    let mut report = upload.report;
    report.seconds = start.elapsed().as_secs_f64();
    report.gb_per_s = report.read_bytes as f64 / report.seconds / 1e9;
    Ok((Weights { memory }, report))
}

fn allocate(gpu: &Arc<Gpu>, specs: &[WeightSpec], ledger: &mut Ledger) -> Result<Vec<DeviceMemory>, CudaError> {
    let needed: u64 = specs.iter().map(|spec| pack::bytes(&spec.form) as u64).sum();
    let (free, _) = gpu.memory().during(|| "reading the free memory".into())?;
    if needed > free {
        let remedy = "use a smaller model, a larger GPU, or --ep with more devices";
        return Err(CudaError::Memory { what: "the weights".into(), needed, free, remedy });
    }
    let one = |spec: &WeightSpec| {
        let bytes = pack::bytes(&spec.form);
        let memory = DeviceMemory::allocate(gpu, bytes)
            .during(|| format!("allocating {bytes} bytes for weight {}", spec.name))?;
        ledger.register(format!("weight {}", spec.name), memory.address, memory.bytes as u64);
        Ok(memory)
    };
    specs.iter().map(one).collect()
}

fn is_matrix(form: &WeightForm) -> bool {
    matches!(form, WeightForm::Gemm { .. } | WeightForm::Table { .. })
}

/// Elements of one group as the source gives it; 0 for computed forms.
fn group_elements(form: &WeightForm) -> usize {
    let (rows, columns) = group_extents(form);
    rows * columns
}

struct Upload<'a> {
    gpu: &'a Arc<Gpu>,
    modules: &'a Modules,
    specs: &'a [WeightSpec],
    memory: &'a [DeviceMemory],
    staging: &'a DeviceMemory,
    report: WeightsReport,
}

/// Where a pack or dummy launch reads and writes.
struct PackAddresses {
    staging: u64,
    packed: u64,
}

impl Addresses for PackAddresses {
    fn address(&self, arg: Arg) -> Option<u64> {
        match arg {
            Arg::Staging => Some(self.staging),
            Arg::Packed => Some(self.packed),
            _ => None,
        }
    }
}

impl Upload<'_> {
    /// Rotary tables, computed on the host so that every device rotates alike.
    fn computed(&self) -> Result<(), CudaError> {
        for (spec, memory) in self.specs.iter().zip(self.memory) {
            if let WeightForm::Rope(table) = &spec.form {
                let values = pack::rope_table(table);
                let bytes = size_of_val(values.as_slice());
                assert!(bytes <= memory.bytes, "{} fills {bytes} bytes of {}", spec.name, memory.bytes);
                // SAFETY: the target holds `bytes` by the assertion; `values` lives past the wait.
                unsafe { self.gpu.copy_in(memory.address, values.as_ptr().cast(), bytes) }
                    .and_then(|()| self.gpu.wait())
                    .during(|| format!("copying {}", spec.name))?;
            }
        }
        Ok(())
    }

    /// Makes dummy matrices on the device.
    fn make(&self, seed: u64) -> Result<(), CudaError> {
        for (weight, spec) in self.specs.iter().enumerate().filter(|(_, spec)| is_matrix(&spec.form)) {
            let columns = group_extents(&spec.form).1;
            for group in 0..pack::groups(&spec.form) {
                for part in spec.parts.iter().filter(|part| part.group == group) {
                    let launch = pack::dummy_launch(part, dummy::tensor_key(seed, &part.tensor), columns);
                    self.run(weight, group, &launch)?;
                }
                self.pack(weight, group)?;
            }
        }
        Ok(())
    }

    /// Packs the group that is whole in the staging area.
    fn pack(&self, weight: usize, group: usize) -> Result<(), CudaError> {
        let form = &self.specs[weight].form;
        let launch = pack::launch(form, 0..group_extents(form).0).expect("computed forms are not staged");
        self.run(weight, group, &launch)
    }

    fn run(&self, weight: usize, group: usize, launch: &Launch) -> Result<(), CudaError> {
        let spec = &self.specs[weight];
        let packed = self.memory[weight].address + (group * pack::group_bytes(&spec.form)) as u64;
        let addresses = PackAddresses { staging: self.staging.address, packed };
        let doing = || format!("packing {} (group {group})", spec.name);
        let call = Call::resolve(launch, self.modules, &addresses, false).map_err(CudaError::Unsupported)?;
        // SAFETY: the staging area holds the largest group, and the weight's allocation holds all of its groups (`pack`
        // says how large they are); both live until the wait at the end of `upload`.
        unsafe { call.launch(self.gpu) }.during(doing)
    }

    /// Reads `pieces` on several threads and uploads them in order.
    fn stream(&mut self, source: &dyn Source, pieces: &[Piece], progress: Option<&Progress>) -> Result<(), CudaError> {
        if pieces.is_empty() {
            return Ok(());
        }
        let cores = std::thread::available_parallelism().map_or(1, |count| count.get());
        let readers = cores.clamp(1, READERS_MAX).min(pieces.len());
        let largest = pieces.iter().map(|piece| piece.elements).max().expect("there are pieces");
        let (free, buffers) = mpsc::channel::<Buffer>();
        let start = Instant::now();
        let queue = Mutex::new(Queue { buffers, next: 0 });
        let (filled, arrivals) = mpsc::channel();
        let read_ns = AtomicU64::new(0);
        let total: u64 = pieces.iter().map(|piece| piece.elements as u64 * 2).sum();
        let specs = self.specs;
        let outcome = std::thread::scope(|scope| {
            for _ in 0..readers {
                let (filled, queue, read_ns) = (filled.clone(), &queue, &read_ns);
                scope.spawn(move || read_pieces(source, specs, pieces, queue, &filled, read_ns));
            }
            // The uploader's own copy must go, or a reader that ended would not be noticed.
            drop(filled);
            // Readers begin with the first buffer while the others are pinned. A failure drops `free`, which ends them.
            for _ in 0..(2 * readers).min(pieces.len()) {
                if free.send(Buffer::allocate(self.gpu, largest)?).is_err() {
                    break;
                }
            }
            self.report.pin_ms = millis(start);
            let done = |bytes: u64| {
                if let Some(progress) = progress {
                    progress(bytes, total);
                }
            };
            self.upload_in_order(pieces, free, &arrivals, readers, done)
        });
        self.report.stream_ms = millis(start);
        self.report.readers = readers;
        self.report.read_bytes = total;
        self.report.read_ms = read_ns.load(Ordering::Relaxed) as f64 / 1e6 / readers as f64;
        outcome
    }

    /// Takes filled buffers in the order of `pieces`, copies each, packs each group that is whole. Owns `free`: when this
    /// returns, for whatever reason, the readers find it closed and end.
    fn upload_in_order(
        &mut self,
        pieces: &[Piece],
        free: mpsc::Sender<Buffer>,
        arrivals: &mpsc::Receiver<Filled>,
        copies_max: usize,
        done: impl Fn(u64),
    ) -> Result<(), CudaError> {
        let mut early: BTreeMap<usize, Filled> = BTreeMap::new();
        let mut copying: VecDeque<Buffer> = VecDeque::new();
        let mut bytes = 0;
        let mut outcome = Ok(());
        for (index, piece) in pieces.iter().enumerate() {
            let start = Instant::now();
            let filled = loop {
                if let Some(filled) = early.remove(&index) {
                    break filled;
                }
                let filled =
                    arrivals.recv().expect("readers end only when they have no more pieces or `free` is closed");
                early.insert(filled.piece, filled);
            };
            self.report.starved_ms += millis(start);
            outcome = self.upload_piece(piece, filled, &mut copying);
            if outcome.is_err() {
                break;
            }
            if copying.len() > copies_max {
                let start = Instant::now();
                let buffer = copying.pop_front().expect("it is longer than copies_max");
                let waited = buffer.wait(self.gpu).during(|| "waiting for a copy of weights".into());
                self.report.copy_wait_ms += millis(start);
                if waited.is_err() {
                    outcome = waited;
                    break;
                }
                // A closed channel means that every piece was taken and all readers ended.
                let _ = free.send(buffer);
            }
            bytes += piece.elements as u64 * 2;
            done(bytes);
        }
        // Also after an error: the buffers must outlive their copies.
        let start = Instant::now();
        let waited = self.gpu.wait().during(|| "waiting for the last copies of weights".into());
        self.report.copy_wait_ms += millis(start);
        outcome.and(waited)
    }

    fn upload_piece(&self, piece: &Piece, filled: Filled, copying: &mut VecDeque<Buffer>) -> Result<(), CudaError> {
        filled.outcome?;
        copying.push_back(filled.buffer);
        let buffer = copying.back().expect("just pushed");
        buffer
            .copy_to(self.gpu, self.staging, piece)
            .during(|| format!("copying {}", self.specs[piece.weight].name))?;
        if piece.last { self.pack(piece.weight, piece.group) } else { Ok(()) }
    }
}

fn millis(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e3
}
