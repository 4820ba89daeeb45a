//! Words that agree in number with their ranks, and lines of evidence.

use crate::verdict::EvidenceLine;

/// A line of evidence about some ranks.
pub(crate) fn line(text: impl Into<String>, ranks: Vec<u32>) -> EvidenceLine {
    EvidenceLine { text: text.into(), ranks }
}

/// Whether a sentence is about one rank or several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Number {
    One,
    Many,
}

impl Number {
    /// The number for this many ranks.
    pub fn of(count: usize) -> Self {
        if count == 1 { Number::One } else { Number::Many }
    }

    /// Selects the word for one rank or for several.
    pub fn word(self, one: &'static str, many: &'static str) -> &'static str {
        match self {
            Number::One => one,
            Number::Many => many,
        }
    }

    pub fn is(self) -> &'static str {
        self.word("is", "are")
    }

    pub fn has(self) -> &'static str {
        self.word("has", "have")
    }

    pub fn its(self) -> &'static str {
        self.word("its", "their")
    }

    /// The verb `to wait`.
    pub fn waits(self) -> &'static str {
        self.word("waits", "wait")
    }
}
