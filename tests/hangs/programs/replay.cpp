// Reinforcement learning in C++: actors fill a replay buffer, a learner takes samples of it, and
// one thread owns the communicator.
//
//     replay ACCIDENT RANK [UPDATES]
//
// ACCIDENT begins on RANK at update 20: lock_order (two threads take two mutexes in opposite
// order), own_shared_lock, missed_notify, closed_gate, call_once, static_init, polls,
// timed_retries, semaphore, event_fd, message_queue, select, actor_throws, learner_throws,
// unwinds_into_join, terminate, alarm, rwlock, spin_lock, recursive, thread_of_queue (the thread
// that owns the communicator stops); or none.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <mqueue.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/eventfd.h>
#include <sys/select.h>
#include <unistd.h>

struct UniqueId { char bytes[128]; };
extern "C" int ncclGetUniqueId(UniqueId *), ncclCommInitRank(void **, int, UniqueId, int), ncclCommDestroy(void *);
extern "C" int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *), cudaSetDevice(int), cudaMalloc(void **, size_t);
extern "C" int ncclBroadcast(const void *, void *, size_t, int, int, void *, void *);
extern "C" int cudaStreamCreate(void **), cudaStreamSynchronize(void *);

using namespace std::chrono_literals;

static constexpr int accident_at = 20;

static void must(bool done, const char *what)
{
    if (!done)
        throw std::runtime_error(what);
}

// Experience of several actors; statistics have a lock of their own.
struct Replay {
    std::mutex samples_lock, statistics_lock;
    std::condition_variable more;
    std::vector<double> samples;
    long taken = 0;

    void add(double sample)
    {
        std::lock_guard<std::mutex> lock(samples_lock);
        samples.push_back(sample);
        more.notify_one();
    }

    double take()
    {
        std::unique_lock<std::mutex> lock(samples_lock);
        more.wait(lock, [this] { return !samples.empty(); });
        double sample = samples.back();
        samples.clear();
        taken++;
        return sample;
    }

    void evict(bool &ready)
    {
        std::lock_guard<std::mutex> samples_first(samples_lock);
        ready = true;
        std::this_thread::sleep_for(200ms);
        std::lock_guard<std::mutex> statistics_then(statistics_lock);
    }

    void summarize()
    {
        std::lock_guard<std::mutex> statistics_first(statistics_lock);
        std::this_thread::sleep_for(400ms);
        std::lock_guard<std::mutex> samples_then(samples_lock);
    }
};

// The only thread that calls the communication library.
class Courier {
public:
    Courier(int rank, int world) : thread_([=] { serve(rank, world); }) { thread_.detach(); }

    std::future<void> average() { return order(1); }
    std::future<void> stop() { return order(2); }
    std::future<void> stall() { return order(3); }

private:
    std::future<void> order(int what)
    {
        std::lock_guard<std::mutex> lock(mutex_);
        done_ = std::promise<void>();
        what_ = what;
        ordered_.notify_one();
        return done_.get_future();
    }

    void serve(int rank, int world)
    {
        cudaSetDevice(rank);
        UniqueId id;
        std::string path = std::string(getenv("XPU_EXAMPLE_RENDEZVOUS")) + "/replay.id", hidden = path + ".tmp";
        if (rank == 0) {
            ncclGetUniqueId(&id);
            FILE *file = fopen(hidden.c_str(), "wb");
            fwrite(&id, sizeof id, 1, file);
            fclose(file);
            rename(hidden.c_str(), path.c_str());
        }
        FILE *file;
        while (!(file = fopen(path.c_str(), "rb")))
            std::this_thread::sleep_for(5ms);
        must(fread(&id, sizeof id, 1, file) == 1, "the id");
        fclose(file);
        void *group, *stream, *weights;
        must(ncclCommInitRank(&group, world, id, rank) == 0, "the group");
        must(cudaStreamCreate(&stream) == 0 && cudaMalloc(&weights, 8192) == 0, "memory");
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex_);
            ordered_.wait(lock, [this] { return what_ != 0; });
            int what = std::exchange(what_, 0);
            if (what == 3)
                std::this_thread::sleep_for(100h);
            if (what == 2)
                break;
            ncclAllReduce(weights, weights, 2048, 7, 0, group, stream);
            ncclBroadcast(weights, weights, 16, 7, 0, group, stream);
            cudaStreamSynchronize(stream);
            done_.set_value();
        }
        ncclCommDestroy(group);
        done_.set_value();
    }

    std::mutex mutex_;
    std::condition_variable ordered_;
    std::promise<void> done_;
    int what_ = 0;
    std::thread thread_;
};

// Waits for its thread when it goes, whatever the thread does.
struct Joined {
    std::thread thread;
    ~Joined() { thread.join(); }
};

static int table_of(int depth);

static int first_table()
{
    static int table = table_of(1);
    return table;
}

// On the way back to the table that is being made.
static int table_of(int depth)
{
    std::promise<int> made;
    std::thread([&made] { made.set_value(first_table()); }).detach();
    return made.get_future().get() + depth;
}

static void accident(const std::string &name, Replay &replay, Courier &courier)
{
    if (name == "lock_order") {
        std::thread([&replay] { replay.summarize(); }).detach();
        std::this_thread::sleep_for(50ms);
        bool ready = false;
        replay.evict(ready);
        std::lock_guard<std::mutex> lock(replay.samples_lock);
    }
    if (name == "own_shared_lock") {
        std::shared_mutex policy;
        std::shared_lock<std::shared_mutex> reading(policy);
        std::unique_lock<std::shared_mutex> writing(policy);
    }
    if (name == "rwlock") {
        static pthread_rwlock_t table = PTHREAD_RWLOCK_INITIALIZER;
        std::thread([] { pthread_rwlock_wrlock(&table), pause(); }).detach();
        std::this_thread::sleep_for(50ms);
        pthread_rwlock_rdlock(&table);
    }
    if (name == "spin_lock") {
        pthread_spinlock_t lock;
        pthread_spin_init(&lock, 0);
        pthread_spin_lock(&lock);
        pthread_spin_lock(&lock);
    }
    if (name == "missed_notify") {
        // The word comes before anybody listens, and nobody looks at the flag.
        pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
        pthread_cond_t word = PTHREAD_COND_INITIALIZER;
        pthread_cond_signal(&word);
        pthread_mutex_lock(&mutex);
        pthread_cond_wait(&word, &mutex);
    }
    if (name == "closed_gate") {
        pthread_barrier_t gate;
        pthread_barrier_init(&gate, nullptr, 3);
        pthread_barrier_wait(&gate);
    }
    if (name == "call_once") {
        static std::once_flag once;
        std::call_once(once, [] { std::call_once(once, [] {}); });
    }
    if (name == "static_init")
        first_table();
    if (name == "polls")
        while (access("/nonexistent/weights.ready", F_OK) != 0)
            usleep(1000);
    if (name == "timed_retries") {
        std::timed_mutex taken;
        std::thread([&taken] { taken.lock(), pause(); }).detach();
        std::this_thread::sleep_for(50ms);
        while (!taken.try_lock_for(500ms))
            ;
    }
    if (name == "semaphore") {
        sem_t credits;
        sem_init(&credits, 0, 0);
        sem_wait(&credits);
    }
    if (name == "event_fd") {
        eventfd_t value;
        eventfd_read(eventfd(0, 0), &value);
    }
    if (name == "message_queue") {
        std::string queue = "/xpu-hangs-" + std::to_string(getpid());
        mqd_t orders = mq_open(queue.c_str(), O_CREAT | O_RDWR, 0600, nullptr);
        mq_unlink(queue.c_str());
        char order[8192];
        mq_receive(orders, order, sizeof order, nullptr);
    }
    if (name == "select") {
        int ends[2];
        must(pipe(ends) == 0, "a pipe");
        fd_set set;
        FD_ZERO(&set);
        FD_SET(ends[0], &set);
        select(ends[0] + 1, &set, nullptr, nullptr, nullptr);
    }
    if (name == "actor_throws")
        std::thread([] { throw std::out_of_range("no such action"); }).join();
    if (name == "learner_throws")
        std::async(std::launch::async, [] { throw std::out_of_range("no such state"); }).get();
    if (name == "unwinds_into_join") {
        Joined writer{std::thread([] { pause(); })};
        throw std::out_of_range("no such reward");
    }
    if (name == "terminate")
        std::terminate();
    if (name == "alarm") {
        alarm(1);
        pause();
    }
    if (name == "recursive") {
        std::function<long(int)> count = [&count](int depth) {
            long sum = 0;
            for (int child = 0; depth < 60 && child < 4; child++)
                sum += count(depth + 1);
            return sum + 1;
        };
        count(0);
    }
    if (name == "thread_of_queue")
        courier.stall().wait();
}

static void learn(int rank, int world, const std::string &what, int updates)
{
    Replay &replay = *new Replay;
    Courier &courier = *new Courier(rank, world);
    for (int actor = 0; actor < 2; actor++)
        std::thread([&replay, actor] {
            for (double reward = actor;; reward += 0.5) {
                std::this_thread::sleep_for(7ms);
                replay.add(reward);
            }
        }).detach();
    double sum = 0;
    for (int update = 0; update < updates; update++) {
        sum += replay.take();
        if (update == accident_at)
            accident(what, replay, courier);
        courier.average().get();
    }
    courier.stop().get();
}

int main(int argc, char **argv)
{
    int rank = atoi(getenv("RANK")), world = atoi(getenv("WORLD_SIZE"));
    std::string what = argc > 2 && atoi(argv[2]) == rank ? argv[1] : "none";
    try {
        learn(rank, world, what, argc > 3 ? atoi(argv[3]) : 1 << 20);
    } catch (const std::out_of_range &problem) {
        fprintf(stderr, "rank %d: %s\n", rank, problem.what());
        return 1;
    }
    // Its threads work on until the process ends.
    fflush(nullptr);
    _exit(0);
}
