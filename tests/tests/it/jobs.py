"""Jobs of one name, started in different ways. Each job is FOLDER:WORLD:HANGS; its last rank stays
away from a step if it hangs.

    jobs.py shell JOB…      the ranks of all jobs in turn, as a shell would start them
    jobs.py agent JOB       the ranks of one job below this process
    jobs.py spawn JOB…      by multiprocessing: the environment names no rank
    jobs.py lightning JOB   this process is rank 0, and sets MASTER_PORT before it starts the others
    jobs.py arguments JOB…  as shell, but each rank gets its number as an argument
    jobs.py daemons JOB…    each rank loses its parents before it begins
    jobs.py rank JOB [RANK] one rank
"""

import multiprocessing
import os
import subprocess
import sys
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../examples"))


def stay_away():
    time.sleep(600)


def note(folder, name, value):
    path = os.path.join(folder, name)
    with open(path + ".part", "w") as file:
        file.write(str(value))
    os.rename(path + ".part", path)


def work(job, rank):
    import cuda

    folder, world, hangs = job.split(":")
    os.environ["XPU_EXAMPLE_RENDEZVOUS"] = folder
    note(folder, f"pid-{rank}", os.getpid())
    cuda.set_device(rank)
    communicator = cuda.Communicator.create("world", rank, int(world))
    stream, buffer = cuda.Stream(), cuda.Buffer(64)
    for step in range(1 << 30):
        if step == 20 and rank == int(world) - 1 and hangs == "1":
            stay_away()
        communicator.all_reduce(buffer, stream)
        stream.synchronize()
        note(folder, f"step-{rank}", step)
        time.sleep(0.02)


def start(job, rank, **environment):
    command = [sys.executable, os.path.abspath(__file__), "rank", job]
    return subprocess.Popen(command, env=dict(os.environ, RANK=str(rank), **environment))


def claims(job):
    """The world in the environment of a rank; JOBS_CLAIM gives a larger one."""
    return dict(
        {"WORLD_SIZE": str(size(job))},
        **dict(claim.split("=") for claim in os.environ.get("JOBS_CLAIM", "").split()),
    )


def size(job):
    return int(job.split(":")[1])


def orphan(job, rank):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(size(job)))
            os.execv(sys.executable, [sys.executable, os.path.abspath(__file__), "rank", job])
        os._exit(0)
    os.wait()


def main():
    mode, *jobs = sys.argv[1:]
    if mode == "rank":
        return work(jobs[0], int(jobs[1] if len(jobs) > 1 else os.environ["RANK"]))
    processes = []
    if mode == "lightning":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(20000 + os.getpid() % 10000))
        for rank in range(1, size(jobs[0])):
            command = [sys.executable, os.path.abspath(__file__), "rank", jobs[0], str(rank)]
            processes.append(subprocess.Popen(command, env=dict(os.environ, LOCAL_RANK=str(rank))))
        return work(jobs[0], 0)
    for rank in range(max(map(size, jobs))):
        for job in jobs:
            if mode == "spawn":
                process = multiprocessing.get_context("spawn").Process(target=work, args=(job, rank))
                process.start()
                processes.append(process)
            elif mode == "arguments":
                command = [sys.executable, os.path.abspath(__file__), "rank", job, str(rank)]
                processes.append(subprocess.Popen(command))
            elif mode == "daemons":
                orphan(job, rank)
            else:
                processes.append(start(job, rank, **claims(job)))
    if mode == "daemons":
        time.sleep(600)
    for process in processes:
        process.join() if mode == "spawn" else process.wait()


if __name__ == "__main__":
    main()
