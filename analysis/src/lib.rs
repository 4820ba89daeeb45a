//! Pure logic of xpu_timer: rank sets, prefix trees, labels, collective matching, verdicts.
//!
//! The same input gives the same output, byte for byte. The crate does no I/O, reads no clock and
//! starts no threads.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod alias;
pub mod calibration;
mod case;
mod causes;
mod explanation;
mod facts;
mod finding;
pub mod folded;
mod graph;
pub mod groups;
mod history;
mod judge;
mod kernels;
mod known_defects;
pub mod main_thread;
mod matching;
pub mod prefix_tree;
pub mod rank_set;
mod report;
#[cfg(test)]
mod scenarios;
mod stacks;
pub mod stay;
pub mod step_parts;
mod store;
pub mod stragglers;
pub mod suspended;
#[cfg(test)]
mod testing;
mod text;
pub mod throughput;
pub mod verdict;
mod wording;
mod world;

pub use facts::{condense, condense_process};
pub use judge::{judge, judge_encoded};
pub use report::communicator_groups;
pub use stacks::{FREEZER_WCHAN, native_place, own_frame, own_place};
pub use text::{communicator as communicator_name, operation_state, shape as operation_shape};
pub use verdict::{Activity, Cause, Confidence, HangEvidence, RankGroup, Status, Timing, Verdict, VerdictKind};
pub use world::{EncodedOperations, Exit, Splitter, names_absent};

#[cfg(test)]
mod docs {
    //! `docs/verdict.schema.json` is generated from the types. `BLESS=1` writes it anew.

    use std::{env, fs, path::Path};

    use xpu_timer_proto::v1::Evidence;

    use super::{Verdict, judge};

    #[test]
    fn the_schema_in_docs_is_that_of_the_types() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/verdict.schema.json");
        let schema = serde_json::to_string_pretty(&schemars::schema_for!(Verdict)).unwrap() + "\n";
        if env::var_os("BLESS").is_some() {
            fs::write(&path, &schema).unwrap();
        }
        let written = fs::read_to_string(&path).unwrap_or_default();
        assert!(written == schema, "{} is old: run BLESS=1 cargo test -p xpu_timer_analysis", path.display());
    }

    #[test]
    fn every_field_and_cause_is_explained() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/verdict.md");
        let text = fs::read_to_string(&path).unwrap();
        let verdict = serde_json::to_value(judge(&Evidence::default())).unwrap();
        for field in verdict.as_object().unwrap().keys() {
            assert!(text.contains(&format!("`{field}`")), "field {field} is not explained in {}", path.display());
        }
        let schema = serde_json::to_value(schemars::schema_for!(Verdict)).unwrap();
        let causes = schema["$defs"]["Cause"]["oneOf"].as_array().unwrap();
        assert!(causes.len() > 20);
        for cause in causes {
            let name = cause["const"].as_str().unwrap();
            assert!(text.contains(&format!("| `{name}` |")), "cause {name} has no row in {}", path.display());
        }
    }
}
