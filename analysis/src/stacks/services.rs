//! Child processes and threads that serve a rank and do none of its work: resource trackers, fork
//! servers, compile workers, loggers, and the daemons of Ray. They read from pipes and sockets all
//! the time, so they explain nothing.

use xpu_timer_proto::server::{ChildProcess, PySpyFrame, Stacktrace};

use super::{
    names::{base_name, contains_any, is_library, unqualified},
    patterns,
};

/// The child processes of a rank that may do a part of its work.
pub(super) fn workers(dump: &Stacktrace) -> impl DoubleEndedIterator<Item = &ChildProcess> {
    dump.children.iter().filter(|child| !is_service(child))
}

/// Whether a thread serves the process: its innermost frame outside the standard library belongs to
/// such a service.
pub(super) fn serves(frames: &[PySpyFrame]) -> bool {
    let is_package =
        |frame: &&PySpyFrame| !is_library(&frame.file_name) || contains_any(&frame.file_name, patterns::PACKAGE_PATHS);
    frames.iter().find(is_package).is_some_and(|frame| contains_any(&frame.file_name, patterns::SERVICE_FILES))
}

/// Whether a process with this command and main thread serves others, or works on their tasks, and
/// is not in a request or a task. The caller checks the object that its main thread waits for.
pub(super) fn is_between_requests(command: &str, frames: &[PySpyFrame]) -> bool {
    awaits_task(frames) || serves(frames) || is_service_command(command) && !frames.iter().any(works)
}

/// Whether a worker of a pool waits for its next task.
pub(super) fn awaits_task(frames: &[PySpyFrame]) -> bool {
    let waits = frames.iter().take_while(|frame| contains_any(&frame.file_name, patterns::TASK_WAITS)).count();
    let is_loop = |frame: &PySpyFrame| {
        let of = |(file, function): &(&str, &str)| {
            frame.file_name.contains(file) && unqualified(&frame.func_name) == *function
        };
        patterns::TASK_LOOPS.iter().any(of)
    };
    waits > 0 && frames.get(waits).is_some_and(is_loop)
}

fn is_service(child: &ChildProcess) -> bool {
    let mut frames =
        child.samples.last().into_iter().flat_map(|sample| &sample.py_stacktrace).flat_map(|thread| &thread.frames);
    is_service_command(&child.command) && !frames.any(works)
}

/// Whether a frame belongs to the work of a process that has the command line of a service: that of
/// its parent, if a fork server or a pool has forked it.
fn works(frame: &PySpyFrame) -> bool {
    !is_library(&frame.file_name) || contains_any(&frame.file_name, patterns::WORKER_STARTERS)
}

fn is_service_command(command: &str) -> bool {
    let program = executed(command);
    let word = program.split_whitespace().next().unwrap_or_default();
    let runs_main =
        || patterns::SERVICE_MODULES.iter().any(|module| program.contains(&format!("{module} import main")));
    patterns::SERVICE_PROGRAMS.contains(&base_name(word))
        || contains_any(word, patterns::SERVICE_FILES)
        || word == "from" && runs_main()
}

/// The program of a command line, with its arguments. For an interpreter: its script, its module,
/// or its code.
pub(super) fn executed(command: &str) -> &str {
    let (mut rest, mut interpreted) = (command.trim_start(), false);
    while !rest.is_empty() {
        let (word, after) = rest.split_once(' ').unwrap_or((rest, ""));
        if interpreted && ["-c", "-m"].contains(&word) {
            return after.trim_start();
        }
        let is_option = interpreted && word.starts_with('-');
        if !is_option && !is_interpreter(base_name(word)) {
            return rest;
        }
        interpreted = true;
        rest = after.trim_start();
        if is_option && ["-X", "-W"].contains(&word) {
            rest = rest.split_once(' ').map_or("", |(_, after)| after);
        }
    }
    rest
}

/// `python3.12` is one too.
fn is_interpreter(program: &str) -> bool {
    let version = program.strip_prefix("python").filter(|version| !version.is_empty());
    patterns::INTERPRETERS.contains(&program)
        || version.is_some_and(|version| version.chars().all(|char| char.is_ascii_digit() || char == '.'))
}

#[cfg(test)]
mod tests {
    use xpu_timer_proto::server::{ProcessSample, PySpyStacktrace};

    use super::*;

    const TRACKER: &str = "/opt/venv/bin/python3.11 -B -c from multiprocessing.resource_tracker import main;main(22)";
    const FORK_SERVER: &str =
        "/opt/venv/bin/python3 -X utf8=1 -c from multiprocessing.forkserver import main; main(2, 3)";

    fn child(command: &str, files: &[&str]) -> ChildProcess {
        let frame = |file: &&str| PySpyFrame { file_name: (*file).into(), ..Default::default() };
        let thread = PySpyStacktrace { frames: files.iter().map(frame).collect(), ..Default::default() };
        let sample = ProcessSample { py_stacktrace: vec![thread], ..Default::default() };
        ChildProcess { command: command.into(), samples: vec![sample], ..Default::default() }
    }

    #[test]
    fn services_are_known_by_their_command() {
        let services = [
            TRACKER,
            FORK_SERVER,
            "python -c from joblib.externals.loky.backend.resource_tracker import main; main(12, False)",
            "python -c from multiprocessing.semaphore_tracker import main;main(4)",
            "/opt/venv/lib/python3.11/site-packages/wandb/bin/wandb-core --port-filename /tmp/port",
            "python3 /opt/venv/lib/python3.11/site-packages/torch/_inductor/compile_worker/__main__.py --workers=2",
            "python3 -u /opt/venv/lib/python3.11/site-packages/ray/_private/log_monitor.py --logs-dir=/tmp/ray",
            "/opt/venv/lib/python3.11/site-packages/ray/core/src/ray/raylet/raylet --raylet_socket_name=x",
            "python3 -m tensorboard.main --logdir logs",
        ];
        for command in services {
            assert!(is_service(&child(command, &[])), "{command}");
        }
        let workers = [
            "python3 train.py --tracker multiprocessing.resource_tracker",
            "python3 -c from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)",
            "python3 -m joblib.externals.loky.backend.popen_loky_posix --process-name LokyProcess-1",
            "python3 /home/you/wandb/train.py",
            "ray::Trainer.step",
            "",
        ];
        for command in workers {
            assert!(!is_service(&child(command, &[])), "{command}");
        }
    }

    #[test]
    fn a_worker_of_a_fork_server_is_known_by_its_frames() {
        let rests = ["/usr/lib/python3.11/selectors.py:468", "/usr/lib/python3.11/multiprocessing/forkserver.py:218"];
        assert!(is_service(&child(FORK_SERVER, &rests)));
        assert!(!is_service(&child(FORK_SERVER, &[&["/job/data.py:9"], &rests[..]].concat())));
        let pool = ["/usr/lib/python3.11/json/decoder.py:3", "/usr/lib/python3.11/multiprocessing/process.py:108"];
        assert!(!is_service(&child(FORK_SERVER, &[&pool[..], &rests[..]].concat())));
    }

    #[test]
    fn a_thread_that_reads_the_answers_of_compile_workers_serves() {
        const POOL: &str = "/opt/venv/lib/python3.11/site-packages/torch/_inductor/compile_worker/subproc_pool.py:117";
        let frames = |files: &[&str]| child("", files).samples[0].py_stacktrace[0].frames.clone();
        assert!(serves(&frames(&["/usr/lib/python3.11/socket.py:7", POOL, "/usr/lib/python3.11/threading.py:982"])));
        assert!(!serves(&frames(&["/job/data.py:3", POOL])));
        assert!(!serves(&frames(&["/usr/lib/python3.11/socket.py:7"])));
    }

    #[test]
    fn an_interpreter_executes_its_script_module_or_code() {
        assert_eq!(executed("/usr/bin/env python3.12 -u -X dev train.py --lr 1"), "train.py --lr 1");
        assert_eq!(executed("python3 -m torch.distributed.run train.py"), "torch.distributed.run train.py");
        assert_eq!(executed("/bin/sh -c g++ -O2 x.cpp"), "g++ -O2 x.cpp");
        assert_eq!(executed("/usr/local/cuda/bin/nvcc -c x.cu"), "/usr/local/cuda/bin/nvcc -c x.cu");
        assert_eq!(executed("python3"), "");
    }
}
