"""Names and texts that would break a terminal, a log or a page: they are shown without doing anything."""

import functools
import json

from kit import (
    COLLECTOR, DIR, DUMP, EXAMPLES, PORT, PRINT_ENV, VIEWER, Proc, add, http_get, judged, launched,
    log_text, must, owner_status, plain_text, promises, ranks, silent, train, wait_for,
)

SHOWN = ("terminal, log, verdict and pages show no control character, escape or mark of direction; no log line is forged; the hang is "
         "judged")

NAMES = {
    "escapes": ("escape sequences", "job\x1b[2J\x1b]0;owned\x07\x1b[31m"),
    "line_breaks": ("line breaks and a forged log line", "job\n2026-01-01T00:00:00Z ERROR xpu_timer_collector: forged\r\nx"),
    "directions": ("marks of direction", "job\u202egnp.exe\u2066\u200f"),
    "c1": ("control characters of the second set", "job\x9b31m\x85next\x90q"),
    "markup": ("markup and scripts", "</script><script>alert(1)</script><img src=x onerror=alert(1)>"),
    "metrics": ("quotes, backslashes and braces", 'a"} 1\nXPU_TIMER_COMMON_HANG{rank="9"} 1\n{x="\\'),
    "path": ("a path that leads out", "../../../../../../tmp/escaped"),
    "empty": ("nothing but blanks", "   \t "),
    "combining": ("ten thousand combining marks", "a" + "\u0301" * 10000),
}


def shown(name):
    text = NAMES[name][1]
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15", env={"XPU_TIMER_JOB": text})
    folder, _ = judged([1])
    look(job, folder)


def look(job, folder, forged="forged"):
    """Everything that a person would read."""
    listing = Proc([COLLECTOR, "incidents", "list"])
    listing.wait(30)
    plain_text(listing.out() + listing.err(), "incidents list")
    pids = [str(one["pid"]) for one in owner_status()["ranks"]]
    asked = Proc([PRINT_ENV, "--pid", pids[0]])
    asked.wait(30)
    plain_text(asked.out() + asked.err(), "print_env")
    dump = Proc([DUMP, "--pid", pids[0]])
    dump.wait(30)
    plain_text(dump.out() + dump.err(), "dump")
    text = Proc([VIEWER, "--path", folder, "--text"])
    text.wait(30)
    plain_text(text.out() + text.err(), "the viewer")
    plain_text((folder / "verdict.txt").read_text(), "verdict.txt")
    plain_text(log_text(), "the log")
    plain_text(job.err(), "the job's stderr")
    page = http_get("/metrics", port=PORT + 1)[1]
    plain_text(page, "the metrics")
    must(not any(line.split("Z ")[0].startswith("2026-01-01") for line in log_text().splitlines()), "a log line is forged")
    must('rank="9"} 1\n' not in page.replace('\\"', ""), "a metric is forged")
    report = folder / "report.html"
    wait_for("the report", report.exists, 30)
    must("<img src=x" not in report.read_text() and "<script>alert" not in report.read_text(), "the report runs markup")
    json.loads((folder / "verdict.json").read_text())


for _name, _row in NAMES.items():
    add(f"text_job_{_name}", f"the job's name holds {_row[0]}", SHOWN, functools.partial(shown, _name))


@promises("the job registers, its name is shortened, and that is said in the log")
def text_job_name_long():
    """A job name of one hundred thousand bytes."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15", env={"XPU_TIMER_JOB": "j" * 100_000})
    folder, verdict = judged([1])
    must(len(json.dumps(verdict)) < 60_000, "the name is not shortened")
    must("XPU_TIMER_JOB" in log_text(), "no log says that it is shortened")
    silent(job)


@promises("the job registers and is judged, and nothing that is not text is shown")
def text_job_name_not_utf8():
    """A job name and a pod name that are not UTF-8."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15",
                wrap=["sh", "-c", "export XPU_TIMER_JOB=$(printf 'a\\377\\200b') POD_NAME=$(printf '\\376x'); exec \"$@\"", "sh"])
    folder, _ = judged([1])
    look(job, folder)


ODD = "od\x1b[31md\nna\u202eme"


@promises(SHOWN)
def text_thread_and_process_names():
    """Threads and processes of the ranks have escape sequences as names."""
    script = DIR / "named.py"
    script.write_text(f'''
import ctypes, threading, runpy, sys
libc = ctypes.CDLL(None)
libc.prctl(15, b"\\x1b[31mrank\\n", 0, 0, 0)
def waits():
    libc.prctl(15, b"\\x1b]0;x\\x07\\n", 0, 0, 0)
    threading.Event().wait()
threading.Thread(target=waits, name={ODD!r}, daemon=True).start()
sys.argv = ["train.py", "--fault=loader", "--fault-rank=1", "--fault-step=15"]
runpy.run_path({str(EXAMPLES / "train.py")!r}, run_name="__main__")
''')
    job = ranks(script)
    folder, _ = judged([1])
    look(job, folder)


@promises(SHOWN)
def text_functions_and_files():
    """Python functions, files and arguments have escape sequences as names."""
    folder = DIR / "od\x1b[31md\u202e"
    folder.mkdir()
    script = folder / "tra\x1b[2Jin.py"
    script.write_text((EXAMPLES / "train.py").read_text())
    job = ranks(script, "--fault=loader", "--fault-rank=1", "--fault-step=15")
    incident_folder, _ = judged([1])
    look(job, incident_folder)


@promises(SHOWN)
def text_command_line():
    """The command line of the ranks holds escape sequences and markup."""
    script = DIR / "args.py"
    script.write_text(f'''
import runpy, sys
sys.argv = ["train.py", "--fault=loader", "--fault-rank=1", "--fault-step=15"]
runpy.run_path({str(EXAMPLES / "train.py")!r}, run_name="__main__")
''')
    job = ranks(script, "\x1b[31m", "</script><script>alert(1)</script>", "\u202e", "a\nb")
    folder, _ = judged([1])
    look(job, folder)


@promises("what the launcher says is plain text on one line")
def text_command_name():
    """The command has an escape sequence as its name and is not there."""
    job = launched("/nowhere/\x1b[31mred\n\u202e")
    must(job.wait(20) == 127, f"status {job.popen.returncode}")
    plain_text(job.err(), "the launcher")
    must(len(job.err().splitlines()) == 1, job.err())


@promises("what the launcher says is plain text")
def text_settings():
    """Settings that cannot be used hold escape sequences."""
    env = {name: "\x1b[31m\n\u202e" for name in ("XPU_TIMER_HANG_TIMEOUT", "XPU_TIMER_BRACKET", "XPU_TIMER_DEVICE_NAME", "XPU_TIMER_LOG",
                                                  "XPU_TIMER_COLLECTOR", "XPU_TIMER_NCCL_LIB_PATH")}
    job = launched("true", env=env)
    must(job.wait(30) == 0, job.err())
    plain_text(job.err(), "the launcher")
    asked = Proc([PRINT_ENV], env=env)
    asked.wait(20)
    plain_text(asked.out() + asked.err(), "print_env")
    wait_for("a log", log_text, 10)
    plain_text(log_text(), "the log")
