//! Judges a recorded incident folder again: `cargo run -p xpu_timer_analysis --example judge -- FOLDER [--json]`.
//!
//! The folder's `evidence.bin` is joined with its `.stacktrace` files, as the collector does it. For work on the rules: a verdict
//! that was wrong is judged again after a change, without the job.

use std::{env, error::Error, fs, path::PathBuf};

use xpu_timer_analysis::judge;
use xpu_timer_proto::{Message, server::Stacktrace, v1::Evidence};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args_os().skip(1);
    let folder = PathBuf::from(arguments.next().ok_or("usage: judge FOLDER [--json]")?);
    let mut evidence = Evidence::decode(&fs::read(folder.join("evidence.bin"))?[..])?;
    for entry in fs::read_dir(&folder)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != "stacktrace") {
            continue;
        }
        let dump = Stacktrace::decode(&fs::read(&path)?[..])?;
        let rank = evidence.ranks.iter_mut().find(|rank| i64::from(rank.rank) == i64::from(dump.rank));
        // A file without a sample stands for a rank of which no dump could be taken.
        if let Some(rank) = rank.filter(|_| dump.last_sample.is_some() || dump.first_sample.is_some()) {
            rank.dump = Some(dump);
        }
    }
    let verdict = judge(&evidence);
    if arguments.next().is_some_and(|argument| argument == "--json") {
        println!("{}", serde_json::to_string_pretty(&verdict)?);
    } else {
        print!("{}", verdict.to_text());
    }
    Ok(())
}
