//! Calls of traced Python functions, and garbage collections: what `XPU_TIMER_HOST_TRACING_FUNC`
//! lists.
//!
//! They have tables of their own, because a program may call a traced function far more often than
//! it launches: spans never overwrite an operation that a verdict needs.

use std::io;

use super::layout::{entries, header, high, low, offset, read_into, read_word, text};
use crate::v1::{GarbageCollection, Op, OpKind, OpStatus, Operation};

pub use super::layout::span::*;

/// A traced function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracedFunction {
    /// As the user lists it, or `GC`.
    pub name: String,
    /// Number of calls that have ended.
    pub calls: u64,
    /// Their time in nanoseconds.
    pub total_ns: u64,
}

/// Reads the traced functions, in the order of their indexes.
///
/// # Errors
/// The error of `read_at`.
pub fn read_functions(read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<Vec<TracedFunction>> {
    let functions = entries::<{ function::WORDS }>(&read_at, offset::TRACED, function::SLOTS)?;
    let function = |words: &[u64; function::WORDS]| TracedFunction {
        name: text(&words[function::NAME..]),
        calls: words[function::CALLS],
        total_ns: words[function::TOTAL_NS],
    };
    Ok(functions.iter().map(function).collect())
}

/// Follows the spans of one ring.
#[derive(Debug, Clone, Copy, Default)]
pub struct SpanCursor {
    /// Ticket of the next span.
    next: u64,
    /// Spans that were overwritten before they were read.
    pub missed: u64,
}

impl SpanCursor {
    /// The spans since the last read, as operations of kind [`OpKind::HostCall`] in the order of
    /// their tickets. `functions` are those of [`read_functions`]. A span that is being written
    /// comes with the next read.
    ///
    /// # Errors
    /// The error of `read_at`.
    pub fn read(
        &mut self,
        read_at: impl Fn(u64, &mut [u8]) -> io::Result<()>,
        functions: &[TracedFunction],
    ) -> io::Result<Vec<Operation>> {
        let taken = read_taken(&read_at)?;
        let oldest = taken.saturating_sub(SLOTS as u64);
        self.missed = self.missed.saturating_add(oldest.saturating_sub(self.next));
        self.next = self.next.max(oldest).min(taken);
        let mut spans = Vec::new();
        while self.next < taken {
            let first = self.next as usize % SLOTS;
            let count = (taken - self.next).min((SLOTS - first) as u64) as usize;
            let mut entries = vec![[0; WORDS]; count];
            read_into(&read_at, offset::SPANS + first * WORDS * 8, &mut entries)?;
            // Entries that were overwritten meanwhile may be torn.
            let overwritten = read_taken(&read_at)?.saturating_sub(SLOTS as u64);
            for words in entries {
                if words[TICKET] == 0 && self.next >= overwritten {
                    return Ok(spans);
                }
                if words[TICKET] == self.next + 1 && self.next >= overwritten {
                    spans.push(span(&words, functions));
                } else {
                    self.missed += 1;
                }
                self.next += 1;
            }
        }
        Ok(spans)
    }

    /// Number of spans since the last read.
    #[must_use]
    pub fn unread(&self, taken: u64) -> u64 {
        taken.saturating_sub(self.next)
    }
}

fn read_taken(read_at: &impl Fn(u64, &mut [u8]) -> io::Result<()>) -> io::Result<u64> {
    read_word(read_at, header::SPANS * 8)
}

fn span(words: &[u64; WORDS], functions: &[TracedFunction]) -> Operation {
    let function = functions.get(low(words[WHAT]) as usize);
    let collection = (words[GENERATION] != 0).then(|| {
        Box::new(GarbageCollection {
            generation: Some(low(words[GENERATION]).wrapping_sub(1)),
            collected: low(words[OBJECTS]),
            uncollectable: high(words[OBJECTS]),
        })
    });
    Operation {
        ticket: words[TICKET] - 1,
        kind: OpKind::HostCall.into(),
        op: Op::PythonCall.into(),
        peer: -1,
        tid: high(words[WHAT]),
        entered_ns: words[BEGAN_NS],
        returned_ns: words[ENDED_NS],
        completed_ns: words[ENDED_NS],
        status: OpStatus::Completed.into(),
        function: function.map_or_else(String::new, |function| function.name.clone()),
        collection,
        ..Operation::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Ring(Vec<u64>);

    impl Ring {
        fn put(&mut self, ticket: u64) {
            let first = offset::SPANS / 8 + ticket as usize % SLOTS * WORDS;
            self.0[first..first + WORDS].copy_from_slice(&[ticket + 1, 7 << 32, 100, 130, 3, 2 << 32 | 5, 0, 0]);
            self.0[header::SPANS] = self.0[header::SPANS].max(ticket + 1);
        }

        fn read(&self, cursor: &mut SpanCursor) -> Vec<Operation> {
            let read_at = |at: u64, buffer: &mut [u8]| {
                for (index, chunk) in buffer.chunks_exact_mut(8).enumerate() {
                    chunk.copy_from_slice(&self.0[at as usize / 8 + index].to_le_bytes());
                }
                Ok(())
            };
            cursor.read(read_at, &read_functions(read_at).unwrap()).unwrap()
        }
    }

    fn ring() -> Ring {
        let mut ring = Ring(vec![0; offset::END / 8]);
        let entry = &mut ring.0[offset::TRACED / 8..];
        (entry[function::NAME_BYTES], entry[function::NAME]) = (2, u64::from_le_bytes(*b"GC\0\0\0\0\0\0"));
        ring
    }

    #[test]
    fn each_span_is_read_once() {
        let (mut ring, mut cursor) = (ring(), SpanCursor::default());
        (0..3).for_each(|ticket| ring.put(ticket));
        // Ticket 3 is taken and not written yet.
        ring.put(4);
        let spans = ring.read(&mut cursor);
        assert_eq!(spans.iter().map(|span| span.ticket).collect::<Vec<_>>(), [0, 1, 2]);
        let [span, ..] = &spans[..] else { panic!() };
        assert_eq!((span.function.as_str(), span.tid, span.entered_ns, span.returned_ns), ("GC", 7, 100, 130));
        let collection = GarbageCollection { generation: Some(2), collected: 5, uncollectable: 2 };
        assert_eq!(span.collection, Some(collection.into()));
        ring.put(3);
        assert_eq!(ring.read(&mut cursor).len(), 2);
        assert_eq!((ring.read(&mut cursor).len(), cursor.missed), (0, 0));
    }

    #[test]
    fn overwritten_spans_are_counted() {
        let (mut ring, mut cursor) = (ring(), SpanCursor::default());
        let count = 2 * SLOTS as u64 + 10;
        (0..count).for_each(|ticket| ring.put(ticket));
        assert_eq!((ring.read(&mut cursor).len(), cursor.missed), (SLOTS, SLOTS as u64 + 10));
        // A ring that runs backwards makes no endless loop.
        ring.0[header::SPANS] = 3;
        assert_eq!(ring.read(&mut cursor).len(), 0);
    }
}
