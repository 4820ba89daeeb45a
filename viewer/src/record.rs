//! A folder of stack samples, as `xpu_timer_dump record` writes it: folded stacks, flame graphs and
//! a speedscope file, and a summary of the groups of ranks.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use xpu_timer_proto::{printable, samples, timeline};
use xpu_timer_timeline::{
    picture::Picture,
    profile::{self, Group, RankSamples},
};

use crate::{folder, summary};

/// Name of the files that show all ranks.
const ALL: &str = "all";
const SPEEDSCOPE: &str = "speedscope.json";

/// The samples of a folder, by rank. Empty if it has none.
///
/// # Errors
/// The folder cannot be read.
pub fn read(path: &Path, notes: &mut Vec<String>) -> io::Result<Vec<RankSamples>> {
    let mut ranks = Vec::new();
    for entry in fs::read_dir(path)? {
        let path = entry?.path();
        if path.extension().is_none_or(|extension| extension != samples::EXTENSION) {
            continue;
        }
        let name = folder::name_of(&path);
        let Some((rank, _)) = timeline::rank_of_file(&path) else {
            notes.push(format!("{name} is left out: its name is not RANK-WORLD.{}", samples::EXTENSION));
            continue;
        };
        match folder::read(&path).and_then(|bytes| samples::decode(&bytes)) {
            Ok(samples) => ranks.push(RankSamples { rank, samples }),
            Err(why) => notes.push(format!("{name} is left out: {why}")),
        }
    }
    ranks.sort_by_key(|rank| rank.rank);
    Ok(ranks)
}

/// Writes all files of the samples, and prints the summary.
///
/// # Errors
/// There is nothing to draw, or a file cannot be written.
pub fn draw(ranks: &[RankSamples], output: &Path, out: &mut dyn Write) -> anyhow::Result<()> {
    if ranks.iter().all(|rank| rank.count() == 0) {
        bail!("the recording has no samples");
    }
    fs::create_dir_all(output).with_context(|| format!("cannot create the folder {}", output.display()))?;
    let groups = profile::groups(ranks);
    let mut written = write_pictures(&ranks.iter().collect::<Vec<_>>(), ALL, output)?.to_vec();
    for (index, group) in groups.iter().enumerate().filter(|_| groups.len() > 1) {
        let members: Vec<&RankSamples> = ranks.iter().filter(|rank| group.ranks.contains(rank.rank)).collect();
        written.extend(write_pictures(&members, &format!("group-{}", index + 1), output)?);
    }
    let file = write(output, SPEEDSCOPE, |file| profile::write_speedscope(ranks, "xpu_timer record", file))?;
    written.push(file);
    let text = text_of(ranks, &groups, &written);
    out.write_all(printable::text(&text).as_bytes()).context("cannot write the summary")
}

/// Writes the folded stacks of some ranks, and their flame graph.
fn write_pictures(ranks: &[&RankSamples], name: &str, output: &Path) -> anyhow::Result<[PathBuf; 2]> {
    let picture = Picture::of_samples(profile::folded(&profile::weights(ranks.iter().copied())));
    let count: u64 = ranks.iter().map(|rank| rank.count()).sum();
    let title = format!("{}: {count} samples", titles(ranks));
    Ok([
        write(output, &format!("{name}.folded"), |file| file.write_all(picture.folded().as_bytes()))?,
        write(output, &format!("{name}.svg"), |file| picture.write_svg(&title, file))?,
    ])
}

fn write(
    output: &Path,
    name: &str,
    fill: impl FnOnce(&mut io::BufWriter<&mut fs::File>) -> io::Result<()>,
) -> anyhow::Result<PathBuf> {
    folder::write_file(output, name, fill)
        .with_context(|| format!("cannot write {}; --output chooses another folder", output.join(name).display()))
}

/// The title of the processes: their ranks, or their pids if they have no ranks.
fn titles(ranks: &[&RankSamples]) -> String {
    let info = |rank: &&RankSamples| rank.samples.rank.clone().unwrap_or_default();
    if ranks.iter().all(|rank| info(rank).rank >= 0) {
        return summary::ranks_of(&ranks.iter().map(|rank| rank.rank).collect());
    }
    let pids: Vec<String> = ranks.iter().map(|rank| info(rank).pid.to_string()).collect();
    format!("{} {}", if pids.len() == 1 { "process" } else { "processes" }, pids.join(", "))
}

/// The groups with the functions that they spend their time in, and the files.
fn text_of(ranks: &[RankSamples], groups: &[Group], written: &[PathBuf]) -> String {
    let mut text = String::new();
    for (index, group) in groups.iter().enumerate() {
        let members: Vec<&RankSamples> = ranks.iter().filter(|rank| group.ranks.contains(rank.rank)).collect();
        let name = if groups.len() > 1 { format!("group {}: ", index + 1) } else { String::new() };
        let count: u64 = members.iter().map(|rank| rank.count()).sum();
        text.push_str(&format!("{name}{}, {count} samples\n", titles(&members)));
        for (share, function) in &group.top {
            text.push_str(&format!("  {:5.1} %  {function}\n", 100.0 * share));
        }
    }
    let sum = |of: fn(&RankSamples) -> u64| ranks.iter().map(of).sum::<u64>();
    let counts = [
        (sum(|rank| rank.samples.cut), "stacks lack their inner frames, which changed while they were read"),
        (sum(|rank| rank.samples.discarded), "stacks changed while they were read, and are left out"),
        (sum(|rank| rank.samples.missed), "samples were not taken, because the machine was busy"),
    ];
    for (count, what) in counts.iter().filter(|(count, _)| *count > 0) {
        text.push_str(&format!("{count} {what}\n"));
    }
    for path in written {
        text.push_str(&format!("{}\n", printable::line(&path.to_string_lossy())));
    }
    text
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::{
        Message,
        server::PySpyFrame,
        v1::{RankInfo, SampledStack, SampledThread, StackSamples},
    };

    use super::*;

    fn samples(rank: i32, function: &str) -> Vec<u8> {
        let frame = PySpyFrame { func_name: function.into(), file_name: "train.py:3".into(), module: String::new() };
        let thread = SampledThread {
            main: true,
            first: vec![7],
            last: vec![5],
            samples: vec![1000],
            stack: vec![0],
            ..SampledThread::default()
        };
        StackSamples {
            format: samples::FORMAT,
            rank: Some(RankInfo { rank, pid: 100 + rank, ..RankInfo::default() }),
            period_ns: 1_000_000,
            threads: vec![thread],
            stacks: vec![SampledStack { frames: vec![0] }],
            frames: vec![frame],
            discarded: 2,
            ..StackSamples::default()
        }
        .encode_to_vec()
    }

    #[test]
    fn a_folder_of_samples_becomes_files_and_a_summary() {
        let folder = tempfile::tempdir().unwrap();
        for (rank, function) in ["step", "step", "evaluate"].into_iter().enumerate() {
            fs::write(folder.path().join(samples::file_name(rank as u32, 3)), samples(rank as i32, function)).unwrap();
        }
        fs::write(folder.path().join("00003-00004.samples"), b"\xff").unwrap();
        let (mut notes, mut out) = (Vec::new(), Vec::new());
        let ranks = read(folder.path(), &mut notes).unwrap();
        draw(&ranks, folder.path(), &mut out).unwrap();
        assert!(notes.len() == 1 && notes[0].starts_with("00003-00004.samples is left out"), "{notes:?}");
        let text = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
        assert_eq!(text("all.folded"), "evaluate@train.py:3 1000\nstep@train.py:3 2000\n");
        assert_eq!(text("group-2.folded"), "evaluate@train.py:3 1000\n");
        assert!(text("group-1.svg").contains("ranks 0-1 (2): 2000 samples") && text("all.svg").contains("evaluate"));
        assert!(text("speedscope.json").contains("rank 2"));
        let out = String::from_utf8(out).unwrap();
        assert!(out.starts_with("group 1: ranks 0-1 (2), 2000 samples\n  100.0 %  step@train.py\n"), "{out}");
        assert!(out.contains("group 2: rank 2, 1000 samples") && out.contains("6 stacks changed"), "{out}");
        assert!(draw(&[], folder.path(), &mut Vec::new()).is_err());
    }
}
