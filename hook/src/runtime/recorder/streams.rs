//! The stream table that all threads share.

use std::sync::atomic::Ordering;

use xpu_timer_proto::ring::{header, offset, stream};

use crate::runtime::{lock_free::hash_slot::home_slot, recorder::Recorder};

impl Recorder {
    /// Counts a kernel or graph on a stream, for a thread that has no room for the stream in its
    /// lane.
    #[cold]
    pub fn on_shared_stream(&self, stream_handle: usize, function: u64, now_ns: u64) {
        let key = stream_handle as u64 + 1;
        let mut index = home_slot::<{ stream::SLOTS }>(key);
        for _ in 0..stream::SLOTS {
            let entry = self.ring.entry(offset::STREAMS, index, stream::WORDS);
            let found = entry[stream::HANDLE].load(Ordering::Relaxed);
            let ours = found == key
                || found == 0
                    && match entry[stream::HANDLE].compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed) {
                        Ok(_) => true,
                        Err(other) => other == key,
                    };
            if ours {
                entry[stream::LAUNCHES].fetch_add(1, Ordering::Relaxed);
                entry[stream::LAST_NS].store(now_ns, Ordering::Relaxed);
                if function != 0 && entry[stream::LAST_FUNCTION].swap(function, Ordering::Relaxed) != function {
                    self.see_function(function);
                }
                return;
            }
            index = (index + 1) % stream::SLOTS;
        }
        self.count(header::OVERFLOWS);
    }
}
