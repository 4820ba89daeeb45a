//! One scenario: the job, and the truth about it.

use std::fmt;

use crate::program::{Need, Program};

/// What a job does, and what is to be said of it.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Unique; words joined by `-`.
    pub name: String,
    /// What its ranks run.
    pub program: Program,
    /// Number of ranks.
    pub world: u32,
    /// Of the program.
    pub arguments: Vec<String>,
    /// Besides that of every job.
    pub environment: Vec<(&'static str, String)>,
    /// What the machine must be able to do for it.
    pub need: Option<Need>,
    /// The truth.
    pub truth: Truth,
}

/// What is true of a scenario, known from how it was made.
#[derive(Debug, Clone)]
pub enum Truth {
    /// It hangs, and these ranks stopped it.
    Hang {
        /// Causes that a person who knows everything would accept, the best one first.
        causes: &'static [&'static str],
        /// Ascending; empty when no rank is to blame.
        culprits: Vec<u32>,
    },
    /// It is slow beyond the timeout, because of these ranks; its incident is resolved by itself, and it runs to its end.
    Passes {
        /// Causes that are right.
        causes: &'static [&'static str],
        /// Ascending.
        culprits: Vec<u32>,
        /// Until then the culprits stand still, so that with `XPU_TIMER_HANG_KILL` the job is ended.
        stands_still: bool,
    },
    /// It does not come to an end by itself, and these ranks, ascending, slow it down without a hang; none in an even run.
    Slow(Vec<u32>),
    /// It runs to its end, and nothing is to be reported.
    Healthy,
}

/// What is said of ranks that slow a job down, in place of a cause.
pub const SLOW: &str = "slow";

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:34} {:3} ranks  {} {}", self.name, self.world, self.program, self.arguments.join(" "))?;
        self.environment.iter().try_for_each(|(name, value)| write!(f, " {name}={value}"))
    }
}

/// A job of some program.
pub fn job(name: &str, program: Program, world: u32, arguments: &[&str]) -> Scenario {
    Scenario {
        name: name.into(),
        program,
        world,
        arguments: arguments.iter().map(|argument| (*argument).to_owned()).collect(),
        environment: Vec::new(),
        need: None,
        truth: Truth::Healthy,
    }
}

/// A job with tensor, pipeline and data parallelism of these sizes.
pub fn hybrid(name: &str, tp: u32, pp: u32, dp: u32) -> Scenario {
    let sizes = [("--tp", tp), ("--pp", pp), ("--dp", dp)];
    let arguments = sizes.iter().map(|(option, size)| format!("{option}={size}")).collect();
    Scenario { arguments, ..job(name, Program::Script("hybrid.py"), tp * pp * dp, &[]) }
}

impl Scenario {
    /// Whether it hangs, and for ever.
    pub fn hangs(&self) -> bool {
        matches!(self.truth, Truth::Hang { .. })
    }

    /// Causes and culprits that are right, when something is to be said at all.
    pub fn right(&self) -> Option<(&'static [&'static str], &[u32])> {
        match &self.truth {
            Truth::Hang { causes, culprits } | Truth::Passes { causes, culprits, .. } => Some((causes, culprits)),
            Truth::Slow(ranks) if !ranks.is_empty() => Some((&[SLOW], ranks)),
            Truth::Slow(_) | Truth::Healthy => None,
        }
    }

    /// Adds an option of its program.
    pub fn option(mut self, option: &str) -> Self {
        self.arguments.push(option.into());
        self
    }

    /// Adds a fault of `hybrid.py`.
    pub fn fault(self, fault: &str) -> Self {
        self.option(&format!("--fault={fault}"))
    }

    /// Adds a fault of the simulated device.
    pub fn device(mut self, fault: &str) -> Self {
        self.environment.push(("XPU_SIM_FAULT", fault.into()));
        self
    }

    /// It hangs because of these ranks.
    pub fn is(mut self, causes: &'static [&'static str], culprits: &[u32]) -> Self {
        self.truth = Truth::Hang { causes, culprits: culprits.to_vec() };
        self
    }

    /// It is slow because of these ranks, and goes on.
    pub fn passes(mut self, causes: &'static [&'static str], culprits: &[u32]) -> Self {
        self.truth = Truth::Passes { causes, culprits: culprits.to_vec(), stands_still: false };
        self
    }

    /// Its culprits sleep until the job goes on, and nothing about them moves.
    pub fn standing_still(mut self) -> Self {
        if let Truth::Passes { stands_still, .. } = &mut self.truth {
            *stands_still = true;
        }
        self
    }

    /// These ranks slow it down.
    pub fn slowed_by(mut self, ranks: &[u32]) -> Self {
        self.truth = Truth::Slow(ranks.to_vec());
        self
    }

    /// It runs for so many seconds without anything to report.
    pub fn healthy(self, seconds: u32) -> Self {
        self.option(&format!("--seconds={seconds}"))
    }
}
