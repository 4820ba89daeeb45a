//! Hundreds of captures while Python threads start, run through known chains of functions, and end.
//!
//! The functions of a chain say which chain it is: the one at level 3 of chain 5 is `f_3_8`, the
//! level and the sum of both, modulo 29. So a stack shows whether all of it is from one moment of
//! one chain. C code calls some levels. The code of the last level is created each time, in memory
//! that held the code of another one.

use std::collections::BTreeMap;

use xpu_timer_capture::{Capturer, Options, merge};
use xpu_timer_proto::server::PySpyStacktrace;
use xpu_timer_tests::PATIENCE;

use super::python::{self, Python};

const CHAINS: usize = 29;
const LEVELS: usize = 14;
const CAPTURES: usize = 120;

const SCRIPT: &str = "\
import random, sys, threading, time
CHAINS, LEVELS, THREADS = 29, 14, 12
functions = {}
def spin(count):
    for _ in range(count): pass
for level in range(LEVELS):
    for chain in range(CHAINS):
        name = 'f_%d_%d' % (level, (level + chain) % CHAINS)
        call = 'functions[%d, %d](choice)' % (level + 1, chain)
        if level % 4 == 2:
            call = 'list(map(lambda_%s, [choice]))' % name
            exec('def lambda_%s(choice): functions[%d, %d](choice)' % (name, level + 1, chain), globals())
        text = 'def %s(choice):\\n    spin(choice)\\n    %s\\n    spin(choice)' % (name, call)
        exec(compile(text, 'chain', 'exec'), globals())
        functions[level, chain] = globals()[name]
def last(chain):
    name = 'f_%d_%d' % (LEVELS, (LEVELS + chain) % CHAINS)
    def run(choice):
        space = {'spin': spin, 'sleep': time.sleep}
        exec(compile('def %s(choice):\\n    spin(choice * 20)\\n    sleep(choice %% 3 / 3000)' % name, 'chain', 'exec'), space)
        space[name](choice)
    return run
for chain in range(CHAINS):
    functions[LEVELS, chain] = last(chain)
def thread():
    chance = random.Random(threading.get_native_id())
    for _ in range(chance.randrange(3, 30)):
        functions[0, chance.randrange(CHAINS)](chance.randrange(60))
    start()
def start():
    threading.Thread(target=thread, daemon=True).start()
for _ in range(THREADS): start()
print('ready', flush=True)
time.sleep(100000)
";

/// Whether all of a stack is from one moment; the frames come leaf first.
fn is_right(trace: &PySpyStacktrace) -> bool {
    let mut chain = None;
    let mut levels = 0;
    let mut ended = false;
    for frame in trace.frames.iter().rev() {
        let name = frame.func_name.rsplit('.').next().unwrap_or_default();
        let Some((level, sum)) = name.strip_prefix("f_").and_then(|rest| rest.split_once('_')) else {
            // Only a function that a link may call is above a link.
            ended |= levels > 0 && !name.starts_with("lambda_") && name != "run" && name != "<module>";
            continue;
        };
        let (Ok(level), Ok(sum)) = (level.parse::<usize>(), sum.parse::<usize>()) else { return false };
        let this = (sum + CHAINS - level % CHAINS) % CHAINS;
        if ended || level != levels || *chain.get_or_insert(this) != this {
            return false;
        }
        levels += 1;
    }
    levels <= LEVELS + 1
}

fn churn(python: &Python) {
    let version = format!("3.{}", python.minor);
    let script = python.start(SCRIPT, &[]);
    let mut capturer = Capturer::new();
    let options = Options { deadline: PATIENCE, lines_budget: std::time::Duration::ZERO, ..Options::default() };
    let wanted = CAPTURES * 8;
    let (mut captures, mut right, mut deep, mut unmerged) = (0, 0, 0, 0);
    let mut errors: BTreeMap<String, usize> = BTreeMap::new();
    // On a busy machine many threads wait for a processor with an incomplete stack, so that it
    // takes more captures.
    while captures < CAPTURES || right <= wanted || deep <= wanted / 4 {
        captures += 1;
        assert!(captures < 10 * CAPTURES, "{version}: {right} stacks, {deep} of them deep, errors {errors:?}");
        let captured = capturer.capture(&[script.pid], &options).remove(0);
        for error in &captured.sample.errors {
            *errors.entry(error.chars().filter(|c| !c.is_ascii_hexdigit()).collect()).or_default() += 1;
        }
        for (trace, entries) in captured.sample.py_stacktrace.iter().zip(&captured.python_entries) {
            // A thread that could be neither stopped nor found asleep has this reason.
            if !trace.incomplete.is_empty() {
                continue;
            }
            assert!(is_right(trace), "{version}: {trace:#?}\n{:?}", captured.sample.errors);
            right += 1;
            deep += usize::from(trace.frames.len() > LEVELS);
            let native = captured.sample.stacktrace.iter().find(|thread| thread.pid == trace.os_thread_id);
            let native = native.filter(|native| native.incomplete.is_empty());
            let merged = native.is_none_or(|native| merge(&native.frames, &trace.frames, entries).is_ok());
            unmerged += usize::from(!merged);
        }
    }
    assert!(errors.values().sum::<usize>() <= right / 100, "{version}: {errors:?}");
    assert!(unmerged <= right / 100, "{version}: {unmerged} of {right} do not fit into their native stacks");
}

#[test]
fn no_wrong_stack_while_threads_come_and_go() {
    for python in python::all() {
        churn(&python);
    }
}

#[test]
fn the_check_finds_wrong_stacks() {
    let trace = |names: &[&str]| {
        let frame = |name: &&str| xpu_timer_proto::server::PySpyFrame {
            func_name: (*name).into(),
            file_name: "chain:1".into(),
            module: String::new(),
        };
        PySpyStacktrace { frames: names.iter().map(frame).collect(), ..PySpyStacktrace::default() }
    };
    assert!(is_right(&trace(&["spin", "f_2_7", "f_1_6", "f_0_5", "thread"])));
    assert!(is_right(&trace(&["f_3_8", "lambda_f_2_7", "f_2_7", "f_1_6", "f_0_5", "thread"])));
    assert!(is_right(&trace(&["wait", "start", "thread"])));
    assert!(!is_right(&trace(&["spin", "f_2_8", "f_1_6", "f_0_5", "thread"])), "two chains");
    assert!(!is_right(&trace(&["spin", "f_2_7", "f_0_5", "thread"])), "a level is missing");
    assert!(!is_right(&trace(&["f_2_7", "f_1_6"])), "the root is missing");
    assert!(!is_right(&trace(&["f_1_6", "spin", "f_0_5"])), "something that calls no link is in between");
}
