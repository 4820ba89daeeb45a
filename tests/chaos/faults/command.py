"""Commands in unusual environments, and programs that do unusual things. Under xpu_timer_launch and
the hook they behave as without them, and the launcher prints one line at most."""

import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time

from kit import (
    DIR, DUMP, EXAMPLES, LAUNCH, Proc, Unable, add, answers, collectors, compiled, ends_well, launched, must,
    ours, promises, ranks, root_needed, silent, tail, wait_for,
)

SAME = "status and output are those of the command without the launcher, which prints one line at most for each missing part"

# Shell scripts. $LAUNCH is empty in the first run and the launcher in the second one. $D is a new
# folder.
SAME_SCRIPTS = {
    "stdin_closed": ("Standard input is closed.", "$LAUNCH sh -c 'ls -l /proc/self/fd | grep -c \" 0 ->\"; echo x' <&-"),
    "stdout_closed": ("Standard output is closed.", "$LAUNCH sh -c 'echo x; exit $?' >&-; echo $?"),
    "stderr_closed": ("Standard error is closed.", "$LAUNCH sh -c 'echo x; exit 5' 2>&-; echo $?"),
    "all_closed": ("Standard input, output and error are closed.", "$LAUNCH sh -c 'echo y > $D/y; exit 6' <&- >&- 2>&-; s=$?; cat $D/y; echo $s"),
    "sigpipe": ("The reader of the command's output ends.", "{ $LAUNCH yes; echo $? > $D/status; } | head -1; cat $D/status"),
    "environment_huge": (
        "The environment has one megabyte.",
        "i=0; while [ $i -lt 10 ]; do export V$i=$(head -c 100000 /dev/zero | tr '\\0' x); i=$((i+1)); done; "
        "$LAUNCH sh -c 'echo ${#V9}'",
    ),
    "argument_huge": ("An argument has 120,000 bytes.", "$LAUNCH sh -c 'echo ${#1}' sh $(head -c 120000 /dev/zero | tr '\\0' x)"),
    "arguments_many": ("The command has thirty thousand arguments.", "$LAUNCH sh -c 'echo $#' sh $(seq 30000)"),
    "argument_empty": ("The command has empty arguments.", "$LAUNCH sh -c 'echo $#' sh '' ' ' ''"),
    "arguments_not_text": ("Arguments and variables are not UTF-8.", "X=$(printf '\\377\\376') $LAUNCH sh -c 'printf %s \"$1$X\" | od -c' sh $(printf '\\200')"),
    "preload_missing": ("LD_PRELOAD names a missing library.", "LD_PRELOAD=/nowhere/x.so $LAUNCH sh -c 'echo $((1+1))' 2>/dev/null"),
    "preload_spaces": ("LD_PRELOAD is blank.", "LD_PRELOAD=' ' $LAUNCH sh -c 'echo ok'"),
    "status_255": ("The command ends with status 255.", "$LAUNCH sh -c 'exit 255'; echo $?"),
    "ended_by_signal": ("The command ends by SIGTERM.", "$LAUNCH sh -c 'kill -TERM $$'; echo $?"),
    "ended_by_segfault": ("The command ends by SIGSEGV.", "ulimit -c 0; $LAUNCH sh -c 'kill -SEGV $$'; echo $?"),
    "no_command": ("The command does not exist.", "$LAUNCH /nowhere/command 2>/dev/null; echo $?"),
    "not_executable": ("The command is not executable.", "$LAUNCH /etc/hostname 2>/dev/null; echo $?"),
    "a_folder": ("The command is a folder.", "$LAUNCH /tmp 2>/dev/null; echo $?"),
    "empty_script": ("The command is an empty file.", ": > $D/empty; chmod +x $D/empty; $LAUNCH $D/empty; echo $?"),
    "script_loop": ("The command is a script that names itself as its interpreter.", "echo \"#!$D/loop\" > $D/loop; chmod +x $D/loop; $LAUNCH $D/loop 2>/dev/null; echo $?"),
    "no_path": ("PATH is not set.", "P=$(command -v echo || true); unset PATH; $LAUNCH /bin/echo here"),
    "path_strange": ("PATH has empty and missing entries, and 2,000 of them.", "PATH=:/nowhere:$PATH:$(printf ':/x%.0s' $(seq 2000)) $LAUNCH sh -c 'echo ok'"),
    "no_home": ("HOME is not set.", "unset HOME; $LAUNCH sh -c 'echo ok'"),
    "empty_environment": ("The environment is empty.", "env -i $LAUNCH /bin/echo here"),
    "folder_removed": ("The current folder has been removed.", "mkdir $D/gone; cd $D/gone; rmdir $D/gone; $LAUNCH /bin/echo here"),
    "nice_and_umask": ("The caller has set a niceness and a umask.", "umask 027; nice -n 7 $LAUNCH sh -c 'umask; nice'"),
    "signals_ignored": ("The caller ignores signals.", "trap '' INT HUP USR1; $LAUNCH sh -c 'grep SigIgn /proc/self/status'"),
    "file_size_zero": ("RLIMIT_FSIZE is 0.", "ulimit -f 0; $LAUNCH sh -c 'echo ok'"),
    "core_unlimited": ("The caller has set limits for core files and stacks.", "ulimit -c unlimited; ulimit -s 4096; $LAUNCH sh -c 'ulimit -c; ulimit -s'"),
    "stack_unlimited": ("RLIMIT_STACK is unlimited.", "ulimit -s unlimited && $LAUNCH sh -c 'ulimit -s'"),
    "memory_limited": ("RLIMIT_AS is 60 MB.", "ulimit -v 60000; $LAUNCH sh -c 'echo ok'"),
    "memory_too_little": ("RLIMIT_AS is too small for the hook.", "ulimit -v 9000; $LAUNCH /bin/echo ok"),
    "locked_memory_none": ("RLIMIT_MEMLOCK is 0.", "ulimit -l 0; $LAUNCH sh -c 'echo ok'"),
    "descriptors_eight": ("RLIMIT_NOFILE is 8.", "ulimit -n 8; $LAUNCH sh -c 'echo ok'"),
    "descriptors_three": ("RLIMIT_NOFILE is 3.", "ulimit -n 3; $LAUNCH /bin/true; echo $?"),
    "processor_second": ("RLIMIT_CPU is 1 s.", "ulimit -t 1; $LAUNCH sh -c 'echo ok'"),
    "descriptors_inherited": ("The caller passes open descriptors.", "exec 7< /etc/hostname 9> $D/nine; $LAUNCH sh -c 'head -1 <&7 | wc -l; echo x >&9'; cat $D/nine"),
    "port_no_number": ("XPU_TIMER_BASEPORT is not a number.", "XPU_TIMER_BASEPORT=port $LAUNCH sh -c 'echo ok'"),
    "port_too_large": ("XPU_TIMER_BASEPORT is 99999.", "XPU_TIMER_BASEPORT=99999 $LAUNCH sh -c 'echo ok'"),
    "timeout_no_number": ("XPU_TIMER_HANG_TIMEOUT is nan, -1, inf, 1e400, text and empty.", "for t in nan -1 inf 1e400 soon ''; do XPU_TIMER_HANG_TIMEOUT=$t $LAUNCH sh -c 'echo ok'; done"),
    "config_missing": ("XPU_TIMER_CONFIG names a missing file.", "XPU_TIMER_CONFIG=/nowhere $LAUNCH sh -c 'echo ok'"),
    "config_folder": ("XPU_TIMER_CONFIG names a folder.", "XPU_TIMER_CONFIG=/tmp $LAUNCH sh -c 'echo ok'"),
    "config_fifo": ("XPU_TIMER_CONFIG names a FIFO that nobody writes.", "mkfifo $D/fifo; XPU_TIMER_CONFIG=$D/fifo timeout 20 $LAUNCH sh -c 'echo ok'; echo $?; rm $D/fifo"),
    "config_endless": ("XPU_TIMER_CONFIG names /dev/zero.", "XPU_TIMER_CONFIG=/dev/zero timeout 20 $LAUNCH sh -c 'echo ok'; echo $?"),
    "config_terminal": ("XPU_TIMER_CONFIG names /dev/tty.", "XPU_TIMER_CONFIG=/dev/tty timeout 20 setsid $LAUNCH sh -c 'echo ok'; echo $?"),
    "config_huge": ("XPU_TIMER_CONFIG names a sparse file of 8 GB.", "truncate -s 8G $D/huge; XPU_TIMER_CONFIG=$D/huge timeout 20 $LAUNCH sh -c 'echo ok'; echo $?; rm $D/huge"),
    "config_garbage": ("XPU_TIMER_CONFIG names a program.", "XPU_TIMER_CONFIG=/bin/ls $LAUNCH sh -c 'echo ok'"),
    "config_link_loop": ("XPU_TIMER_CONFIG is a link to itself.", "ln -sf $D/l $D/l; XPU_TIMER_CONFIG=$D/l $LAUNCH sh -c 'echo ok'"),
    "config_not_mine": ("XPU_TIMER_CONFIG names a file without read permission.", "echo > $D/secret; chmod 0 $D/secret; chmod 755 $D; XPU_TIMER_CONFIG=$D/secret $LAUNCH sh -c 'echo ok'"),
    "token_fifo": ("XPU_TIMER_COLLECTOR_TOKEN_FILE names a FIFO.", "mkfifo $D/t; XPU_TIMER_COLLECTOR=http://127.0.0.1:9 XPU_TIMER_COLLECTOR_TOKEN_FILE=$D/t timeout 20 $LAUNCH sh -c 'echo ok'; echo $?; rm $D/t"),
    "authority_fifo": ("XPU_TIMER_COLLECTOR_CA_FILE names a FIFO.", "mkfifo $D/a; XPU_TIMER_COLLECTOR=https://127.0.0.1:9 XPU_TIMER_COLLECTOR_CA_FILE=$D/a timeout 20 $LAUNCH sh -c 'echo ok'; echo $?; rm $D/a"),
    "daemon_is_a_sleeper": ("XPU_TIMER_DAEMON_PATH names a program that never answers.", "printf '#!/bin/sh\\nexec sleep 30\\n' > $D/d; chmod +x $D/d; XPU_TIMER_DAEMON_PATH=$D/d timeout 30 $LAUNCH sh -c 'echo ok'; echo $?"),
    "hook_is_no_library": ("XPU_TIMER_HOOK_PATH names a text file.", "XPU_TIMER_HOOK_PATH=/etc/passwd $LAUNCH sh -c 'echo ok'"),
    "hook_path_fifo": ("XPU_TIMER_HOOK_PATH names a FIFO.", "mkfifo $D/h; XPU_TIMER_HOOK_PATH=$D/h timeout 20 $LAUNCH sh -c 'echo ok'; echo $?; rm $D/h"),
    "log_folder_full": ("XPU_TIMER_LOGGING_DIR is /dev/full.", "XPU_TIMER_LOGGING_DIR=/dev/full $LAUNCH sh -c 'echo ok'"),
    "log_is_a_fifo": ("The collector's log is a FIFO.", "mkdir $D/logs; mkfifo $D/logs/xpu_timer_collector.log; XPU_TIMER_LOGGING_DIR=$D/logs timeout 20 $LAUNCH sh -c 'echo ok'; echo $?; rm -r $D/logs"),
    "tmpdir_missing": ("TMPDIR names a missing folder.", "TMPDIR=/nowhere/at/all $LAUNCH sh -c 'echo ok'"),
    "tmpdir_too_long": ("TMPDIR is too long for a socket.", "L=$D/$(head -c 120 /dev/zero | tr '\\0' l); mkdir -p $L; TMPDIR=$L $LAUNCH sh -c 'echo ok'"),
    "tmpdir_is_a_file": ("TMPDIR is a file.", "TMPDIR=/etc/passwd $LAUNCH sh -c 'echo ok'"),
    "tmpdir_empty": ("TMPDIR is empty, and then relative.", "TMPDIR= $LAUNCH sh -c 'echo ok'; cd $D; TMPDIR=. $LAUNCH sh -c 'echo ok'"),
    "socket_too_long": ("XPU_TIMER_SOCKET is too long.", "XPU_TIMER_SOCKET=/tmp/$(head -c 200 /dev/zero | tr '\\0' s) $LAUNCH sh -c 'echo ok'"),
    "socket_is_a_file": ("XPU_TIMER_SOCKET is a file with text.", "echo precious > $D/s; XPU_TIMER_SOCKET=$D/s $LAUNCH sh -c 'echo ok'; cat $D/s"),
    "session_leader": ("setsid starts the launcher.", "setsid -w $LAUNCH sh -c 'echo ok'"),
    "background": ("The launcher runs in the background of a shell.", "( $LAUNCH sh -c 'sleep 0.2; echo ok' & wait )"),
    "under_timeout": ("timeout ends the command.", "timeout -s TERM 1 $LAUNCH sleep 30; echo $?"),
    "under_xargs": ("xargs starts the launcher.", "seq 3 | xargs -n1 $LAUNCH echo"),
    "twice": ("The launcher starts the launcher.", "$LAUNCH $LAUNCH sh -c 'echo ok'"),
    "exec_storm": ("The command calls exec fifty times in a row.", "cat > $D/chain <<'X'\n[ $1 -eq 0 ] && echo end || exec sh $0 $(($1 - 1))\nX\n$LAUNCH sh $D/chain 50"),
    "fork_storm": ("The command starts five hundred short processes.", "$LAUNCH sh -c 'i=0; while [ $i -lt 500 ]; do /bin/true; i=$((i+1)); done; echo $i'"),
    "pipeline": ("The command is a pipeline of twenty processes.", "$LAUNCH sh -c 'echo x | cat | cat | cat | cat | cat | cat | cat | cat | cat | cat | cat | cat | cat | cat | cat | cat | cat | wc -c'"),
    "daemon": ("The command starts a daemon and ends.", "$LAUNCH sh -c 'setsid sleep 1 > /dev/null 2>&1 & echo started'"),
    "python_isolated": ("The command is Python in isolated mode.", "$LAUNCH python3 -I -S -c 'print(1)'"),
    "python_fork": ("The command is Python with worker processes.", "$LAUNCH python3 -c 'import multiprocessing as m\nif __name__ == \"__main__\": print(m.get_context(\"fork\").Pool(3).map(abs, [-1, -2]))'"),
    "compiler": ("The command is a compiler.", "echo 'int main(void) { return 7; }' > $D/c.c; $LAUNCH gcc -o $D/c $D/c.c && $LAUNCH $D/c; echo $?"),
    "ptraced": ("strace traces the command.", "$LAUNCH strace -f -o /dev/null sh -c 'echo ok'"),
    "secure_execution": ("The command is setpriv with no new privileges.", "$LAUNCH setpriv --no-new-privs sh -c 'echo ok'"),
    "another_user": ("setpriv runs the command as another user.", "chmod 755 $D; $LAUNCH setpriv --reuid=54321 --regid=54321 --clear-groups sh -c 'id -u' 2>&1"),
    "runuser": ("runuser runs the command as another user.", "$LAUNCH runuser -u nobody -- id -un 2>&1"),
    "su": ("su runs the command as another user.", "$LAUNCH su -s /bin/sh nobody -c 'id -un' 2>&1"),
}


def same(script, wrap=()):
    own = DIR / "own"
    seen = []
    for launcher in ("", str(LAUNCH)):
        subprocess.run(["rm", "-rf", own], check=True)
        own.mkdir()
        env = {"LAUNCH": launcher, "D": str(own)}
        proc = Proc([*wrap, "bash", "-c", script], env=env)
        code = proc.wait(70)
        seen.append((code, proc.out(), [line for line in proc.err().splitlines()]))
    (code, out, err), (ours, our_out, our_err) = seen
    must((code, out) == (ours, our_out), f"without it {code} {out[-200:]!r}, with it {ours} {our_out[-200:]!r} {our_err[-2:]}")
    said = [line for line in our_err if line not in err]
    launches = script.count("$LAUNCH") if "for " not in script else 6
    must(len(said) <= 2 * launches, f"it says {len(said)} lines: {tail(chr(10).join(said))}")
    return f"unchanged; {len(said)} lines printed" if said else "unchanged"


def needs(program):
    if not shutil.which(program):
        raise Unable(f"no {program}")


def same_or_unable(name, script):
    tool = {"ptraced": "strace", "runuser": "runuser", "su": "su", "compiler": "gcc"}.get(name)
    if tool:
        needs(tool)
    if name in ("another_user", "runuser", "su"):
        root_needed()
    return same(script)


for _name, (_fault, _script) in SAME_SCRIPTS.items():
    add(f"command_{_name}", _fault, SAME, functools.partial(same_or_unable, _name, _script))


@promises(SAME)
def command_sudo():
    """sudo runs the command as root."""
    needs("sudo")
    return same("$LAUNCH sudo -n id -u")


@promises(SAME)
def command_on_a_terminal():
    """Standard input and output are a terminal."""
    needs("script")
    return same("script -qec \"$LAUNCH sh -c 'tty > /dev/null && echo terminal; stty size > /dev/null; exit 3'\" /dev/null; echo $?")


@promises("the launcher prints one line, and the program runs as without it")
def command_static():
    """The command is a statically linked program."""
    program = compiled("static", "#include <stdio.h>\nint main(void) { puts(\"static\"); return 3; }", "-static")
    return same(f"$LAUNCH {program}; echo $?")


@promises("the launcher prints one line, and the program runs as without it")
def command_of_another_loader():
    """The command is a program with the loader of another C library."""
    loader = DIR / "ld-musl-x86_64.so.1"
    loader.symlink_to("/lib64/ld-linux-x86-64.so.2")
    program = compiled("musl", "#include <stdio.h>\nint main(void) { puts(\"musl\"); return 3; }", f"-Wl,--dynamic-linker={loader}")
    return same(f"$LAUNCH {program}; echo $?")


@promises("the launcher prints one line, and the program runs as without it")
def command_32_bit():
    """The command is a 32-bit program."""
    source = 'void _start(void) { __asm__("mov $1, %eax; mov $3, %ebx; int $0x80"); }'
    program = compiled("narrow", source, "-m32", "-nostdlib", "-static", "-fno-pic", "-no-pie")
    return same(f"$LAUNCH {program}; echo $?")


@promises(SAME)
def command_with_another_preload():
    """LD_PRELOAD names a library of the job."""
    source = "#include <stdlib.h>\n__attribute__((constructor)) static void here(void) { setenv(\"HERE\", \"yes\", 1); }"
    library = compiled("other.so", source, "-shared", "-fPIC")
    return same(f"LD_PRELOAD={library} $LAUNCH sh -c 'echo $HERE'")


@promises(SAME)
def command_that_closes_everything():
    """The command closes every descriptor and opens its own."""
    source = """#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>
int main(void) { for (int i = 3; i < 4096; i++) close(i); int fd = open("/dev/null", 0); printf("%d\\n", fd); return fd != 3; }"""
    return same(f"$LAUNCH {compiled('closes', source)}; echo $?")


@promises(SAME)
def command_with_a_sandbox():
    """The command forbids itself all system calls except read, write and exit."""
    source = """#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(void) { prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT); write(1, "strict\\n", 7); syscall(SYS_exit, 4); }"""
    return same(f"$LAUNCH {compiled('strict', source)}; echo $?")


@promises("the rank trains to completion, and the hook never makes a call that the filter forbids")
def rank_with_a_late_filter():
    """After its first collective, a rank installs a seccomp filter that kills it for sockets,
    memfds and signals."""
    filters = DIR / "filters.py"
    forbidden = "41, 42, 46, 44, 53, 319, 62, 200, 234, 7, 271, 281, 290, 288, 157, 317"
    filters.write_text(f'''
import ctypes, struct, sys
def close_the_door():
    libc = ctypes.CDLL(None, use_errno=True)
    code = [(0x20, 0, 0, 0)]
    for number in [{forbidden}]:
        code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x80000000)]
    code += [(0x06, 0, 0, 0x7fff0000)]
    program = b"".join(struct.pack("HBBI", *one) for one in code)
    buffer = ctypes.create_string_buffer(program)
    fprog = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_char_p(fprog), 0, 0) == 0, ctypes.get_errno()
''')
    script = DIR / "sandboxed.py"
    script.write_text('''
import os, time, cuda, filters
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
cuda.set_device(rank)
world, stream, buffer = cuda.Communicator.create("w", rank, size), cuda.Stream(), cuda.Buffer(64)
world.all_reduce(buffer, stream)
stream.synchronize()
filters.close_the_door()
end = time.monotonic() + 6
while time.monotonic() < end:
    stream.query()
    time.sleep(0.05)
print(f"rank {rank} done", flush=True)
os._exit(0)
''')
    path = {"PYTHONPATH": f"{EXAMPLES}:{DIR}"}
    bare = ranks(script, env={**path, "XPU_EXAMPLE_RENDEZVOUS": DIR}, launcher=())
    if bare.wait(60) != 0:
        raise Unable(f"without the hook it ends with {bare.popen.returncode}")
    ends_well(ranks(script, env=path))
    return "both ranks lived"


@promises("each command gets a collector with its settings, or prints one line with the reason")
def command_with_other_settings():
    """A second command on the node sets another folder and another timeout."""
    first = launched("sh", "-c", "exit 0")
    must(first.wait(30) == 0, first.err())
    silent(first)
    other = DIR / "other"
    other.mkdir()
    env = {"XPU_TIMER_TIMELINE_PATH": str(other / "timeline"), "XPU_TIMER_HANG_TIMEOUT": "1234"}
    second = launched("sh", "-c", "exit 0", env=env)
    must(second.wait(30) == 0, second.err())
    apart = len(set(collectors())) > 1
    said = second.err().strip()
    served = (other / "timeline").exists()
    must(apart or served or ("1234" in said or "timeline" in said.lower()), f"it says {said!r}")
    return said or "a collector of its own"


@promises("nothing is started, changed or written")
def command_switched_off():
    """XPU_TIMER_DISABLE=1 is set."""
    before = {str(path) for path in DIR.rglob("*")}
    job = launched("sh", "-c", "echo [$LD_PRELOAD]", env={"XPU_TIMER_DISABLE": "1"})
    must((job.wait(30), job.out(), job.err()) == (0, "[]\n", ""), job.out() + job.err())
    must(not collectors(), "a collector runs")
    new = {str(path) for path in DIR.rglob("*")} - before - {str(file) for file in job.files}
    must(not new, f"written: {new}")


# Programs that do unusual things. Under the hook they behave as without it.

HEAD = """
import ctypes, gc, os, resource, signal, socket, subprocess, sys, threading, time, cuda
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
cuda.set_device(rank)
world, stream, buffer = cuda.Communicator.create("w", rank, size), cuda.Stream(), cuda.Buffer(256)
kernel = cuda.Kernel("k", 100)
def step(times=1):
    for _ in range(times):
        kernel.launch(stream)
        world.all_reduce(buffer, stream)
        stream.synchronize()
step(3)
"""
TAIL = """
step(20)
sys.stdout.write(f"rank {rank} done\\n")
sys.stdout.flush()
"""
ENDS = "all ranks complete with status 0, and nothing is printed into the job"

BODIES = {
    "forks": ("forks two hundred children, which end at once", "for _ in range(200):\n    pid = os.fork()\n    if pid == 0: os._exit(0)\n    os.waitpid(pid, 0)"),
    "forks_that_sum": ("forks a child, and makes device calls afterwards", "pid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)\nstep()"),
    "execs": ("replaces itself by another program that trains", "if 'AGAIN' not in os.environ:\n    world.destroy(); os.environ['AGAIN'] = '1'; os.environ['XPU_EXAMPLE_RENDEZVOUS'] += '/again'; os.makedirs(os.environ['XPU_EXAMPLE_RENDEZVOUS'], exist_ok=True); os.execv(sys.executable, [sys.executable] + sys.argv)"),
    "closes_descriptors": ("closes every descriptor above 2", "os.closerange(3, 4096)"),
    "reuses_descriptors": ("closes the descriptors of xpu_timer, and opens its own with the same numbers", "for fd in range(3, 64):\n    try: os.close(fd)\n    except OSError: pass\nfiles = [open('/dev/null') for _ in range(30)]"),
    "no_descriptors": ("lowers its descriptor limit to the descriptors it has", "resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir('/proc/self/fd'))), 4096))"),
    "five_hundred_threads": ("has five hundred threads", "many = [threading.Thread(target=time.sleep, args=(3,), daemon=True) for _ in range(500)]\n[one.start() for one in many]"),
    "threads_come_and_go": ("starts and ends a thousand threads", "for _ in range(1000):\n    one = threading.Thread(target=int)\n    one.start(); one.join()"),
    "blocks_signals": ("blocks every signal", "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"),
    "signal_storm": ("handles a thousand signals a second", "signal.signal(signal.SIGALRM, lambda *_: None)\nsignal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\nstep(200)\nsignal.setitimer(signal.ITIMER_REAL, 0)"),
    "changes_environment": ("removes and changes our variables", "[os.environ.pop(name) for name in list(os.environ) if name.startswith('XPU_TIMER')]\nos.environ['XPU_TIMER_SOCKET'] = '/nowhere'"),
    "changes_folder": ("changes to a folder and removes it", "gone = f'gone{os.getpid()}'; os.mkdir(gone); os.chdir(gone); os.rmdir('../' + gone)"),
    "no_dump": ("makes itself undumpable", "ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"),
    "no_memory": ("may map only 8 MB more memory", "resource.setrlimit(resource.RLIMIT_AS, (int(open('/proc/self/statm').read().split()[0]) * 4096 + (8 << 20),) * 2)"),
    "locks_memory": ("locks all its memory", "ctypes.CDLL(None).mlockall(3)"),
    "loads_libraries": ("loads and unloads libraries all the time", "import _ctypes\nfor _ in range(300):\n    _ctypes.dlclose(ctypes.CDLL('libm.so.6')._handle)"),
    "many_communicators": ("creates and destroys sixty communicators", "for index in range(60):\n    one = world.split(0)\n    one.all_reduce(buffer, stream); stream.synchronize(); one.destroy()"),
    "many_streams": ("creates five hundred streams", "streams = [cuda.Stream() for _ in range(500)]\n[kernel.launch(one) for one in streams]\n[one.synchronize() for one in streams]"),
    "burst": ("launches twenty thousand kernels at once", "fast = cuda.Kernel('f', 0)\nfor _ in range(20000): fast.launch(stream)\nstream.synchronize()"),
    "device_errors": ("makes device calls that fail", "for _ in range(100):\n    try: cuda._cuda('cudaSetDevice', 99)\n    except cuda.CudaError: pass"),
    "another_name": ("renames itself", "ctypes.CDLL(None).prctl(15, b'somebody', 0, 0, 0)"),
    "subprocesses": ("runs pipelines in shells", "for _ in range(20): subprocess.run('echo a | cat | cat > /dev/null', shell=True, check=True)"),
    "daemon": ("leaves a daemon behind", "subprocess.Popen(['sleep', '30'], start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"),
    "multiprocessing": ("has worker processes, created by fork", "import concurrent.futures as f, multiprocessing as m\nfor kind in ('fork',):\n    with f.ProcessPoolExecutor(3, mp_context=m.get_context(kind)) as pool: assert list(pool.map(abs, [-1, -2, -3])) == [1, 2, 3]"),
    "recursion": ("calls a collective ten thousand frames deep", "sys.setrecursionlimit(100000)\nthreading.stack_size(512 << 20)\ndef deep(n):\n    if n: return deep(n - 1)\n    step(5)\none = threading.Thread(target=deep, args=(10000,)); one.start(); one.join()"),
    "garbage": ("collects garbage between steps", "for _ in range(30):\n    heap = [[i] for i in range(20000)]; gc.collect(); step()"),
    "preload_changed": ("starts children with another LD_PRELOAD", "subprocess.run(['true'], env={**os.environ, 'LD_PRELOAD': '/nowhere.so'}, stderr=subprocess.DEVNULL, check=True)\nsubprocess.run(['/bin/true'], env={}, check=True)"),
    "clock_of_its_own": ("runs with a profiling timer (SIGPROF)", "signal.signal(signal.SIGPROF, lambda *_: None)\nsignal.setitimer(signal.ITIMER_PROF, 0.005, 0.005)\nstep(100)\nsignal.setitimer(signal.ITIMER_PROF, 0)"),
    "writes_oddly": ("writes to its standard error from threads, forked children and a signal handler, also invalid memory and while it is closed", "null = os.open('/dev/null', os.O_WRONLY); saved = os.dup(2); os.dup2(null, 2); libc = ctypes.CDLL(None, use_errno=True); libc.write.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t\nassert (libc.write(2, 8, 4096), libc.write(2, None, 0), libc.write(2, b'x' * (1 << 20), 1 << 20)) == (4096, 0, 1 << 20)\npipe = os.pipe(); os.dup2(pipe[1], 2); assert libc.write(2, 8, 4096) == -1 and ctypes.get_errno() == 14\nos.dup2(null, 2); signal.signal(signal.SIGALRM, lambda *_: os.write(2, b'y' * 5000)); signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)\nmany = [threading.Thread(target=lambda: [os.write(2, b'z' * n) for n in range(3000)]) for _ in range(4)]\n[one.start() for one in many]\nfor _ in range(20):\n    pid = os.fork()\n    if pid == 0: os.write(2, b'child'); os._exit(0)\n    os.waitpid(pid, 0)\n[one.join() for one in many]; signal.setitimer(signal.ITIMER_REAL, 0)\nos.close(2); assert libc.write(2, b'x', 1) == -1 and ctypes.get_errno() == 9\nos.dup2(saved, 2)"),
    "exits_in_thread": ("ends with os._exit in a thread", "if rank >= 0:\n    step(20)\n    sys.stdout.write(f'rank {rank} done\\n'); sys.stdout.flush()\n    threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(9)"),
}


def program(name):
    script = DIR / "program.py"
    script.write_text(HEAD + BODIES[name][1] + TAIL)
    ends_well(ranks(script, cwd=DIR))


for _name, _row in BODIES.items():
    add(f"program_{_name}", f"A rank {_row[0]}.", ENDS, functools.partial(program, _name))

CRASHES = """#define _GNU_SOURCE
#include <assert.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
static volatile int *volatile null;
static sigjmp_buf back;
static void own(int number) { siglongjmp(back, number); }
static void *faults(void *x) { *null = 1; return 0; }
static void *allocates(void *x) { for (;;) { char *p = malloc(100); memset(p, 1, 100); free(p); } return 0; }
static int deep(volatile char *p) { volatile char large[4096]; large[0] = p[0]; return deep(large) + large[1]; }
static void many(int count, void *(*run)(void *)) { for (int i = 0; i < count; i++) { pthread_t t; pthread_create(&t, 0, run, 0); } }
void set_own(void) { signal(SIGSEGV, own); }
int survive(int count) { volatile int seen = 0; for (volatile int i = 0; i < count; i++) if (sigsetjmp(back, 1) == 0) *null = 1; else seen++; return seen; }
void segv(void) { *null = 1; }
void ill(void) { __builtin_trap(); }
void in_malloc(void) { many(8, allocates); usleep(20000); *null = 1; }
void in_threads(void) { many(8, faults); for (;;) pause(); }
void blocked(void) { sigset_t all; sigfillset(&all); sigprocmask(SIG_BLOCK, &all, 0); *null = 1; }
void overflow(void) { char first = 1; deep(&first); }
void twice_freed(void) { char *volatile p = malloc(64); free(p); free(p); }
void asserts(int rows) { assert(rows > 0); }
void bus(void) { int f = fileno(tmpfile()); if (ftruncate(f, 8192)) abort(); volatile char *m = mmap(0, 8192, PROT_READ, MAP_SHARED, f, 0); if (ftruncate(f, 0)) abort(); (void)m[4096]; }
void child(void) { int status; if (fork() == 0) { *null = 1; } wait(&status); fprintf(stderr, "child %d\\n", status); }
void vchild(void) { int status; if (vfork() == 0) { *null = 1; } wait(&status); fprintf(stderr, "child %d\\n", status); }
"""
CRASH = """
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
import faulthandler
crash = ctypes.CDLL(sys.argv[1])
time.sleep(0.5)
begun = time.monotonic()
"""
# What a rank does, in C unless it says otherwise, before and after the handler is installed.
CRASH_WAYS = {
    "reads_nowhere": ("accesses address 0", "", "crash.segv()"),
    "bad_instruction": ("executes an invalid instruction", "", "crash.ill()"),
    "while_others_allocate": ("accesses address 0 while eight threads hold malloc's locks by turns", "", "crash.in_malloc()"),
    "in_eight_threads": ("accesses address 0 in eight threads at once", "", "crash.in_threads()"),
    "with_blocked_signals": ("blocks every signal and accesses address 0", "", "crash.blocked()"),
    "stack_overflow": ("overflows its stack", "", "crash.overflow()"),
    "corrupted_heap": ("frees memory twice", "", "crash.twice_freed()"),
    "assertion": ("fails an assertion", "", "crash.asserts(0)"),
    "truncated_file": ("reads beyond the end of a mapped file", "", "crash.bus()"),
    "forked_child": ("forks a child that accesses address 0", "", "crash.child()"),
    "vforked_child": ("accesses address 0 in a child of vfork", "", "crash.vchild()"),
    "faulthandler_before": ("has enabled faulthandler, and accesses address 0", "import faulthandler; faulthandler.enable()", "crash.segv()"),
    "faulthandler_later": ("enables faulthandler, and accesses address 0", "", "faulthandler.enable(); crash.segv()"),
    "survived": ("has a handler of SIGSEGV that jumps back, and survives a thousand signals", "import ctypes, sys; ctypes.CDLL(sys.argv[1]).set_own()", "assert crash.survive(1000) == 1000"),
    "survived_later": ("sets a handler of SIGSEGV that jumps back, and survives a thousand signals", "", "crash.set_own(); assert crash.survive(1000) == 1000"),
    "silent_collector": ("accesses address 0 while the collector is stopped", "", "os.system(os.environ['STOPS']); begun = time.monotonic(); crash.segv()"),
}
UNCHANGED = "status and standard error are those without xpu_timer, the end is late by at most 200 ms, and the collector lives"
# Seconds. The limit of the hook is 0.2; the rest is for a busy machine.
LATEST = 1.5


def crash(name):
    _, before, after = CRASH_WAYS[name]
    library = compiled("crash.so", CRASHES, "-O1", "-g", "-fPIC", "-shared", "-pthread")
    script = DIR / "program.py"
    script.write_text(f"{before}\n{HEAD}{CRASH}try:\n    print(begun, flush=True); {after}\nfinally:\n    print(time.monotonic() - begun)\n")
    alone = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "PYTHONPATH": EXAMPLES, "XPU_TIMER_SIGNAL_HANDLER": 1}
    seen = []
    for launcher in ((), (LAUNCH,)):
        stops = "true"
        if launcher and name == "silent_collector":
            stops = f"kill -STOP $(cat {DIR / 'pids'})"
        job = Proc([*launcher, sys.executable, script, library], env={**alone, "STOPS": stops}, cwd=DIR)
        if launcher:
            wait_for("the collector runs", collectors, 20)
            (DIR / "pids").write_text(" ".join(str(pid) for pid in ours() if pid != job.pid))
        code = job.wait(60)
        ended = time.monotonic()
        lines = job.out().split()
        took = float(lines[1]) if len(lines) > 1 else ended - float(lines[0])
        text = re.sub("0x[0-9a-f]+|[0-9]{5,}", "N", job.err())
        seen.append((code, text, took))
    if name == "silent_collector":
        for pid in ours():
            os.kill(pid, signal.SIGCONT)
    (code, text, took), (our_code, our_text, our_took) = seen
    must((code, text) == (our_code, our_text), f"without it {code} {tail(text)!r}, with it {our_code} {tail(our_text)!r}")
    must(our_took - took < LATEST, f"{our_took - took:.2f} s late")
    wait_for("the collector answers", answers, 10)
    return f"status {code}, {max(our_took - took, 0) * 1000:.0f} ms late"


for _name, _row in CRASH_WAYS.items():
    add(f"crash_{_name}", f"With the handler of signals on, a rank {_row[0]}.", UNCHANGED, functools.partial(crash, _name))

C_LOOP = """#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ipc.h>
#include <sys/sem.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#define LOOP(body) for (;;) { errno = 0; body; __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED); if (errno == EINTR) { __atomic_fetch_add(&interrupted, 1, __ATOMIC_RELAXED); } } return 0
static long calls, interrupted, cut;
static void *epolls(void *x) { int fd = epoll_create1(0); struct epoll_event e; LOOP(epoll_wait(fd, &e, 1, 1)); }
static void *polls(void *x) { LOOP(poll(0, 0, 1)); }
static void *waits(void *x) { sigset_t set; sigemptyset(&set); sigaddset(&set, SIGUSR2); struct timespec t = {0, 700000}; LOOP(sigtimedwait(&set, 0, &t)); }
static void *semaphores(void *x) { int id = semget(IPC_PRIVATE, 1, 0600); struct sembuf b = {0, -1, 0}; struct timespec t = {0, 600000}; LOOP(semtimedop(id, &b, 1, &t)); }
static void *receives(void *x) { int p[2]; socketpair(1, 1, 0, p); struct timeval t = {0, 900}; setsockopt(p[0], SOL_SOCKET, SO_RCVTIMEO, &t, sizeof t); char c; LOOP(recv(p[0], &c, 1, 0)); }
static void *sleeps(void *x) { struct timespec t = {0, 400000}; LOOP(nanosleep(&t, 0)); }
static int pair[2];
static void *reads(void *x) { char buffer[3000]; for (;;) { if (read(pair[1], buffer, sizeof buffer) < 0) break; usleep(30); } return 0; }
static void *sends(void *x) { static char buffer[300000]; for (;;) { long n = send(pair[0], buffer, sizeof buffer, 0); calls++; if (n != sizeof buffer) __atomic_fetch_add(&cut, 1, __ATOMIC_RELAXED); } return 0; }
int main(void) {
    void *(*all[])(void *) = {epolls, polls, waits, semaphores, receives, sleeps, reads, sends};
    socketpair(1, 1, 0, pair);
    sigset_t set; sigemptyset(&set); sigaddset(&set, SIGUSR2); pthread_sigmask(SIG_BLOCK, &set, 0);
    for (int i = 0; i < 8; i++) { pthread_t t; pthread_create(&t, 0, all[i], 0); }
    puts("ready"); fflush(stdout);
    char line[8]; fgets(line, 8, stdin);
    printf("%ld calls, %ld interrupted, %ld cut\\n", calls, interrupted, cut);
    return interrupted || cut;
}
"""


@promises("no system call returns EINTR or a short count because of the captures")
def captures_of_system_calls():
    """A program in eight kinds of waiting calls is captured two hundred times, while both cores are
    busy."""
    program_ = compiled("calls", C_LOOP, "-O1", "-pthread")
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        reading, writing = os.pipe()
        job = Proc([program_], stdin=reading)
        wait_for("it is ready", lambda: "ready" in job.out(), 20)
        for _ in range(200):
            subprocess.run([DUMP, "--pid", str(job.pid), "--native"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.write(writing, b"end\n")
        code = job.wait(30)
        must(code == 0, job.out().splitlines()[-1])
    finally:
        for hog in hogs:
            hog.kill()
    return job.out().splitlines()[-1]
