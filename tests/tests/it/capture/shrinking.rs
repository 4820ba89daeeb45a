//! Libraries whose files change while they are read: cut short, written anew in place, as `cp` over a library in use does.

use std::{
    fs::{self, OpenOptions},
    io::Write,
    sync::atomic::{AtomicBool, Ordering},
};

use xpu_timer_capture::{Capturer, Options};
use xpu_timer_tests::compile_c;

use super::target::{capture_until, describe, names, start, thread};

const PROGRAM: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>
static void wait_here(void) { puts("ready"); fflush(stdout); for (;;) pause(); }
int main(int count, char **arguments) {
  void *library = dlopen(arguments[1], RTLD_NOW);
  void (*through)(void (*)(void)) = (void (*)(void (*)(void)))dlsym(library, "through_the_library");
  through(wait_here);
  return 0;
}
"#;

/// A symbol table that takes a while to read.
fn library() -> String {
    let functions: String =
        (0..4_000).map(|n| format!("__attribute__((naked)) void filler_of_the_library_{n}(void) {{}}\n")).collect();
    format!(
        "{functions}__attribute__((noinline)) void through_the_library(void (*wait)(void)) {{ wait(); __asm__ volatile(\"\"); }}\n"
    )
}

#[test]
fn a_library_that_is_cut_short_and_written_anew_costs_names_and_not_the_reader() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let library = compile_c(folder.path(), "library.so", &library(), &["-O0", "-g0", "-shared", "-fPIC"]);
    let program = compile_c(folder.path(), "program", PROGRAM, &["-O1", "-ldl"]);
    let whole = fs::read(&library).expect("the library");
    let path = library.to_str().expect("UTF-8").to_owned();
    let process = start(&program, &[&path]);
    let pid = process.pid();
    capture_until(pid, "it waits within the library", |sample| {
        names(thread(sample, pid)).contains(&"through_the_library")
    });
    // The capture that has read the whole file reads pages of it again.
    let mut old = Capturer::new();
    old.capture(&[pid], &Options::default());
    let stop = AtomicBool::new(false);
    let mut said = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut file = OpenOptions::new().write(true).open(&library).expect("own file");
            while !stop.load(Ordering::Relaxed) {
                for part in [0, 100, whole.len() / 2] {
                    file.set_len(part as u64).expect("own file");
                    std::thread::yield_now();
                }
                file.set_len(0).expect("own file");
                std::io::Seek::rewind(&mut file).expect("own file");
                whole.chunks(whole.len() / 8 + 1).for_each(|chunk| file.write_all(chunk).expect("own file"));
            }
        });
        for _ in 0..60 {
            for capturer in [&mut old, &mut Capturer::new()] {
                let captured = capturer.capture(&[pid], &Options::default()).remove(0);
                let main = thread(&captured.sample, pid);
                assert!(names(main).contains(&"pause"), "{}", describe(&captured.sample));
                let remark = |error: &String| error.contains(&path) && error.contains("have no names");
                let is_said = captured.sample.errors.iter().any(remark);
                let is_lost = !names(main).contains(&"through_the_library") && main.incomplete.is_empty();
                assert!(is_said || !is_lost, "a name is lost and nothing is said: {}", describe(&captured.sample));
                said += usize::from(is_said);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(said > 0, "a file that changes below the reader is said");
    // All names are there again, also for those that have seen it change.
    for capturer in [&mut old, &mut Capturer::new()] {
        let captured = capturer.capture(&[pid], &Options::default()).remove(0);
        let main = thread(&captured.sample, pid);
        assert!(names(main).contains(&"through_the_library"), "{}", describe(&captured.sample));
        assert!(captured.sample.errors.is_empty(), "{}", describe(&captured.sample));
    }
}
