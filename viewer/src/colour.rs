//! The colour of a frame: the first of five rules that matches its label decides.

use inferno::flamegraph::color::Color;

/// The five kinds of frame, each with its own hue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// PyTorch and collective libraries: green.
    Torch,
    /// C++: yellow.
    Cpp,
    /// Python code and the interpreter's C code: cyan.
    Python,
    /// The state of a process: purple.
    State,
    /// Everything else: red.
    Other,
}

/// The kind of a label.
pub fn kind(label: &str) -> Kind {
    // The rules ignore the ranks, which may be long. They need the `@` before the ranks, for
    // `State@`.
    let label = &label.as_bytes()[..label.rfind('@').map_or(label.len(), |at| at + 1)];
    if find(label, b"/torch").is_some() || find(label, b"nccl").is_some() {
        Kind::Torch
    } else if label.windows(2).any(|w| w == b"::") {
        Kind::Cpp
    } else if is_interpreter(label) || digit_follows(label, b".py:", |a, b| a == b) {
        Kind::Python
    } else if label.windows(6).any(|w| w == b"State@") {
        Kind::State
    } else {
        Kind::Other
    }
}

/// Finds a lower-case text in a label, ignoring case.
fn find(label: &[u8], text: &[u8]) -> Option<usize> {
    label.windows(text.len()).position(|w| w.eq_ignore_ascii_case(text))
}

/// Whether the label matches `python.*\.[ch]:digit`, ignoring case.
fn is_interpreter(label: &[u8]) -> bool {
    // The text after the first `python` includes the text after every later one.
    find(label, b"python").is_some_and(|at| {
        let rest = &label[at + b"python".len()..];
        let same = |a: u8, b: u8| a.eq_ignore_ascii_case(&b);
        digit_follows(rest, b".c:", same) || digit_follows(rest, b".h:", same)
    })
}

fn digit_follows(label: &[u8], text: &[u8], same: impl Fn(u8, u8) -> bool) -> bool {
    label
        .windows(text.len() + 1)
        .any(|w| w[text.len()].is_ascii_digit() && w.iter().zip(text).all(|(&a, &b)| same(a, b)))
}

/// The colour of a label: the kind selects the hue, and the word selects the shade, so that
/// neighbours differ.
///
/// The shade does not depend on the ranks, so a function looks the same in every incident.
pub fn colour(label: &str) -> Color {
    let word = label.rsplit_once('@').map_or(label, |(word, _)| word);
    // FNV-1a; any hash works if it never changes.
    let hash = word.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let shade = |from: u8, span: u8| from + ((hash >> 16) % (u32::from(span) + 1)) as u8;
    match kind(label) {
        Kind::Torch => Color { r: shade(90, 50), g: shade(200, 40), b: shade(90, 50) },
        Kind::Cpp => Color { r: shade(215, 30), g: shade(205, 30), b: shade(60, 40) },
        Kind::Python => Color { r: shade(80, 50), g: shade(205, 35), b: shade(215, 30) },
        Kind::State => Color { r: shade(200, 25), g: shade(130, 35), b: shade(215, 30) },
        Kind::Other => Color { r: shade(235, 15), g: shade(105, 45), b: shade(95, 45) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_rule_that_matches_decides() {
        for (label, expected) in [
            ("f@/opt/site-packages/torch/nn/module.py:3@0-7|", Kind::Torch),
            ("f@/opt/Torch/x.py:3@0|", Kind::Torch),
            ("ncclAllReduce@/usr/lib/x.so@0|", Kind::Torch),
            ("c10d::NCCLComm@x@0|", Kind::Torch),
            ("at::native@pytorch/x.py:3@0|", Kind::Cpp),
            ("a::b@/usr/local/python3.8/ceval.c:12@0|", Kind::Cpp),
            ("call_function@/usr/local/src/conda/python-3.8.20/Programs/gcmodule.c:4960@0-7|", Kind::Python),
            ("x@/PYTHON/a.H:1@0|", Kind::Python),
            ("train@pretrain.py:272@0-7|", Kind::Python),
            ("train@pretrain.PY:272@0-7|", Kind::Other),
            ("a@x.c:1/python@0|", Kind::Other),
            ("python@a.cc:1@0|", Kind::Other),
            ("f@a.py:@0|", Kind::Other),
            ("f@a.py@0-7|", Kind::Other),
            ("State@R (running)@0-7|", Kind::State),
            ("MyState@libx.so@0-7|", Kind::State),
            ("poll@/lib64/libc.so.6@0-7|", Kind::Other),
            ("f@State@0-7|", Kind::State),
            ("@@|", Kind::Other),
            ("", Kind::Other),
        ] {
            assert_eq!(kind(label), expected, "{label}");
        }
    }

    #[test]
    fn a_shade_never_leaves_its_hue() {
        for i in 0..2_000 {
            let c = |label: String| {
                let c = colour(&label);
                (i32::from(c.r), i32::from(c.g), i32::from(c.b))
            };
            let (r, g, b) = c(format!("nccl{i}@x@0|"));
            assert!(g > r + 50 && g > b + 50, "green");
            let (r, g, b) = c(format!("a::{i}@x@0|"));
            assert!(r > b + 100 && g > b + 100, "yellow");
            let (r, g, b) = c(format!("f{i}@x.py:1@0|"));
            assert!(g > r + 60 && b > r + 60, "cyan");
            let (r, g, b) = c(format!("State@{i}@0|"));
            assert!(r > g + 30 && b > g + 30, "purple");
            let (r, g, b) = c(format!("f{i}@x@0|"));
            assert!(r > g + 70 && r > b + 70, "red");
        }
    }

    #[test]
    fn a_function_keeps_its_colour_whatever_the_ranks() {
        assert_eq!(colour("f@a.py:1@0-3|4-7"), colour("f@a.py:1@0-7|"));
    }
}
