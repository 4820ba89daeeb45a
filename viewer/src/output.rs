//! Where the viewer writes to: the terminal, and files, which it writes atomically: a reader never
//! sees a partial file.

use std::fs::Permissions;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// What stdout can show: its width and whether it understands colours. The default is plain text of
/// any width.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Terminal {
    /// Columns; `None` for lines of any length.
    pub width: Option<usize>,
    /// Whether the terminal understands escape sequences for colours.
    pub colour: bool,
}

/// Writes a file under a temporary name and renames it. Returns its path.
pub fn write_file(
    folder: &Path,
    name: &str,
    fill: impl FnOnce(&mut BufWriter<&mut std::fs::File>) -> io::Result<()>,
) -> io::Result<PathBuf> {
    let mut file = tempfile::Builder::new()
        .prefix(&format!(".{name}."))
        .suffix(".tmp")
        // The umask, which comes from XPU_TIMER_FILE_MODE, restricts this mode.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder)?;
    let mut writer = BufWriter::with_capacity(1 << 16, file.as_file_mut());
    fill(&mut writer)?;
    writer.flush()?;
    drop(writer);
    let path = folder.join(name);
    file.persist(&path).map_err(|error| error.error)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_failure_leaves_the_old_file_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        write_file(dir.path(), "x", |out| out.write_all(b"old")).unwrap();
        write_file(dir.path(), "x", |out| {
            out.write_all(b"half")?;
            Err(io::Error::other("disk full"))
        })
        .unwrap_err();
        assert_eq!(fs::read(dir.path().join("x")).unwrap(), b"old");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        write_file(dir.path(), "x", |out| out.write_all(b"new")).unwrap();
        assert_eq!(fs::read(dir.path().join("x")).unwrap(), b"new");
        let mode = fs::metadata(dir.path().join("x")).unwrap().permissions().mode();
        assert_eq!(mode & 0o400, 0o400);
        assert_eq!(mode & 0o111, 0);
    }
}
