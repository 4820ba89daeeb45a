"""Calls an exit plugin. Standard input has what has happened, as JSON."""

import builtins
import json
import sys
import types


def exception_class(name):
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, BaseException):
        return known
    return type(name.rpartition(".")[2], (Exception,), {"__module__": name.rpartition(".")[0] or "__main__"})


def instance(kind, message):
    try:
        return kind(message)
    except Exception:
        # A class that wants other arguments, such as UnicodeDecodeError.
        return type(kind.__name__, (Exception,), {})(message)


def raised(error, frames):
    """The error with a traceback of these frames: file, line and function, outermost first."""

    def call(index):
        path, line, function = frames[index]
        last = index + 1 == len(frames)
        source = "\n" * (max(line, 1) - 1) + ("raise error" if last else "call(index + 1)")
        code = compile(source, path, "exec")
        if hasattr(code, "replace"):
            code = code.replace(co_name=function)
        exec(code, {"error": error, "call": call, "index": index})

    try:
        call(0) if frames else None
    except BaseException:
        pass
    kept, entry = [], error.__traceback__
    files = {path for path, _, _ in frames}
    while entry is not None:
        if entry.tb_frame.f_code.co_filename in files:
            kept.append(entry)
        entry = entry.tb_next
    traceback = None
    for entry in reversed(kept):
        traceback = types.TracebackType(traceback, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return error.with_traceback(traceback)


def main():
    event = json.load(sys.stdin)
    if "exception" in event:
        name = "xpu_timer_parse_python_exception"
        about = event["exception"]
        kind = exception_class(about["type"])
        error = raised(instance(kind, about["message"]), about["frames"])
        arguments = (kind, error, error.__traceback__, event["about"])
    else:
        name = "xpu_timer_parse_cpp_exception"
        arguments = (event["signal"],)
    path = event["plugin"]
    plugin = {"__name__": "xpu_timer_plugin", "__file__": path}
    try:
        with open(path, encoding="utf-8") as file:
            exec(compile(file.read(), path, "exec"), plugin)
    except BaseException as error:
        print(f"{path} cannot be loaded: {type(error).__name__}: {error}", flush=True)
        return
    if name not in plugin:
        return
    try:
        plugin[name](*arguments)
    except BaseException as error:
        print(f"{path}: {name} raised {type(error).__name__}: {error}", flush=True)


main()
