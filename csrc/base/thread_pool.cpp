#include "thread_pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>

#include "check.h"

namespace kvarn {

namespace {

// ticket = generation (14 bits) | threads - 1 (10) | count (20) | next (20): one word, so that a claim is valid for
// exactly the region it was read from.
constexpr uint64_t kFieldMask = (1u << 20) - 1;
constexpr int kMaxThreads = 1024;
constexpr int kSpinRounds = 4000;  // about 50 us, several times the gap between two regions of one step

uint64_t make_ticket(uint64_t generation, int limit, int count) {
    return generation << 50 | static_cast<uint64_t>(limit - 1) << 40 | static_cast<uint64_t>(count) << 20;
}
int ticket_limit(uint64_t ticket) { return static_cast<int>(ticket >> 40 & (kMaxThreads - 1)) + 1; }
int ticket_count(uint64_t ticket) { return static_cast<int>(ticket >> 20 & kFieldMask); }
int ticket_next(uint64_t ticket) { return static_cast<int>(ticket & kFieldMask); }
bool has_work(uint64_t ticket, int worker) {
    return ticket_next(ticket) < ticket_count(ticket) && worker < ticket_limit(ticket);
}

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int claim_size(Claim claim, uint64_t ticket) {
    const int left = ticket_count(ticket) - ticket_next(ticket);
    return claim == Claim::one ? 1 : std::max(1, left / (2 * ticket_limit(ticket)));
}

}  // namespace

ThreadPool& ThreadPool::of_process(int num_threads) {
    static std::mutex making;
    static ThreadPool* pool = nullptr;
    static pid_t owner = 0;
    std::lock_guard lock(making);
    // Never destroyed: it lives as long as the process, and a forked child has the object but none of its threads.
    if (pool == nullptr || owner != getpid()) {
        pool = new ThreadPool(num_threads);
        owner = getpid();
    }
    std::lock_guard turn(pool->turn());
    pool->grow(num_threads);
    return *pool;
}

ThreadPool::ThreadPool(int num_threads) : sleep_flags_(new SleepFlag[kMaxThreads]) { grow(num_threads); }

ThreadPool::~ThreadPool() {
    is_stopping_.store(true);
    for (int worker = 1; worker < num_threads(); ++worker) wake(worker);
    for (auto& worker : workers_) worker.join();
}

void ThreadPool::grow(int num_threads) {
    require(num_threads >= 1 && num_threads <= kMaxThreads, "threads must be 1 to 1024");
    for (int worker = this->num_threads(); worker < num_threads; ++worker)
        workers_.emplace_back([this, worker] { work(worker); });
}

uint64_t ThreadPool::num_claimed() const {
    return (ticket_.load(std::memory_order_relaxed) & kFieldMask) + num_alone_.load(std::memory_order_relaxed);
}

void ThreadPool::run_shared(int count, int limit, Claim claim, Invoke invoke, void* context) {
    require(count <= static_cast<int>(kFieldMask), "too many tasks in one parallel region");
    invoke_ = invoke;
    context_ = context;
    claim_.store(claim, std::memory_order_relaxed);
    num_done_.store(0, std::memory_order_relaxed);
    uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 50) + 1;
    ticket_.store(make_ticket(generation, limit, count), std::memory_order_seq_cst);
    for (int worker = 1; worker < limit; ++worker) wake(worker);
    do_tasks(0);
    for (int round = 0; num_done_.load(std::memory_order_acquire) < count; ++round) {
        if (round < kSpinRounds) pause_briefly();
        else sched_yield();
    }
}

// The number of tasks claimed, from the ticket's next on.
int ThreadPool::claim(uint64_t& ticket, int worker) {
    while (has_work(ticket, worker)) {
        const int size = claim_size(claim_.load(std::memory_order_relaxed), ticket);
        if (ticket_.compare_exchange_weak(ticket, ticket + static_cast<uint64_t>(size), std::memory_order_acq_rel,
                                          std::memory_order_acquire))
            return size;
    }
    return 0;
}

// A claimed but unfinished task keeps run_shared() waiting, so invoke_ and context_ cannot change under it.
void ThreadPool::do_tasks(int worker) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (const int size = claim(ticket, worker)) {
        const int first = ticket_next(ticket);
        for (int index = first; index < first + size; ++index) invoke_(context_, index, worker);
        num_done_.fetch_add(size, std::memory_order_acq_rel);
        ticket = ticket_.load(std::memory_order_acquire);
    }
}

void ThreadPool::work(int worker) {
    while (!is_stopping_.load(std::memory_order_relaxed)) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        for (int round = 0; round < kSpinRounds && !has_work(ticket, worker); ++round) {
            pause_briefly();
            ticket = ticket_.load(std::memory_order_acquire);
        }
        if (has_work(ticket, worker)) do_tasks(worker);
        else sleep_until_work(worker, ticket);
    }
}

void ThreadPool::sleep_until_work(int worker, uint64_t seen_ticket) {
    std::atomic<uint32_t>& is_asleep = sleep_flags_[static_cast<size_t>(worker)].is_asleep;
    is_asleep.store(1, std::memory_order_seq_cst);
    // Checked after announcing the sleep: a region published in between is seen here, or its caller sees us.
    if (ticket_.load(std::memory_order_seq_cst) == seen_ticket && !is_stopping_.load()) is_asleep.wait(1);
    is_asleep.store(0, std::memory_order_relaxed);
}

void ThreadPool::wake(int worker) {
    std::atomic<uint32_t>& is_asleep = sleep_flags_[static_cast<size_t>(worker)].is_asleep;
    if (is_asleep.load(std::memory_order_seq_cst) == 0) return;
    is_asleep.store(0, std::memory_order_seq_cst);
    is_asleep.notify_one();
}

}  // namespace kvarn
