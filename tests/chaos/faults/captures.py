"""Unusual processes and files. A capture and the viewer end in time, report what is missing, and
change nothing."""

import functools
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

from kit import (
    CHANCE, DIR, DUMP, VIEWER, Proc, Unable, add, alive, as_user, compiled, in_shell, must,
    nobody_is_stopped, plain_text, promises, rank6, status, tail, wait_for,
)

ENDS = "it ends within ten seconds with a documented status and the reason, and the process continues"


def dump(*arguments, seconds=20, statuses=(0, 1), **options):
    proc = Proc([DUMP, *arguments], **options)
    code = proc.wait(seconds)
    must(code in statuses, f"status {code}: {tail(proc.err())}")
    must(code == 0 or proc.err().strip() or proc.out().strip(), "it fails without a word")
    plain_text(proc.out() + proc.err(), "xpu_timer_dump")
    return proc


def sleeper(*words, **options):
    return Proc(words or ["sleep", "1000"], **options)


def gone():
    child = subprocess.Popen(["true"])
    child.wait()
    return child.pid


def zombie():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    wait_for("it is a zombie", lambda: not alive(pid), 10)
    return pid


def stopped():
    proc = sleeper()
    proc.signal(signal.SIGSTOP)
    return proc.pid


def deep():
    source = "int main(void);\nstatic int down(int n) { volatile char pad[64]; pad[0] = n; return n ? down(n - 1) + pad[0] : (pause(), 0); }\nint main(void) { return down(50000); }"
    return sleeper(compiled("deep", source, "-O0")).pid


def broken_stack():
    source = "int main(void) { __asm__ volatile(\"mov $0x1234, %rbp; mov $34, %eax; sub $0x100, %rsp; syscall\"); }"
    return sleeper(compiled("smashed", source, "-fomit-frame-pointer", "-fno-asynchronous-unwind-tables")).pid


def no_stack():
    source = "int main(void) { __asm__ volatile(\"xor %rsp, %rsp; 1: mov $34, %eax; syscall; jmp 1b\"); }"
    return sleeper(compiled("nostack", source)).pid


def many_threads():
    source = "#include <pthread.h>\n#include <unistd.h>\nvoid *w(void *x) { for (;;) pause(); }\nint main(void) { pthread_attr_t a; pthread_attr_init(&a); pthread_attr_setstacksize(&a, 65536); for (int i = 0; i < 1500; i++) { pthread_t t; pthread_create(&t, &a, w, 0); } for (;;) pause(); }"
    pid = sleeper(compiled("crowd", source, "-pthread")).pid
    wait_for("its threads run", lambda: status(pid, "Threads") > 1000, 20)
    return pid


def many_mappings():
    source = "#include <sys/mman.h>\n#include <unistd.h>\nint main(void) { for (int i = 0; i < 50000; i++) mmap(0, 4096, i & 1 ? PROT_READ : PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); write(1, \"x\", 1); for (;;) pause(); }"
    proc = sleeper(compiled("mapped", source))
    wait_for("its mappings are made", proc.out, 30)
    return proc.pid


def deleted():
    path = compiled("deleted", "int main(void) { for (;;) pause(); }")
    proc = sleeper(path)
    time.sleep(0.1)
    path.unlink()
    return proc.pid


def vforked():
    source = "#include <unistd.h>\nint main(void) { if (vfork() == 0) { sleep(1000); _exit(0); } }"
    return sleeper(compiled("vforked", source)).pid


def traced():
    if not shutil.which("strace"):
        raise Unable("no strace")
    pid = sleeper().pid
    sleeper("strace", "-o", "/dev/null", "-p", str(pid))
    time.sleep(0.5)
    return pid


def spinning():
    return sleeper(sys.executable, "-c", "while True: pass").pid


def strict():
    source = "#include <sys/prctl.h>\n#include <unistd.h>\nint main(void) { char c; prctl(22, 1); read(0, &c, 1); }"
    reading, _writing = os.pipe()
    return sleeper(compiled("strict", source), stdin=reading).pid


PROCESSES = {
    "gone": ("is gone", gone), "zombie": ("is a zombie", zombie), "stopped": ("is stopped", stopped),
    "init": ("is pid 1", lambda: 1), "kernel_thread": ("is a kernel thread", lambda: 2), "itself": ("is its own parent", os.getpid),
    "deep": ("is fifty thousand frames deep", deep), "broken_stack": ("has a broken frame chain", broken_stack),
    "no_stack": ("has no stack at all", no_stack), "many_threads": ("has fifteen hundred threads", many_threads),
    "many_mappings": ("has fifty thousand mappings", many_mappings), "deleted": ("runs a deleted program", deleted),
    "vforked": ("waits for its vfork child", vforked), "traced": ("is traced by strace", traced),
    "spinning": ("never sleeps", spinning), "strict": ("is in the strict seccomp mode", strict),
}


def captured(name):
    pid = PROCESSES[name][1]()
    before = alive(pid)
    dump("--pid", pid)
    must(alive(pid) == before, "the process is gone")
    if name not in ("stopped", "traced", "zombie", "gone"):
        nobody_is_stopped([pid])


for _name, _row in PROCESSES.items():
    add(f"capture_{_name}", f"xpu_timer_dump captures a process that {_row[0]}.", ENDS, functools.partial(captured, _name))

USAGES = {"word": ["--pid", "x"], "negative": ["--pid", "-5"], "huge": ["--pid", "99999999999999"], "nothing": [], "unknown": ["--frobnicate"],
          "zero": ["--pid", "0"]}


def usage(name):
    dump(*USAGES[name], statuses=(1, 2))


for _name in USAGES:
    add(f"capture_usage_{_name}", f"xpu_timer_dump is called with {' '.join(USAGES[_name]) or 'no option'}.", "it ends with status 2, or 1, and one line with the reason",
        functools.partial(usage, _name))


@promises("it ends with status 1 and a line with the reason")
def capture_into_a_full_disk():
    """The output of xpu_timer_dump goes to /dev/full."""
    pid = sleeper().pid
    with open("/dev/full", "wb") as full:
        proc = subprocess.run([DUMP, "--pid", str(pid)], stdout=full, stderr=subprocess.PIPE, text=True, timeout=20)
    must(proc.returncode == 1 and proc.stderr.strip(), f"status {proc.returncode}: {proc.stderr}")


@promises("it ends quietly")
def capture_into_a_closed_pipe():
    """The reader of xpu_timer_dump's output ends at once."""
    pid = many_threads()
    proc = subprocess.run(f"{DUMP} --pid {pid} | true; echo ${{PIPESTATUS[0]}}", shell=True, executable="/bin/bash", capture_output=True, text=True, timeout=30)
    must("panick" not in proc.stderr, tail(proc.stderr))


@promises("it ends with status 1 and names the missing permission")
def capture_of_another_user():
    """An ordinary user captures a process of root."""
    DIR.chmod(0o755)
    copy = DIR / "dump"
    shutil.copy(DUMP, copy)
    pid = sleeper().pid
    proc = Proc([*as_user(), copy, "--pid", str(pid)])
    must(proc.wait(20) == 1 and "ermission" in proc.err() + proc.out(), tail(proc.err() + proc.out()))


@promises(ENDS)
def capture_with_perf_map_fifo():
    """/tmp/perf-PID.map is a FIFO that nobody writes, then an endless device, then a sparse file of
    8 GB."""
    source = "#include <stdint.h>\n#include <string.h>\n#include <sys/mman.h>\n#include <unistd.h>\nint main(void) { unsigned char code[] = {0xb8, 34, 0, 0, 0, 0x0f, 0x05, 0xeb, 0xf7}; void *p = mmap(0, 4096, 7, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); memcpy(p, code, sizeof code); ((void (*)(void))p)(); }"
    pid = sleeper(compiled("jit", source)).pid
    path = Path(f"/tmp/perf-{pid}.map")
    try:
        os.mkfifo(path)
        dump("--pid", pid)
        path.unlink()
        path.symlink_to("/dev/zero")
        dump("--pid", pid)
        path.unlink()
        with open(path, "wb") as file:
            file.truncate(1 << 33)
        dump("--pid", pid)
    finally:
        path.unlink(missing_ok=True)
    must(alive(pid), "the process is gone")


LIBRARY = "#include <unistd.h>\nvoid waits(void) { for (;;) pause(); }\nchar large[1 << 20] = {1};"
LOADER = "#include <dlfcn.h>\nint main(int n, char **v) { void *l = dlopen(v[1], RTLD_NOW); ((void (*)(void))dlsym(l, \"waits\"))(); }"


@promises("the capture may lack a name, but does not fail")
def capture_while_a_library_shrinks():
    """A library is truncated and rewritten again and again while it is read."""
    library = compiled("lib.so", LIBRARY, "-shared", "-fPIC", "-g")
    copy = DIR / "copy.so"
    shutil.copy(library, copy)
    pids = []
    for _ in range(4):
        pids.append(sleeper(compiled("loader", LOADER, "-ldl"), copy).pid)
    time.sleep(0.3)
    stop = threading.Event()
    text = copy.read_bytes()

    def replaces():
        while not stop.is_set():
            with open(copy, "r+b") as file:
                file.truncate(0)
                file.write(text)

    thread = threading.Thread(target=replaces)
    thread.start()
    try:
        for _ in range(30):
            proc = Proc([DUMP, *[word for pid in pids for word in ("--pid", str(pid))]])
            code = proc.wait(20)
            must(code in (0, 1), f"status {code}: {tail(proc.err())}")
    finally:
        stop.set()
        thread.join()


def section_bomb(library, name, content, flags=()):
    subprocess.run(["objcopy", "--add-section", f"{name}={content}", *flags, library], check=True)


@promises("memory stays below 1 GB, and the capture ends in time")
def capture_with_a_bomb_of_debug_data():
    """A library has a small .gnu_debugdata section that unpacks to 8 GB."""
    library = compiled("lib.so", LIBRARY, "-shared", "-fPIC")
    bomb = DIR / "bomb.xz"
    subprocess.run(f"head -c 2G /dev/zero | xz -0 -T0 > {bomb}; cat {bomb} {bomb} {bomb} {bomb} > {bomb}.all", shell=True, check=True)
    section_bomb(library, ".gnu_debugdata", f"{bomb}.all")
    bounded(sleeper(compiled("loader", LOADER, "-ldl"), library).pid)


def bounded(pid, *options, limit_kb=1 << 20):
    time.sleep(0.3)
    proc = Proc(["sh", "-c", f"ulimit -v 3000000; exec {DUMP} --pid {pid} {' '.join(options)}"])
    most = 0
    while not proc.ended():
        most = max(most, status(proc.pid, "VmHWM"))
        must(time.monotonic() - proc.begun < 30, "it has not ended within 30 s")
        time.sleep(0.02)
    must(most < limit_kb, f"it has {most} kB")
    must(proc.wait(1) in (0, 1), f"status {proc.popen.returncode}: {tail(proc.err())}")
    return f"at most {most} kB"


@promises("memory stays below 1 GB, and the capture ends in time")
def capture_with_a_bomb_of_a_section():
    """A library claims that its compressed debug sections unpack to 2^62 bytes."""
    library = compiled("lib.so", LIBRARY, "-shared", "-fPIC", "-g", "-gz=zlib")
    text = bytearray(library.read_bytes())
    sections, size, count = struct.unpack_from("<Q", text, 40)[0], *struct.unpack_from("<HH", text, 58)
    changed = 0
    for index in range(count):
        at = sections + index * size
        flags, offset = struct.unpack_from("<Q", text, at + 8)[0], struct.unpack_from("<Q", text, at + 24)[0]
        if flags & 0x800:
            struct.pack_into("<Q", text, offset + 8, 1 << 62)
            changed += 1
    if not changed:
        raise Unable("gcc compresses no section here")
    library.write_bytes(bytes(text))
    return bounded(sleeper(compiled("loader", LOADER, "-ldl"), library).pid)


# A program that pauses in a function with one DWARF unit. The placeholders are the entries below
# the function and the table sizes.
UNIT = """
void stuck(void); int main(void) { stuck(); }
__asm__(
"stuck: push %%rbx; call pause@PLT; pop %%rbx; ret; .Lhigh: .globl stuck; .type stuck,@function; .size stuck,.-stuck\\n"
".section .debug_abbrev,\\"\\",@progbits\\n"
".uleb128 1, 0x11; .byte 1; .uleb128 0x11, 1, 0x12, 7, 0x10, 0x17, 0, 0\\n"
".uleb128 2, 0x2e; .byte 1; .uleb128 0x11, 1, 0x12, 7, 0, 0\\n"
".uleb128 3, 0x1d; .byte 1; .uleb128 0x31, 0x13, 0, 0\\n"
".uleb128 4, 0x2e; .byte 0; .uleb128 0x55, 0x17, 0, 0, 0\\n"
".section .debug_info,\\"\\",@progbits\\n"
".Lunit: .long .Lend - . - 4; .value 4; .long .debug_abbrev; .byte 8\\n"
".uleb128 1; .quad stuck, .Lhigh - stuck; .long .Llines\\n"
".Lfunction: .uleb128 2; .quad stuck, .Lhigh - stuck\\n"
"%s"
".Lend:\\n"
".section .debug_line,\\"\\",@progbits\\n"
".Llines: .long .Lrows_end - . - 4; .value 4; .long .Lrows - . - 4; .byte 1, 1, 1, 0xfb, 14, 13, 0, 1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 1, 0\\n"
".asciz \\"file.c\\"; .byte 0, 0, 0, 0\\n"
".Lrows: .byte 0, 9, 2; .quad stuck; .fill %d, 1, 33; .byte 0, 1, 1\\n"
".Lrows_end: .section .debug_ranges,\\"\\",@progbits\\n"
".Lranges: .rept %d; .quad 1, 2; .endr; .quad 0, 0; .text\\n");
"""
DEEP = ".rept 200000; .uleb128 3; .long .Lfunction - .Lunit; .endr; .fill 200002, 1, 0\\n"
SHARED = ".byte 0; .rept 100000; .uleb128 4; .long .Lranges; .endr; .byte 0\\n"
UNITS = {
    "nested_functions": ("200,000 functions are inlined into each other", (DEEP, 10, 1)),
    "shared_ranges": ("100,000 functions refer to one list of 100,000 ranges", (SHARED, 10, 100_000)),
    "rows_of_lines": ("one unit has a hundred million rows of lines", (".byte 0, 0\\n", 100_000_000, 1)),
}


def of_a_unit(name):
    program = compiled("unit", UNIT % UNITS[name][1])
    return bounded(sleeper(program).pid, "--lines", "5", limit_kb=256 << 10)


for _name, _row in UNITS.items():
    add(f"capture_with_{_name}", f"In the DWARF of a program, {_row[0]}.", "memory stays below 256 MB, and the capture ends in time",
        functools.partial(of_a_unit, _name))


@promises("memory stays below 1 GB, and the capture ends in time")
def capture_with_a_name_that_doubles():
    """A function has a mangled name of one kilobyte that demangles to more than 2^60 bytes."""
    parts = "".join(f"S0_IS{chr(part + (48 if part < 10 else 55))}_S{chr(part + (48 if part < 10 else 55))}_E" for part in range(1, 36))
    further = "".join(f"S0_IS1{digit}_S1{digit}_E" for digit in "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    source = "#include <unistd.h>\nvoid name(void) __asm__(\"_Z1fI1aIiiE%sEvv\"); void name(void) { for (;;) pause(); } int main(void) { name(); }"
    return bounded(sleeper(compiled("named", source % (parts + further))).pid)


@promises("it ends in time with a documented status, and every process continues", chance=True)
def capture_of_damaged_libraries():
    """Forty processes load libraries with random bytes in section headers, symbols and debug data.
    """
    whole = compiled("lib.so", LIBRARY, "-shared", "-fPIC", "-g").read_bytes()
    loader = compiled("loader", LOADER, "-ldl")
    pids = []
    # The program headers and the segments that they map stay intact, because the system's loader
    # reads them.
    sections = struct.unpack_from("<Q", whole, 40)[0]
    unmapped = max(struct.unpack_from("<Q", whole, 64 + 56 * index + 8)[0] + struct.unpack_from("<Q", whole, 64 + 56 * index + 32)[0]
                   for index in range(struct.unpack_from("<H", whole, 56)[0]) if struct.unpack_from("<I", whole, 64 + 56 * index)[0] == 1)
    for index in range(40):
        text = bytearray(whole)
        for _ in range(CHANCE.choice([1, 5, 200])):
            place = CHANCE.choice([CHANCE.randrange(unmapped, len(text)), CHANCE.randrange(sections, len(text)), CHANCE.randrange(58, 64)])
            text[place] = CHANCE.choice([0, 255, CHANCE.randrange(256)])
        copy = DIR / f"damaged{index}.so"
        copy.write_bytes(bytes(text))
        pids.append(sleeper(loader, copy).pid)
    time.sleep(0.5)
    loaded = [pid for pid in pids if alive(pid)]
    must(len(loaded) > 20, "the loader refuses them")
    proc = Proc([DUMP, *[word for pid in loaded for word in ("--pid", str(pid))], "--timeout", "20"])
    code = proc.wait(40)
    must(code in (0, 1), f"status {code}: {tail(proc.err())}")
    must(all(map(alive, loaded)), "a process is gone")
    return f"{len(loaded)} captured"


FOLDERS = {
    "empty": ("is empty", lambda folder: None),
    "missing": ("is missing", lambda folder: folder.rmdir()),
    "garbage": ("contains random files", lambda folder: [(folder / f"{i:05}-00020.stacktrace").write_bytes(os.urandom(3000)) for i in range(20)]),
    "fifo": ("contains a FIFO among its files", lambda folder: (real(folder), os.mkfifo(folder / "00009-00010.stacktrace"))),
    "device": ("contains a link to /dev/zero among its files", lambda folder: (real(folder), (folder / "00009-00010.stacktrace").symlink_to("/dev/zero"))),
    "folder": ("contains a folder with the name of a dump file", lambda folder: (real(folder), (folder / "00009-00010.stacktrace").mkdir())),
    "loop": ("contains a link to itself", lambda folder: (real(folder), (folder / "00009-00010.stacktrace").symlink_to(folder / "00009-00010.stacktrace"))),
    "huge": ("contains a sparse file of 20 GB", lambda folder: (real(folder), os.truncate(touched(folder / "00009-00010.stacktrace"), 20 << 30))),
    "unreadable": ("contains a file of zeros", lambda folder: (real(folder), (folder / "00009-00010.stacktrace").write_bytes(bytes(100000)))),
    "cut": ("contains truncated files", lambda folder: (real(folder), [os.truncate(path, path.stat().st_size // 2) for path in folder.iterdir()])),
    "not_utf8": ("contains files whose names are not UTF-8", lambda folder: (real(folder), Path(os.fsdecode(bytes(folder) + b"/\xff\xfe.stacktrace")).write_bytes(b"x"))),
    "names": ("contains files of ranks in the billions", lambda folder: [(folder / f"{i}-4000000000.stacktrace").write_bytes(next(real_files())) for i in (0, 3999999999, 77)]),
    "many": ("contains five thousand files", lambda folder: [(folder / f"{i:05}-05000.stacktrace").write_bytes(b"") for i in range(5000)]),
}


def touched(path):
    path.touch()
    return path


def real_files():
    while True:
        yield from rank6().values()


def real(folder):
    for name, dump in list(rank6().items())[:4]:
        (folder / name).write_bytes(dump)


def viewed(name):
    folder = DIR / "folder"
    folder.mkdir()
    FOLDERS[name][1](folder)
    proc = Proc(["sh", "-c", f"ulimit -v 4000000; exec {VIEWER} --path {folder}"])
    code = proc.wait(60)
    must(code in (0, 1), f"status {code}: {tail(proc.err())}")
    must("panick" not in proc.err(), tail(proc.err()))
    must(code == 0 or proc.err().strip(), "it fails without a word")
    plain_text(proc.out() + proc.err(), "the viewer")
    if name in ("fifo", "device", "folder", "loop", "huge", "unreadable", "not_utf8", "many"):
        must(name == "many" or (folder / "py_stack").exists(), f"the other ranks are not drawn: {tail(proc.err())}")
    return f"status {code}"


for _name, _row in FOLDERS.items():
    add(f"view_{_name}", f"The viewer's folder {_row[0]}.", "it ends in time with status 0 or 1, names what it leaves out, and draws the other ranks",
        functools.partial(viewed, _name))


@promises("one line says that --output is needed; with --output, the pictures are written there")
def view_read_only():
    """The viewer's folder is read-only."""
    folder = DIR / "folder"
    folder.mkdir()
    real(folder)
    read_only = in_shell(f"mount --bind {folder} {folder}; mount -o remount,bind,ro {folder}", "--mount")
    proc = Proc([*read_only, VIEWER, "--path", folder])
    must(proc.wait(40) == 1 and "--output" in proc.err(), f"{proc.popen.returncode}: {proc.err()}")
    output = DIR / "output"
    proc = Proc([*read_only, VIEWER, "--path", folder, "--output", output])
    must(proc.wait(40) == 0 and (output / "py_stack").exists(), proc.err())
