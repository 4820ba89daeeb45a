import ctypes
import threading
import time

arrived = threading.Semaphore(0)
never = threading.Event()


def wait_for_batch():
    arrived.release()
    never.wait()  # waits


def batches():
    call = lambda: wait_for_batch()  # in a lambda
    yield call()  # in a generator


def load():
    for batch in batches():  # in a loop
        return batch


def ask_for_the_lock():
    arrived.release()
    while True:
        time.sleep(0.001)


def hold_the_lock():
    print("ready", flush=True)
    ctypes.PyDLL(None).sleep(1000000)  # holds


threading.Thread(target=load, name="loader-1", daemon=True).start()
threading.Thread(target=ask_for_the_lock, daemon=True).start()
arrived.acquire()
arrived.acquire()
hold_the_lock()  # in the module
