// Training without Python: C++ on CUDA and NCCL, and a thread that loads.
//
//     native FAULT RANK [STEPS [TP]]
//
// TP consecutive ranks share a tensor-parallel group, the ranks at the same place of it a
// data-parallel one. FAULT begins on RANK in step 15: mutex, cond, read, fifo, spin, yield, sleep,
// join, future, waitpid, accept, poll, loader (its thread reads a pipe), loader_died, throws, segv,
// exits, stop, no_reduce (leaves one out); or none.
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <future>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern "C" {
typedef struct { char internal[128]; } ncclUniqueId;
int ncclGetUniqueId(ncclUniqueId *);
int ncclCommInitRank(void **, int, ncclUniqueId, int);
int ncclCommSplit(void *, int, int, void **, void *);
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclCommDestroy(void *);
int cudaSetDevice(int);
int cudaMalloc(void **, size_t);
int cudaStreamCreateWithFlags(void **, unsigned);
int cudaStreamSynchronize(void *);
}

namespace {

constexpr int kFaultStep = 15, kFloat = 7, kSum = 0;

void check(int code, const char *what)
{
    if (code != 0)
        throw std::runtime_error(std::string(what) + " failed with " + std::to_string(code));
}
#define CHECK(call) check(call, #call)

int environment(const char *name)
{
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

class Loader {
public:
    explicit Loader(std::string fault) : fault_(std::move(fault)), thread_([this] { fill(); }) { thread_.detach(); }

    int next_batch()
    {
        std::unique_lock<std::mutex> lock(mutex_);
        filled_.wait(lock, [this] { return !queue_.empty(); });
        int batch = queue_.front();
        queue_.pop_front();
        emptied_.notify_one();
        return batch;
    }

private:
    void fill()
    {
        for (int batch = 0;; batch++) {
            if (batch == kFaultStep && fault_ == "loader_died")
                return;
            read_shard(batch);
            std::unique_lock<std::mutex> lock(mutex_);
            emptied_.wait(lock, [this] { return queue_.size() < 2; });
            queue_.push_back(batch);
            filled_.notify_one();
        }
    }

    void read_shard(int batch)
    {
        if (batch != kFaultStep || fault_ != "loader")
            return;
        int ends[2];
        char byte;
        if (pipe(ends) == 0 && read(ends[0], &byte, 1) != 1)
            abort();
    }

    std::string fault_;
    std::mutex mutex_;
    std::condition_variable filled_, emptied_;
    std::deque<int> queue_;
    std::thread thread_;
};

class Optimizer {
public:
    void step()
    {
        std::lock_guard<std::mutex> lock(mutex_);
        updates_++;
    }

    // Calls `step`, which takes the lock that this has taken.
    void step_with_log()
    {
        std::lock_guard<std::mutex> lock(mutex_);
        step();
    }

private:
    std::mutex mutex_;
    long updates_ = 0;
};

std::atomic<bool> stopped{false};

void wait_for_flag(bool yields)
{
    while (!stopped.load(std::memory_order_relaxed))
        if (yields)
            sched_yield();
}

void wait_for_gate()
{
    std::mutex mutex;
    std::condition_variable gate;
    std::unique_lock<std::mutex> lock(mutex);
    gate.wait(lock, [] { return stopped.load(); });
}

void write_checkpoint()
{
    std::string path = std::string(getenv("TMPDIR")) + "/weights.bin." + std::to_string(getpid());
    std::string make = "mkfifo " + path;
    if (system(make.c_str()) != 0)
        abort();
    std::ofstream(path) << "weights";
}

void serve()
{
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    listen(listener, 1);
    accept(listener, nullptr, nullptr);
}

void begin(const std::string &fault, Optimizer &optimizer)
{
    if (fault == "mutex")
        optimizer.step_with_log();
    if (fault == "cond")
        wait_for_gate();
    if (fault == "read" && getchar() == EOF)
        for (int ends[2]; pipe(ends) == 0;)
            if (char byte; read(ends[0], &byte, 1) != 1)
                abort();
    if (fault == "fifo")
        write_checkpoint();
    if (fault == "spin" || fault == "yield")
        wait_for_flag(fault == "yield");
    if (fault == "sleep")
        for (;;)
            std::this_thread::sleep_for(std::chrono::hours(1));
    if (fault == "join") {
        std::thread writer([] { wait_for_gate(); });
        writer.join();
    }
    if (fault == "future")
        std::promise<int>().get_future().wait_for(std::chrono::hours(100));
    if (fault == "waitpid") {
        pid_t child = fork();
        if (child == 0)
            for (;;)
                pause();
        waitpid(child, nullptr, 0);
    }
    if (fault == "accept")
        serve();
    if (fault == "poll")
        poll(nullptr, 0, -1);
    if (fault == "throws")
        throw std::runtime_error("shape mismatch");
    if (fault == "segv")
        *static_cast<volatile int *>(nullptr) = 1;
    if (fault == "exits")
        exit(0);
    if (fault == "stop")
        raise(SIGSTOP);
}

ncclUniqueId exchange(int rank)
{
    ncclUniqueId id;
    std::string path = std::string(getenv("XPU_EXAMPLE_RENDEZVOUS")) + "/native.id";
    if (rank == 0) {
        CHECK(ncclGetUniqueId(&id));
        std::ofstream(path + ".new", std::ios::binary).write(id.internal, sizeof id.internal);
        rename((path + ".new").c_str(), path.c_str());
        return id;
    }
    for (;;) {
        std::ifstream file(path, std::ios::binary);
        if (file.read(id.internal, sizeof id.internal))
            return id;
        usleep(10000);
    }
}

void train(int rank, int world, const std::string &fault, int steps, int tp)
{
    CHECK(cudaSetDevice(environment("LOCAL_RANK")));
    void *all = nullptr, *tensor = nullptr, *data = nullptr, *stream = nullptr, *buffer = nullptr;
    CHECK(ncclCommInitRank(&all, world, exchange(rank), rank));
    CHECK(ncclCommSplit(all, rank / tp, rank, &tensor, nullptr));
    CHECK(ncclCommSplit(all, rank % tp, rank, &data, nullptr));
    CHECK(cudaStreamCreateWithFlags(&stream, 1));
    CHECK(cudaMalloc(&buffer, 4096));
    // Its thread runs to the end of the process, and so it has to live as long.
    Loader &loader = *new Loader(fault);
    Optimizer optimizer;
    for (int step = 0; step < steps; step++) {
        loader.next_batch();
        for (int layer = 0; layer < 3; layer++) {
            if (!(fault == "no_reduce" && step == kFaultStep && layer == 1))
                CHECK(ncclAllReduce(buffer, buffer, 256, kFloat, kSum, tensor, stream));
            if (step == kFaultStep && layer == 1)
                begin(fault, optimizer);
        }
        CHECK(ncclAllReduce(buffer, buffer, 1024, kFloat, kSum, data, stream));
        CHECK(cudaStreamSynchronize(stream));
        optimizer.step();
        usleep(15000);
    }
    for (void *communicator : {tensor, data, all})
        CHECK(ncclCommDestroy(communicator));
}

}  // namespace

int main(int argc, char **argv)
{
    int rank = environment("RANK"), world = environment("WORLD_SIZE");
    std::string fault = argc > 2 && atoi(argv[2]) == rank ? argv[1] : "none";
    train(rank, world, fault, argc > 3 ? atoi(argv[3]) : 1 << 20, argc > 4 ? atoi(argv[4]) : 1);
    return 0;
}
