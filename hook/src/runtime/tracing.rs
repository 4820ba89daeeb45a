//! Traces chosen Python functions from inside, and garbage collections, where the user asks for it
//! with `XPU_TIMER_HOST_TRACING_FUNC`. With this variable or an exit plugin, it also keeps the
//! exceptions that nobody catches. Without both, nothing here runs.
//!
//! The watcher finds the interpreter and adds a pending call. The main thread of the program
//! executes it between two instructions, with the GIL, and registers native functions: with
//! `sys.monitoring` for events on the code of the listed functions alone, or before CPython 3.12 as
//! the pointers through which these functions are called, and in `gc.callbacks`. Functions of
//! modules that are imported later are found when `importlib` has loaded a module: the hook traces
//! the function that loads it, so there is no import hook.
//!
//! Architecture Invariant: the interpreter never sees a failure of this code, and runs only native
//! functions of it.

pub(crate) mod callbacks;
pub(crate) mod interpreter;
pub(crate) mod uncaught;
pub(crate) mod vectorcall;

use std::{
    ffi::{CStr, CString, c_int, c_long, c_void},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicI64, AtomicPtr, AtomicU32, Ordering},
    },
};

use xpu_timer_proto::ring::span;

use crate::runtime::{
    lifecycle::{exit, panics::guarded},
    os::{
        clock,
        sections::in_watcher_unless_filtered,
        sys,
        thread_state::{self, in_hook},
    },
    recorder::Recorder,
    tracing::{
        callbacks::{CODES, in_callback},
        interpreter::{API, Api, Method, Owned, Reference},
        vectorcall::Functions,
    },
};

/// The variable, for messages.
pub(crate) const VARIABLE: &str = "XPU_TIMER_HOST_TRACING_FUNC";

/// Name of the garbage collections among the functions.
const COLLECTIONS: &str = "GC";

/// The functions that the original tool traces besides those of the variable.
const DEFAULTS: [&str; 12] = [
    COLLECTIONS,
    "torch.utils.data.dataloader@_BaseDataLoaderIter@__next__",
    "torch@cuda@synchronize",
    "torch.cuda@Event@synchronize",
    "torch.cuda@Event@wait",
    "torch.cuda@Stream@synchronize",
    "torch.cuda@Stream@wait_event",
    "torch.cuda@Stream@wait_stream",
    "torch@autograd@backward",
    "torch@autograd@grad",
    "megatron.core.pipeline_parallel@schedules@forward_step",
    "megatron.core.pipeline_parallel@schedules@backward_step",
];

/// A function of the list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// As the user wrote it.
    name: String,
    /// The module to look in.
    module: CString,
    /// The names from the module to the function. Empty for garbage collections.
    path: Vec<CString>,
    /// The user listed it; else it is one of [`DEFAULTS`].
    is_wanted: bool,
}

impl Target {
    /// `module@Class@function`, `module@function`, `module.function`, or `function` for one of the
    /// program's main file.
    fn parse(name: &str, is_wanted: bool) -> Option<Self> {
        let is_identifier = |part: &str| {
            !part.is_empty()
                && !part.starts_with(|letter: char| letter.is_ascii_digit())
                && part.chars().all(|letter| letter.is_alphanumeric() || letter == '_')
        };
        let mut parts: Vec<&str> = name.split('@').collect();
        let module = match parts[..] {
            [_] if name == COLLECTIONS => {
                parts.clear();
                ""
            }
            [one] => match one.rsplit_once('.') {
                Some((module, function)) => {
                    parts = vec![function];
                    module
                }
                None => "__main__",
            },
            _ => parts.remove(0),
        };
        let is_valid =
            parts.iter().all(|part| is_identifier(part)) && (parts.is_empty() || module.split('.').all(is_identifier));
        let text = |part: &str| CString::new(part).ok();
        is_valid.then_some(Target {
            name: name.to_string(),
            module: text(module)?,
            path: parts.into_iter().map(text).collect::<Option<_>>()?,
            is_wanted,
        })
    }
}

/// The functions to trace, and a message about each value that cannot be used. No functions if the
/// variable is empty.
#[must_use]
pub(crate) fn parse(value: &str) -> (Vec<Target>, Vec<String>) {
    let (mut targets, mut problems) = (Vec::new(), Vec::new());
    let wanted = value.split(',').map(str::trim).filter(|name| !name.is_empty());
    for name in wanted {
        match Target::parse(name, true) {
            Some(_) if targets.len() >= span::function::SLOTS - DEFAULTS.len() => {
                problems.push(format!("{VARIABLE}: {name:?} is not traced: there are too many functions"));
            }
            Some(target) if targets.iter().all(|other: &Target| other.name != target.name) => targets.push(target),
            Some(_) => {}
            None => problems.push(format!(
                "{VARIABLE}: {name:?} cannot be used; a function is module@function or module@Class@function"
            )),
        }
    }
    if !targets.is_empty() {
        let defaults = DEFAULTS.iter().filter_map(|name| Target::parse(name, false));
        let new: Vec<Target> = defaults.filter(|one| targets.iter().all(|other| other.name != one.name)).collect();
        targets.extend(new);
    }
    (targets, problems)
}

/// How far the tracing of this process is. A forked child inherits it with the interpreter.
static STAGE: AtomicU32 = AtomicU32::new(IDLE);
const IDLE: u32 = 0;
/// The pending call was added.
const ADDED: u32 = 1;
/// The native functions are registered.
const INSTALLED: u32 = 2;
/// There is nothing to do any more.
const OVER: u32 = 3;

/// The interpreter is about to end.
static IS_ENDING: AtomicBool = AtomicBool::new(false);
/// The watcher is adding a pending call.
static IS_ADDING: AtomicBool = AtomicBool::new(false);

static STATE: Mutex<State> = Mutex::new(State::new());
static NONE: AtomicPtr<interpreter::PyObject> = AtomicPtr::new(std::ptr::null_mut());
/// Index of the garbage collections, -1 if they are not traced.
static COLLECTIONS_INDEX: AtomicI64 = AtomicI64::new(-1);

/// The state that the watcher and the callbacks share. Neither waits for the other.
struct State {
    targets: Vec<(Target, Progress)>,
    exceptions: uncaught::Listener,
    /// `None` before the installation, and if functions cannot be traced.
    way: Option<Way>,
    /// Lines for the log.
    messages: Vec<String>,
}

/// How the hook sees the calls of a function.
enum Way {
    /// CPython 3.12 and newer.
    Events(Monitoring),
    /// CPython 3.8 to 3.11.
    Pointers(Functions),
}

/// The hook among the tools of `sys.monitoring`.
struct Monitoring {
    tool: i64,
    /// The events of a traced function.
    events: i64,
    /// The events that exist only for all functions together, until they are enabled with the first
    /// traced function; 0 for none.
    of_all: i64,
}

/// The tracing state of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Its module is not imported.
    NoModule,
    /// Its module has no such name.
    Absent,
    /// It is not a Python function.
    Native,
    /// Its call only creates a generator or a coroutine, and nothing shows when that one runs.
    Generator,
    /// It is traced, or another name of a function that is.
    Traced,
}

impl State {
    const fn new() -> Self {
        State { targets: Vec::new(), exceptions: uncaught::Listener::new(), way: None, messages: Vec::new() }
    }
}

/// The part of the watcher.
pub(crate) struct Tracing {
    is_on: bool,
    /// Whether functions are traced; else only exceptions are kept.
    has_targets: bool,
    begun_ns: u64,
    /// Number of pending calls so far.
    calls: usize,
    has_reported: bool,
}

/// When the list is looked through again, after the start: functions of the main file appear
/// without an import. The last time is also when the missing functions are reported.
const LOOKS_NS: [u64; 4] = [0, 500_000_000, 2_000_000_000, 8_000_000_000];
/// A process without an interpreter gets none later.
const PATIENCE_NS: u64 = 30_000_000_000;

impl Tracing {
    /// Traces these functions. Keeps uncaught exceptions if there is a function or a plugin wants
    /// them.
    pub(crate) fn new(recorder: &Recorder, targets: Vec<Target>, wants_exceptions: bool) -> Self {
        let has_targets = !targets.is_empty();
        let is_on = has_targets || wants_exceptions;
        if is_on && let Ok(mut state) = STATE.try_lock() {
            if STAGE.load(Ordering::Acquire) < INSTALLED {
                // In a forked child, the interpreter has lost what the parent added.
                STAGE.store(IDLE, Ordering::Release);
                state.targets = targets.into_iter().map(|target| (target, Progress::NoModule)).collect();
            }
            recorder.name_traced_functions(state.targets.iter().map(|(target, _)| target.name.as_str()));
        }
        Tracing { is_on, has_targets, begun_ns: clock::now_ns(), calls: 0, has_reported: false }
    }

    /// A turn of the watcher. Returns lines for the log. `is_last` is whether the process ends.
    pub(crate) fn turn(&mut self, is_last: bool) -> Vec<String> {
        if !self.is_on || STAGE.load(Ordering::Acquire) == OVER {
            return Vec::new();
        }
        let now_ns = clock::now_ns();
        let age_ns = now_ns.saturating_sub(self.begun_ns);
        let mut messages = Vec::new();
        match API.get() {
            _ if is_last => {}
            Some(api) => self.add_call(api, age_ns),
            None => match in_watcher_unless_filtered(interpreter::find).flatten() {
                Some(api) if api.version() < (3, 8) => {
                    let (major, minor) = api.version();
                    self.is_on = false;
                    let text = || format!("{VARIABLE} needs CPython 3.8 or newer, and this is {major}.{minor}");
                    messages.extend(self.has_targets.then(text));
                }
                Some(api) => _ = API.get_or_init(|| api),
                None if age_ns > PATIENCE_NS => {
                    self.is_on = false;
                    let reason = "this process has no Python, or one whose functions are not exported";
                    messages.extend(self.has_targets.then(|| format!("{VARIABLE} has no effect: {reason}")));
                }
                None => {}
            },
        }
        let is_time = is_last || age_ns > LOOKS_NS[LOOKS_NS.len() - 1] + 1_000_000_000;
        if let Ok(mut state) = STATE.try_lock() {
            messages.append(&mut state.messages);
            if is_time && !self.has_reported && self.is_on && STAGE.load(Ordering::Acquire) == INSTALLED {
                self.has_reported = true;
                messages.extend(state.missing());
            }
        }
        messages
    }

    /// Adds a pending call if it is time for one. CPython 3.12 executes it when the main thread
    /// takes the GIL the next time, later versions at once.
    fn add_call(&mut self, api: &'static Api, age_ns: u64) {
        let is_due = LOOKS_NS.get(self.calls).is_some_and(|due_ns| age_ns >= *due_ns);
        // The first call must have run, so that no more than one is in the queue.
        if !is_due || STAGE.load(Ordering::Acquire) == ADDED || exit::is_ending() {
            return;
        }
        IS_ADDING.store(true, Ordering::SeqCst);
        if !IS_ENDING.load(Ordering::SeqCst) && api.accepts_calls() {
            let _ = STAGE.compare_exchange(IDLE, ADDED, Ordering::AcqRel, Ordering::Relaxed);
            // SAFETY: any thread may call it while the interpreter runs: its end waits for this
            // thread, see `interpreter_ends`.
            match unsafe { (api.add_pending)(pending, std::ptr::null_mut()) } {
                0 => self.calls += 1,
                _ => _ = STAGE.compare_exchange(ADDED, IDLE, Ordering::AcqRel, Ordering::Relaxed),
            }
        }
        IS_ADDING.store(false, Ordering::SeqCst);
    }
}

impl State {
    /// A line that names the functions of the user that are not traced.
    fn missing(&self) -> Option<String> {
        self.way.as_ref()?;
        let named = |progress: Progress, reason: &str| {
            let of_kind = self.targets.iter().filter(|(target, found)| *found == progress && target.is_wanted);
            let names: Vec<&str> = of_kind.map(|(target, _)| target.name.as_str()).collect();
            (!names.is_empty()).then(|| format!("{} ({reason})", names.join(", ")))
        };
        let parts = [
            named(Progress::Absent, "does not exist"),
            named(Progress::NoModule, "its module is not imported"),
            named(Progress::Native, "no Python function"),
            named(Progress::Generator, "a generator or coroutine, which needs CPython 3.12"),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        (!parts.is_empty()).then(|| format!("{VARIABLE}: not traced: {}", parts.join("; ")))
    }
}

/// The main thread of the program runs this with the GIL.
unsafe extern "C" fn pending(_: *mut c_void) -> c_int {
    in_callback(|| {
        in_hook(|| {
            let api = API.get().filter(|api| !api.has_exception());
            let (Some(api), Ok(mut state)) = (api, STATE.try_lock()) else {
                // The watcher adds another call later.
                let _ = STAGE.compare_exchange(ADDED, IDLE, Ordering::AcqRel, Ordering::Relaxed);
                return;
            };
            if STAGE.load(Ordering::Acquire) < INSTALLED {
                let is_installed = guarded(|| install(api, &mut state)).flatten().is_some();
                STAGE.store(if is_installed { INSTALLED } else { OVER }, Ordering::Release);
            }
            if STAGE.load(Ordering::Acquire) == INSTALLED {
                resolve(api, &mut state);
            }
        });
    });
    0
}

/// Registers the native functions. `None` if that is not possible; then the log says why.
fn install(api: &'static Api, state: &mut State) -> Option<()> {
    NONE.store(api.none(), Ordering::Release);
    state.exceptions.listen(api);
    if let Some(index) = state.targets.iter().position(|(target, _)| target.path.is_empty()) {
        let callbacks = api.builtin_module(c"gc").and_then(|gc| api.attribute(&gc, c"callbacks"));
        let added = callbacks.and_then(|list| api.call(&list, c"append", &[&api.of_native(&ON_COLLECTION)?]));
        if added.is_some() {
            COLLECTIONS_INDEX.store(index as i64, Ordering::Release);
            state.targets[index].1 = Progress::Traced;
        }
    }
    let at_exit = api.builtin_module(c"atexit")?;
    api.call(&at_exit, c"register", &[&api.of_native(&ON_END)?])?;
    if state.targets.is_empty() {
        return Some(());
    }
    // The function that loads modules shows when others appear.
    let loader = api.attribute(&api.loaded_module(c"_frozen_importlib")?, c"_find_and_load")?;
    let way = if api.version() < (3, 12) {
        Functions::new(api, &loader).map(|functions| {
            functions.replace(loader, load);
            Way::Pointers(functions)
        })
    } else {
        Monitoring::register(api, &loader)?.map(Way::Events)
    };
    match way {
        Ok(way) => state.way = Some(way),
        Err(reason) => state.messages.push(format!("{VARIABLE}: functions are not traced: {reason}")),
    }
    Some(())
}

impl Monitoring {
    /// Registers the native functions, and listens to the end of `loader`. `None` if the
    /// interpreter fails.
    fn register(api: &'static Api, loader: &Owned) -> Option<Result<Self, &'static str>> {
        let monitoring = api.system(c"monitoring")?;
        let name = api.of_text(c"xpu_timer")?;
        // 0, 1 and 2 are those of debuggers, coverage tools and profilers, which a program may
        // start later.
        let tool = [4, 3, 5].into_iter().find(|tool| {
            api.of_number(*tool).is_some_and(|tool| api.call(&monitoring, c"use_tool_id", &[&tool, &name]).is_some())
        });
        let Some(tool) = tool else { return Some(Err("no tool id of sys.monitoring is free")) };
        let events = api.attribute(&monitoring, c"events")?;
        let number = api.of_number(tool)?;
        let register = |event, method: &'static Method| {
            let event = api.number(&events, event)?;
            let function = api.of_native(method)?;
            api.call(&monitoring, c"register_callback", &[&number, &api.of_number(event)?, &function])?;
            Some(event)
        };
        let all = [
            (c"PY_START", &ON_BEGIN),
            (c"PY_RESUME", &ON_BEGIN),
            (c"PY_RETURN", &ON_END_OF_CALL),
            (c"PY_YIELD", &ON_END_OF_CALL),
        ];
        let all = all.into_iter().try_fold(0, |all, (event, method)| Some(all | register(event, method)?))?;
        let of_exceptions = register(c"PY_UNWIND", &ON_END_OF_CALL)? | register(c"PY_THROW", &ON_THROW)?;
        let has_local = api.version() >= (3, 15);
        let registered = Monitoring {
            tool,
            events: if has_local { all | of_exceptions } else { all },
            of_all: if has_local { 0 } else { of_exceptions },
        };
        let code = api.attribute(loader, c"__code__")?;
        LOADER.store(code.0, Ordering::Release);
        registered.set_events(api, c"set_local_events", &[&code], api.number(&events, c"PY_RETURN")?)?;
        code.leak();
        Some(Ok(registered))
    }

    /// Sets the events of all functions, or of one.
    fn set_events(&self, api: &'static Api, method: &CStr, code: &[&Owned], events: i64) -> Option<()> {
        let monitoring = api.system(c"monitoring")?;
        let (tool, events) = (api.of_number(self.tool)?, api.of_number(events)?);
        let arguments: Vec<&Owned> = [&tool].into_iter().chain(code.iter().copied()).chain([&events]).collect();
        api.call(&monitoring, method, &arguments).map(drop)
    }

    /// Traces a function.
    fn trace(&mut self, api: &'static Api, function: &Owned, index: usize) -> Option<()> {
        let code = api.attribute(function, c"__code__")?;
        let of_all = std::mem::take(&mut self.of_all);
        if of_all != 0 {
            self.set_events(api, c"set_events", &[], of_all);
        }
        if CODES.add(code.0 as usize, index) {
            self.set_events(api, c"set_local_events", &[&code], self.events);
            code.leak();
        }
        Some(())
    }
}

impl Way {
    /// Traces a function.
    fn trace(&mut self, api: &'static Api, function: Owned, index: usize) -> Progress {
        /// `CO_GENERATOR`, `CO_COROUTINE` and `CO_ASYNC_GENERATOR`.
        const IS_GENERATOR: c_long = 0x20 | 0x80 | 0x200;
        match self {
            Way::Events(monitoring) => {
                monitoring.trace(api, &function, index).map_or(Progress::Native, |()| Progress::Traced)
            }
            Way::Pointers(functions) => {
                let flags = api.attribute(&function, c"__code__").and_then(|code| api.number(&code, c"co_flags"));
                match flags {
                    Some(flags) if functions.can_trace(&function) => {
                        if flags & IS_GENERATOR != 0 {
                            return Progress::Generator;
                        }
                        if CODES.add(function.0 as usize, index) {
                            functions.trace(function);
                        }
                        Progress::Traced
                    }
                    _ => Progress::Native,
                }
            }
        }
    }
}

/// The code object of the function that loads modules.
static LOADER: AtomicPtr<interpreter::PyObject> = AtomicPtr::new(std::ptr::null_mut());

/// Looks for the functions that are not traced yet.
fn resolve(api: &'static Api, state: &mut State) {
    state.exceptions.listen(api);
    let State { targets, way: Some(way), .. } = state else { return };
    for (index, (target, progress)) in targets.iter_mut().enumerate() {
        if matches!(progress, Progress::Traced | Progress::Native | Progress::Generator) {
            continue;
        }
        let Some(module) = api.loaded_module(&target.module) else { continue };
        *progress = match find(api, module, &target.path).map(|found| function_of(api, found, 0)) {
            None => Progress::Absent,
            Some(None) => Progress::Native,
            Some(Some(function)) => way.trace(api, function, index),
        };
    }
}

/// Follows names from a module. It reads only dictionaries, so no code of the program runs, such as
/// that of a module that imports its parts when they are used.
fn find(api: &'static Api, module: Owned, path: &[CString]) -> Option<Owned> {
    path.iter().try_fold(module, |object, name| {
        if !api.is_class(&object) {
            return api.item(&api.attribute(&object, c"__dict__")?, name);
        }
        let bases = api.attribute(&object, c"__mro__")?;
        api.items(&bases).find_map(|base| api.item(&api.attribute(&base, c"__dict__")?, name))
    })
}

/// Maximum number of decorated functions to follow.
const MOST_WRAPPERS: usize = 16;

/// A function, or the function that it decorates: the code of a decorator is shared by all
/// functions that it decorates. `None` if it is not a Python function.
fn function_of(api: &'static Api, function: Owned, depth: usize) -> Option<Owned> {
    if depth > MOST_WRAPPERS {
        return None;
    }
    let inner = |of: &Owned, name| function_of(api, api.attribute(of, name)?, depth + 1);
    match api.class_name(&function)?.as_str() {
        "function" => {
            let is_decorator = api.item(&api.attribute(&function, c"__dict__")?, c"__wrapped__").is_some();
            let decorated = if is_decorator { inner(&function, c"__wrapped__") } else { None };
            decorated.or(Some(function))
        }
        "staticmethod" | "classmethod" | "method" => inner(&function, c"__func__"),
        "property" => inner(&function, c"fget"),
        "partial" => inner(&function, c"func"),
        "_lru_cache_wrapper" => inner(&function, c"__wrapped__"),
        _ => None,
    }
}

static ON_BEGIN: Method = Method::new(c"xpu_timer_call_begins", on_begin);
static ON_THROW: Method = Method::new(c"xpu_timer_call_continues", on_throw);
static ON_END_OF_CALL: Method = Method::new(c"xpu_timer_call_ends", on_end_of_call);
static ON_COLLECTION: Method = Method::new(c"xpu_timer_collection", on_collection);
static ON_END: Method = Method::new(c"xpu_timer_interpreter_ends", interpreter_ends);

/// The result of a callback of `sys.monitoring`. CPython 3.12 does not count references to it.
#[inline]
fn none() -> Reference {
    NONE.load(Ordering::Relaxed)
}

/// The result of a callback of any version: a new reference.
fn counted_none() -> Reference {
    if let Some(api) = API.get() {
        // SAFETY: the interpreter calls, and the hook holds a reference.
        unsafe { (api.keep)(none()) };
    }
    none()
}

/// The first argument of an event: the code object. Null if there is none.
///
/// # Safety
/// `count` is the number of arguments that the interpreter passes.
#[inline]
unsafe fn first(arguments: *const Reference, count: isize) -> Reference {
    // SAFETY: the caller's promise.
    if count > 0 { unsafe { *arguments } } else { std::ptr::null_mut() }
}

unsafe extern "C" fn on_begin(_: Reference, arguments: *const Reference, count: isize) -> Reference {
    // SAFETY: called by the interpreter.
    let code = unsafe { first(arguments, count) };
    in_callback(|| callbacks::began(code));
    none()
}

unsafe extern "C" fn on_throw(_: Reference, arguments: *const Reference, count: isize) -> Reference {
    // SAFETY: called by the interpreter.
    let code = unsafe { first(arguments, count) };
    in_callback(|| callbacks::thrown_into(code));
    none()
}

unsafe extern "C" fn on_end_of_call(_: Reference, arguments: *const Reference, count: isize) -> Reference {
    // SAFETY: called by the interpreter.
    let code = unsafe { first(arguments, count) };
    in_callback(|| if code == LOADER.load(Ordering::Relaxed) { module_loaded() } else { callbacks::ended(code) });
    none()
}

/// The function that loads modules, before CPython 3.12.
unsafe extern "C-unwind" fn load(
    loader: Reference,
    arguments: *const Reference,
    count: usize,
    names: Reference,
) -> Reference {
    // SAFETY: called by the interpreter.
    let module = unsafe { vectorcall::original(loader, arguments, count, names) };
    in_callback(module_loaded);
    module
}

/// A module was loaded, with all that it imports.
#[cold]
fn module_loaded() {
    in_hook(|| {
        if let Some(api) = API.get().filter(|api| !api.has_exception())
            && let Ok(mut state) = STATE.try_lock()
        {
            resolve(api, &mut state);
        }
    });
}

/// An entry of `gc.callbacks`: a phase, and a dictionary.
unsafe extern "C" fn on_collection(_: Reference, arguments: *const Reference, count: isize) -> Reference {
    in_callback(|| {
        let Some(api) = API.get().filter(|_| count >= 2) else { return };
        // SAFETY: there are two arguments.
        let (phase, info) = unsafe { (*arguments, *arguments.add(1)) };
        let index = COLLECTIONS_INDEX.load(Ordering::Acquire);
        match api.text_of(phase) {
            Some("start") => callbacks::collection_began(),
            Some("stop") if index >= 0 => {
                let number = |key| api.number_in(info, key).and_then(|number| u32::try_from(number).ok()).unwrap_or(0);
                let (collected, uncollectable) = (number(c"collected"), number(c"uncollectable"));
                callbacks::collection_ended(index as usize, number(c"generation").into(), collected, uncollectable);
            }
            _ => {}
        }
    });
    counted_none()
}

/// How long the end of the interpreter waits for the watcher.
const ADDING_TIMEOUT_NS: u64 = 20_000_000;

/// An exit handler of the interpreter. From now on the watcher adds no pending call: the
/// interpreter may be gone when it does.
unsafe extern "C" fn interpreter_ends(_: Reference, _: *const Reference, _: isize) -> Reference {
    IS_ENDING.store(true, Ordering::SeqCst);
    // The watcher takes a lock of the interpreter for some nanoseconds, but may lose its processor.
    let thread = thread_state::current();
    let deadline = clock::burst_now_ns(thread) + ADDING_TIMEOUT_NS;
    while IS_ADDING.load(Ordering::SeqCst) && clock::burst_now_ns(thread) < deadline {
        sys::relax();
    }
    counted_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forms_of_the_original_tool_are_understood() {
        let (targets, problems) = parse(" a.b@C@f , a.b@f,,main, torch.distributed.all_gather,GC,a.b@f");
        assert_eq!(problems, [""; 0]);
        let parts = |target: &Target| {
            let path: Vec<&str> = target.path.iter().map(|part| part.to_str().unwrap()).collect();
            format!("{} {}", target.module.to_str().unwrap(), path.join(" "))
        };
        let read: Vec<String> = targets.iter().map(parts).collect();
        assert_eq!(read[..5], ["a.b C f", "a.b f", "__main__ main", "torch.distributed all_gather", " "]);
        assert_eq!((targets.len(), read[6].as_str()), (5 + DEFAULTS.len() - 1, "torch cuda synchronize"));
        assert_eq!(parse(" , "), (Vec::new(), Vec::new()), "nothing is wanted");
    }

    #[test]
    fn the_end_of_the_interpreter_waits_for_a_slow_watcher_but_not_for_ever() {
        let ends = || {
            let began = std::time::Instant::now();
            // SAFETY: it looks at no argument.
            unsafe { interpreter_ends(std::ptr::null_mut(), std::ptr::null(), 0) };
            began.elapsed()
        };
        IS_ADDING.store(true, Ordering::SeqCst);
        let waited = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(5));
                IS_ADDING.store(false, Ordering::SeqCst);
            });
            ends()
        });
        assert!(waited.as_millis() >= 4, "{waited:?}");
        IS_ADDING.store(true, Ordering::SeqCst);
        assert!(ends().as_nanos() as u64 >= ADDING_TIMEOUT_NS);
        IS_ADDING.store(false, Ordering::SeqCst);
        IS_ENDING.store(false, Ordering::SeqCst);
    }

    #[test]
    fn what_cannot_be_a_function_is_named() {
        let (targets, problems) = parse("a@,@f,1a@f,a b@f,a@f-g,good@f,a\0@f");
        assert_eq!(targets.iter().filter(|target| target.is_wanted).count(), 1);
        assert_eq!(problems.len(), 6, "{problems:?}");
        assert!(problems.iter().all(|problem| problem.starts_with(VARIABLE)), "{problems:?}");
        let many: Vec<String> = (0..200).map(|number| format!("m@f{number}")).collect();
        let (targets, problems) = parse(&many.join(","));
        assert_eq!(
            (targets.len(), problems.len()),
            (span::function::SLOTS, 200 - span::function::SLOTS + DEFAULTS.len())
        );
    }
}
