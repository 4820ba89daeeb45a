//! `cargo xtask sample`: functions of the workspace drawn at random, for reviews.

use anyhow::{Result, ensure};
use xpu_timer_tests::tree;

use crate::functions::functions;
use crate::source;

/// Options of `sample`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// How many functions to draw
    count: usize,

    /// Seed of the random choice, to repeat it; default: a random seed, which is printed
    #[arg(long)]
    seed: Option<u64>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let root = tree();
    let mut found = Vec::new();
    for path in source::files(&root, &["rs"])? {
        let shown = path.strip_prefix(&root).unwrap_or(&path);
        if source::is_generated(shown) {
            continue;
        }
        for function in functions(&source::parse(&path)?) {
            found.push(format!("{}:{} {} {}", shown.display(), function.line, function.name, function.body_lines));
        }
    }
    ensure!(!found.is_empty(), "no functions below {}", root.display());
    let seed = options.seed.unwrap_or_else(|| fastrand::u64(..));
    eprintln!("{} of {} functions, seed {seed}: file:line, name, lines of the body", options.count, found.len());
    draw(found, options.count, seed).iter().for_each(|line| println!("{line}"));
    Ok(())
}

/// `count` different entries of `all`, or all of them.
fn draw<T>(mut all: Vec<T>, count: usize, seed: u64) -> Vec<T> {
    fastrand::Rng::with_seed(seed).shuffle(&mut all);
    all.truncate(count);
    all
}

#[cfg(test)]
mod tests {
    use super::draw;

    #[test]
    fn a_seed_repeats_its_draw() {
        let all = || (0..1000).collect::<Vec<_>>();
        let mut drawn = draw(all(), 10, 7);
        assert_eq!(drawn, draw(all(), 10, 7));
        assert_ne!(drawn, draw(all(), 10, 8));
        drawn.sort_unstable();
        drawn.dedup();
        assert_eq!(drawn.len(), 10);
        assert_eq!(draw(vec![1], 10, 7), [1]);
    }
}
