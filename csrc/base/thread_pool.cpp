#include "thread_pool.h"

#include <sched.h>

#include "check.h"

namespace kvarn {

namespace {

// ticket = generation (24 bits) | count (20 bits) | next (20 bits): one word, so that a claim is valid for exactly
// the region it was read from.
constexpr uint64_t kFieldMask = (1u << 20) - 1;
constexpr int kSpinRounds = 4000;  // about 50 us, several times the gap between two regions of one step

uint64_t make_ticket(uint64_t generation, int count) { return generation << 40 | static_cast<uint64_t>(count) << 20; }
int ticket_count(uint64_t ticket) { return static_cast<int>(ticket >> 20 & kFieldMask); }
int ticket_next(uint64_t ticket) { return static_cast<int>(ticket & kFieldMask); }
bool has_work(uint64_t ticket) { return ticket_next(ticket) < ticket_count(ticket); }

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
    require(num_threads >= 1 && num_threads <= 1024, "threads must be 1 to 1024");
    for (int worker = 1; worker < num_threads; ++worker) workers_.emplace_back([this, worker] { work(worker); });
}

ThreadPool::~ThreadPool() {
    is_stopping_.store(true);
    alarm_.fetch_add(1);
    alarm_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void ThreadPool::run_shared(int count, Invoke invoke, void* context) {
    require(count <= static_cast<int>(kFieldMask), "too many tasks in one parallel region");
    invoke_ = invoke;
    context_ = context;
    num_done_.store(0, std::memory_order_relaxed);
    uint64_t generation = (ticket_.load(std::memory_order_relaxed) >> 40) + 1;
    ticket_.store(make_ticket(generation, count), std::memory_order_seq_cst);
    if (num_sleeping_.load(std::memory_order_seq_cst) > 0) {
        alarm_.fetch_add(1, std::memory_order_seq_cst);
        alarm_.notify_all();
    }
    do_tasks(0);
    for (int round = 0; num_done_.load(std::memory_order_acquire) < count; ++round) {
        if (round < kSpinRounds) pause_briefly();
        else sched_yield();
    }
}

bool ThreadPool::claim(uint64_t& ticket) {
    while (has_work(ticket)) {
        if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire))
            return true;
    }
    return false;
}

// A claimed but unfinished task keeps run_shared() waiting, so invoke_ and context_ cannot change under it.
void ThreadPool::do_tasks(int worker) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (claim(ticket)) {
        invoke_(context_, ticket_next(ticket), worker);
        num_done_.fetch_add(1, std::memory_order_acq_rel);
        ticket = ticket_.load(std::memory_order_acquire);
    }
}

void ThreadPool::work(int worker) {
    while (!is_stopping_.load(std::memory_order_relaxed)) {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        for (int round = 0; round < kSpinRounds && !has_work(ticket); ++round) {
            pause_briefly();
            ticket = ticket_.load(std::memory_order_acquire);
        }
        if (has_work(ticket)) do_tasks(worker);
        else sleep_until_work(ticket);
    }
}

void ThreadPool::sleep_until_work(uint64_t seen_ticket) {
    uint32_t alarm = alarm_.load(std::memory_order_seq_cst);
    num_sleeping_.fetch_add(1, std::memory_order_seq_cst);
    // Checked after announcing the sleep: a region published in between is seen here, or its caller sees us.
    if (ticket_.load(std::memory_order_seq_cst) == seen_ticket && !is_stopping_.load()) alarm_.wait(alarm);
    num_sleeping_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace kvarn
