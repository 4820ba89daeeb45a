//! Checks that the links of Markdown files lead to files of the tree, and to chapters of them, and
//! that the files and folders of the tree that they name exist.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::{Component, Path, PathBuf},
};

use anyhow::{Result, ensure};
use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::source;

/// The links and the headings of a Markdown text.
#[derive(Default)]
struct Page {
    /// Targets of links and pictures, without those to other sites.
    targets: Vec<String>,
    /// The anchors of its headings.
    anchors: BTreeSet<String>,
    /// Its inline code.
    code: Vec<String>,
}

/// Checks the links of all Markdown files below `root`.
pub(super) fn check(root: &Path) -> Result<()> {
    let mut pages = HashMap::new();
    for path in source::files(root, &["md"])? {
        let page = Page::of(&source::read(&path)?);
        pages.insert(path, page);
    }
    let tree = Tree::of(root)?;
    let mut broken: Vec<String> = Vec::new();
    for (path, page) in &pages {
        let is_broken = |target: &&String| !leads_somewhere(path, target, &pages);
        let names_none = |code: &&String| tree.lacks(code);
        let found = page.targets.iter().filter(is_broken).chain(page.code.iter().filter(names_none));
        broken.extend(found.map(|target| format!("{}: {target}", path.display())));
    }
    broken.sort();
    ensure!(broken.is_empty(), "links and paths that lead nowhere:\n{}", broken.join("\n"));
    Ok(())
}

/// The names that a document may use for a file or a folder of the repository.
struct Tree {
    /// The folders at the top.
    top: Vec<String>,
    /// All Rust files, relative to the root, with `/` in front.
    rust: Vec<String>,
    root: PathBuf,
}

impl Tree {
    fn of(root: &Path) -> Result<Self> {
        let mut top = Vec::new();
        for entry in fs::read_dir(root)? {
            let (entry, is_built) = (entry?, |name: &str| name == "target" || name.starts_with('.'));
            let name = entry.file_name().to_string_lossy().into_owned();
            if entry.file_type()?.is_dir() && !is_built(&name) {
                top.push(name);
            }
        }
        let relative = |path: PathBuf| format!("/{}", path.strip_prefix(root).unwrap_or(&path).display());
        let rust = source::files(root, &["rs"])?.into_iter().map(relative).collect();
        Ok(Tree { top, rust, root: root.to_owned() })
    }

    /// Whether inline code is the path of a file or folder that does not exist. Only paths below a
    /// folder at the top, and those of Rust files, are certain to be of this repository. The latter
    /// may be relative to any folder.
    fn lacks(&self, code: &str) -> bool {
        let is_path = code.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"/._-".contains(&byte));
        let Some((first, _)) = code.split_once('/').filter(|_| is_path && !self.root.join(code).exists()) else {
            return false;
        };
        if code.ends_with(".rs") { !self.has_rust_file(code) } else { self.top.iter().any(|folder| folder == first) }
    }

    fn has_rust_file(&self, name: &str) -> bool {
        let ending = format!("/{name}");
        self.rust.iter().any(|path| path.ends_with(&ending))
    }
}

fn leads_somewhere(from: &Path, target: &str, pages: &HashMap<PathBuf, Page>) -> bool {
    let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
    let path = if file.is_empty() { from.to_owned() } else { normal(&from.with_file_name("").join(file)) };
    let has_anchor = || pages.get(&path).is_some_and(|page| page.anchors.contains(anchor));
    path.exists() && (anchor.is_empty() || has_anchor())
}

/// The path without `..`.
fn normal(path: &Path) -> PathBuf {
    let mut found = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(found.pop()),
            Component::CurDir => {}
            part => found.push(part),
        }
    }
    found
}

impl Page {
    fn of(text: &str) -> Self {
        let mut page = Page::default();
        let mut heading: Option<String> = None;
        for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
            match event {
                Event::Start(Tag::Link { dest_url: target, .. } | Tag::Image { dest_url: target, .. })
                    if !target.contains("://") =>
                {
                    page.targets.push(target.into_string());
                }
                Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
                Event::Text(text) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&text);
                    }
                }
                Event::Code(code) => {
                    if let Some(heading) = &mut heading {
                        heading.push_str(&code);
                    }
                    page.code.push(code.into_string());
                }
                Event::End(TagEnd::Heading(_)) => page.anchors.extend(heading.take().map(|text| anchor(&text))),
                _ => {}
            }
        }
        page
    }
}

/// The anchor that GitHub gives to a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|letter| letter.is_alphanumeric() || [' ', '-', '_'].contains(letter));
    kept.flat_map(char::to_lowercase).map(|letter| if letter == ' ' { '-' } else { letter }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_to_a_missing_file_or_chapter_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        fs::create_dir(folder.path().join("docs")).unwrap();
        write("docs/a.md", "# Where `it` goes, again\n[up](../README.md) [own](#where-it-goes-again)\n");
        write("README.md", "[a](docs/a.md#where-it-goes-again) [site](https://a.b/c) | `[no](link.md)`\n");
        check(folder.path()).unwrap();
        write("README.md", "[a](docs/a.md#gone) [b](docs/b.md)\n\n```\n[c](c.md)\n```\n");
        let error = check(folder.path()).unwrap_err().to_string();
        assert!(error.contains("README.md: docs/a.md#gone\n") && error.ends_with("README.md: docs/b.md"), "{error}");
    }
    #[test]
    fn a_path_of_a_missing_file_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        fs::create_dir_all(folder.path().join("hook/src")).unwrap();
        write("hook/src/ring.rs", "");
        write("a.md", "`hook/src` `hook/src/ring.rs` `src/ring.rs` `read/write` `hook/*.rs` `mod.rs`\n");
        check(folder.path()).unwrap();
        write("a.md", "`hook/gone/` `hook/src/gone.rs` `src/gone.rs`\n");
        let error = check(folder.path()).unwrap_err().to_string();
        assert_eq!(error.lines().count(), 4, "{error}");
    }
}
