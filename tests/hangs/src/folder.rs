//! The evidence in an incident folder, as the collector had it.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use xpu_timer_proto::{lenient, server::Stacktrace, v1::Evidence};

use crate::scenario::Scenario;

/// Joins `evidence.bin` with the `.stacktrace` files beside it.
pub fn evidence(folder: &Path) -> Result<Evidence> {
    let read = |path: &Path| fs::read(path).with_context(|| path.display().to_string());
    let path = folder.join("evidence.bin");
    let mut evidence = lenient::decode::<Evidence>(&read(&path)?).with_context(|| path.display().to_string())?;
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "stacktrace") {
            continue;
        }
        let dump = lenient::decode::<Stacktrace>(&read(&path)?).with_context(|| path.display().to_string())?;
        let rank = evidence.ranks.iter_mut().find(|rank| i64::from(rank.rank) == i64::from(dump.rank));
        // A file without a sample means that no dump of the rank could be taken.
        if let Some(rank) = rank.filter(|_| dump.last_sample.is_some() || dump.first_sample.is_some()) {
            rank.dump = Some(dump);
        }
    }
    Ok(evidence)
}

/// The incident folder of a scenario, or the newest mild capture if there is no incident.
pub fn incident(output: &Path, scenario: &Scenario) -> PathBuf {
    let timeline = output.join(&scenario.name).join("timeline");
    let latest = timeline.join("latest");
    if latest.exists() {
        return latest;
    }
    let captures = fs::read_dir(timeline.join("mild")).into_iter().flatten().flatten().map(|entry| entry.path());
    captures.max().unwrap_or(latest)
}

#[cfg(test)]
mod tests {
    use xpu_timer_analysis::{Verdict, judge};
    use xpu_timer_tests::{read_archive, tree};

    use super::*;

    #[test]
    fn the_recorded_folder_of_the_demo_gives_the_same_verdict() {
        let folder = tempfile::tempdir().unwrap();
        let files = read_archive(&tree().join("tests/fixtures/demo.zip")).unwrap();
        for (name, bytes) in &files {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        let recorded: Verdict = serde_json::from_slice(&files["verdict.json"]).unwrap();
        let verdict = judge(&evidence(folder.path()).unwrap());
        assert_eq!((&*recorded.culprits, recorded.cause.name()), (&[2][..], "data_loader"));
        assert_eq!(verdict.sentence, recorded.sentence);
        assert_eq!(
            (verdict.cause, verdict.confidence, verdict.culprits, verdict.victims, verdict.hang),
            (recorded.cause, recorded.confidence, recorded.culprits, recorded.victims, recorded.hang)
        );
    }
}
