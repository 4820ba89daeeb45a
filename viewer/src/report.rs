//! `report.html`: everything known about one incident, in one file that opens in any browser
//! without a network.
//!
//! [`Builder`] adds dumps one by one, [`Report`] is the data, and [`render`] embeds it in the page.
//! Trees and groups come from the code that writes the folded files; the page only draws them.
//!
//! The file contains its style, its script and its data. Names in the data are untrusted. The data
//! is JSON without the character `<`, and the script inserts it into the page as text only. The
//! page's content security policy blocks all other scripts and every request.

mod builder;
mod communicators;
mod data;
pub(crate) mod lanes;
mod mixed;

pub use builder::{Builder, ReportContext};
pub use data::Report;

use serde::Serialize;
use serde_json::ser::{CharEscape, CompactFormatter, Formatter};
use std::io::{self, Write};
use std::path::Path;
use xpu_timer_analysis::Verdict;
use xpu_timer_proto::printable;

const PAGE: &str = include_str!("report/page.html");
const STYLE: &str = include_str!("report/style.css");
/// The parts of the script, in the order of their dependencies.
const SCRIPTS: &[&str] = &[
    include_str!("report/js/base.js"),
    include_str!("report/js/flame.js"),
    include_str!("report/js/ranks.js"),
    include_str!("report/js/lanes.js"),
    include_str!("report/js/tables.js"),
    include_str!("report/js/main.js"),
];

/// The verdict of an incident folder, or `None` if the folder has none.
///
/// # Errors
/// The verdict exists but cannot be read, or is none.
pub fn read_verdict(folder: &Path) -> io::Result<Option<Verdict>> {
    match crate::folder::read(&folder.join("verdict.json")) {
        Ok(json) => Ok(Some(serde_json::from_slice(&json)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Renders the file.
///
/// # Errors
/// The data cannot be written as JSON. No data of this type is known to cause that.
pub fn render(report: &Report) -> serde_json::Result<String> {
    // In JSON, `<` occurs only in strings, where this escape has the same meaning. No name can
    // therefore close the element that contains the data.
    let mut data = Vec::new();
    report.serialize(&mut serde_json::Serializer::with_formatter(&mut data, JsonFormatter))?;
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

/// Writes JSON without characters that affect a page or text copied from it. Line breaks stay,
/// because the page shows texts of several lines.
struct JsonFormatter;

impl Formatter for JsonFormatter {
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

/// Copies `rest` up to a mark, and returns what follows the mark.
fn push_until<'a>(page: &mut String, rest: &'a str, mark: &str) -> &'a str {
    let (before, after) = rest.split_once(mark).expect("page.html holds every mark, in this order");
    page.push_str(before);
    after
}
