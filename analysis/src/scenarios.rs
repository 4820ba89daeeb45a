//! Hangs as evidence, each with the right verdict: one file for each family of causes, one for the
//! known defects, and one for the laws that hold for all verdicts.

mod collectives;
mod devices;
mod graphs;
mod hang;
mod hosts;
mod known_defects;
mod laws;
mod processes;
mod transfers;

use std::{collections::BTreeSet, env, process::Command, sync::LazyLock};

use crate::{Cause, Confidence, Verdict};

/// Checks the core of a verdict: here, `confidence` is that of the rules alone, which the
/// calibration may lower. A failure shows the full text.
#[track_caller]
fn expect(verdict: &Verdict, cause: Cause, culprits: &[u32], confidence: Confidence) {
    let text = verdict.to_text();
    assert_eq!((verdict.cause, &verdict.culprits[..]), (cause, culprits), "\n{text}");
    assert_eq!(verdict.strength, Some(confidence), "\n{text}");
    assert!(verdict.confidence <= confidence, "\n{text}");
    assert!(verdict.victims.iter().all(|victim| !culprits.contains(victim)), "\n{text}");
    assert!(verdict.ruled_out.iter().all(|ruled_out| ruled_out.cause != cause), "\n{text}");
    assert!(verdict.sentence.ends_with('.') && !verdict.sentence.contains(".."), "\n{text}");
    let facts: BTreeSet<&str> = verdict.evidence.iter().map(|line| line.text.as_str()).collect();
    assert_eq!(facts.len(), verdict.evidence.len(), "a fact is there twice\n{text}");
}

/// Checks a table of rules: each has a name of its own, a reason in one sentence, and the name of
/// an existing scenario, `FILE::FUNCTION`, that fails without it.
#[track_caller]
pub(crate) fn assert_table(rules: impl Iterator<Item = (&'static str, &'static str, &'static str)>) {
    const FILES: [(&str, &str); 6] = [
        ("collectives", include_str!("scenarios/collectives.rs")),
        ("devices", include_str!("scenarios/devices.rs")),
        ("hang", include_str!("scenarios/hang.rs")),
        ("hosts", include_str!("scenarios/hosts.rs")),
        ("processes", include_str!("scenarios/processes.rs")),
        ("transfers", include_str!("scenarios/transfers.rs")),
    ];
    let mut names = BTreeSet::new();
    for (name, reason, scenario) in rules {
        assert!(names.insert(name), "{name} is there twice");
        assert!(reason.ends_with('.'), "{name}: {reason}");
        let (file, function) = scenario.split_once("::").expect("a file and a function");
        let is_there = |(of, text): &(&str, &str)| *of == file && text.contains(&format!("#[test]\nfn {function}()"));
        assert!(FILES.iter().any(is_there), "{name}: there is no scenario {scenario}");
        assert!(!passes_without(reason, scenario), "{name}: {scenario} does not need this rule");
    }
}

/// Variable with the reason of the rule that is off in this process.
const OFF: &str = "XPU_TIMER_TEST_RULE_OFF";

/// Reason of the rule that this process must judge without.
pub(crate) fn rule_that_is_off() -> Option<&'static str> {
    static REASON: LazyLock<Option<String>> = LazyLock::new(|| env::var(OFF).ok());
    REASON.as_deref()
}

/// Whether a scenario passes in a process in which the rule with this reason is off.
fn passes_without(reason: &str, scenario: &str) -> bool {
    let program = env::current_exe().expect("the path of this program");
    let mut command = Command::new(program);
    command.env(OFF, reason).args(["--exact", &format!("scenarios::{scenario}")]);
    let output = command.output().expect("a second process of this program");
    assert!(String::from_utf8_lossy(&output.stdout).contains("running 1 test"), "{scenario} did not run");
    output.status.success()
}
