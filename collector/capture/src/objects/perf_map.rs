//! Names of code that a process generated at run time, from `/tmp/perf-PID.map`, a file for `perf`
//! with a line of start, size and name for each function. CPython (`-X perf`), Java agents, V8 and
//! LLVM write it on request.

use std::{
    io::Read,
    ops::Range,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use xpu_timer_proto::procfs;

use super::target_files;

/// The rest of a longer file is not read.
const MAX_BYTES: u64 = 32 << 20;

/// The map of one process.
#[derive(Default)]
pub(crate) struct PerfMap {
    text: String,
    /// Addresses of each function, and the range of its name in `text`.
    functions: Vec<(Range<u64>, Range<usize>)>,
}

impl PerfMap {
    /// Reads the map that a process has written; empty if there is none.
    pub(crate) fn of(pid: i32) -> Self {
        Self::read(pid).unwrap_or_default()
    }

    fn read(pid: i32) -> Option<Self> {
        let status = procfs::status(pid, pid).ok()?;
        // The process writes to the `/tmp` of its own mount namespace, under its pid in its own PID
        // namespace.
        let root = PathBuf::from(format!("/proc/{pid}/root"));
        let path = format!("/tmp/perf-{}.map", status.namespaced_tid);
        let file = target_files::open_within(&root, Path::new(&path))?;
        // Everybody can write to /tmp. Ignore a file of another user.
        if file.metadata().ok()?.uid() != status.uid {
            return None;
        }
        let mut bytes = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
        Some(Self::parse(String::from_utf8_lossy(&bytes).into_owned()))
    }

    pub(crate) fn parse(text: String) -> Self {
        let mut functions = Vec::new();
        let mut begin = 0;
        for entry in text.split_inclusive('\n') {
            let end = begin + entry.len();
            let function = || {
                // A line without a line feed is still being written.
                let entry = entry.strip_suffix('\n')?;
                let entry = entry.strip_suffix('\r').unwrap_or(entry);
                let mut fields = entry.splitn(3, ' ');
                let mut number = || u64::from_str_radix(fields.next()?.trim_start_matches("0x"), 16).ok();
                let (start, size) = (number()?, number()?);
                let name = fields.next().filter(|name| !name.is_empty())?;
                let end = begin + entry.len();
                Some((start..start.checked_add(size)?, end - name.len()..end))
            };
            functions.extend(function());
            begin = end;
        }
        PerfMap { text, functions }
    }

    /// The start and the name of each function.
    #[cfg(feature = "fuzz")]
    pub(crate) fn functions(&self) -> impl Iterator<Item = (u64, &str)> {
        self.functions.iter().map(|(addresses, name)| (addresses.start, &self.text[name.clone()]))
    }

    /// The name of the function at an address. Memory may be reused, so the last line for an
    /// address counts.
    pub(crate) fn find(&self, address: u64) -> Option<&str> {
        let (_, name) = self.entry(address)?;
        self.text.get(name.clone())
    }

    /// The range of the function at an address.
    pub(crate) fn function(&self, address: u64) -> Option<Range<u64>> {
        self.entry(address).map(|(addresses, _)| addresses.clone())
    }

    fn entry(&self, address: u64) -> Option<&(Range<u64>, Range<usize>)> {
        self.functions.iter().rev().find(|(addresses, _)| addresses.contains(&address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_line_wins_and_incomplete_line_is_ignored() {
        let text = "7f00 10 first of two\n0x7f10 0x10 second\r\n7f00 8 again\nnonsense\n7f20 zz x\n\n7f30 10 \n\
            7f50 10 \r\n7f40 10 tor";
        let map = PerfMap::parse(text.into());
        assert_eq!(map.find(0x7f00), Some("again"));
        assert_eq!(map.find(0x7f08), Some("first of two"));
        assert_eq!(map.find(0x7f1f), Some("second"));
        for address in [0x7eff, 0x7f20, 0x7f30, 0x7f40, 0x7f50, u64::MAX] {
            assert_eq!(map.find(address), None, "{address:#x}");
        }
    }

    #[test]
    fn reads_the_map_of_this_process() {
        let pid = std::process::id() as i32;
        let path = format!("/tmp/perf-{pid}.map");
        std::fs::write(&path, "1000 10 made at run time\n").unwrap();
        let map = PerfMap::of(pid);
        std::fs::remove_file(&path).unwrap();
        assert_eq!(map.find(0x1008), Some("made at run time"));
        assert_eq!(PerfMap::of(i32::MAX).find(0x1008), None);
    }
}
