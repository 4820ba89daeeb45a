//! The folded text of one kind of stack, and the flame graph that `inferno` draws from it.
//!
//! `inferno` parses the lines of profilers. This module escapes labels that such lines cannot
//! contain. The first of five rules that matches the label of a frame decides its colour.

use inferno::flamegraph::color::{BackgroundColor, Color, PaletteMap};
use inferno::flamegraph::{self, Options};
use std::borrow::Cow;
use std::io;
use xpu_timer_analysis::folded::folded;
use xpu_timer_analysis::prefix_tree::PrefixTree;

/// Width of a flame graph in pixels.
const WIDTH: usize = 1600;

/// The folded text of one tree, or of samples.
#[derive(Debug)]
pub struct Picture {
    folded: String,
    /// Whether the labels end with ranks.
    has_ranks: bool,
}

impl Picture {
    /// Folds a tree.
    pub fn new(tree: &PrefixTree, world: u32) -> Picture {
        Picture { folded: folded(tree, world), has_ranks: true }
    }

    /// Draws folded text whose lines end with a number of samples. Lines with a common beginning
    /// follow each other.
    #[must_use]
    pub fn of_samples(folded: String) -> Picture {
        Picture { folded, has_ranks: false }
    }

    /// The folded text: one line for each end node or stack.
    pub fn folded(&self) -> &str {
        &self.folded
    }

    /// Draws the flame graph. The same tree always gives the same bytes.
    pub fn write_svg(&self, title: &str, out: impl io::Write) -> io::Result<()> {
        let (drawn, mut colours) = self.drawn();
        let mut options = Options::default();
        options.title = title.to_owned();
        options.image_width = Some(WIDTH);
        options.min_width = 0.0;
        options.bgcolors = Some(BackgroundColor::Grey);
        // Wide enough for common monospace fonts, so that no text exceeds its frame.
        options.font_width = 0.63;
        // Every label is in the map. If one were missing, its colour would still be deterministic.
        options.palette_map = Some(&mut colours);
        options.deterministic = true;
        // The lines are in the order of the tree, which keeps the frames of one node together.
        // Sorted as text, they would not be: `a;x` sorts after `a b`. This mode keeps the order of
        // the lines, from last to first.
        options.flame_chart = true;
        if self.folded.is_empty() {
            // It draws an empty picture and returns an error.
            return flamegraph::from_lines(&mut options, [], out)
                .or_else(|error| if error.kind() == io::ErrorKind::InvalidData { Ok(()) } else { Err(error) });
        }
        flamegraph::from_lines(&mut options, drawn.as_deref().unwrap_or(&self.folded).lines().rev(), out)
    }

    /// The folded text as `inferno` can draw it, if it differs, and the colours of all labels.
    fn drawn(&self) -> (Option<String>, PaletteMap) {
        let mut colours = PaletteMap::default();
        // The frame below all roots has no label.
        colours.insert("", Color { r: 215, g: 215, b: 215 });
        let mut differs = false;
        let mut before: Vec<&str> = Vec::new();
        for line in self.folded.lines() {
            // Most labels are equal to the label at the same depth of the previous line.
            let labels = line.rsplit_once(' ').map_or(line, |(stack, _)| stack).split(';');
            for (depth, label) in labels.enumerate() {
                if before.get(depth) == Some(&label) {
                    continue;
                }
                before.truncate(depth);
                before.push(label);
                let drawn = drawable(label, depth == 0);
                differs |= matches!(drawn, Cow::Owned(_));
                let ranked = if self.has_ranks { Cow::Borrowed(label) } else { Cow::Owned(format!("{label}@")) };
                colours.insert(drawn, colour(&ranked));
            }
        }
        let drawn = differs.then(|| {
            let mut text = String::with_capacity(self.folded.len());
            for line in self.folded.lines() {
                for (depth, label) in line.split(';').enumerate() {
                    text.push_str(if depth == 0 { "" } else { ";" });
                    text.push_str(&drawable(label, depth == 0));
                }
                text.push('\n');
            }
            text
        });
        (drawn, colours)
    }
}

/// A label as `inferno` can draw it.
///
/// `inferno` trims lines and skips lines that begin with `# `; an invisible character in front
/// prevents both. It also writes two characters that XML forbids.
fn drawable(label: &str, root: bool) -> Cow<'_, str> {
    let hidden = root && (label.starts_with(char::is_whitespace) || label.starts_with("# "));
    let forbidden = |c| matches!(c, '\u{fffe}' | '\u{ffff}');
    if !hidden && !label.contains(forbidden) {
        return Cow::Borrowed(label);
    }
    let mut text = String::with_capacity(label.len() + 3);
    text.push_str(if hidden { "\u{200b}" } else { "" });
    text.extend(label.chars().map(|c| if forbidden(c) { char::REPLACEMENT_CHARACTER } else { c }));
    Cow::Owned(text)
}

/// The five kinds of frame, each with its own hue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FrameKind {
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
fn kind(label: &str) -> FrameKind {
    // The rules ignore the ranks, which may be long. They need the `@` before the ranks, for
    // `State@`.
    let label = &label.as_bytes()[..label.rfind('@').map_or(label.len(), |at| at + 1)];
    if find(label, b"/torch").is_some() || find(label, b"nccl").is_some() {
        FrameKind::Torch
    } else if label.windows(2).any(|w| w == b"::") {
        FrameKind::Cpp
    } else if is_interpreter(label) || digit_follows(label, b".py:", |a, b| a == b) {
        FrameKind::Python
    } else if label.windows(6).any(|w| w == b"State@") {
        FrameKind::State
    } else {
        FrameKind::Other
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

/// The colour of a label: the kind selects the hue, and the name selects the shade, so that
/// neighbours differ.
///
/// The shade does not depend on the ranks, so a function looks the same in every incident.
fn colour(label: &str) -> Color {
    let name = label.rsplit_once('@').map_or(label, |(name, _)| name);
    // FNV-1a; any hash works if it never changes.
    let hash = name.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let shade = |from: u8, span: u8| from + ((hash >> 16) % (u32::from(span) + 1)) as u8;
    match kind(label) {
        FrameKind::Torch => Color { r: shade(90, 50), g: shade(200, 40), b: shade(90, 50) },
        FrameKind::Cpp => Color { r: shade(215, 30), g: shade(205, 30), b: shade(60, 40) },
        FrameKind::Python => Color { r: shade(80, 50), g: shade(205, 35), b: shade(215, 30) },
        FrameKind::State => Color { r: shade(200, 25), g: shade(130, 35), b: shade(215, 30) },
        FrameKind::Other => Color { r: shade(235, 15), g: shade(105, 45), b: shade(95, 45) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use xpu_timer_analysis::folded::{push_name, walk};

    fn tree(stacks: &[(Vec<String>, u32)]) -> PrefixTree {
        let mut tree = PrefixTree::new();
        for (stack, rank) in stacks {
            let names = stack.iter().map(|func| {
                let mut name = String::new();
                push_name(&mut name, func, "f");
                name
            });
            tree.insert(names.collect::<Vec<_>>().iter().map(String::as_str), *rank);
        }
        tree
    }

    fn svg(tree: &PrefixTree) -> String {
        let mut out = Vec::new();
        Picture::new(tree, 8).write_svg("merge stack in cpp", &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    /// The frames except `all`, sorted: label and number of stacks, as an XML parser reads the
    /// picture.
    fn frames(svg: &str) -> Vec<(String, usize)> {
        let options = roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() };
        let document = roxmltree::Document::parse_with_options(svg, options).expect("well-formed XML");
        let mut frames = Vec::new();
        for group in document.descendants().filter(|n| n.has_tag_name(("http://www.w3.org/2000/svg", "g"))) {
            let child = |name| group.children().find(|n| n.tag_name().name() == name);
            let (Some(title), Some(rect)) = (child("title"), child("rect")) else { continue };
            assert!(rect.attribute("width").unwrap().trim_end_matches('%').parse::<f64>().unwrap() > 0.0);
            let (label, count) = title.text().unwrap().rsplit_once(" (").unwrap();
            frames.push((label.to_owned(), count.split_once(' ').unwrap().0.replace(',', "").parse().unwrap()));
        }
        frames.sort();
        let all = frames.iter().position(|(label, _)| label == "all").expect("the frame of all stacks");
        frames.remove(all);
        frames
    }

    fn labels_drawn(svg: &str) -> Vec<String> {
        frames(svg).into_iter().map(|(label, _)| label).collect()
    }

    fn stacks(of: &[&[&str]]) -> Vec<(Vec<String>, u32)> {
        of.iter().map(|stack| (stack.iter().map(|&w| w.to_owned()).collect(), 0)).collect()
    }

    #[test]
    fn labels_that_inferno_mishandles_are_drawn() {
        let odd = [
            " lead",
            "# comment",
            "tail ",
            "1",
            "a 1",
            "a 1 2",
            "",
            "<&\"'>",
            "]]>",
            "a\u{ffff}b",
            "--",
            "-",
            "x_[k]",
            "\u{3000}x",
        ];
        let odd: Vec<[&str; 1]> = odd.iter().map(|&w| [w]).collect();
        let list: Vec<&[&str]> = odd.iter().map(|s| &s[..]).collect();
        let drawn = labels_drawn(&svg(&tree(&stacks(&list))));
        assert_eq!(drawn.len(), odd.len(), "{drawn:?}");
        for word in
            ["# comment@f@0|1-7", " lead@f", "tail @f", "a 1 2@f", "<&\"'>@f", "]]>@f", "a\u{fffd}b@f", "x_[k]@f"]
        {
            assert!(drawn.iter().any(|label| label.contains(word)), "{word} in {drawn:?}");
        }
    }

    #[test]
    fn a_frame_is_drawn_once_whatever_the_sort_order() {
        // As text, `a@f…` < `a@f… b@f…` < `a@f…;c@f…`, which would split the frame of `a`.
        let tree = tree(&stacks(&[&["a"], &["a@f@0|1-7 b"], &["a", "c"]]));
        let frames = frames(&svg(&tree));
        assert_eq!(frames.len(), 3, "{frames:?}");
        assert!(frames.contains(&("a@f@0|1-7".to_owned(), 2)), "{frames:?}");
    }

    #[test]
    fn an_empty_picture_has_a_message_and_is_not_an_error() {
        let svg = svg(&PrefixTree::new());
        assert!(
            roxmltree::Document::parse_with_options(
                &svg,
                roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() }
            )
            .is_ok()
        );
        assert!(svg.contains("No valid input"));
    }

    #[test]
    fn a_stack_of_3000_frames_is_drawn_whole() {
        let stack: Vec<String> = (0..3_000).map(|i| format!("recurse_{i}")).collect();
        assert_eq!(labels_drawn(&svg(&tree(&[(stack, 3)]))).len(), 3_000);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn every_node_is_one_frame_of_well_formed_xml(
            stacks in prop::collection::vec((prop::collection::vec(".{0,3}", 1..4), 0u32..8), 1..12),
        ) {
            let tree = tree(&stacks);
            let svg = svg(&tree);
            let mut expected: Vec<String> = Vec::new();
            let walked: Result<(), std::convert::Infallible> = walk(&tree, 8, |step| {
                expected.push(drawable(step.label, step.root).into_owned());
                Ok(())
            });
            walked.unwrap();
            expected.sort();
            prop_assert_eq!(labels_drawn(&svg), expected);
            prop_assert_eq!(&svg, &self::svg(&tree));
        }
    }

    #[test]
    fn the_first_rule_that_matches_decides() {
        for (label, expected) in [
            ("f@/opt/site-packages/torch/nn/module.py:3@0-7|", FrameKind::Torch),
            ("f@/opt/Torch/x.py:3@0|", FrameKind::Torch),
            ("ncclAllReduce@/usr/lib/x.so@0|", FrameKind::Torch),
            ("c10d::NCCLComm@x@0|", FrameKind::Torch),
            ("at::native@pytorch/x.py:3@0|", FrameKind::Cpp),
            ("a::b@/usr/local/python3.8/ceval.c:12@0|", FrameKind::Cpp),
            ("call_function@/usr/local/src/conda/python-3.8.20/Programs/gcmodule.c:4960@0-7|", FrameKind::Python),
            ("x@/PYTHON/a.H:1@0|", FrameKind::Python),
            ("train@pretrain.py:272@0-7|", FrameKind::Python),
            ("train@pretrain.PY:272@0-7|", FrameKind::Other),
            ("a@x.c:1/python@0|", FrameKind::Other),
            ("python@a.cc:1@0|", FrameKind::Other),
            ("f@a.py:@0|", FrameKind::Other),
            ("f@a.py@0-7|", FrameKind::Other),
            ("State@R (running)@0-7|", FrameKind::State),
            ("MyState@libx.so@0-7|", FrameKind::State),
            ("poll@/lib64/libc.so.6@0-7|", FrameKind::Other),
            ("f@State@0-7|", FrameKind::State),
            ("@@|", FrameKind::Other),
            ("", FrameKind::Other),
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
