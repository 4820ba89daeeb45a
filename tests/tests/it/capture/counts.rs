//! What the interpreters of living processes count: collections of garbage, and the batches of
//! PyTorch's data loaders, wherever a program keeps their iterators.

use std::time::Duration;

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use xpu_timer_capture::{Counter, Counts};
use xpu_timer_tests::{PATIENCE, wait_until};

use super::python;

/// The classes have the names of PyTorch's, and count like them.
const LOADERS: &str = "\
import gc, random, signal, sys, threading
gc.disable()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
class _BaseDataLoaderIter:
    def __init__(self, loader):
        self._dataset = loader
        self._base_seed = random.getrandbits(62)
        self._num_yielded = 0
    def __iter__(self):
        return self
    def __next__(self):
        if self._num_yielded == self._dataset.batches:
            raise StopIteration
        self._num_yielded += 1
        return self._num_yielded
class _SingleProcessDataLoaderIter(_BaseDataLoaderIter):
    pass
class Loader:
    def __init__(self, batches):
        self.batches = batches
    def __iter__(self):
        return _SingleProcessDataLoaderIter(self)
class Prefetcher:
    def __init__(self, loader):
        self.flattened = [iter(loader)]
class Holder:
    def __init__(self, loader):
        self.model = dict.fromkeys(range(10000))
        self.loops = {'fit': Prefetcher(loader)}
def prepared(loader):
    iterator = iter(loader)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return
def told(word):
    gc.collect()
    gc.collect(0)
    print(word, sum(generation['collections'] for generation in gc.get_stats()), flush=True)
    signal.sigwait({signal.SIGUSR1})
def count(kind, batches, word):
    loader = Loader(batches)
    if kind == 'plain':
        for batch in loader: told(word) if batch == 7 else None
    elif kind == 'enumerate':
        for _, batch in enumerate(loader): told(word) if batch == 7 else None
    elif kind == 'prepared':
        for _, batch in zip(range(100), prepared(loader)): told(word) if batch == 7 else None
    elif kind == 'held':
        holder = Holder(loader)
        iterator = holder.loops['fit'].flattened[0]
        for batch in map(abs, iterator): told(word) if batch == 7 else None
    elif kind == 'thread':
        thread = threading.Thread(target=count, args=('plain', batches, word))
        thread.start()
        thread.join()
if sys.argv[1] == 'none':
    told('ready')
    told('again')
else:
    count(sys.argv[1], 12, 'ready')
    count(sys.argv[1], 9, 'again')
";

#[test]
fn collections_and_batches_are_counted_in_every_python() {
    for python in python::all() {
        let mut counter = Counter::default();
        let mut look = |pid: i32| {
            let counts = counter.read(&[pid], true, PATIENCE);
            let [Some(counts)] = counts[..] else { panic!("CPython 3.{}: {counts:?}", python.minor) };
            counts
        };
        for (kind, first, second) in [
            ("none", None, None),
            ("plain", Some(7), Some(14)),
            ("enumerate", Some(7), Some(14)),
            ("prepared", Some(7), Some(14)),
            ("held", Some(7), Some(14)),
            ("thread", Some(7), Some(14)),
        ] {
            let script = python.start(LOADERS, &[kind]);
            let mut check = |word: &str, batches: Option<u64>| {
                let mut collections = 0;
                wait_until(PATIENCE, word, || {
                    let line = script.process.stdout();
                    let line = line.lines().find_map(|line| line.strip_prefix(word));
                    collections = line.and_then(|number| number.trim().parse().ok()).unwrap_or(0);
                    collections >= 2
                });
                let Counts { collections: found, batches: yielded, .. } = look(script.pid);
                assert_eq!((found, yielded), (collections, batches), "CPython 3.{} {kind} {word}", python.minor);
            };
            check("ready", first);
            kill(Pid::from_raw(script.pid), Signal::SIGUSR1).expect("the script waits");
            // The first iterator was read once; the five batches that it yielded afterwards are not
            // counted.
            check("again", second);
        }
    }
}

#[test]
fn processes_that_do_not_exist_or_have_no_interpreter_have_no_counts() {
    let mut counter = Counter::default();
    let own = std::process::id() as i32;
    assert_eq!(counter.read(&[own, i32::MAX], true, Duration::from_secs(10)), [None, None]);
    assert_eq!(counter.read(&[], true, Duration::ZERO), []);
}
