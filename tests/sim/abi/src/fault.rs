//! Parses `XPU_SIM_FAULT`: which fault occurs, on which rank, and when.
//!
//! The text is a `;`-separated list of `kind:key=value,…`. A fault without `rank` applies to all
//! ranks. `n` counts from 1 within the process: calls of collectives, sends and receives for
//! `skip`, `op`, `size` and `kill`; launches of kernels that are not NCCL's for `stuck_kernel` and
//! `lost`.

use std::sync::OnceLock;

/// The kind of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A collective returns success and does nothing.
    Skip,
    /// A collective takes part as another operation.
    Op,
    /// A collective takes part with another size.
    Size,
    /// Every kernel that is not NCCL's takes `ms` longer.
    Slow,
    /// A kernel that is not NCCL's never ends.
    StuckKernel,
    /// A kernel that is not NCCL's accesses invalid memory: from then on every call returns that
    /// error.
    Lost,
    /// After `bytes` bytes no transfer moves.
    Stall,
    /// The initialization of a communicator returns success and does nothing.
    InitSkip,
    /// SIGKILL instead of a collective.
    Kill,
    /// `ncclCommGetAsyncError` reports the error `code` for every communicator that is ready.
    AsyncError,
}

const KINDS: &[(&str, Kind, &str)] = &[
    ("skip", Kind::Skip, "n"),
    ("op", Kind::Op, "n"),
    ("size", Kind::Size, "n"),
    ("slow", Kind::Slow, "ms"),
    ("stuck_kernel", Kind::StuckKernel, "n"),
    ("lost", Kind::Lost, "n"),
    ("stall", Kind::Stall, "bytes"),
    ("init_skip", Kind::InitSkip, ""),
    ("kill", Kind::Kill, "n"),
    ("async_error", Kind::AsyncError, "code"),
];

/// The faults of one rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    /// The kind, and the value of `n`, `ms`, `bytes` or `code`; 0 if it has none.
    list: Vec<(Kind, u64)>,
}

impl Faults {
    /// The faults of `text` for `rank`, and the parts that cannot be parsed.
    #[must_use]
    pub fn parse(text: &str, rank: u64) -> (Self, Vec<String>) {
        let (mut faults, mut problems) = (Faults::default(), Vec::new());
        for entry in text.split(';').map(str::trim).filter(|entry| !entry.is_empty()) {
            match parse_entry(entry) {
                Ok((kind, meant, value)) if meant.is_none_or(|meant| meant == rank) => faults.list.push((kind, value)),
                Ok(_) => {}
                Err(problem) => problems.push(format!("{entry:?}: {problem}")),
            }
        }
        (faults, problems)
    }

    /// Whether a fault of this kind applies to the `n`-th event.
    #[must_use]
    pub fn at(&self, kind: Kind, n: u64) -> bool {
        self.list.contains(&(kind, n))
    }

    /// The value of a fault of this kind; 0 if it has none.
    #[must_use]
    pub fn value(&self, kind: Kind) -> Option<u64> {
        self.list.iter().find(|(listed, _)| *listed == kind).map(|(_, value)| *value)
    }
}

fn parse_entry(entry: &str) -> Result<(Kind, Option<u64>, u64), String> {
    let (name, settings) = entry.split_once(':').unwrap_or((entry, ""));
    let (_, kind, needed) =
        KINDS.iter().find(|(known, ..)| *known == name.trim()).ok_or_else(|| format!("unknown fault {name:?}"))?;
    let (mut rank, mut value) = (None, None);
    for setting in settings.split(',').map(str::trim).filter(|setting| !setting.is_empty()) {
        let (key, text) = setting.split_once('=').ok_or_else(|| format!("{setting:?} is not key=value"))?;
        let number = text.trim().parse().map_err(|_| format!("{text:?} is not a number"))?;
        match key.trim() {
            "rank" => rank = Some(number),
            key if key == *needed && (key != "n" || number > 0) => value = Some(number),
            key => return Err(format!("{name} takes no {key}={number}")),
        }
    }
    match value {
        None if !needed.is_empty() => Err(format!("{name} needs {needed}=")),
        value => Ok((*kind, rank, value.unwrap_or(0))),
    }
}

/// The faults of this process, read once from `XPU_SIM_FAULT` and `RANK`.
///
/// `report` prints errors of the text on stderr. Only the driver reports them, because it is in
/// every process that uses one of the other libraries.
pub fn faults(report: bool) -> &'static Faults {
    static FAULTS: OnceLock<Faults> = OnceLock::new();
    FAULTS.get_or_init(|| {
        let text = std::env::var("XPU_SIM_FAULT").unwrap_or_default();
        let rank = std::env::var("RANK").ok().and_then(|rank| rank.trim().parse().ok()).unwrap_or(0);
        let (faults, problems) = Faults::parse(&text, rank);
        if report {
            problems.iter().for_each(|problem| eprintln!("XPU_SIM_FAULT: {problem}; ignored"));
        }
        faults
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_keeps_what_is_meant_for_the_rank() {
        let text = "skip:rank=2,n=10; slow:rank=1,ms=50;stall:bytes=1000000;init_skip:rank=2";
        let (faults, problems) = Faults::parse(text, 2);
        assert_eq!(problems, Vec::<String>::new());
        assert!(faults.at(Kind::Skip, 10) && !faults.at(Kind::Skip, 9) && !faults.at(Kind::Kill, 10));
        assert_eq!(faults.value(Kind::Slow), None);
        assert_eq!(faults.value(Kind::Stall), Some(1_000_000));
        assert_eq!(faults.value(Kind::InitSkip), Some(0));
        assert_eq!(Faults::parse(text, 1).0.value(Kind::Slow), Some(50));
    }

    #[test]
    fn what_is_not_understood_is_named_and_the_rest_holds() {
        let (faults, problems) =
            Faults::parse("skip:rank=0;nonsense:n=1;skip:n=x;skip:n=0;slow:ms=1,n=2;kill:n=3;op:n;stall", 0);
        assert_eq!(faults.list, [(Kind::Kill, 3)]);
        assert_eq!(problems.len(), 7);
        assert!(problems[1].contains("nonsense"), "{problems:?}");
    }
}
