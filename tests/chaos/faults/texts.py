"""Names and texts that would break a terminal, a log or a page. They are shown as harmless text."""

import functools
import json
from pathlib import Path

from kit import (
    COLLECTOR, DIR, DUMP, EXAMPLES, PORT, PRINT_ENV, TIMELINE, VIEWER, Proc, add, http_get, judged,
    launched, log_text, must, owner_status, plain_text, promises, rank_pids, ranks, silent, train,
    wait_for,
)

SHOWN = ("terminal, log, verdict and pages show no control character, escape or direction mark; no log line is forged; the hang is "
         "judged")

NAMES = {
    "escapes": ("escape sequences", "job\x1b[2J\x1b]0;owned\x07\x1b[31m"),
    "line_breaks": ("line breaks and a forged log line", "job\n2026-01-01T00:00:00Z ERROR xpu_timer_collector: forged\r\nx"),
    "directions": ("direction marks", "job\u202egnp.exe\u2066\u200f"),
    "c1": ("C1 control characters", "job\x9b31m\x85next\x90q"),
    "markup": ("markup and scripts", "</script><script>alert(1)</script><img src=x onerror=alert(1)>"),
    "metrics": ("quotes, backslashes and braces", 'a"} 1\nXPU_TIMER_COMMON_HANG{rank="9"} 1\n{x="\\'),
    "path": ("a path that leads out of the folder", "../../../../../../tmp/escaped"),
    "empty": ("only blanks", "   \t "),
    "combining": ("ten thousand combining marks", "a" + "\u0301" * 10000),
}


def shown(name):
    text = NAMES[name][1]
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15", env={"XPU_TIMER_JOB": text})
    folder, _ = judged([1])
    look(job, folder)


def look(job, folder, forged="forged"):
    """Checks every text that a person would read."""
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
    add(f"text_job_{_name}", f"The job's name contains {_row[0]}.", SHOWN, functools.partial(shown, _name))


@promises("the job registers, its name is shortened, and the log reports this")
def text_job_name_long():
    """The job's name has one hundred thousand bytes."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15", env={"XPU_TIMER_JOB": "j" * 100_000})
    folder, verdict = judged([1])
    must(len(json.dumps(verdict)) < 60_000, "the name is not shortened")
    must("XPU_TIMER_JOB" in log_text(), "no log says that it is shortened")
    silent(job)


@promises("the job registers and is judged, and only valid text is shown")
def text_job_name_not_utf8():
    """The names of the job and of the pod are not UTF-8."""
    job = train("--fault=loader", "--fault-rank=1", "--fault-step=15",
                wrap=["sh", "-c", "export XPU_TIMER_JOB=$(printf 'a\\377\\200b') POD_NAME=$(printf '\\376x'); exec \"$@\"", "sh"])
    folder, _ = judged([1])
    look(job, folder)


ODD = "od\x1b[31md\nna\u202eme"


@promises(SHOWN)
def text_thread_and_process_names():
    """The names of the ranks' threads and processes contain escape sequences."""
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
    """The names of the Python file and its folder contain escape sequences."""
    folder = DIR / "od\x1b[31md\u202e"
    folder.mkdir()
    script = folder / "tra\x1b[2Jin.py"
    script.write_text((EXAMPLES / "train.py").read_text())
    job = ranks(script, "--fault=loader", "--fault-rank=1", "--fault-step=15")
    incident_folder, _ = judged([1])
    look(job, incident_folder)


@promises(SHOWN)
def text_command_line():
    """The command line of the ranks contains escape sequences and markup."""
    script = DIR / "args.py"
    script.write_text(f'''
import runpy, sys
sys.argv = ["train.py", "--fault=loader", "--fault-rank=1", "--fault-step=15"]
runpy.run_path({str(EXAMPLES / "train.py")!r}, run_name="__main__")
''')
    job = ranks(script, "\x1b[31m", "</script><script>alert(1)</script>", "\u202e", "a\nb")
    folder, _ = judged([1])
    look(job, folder)


@promises("the launcher prints plain text on one line")
def text_command_name():
    """The command does not exist, and its name contains an escape sequence."""
    job = launched("/nowhere/\x1b[31mred\n\u202e")
    must(job.wait(20) == 127, f"status {job.popen.returncode}")
    plain_text(job.err(), "the launcher")
    must(len(job.err().splitlines()) == 1, job.err())


@promises("launcher, xpu_timer_print_env and log show plain text")
def text_settings():
    """Invalid settings contain escape sequences."""
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


@promises(SHOWN)
def text_surroundings():
    """The names of the node, its address, the rendezvous, the timeline folder and a function made
    at run time contain escape sequences and forged lines."""
    forged = "x\x1b[2J\n2026-01-01T00:00:00Z ERROR forged\r\u202e</script><script>alert(1)</script>\x9b31m\"} 1"
    timeline = DIR / forged.replace("/", "\u2044")
    timeline.mkdir()
    TIMELINE.rmdir()
    TIMELINE.symlink_to(timeline)
    script = DIR / "made.py"
    script.write_text(f'''
import ctypes, mmap, os, runpy, struct, sys, threading
libc = ctypes.CDLL(None)
code = mmap.mmap(-1, 4096, prot=7)
at = ctypes.addressof(ctypes.c_char.from_buffer(code))
pause = ctypes.cast(libc.pause, ctypes.c_void_p).value
# push rbp; mov rbp, rsp; mov rax, pause; call rax; pop rbp; ret
code.write(bytes.fromhex("554889e548b8") + struct.pack("<Q", pause) + bytes.fromhex("ffd05dc3"))
with open(f"/tmp/perf-{{os.getpid()}}.map", "w", newline="") as perf:
    perf.write("%x 1000 made{forged.splitlines()[0]}\\u202e</script><script>alert(1)</script>\\n" % at)
threading.Thread(target=ctypes.CFUNCTYPE(None)(at), daemon=True).start()
sys.argv = ["train.py", "--fault=loader", "--fault-rank=1", "--fault-step=15"]
try:
    runpy.run_path({str(EXAMPLES / "train.py")!r}, run_name="__main__")
finally:
    os.remove(f"/tmp/perf-{{os.getpid()}}.map")
''')
    names = ["POD_NAME", "POD_IP", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "HOSTNAME", "USER"]
    job = ranks(script, env={**dict.fromkeys(names, forged), "XPU_TIMER_TIMELINE_PATH": timeline})
    folder, _ = judged([1])
    pids = rank_pids()
    look(job, folder)
    dumped = Proc([DUMP, "--pid", pids[0]])
    dumped.wait(30)
    must("made" in dumped.out(), "the function that was made at run time is not in the dump")
    for words in (["--list", "--path", timeline], ["--path", timeline, "--text", "--grep", "made"], ["--path", DIR / forged[:5]]):
        shown = Proc([VIEWER, *words])
        shown.wait(60)
        plain_text(shown.out() + shown.err(), f"the viewer with {words[0]}")
        must("2026-01-01T00:00:00Z ERROR" not in "".join(line[:27] for line in (shown.out() + shown.err()).splitlines()), "a forged line")
    for end in ["cpp_stack", "py_stack", "cpp_stack.svg", "py_stack.svg", "report.html"]:
        plain_text((folder / end).read_text(), end)
    for end in ["cpp_stack.svg", "report.html"]:
        must("<script>alert" not in (folder / end).read_text(), f"{end} runs markup")
    for pid in pids:
        (Path("/tmp") / f"perf-{pid}.map").unlink(missing_ok=True)
