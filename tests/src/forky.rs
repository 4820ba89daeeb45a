//! A second Debian (forky) under `target/forky`, with CPython 3.14 and 3.15 and a current PyTorch,
//! for processes with another root.
//!
//! debootstrap sets it up once per tree, which needs root and the machine's Debian mirror. Commands
//! in it run in their own mount and PID namespaces, so that no mount and no process remains.

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use xpu_timer_proto::procfs;

use crate::{
    needs::{finish, remove, set_up},
    pypi::environment,
    tools::{python_version, skip},
};

/// Packages of the small root, besides a minimal Debian.
const PACKAGES: &str = "python3.14,python3.15";

/// The small root, with python3.14 and python3.15; about 330 MB. Sets it up if it does not exist.
///
/// # Errors
/// It cannot be set up; one line.
pub fn forky() -> Result<PathBuf> {
    set_up("forky", |root| {
        ensure!(nix::unistd::geteuid().is_root(), "only root can set it up");
        debootstrap(root)
    })
}

/// The large root, which also has python3-torch; about 1.9 GB. For the benchmark only.
///
/// # Errors
/// It cannot be set up; one line.
pub fn forky_with_torch() -> Result<PathBuf> {
    let small = forky()?;
    set_up("forky-torch", |root| {
        let mut copy = Command::new("cp");
        copy.args(["-a", "--reflink=auto", "--"]).arg(small.join(".")).arg(root);
        finish(&mut copy, "copy of the small root")?;
        // A mirror may be some weeks old; signatures are still checked.
        let install = "apt-get -o Acquire::Check-Valid-Until=false update -qq && \
                       apt-get install -y -qq --no-install-recommends python3-torch && apt-get clean";
        let mut inside = run_in_forky(root, "sh");
        inside.args(["-c", install]).env("DEBIAN_FRONTEND", "noninteractive");
        finish(&mut inside, "python3-torch in the forky root")
    })
}

/// The headers of its CPythons, below `usr/include`; unpacked, not installed.
///
/// # Errors
/// They cannot be obtained; one line.
pub fn forky_headers() -> Result<PathBuf> {
    let small = forky()?;
    set_up("forky-headers", |root| {
        let folder = tempfile::tempdir_in(small.join("tmp"))?;
        let inside = Path::new("/").join(folder.path().strip_prefix(&small)?);
        let fetch = "apt-get -o Acquire::Check-Valid-Until=false update -qq; \
                     apt-get download -qq -o APT::Sandbox::User=root libpython3.14-dev libpython3.15-dev && \
                     for each in *.deb; do dpkg-deb -x $each unpacked; done";
        let mut download = run_in_forky(&small, "sh");
        download.args(["-c", &format!("cd {} && {{ {fetch}; }}", inside.display())]);
        finish(&mut download, "the headers of CPython 3.14 and 3.15")?;
        let mut copy = Command::new("cp");
        copy.args(["-a", "--"]).arg(folder.path().join("unpacked/.")).arg(root);
        finish(&mut copy, "copy of the headers")
    })
}

/// Installs packages from PyPI for a CPython of the second Debian, with a pip of this one. Returns
/// their folder as the programs in the root see it.
///
/// # Errors
/// PyPI is not reachable; one line.
pub fn forky_packages(packages: &[&str], version: &str) -> Result<String> {
    forky()?;
    let name = packages.first().and_then(|first| first.split("==").next()).unwrap_or_default();
    let inside = format!("opt/{name}-{version}");
    set_up(&format!("forky/{inside}"), |folder| {
        let temporary = tempfile::tempdir()?;
        let pip = environment(temporary.path())?;
        let mut install = pip();
        install.args(["--only-binary=:all:", "--python-version", version, "--target"]).arg(folder).args(packages);
        finish(&mut install, &format!("{name} for CPython {version} from PyPI"))
    })?;
    Ok(format!("/{inside}"))
}

/// A free-threaded build of CPython, of a version such as `3.14t`: one of the programs in
/// `XPU_TIMER_TEST_FREE_THREADED`, a list like `PATH`, or an installed one. With
/// `XPU_TIMER_TEST_LONG=1`, one is built if there is none.
#[must_use]
pub fn free_threaded_python(version: &str) -> Option<PathBuf> {
    let listed = env::var_os("XPU_TIMER_TEST_FREE_THREADED").unwrap_or_default();
    let is_of_version = |program: &PathBuf| program.ends_with(format!("python{version}"));
    let found = env::split_paths(&listed).find(is_of_version).or_else(|| python_version(version));
    if found.is_some() || env::var_os("XPU_TIMER_TEST_LONG").is_none() {
        return found;
    }
    built_free_threaded(version).inspect_err(|error| skip(&format!("CPython {version}: {error:#}"))).ok()
}

/// A free-threaded build of CPython, such as `3.14t`, under `target/python3.14t`. It is built from
/// Debian's source in some minutes, because Debian has no package of it.
///
/// # Errors
/// It cannot be built; one line.
fn built_free_threaded(version: &str) -> Result<PathBuf> {
    let small = forky()?;
    let name = format!("python{version}");
    let package = name.trim_end_matches('t');
    let root = set_up(&name, |root| {
        let folder = tempfile::tempdir_in(small.join("tmp"))?;
        let inside = Path::new("/").join(folder.path().strip_prefix(&small)?);
        let fetch = format!(
            "cd {} && sed 's/^deb /deb-src /' /etc/apt/sources.list >list && mkdir -p lists && \
             get() {{ apt-get -qq -o Acquire::Check-Valid-Until=false -o Dir::Etc::SourceList=$PWD/list \
             -o Dir::State::Lists=$PWD/lists -o APT::Sandbox::User=root \"$@\"; }} && \
             get update && get source --download-only {package}",
            inside.display()
        );
        finish(run_in_forky(&small, "sh").args(["-c", &fetch]), &format!("the source of {package}"))?;
        let build = format!(
            "mkdir source && tar xf {package}_*.orig.tar.xz --strip-components=1 -C source && cd source && \
             ./configure -q --disable-gil --disable-test-modules --prefix={} && make -s -j2 && make -s install",
            root.display()
        );
        finish(Command::new("sh").args(["-c", &build]).current_dir(folder.path()), &format!("the build of {name}"))
    })?;
    Ok(root.join("bin").join(name))
}

/// A program of this root of the file system that is one of the CPythons of the second Debian, with
/// the linker and the libraries that it needs.
///
/// # Errors
/// It cannot be set up; one line.
pub fn forky_python(version: &str) -> Result<PathBuf> {
    let root = forky()?;
    let programs = set_up("forky-python", |folder| {
        for name in PACKAGES.split(',') {
            let text = format!(
                "#!/bin/sh\nroot={}\nexport PYTHONHOME=$root/usr\nlibraries=$root/usr/lib/x86_64-linux-gnu\n\
                 exec $root/usr/lib64/ld-linux-x86-64.so.2 --library-path ${{LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}}$libraries \
                 $root/usr/bin/{name} \"$@\"\n",
                root.display()
            );
            let program = folder.join(name);
            fs::write(&program, text)?;
            fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
        }
        Ok(())
    })?;
    Ok(programs.join(format!("python{version}")))
}

/// A command that runs a program in a root, with its own mount and PID namespaces, its own `/proc`,
/// and pid 1. Killing the command's process ends everything inside.
#[must_use]
pub fn run_in_forky(root: &Path, program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]).arg("--root").arg(root);
    command.args(["--wd", "/", "--"]).arg(program);
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", "/")
        .env("LANG", "C.UTF-8");
    command
}

/// The pid of the program that [`run_in_forky`], or another `unshare --fork`, runs: the only child
/// of that process.
///
/// # Errors
/// The child does not exist yet, or has ended.
pub fn only_child(pid: i32) -> Result<i32> {
    let children = procfs::children(pid, 1).unwrap_or_default();
    children.first().copied().with_context(|| format!("process {pid} has no child"))
}

fn debootstrap(root: &Path) -> Result<()> {
    let debootstrap = Path::new("/usr/sbin/debootstrap");
    if !debootstrap.exists() {
        apt_get(&["update", "-qq"])?;
        apt_get(&["install", "-y", "-qq", "--no-install-recommends", "debootstrap"])?;
    }
    // The last argument names the script: a debootstrap older than forky has only that of sid.
    let include = format!("--include={PACKAGES}");
    let mut command = Command::new(debootstrap);
    command.args(["--variant=minbase", &include, "forky"]).arg(root).args([&mirror()?, "sid"]);
    finish(&mut command, "debootstrap")?;
    // Downloaded packages are no longer needed, and other users must be able to enter the root.
    let _ = remove(&root.join("var/cache/apt/archives"));
    fs::create_dir_all(root.join("var/cache/apt/archives/partial"))?;
    fs::set_permissions(root, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    Ok(())
}

/// The first Debian mirror in the machine's apt sources, which have two formats.
fn mirror() -> Result<String> {
    let mut sources = vec![PathBuf::from("/etc/apt/sources.list")];
    sources.extend(fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|entry| entry.path()));
    sources[1..].sort();
    let texts = sources.iter().filter_map(|path| fs::read_to_string(path).ok());
    texts.filter_map(|text| mirror_in(&text)).next().context("no Debian mirror in /etc/apt/sources.list*")
}

fn mirror_in(text: &str) -> Option<String> {
    let lines = text.lines().map(str::trim).filter(|line| line.starts_with("URIs:") || line.starts_with("deb "));
    let mut words = lines.flat_map(str::split_whitespace);
    words.find(|word| word.contains("://") && word.trim_end_matches('/').ends_with("/debian")).map(str::to_string)
}

/// Runs `apt-get` of this machine, and waits for another running one.
///
/// # Errors
/// What failed and the most informative line of the output; one line.
pub fn apt_get(arguments: &[&str]) -> Result<()> {
    ensure!(nix::unistd::geteuid().is_root(), "only root can run: apt-get {}", arguments.join(" "));
    let mut command = Command::new("apt-get");
    command.args(["-o", "DPkg::Lock::Timeout=300"]).args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
    finish(&mut command, &format!("apt-get {}", arguments.join(" ")))
}

#[cfg(test)]
mod tests {
    use super::mirror_in;

    #[test]
    fn mirrors_in_both_formats() {
        let deb822 =
            "Types: deb\n# http://snapshot.debian.org/archive/debian/2025/\nURIs: http://deb.debian.org/debian\n";
        assert_eq!(mirror_in(deb822).as_deref(), Some("http://deb.debian.org/debian"));
        let line = "# deb http://old/debian x\ndeb [signed-by=/a] http://mirror.example/debian/ bookworm main\n";
        assert_eq!(mirror_in(line).as_deref(), Some("http://mirror.example/debian/"));
        assert_eq!(mirror_in("deb https://packages.cloud.google.com/apt cloud-sdk-bookworm main"), None);
    }
}
