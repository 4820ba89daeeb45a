"""python3 faults --list, or the name of one fault. Exit status: 0 its promise held, 1 it did not,
77 this machine cannot produce it."""

import json
import signal
import sys
import traceback

import kit

AREAS = ["jobs", "command", "limits", "sockets", "texts", "captures", "cluster", "kills", "files", "leaks"]


def on_one_line(said):
    return " ".join(str(said).split()) or "without a word"


def main():
    for area in AREAS:
        __import__(area)
    if sys.argv[1:] == ["--list"]:
        keys = ("area", "fault", "promise", "chance")
        table = [{"name": name, **{key: getattr(fault, key) for key in keys}} for name, fault in kit.FAULTS.items()]
        print(json.dumps(table))
        return 0
    kit.subreaper()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        print(on_one_line(kit.FAULTS[sys.argv[1]].function() or "as promised"))
        return 0
    except kit.Unable as reason:
        print(on_one_line(reason))
        return 77
    except kit.Broken as reason:
        print(on_one_line(reason))
    except Exception:
        traceback.print_exc()
        print(on_one_line(kit.tail(traceback.format_exc())))
    finally:
        kit.end_all()
    return 1


if __name__ == "__main__":
    sys.exit(main())
