//! The table of kernel and function names.

use std::{
    ffi::c_void,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

use xpu_timer_proto::ring::{header, name, offset};

use crate::runtime::{
    device::device,
    lock_free::atomic::home_slot,
    os::thread_state::{self, IN_RUNTIME},
    recorder::{Recorder, SEEN, store_text},
};

impl Recorder {
    /// Makes sure that the table contains a kernel's name. It is requested on the launching thread,
    /// while the handle is certainly valid: the module may be unloaded before the watcher runs.
    /// Returns whether this is the kernel's first launch.
    pub(crate) fn see_function(&self, function: u64) -> bool {
        let is_new = self.is_new(function);
        if is_new && let Some(name) = name_of(function) {
            ATTENTION.see(function, name.as_bytes());
            self.add_name(function, name.as_bytes());
        }
        is_new
    }

    /// Whether the name of this key has never been requested. True once per key.
    #[inline(never)]
    fn is_new(&self, key: u64) -> bool {
        is_first(&self.seen, key)
    }

    /// Adds the name of a key. Called once per key.
    pub(crate) fn add_name(&self, function: u64, text: &[u8]) {
        let index = self.shared.names.fetch_add(1, Ordering::Relaxed);
        if index >= name::SLOTS {
            self.shared.names.store(name::SLOTS, Ordering::Relaxed);
            self.count(header::OVERFLOWS);
            return;
        }
        let entry = self.ring.entry(offset::NAMES, index, name::WORDS);
        store_text(&entry[name::TEXT..], &text[..text.len().min(crate::runtime::recorder::NAME_BYTES)]);
        entry[name::FUNCTION].store(function, Ordering::Release);
    }

    /// The key of a function of the host's API, which is the address of its static name.
    pub(crate) fn name_key(&self, text: &'static str) -> u64 {
        let key = text.as_ptr() as u64;
        if self.is_new(key) {
            self.add_name(key, text.as_bytes());
        }
        key
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &'static [AtomicU64]> {
        let entries = 0..self.shared.names.load(Ordering::Relaxed).min(name::SLOTS);
        entries.map(|index| self.ring.entry(offset::NAMES, index, name::WORDS))
    }

    /// Whether the table contains a matching name.
    pub(crate) fn any_name(&self, is_it: impl Fn(&str) -> bool) -> bool {
        self.names().any(|entry| is_it(&name_in(entry)))
    }
}

/// Whether a table of [`SEEN`] keys has a key other than 0.
pub(super) fn is_known(seen: &[AtomicU64], key: u64) -> bool {
    let home = home_slot::<SEEN>(key);
    let found = (0..SEEN).map(|step| seen[(home + step) % SEEN].load(Ordering::Relaxed));
    found.take_while(|found| *found != 0).any(|found| found == key)
}

/// Adds a key other than 0 to a table of [`SEEN`] keys. Returns whether it was not there: true once
/// per key, and never if the table is full.
pub(super) fn is_first(seen: &[AtomicU64], key: u64) -> bool {
    let mut index = home_slot::<SEEN>(key);
    for _ in 0..SEEN {
        match seen[index].load(Ordering::Relaxed) {
            0 if seen[index].compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed).is_ok() => return true,
            0 => {}
            found if found == key => return false,
            _ => index = (index + 1) % SEEN,
        }
    }
    false
}

/// The text of an entry.
pub(crate) fn name_in(entry: &[AtomicU64]) -> String {
    let words = entry[name::TEXT..].iter().map(|word| word.load(Ordering::Relaxed));
    let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).take_while(|byte| *byte != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The name of a kernel, from the driver, on the thread that is launching it.
pub(super) fn name_of(function: u64) -> Option<&'static str> {
    let by_runtime = thread_state::with(|thread| thread.inside.get() & IN_RUNTIME != 0);
    // SAFETY: a function that is being launched is valid, also while its name is used.
    let name = device().and_then(|device| unsafe { device.name_of(function as *mut c_void, by_runtime) })?;
    name.to_str().ok()
}

/// Number of kernels of flash attention that are known. There is one for each size of a head, type
/// and kind of mask.
const ATTENTION_KERNELS: usize = 64;

/// A kernel of flash attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttentionKernel {
    /// It computes gradients.
    pub is_backward: bool,
    /// Its element type is bfloat16, else float16.
    pub is_bfloat16: bool,
}

/// The kernels of flash attention by their handles, which are addresses. The low bits of an entry
/// say what kind of kernel it is.
pub(crate) struct AttentionKernels {
    entries: [AtomicU64; ATTENTION_KERNELS],
    used: AtomicUsize,
}

/// The attention kernels of this process.
pub(crate) static ATTENTION: AttentionKernels = AttentionKernels::new();

impl AttentionKernels {
    const BACKWARD: u64 = 1;
    const BFLOAT16: u64 = 2;
    const KIND: u64 = 3;

    const fn new() -> Self {
        AttentionKernels { entries: [const { AtomicU64::new(0) }; ATTENTION_KERNELS], used: AtomicUsize::new(0) }
    }

    /// Adds a kernel if its name is one of flash attention. Called once for each kernel. The
    /// auxiliary kernels of the backward pass do not count.
    fn see(&self, function: u64, name: &[u8]) {
        let contains = |part: &str| name.windows(part.len()).any(|window| window == part.as_bytes());
        let is_backward = contains("flash_bwd_dq_dk_dv_loop");
        let is_attention = is_backward || contains("flash_fwd_kernel") || contains("flash_fwd_splitkv_kernel");
        if !is_attention || function & Self::KIND != 0 {
            return;
        }
        let index = self.used.fetch_add(1, Ordering::Relaxed);
        if let Some(entry) = self.entries.get(index) {
            let kind = u64::from(is_backward) * Self::BACKWARD + u64::from(contains("bfloat16")) * Self::BFLOAT16;
            entry.store(function | kind, Ordering::Relaxed);
        }
    }

    /// The kernel with this handle, if it is one of flash attention.
    #[inline]
    pub(crate) fn find(&self, function: u64) -> Option<AttentionKernel> {
        let used = self.used.load(Ordering::Relaxed);
        if used == 0 { None } else { self.search(function, used) }
    }

    #[inline(never)]
    fn search(&self, function: u64, used: usize) -> Option<AttentionKernel> {
        let mut known = self.entries.iter().take(used).map(|entry| entry.load(Ordering::Relaxed));
        let entry = known.find(|entry| entry & !Self::KIND == function)?;
        Some(AttentionKernel { is_backward: entry & Self::BACKWARD != 0, is_bfloat16: entry & Self::BFLOAT16 != 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_flash_attention_are_known_by_their_names() {
        let kernels = AttentionKernels::new();
        let names = [
            "_ZN13pytorch_flash16flash_fwd_kernelI23Flash_fwd_kernel_traitsILi64EN7cutlass10bfloat16_tEEEvNS_16Flash_fwd_paramsE",
            "flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::half_t>(flash::Flash_bwd_params)",
            "flash_bwd_dot_do_o_kernel",
            "ampere_sgemm_128x64_tn",
        ];
        for (index, name) in names.iter().enumerate() {
            kernels.see(0x1000 + 16 * index as u64, name.as_bytes());
        }
        let find = |index: u64| kernels.find(0x1000 + 16 * index);
        assert_eq!(find(0), Some(AttentionKernel { is_backward: false, is_bfloat16: true }));
        assert_eq!(find(1), Some(AttentionKernel { is_backward: true, is_bfloat16: false }));
        assert_eq!([find(2), find(3), kernels.find(0)], [None; 3]);
    }
}
