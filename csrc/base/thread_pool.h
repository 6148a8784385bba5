// The threads of the process: one pool that shares out small tasks and tolerates a descheduled thread.
//
// The caller works too. Tasks are claimed from one 64-bit ticket (generation, limit, count, next), so a thread that is
// not running holds up nothing but what it has already claimed: one task, or of tasks that read neighbouring memory
// several, fewer towards the end. Idle workers spin briefly for the next region of the same step, then sleep. Each
// model has a ThreadTeam: so many of the pool's threads, from the first on. Which thread does a task never changes a
// result.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "ticks.h"
#include "turn.h"

namespace kvarn {

// How many tasks a thread claims at once: one, or half of its fair share of what is left, which are neighbours.
enum class Claim { one, neighbours };

class ThreadPool {
public:
    // The pool of this process, with at least num_threads threads. Growing waits for the step in flight.
    static ThreadPool& of_process(int num_threads);

    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Have at least num_threads threads; not while tasks run.
    void grow(int num_threads);

    // Run task(index, worker) for every index in [0, count) on the first `limit` threads; worker is in [0, limit).
    template <class Task>
    void run(int count, int limit, Claim claim, Task&& task) {
        if (count <= 0) return;
        if (count == 1 || limit <= 1) {
            for (int i = 0; i < count; ++i) {
                task(i, 0);
                num_alone_.store(num_alone_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
            }
            return;
        }
        using Plain = std::remove_reference_t<Task>;
        run_shared(
            count, limit, claim,
            [](void* context, int index, int worker) { (*static_cast<Plain*>(context))(index, worker); },
            const_cast<void*>(static_cast<const void*>(&task)));
    }

    // Tasks of the present region that have been claimed, and all that a caller did by itself.
    uint64_t num_claimed() const;

    // Engines of one process take turns: hold this for a whole step.
    Turn& turn() { return turn_; }

private:
    using Invoke = void (*)(void* context, int index, int worker);
    struct alignas(64) SleepFlag {
        std::atomic<uint32_t> is_asleep{0};
    };

    void run_shared(int count, int limit, Claim claim, Invoke invoke, void* context);
    void work(int worker);
    int claim(uint64_t& ticket, int worker);
    void do_tasks(int worker);
    void sleep_until_work(int worker, uint64_t seen_ticket);
    void wake(int worker);

    std::vector<std::thread> workers_;
    std::unique_ptr<SleepFlag[]> sleep_flags_;  // by worker, so that only those are woken that may work
    Turn turn_;
    Invoke invoke_ = nullptr;
    void* context_ = nullptr;
    std::atomic<Claim> claim_{Claim::one};  // of a region; a thread that sees the one before claims more or fewer
    std::atomic<uint64_t> num_alone_{0};    // tasks run without the workers; only who holds the turn writes
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int> num_done_{0};
    std::atomic<bool> is_stopping_{false};
};

// Where the time of a team's regions went, in ticks: from their begin to their end, and in tasks, by worker.
struct RegionTimes {
    struct alignas(64) Busy {
        uint64_t ticks = 0;
    };
    explicit RegionTimes(int num_threads) : busy(static_cast<size_t>(num_threads)) {}
    uint64_t in_regions = 0;
    std::vector<Busy> busy;
};

// The threads one model computes with. A timed team notes where their time goes, and its model has timed kernels.
class ThreadTeam {
public:
    explicit ThreadTeam(int num_threads, bool is_timed = false)
        : pool_(ThreadPool::of_process(num_threads)), num_threads_(num_threads),
          times_(is_timed ? std::make_unique<RegionTimes>(num_threads) : nullptr) {}

    int num_threads() const { return num_threads_; }
    const RegionTimes* times() const { return times_.get(); }  // null: not timed
    Turn& turn() { return pool_.turn(); }

    // Run task(index, worker) for every index in [0, count); worker is in [0, num_threads). Hold turn() meanwhile.
    template <class Task>
    void run(int count, Task&& task) {
        run(count, Claim::one, task);
    }
    template <class Task>
    void run(int count, Claim claim, Task&& task) {
        num_regions_.store(num_regions_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
        is_running_.store(true, std::memory_order_relaxed);
        if (times_ == nullptr) pool_.run(count, num_threads_, claim, task);
        else run_timed(count, claim, task);
        is_running_.store(false, std::memory_order_relaxed);
    }

    // A number that changes while this model computes: tells a long step from one that hangs.
    uint64_t progress() const {
        uint64_t claimed = is_running_.load(std::memory_order_relaxed) ? pool_.num_claimed() : 0;
        return (num_regions_.load(std::memory_order_relaxed) << 20) + claimed;
    }

private:
    template <class Task>
    void run_timed(int count, Claim claim, Task&& task) {
        const uint64_t begin = ticks();
        pool_.run(count, num_threads_, claim, [&](int index, int worker) {
            const uint64_t task_begin = ticks();
            task(index, worker);
            times_->busy[static_cast<size_t>(worker)].ticks += ticks() - task_begin;
        });
        times_->in_regions += ticks() - begin;
    }

    ThreadPool& pool_;
    const int num_threads_;
    const std::unique_ptr<RegionTimes> times_;
    std::atomic<uint64_t> num_regions_{0};  // only who holds the turn writes, so no lock prefix
    std::atomic<bool> is_running_{false};
};

}  // namespace kvarn
