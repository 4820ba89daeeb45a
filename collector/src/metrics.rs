//! The metrics: what the operations in the rings of the ranks mean, the series and comparisons made
//! from them, and the Prometheus text format, version 0.0.4.

pub(crate) mod cursor;
pub(crate) mod meaning;
pub(crate) mod pace;
pub(crate) mod sampler;
pub(crate) mod series;
pub(crate) mod settings;
pub(crate) mod slow_ranks;

use std::fmt::{Display, Write};

use xpu_timer_proto::printable;

/// The labels of a sample, in the order in which they are written.
pub type Labels = Vec<(&'static str, String)>;

/// A page under construction. Each family is written once, with all its samples.
#[derive(Default)]
pub struct Page(String);

impl Page {
    /// Begins a family, which may remain without samples.
    pub fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing into a String cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Adds a sample to the current family.
    pub fn sample(&mut self, name: &str, labels: &[(&str, String)], value: impl Display) {
        let _ = write!(self.0, "{name}");
        for (index, (label, text)) in labels.iter().enumerate() {
            let open = if index == 0 { '{' } else { ',' };
            let _ = write!(self.0, "{open}{label}=\"{}\"", escape(text));
        }
        let close = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.0, "{close} {value}");
    }

    /// The finished text.
    #[must_use]
    pub fn text(self) -> String {
        self.0
    }
}

/// The format escapes backslash, quote and newline in a label value.
fn escape(text: &str) -> String {
    printable::text(text).replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_escaped() {
        let mut page = Page::default();
        page.sample("m", &[("job_name", "a\"b\\c\nd".into()), ("rank", "3".into())], 1);
        page.sample("n", &[], 2.5);
        assert_eq!(page.text(), "m{job_name=\"a\\\"b\\\\c\\nd\",rank=\"3\"} 1\nn 2.5\n");
    }
}
