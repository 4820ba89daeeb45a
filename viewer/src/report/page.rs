//! Puts a report into its page: one HTML file that holds its style, its program and its data.
//!
//! Names in the data come from anywhere. They are written as JSON in which no `<` stands, and the program puts them into
//! the page as text only; the page's policy lets nothing else run and nothing be fetched.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::ser::{CharEscape, CompactFormatter, Formatter};
use xpu_timer_proto::printable;

use super::data::Report;

const PAGE: &str = include_str!("page.html");
const STYLE: &str = include_str!("style.css");
/// The parts of the program, in the order in which they need each other.
const SCRIPTS: &[&str] = &[
    include_str!("js/base.js"),
    include_str!("js/data.js"),
    include_str!("js/flame.js"),
    include_str!("js/ranks.js"),
    include_str!("js/tables.js"),
    include_str!("js/threads.js"),
    include_str!("js/main.js"),
];

/// The whole file.
///
/// # Errors
/// When the data cannot be written as JSON, which no data of this type is known to cause.
pub fn render(report: &Report) -> serde_json::Result<String> {
    // Within JSON a `<` stands in strings only, where this means the same; so no name can end the element it stands in.
    let mut data = Vec::new();
    report.serialize(&mut serde_json::Serializer::with_formatter(&mut data, Shown))?;
    let data = String::from_utf8_lossy(&data).replace('<', "\\u003c");
    let mut page = String::with_capacity(data.len() + 128 * 1024);
    let mut rest = PAGE;
    for (mark, fill) in [("/*style*/", STYLE), ("/*data*/", data.as_str())] {
        rest = push_until(&mut page, rest, mark);
        page.push_str(fill);
    }
    rest = push_until(&mut page, rest, "/*script*/");
    page.push_str("\"use strict\";\n(() => {\n");
    SCRIPTS.iter().for_each(|script| page.push_str(script));
    page.push_str("})();\n");
    page.push_str(rest);
    Ok(page)
}

/// JSON whose strings hold nothing that acts on a page or on what is copied from it. Line breaks stay: the page shows them where a text
/// has several lines.
struct Shown;

impl Formatter for Shown {
    fn write_string_fragment<W: Write + ?Sized>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        writer.write_all(printable::line(fragment).as_bytes())
    }

    fn write_char_escape<W: Write + ?Sized>(&mut self, writer: &mut W, escape: CharEscape) -> io::Result<()> {
        match escape {
            CharEscape::Quote | CharEscape::ReverseSolidus | CharEscape::LineFeed => {
                CompactFormatter.write_char_escape(writer, escape)
            }
            CharEscape::AsciiControl(_) | CharEscape::Backspace => {
                write!(writer, "{}", printable::REPLACEMENT)
            }
            _ => writer.write_all(b" "),
        }
    }
}

/// Copies up to a mark of the page, which is not copied; what comes after it.
fn push_until<'a>(page: &mut String, rest: &'a str, mark: &str) -> &'a str {
    let (before, after) = rest.split_once(mark).expect("page.html holds every mark, in this order");
    page.push_str(before);
    after
}
