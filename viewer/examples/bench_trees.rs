//! Measures the merge of the trees of many nodes: `cargo run --release -p xpu_timer_viewer
//! --example bench_trees`.
//!
//! Every node has 8 ranks and sends its stacks as one tree. The cluster collector merges the trees,
//! and all labels are written. The benchmark prints the time and fails above the limit.

use anyhow::ensure;
use clap::Parser;
use std::time::Instant;
use xpu_timer_analysis::folded::folded;
use xpu_timer_analysis::prefix_tree::PrefixTree;

/// Benchmark of the merge of per-node trees.
#[derive(Parser)]
struct Options {
    /// Number of nodes
    #[arg(long, default_value_t = 12_500)]
    nodes: u32,
    /// Number of different stacks of each node, 10 frames each
    #[arg(long, default_value_t = 40)]
    stacks: u32,
    /// Fail when the merge takes longer than this, in milliseconds
    #[arg(long, default_value_t = 1_000.0)]
    max_ms: f64,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    // A few trees repeat with other ranks: building 12,500 trees is not part of the measurement.
    let mut merged = PrefixTree::new();
    let mut spent = std::time::Duration::ZERO;
    for node in 0..options.nodes {
        let mut tree = PrefixTree::new();
        for stack in 0..options.stacks {
            // A tenth of the stacks is at one of 7 places, which differs between nodes.
            let place = if stack % 10 == 0 { (node * 31 + stack * 17) % 7 } else { 0 };
            let words: Vec<String> = (0..10)
                .map(|depth| match depth {
                    0..8 => format!("function_{stack}_{depth}@/usr/lib/x86_64-linux-gnu/libwork.so:{depth}"),
                    _ => format!("function_{stack}_{depth}_{place}@/usr/lib/x86_64-linux-gnu/libwork.so:{depth}"),
                })
                .collect();
            for rank in node * 8..node * 8 + 8 {
                tree.insert(words.iter().map(String::as_str), rank);
            }
        }
        let message = tree.to_message();
        let begin = Instant::now();
        merged.merge_message(&message)?;
        spent += begin.elapsed();
    }
    let begin = Instant::now();
    let text = folded(&merged, options.nodes * 8);
    let labels = begin.elapsed();
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    let (nodes, frames) = (options.nodes, options.stacks * 10);
    println!("{nodes} trees of {frames} frames, {} ranks: merged in {:.0} ms", nodes * 8, ms(spent));
    println!(
        "{:.1} MB of labels in {} lines written in {:.0} ms",
        text.len() as f64 / 1e6,
        text.lines().count(),
        ms(labels)
    );
    let total = ms(spent + labels);
    let holds = total <= options.max_ms;
    println!("together {total:.0} ms (limit {}): {}", options.max_ms, if holds { "ok" } else { "NOT ok" });
    ensure!(holds, "merging takes {total:.0} ms");
    Ok(())
}
