//! Collects everything that the report shows.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use anyhow::{Result, anyhow, ensure};
use serde_json::{Value, json};
use xpu_timer_proto::{
    env::{HANDED_OVER, Origin, Setting},
    family::{FAMILIES, Family, Library as Layer},
    file, procfs,
    ring::coverage,
    secrets,
};

use super::target::{self, Library, Process, Program, Target};
use crate::{
    collector::{self, NoAnswer},
    config::Config,
    preload,
};

/// The contents of the report.
pub(super) struct Report {
    /// The subject of these settings.
    pub whose: String,
    /// The INI file, if one is named.
    pub ini: Option<String>,
    /// All variables.
    pub settings: Vec<Setting>,
    /// Where the parts are.
    pub parts: Vec<Part>,
    /// The node collector's socket.
    pub socket: PathBuf,
    /// The pid of the node collector, or why it does not answer.
    pub collector: Result<i32, NoAnswer>,
    /// Control port; metrics are on the next one.
    pub port: u16,
    /// The process or program.
    pub target: Option<Hooked>,
    /// The exit plugins.
    pub plugins: Vec<Plugin>,
    /// Variables that are set but have no effect.
    pub without_effect: Vec<String>,
    /// The problems.
    pub problems: Vec<String>,
}

/// The functions that are or would be hooked in a process or program.
pub(super) struct Hooked {
    /// Its title.
    pub title: String,
    /// Whether the hook is, or would be, loaded.
    pub loaded: bool,
    /// The state of the hook as text, with the reason.
    pub summary: String,
    /// The family of its device, if its runtime is loaded.
    pub family: Option<&'static Family>,
    /// Its libraries that have hooked functions.
    pub libraries: Vec<HookedLibrary>,
    /// Further remarks.
    pub notes: Vec<String>,
}

/// A file of `XPU_TIMER_EXIT_HOOK_PLUGIN`.
pub(super) struct Plugin {
    /// Its path.
    pub path: PathBuf,
    /// The functions of the original tool that it defines, or the reason why it cannot be used.
    pub functions: Result<Vec<&'static str>>,
}

impl Plugin {
    /// Reads the file without running it.
    fn of(path: PathBuf) -> Self {
        let functions = Plugin::functions_in(&path);
        Plugin { path, functions }
    }

    fn functions_in(path: &Path) -> Result<Vec<&'static str>> {
        const FUNCTIONS: [&str; 2] = ["xpu_timer_parse_python_exception", "xpu_timer_parse_cpp_exception"];
        let bytes = file::read_within(path)?;
        let text = String::from_utf8_lossy(&bytes);
        let defines = |name: &&str| text.lines().any(|line| line.starts_with(&format!("def {name}(")));
        let found: Vec<&'static str> = FUNCTIONS.into_iter().filter(defines).collect();
        ensure!(!found.is_empty(), "it defines neither {}", FUNCTIONS.join(" nor "));
        Ok(found)
    }
}

/// A library with hooked functions.
pub(super) struct HookedLibrary {
    /// Name of the layer.
    pub layer: &'static str,
    /// The library.
    pub library: Library,
    /// Names of its exported functions that the hook has, or why they are unknown.
    pub functions: Result<Vec<String>>,
}

impl Report {
    /// Collects the report about a target.
    ///
    /// # Errors
    /// The libraries of a program cannot be listed.
    pub(super) fn of(target: &Target) -> Result<Self> {
        let source = target.source();
        let uid = match target {
            Target::Process(process) => procfs::owner(process.pid).unwrap_or_else(|| nix::unistd::geteuid().as_raw()),
            _ => nix::unistd::geteuid().as_raw(),
        };
        let config = Config::of(&source, uid);
        let settings = source.settings().into_iter().map(without_secret).collect();
        let mut problems: Vec<String> = source.problems().iter().map(ToString::to_string).collect();
        let parts = find_parts(&config);
        for part in &parts {
            if let Err(why) = &part.place {
                problems.push(format!("the {} is missing: {why:#}", part.name));
            }
        }
        let plugins: Vec<Plugin> = source.exit_plugins().into_iter().map(Plugin::of).collect();
        for plugin in &plugins {
            if let Err(why) = &plugin.functions {
                problems.push(format!("the exit plugin {} cannot be used: {why:#}", plugin.path.display()));
            }
        }
        let hook = parts.iter().find(|part| part.name == "hook").and_then(|part| part.place.as_deref().ok());
        let (whose, hooked) = match target {
            Target::Here => ("this shell".to_string(), None),
            Target::Process(process) => (format!("process {}", process.pid), Some(in_process(process, &config, hook))),
            Target::Program(program) => ("this shell".to_string(), Some(in_program(program, &config, hook)?)),
        };
        if let Some(hooked) = hooked.as_ref().filter(|hooked| !hooked.loaded) {
            problems.push(format!("{}: {}", hooked.title, hooked.summary));
        }
        Ok(Report {
            whose,
            ini: source.text("XPU_TIMER_CONFIG"),
            settings,
            parts,
            collector: target.as_seen_by(&config.socket, collector::answers),
            socket: config.socket,
            port: source.control_port(),
            target: hooked,
            plugins,
            without_effect: source.without_effect(),
            problems,
        })
    }

    /// As JSON.
    pub(super) fn json(&self) -> Value {
        let origin = |origin| match origin {
            Origin::Environment => "environment",
            Origin::Ini => "ini",
            Origin::Default => "default",
        };
        let setting = |setting: &Setting| {
            json!({
                "name": setting.name,
                "value": setting.value,
                "default": setting.default,
                "origin": origin(setting.origin),
                "meaning": setting.meaning,
                "problem": setting.problem.as_ref().map(ToString::to_string),
            })
        };
        let part = |part: &Part| json!({ "name": part.name, "path": part.place.as_ref().ok(), "problem": problem(&part.place) });
        let plugin = |plugin: &Plugin| json!({ "path": plugin.path, "functions": plugin.functions.as_ref().ok(), "problem": problem(&plugin.functions) });
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "whose": self.whose,
            "ini": self.ini,
            "settings": self.settings.iter().map(setting).collect::<Vec<_>>(),
            "parts": self.parts.iter().map(part).collect::<Vec<_>>(),
            "socket": self.socket,
            "collector_pid": self.collector.as_ref().ok(),
            "control_port": self.port,
            "metrics_port": self.port.checked_add(1),
            "target": self.target.as_ref().map(Hooked::json),
            "exit_plugins": self.plugins.iter().map(plugin).collect::<Vec<_>>(),
            "without_effect": self.without_effect,
            "problems": self.problems,
        })
    }
}

impl Hooked {
    fn json(&self) -> Value {
        let library = |library: &HookedLibrary| {
            json!({
                "layer": library.layer,
                "name": library.library.name,
                "path": library.library.file,
                "functions": library.functions.as_ref().ok(),
                "problem": problem(&library.functions),
            })
        };
        json!({
            "title": self.title,
            "hook": self.loaded,
            "summary": self.summary,
            "family": self.family.map(|family| family.name),
            "libraries": self.libraries.iter().map(library).collect::<Vec<_>>(),
            "notes": self.notes,
        })
    }
}

const HOOK: &str = "libxpu_timer_hook.so";

fn in_process(process: &Process, config: &Config, hook: Option<&Path>) -> Hooked {
    let mapped = process.mapped.iter().find(|path| path.to_string_lossy().contains(HOOK));
    let preload = target::value(&process.environ, "LD_PRELOAD").unwrap_or_default();
    let (loaded, summary) = match mapped {
        Some(path) if config.disabled => (true, format!("the hook is loaded ({}), but XPU_TIMER_DISABLE turns it off", path.display())),
        Some(path) => (true, format!("the hook is loaded: {}", path.display())),
        None if preload.contains(HOOK) => {
            (false, "LD_PRELOAD names the hook, but it is not loaded: the program is statically linked or privileged, or the file \
                     was not there when it started".into())
        }
        None => (false, "the hook is not loaded: the process was not started under xpu_timer_launch".into()),
    };
    let libraries = target::of_process(process);
    let mut hooked = Hooked {
        title: format!("process {} ({})", process.pid, process.command),
        loaded,
        summary,
        family: family_of(&libraries),
        libraries: Vec::new(),
        notes: Vec::new(),
    };
    // The loaded hook decides, even if it differs from the hook that would be found now.
    let own = mapped.map(|path| PathBuf::from(format!("/proc/{}/root{}", process.pid, path.display())));
    hooked.find(&libraries, own.as_deref().filter(|path| path.is_file()).or(hook));
    if hooked.family.is_none() && loaded {
        hooked.notes.push(
            "no device library is loaded; until the first device call the hook has no thread and no memory".into(),
        );
    }
    hooked
}

fn in_program(program: &Program, config: &Config, hook: Option<&Path>) -> Result<Hooked> {
    let (libraries, missing) = target::of_program(program)?;
    let (loaded, summary) = match hook {
        _ if let Some(elsewhere) = &program.elsewhere => (false, elsewhere.advice.clone()),
        _ if let Some(obstacle) = &program.image.obstacle => (false, obstacle.to_string()),
        None => (false, "the hook is missing".into()),
        Some(_) if config.disabled => (true, "XPU_TIMER_DISABLE is set: it would run without xpu_timer".into()),
        Some(hook) => match program.image.refusal_of(hook) {
            Some(refusal) => (false, refusal.to_string()),
            None => (true, format!("under xpu_timer_launch it would run with {}", hook.display())),
        },
    };
    let mut hooked = Hooked {
        title: format!("program {} ({})", program.command, program.image.file.display()),
        loaded,
        summary,
        family: family_of(&libraries),
        libraries: Vec::new(),
        notes: Vec::new(),
    };
    hooked.find(&libraries, hook);
    for name in missing {
        hooked.notes.push(format!("the dynamic loader does not find {name}, which it needs"));
    }
    if hooked.family.is_none() {
        hooked.notes.push(
            "it is not linked to a device library; to see those that it loads at run time, as Python does, use --pid"
                .into(),
        );
    }
    Ok(hooked)
}

impl Hooked {
    /// Finds the libraries with functions that the hook has, and these functions.
    fn find(&mut self, libraries: &[Library], hook: Option<&Path>) {
        let Some(hook) = hook else { return };
        let exports = match target::exported_functions(hook) {
            Ok(exports) => exports,
            Err(error) => return self.notes.push(format!("the hook cannot be read: {error:#}")),
        };
        for layer in Layer::ALL.into_iter().chain([Layer::Mpi]) {
            for library in libraries.iter().filter(|library| belongs(library, layer, self.family)) {
                let functions = target::exported_functions(&library.file);
                let functions = functions.map(|names| names.intersection(&exports).cloned().collect());
                let layer = coverage::LAYERS[usize::from(layer.layer())];
                self.libraries.push(HookedLibrary { layer, library: library.clone(), functions });
            }
        }
        if let Some(family) = self.family.filter(|family| !family.verified) {
            self.notes.push(format!(
                "{}: its functions are hooked as its documentation describes them; no test covers them",
                family.name
            ));
        }
        let names: BTreeSet<&str> = libraries.iter().map(|library| library.name.as_str()).collect();
        if names.iter().any(|name| name.starts_with("libtorch_cpu.so")) {
            self.notes.push("gloo is part of libtorch_cpu.so; the hook finds its methods by their symbols".into());
        }
    }
}

/// Users copy the output into tickets, so it contains no secrets.
fn without_secret(setting: Setting) -> Setting {
    Setting { value: shown(setting.name, &setting.value), ..setting }
}

/// A value without its secrets: the URL of a chat service gives access, and other values may
/// contain a password.
fn shown(name: &str, value: &str) -> String {
    let line = |line: &str| match line.split_once('=') {
        Some((name, value)) => format!("{name}={}", shown(name, value)),
        None => line.into(),
    };
    match name {
        _ if value.is_empty() => String::new(),
        "XPU_TIMER_WEBHOOK" => secrets::host_of(value),
        HANDED_OVER => value.lines().map(line).collect::<Vec<String>>().join("\n"),
        _ => secrets::text(value).into_owned(),
    }
}

/// Whether a library belongs to the layer, in this family or in any.
fn belongs(library: &Library, layer: Layer, family: Option<&Family>) -> bool {
    let of_family = family.map_or(&[][..], |family| family.sonames(layer)).iter().filter_map(|name| name.to_str().ok());
    of_family.chain(layer.host_files().iter().copied()).any(|name| is(library, name))
}

/// The library has this soname, or one with more digits: `libnccl.so.2.29.7`.
fn is(library: &Library, soname: &str) -> bool {
    library.name.strip_prefix(soname).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

fn family_of(libraries: &[Library]) -> Option<&'static Family> {
    let loaded = |soname: &str| libraries.iter().any(|library| is(library, soname));
    FAMILIES.iter().find(|family| family.is_loaded(|soname| soname.to_str().is_ok_and(loaded)))
}

/// A part and its path, or why it has none.
#[derive(Debug)]
pub(super) struct Part {
    /// Its name.
    pub name: &'static str,
    /// Its path.
    pub place: Result<PathBuf>,
}

/// The parts that a job needs, found by the rules with which they find each other. The collector
/// looks for the viewer beside itself.
fn find_parts(config: &Config) -> Vec<Part> {
    let daemon = collector::find(config).and_then(there);
    let beside = |program: &Path| program.with_file_name("xpu_timer_stacktrace_viewer");
    let viewer = match &daemon {
        Ok(daemon) => there(beside(daemon)),
        Err(_) => Err(anyhow!("it belongs beside the collector, which is missing")),
    };
    vec![
        Part { name: "hook", place: preload::find(config) },
        Part { name: "collector", place: daemon },
        Part { name: "viewer", place: viewer },
    ]
}

/// The text of an error, with its sources.
fn problem<T>(result: &Result<T>) -> Option<String> {
    result.as_ref().err().map(|error| format!("{error:#}"))
}

fn there(path: PathBuf) -> Result<PathBuf> {
    ensure!(path.is_file(), "{} does not exist", path.display());
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn libraries(names: &[&str]) -> Vec<Library> {
        names.iter().map(|name| Library { name: name.to_string(), file: name.into() }).collect()
    }

    #[test]
    fn the_family_is_that_of_the_runtime() {
        let family = |names: &[&str]| family_of(&libraries(names)).map(|family| family.name);
        assert_eq!(family(&["libc.so.6", "libcudart.so.13.0.2", "libnccl.so.2"]), Some("NVIDIA CUDA"));
        assert_eq!(family(&["libmcruntime.so", "libmccl.so"]), Some("MetaX MACA"));
        assert_eq!(family(&["libamdhip64.so.6", "librccl.so.1"]), Some("AMD ROCm"));
        assert_eq!(family(&["libmccl.so", "libc.so.6"]), None);
    }

    #[test]
    fn settings_are_shown_without_their_secrets() {
        let value = |name: &'static str, value: &str| {
            let setting = Setting {
                name,
                meaning: "",
                value: value.into(),
                default: "",
                origin: Origin::Environment,
                problem: None,
            };
            without_secret(setting).value
        };
        assert_eq!(value("XPU_TIMER_WEBHOOK", "https://chat.example/services/T0/s3cret"), "https://chat.example/…");
        assert_eq!(value("XPU_TIMER_WEBHOOK", ""), "");
        assert_eq!(value("XPU_TIMER_COLLECTOR", "https://me:s3cret@head:18890"), "https://…@head:18890");
        assert_eq!(value("XPU_TIMER_COLLECTOR_TOKEN_FILE", "/run/token"), "/run/token");
        let ini = "/a.ini\nXPU_TIMER_WEBHOOK=https://chat.example/s3cret\nXPU_TIMER_JOB=j";
        assert_eq!(value(HANDED_OVER, ini), "/a.ini\nXPU_TIMER_WEBHOOK=https://chat.example/…\nXPU_TIMER_JOB=j");
    }

    #[test]
    fn a_library_belongs_to_the_layer_of_its_family() {
        let nccl = &libraries(&["libnccl.so.2.29.7"])[0];
        let nvidia = family_of(&libraries(&["libcuda.so.1"]));
        assert!(belongs(nccl, Layer::Collectives, nvidia));
        assert!(!belongs(nccl, Layer::Runtime, nvidia));
        assert!(!belongs(nccl, Layer::Collectives, None));
        assert!(belongs(&libraries(&["libmpi.so.40"])[0], Layer::Mpi, None));
        assert!(!is(&libraries(&["libnccl.so.20"])[0], "libnccl.so.2"));
    }
}
