//! How a process ended, parsed from the text that the collector writes: `exit code 1`, `killed by
//! SIGSEGV (core dumped)`. No other code parses that text.

/// The end of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit<'a> {
    /// Unknown.
    Unknown,
    /// It exited by itself, with this code.
    Code(i32),
    /// This signal ended it: `SIGKILL`, `signal 40`.
    Signal(&'a str),
}

impl<'a> Exit<'a> {
    /// Parses the text. Returns [`Exit::Unknown`] if the text does not say how the process ended.
    #[must_use]
    pub fn of(text: &'a str) -> Self {
        // The rest says when: `exit code 3, before its first device call`.
        let text = text.split(", ").next().unwrap_or_default();
        if let Some(code) = text.strip_prefix("exit code ") {
            return code.parse().map_or(Exit::Unknown, Exit::Code);
        }
        let signal = text.strip_prefix("killed by ");
        signal.map_or(Exit::Unknown, |signal| Exit::Signal(signal.split(" (").next().unwrap_or(signal)))
    }

    /// The process exited with success.
    #[must_use]
    pub fn succeeded(self) -> bool {
        self == Exit::Code(0)
    }

    /// The process was asked to end: by a signal that asks for it, or with the code by which a
    /// shell reports such a signal.
    #[must_use]
    pub fn was_requested(self) -> bool {
        matches!(self, Exit::Code(143) | Exit::Signal("SIGTERM" | "SIGINT" | "SIGHUP"))
    }

    /// The process exited with an error of its own.
    #[must_use]
    pub fn failed(self) -> bool {
        matches!(self, Exit::Code(_)) && !self.succeeded() && !self.was_requested()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_the_collector_is_parsed() {
        assert_eq!(Exit::of(""), Exit::Unknown);
        assert_eq!(Exit::of("exit code many"), Exit::Unknown);
        assert_eq!(Exit::of("exit code 3"), Exit::Code(3));
        assert_eq!(Exit::of("exit code 3, before its first device call"), Exit::Code(3));
        assert_eq!(Exit::of("before its first device call"), Exit::Unknown);
        assert_eq!(Exit::of("killed by SIGSEGV (core dumped)"), Exit::Signal("SIGSEGV"));
        assert_eq!(Exit::of("killed by signal 40"), Exit::Signal("signal 40"));
    }

    #[test]
    fn success_request_and_error_are_distinguished() {
        let said = |text: &str| {
            let exit = Exit::of(text);
            (exit.succeeded(), exit.was_requested(), exit.failed())
        };
        assert_eq!(said("exit code 0"), (true, false, false));
        assert_eq!(said("exit code 143"), (false, true, false));
        assert_eq!(said("killed by SIGTERM"), (false, true, false));
        assert_eq!(said("exit code 1"), (false, false, true));
        assert_eq!(said("killed by SIGKILL"), (false, false, false));
        assert_eq!(said(""), (false, false, false));
    }
}
